//! Many connections over a cable: one after another, and at once. `FOREBAY_TEST_SECONDS` and
//! `FOREBAY_TEST_CONNECTIONS` make the tests longer and larger.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream as KernelStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, thread};

use forebay::net::{NetConfig, TcpListener, TcpStream};
use forebay_device::Via;
use forebay_stack::tcp::TcpConfig;

use crate::parts::{self, Part, resident_kib};
use crate::sockets::rig::Running;
use crate::sockets::shared::Hosts;
use crate::tcp::streams::{LONG, echo, exchange};
use crate::tcp::{Trial, tcp_counter};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_18_come_and_go_without_leaks", || parts::run(COME_AND_GO)),
    ("tcp_18_many_at_once_are_small", || parts::run(AT_ONCE)),
];

const COME_AND_GO: &str = "come and go";
const AT_ONCE: &str = "many at once";

pub(crate) const PARTS: &[Part] = &[
    Part { name: COME_AND_GO, descriptors: 1024, play: come_and_go },
    Part { name: AT_ONCE, descriptors: 16 << 10, play: at_once },
];

/// Threads at each end.
const THREADS: u16 = 4;
/// Ports of the server: the kernel has as many TIME-WAITs as local ports towards each.
const PORTS: std::ops::Range<u16> = 80..96;
/// Connections in TIME-WAIT at our end, so that their number does not grow in the test.
const TIME_WAITS: u32 = 4096;
/// Allowance for growth of the process for other reasons.
pub(crate) const GROWTH_KIB: u64 = 16 << 10;
/// More than all frames hold.
const BULK_BYTES: usize = 50 << 20;
/// Memory that an idle connection may take, with its handle and what wakes its waiters.
const CONNECTION_BYTES: u64 = 4 << 10;

pub(crate) fn setting(name: &str, default: u32) -> u32 {
    env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Connections are opened and closed, by either end first. When as many have come and gone as in the
/// first fifth of the time, the process does not grow any more.
fn come_and_go() {
    let seconds = setting("FOREBAY_TEST_SECONDS", 2);
    let hosts = Hosts::new();
    let tcp = TcpConfig { max_time_wait: TIME_WAITS, ..NetConfig::TCP };
    let config = NetConfig { tcp, ..NetConfig::default() };
    let (net, engine) = hosts.taking_by(Via::AfPacket, "tcp:80-95", &config);
    let listen = |port| hosts.near.run(|| TcpListener::bind(&net, ("10.9.0.1", port)).unwrap());
    let listeners: Vec<_> = PORTS.map(listen).collect();
    for listener in &listeners {
        listener.set_accept_timeout(Some(LONG + Duration::from_secs(seconds.into()))).unwrap();
    }
    let running = hosts.near.run(|| Running::begin(engine));
    let (is_over, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let run = |part: Duration| {
        is_over.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            for port in PORTS.take(THREADS.into()) {
                let (hosts, is_over, count) = (&hosts, &is_over, &count);
                scope.spawn(move || hosts.far.run(|| ask(port, is_over, count)));
            }
            thread::sleep(part);
            is_over.store(true, Ordering::Relaxed);
        });
        resident_kib()
    };
    thread::scope(|scope| {
        listeners.iter().for_each(|listener| drop(scope.spawn(|| answer(listener))));
        let whole = Duration::from_secs(seconds.into());
        let (before, began) = (run(whole / 5), count.load(Ordering::Relaxed));
        let after = run(whole * 4 / 5);
        let count = count.load(Ordering::Relaxed);
        eprintln!("{count} connections in {seconds} s, from {before} to {after} KiB");
        assert!(count > 2 * began, "{began} of {count} in the first fifth of the time");
        assert!(after <= before + GROWTH_KIB, "from {before} to {after} KiB");
        assert_eq!(tcp_counter(&net, "PassiveOpens"), count);
        assert_eq!(running.end().frames_away, 0);
    });
}

/// Opens connections from the kernel, each with one question.
fn ask(first_port: u16, is_over: &AtomicBool, count: &AtomicU64) {
    for number in 0_u64.. {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        let port = first_port + THREADS * u16::try_from(number % 4).unwrap();
        ask_one(("10.9.0.1", port), number);
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Opens a connection from the kernel, with one question.
pub(crate) fn ask_one(to: (&str, u16), number: u64) {
    let mut stream = KernelStream::connect(to).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(&number.to_be_bytes()).unwrap();
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, number.to_be_bytes());
    if number.is_multiple_of(2) {
        assert_eq!(stream.read(&mut answer).unwrap(), 0);
    }
}

/// Answers one question of each connection until the run ends, and closes every other one.
pub(crate) fn answer(listener: &TcpListener) {
    let error = loop {
        match listener.accept().and_then(|(stream, _)| answer_one(stream)) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
}

fn answer_one(mut stream: TcpStream) -> io::Result<()> {
    let mut question = [0; 8];
    stream.read_exact(&mut question)?;
    stream.write_all(&question)?;
    if question[7] % 2 == 1 {
        assert_eq!(stream.read(&mut question)?, 0);
    }
    Ok(())
}

/// Connections that are open at once, and idle.
fn at_once() {
    let count = setting("FOREBAY_TEST_CONNECTIONS", 1000);
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, "tcp:80");
    let listener =
        hosts.near.run(|| TcpListener::bind_with_backlog(&net, "10.9.0.1:80", 4096).unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let open = |count: u32| -> Vec<(KernelStream, TcpStream)> {
        let connect = || KernelStream::connect("10.9.0.1:80").unwrap();
        let open = |_| (connect(), listener.accept().unwrap().0);
        hosts.far.run(|| (0..count).map(open).collect())
    };
    let began = Instant::now();
    // Memory of frames is taken once: all of them are used before the second half.
    let mut pairs = open(count / 2);
    let (kernels, ours) = pairs.remove(0);
    thread::scope(|scope| {
        scope.spawn(|| echo(&ours));
        exchange(&kernels, BULK_BYTES);
    });
    drop((kernels, ours));
    speak(&mut pairs);
    let half = resident_kib();
    pairs.extend(open(count - count / 2));
    speak(&mut pairs);
    let each = resident_kib().saturating_sub(half) * 1024 / u64::from(count - count / 2);
    eprintln!("{count} connections at once after {:?}: {each} bytes each", began.elapsed());
    assert!(each <= CONNECTION_BYTES, "{each} bytes each");
    assert_eq!(pairs.len() + 1, usize::try_from(count).unwrap());
    assert!(pairs.iter().all(|(_, ours)| ours.info().is_some_and(|it| it.state.name() == "ESTAB")));
    drop((pairs, net, listener));
    assert_eq!(running.end().frames_away, 0);
}

/// Sends a number to and fro on each connection.
fn speak(pairs: &mut [(KernelStream, TcpStream)]) {
    for (number, (kernels, _)) in (0_u32..).zip(&mut *pairs) {
        kernels.set_read_timeout(Some(LONG)).unwrap();
        kernels.write_all(&number.to_be_bytes()).unwrap();
    }
    for (number, (kernels, ours)) in (0_u32..).zip(pairs) {
        let mut came = [0; 4];
        ours.read_exact(&mut came).unwrap();
        assert_eq!(came, number.to_be_bytes());
        ours.write_all(&came).unwrap();
        kernels.read_exact(&mut came).unwrap();
        assert_eq!(came, number.to_be_bytes());
    }
}
