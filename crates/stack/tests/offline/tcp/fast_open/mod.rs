//! Data in a SYN (RFC 7413): two hosts, and strangers who have a cookie.

mod client; // SYNs with data, and without

use std::net::Shutdown;
use std::sync::Arc;

use forebay_stack::tcp::{
    FastOpen, FastOpenOptions, IcmpMessage, ListenerQueues, PathError, Seq, State, Tcp, TcpConfig,
    TcpError, TcpOut, TcpSocket, WriteFlags,
};

use super::forged::{Forged, bytes_of};
use super::pair::{Faults, MTU, Pair};

const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
const DELAY_US: u64 = 10_000;

const BOTH: TcpConfig =
    TcpConfig { fast_open: FastOpen::CLIENT.with(FastOpen::SERVER), ..TcpConfig::KERNELS };

/// A listener of host 1 at port 80, with a queue of connections that begin with their SYN.
fn listen(pair: &mut Pair, queue: u32) -> TcpSocket {
    let (there, queues) = (pair.address(1, 80), Arc::<ListenerQueues>::default());
    pair.queues.push(Arc::clone(&queues));
    let tcp = &mut pair.hosts[1].tcp;
    let listener = tcp.socket().unwrap();
    tcp.bind(listener, there).unwrap();
    tcp.set_fast_open(listener, FastOpenOptions { queue, ..Default::default() }).unwrap();
    tcp.listen_with_queues(listener, 4096, queues).unwrap();
    listener
}

/// Begins to open a connection from host 0, with these bytes. Returns the number of those that left.
fn begin(pair: &mut Pair, bytes: &[u8]) -> (TcpSocket, Result<usize, TcpError>) {
    let ends = (pair.address(0, 0), pair.address(1, 80));
    let client = pair.hosts[0].tcp.socket().unwrap();
    let open = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
        tcp.connect_with_data(client, ends, MTU, bytes, WriteFlags::default(), out)
    };
    (client, pair.call(0, open))
}

fn accept(pair: &mut Pair, listener: TcpSocket) -> TcpSocket {
    for _ in 0..10_000 {
        if let Ok((server, _)) = pair.hosts[1].tcp.accept(listener) {
            return server;
        }
        assert!(pair.step(), "a connection that is being opened has a timer");
    }
    panic!("no connection came");
}

