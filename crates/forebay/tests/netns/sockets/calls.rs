//! Socket calls, compared with those of `std`.

use std::fs::{self, DirEntry};
use std::io::ErrorKind::{self, InvalidInput};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use forebay::net::{Datagrams, Net, NetConfig, UdpSocket};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};
use rustix::event::{PollFd, PollFlags, poll};

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, OURS_V6, Running, client, over_tap};

pub(crate) const TRIALS: &[Trial] = &[
    ("calls_wait_as_configured", waits),
    ("descriptor_readable_iff_data", readable),
    ("descriptor_edges_follow_arrivals", edges),
    ("all_readers_of_socket_are_woken", several),
    ("sends_wait_for_memory_as_configured", sends_wait),
    ("connected_socket_hears_port_unreachable", refused),
    ("peek_rereads_excess_truncated", peeked),
    ("a_connected_socket_hears_nobody_else", connected),
    ("segments_leave_as_datagrams_merged_arrive", segments),
    ("udp_15_gso_leaves_as_one_packet", one_packet),
    ("promise_13_gso_segments_are_read_singly", read_singly),
    ("readers_learn_of_engine_end", ended),
    ("joined_group_reaches_all_members", groups),
];

/// A socket on port 7, its running engine, and the kernel's socket connected to it.
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
    assert_eq!(pair.ours.set_read_timeout(Some(Duration::ZERO)).unwrap_err().kind(), InvalidInput);
    assert_eq!(pair.ours.set_write_timeout(Some(Duration::ZERO)).unwrap_err().kind(), InvalidInput);
    pair.ours.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    assert_eq!(pair.ours.recv(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
    pair.ours.set_read_timeout(None).unwrap();
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

/// Readiness of a descriptor, readable and writable, after waiting at most `wait`.
fn polled(socket: &UdpSocket, for_what: PollFlags, wait: Option<Duration>) -> PollFlags {
    let mut polled = [PollFd::new(socket, for_what)];
    let wait = wait.map(|wait| wait.try_into().unwrap());
    poll(&mut polled, wait.as_ref()).unwrap();
    polled[0].revents()
}

fn readable() {
    let pair = Pair::new();
    pair.ours.set_nonblocking(true);
    let mut buffer = [0; 4];
    // A datagram that arrives before the descriptor is created.
    pair.kernels.send(b"0000").unwrap();
    while pair.ours.counts().queued == 0 {
        thread::yield_now();
    }
    assert_eq!(polled(&pair.ours, PollFlags::IN, None), PollFlags::IN);
    assert_eq!(pair.ours.recv(&mut buffer).unwrap(), 4);
    for number in 0..1000u32 {
        let (both, now) = (PollFlags::IN | PollFlags::OUT, Some(Duration::ZERO));
        assert_eq!(polled(&pair.ours, both, now), PollFlags::OUT, "all was read");
        if number % 3 == 0 {
            assert_eq!(pair.ours.recv(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        let count = number % 4 + 1;
        for _ in 0..count {
            pair.kernels.send(&number.to_be_bytes()).unwrap();
        }
        for left in (0..count).rev() {
            assert_eq!(polled(&pair.ours, PollFlags::IN, None), PollFlags::IN, "{left} left");
            assert_eq!(pair.ours.recv(&mut buffer).unwrap(), 4);
            assert_eq!(buffer, number.to_be_bytes());
        }
    }
    let Pair { ours, running, .. } = pair;
    running.end();
    assert_eq!(polled(&ours, PollFlags::IN, None), PollFlags::IN, "at the end, too");
    assert_eq!(ours.recv(&mut buffer).unwrap_err().kind(), ErrorKind::BrokenPipe);
}

/// Edge-triggered polling: every arrival after a call that returned `WouldBlock` is reported.
fn edges() {
    use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
    let pair = Pair::new();
    pair.ours.set_nonblocking(true);
    let poller = epoll::create(CreateFlags::CLOEXEC).unwrap();
    epoll::add(&poller, &pair.ours, EventData::new_u64(7), EventFlags::IN | EventFlags::ET)
        .unwrap();
    let mut buffer = [0; 4];
    for number in 0..1000u32 {
        pair.kernels.send(&number.to_be_bytes()).unwrap();
        let mut seen = 0;
        while seen == 0 {
            let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
            assert_eq!(epoll::wait(&poller, &mut events, None).unwrap(), 1);
            while pair.ours.recv(&mut buffer).is_ok() {
                seen += 1;
            }
        }
        assert_eq!((seen, buffer), (1, number.to_be_bytes()));
    }
    pair.end();
}

/// Several readers of one socket: none sleeps while a datagram is available, and all learn of the
/// end.
fn several() {
    const EACH: u32 = 300;
    let pair = Pair::new();
    let read = Arc::new(AtomicU32::new(0));
    let readers: Vec<_> = (0..4)
        .map(|number| {
            let (socket, read) = (pair.ours.clone(), Arc::clone(&read));
            thread::spawn(move || {
                if number == 3 {
                    // This reader reads some datagrams and then stops.
                    socket.recv(&mut [0; 4]).unwrap();
                    read.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                if number == 2 {
                    socket.as_fd();
                }
                let error = loop {
                    match socket.recv(&mut [0; 4]) {
                        Ok(_) => read.fetch_add(1, Ordering::Relaxed),
                        Err(error) => break error,
                    };
                };
                assert_eq!(error.kind(), ErrorKind::BrokenPipe);
            })
        })
        .collect();
    for round in 1..=EACH {
        for _ in 0..round % 5 + 1 {
            pair.kernels.send(b"some").unwrap();
        }
        let sent = (1..=round).map(|round| round % 5 + 1).sum::<u32>();
        while read.load(Ordering::Relaxed) < sent {
            thread::yield_now();
        }
    }
    let Pair { ours, running, .. } = pair;
    running.end();
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    drop(ours);
}

/// While packets wait for neighbours that do not answer, no packet memory is free: sends wait or
/// return `WouldBlock`, and the descriptor becomes writable once memory is free.
fn sends_wait() {
    let config = NetConfig { send_frames: 16, ..NetConfig::default() };
    let (net, engine) = over_tap(&config);
    let ours = net.bind(format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let kernels = client(ours.local_addr());
    // Each CPU has its own packet memory.
    forebay_sys::pin_to(net.cpus()[0]).unwrap();
    let fill = || {
        let places = (50..250u8).flat_map(|host| [host; 3]).map(|host| format!("10.9.0.{host}:9"));
        places
            .map(|to| ours.send_to(b"anybody?", to))
            .find_map(Result::err)
            .map(|error| error.kind())
    };
    ours.as_fd();
    ours.set_nonblocking(true);
    assert_eq!(fill(), Some(ErrorKind::WouldBlock));
    let (out, now) = (PollFlags::OUT, Some(Duration::ZERO));
    assert_eq!(polled(&ours, out, now), PollFlags::empty());
    let handled = [2, 14, 15].map(|signal| 1 << (signal - 1)); // SIGINT, SIGALRM, SIGTERM
    assert!(handled.iter().all(|signal| signals_of_watcher() & signal != 0), "all are blocked");
    ours.set_nonblocking(false);
    ours.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
    assert_eq!(fill(), Some(ErrorKind::WouldBlock), "in time");
    // Packets that wait for a neighbour are dropped when another packet arrives.
    let is_over = Arc::new(AtomicBool::new(false));
    let ticks = {
        let is_over = Arc::clone(&is_over);
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                kernels.send(b"tick").unwrap();
                thread::sleep(Duration::from_millis(5));
            }
        })
    };
    assert_eq!(polled(&ours, out, None), out);
    ours.set_write_timeout(None).unwrap();
    assert_eq!(fill(), None, "it waits until there is room");
    is_over.store(true, Ordering::Relaxed);
    ticks.join().unwrap();
    running.end();
}

/// Signals that the thread has blocked which looks for free memory.
fn signals_of_watcher() -> u64 {
    let blocked = |task: DirEntry| {
        let is_it = fs::read_to_string(task.path().join("comm")).ok()? == "forebay-send\n";
        let status = fs::read_to_string(task.path().join("status")).ok().filter(|_| is_it)?;
        let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    loop {
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
        if let Some(signals) = { tasks }.find_map(blocked) {
            return signals;
        }
        thread::yield_now();
    }
}

/// A refusal behaves as in `std` when the peer has no socket.
fn refused() {
    let (net, engine) = over_tap(&NetConfig::default());
    let running = Running::begin(engine);
    for (closed, own) in [("10.9.0.1:9", OURS), ("[fd09::1]:9", OURS_V6)] {
        let any = if own == OURS { "0.0.0.0:0" } else { "[::]:0" };
        let ours = net.bind(any).unwrap();
        ours.connect(closed).unwrap();
        assert_eq!(ours.local_addr().ip(), own.parse::<IpAddr>().unwrap());
        assert_eq!(ours.peer_addr(), Some(closed.parse().unwrap()));
        ours.send(b"anybody?").unwrap();
        // The reader may sleep before the refusal arrives, or not.
        let error = ours.recv(&mut [0; 4]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        ours.set_nonblocking(true);
        let error = ours.recv(&mut [0; 4]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "it is told once");
        ours.send(b"anybody?").unwrap();
        assert_eq!(polled(&ours, PollFlags::IN, None), PollFlags::IN);
        let error = ours.send(b"nobody").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(polled(&ours, PollFlags::IN, Some(Duration::ZERO)), PollFlags::empty());
        // A socket that is not connected does not learn of the refusal.
        let other = net.bind(any).unwrap();
        other.send_to(b"anybody?", closed).unwrap();
        other.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert_eq!(other.recv(&mut [0; 4]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
    running.end();
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
    // Peeked at but never read: its memory is returned when the socket is closed.
    pair.end();
}

fn connected() {
    let pair = Pair::new();
    let stranger = client(pair.ours.local_addr());
    pair.ours.connect(from(&pair)).unwrap();
    let mut buffer = [0; 100];
    for number in 0..100u32 {
        // The stranger gets port unreachable.
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
    // The number of packets that wait for a neighbour is small: resolve the neighbour first.
    pair.ours.send_to(b"hello", from(&pair)).unwrap();
    pair.kernels.recv(&mut buffer).unwrap();
    let sent = pair.ours.send_gso(&payload, 100, from(&pair)).unwrap();
    assert_eq!(sent, payload.len());
    for segment in payload.chunks(100) {
        let len = pair.kernels.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], segment);
    }
    let refused = pair.ours.send_gso(&[0; 129], 1, from(&pair)).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(22), "as the kernel refuses more than 128 segments");
    pair.end();
}

/// Ten full datagrams arrive as one packet, which the kernel's socket reads whole (`UDP_GRO`): a TAP
/// has no GRO that could have merged them.
fn one_packet() {
    let pair = Pair::new();
    setsockopt(&pair.kernels, sockopt::UdpGroSegment, &true).unwrap();
    let mut buffer = [0; 1 << 16];
    pair.ours.send_to(b"hello", from(&pair)).unwrap(); // resolves the neighbour
    pair.kernels.recv(&mut buffer).unwrap();
    let payload: Vec<u8> = (0..14_000u32).map(|at| u8::try_from(at % 249).unwrap()).collect();
    pair.ours.send_gso(&payload, 1400, from(&pair)).unwrap();
    let len = pair.kernels.recv(&mut buffer).unwrap();
    assert_eq!(len, payload.len());
    assert_eq!(buffer[..len], payload);
    pair.end();
}

/// The kernel delivers the datagrams as one GSO packet.
fn read_singly() {
    let pair = Pair::new();
    let payload: Vec<u8> = (0..6350u32).map(|at| u8::try_from(at % 249).unwrap()).collect();
    for is_gro in [false, true] {
        pair.ours.set_gro(is_gro);
        let segment = ControlMessage::UdpGsoSegments(&100);
        let slices = [IoSlice::new(&payload)];
        sendmsg::<()>(pair.kernels.as_raw_fd(), &slices, &[segment], MsgFlags::empty(), None)
            .unwrap();
        let (mut seen, mut buffer) = (Vec::<u8>::new(), [0; 1 << 16]);
        while seen.len() < payload.len() {
            let len = pair.ours.recv(&mut buffer).unwrap();
            assert!(is_gro || len == 100 || len == 50);
            seen.extend(&buffer[..len]);
        }
        assert_eq!(seen, payload);
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
    // A datagram is queued: none may be taken.
    assert_eq!(ours.recv_batch(&mut batch, 0).unwrap(), 0);
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
    forebay_testkit::namespaces::ip("route add 239.0.0.0/8 dev skt");
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
