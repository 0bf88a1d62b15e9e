//! Calls as those of `std`: not blocking, with time-outs, polled, on the thread of a CPU, at the end.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream as KernelStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use forebay::net::{NetConfig, TcpListener, TcpStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::sockets::rig::{OURS, Running, over_tap};
use crate::tcp::Trial;
use crate::tcp::streams::{LONG, exchange, fill};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_17_nonblocking_calls_would_block", nonblocking),
    ("tcp_17_descriptors_tell_both_directions", polled),
    ("tcp_17_calls_read_in_place", in_place),
    ("tcp_17_cpus_read_in_their_turns", inline),
    ("tcp_17_end_reaches_waiting_calls", ended),
    ("tcp_17_connection_wakes_one_thread", one_accepts),
    ("tcp_17_unread_data_reset_on_close", reset),
    ("tcp_18_thousand_connections_leave_nothing", many),
];

/// A listener, a running engine, and a connection from the kernel.
fn connected() -> (TcpListener, Running, TcpStream, KernelStream) {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let kernels = KernelStream::connect(listener.local_addr()).unwrap();
    kernels.set_read_timeout(Some(LONG)).unwrap();
    let (ours, peer) = listener.accept().unwrap();
    assert_eq!(peer, kernels.local_addr().unwrap());
    (listener, running, ours, kernels)
}