/// Opens a connection that asks for a cookie, and closes it.
fn learn(pair: &mut Pair, listener: TcpSocket) {
    let (client, sent) = begin(pair, b"early");
    assert_eq!(sent, Err(TcpError::InProgress), "no cookie, no data");
    let server = accept(pair, listener);
    for (host, socket) in [(0, client), (1, server)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
}

/// Hosts of which the second listens, and the cookie of strangers at the address of the first.
fn with_cookie(queue: u32) -> (Pair, TcpSocket, Vec<u8>) {
    let mut pair = Pair::new(1, Faults::default(), [BOTH; 2]);
    let listener = listen(&mut pair, queue);
    let cookie = cookie(&mut pair);
    (pair, listener, cookie)
}

/// Closes the listener of a host where nothing else is left.
fn end(pair: &mut Pair, listener: TcpSocket) {
    pair.call(1, |tcp, out| tcp.close(listener, out)).unwrap();
    pair.check_rest();
}

fn state(pair: &Pair, host: usize, socket: TcpSocket) -> State {
    pair.hosts[host].tcp.info(socket).unwrap().unwrap().state
}

#[test]
fn tcp_49_data_arrive_with_the_syn() {
    let faults = Faults { delay_us: DELAY_US, ..Faults::default() };
    let mut pair = Pair::new(1, faults, [BOTH; 2]);
    let listener = listen(&mut pair, 16);
    learn(&mut pair, listener);
    let (client, sent) = begin(&mut pair, b"question");
    assert_eq!(sent, Ok(8));
    let began_us = pair.now_us;
    let server = accept(&mut pair, listener);
    assert_eq!(pair.now_us, began_us + DELAY_US);
    let info = pair.hosts[1].tcp.info(server).unwrap().unwrap();
    assert_eq!((info.state, info.syn_data), (State::SynReceived, true));
    let mut room = [0; 20];
    assert_eq!(pair.call(1, |tcp, out| tcp.read(server, &mut room, out)), Ok(8));
    assert_eq!(&room[..8], b"question");
    let answer = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
        tcp.write(server, b"answer", WriteFlags::default(), out)
    };
    assert_eq!(pair.call(1, answer), Ok(6));
    while pair.call(0, |tcp, out| tcp.read(client, &mut room, out)) != Ok(6) {
        assert!(pair.step());
    }
    assert_eq!(pair.now_us, began_us + 2 * DELAY_US, "one round trip");
    assert_eq!(&room[..6], b"answer");
    let info = pair.hosts[0].tcp.info(client).unwrap().unwrap();
    assert!(info.syn_data, "all of them were taken");
    assert_eq!(info.tally.delivered, 1, "SYN and data are one segment");
    for (host, socket) in [(0, client), (1, server), (1, listener)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
    let counters = [0, 1].map(|host| pair.hosts[host].tcp.counters().clone());
    assert_eq!(counters[0].fast_open_active.get(), 1);
    assert_eq!(counters[1].fast_open_cookie_reqd.get(), 1);
    assert_eq!(counters[1].fast_open_passive.get(), 1);
    pair.check_rest();
}

/// A side of a connection: what it has sent and received of a stream.
#[derive(Default)]
struct Side {
    written: usize,
    received: Vec<u8>,
}

impl Side {
    /// Writes and reads as much as goes.
    fn go_on(&mut self, pair: &mut Pair, host: usize, socket: TcpSocket, bytes: &[u8]) {
        let (rest, mut room) = (&bytes[self.written..], [0; 2000]);
        if !rest.is_empty() {
            let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
                tcp.write(socket, rest, WriteFlags::default(), out)
            };
            match pair.call(host, write) {
                Ok(len) => self.written += len,
                Err(error) => assert_eq!(error, TcpError::WouldBlock),
            }
        }
        match pair.call(host, |tcp, out| tcp.read(socket, &mut room, out)) {
            Ok(len) => self.received.extend(&room[..len]),
            Err(error) => assert_eq!(error, TcpError::WouldBlock),
        }
    }
}

/// Every byte of both sides arrives once and in order, whatever the path does to the SYN and its answer.
#[test]
fn tcp_49_streams_survive_bad_paths() {
    let bytes: Vec<u8> = (0..5000_u32).map(|at| (at % 251).to_le_bytes()[0]).collect();
    let (mut sent_early, mut taken_early) = (0, 0);
    for seed in 1..61 {
        let faults =
            Faults { loss: 15, repeat: 10, reorder: 20, delay_us: DELAY_US, ..Faults::default() };
        let mut pair = Pair::new(seed, faults, [BOTH; 2]);
        let listener = listen(&mut pair, 16);
        learn(&mut pair, listener);
        let (client, sent) = begin(&mut pair, &bytes);
        let mut sides = [Side { written: sent.unwrap_or(0), ..Side::default() }, Side::default()];
        sent_early += u32::from(sides[0].written > 0);
        let server = accept(&mut pair, listener);
        // Before any ACK.
        let is_early = state(&pair, 1, server) == State::SynReceived;
        sides[1].go_on(&mut pair, 1, server, &bytes);
        assert!(!is_early || !sides[1].received.is_empty() && sides[1].written > 0);
        taken_early += u32::from(is_early);
        while sides.iter().any(|side| side.received.len() < bytes.len()) {
            if state(&pair, 0, client) != State::SynSent {
                sides[0].go_on(&mut pair, 0, client, &bytes);
            }
            sides[1].go_on(&mut pair, 1, server, &bytes);
            assert!(pair.step(), "seed {seed}");
        }
        assert!(sides.iter().all(|side| side.received == bytes), "seed {seed}");
        for (host, socket) in [(0, client), (1, server), (1, listener)] {
            pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
        }
        pair.check_rest();
    }
    assert!(sent_early > 30, "{sent_early} of 60 clients had a cookie");
    assert!(taken_early > 30, "{taken_early} of 60 servers took data of a SYN");
}

