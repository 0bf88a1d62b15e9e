//! Bulk streams over TCP, by sockets of ours or of the kernel.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay::net::{Net, NetConfig, TcpListener, TcpStream};
use forebay_device::Device;
use forebay_engine::Config;
use forebay_sys as sys;
use serde_json::json;

use super::{OwnArgs, ready, rpc, serve};
use crate::failure::Failure;
use crate::output;

/// Bytes of a call.
const CALL_BYTES: usize = 128 << 10;

/// Sends on all connections until the program is ended.
pub(super) fn send(args: &OwnArgs) -> Result<(), Failure> {
    let to = SocketAddr::from((args.to, args.port));
    if args.rpc.is_kernel() {
        let threads: Vec<_> = (0..args.rpc.connections())
            .map(|_| thread::spawn(move || write_on(std::net::TcpStream::connect(to))))
            .collect();
        ready()?;
        threads.into_iter().for_each(|thread| drop(thread.join()));
        return Ok(());
    }
    let mut devices = rpc::devices(args, "tcp")?;
    let (net, engine) = over(args, &serve::config(args), &mut devices)?;
    for _ in 0..args.rpc.connections() {
        let net = net.clone();
        thread::spawn(move || write_on(TcpStream::connect(&net, to)));
    }
    ready()?;
    engine.run()?;
    Ok(())
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
    let refused = |error: io::Error| {
        Failure::usage(format!("port {}: {error}", args.port), "give another --port")
    };
    let local = SocketAddr::from((Ipv4Addr::UNSPECIFIED, args.port));
    let counts: Arc<[AtomicU64]> = (0..args.rpc.connections()).map(|_| AtomicU64::new(0)).collect();
    report(args, Arc::clone(&counts));
    if args.rpc.is_kernel() {
        let listener = std::net::TcpListener::bind(local).map_err(refused)?;
        ready()?;
        accept_all(&counts, || listener.accept().map(|(stream, _)| stream)).map_err(refused)?;
        loop {
            thread::park();
        }
    }
    let mut devices = rpc::devices(args, &format!("tcp:{}", args.port))?;
    let (net, engine) = over(args, &serve::config(args), &mut devices)?;
    let listener = TcpListener::bind(&net, local).map_err(refused)?;
    thread::spawn(move || accept_all(&counts, || listener.accept().map(|(stream, _)| stream)));
    ready()?;
    engine.run()?;
    Ok(())
}

fn over(
    args: &OwnArgs,
    config: &Config,
    devices: &mut [Device],
) -> Result<(Net, forebay::net::NetEngine), Failure> {
    let net_config = NetConfig { addresses: args.rpc.addresses(), ..NetConfig::default() };
    Ok(Net::over(config, &net_config, devices)?)
}

/// Starts a thread for each connection, which counts what it reads.
fn accept_all<S: Read + Send + 'static>(
    counts: &Arc<[AtomicU64]>,
    accept: impl Fn() -> io::Result<S>,
) -> io::Result<()> {
    for at in 0..counts.len() {
        let (mut stream, counts) = (accept()?, Arc::clone(counts));
        thread::spawn(move || {
            let mut room = vec![0; CALL_BYTES];
            while let Ok(read @ 1..) = stream.read(&mut room) {
                counts[at].fetch_add(read as u64, Ordering::Relaxed);
            }
        });
    }
    Ok(())
}

/// Starts a thread that measures the window, and then ends the program.
fn report(args: &OwnArgs, counts: Arc<[AtomicU64]>) {
    let [warm_up, window] = [args.warm_up, args.window].map(Duration::from_millis);
    let look =
        move || -> Vec<u64> { counts.iter().map(|count| count.load(Ordering::Relaxed)).collect() };
    thread::spawn(move || {
        while look().iter().sum::<u64>() == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(warm_up);
        let (before, began) = (look(), Instant::now());
        thread::sleep(window);
        let after = look();
        let ns = u64::try_from(began.elapsed().as_nanos()).ok();
        let bytes: u64 = after.iter().sum::<u64>() - before.iter().sum::<u64>();
        let result = json!({
            "bytes": bytes, "ns": ns,
            "bytes_of_all": after.iter().sum::<u64>(),
            "cpu_ns": sys::process_cpu_ns(),
        });
        // Ignored: without a reader nobody waits for the result.
        let _ = output::print(&format!("{result}\n"));
        std::process::exit(0);
    });
}
