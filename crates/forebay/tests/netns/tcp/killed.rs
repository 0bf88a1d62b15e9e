//! Processes that are killed at either end (`SIGKILL`).

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream as KernelStream;
use std::process::{Child, Stdio};
use std::thread;

use forebay::net::{Net, NetConfig, TcpListener, TcpStream};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::{Config, CpuThread};
use forebay_testkit::namespaces::cable::Namespace;

use crate::parts::{self, Part};
use crate::sockets::rig::Running;
use crate::sockets::shared::Hosts;
use crate::tcp::Trial;
use crate::tcp::streams::{LONG, echo};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_18_killed_server_resets_clients", killed_servers),
    ("tcp_18_killed_client_ends_connections", killed_client),
];

pub(crate) const PARTS: &[Part] = &[
    Part { name: "serve over af_packet", descriptors: 1024, play: || serve(Via::AfPacket) },
    Part { name: "serve over af_xdp", descriptors: 1024, play: || serve(Via::AfXdp) },
    Part { name: "connect", descriptors: 1024, play: connect },
];

/// Connections to the process that is killed.
const CONNECTIONS: usize = 20;

/// Starts a part in a namespace, and waits until it says that it is ready.
fn start(part: &str, inside: &Namespace) -> Child {
    let mut child = inside.run(|| parts::command(part).stdout(Stdio::piped()).spawn().unwrap());
    let mut said = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "ready\n");
    child
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Once our process is gone, its connections are nobody's: the kernel resets them. The next process
/// finds the device and the port free.
fn killed_servers() {
    for server in ["serve over af_packet", "serve over af_xdp"] {
        let hosts = Hosts::new();
        for _ in 0..2 {
            let server = start(server, &hosts.near);
            let connect = |_| hosts.far.run(|| KernelStream::connect("10.9.0.1:80").unwrap());
            let mut clients: Vec<_> = (0..CONNECTIONS).map(connect).collect();
            for client in &mut clients {
                client.set_read_timeout(Some(LONG)).unwrap();
                client.write_all(b"hello").unwrap();
                client.read_exact(&mut [0; 5]).unwrap();
            }
            kill(server);
            for mut client in clients {
                client.write_all(b"more").unwrap();
                let error = client.read(&mut [0; 5]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            }
        }
    }
}

/// Echoes all connections until it is killed.
fn serve(via: Via) {
    let mut config = DeviceConfig::new("ska", via);
    config.take = "tcp:80".parse().unwrap();
    let mut devices = [Device::open(&config).unwrap()];
    let (net, engine) = Net::over(&Config::live(), &NetConfig::default(), &mut devices).unwrap();
    let listener = TcpListener::bind(&net, "10.9.0.1:80").unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            thread::spawn(move || echo(&stream));
        }
    });
    println!("ready");
    engine.run_with(CpuThread::turn_to_the_end).unwrap();
}

/// The kernel ends the connections of a program that is killed: by a FIN, or by a reset if there are
/// bytes that the program has not read. Both leave nothing at our end.
fn killed_client() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, "tcp:80");
    let listener = hosts.near.run(|| TcpListener::bind(&net, "10.9.0.1:80").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let client = start("connect", &hosts.far);
    let mut streams: Vec<TcpStream> =
        (0..CONNECTIONS).map(|_| listener.accept().unwrap().0).collect();
    for (number, stream) in streams.iter_mut().enumerate() {
        stream.set_read_timeout(Some(LONG)).unwrap();
        if number % 2 == 0 {
            stream.write_all(b"never read").unwrap();
            while stream.info().unwrap().unacked_bytes + stream.info().unwrap().unsent_bytes > 0 {
                thread::yield_now();
            }
        }
    }
    kill(client);
    for (number, mut stream) in streams.into_iter().enumerate() {
        let end = stream.read(&mut [0; 10]).map_err(|error| error.kind());
        let expected = if number % 2 == 0 { Err(ErrorKind::ConnectionReset) } else { Ok(0) };
        assert_eq!(end, expected, "connection {number}");
    }
    drop((net, listener));
    assert_eq!(running.end().frames_away, 0);
}

/// Holds connections until it is killed.
fn connect() {
    let connect = |_| KernelStream::connect("10.9.0.1:80").unwrap();
    let _streams: Vec<_> = (0..CONNECTIONS).map(connect).collect();
    println!("ready");
    loop {
        thread::park();
    }
}