/// Delivers a segment of a stranger to host 1. Returns the answer.
fn say(
    pair: &mut Pair,
    port: u16,
    (flags, len, cookie): (u8, usize, &[u8]),
    numbers: (u32, u32),
) -> Option<Vec<u8>> {
    let mut options = Vec::new();
    if flags == SYN {
        options = vec![34, 2 + u8::try_from(cookie.len()).unwrap()];
        options.extend(cookie);
    }
    let forged = Forged { options, ..Forged::plain(flags, len) };
    let ends = (pair.address(0, port), pair.address(1, 80));
    let bytes = bytes_of(&forged, pair, ends, numbers).unwrap();
    let (now_us, mut sent) = (pair.now_us, Vec::new());
    let packet = pair.hosts[1].packet(&bytes).unwrap();
    pair.hosts[1].deliver(packet, now_us, &mut sent);
    sent.into_iter().next()
}

/// Cookie that host 1 gives.
fn cookie(pair: &mut Pair) -> Vec<u8> {
    let answer = say(pair, 999, (SYN, 0, &[]), (0, 0)).unwrap();
    let at = answer.windows(2).rposition(|pair| pair == [34, 10]).unwrap();
    say(pair, 999, (RST, 0, &[]), (1, 0));
    answer[at + 2..at + 10].to_vec()
}

/// Number that an answer acknowledges.
fn acked(answer: &[u8]) -> u32 {
    u32::from_be_bytes(answer[28..32].try_into().unwrap())
}

#[test]
fn tcp_49_queue_bounds_a_flood() {
    const QUEUE: u32 = 8;
    let (mut pair, listener, cookie) = with_cookie(QUEUE);
    for port in 1000..2000 {
        let answer = say(&mut pair, port, (SYN, 500, &cookie), (0, 0)).unwrap();
        let expected = if port < 1000 + 8 { 501 } else { 1 };
        assert_eq!(acked(&answer), expected, "port {port}");
    }
    let tcp = &pair.hosts[1].tcp;
    assert_eq!(tcp.socket_count(), 1 + QUEUE);
    assert_eq!(tcp.request_count(), 1000 - QUEUE);
    let counters = tcp.counters().clone();
    assert_eq!(counters.fast_open_passive.get(), u64::from(QUEUE));
    assert_eq!(counters.fast_open_listen_overflow.get(), 1000 - u64::from(QUEUE));
    end(&mut pair, listener);
}

#[test]
fn tcp_49_resets_count_for_a_minute() {
    let (mut pair, listener, cookie) = with_cookie(2);
    // The first two were accepted and then reset, the others fall back.
    for port in 1000..1010 {
        let answer = say(&mut pair, port, (SYN, 500, &cookie), (0, 0)).unwrap();
        let is_taken = acked(&answer) == 501;
        assert_eq!(is_taken, port < 1002, "port {port}");
        if is_taken {
            let (server, _) = pair.hosts[1].tcp.accept(listener).unwrap();
            say(&mut pair, port, (RST, 0, &[]), (501, 0));
            pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
        } else {
            say(&mut pair, port, (RST, 0, &[]), (1, 0));
        }
    }
    pair.now_us += 59_999_999;
    let answer = say(&mut pair, 1020, (SYN, 500, &cookie), (0, 0)).unwrap();
    assert_eq!(acked(&answer), 1);
    // By the seconds of a clock.
    pair.now_us += 1_000_001;
    let answer = say(&mut pair, 1021, (SYN, 500, &cookie), (0, 0)).unwrap();
    assert_eq!(acked(&answer), 501);
    end(&mut pair, listener);
}

