//! Bulk streams over TCP, by sockets of ours or of the kernel.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay::net::{Net, NetConfig, TcpListener, TcpStream};
use forebay_device::Device;
use forebay_rx::CpuId;
use rustix::net::sockopt::set_tcp_congestion;
use serde_json::json;

use super::{OwnArgs, ready, rpc, serve};
use crate::failure::Failure;
use crate::output;

/// Bytes of a call.
const CALL_BYTES: usize = 128 << 10;

/// Sends on all connections until the program is ended.
pub(super) fn send(args: &OwnArgs) -> Result<(), Failure> {
    pin(args)?;
    let to = SocketAddr::from((args.to, args.port));
    if args.rpc.is_kernel() {
        let threads: Vec<_> = (0..args.rpc.connections())
            .map(|_| thread::spawn(move || write_on(connect_with_cubic(to))))
            .collect();
        ready()?;
        threads.into_iter().for_each(|thread| drop(thread.join()));
        return Ok(());
    }
    let mut devices = rpc::devices(args, "tcp")?;
    let (net, engine) = over(args, &mut devices)?;
    for _ in 0..args.rpc.connections() {
        let net = net.clone();
        thread::spawn(move || write_on(TcpStream::connect(&net, to)));
    }
    ready()?;
    engine.run()?;
    Ok(())
}

/// Keeps all threads on the first CPU, so that each end has one.
fn pin(args: &OwnArgs) -> Result<(), Failure> {
    let Some(&cpu) = args.cpus.first() else { return Ok(()) };
    forebay_sys::pin_to(CpuId(cpu)).map_err(|error| {
        Failure::usage(format!("--cpus {cpu}: {error}"), "give a CPU that this process may use")
    })
}

/// Connects by a socket of the kernel. Its default may be another congestion control, which a network
/// namespace cannot change.
fn connect_with_cubic(to: SocketAddr) -> io::Result<std::net::TcpStream> {
    let stream = std::net::TcpStream::connect(to)?;
    set_tcp_congestion(&stream, "cubic")?;
    Ok(stream)
}

fn write_on(stream: io::Result<impl Write>) {
    let block = vec![7; CALL_BYTES];
    match stream {
        // The receiver ends the stream when it has measured.
        Ok(mut stream) => while stream.write_all(&block).is_ok() {},
        Err(error) => eprintln!("connecting: {error}"),
    }
}

/// Receives on all connections, and prints the bytes of the window.
pub(super) fn receive(args: &OwnArgs) -> Result<(), Failure> {
    pin(args)?;
    let refused = |error: io::Error| {
        Failure::usage(format!("port {}: {error}", args.port), "give another --port")
    };
    let local = SocketAddr::from((Ipv4Addr::UNSPECIFIED, args.port));
    let received = Arc::new(AtomicU64::new(0));
    report(args, Arc::clone(&received));
    let connections = args.rpc.connections();
    if args.rpc.is_kernel() {
        let listener = std::net::TcpListener::bind(local).map_err(refused)?;
        ready()?;
        accept_all(connections, &received, || Ok(listener.accept()?.0)).map_err(refused)?;
        loop {
            thread::park();
        }
    }
    let mut devices = rpc::devices(args, &format!("tcp:{}", args.port))?;
    let (net, engine) = over(args, &mut devices)?;
    let listener = TcpListener::bind(&net, local).map_err(refused)?;
    thread::spawn(move || accept_all(connections, &received, || Ok(listener.accept()?.0)));
    ready()?;
    engine.run()?;
    Ok(())
}

fn over(args: &OwnArgs, devices: &mut [Device]) -> Result<(Net, forebay::net::NetEngine), Failure> {
    let net_config = NetConfig { addresses: args.rpc.addresses(), ..NetConfig::default() };
    Ok(Net::over(&serve::tcp_config(args), &net_config, devices)?)
}

/// Starts a thread for each connection, which adds what it reads to `received`.
fn accept_all<S: Read + Send + 'static>(
    connections: u16,
    received: &Arc<AtomicU64>,
    accept: impl Fn() -> io::Result<S>,
) -> io::Result<()> {
    for _ in 0..connections {
        let (mut stream, received) = (accept()?, Arc::clone(received));
        thread::spawn(move || {
            let mut room = vec![0; CALL_BYTES];
            while let Ok(read @ 1..) = stream.read(&mut room) {
                received.fetch_add(read as u64, Ordering::Relaxed);
            }
        });
    }
    Ok(())
}

/// Starts a thread that measures the window, and then ends the program.
fn report(args: &OwnArgs, received: Arc<AtomicU64>) {
    let [warm_up, window] = [args.warm_up, args.window].map(Duration::from_millis);
    thread::spawn(move || {
        while received.load(Ordering::Relaxed) == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(warm_up);
        let (before, began) = (received.load(Ordering::Relaxed), Instant::now());
        thread::sleep(window);
        let bytes = received.load(Ordering::Relaxed) - before;
        let ns = u64::try_from(began.elapsed().as_nanos()).ok();
        let result = json!({
            "bytes": bytes,
            "ns": ns,
            "bytes_of_run": received.load(Ordering::Relaxed),
            "cpu_ns": forebay_sys::process_cpu_ns(),
        });
        // Ignored: without a reader nobody waits for the result.
        let _ = output::print(&format!("{result}\n"));
        std::process::exit(0);
    });
}
