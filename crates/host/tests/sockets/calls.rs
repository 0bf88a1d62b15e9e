//! What the calls of `std` do, ours do.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use forebay::net::{Datagrams, Net, NetConfig, UdpSocket};
use rustix::event::{PollFd, PollFlags, poll};

use crate::Trial;
use crate::rig::{OURS, Running, client, over_tap};

pub(crate) const TRIALS: &[Trial] = &[
    ("calls_wait_as_they_are_told_to", waits),
    ("a_descriptor_is_readable_when_there_is_something_to_read", readable),
    ("what_is_peeked_at_is_read_again_and_what_does_not_fit_is_cut_off", peeked),
    ("a_connected_socket_hears_nobody_else", connected),
    ("segments_go_out_as_datagrams_and_merged_ones_come_in_as_one", segments),
    ("readers_are_told_when_the_engine_has_ended", ended),
    ("a_group_that_was_joined_is_heard_by_all_who_joined", groups),
];

/// A socket on port 7, the engine at work, and the kernel's socket that talks to it.
struct Pair {
    net: Net,
    ours: UdpSocket,
    kernels: std::net::UdpSocket,
    running: Running,
}

impl Pair {
    fn new() -> Self {
        let (net, engine) = over_tap(&NetConfig::default());
        let ours = net.bind(format!("{OURS}:7")).unwrap();
        let running = Running::begin(engine);
        let kernels = client(ours.local_addr());
        Self { net, ours, kernels, running }
    }

    fn end(self) {
        let mut outcome = self.running.end();
        drop(self.ours);
        assert_eq!(self.net.frames_away(&mut outcome), 0);
    }
}

fn waits() {
    let pair = Pair::new();
    let mut buffer = [0; 100];
    pair.ours.set_nonblocking(true);
    assert_eq!(pair.ours.recv(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
    pair.ours.set_nonblocking(false);
    pair.ours.set_read_timeout(Some(Duration::from_millis(1)));
    assert_eq!(pair.ours.recv(&mut buffer).unwrap_err().kind(), ErrorKind::TimedOut);
    pair.ours.set_read_timeout(None);
    let reader = pair.ours.clone();
    let waiting = thread::spawn(move || reader.recv_from(&mut [0; 100]).unwrap());
    thread::sleep(Duration::from_millis(20));
    pair.kernels.send(b"hello").unwrap();
    assert_eq!(waiting.join().unwrap(), (5, from(&pair)));
    pair.end();
}

fn from(pair: &Pair) -> SocketAddr {
    pair.kernels.local_addr().unwrap()
}

fn readable() {
    let pair = Pair::new();
    pair.ours.set_nonblocking(true);
    let mut buffer = [0; 4];
    for number in 0..1000u32 {
        assert_eq!(pair.ours.recv(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
        pair.kernels.send(&number.to_be_bytes()).unwrap();
        let mut polled = [PollFd::new(&pair.ours, PollFlags::IN)];
        assert_eq!(poll(&mut polled, None).unwrap(), 1);
        assert_eq!(pair.ours.recv(&mut buffer).unwrap(), 4);
        assert_eq!(buffer, number.to_be_bytes());
    }
    pair.end();
}

fn peeked() {
    let pair = Pair::new();
    let mut buffer = [0; 100];
    pair.kernels.send(b"first").unwrap();
    pair.kernels.send(b"second").unwrap();
    for _ in 0..3 {
        assert_eq!(pair.ours.peek_from(&mut buffer).unwrap(), (5, from(&pair)));
        assert_eq!(&buffer[..5], b"first");
    }
    assert_eq!(pair.ours.recv(&mut buffer[..2]).unwrap(), 2);
    let (len, _) = pair.ours.peek_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], b"second");
    // Peeked at, and never read: it goes home as the socket is closed.
    pair.end();
}

fn connected() {
    let pair = Pair::new();
    let stranger = client(pair.ours.local_addr());
    pair.ours.connect(from(&pair)).unwrap();
    let mut buffer = [0; 100];
    for number in 0..100u32 {
        // The stranger is told that nobody is there for him.
        let _ = stranger.send(b"me too");
        pair.kernels.send(&number.to_be_bytes()).unwrap();
        assert_eq!(pair.ours.recv(&mut buffer).unwrap(), 4);
        assert_eq!(buffer[..4], number.to_be_bytes());
        pair.ours.send(b"heard").unwrap();
        assert_eq!(pair.kernels.recv(&mut buffer).unwrap(), 5);
    }
    pair.end();
}

fn segments() {
    let pair = Pair::new();
    let payload: Vec<u8> = (0..10_050u32).map(|at| u8::try_from(at % 249).unwrap()).collect();
    let mut buffer = [0; 2000];
    // Few packets wait for a neighbour that is still being looked for.
    pair.ours.send_to(b"hello", from(&pair)).unwrap();
    pair.kernels.recv(&mut buffer).unwrap();
    let sent = pair.ours.send_gso(&payload, 100, from(&pair)).unwrap();
    assert_eq!(sent, payload.len());
    for segment in payload.chunks(100) {
        let len = pair.kernels.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], segment);
    }
    pair.end();
}

fn ended() {
    let pair = Pair::new();
    for number in 0..10u8 {
        pair.kernels.send(&[number]).unwrap();
    }
    let Pair { net, ours, running, .. } = pair;
    let reader = ours.clone();
    let mut batch = Datagrams::new();
    let mut seen = Vec::new();
    ours.recv_batch(&mut batch, 1).unwrap();
    seen.extend(batch.iter().map(|datagram| datagram.payload()[0]));
    let waiting = thread::spawn(move || {
        let (mut batch, mut seen) = (Datagrams::new(), Vec::new());
        let error = loop {
            match reader.recv_batch(&mut batch, 3) {
                Ok(_) => seen.extend(batch.iter().map(|datagram| datagram.payload()[0])),
                Err(error) => break error,
            }
        };
        (seen, error.kind())
    });
    let mut outcome = running.end();
    let (rest, why) = waiting.join().unwrap();
    seen.extend(rest);
    assert_eq!((seen, why), ((0..10).collect(), ErrorKind::BrokenPipe));
    drop((batch, ours));
    assert_eq!(net.frames_away(&mut outcome), 0);
}

fn groups() {
    let (net, engine) = over_tap(&NetConfig::default());
    let group = "239.1.2.3:4000".parse::<SocketAddr>().unwrap();
    let sockets: Vec<_> =
        (0..3).map(|_| net.socket().reuse_port().bind("0.0.0.0:4000").unwrap()).collect();
    sockets.iter().for_each(|socket| socket.join_multicast(group.ip()).unwrap());
    assert!(sockets[0].join_multicast(OURS.parse().unwrap()).is_err());
    let running = Running::begin(engine);
    let kernels = std::net::UdpSocket::bind("10.9.0.1:0").unwrap();
    crate::namespaces::ip("route add 239.0.0.0/8 dev skt");
    for number in 0..20u8 {
        kernels.send_to(&[number; 30], group).unwrap();
        for socket in &sockets {
            let mut buffer = [0; 100];
            assert_eq!(socket.recv(&mut buffer).unwrap(), 30);
            assert_eq!(buffer[..30], [number; 30]);
        }
    }
    drop(sockets);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}