/// Shut down and closed before the ACK: the answer and the FIN leave, and the client reads both.
#[test]
fn tcp_49_close_before_ack_sends_fin() {
    for is_shut_before in [false, true] {
        let faults = Faults { delay_us: DELAY_US, ..Faults::default() };
        let mut pair = Pair::new(1, faults, [BOTH; 2]);
        let listener = listen(&mut pair, 16);
        learn(&mut pair, listener);
        let (client, sent) = begin(&mut pair, b"question");
        assert_eq!(sent, Ok(8));
        let server = accept(&mut pair, listener);
        let began_us = pair.now_us;
        let serve = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
            assert_eq!(tcp.read(server, &mut [0; 20], out), Ok(8));
            assert_eq!(tcp.write(server, b"answer", WriteFlags::default(), out), Ok(6));
            if is_shut_before {
                tcp.shutdown(server, Shutdown::Write, out).unwrap();
            }
            tcp.close(server, out).unwrap();
        };
        pair.call(1, serve);
        let mut room = [0; 20];
        let mut read = Vec::new();
        while read.last() != Some(&Ok(0)) {
            match pair.call(0, |tcp, out| tcp.read(client, &mut room, out)) {
                Err(TcpError::WouldBlock) => assert!(pair.step()),
                now => read.push(now),
            }
        }
        assert_eq!(read, [Ok(6), Ok(0)]);
        assert_eq!(pair.now_us, began_us + DELAY_US, "the FIN waits for no ACK");
        for (host, socket) in [(0, client), (1, listener)] {
            pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
        }
        pair.check_rest();
    }
}

#[test]
fn tcp_49_listening_anew_has_its_own_queue() {
    let (mut pair, listener, cookie) = with_cookie(1);
    let answer = say(&mut pair, 1000, (SYN, 500, &cookie), (0, 0)).unwrap();
    assert_eq!(acked(&answer), 501);
    let (server, _) = pair.hosts[1].tcp.accept(listener).unwrap();
    let stop = |tcp: &mut Tcp, out: &mut TcpOut<'_>| tcp.shutdown(listener, Shutdown::Read, out);
    pair.call(1, stop).unwrap();
    pair.hosts[1].tcp.listen(listener, 16).unwrap();
    say(&mut pair, 1000, (RST, 0, &[]), (501, 0));
    pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    for port in 2000..2003 {
        let answer = say(&mut pair, port, (SYN, 500, &cookie), (0, 0)).unwrap();
        assert_eq!(acked(&answer), if port == 2000 { 501 } else { 1 });
        pair.now_us += 100_000;
    }
    end(&mut pair, listener);
}

/// Two TCPs that share the queue of a listener, as those of two CPUs do.
#[test]
fn tcp_49_resets_count_for_all_shards() {
    let queues = Arc::<ListenerQueues>::default();
    let mut pairs = [1, 2].map(|seed| Pair::new(seed, Faults::default(), [BOTH; 2]));
    let listeners = pairs.each_mut().map(|pair| {
        let there = pair.address(1, 80);
        let tcp = &mut pair.hosts[1].tcp;
        let listener = tcp.socket().unwrap();
        tcp.bind(listener, there).unwrap();
        let options = FastOpenOptions { queue: 1, ..FastOpenOptions::default() };
        tcp.set_fast_open(listener, options).unwrap();
        tcp.listen_with_queues(listener, 16, Arc::clone(&queues)).unwrap();
        pair.queues.push(Arc::clone(&queues));
        listener
    });
    let cookie = cookie(&mut pairs[0]);
    let is_taken = |pair: &mut Pair, port| {
        let answer = say(pair, port, (SYN, 500, &cookie), (0, 0)).unwrap();
        acked(&answer) == 501
    };
    assert!(is_taken(&mut pairs[0], 1000));
    assert!(!is_taken(&mut pairs[1], 1000), "the queue is full");
    let (server, _) = pairs[0].hosts[1].tcp.accept(listeners[0]).unwrap();
    say(&mut pairs[0], 1000, (RST, 0, &[]), (501, 0));
    pairs[0].call(1, |tcp, out| tcp.close(server, out)).unwrap();
    pairs[1].now_us += 59_000_000;
    assert!(!is_taken(&mut pairs[1], 1001), "what the other one reset counts");
    pairs[1].now_us += 2_000_000;
    assert!(is_taken(&mut pairs[1], 1002), "though the other one has not looked");
    for (pair, listener) in pairs.iter_mut().zip(listeners) {
        pair.call(1, |tcp, out| tcp.close(listener, out)).unwrap();
    }
    pairs.iter_mut().for_each(Pair::check_rest);
}