fn nonblocking() {
    let (listener, running, mut ours, mut kernels) = connected();
    listener.set_nonblocking(true);
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    ours.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    assert_eq!(ours.read(&mut [0; 10]).unwrap_err().kind(), ErrorKind::WouldBlock);
    ours.set_nonblocking(true);
    assert_eq!(ours.read(&mut [0; 10]).unwrap_err().kind(), ErrorKind::WouldBlock);
    let mut written = 0;
    let full = loop {
        match ours.write(&[7; 100_000]) {
            Ok(len) => written += len,
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    ours.shutdown(Shutdown::Write).unwrap();
    let mut came = Vec::new();
    kernels.read_to_end(&mut came).unwrap();
    assert_eq!(came, vec![7; written]);
    assert_eq!(ours.write(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
    drop((ours, listener));
    running.end();
}

fn polled() {
    let (listener, running, mut ours, mut kernels) = connected();
    let both = PollFlags::IN | PollFlags::OUT;
    let now = Duration::ZERO;
    assert_eq!(seen(&ours, both, now), PollFlags::OUT);
    kernels.write_all(b"hello").unwrap();
    assert_eq!(seen(&ours, PollFlags::IN, LONG), PollFlags::IN);
    ours.read_exact(&mut [0; 2]).unwrap();
    assert_eq!(seen(&ours, both, now), both);
    ours.read_exact(&mut [0; 3]).unwrap();
    assert_eq!(seen(&ours, both, now), PollFlags::OUT);
    fill(&mut ours);
    assert_eq!(seen(&ours, both, now), PollFlags::empty());
    let reader = thread::spawn(move || std::io::copy(&mut kernels, &mut std::io::sink()));
    assert_eq!(seen(&ours, PollFlags::OUT, LONG), PollFlags::OUT);
    let other = KernelStream::connect(listener.local_addr()).unwrap();
    let mut polled = [PollFd::from_borrowed_fd(listener.descriptor().unwrap(), PollFlags::IN)];
    assert_eq!(poll(&mut polled, Some(&Timespec::try_from(LONG).unwrap())).unwrap(), 1);
    listener.accept().unwrap();
    assert_eq!(poll(&mut polled, Some(&Timespec::default())).unwrap(), 0);
    drop((ours, listener, other));
    reader.join().unwrap().unwrap();
    running.end();
}

/// Events of a connection's descriptor, at once or within the time.
fn seen(stream: &TcpStream, wanted: PollFlags, within: Duration) -> PollFlags {
    let mut polled = [PollFd::from_borrowed_fd(stream.descriptor().unwrap(), wanted)];
    poll(&mut polled, Some(&Timespec::try_from(within).unwrap())).unwrap();
    polled[0].revents()
}

fn in_place() {
    let (listener, running, ours, mut kernels) = connected();
    kernels.write_all(b"some bytes").unwrap();
    ours.set_read_timeout(Some(LONG)).unwrap();
    let mut first = Vec::new();
    let len = ours
        .read_in_place(|bytes| {
            first = bytes.to_vec();
            4
        })
        .unwrap();
    assert_eq!((len, &first[..]), (4, &b"some bytes"[..]));
    let mut peeked = [0; 20];
    assert_eq!(ours.peek(&mut peeked).unwrap(), 6);
    assert_eq!(&peeked[..6], b" bytes");
    assert_eq!(ours.read_in_place(<[u8]>::len).unwrap(), 6);
    kernels.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ours.read_in_place(<[u8]>::len).unwrap(), 0);
    drop((ours, listener));
    running.end();
}

/// Each CPU's thread accepts and echoes in its own turns.
fn inline() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let local = listener.local_addr();
    let listener = Arc::new(Mutex::new(Some(listener)));
    let running = Running::begin_with(engine, move |cpu| {
        let Some(listener) = listener.lock().unwrap().take() else { return };
        let mut buffer = [0; 9000];
        for _ in 0..3 {
            let (stream, _) = listener.accept_on(cpu).unwrap();
            loop {
                match stream.read_on(cpu, &mut buffer).unwrap() {
                    0 => break,
                    len => stream.write_all_on(cpu, &buffer[..len]).unwrap(),
                }
            }
        }
    });
    for len in [1, 100_000, 1_000_000] {
        exchange(&KernelStream::connect(local).unwrap(), len);
    }
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}

fn ended() {
    let (listener, running, mut ours, mut kernels) = connected();
    thread::scope(|scope| {
        let reader = scope.spawn(|| (&ours).read(&mut [0; 10]).unwrap_err().kind());
        let acceptor = scope.spawn(|| listener.accept().unwrap_err().kind());
        thread::sleep(Duration::from_millis(20));
        running.end();
        assert_eq!(reader.join().unwrap(), ErrorKind::BrokenPipe);
        assert_eq!(acceptor.join().unwrap(), ErrorKind::BrokenPipe);
    });
    assert_eq!(ours.write(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
    let error = kernels.read(&mut [0; 10]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// Threads that wait for connections are woken one by one.
fn one_accepts() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let local = listener.local_addr();
    let running = Running::begin(engine);
    let accept = || {
        let listener = listener.clone();
        thread::spawn(move || {
            let before = sleeps();
            let accepted = listener.accept().unwrap();
            (accepted, sleeps() - before)
        })
    };
    let acceptors: Vec<_> = (0..40).map(|_| accept()).collect();
    thread::sleep(Duration::from_millis(50));
    let clients: Vec<_> = (0..40).map(|_| KernelStream::connect(local).unwrap()).collect();
    let accepted: Vec<_> = acceptors.into_iter().map(|thread| thread.join().unwrap()).collect();
    let sleeps: u64 = accepted.iter().map(|(_, sleeps)| sleeps).sum();
    assert!(sleeps < 400, "{sleeps} times for 40 connections");
    drop((listener, accepted, clients, net));
    running.end();
}

/// Number of times that the calling thread has slept.
fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

fn reset() {
    let (listener, running, ours, mut kernels) = connected();
    kernels.write_all(b"nobody reads this").unwrap();
    while ours.peek(&mut [0; 20]).unwrap() < 17 {}
    drop(ours);
    let error = kernels.read(&mut [0; 10]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    drop(listener);
    assert_eq!(running.end().frames_away, 0);
}

/// Connections opened and closed by turns: neither frames nor sockets are left.
fn many() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let local = listener.local_addr();
    let server = thread::spawn(move || {
        for _ in 0..1000 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = [0; 8];
            stream.read_exact(&mut question).unwrap();
            stream.write_all(&question).unwrap();
        }
    });
    for number in 0..1000_u64 {
        let mut client = KernelStream::connect(local).unwrap();
        client.set_read_timeout(Some(LONG)).unwrap();
        client.write_all(&number.to_be_bytes()).unwrap();
        let mut answer = [0; 8];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer, number.to_be_bytes());
    }
    server.join().unwrap();
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}
