//! Listeners that share an address.

use std::io::ErrorKind;
use std::net::{TcpListener as KernelListener, TcpStream as KernelStream};
use std::thread;

use forebay::net::{NetConfig, TcpListener, TcpStream};
use forebay_device::Via;
use forebay_engine::Config;
use forebay_rx::steer::SpreadPolicy;

use crate::sockets::rig::{OURS, OURS_V6, Running, over_tap, over_tap_by};
use crate::sockets::shared::Hosts;
use crate::tcp::Trial;
use crate::tcp::streams::{echo, exchange};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_31_listener_for_each_cpu", one_per_cpu),
    ("tcp_31_kernels_port_is_shared", beside_the_kernel),
    ("tcp_31_ipv4_listeners_come_first", families),
];

/// Connections of the test with a listener for each CPU.
const CONNECTIONS: usize = 64;

/// Each CPU's listener gets the connections that begin there; closing one leaves the others.
fn one_per_cpu() {
    let config = Config { spread: SpreadPolicy::Always, ..Config::live() };
    let (net, engine) = over_tap_by(&config, &NetConfig::default());
    let at = format!("{OURS}:7");
    let listen = |&cpu| net.socket().reuse_port_on(cpu).listen(&at, 128).unwrap();
    let mut listeners: Vec<_> = net.cpus().iter().map(listen).collect();
    let running = Running::begin(engine);
    let connect =
        || -> Vec<_> { (0..CONNECTIONS).map(|_| KernelStream::connect(&at).unwrap()).collect() };
    let clients = connect();
    listeners.iter().for_each(|listener| listener.set_nonblocking(true));
    let shares = take(&listeners);
    assert!(shares.iter().all(|share| !share.is_empty()), "{shares:?}");
    serve(&clients, shares.into_iter().flatten().collect());

    drop(listeners.pop());
    let clients = connect();
    serve(&clients, take(&listeners).into_iter().flatten().collect());
    drop((net, listeners));
    assert_eq!(running.end().frames_away, 0);
}

/// Accepts all connections, each from the listener that has it.
fn take(listeners: &[TcpListener]) -> Vec<Vec<TcpStream>> {
    let mut shares: Vec<_> = listeners.iter().map(|_| Vec::new()).collect();
    while shares.iter().map(Vec::len).sum::<usize>() < CONNECTIONS {
        for (listener, share) in listeners.iter().zip(&mut shares) {
            match listener.accept() {
                Ok((stream, _)) => share.push(stream),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        thread::yield_now();
    }
    shares
}

/// Echoes on all connections, which come from these clients.
fn serve(clients: &[KernelStream], servers: Vec<TcpStream>) {
    let servers: Vec<_> = servers
        .into_iter()
        .map(|stream| {
            stream.set_nonblocking(false);
            thread::spawn(move || echo(&stream))
        })
        .collect();
    clients.iter().for_each(|client| exchange(client, 1_000));
    servers.into_iter().for_each(|server| server.join().unwrap());
}

/// Listeners that share a port share its reservation in the kernel, and keep others from it.
fn beside_the_kernel() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, "tcp:80");
    hosts.near.run(|| {
        let listen = || net.socket().reuse_port().listen("0.0.0.0:80", 128);
        let in_use = |error: std::io::Error| assert_eq!(error.kind(), ErrorKind::AddrInUse);
        let first = listen().unwrap();
        let second = listen().unwrap();
        in_use(TcpListener::bind(&net, "0.0.0.0:80").unwrap_err());
        in_use(TcpListener::bind(&net, "10.9.0.1:80").unwrap_err());
        in_use(KernelListener::bind("0.0.0.0:80").unwrap_err());
        drop(first);
        in_use(KernelListener::bind("0.0.0.0:80").unwrap_err());
        let running = Running::begin(engine);
        thread::scope(|scope| {
            scope.spawn(|| echo(&second.accept().unwrap().0));
            exchange(&hosts.far.run(|| KernelStream::connect("10.9.0.1:80").unwrap()), 100_000);
        });
        drop((net, second));
        assert_eq!(running.end().frames_away, 0);
        KernelListener::bind("0.0.0.0:80").unwrap();
    });
}

/// An IPv6 listener gets IPv4 connections only as long as no IPv4 one shares the port.
fn families() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listen = |at: &str| net.socket().reuse_port().listen(at, 128).unwrap();
    let v6 = listen("[::]:7");
    let v4 = listen("0.0.0.0:7");
    let refused = net.socket().reuse_port().v6_only(true).listen("[::]:8", 1).unwrap();
    let running = Running::begin(engine);
    let connect = |at: String| KernelStream::connect(at).unwrap();
    for _ in 0..20 {
        let client = connect(format!("{OURS}:7"));
        assert_eq!(v4.accept().unwrap().1, client.local_addr().unwrap());
        let client = connect(format!("[{OURS_V6}]:7"));
        assert_eq!(v6.accept().unwrap().1, client.local_addr().unwrap());
    }
    drop(v4);
    let client = connect(format!("{OURS}:7"));
    assert_eq!(v6.accept().unwrap().1.port(), client.local_addr().unwrap().port());
    connect(format!("[{OURS_V6}]:8"));
    let error = KernelStream::connect(format!("{OURS}:8")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    drop((net, v6, refused));
    running.end();
}