#[test]
fn tcp_49_forged_cookies_bring_no_data() {
    let (mut pair, listener, valid) = with_cookie(4096);
    for port in 1000..3000_u16 {
        let mut forged = valid.clone();
        forged[usize::from(port) % 8] ^= 1 << (port / 8 % 8);
        let answer = say(&mut pair, port, (SYN, 500, &forged), (0, 0)).unwrap();
        assert_eq!(acked(&answer), 1);
        assert!(answer.windows(8).any(|part| part == valid));
        say(&mut pair, port, (RST, 0, &[]), (1, 0));
    }
    let counters = pair.hosts[1].tcp.counters().clone();
    assert_eq!(counters.fast_open_passive_fail.get(), 2000);
    assert_eq!(counters.fast_open_passive.get(), 0);
    end(&mut pair, listener);
}

/// Connections whose handshake never ends are given up, accepted or not, and leave nothing.
#[test]
fn tcp_49_silent_peers_leave_nothing() {
    let (mut pair, listener, cookie) = with_cookie(16);
    for port in 1000..1016 {
        say(&mut pair, port, (SYN, 100, &cookie), (0, 0)).unwrap();
    }
    let accepted: Vec<TcpSocket> = (0..8).map(|_| accept(&mut pair, listener)).collect();
    for &server in &accepted[..4] {
        pair.call(1, |tcp, out| tcp.read(server, &mut [0; 100], out)).unwrap();
        pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    }
    while pair.step() {}
    for &server in &accepted[4..] {
        assert_eq!(state(&pair, 1, server), State::Closed);
        pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    }
    end(&mut pair, listener);
}

/// A number that is added to a valid one.
fn near(pair: &mut Pair) -> u32 {
    let any = u32::try_from(pair.random(1 << 32)).unwrap();
    match pair.random(6) {
        0 => any,
        1 => 0,
        2 => 1,
        _ => (any % 6000).wrapping_sub(3000),
    }
}

#[test]
fn tcp_49_cookie_and_ack_may_be_anything() {
    let mut pair = Pair::new(7, Faults::default(), [BOTH; 2]);
    let listener = listen(&mut pair, 64);
    let cookie = cookie(&mut pair);
    let mut ended = Vec::new();
    for port in 1000..3000_u16 {
        let len = usize::from(port) % 3 * 100;
        let answer = say(&mut pair, port, (SYN, len, &cookie), (0, 0)).unwrap();
        let ours = u32::from_be_bytes(answer[24..28].try_into().unwrap()).wrapping_add(1);
        let theirs = acked(&answer);
        let server = pair.hosts[1].tcp.accept(listener).map(|(server, _)| server);
        for _ in 0..6 {
            if let (Ok(server), 0..3) = (server, pair.random(6)) {
                // Answers of any kind are fine: the connection may have been reset.
                let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
                    tcp.write(server, &[1; 3000], WriteFlags::default(), out)
                };
                let _ = pair.call(1, write);
                let _ = pair.call(1, |tcp, out| tcp.read(server, &mut [0; 100], out));
            }
            let flags = u8::try_from(pair.random(256)).unwrap();
            let flags = if pair.random(10) < 7 { flags & !(SYN | RST) | ACK } else { flags };
            let (seq, ack) = (near(&mut pair), near(&mut pair));
            let numbers = (theirs.wrapping_add(seq), ours.wrapping_add(ack));
            say(&mut pair, port, (flags, 20, &[]), numbers);
            pair.now_us += pair.random(2) * 100_000;
            pair.call(1, Tcp::advance);
        }
        if let Ok(server) = server {
            ended.push(state(&pair, 1, server));
            pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
        }
    }
    end(&mut pair, listener);
    for way in [State::SynReceived, State::Established, State::CloseWait, State::Closed] {
        let count = ended.iter().filter(|state| **state == way).count();
        assert!(count > 50, "{count} of {} are {way:?}", ended.len());
    }
}

