//! Data in a SYN, from the kernel and to it (RFC 7413).

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener as KernelListener, TcpStream as KernelStream};
use std::os::fd::AsRawFd;
use std::thread;

use forebay::net::{NetConfig, TcpListener, TcpStream};
use forebay_stack::tcp::{FastOpen, TcpConfig};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt,
};

use super::streams::LONG;
use crate::sockets::rig::{OURS, OURS_V6, Running, over_tap};
use crate::tcp::Trial;

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_49_kernels_syn_brings_data", accepted),
    // The other way.
    ("tcp_50_kernel_takes_data_of_syn", connected),
];

/// Switches Fast Open of the kernel's clients and of all its listeners on, and returns settings with ours on.
fn switch_on() -> NetConfig {
    fs::write("/proc/sys/net/ipv4/tcp_fastopen", "1027").unwrap();
    let fast_open = FastOpen::CLIENT.with(FastOpen::SERVER);
    NetConfig { tcp: TcpConfig { fast_open, ..NetConfig::TCP }, ..NetConfig::default() }
}

/// Connection of the kernel's, whose SYN waits for data if the cookie is known.
fn kernels(to: SocketAddr) -> KernelStream {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Stream, SockFlag::empty(), None).unwrap();
    setsockopt(&socket, sockopt::TcpFastOpenConnect, &true).unwrap();
    connect(socket.as_raw_fd(), &SockaddrStorage::from(to)).unwrap();
    KernelStream::from(socket)
}

fn accepted() {
    let (net, engine) = over_tap(&switch_on());
    let listener = TcpListener::bind(&net, "[::]:7").unwrap();
    listener.set_fast_open(|options| options.queue = 16).unwrap();
    let running = Running::begin(engine);
    for address in [format!("{OURS}:7"), format!("[{OURS_V6}]:7")] {
        let to: SocketAddr = address.parse().unwrap();
        for round in 0..3 {
            let client = thread::spawn(move || {
                let mut stream = kernels(to);
                stream.set_read_timeout(Some(LONG)).unwrap();
                stream.write_all(b"question").unwrap();
                let mut answer = [0; 6];
                stream.read_exact(&mut answer).unwrap();
                assert_eq!(&answer, b"answer");
            });
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            let mut question = [0; 8];
            stream.read_exact(&mut question).unwrap();
            assert_eq!(&question, b"question");
            stream.write_all(b"answer").unwrap();
            assert_eq!(stream.info().unwrap().syn_data, round > 0, "{to}, round {round}");
            client.join().unwrap();
        }
    }
    drop((net, listener));
    assert_eq!(running.end().frames_away, 0);
}

fn connected() {
    let (net, engine) = over_tap(&switch_on());
    let running = Running::begin(engine);
    for address in ["10.9.0.1:0", "[fd09::1]:0"] {
        let kernel = KernelListener::bind(address).unwrap();
        let to = kernel.local_addr().unwrap();
        for round in 0..3 {
            let (mut stream, written) =
                TcpStream::connect_with_data(&net, to, b"question").unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            assert_eq!(written, if round > 0 { 8 } else { 0 }, "{to}, round {round}");
            assert_eq!(stream.info().unwrap().syn_data, round > 0);
            stream.write_all(&b"question"[written..]).unwrap();
            let (mut server, _) = kernel.accept().unwrap();
            let mut question = [0; 8];
            server.read_exact(&mut question).unwrap();
            assert_eq!(&question, b"question");
            server.write_all(b"answer").unwrap();
            let mut answer = [0; 6];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"answer");
        }
    }
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}