/// An ACK completes the handshake of a stranger with a cookie, whose connection then is as any other.
#[test]
fn tcp_49_ack_opens_the_connection() {
    let (mut pair, listener, cookie) = with_cookie(1);
    let answer = say(&mut pair, 1000, (SYN, 100, &cookie), (0, 0)).unwrap();
    let ours = u32::from_be_bytes(answer[24..28].try_into().unwrap()).wrapping_add(1);
    let server = accept(&mut pair, listener);
    // Segments that do not acknowledge the SYN-ACK say nothing about the round trip.
    for (flags, seq, ack) in [(ACK, 101, ours.wrapping_add(7)), (ACK, 1 << 30, ours), (SYN, 0, 0)] {
        pair.now_us += 1000;
        say(&mut pair, 1000, (flags, 0, &cookie), (seq, ack));
        assert_eq!(state(&pair, 1, server), State::SynReceived);
    }
    pair.now_us += 1000;
    say(&mut pair, 1000, (ACK, 0, &[]), (101, ours));
    assert_eq!(state(&pair, 1, server), State::Established);
    assert_eq!(pair.hosts[1].tcp.info(server).unwrap().unwrap().rtt_us, 4000);
    let second = say(&mut pair, 1001, (SYN, 100, &cookie), (0, 0)).unwrap();
    assert_eq!(acked(&second), 101, "the queue has room again");
}

/// Of the connections that wait at a listener, those whose SYN-ACK is not acknowledged are passed on once it is.
#[test]
fn exe_8_fast_open_passed_after_ack() {
    let mut pair = Pair::new(1, Faults::default(), [BOTH; 2]);
    let listener = listen(&mut pair, 16);
    let queues = Arc::clone(&pair.queues[0]);
    let cookie = cookie(&mut pair);
    let numbers = [(1000, 100, &cookie[..]), (1001, 100, &cookie), (1002, 0, &[])].map(
        |(port, len, cookie)| {
            let answer = say(&mut pair, port, (SYN, len, cookie), (0, 0)).unwrap();
            u32::from_be_bytes(answer[24..28].try_into().unwrap()).wrapping_add(1)
        },
    );
    say(&mut pair, 1002, (ACK, 0, &[]), (1, numbers[2]));
    assert_eq!((queues.waiting(), queues.opening(), queues.handshakes()), (3, 2, 0));
    let pass_on = |pair: &mut Pair| pair.call(1, |tcp, out| tcp.pass_on(listener, out));
    let passed = pass_on(&mut pair).unwrap().unwrap();
    assert_eq!(passed.flow().theirs.port(), 1002);
    assert_eq!(pass_on(&mut pair), Err(TcpError::InProgress));
    assert_eq!((queues.waiting(), queues.opening()), (2, 2));
    assert_eq!(pair.hosts[1].tcp.counters().out_rsts.get(), 0, "nobody is told");
    say(&mut pair, 1001, (ACK, 50, &[]), (101, numbers[1]));
    let passed = pass_on(&mut pair).unwrap().unwrap();
    assert_eq!(passed.flow().theirs.port(), 1001);
    say(&mut pair, 1000, (RST, 0, &[]), (101, 0));
    assert_eq!(pass_on(&mut pair), Ok(None), "it has ended");
    assert_eq!(pass_on(&mut pair), Err(TcpError::WouldBlock));
    assert_eq!((queues.waiting(), queues.opening()), (0, 0));
    assert!(pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out)));
    let server = accept(&mut pair, listener);
    assert_eq!(state(&pair, 1, server), State::Established);
    let read = |tcp: &mut Tcp, out: &mut TcpOut<'_>| tcp.read(server, &mut [0; 300], out);
    assert_eq!(pair.call(1, read), Ok(150), "the data of the SYN, too");
    for socket in [server, listener] {
        pair.call(1, |tcp, out| tcp.close(socket, out)).unwrap();
    }
    pair.check_rest();
}
