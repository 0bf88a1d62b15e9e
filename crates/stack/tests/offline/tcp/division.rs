//! Flows that a process claims among several.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use forebay_stack::tcp::{
    PassedConnection, Tcp, TcpConfig, TcpError, TcpOptions, TcpOut, TcpSocket, WriteFlags,
};

use super::forged::{self, Forged};
use super::pair::{Faults, Pair};
use super::reuseport::{Beside, accepted, begin, end, listen, pair, settle};

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// Says something to port 80 of host 1. Returns sequence number and flags of the answer.
fn say(pair: &mut Pair, port: u16, flags: u8, numbers: (u32, u32)) -> Option<(u32, u8)> {
    forged::say(pair, port, &Forged::plain(flags, 0), numbers)
}

/// Host 1 beside another process, which takes and answers all that comes.
fn owner(pair: &mut Pair) -> Arc<Beside> {
    let beside = Beside::host(pair);
    beside.takes.store(true, Relaxed);
    beside.answers.store(true, Relaxed);
    beside
}

fn flows(pair: &Pair) -> usize {
    pair.hosts[1].tcp.flow_count()
}

#[test]
fn exe_8_cookie_without_room_leaves_no_claim() {
    let config = TcpConfig { max_syn_backlog: 1, ..TcpConfig::default() };
    let mut pair = Pair::new(1, Faults::default(), [config; 2]);
    let beside = owner(&mut pair);
    let there = pair.address(1, 80);
    let listener = pair.hosts[1].tcp.socket().unwrap();
    pair.hosts[1].tcp.bind(listener, there).unwrap();
    pair.hosts[1].tcp.listen(listener, 1).unwrap();
    say(&mut pair, 1000, SYN, (100, 0));
    let (cookie, _) = say(&mut pair, 2000, SYN, (500, 0)).unwrap();
    say(&mut pair, 1000, RST, (101, 0));
    say(&mut pair, 2000, SYN, (500, 0)).unwrap();
    assert_eq!((flows(&pair), beside.claims()), (1, 1), "the second has a request");
    // Two connections fill the accept queue.
    for port in [3000, 3001] {
        let (sequence, _) = say(&mut pair, port, SYN, (100, 0)).unwrap();
        say(&mut pair, port, ACK, (101, sequence.wrapping_add(1)));
    }
    assert_eq!((flows(&pair), beside.claims()), (3, 3));
    assert_eq!(say(&mut pair, 2000, ACK, (501, cookie.wrapping_add(1))), None);
    assert_eq!((flows(&pair), beside.claims()), (2, 2), "the request has ended");
}

/// Law: the flows that a process has claimed are those that it has.
#[test]
fn exe_8_claims_are_the_flows() {
    let mut cookies = 0;
    for seed in 1..13 {
        let faults = Faults {
            loss: 10,
            repeat: 10,
            reorder: 30,
            delay_us: 20_000,
            merges: false,
            ..Faults::default()
        };
        let config = TcpConfig {
            max_syn_backlog: 2,
            max_time_wait: 3,
            max_sockets: 8,
            ..TcpConfig::default()
        };
        let mut pair = Pair::new(seed, faults, [TcpConfig::default(), config]);
        let beside = owner(&mut pair);
        let mut listener = listen(&mut pair, None);
        let (mut clients, mut servers) = (Vec::new(), Vec::<TcpSocket>::new());
        for _ in 0..600 {
            match pair.random(12) {
                0..3 => clients.push(begin(&mut pair)),
                3 if !clients.is_empty() => {
                    let client = clients.swap_remove(0);
                    let _ = pair.call(0, |tcp, out| tcp.close(client, out));
                }
                4 if !servers.is_empty() => end(&mut pair, 1, [servers.swap_remove(0)]),
                5 => servers.extend(accepted(&mut pair, listener)),
                6 => {
                    let passed = pair.call(1, |tcp, out| tcp.pass_on(listener, out));
                    if let Ok(Some(passed)) = passed {
                        pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out));
                    }
                }
                7 if pair.random(10) == 0 => {
                    end(&mut pair, 1, [listener]);
                    listener = listen(&mut pair, None);
                }
                8 => {
                    let numbers = [(); 2].map(|()| u32::try_from(pair.random(1 << 32)).unwrap());
                    let port = 1000 + u16::try_from(pair.random(3)).unwrap();
                    let flags = [SYN, ACK, RST, SYN | FIN, SYN | ACK];
                    let flags = flags[usize::try_from(pair.random(5)).unwrap()];
                    say(&mut pair, port, flags, numbers.into());
                }
                9 => beside.takes.store(pair.random(4) > 0, Relaxed),
                10 => beside.answers.store(pair.random(2) > 0, Relaxed),
                _ => {}
            }
            assert_eq!(beside.claims(), flows(&pair), "seed {seed}");
            pair.step();
            assert_eq!(beside.claims(), flows(&pair), "seed {seed}");
        }
        cookies += pair.hosts[1].tcp.counters().syncookies_recv.get();
    }
    assert!(cookies > 0, "some connections come by cookies");
}

#[test]
fn exe_8_refused_adoption_leaves_no_claim() {
    let mut pair = pair();
    let beside = owner(&mut pair);
    let listener = listen(&mut pair, None);
    begin(&mut pair);
    settle(&mut pair);
    let passed = pair.call(1, |tcp, out| tcp.pass_on(listener, out)).unwrap().unwrap();
    let frames: Vec<_> = std::iter::from_fn(|| pair.hosts[1].pool.allocate(100)).collect();
    assert!(!pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out)), "there is no frame");
    assert_eq!((flows(&pair), beside.claims()), (0, 0));
    frames.into_iter().for_each(|frame| pair.hosts[1].pool.put(frame));
    assert!(pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out)));
}

/// Connection of which so much was received that it does not fit in a small receive buffer, passed on.
fn passed_with_bytes(pair: &mut Pair, listener: TcpSocket) -> (TcpSocket, PassedConnection) {
    let client = begin(pair);
    settle(pair);
    let bytes: Vec<u8> = (0..60_000_u32).map(|at| at.to_be_bytes()[3]).collect();
    let mut written = 0;
    while written < bytes.len() {
        let rest = &bytes[written..];
        let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
            tcp.write(client, rest, WriteFlags::default(), out)
        };
        written += pair.call(0, write).unwrap_or(0);
        settle(pair);
    }
    settle(pair);
    let passed = pair.call(1, |tcp, out| tcp.pass_on(listener, out)).unwrap().unwrap();
    assert_eq!(passed.to_bytes().len(), 62 + bytes.len());
    (client, passed)
}

/// Connection whose received bytes are all there for the next process, or that is reset.
#[test]
fn exe_8_adopted_connection_has_all_bytes() {
    let mut pair = pair();
    let beside = owner(&mut pair);
    let listener = listen(&mut pair, None);
    let (_, passed) = passed_with_bytes(&mut pair, listener);
    let mut frames: Vec<_> = std::iter::from_fn(|| pair.hosts[1].pool.allocate(1500)).collect();
    let few = frames.split_off(frames.len() - 20);
    few.into_iter().for_each(|frame| pair.hosts[1].pool.put(frame));
    assert!(!pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out)), "too few frames");
    assert_eq!((flows(&pair), beside.claims()), (0, 0));
    frames.extend(std::iter::from_fn(|| pair.hosts[1].pool.allocate(1500)));
    frames.into_iter().for_each(|frame| pair.hosts[1].pool.put(frame));
    assert!(pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out)));
    let servers = accepted(&mut pair, listener);
    let mut read = vec![0; 100_000];
    let len = pair.call(1, |tcp, out| tcp.read(servers[0], &mut read, out)).unwrap();
    assert_eq!(&read[..len], &passed.to_bytes()[62..]);
    let info = pair.hosts[1].tcp.info(servers[0]).unwrap().unwrap();
    assert_eq!(info.rtt_us, 0, "nothing was asked that could be answered");

    let (client, passed) = passed_with_bytes(&mut pair, listener);
    let options = TcpOptions { rcvbuf: Some(4096), ..TcpOptions::default() };
    pair.call(1, |tcp, out| tcp.set_options(listener, options, out)).unwrap();
    assert!(pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out)));
    settle(&mut pair);
    let told = pair.call(0, |tcp, out| tcp.read(client, &mut read, out));
    assert_eq!(told, Err(TcpError::Reset), "it does not fit");
}

/// An ACK out of the window says nothing of another process.
#[test]
fn exe_8_blind_ack_keeps_handshake() {
    let mut pair = pair();
    let beside = owner(&mut pair);
    let listener = listen(&mut pair, None);
    beside.answers.store(false, Relaxed);
    let (sequence, _) = say(&mut pair, 1000, SYN, (500, 0)).unwrap();
    assert_eq!(say(&mut pair, 1000, ACK, (1 << 30, 7)), None);
    say(&mut pair, 1000, ACK, (501, sequence.wrapping_add(1)));
    assert_eq!(accepted(&mut pair, listener).len(), 1);
}

/// Law: whatever another process says, a connection is adopted or not, and the host goes on.
#[test]
fn exe_8_hostile_passed_bytes_are_survived() {
    for seed in 1..40 {
        let mut pair = Pair::new(seed, Faults::default(), [TcpConfig::default(); 2]);
        let listener = listen(&mut pair, None);
        begin(&mut pair);
        settle(&mut pair);
        let passed = pair.call(1, |tcp, out| tcp.pass_on(listener, out)).unwrap().unwrap();
        let mut bytes = passed.to_bytes();
        bytes.extend([7; 3000]);
        for _ in 0..=pair.random(8) {
            // In the numbers and options, seldom in the addresses.
            let at = if pair.random(8) == 0 { pair.random(62) } else { 36 + pair.random(26) };
            let byte = [0, 1, 0x0f, 0xf0, 0xff][usize::try_from(pair.random(5)).unwrap()];
            bytes[usize::try_from(at).unwrap()] = byte;
        }
        if let Some(hostile) = PassedConnection::of_bytes(&bytes) {
            pair.call(1, |tcp, out| tcp.adopt(listener, &hostile, out));
        }
        settle(&mut pair);
        let begun = begin(&mut pair);
        settle(&mut pair);
        assert!(pair.hosts[0].tcp.info(begun).unwrap().is_some(), "seed {seed}");
    }
}

/// While a bucket passes from one process to another, both may answer a SYN if the table has no room for a claim. The
/// one whose answer was not the first is silent about the other's connection.
#[test]
fn exe_8_second_answer_resets_nothing() {
    for is_sole in [false, true] {
        let mut pair = pair();
        let beside = owner(&mut pair);
        listen(&mut pair, None);
        beside.answers.store(is_sole, Relaxed);
        let answered = |pair: &mut Pair, flags, numbers| {
            let (sequence, _) = say(pair, 1000, SYN, (500, 0)).unwrap();
            // The bucket has settled since.
            beside.answers.store(true, Relaxed);
            let answer = say(pair, 1000, flags, numbers);
            beside.answers.store(is_sole, Relaxed);
            (sequence, answer.map(|(_, flags)| flags & RST))
        };
        let (sequence, flags) = answered(&mut pair, ACK, (501, 7));
        assert_ne!(sequence.wrapping_add(1), 7);
        assert_eq!(flags, is_sole.then_some(RST));
        assert_eq!(beside.claims(), usize::from(is_sole), "it is another's connection");
        say(&mut pair, 1000, RST, (501, 0));
        let (_, flags) = answered(&mut pair, SYN, (510, 0));
        assert_eq!(flags, is_sole.then_some(RST), "the next connection's SYN");
        assert_eq!(beside.claims(), 0);
    }
}

/// A SYN that does not open an ended connection anew does not end its TIME-WAIT in favour of another process.
#[test]
fn exe_8_blind_syn_keeps_time_wait() {
    let mut pair = pair();
    let beside = owner(&mut pair);
    let listener = listen(&mut pair, None);
    let (ours, _) = say(&mut pair, 1000, SYN, (500, 0)).unwrap();
    let ours = ours.wrapping_add(1);
    say(&mut pair, 1000, ACK, (501, ours));
    let servers = accepted(&mut pair, listener);
    end(&mut pair, 1, servers);
    beside.takes.store(false, Relaxed);
    for ended in [false, true] {
        let expected = if ended {
            say(&mut pair, 1000, FIN | ACK, (501, ours.wrapping_add(1)));
            502
        } else {
            say(&mut pair, 1000, ACK, (501, ours.wrapping_add(1)));
            501
        };
        assert_eq!(pair.hosts[1].tcp.time_wait_count(), 1);
        pair.now_us += 1_000_000;
        let answer = say(&mut pair, 1000, SYN, (expected - 100, 0));
        assert_eq!(answer, Some((ours.wrapping_add(1), ACK)), "an old SYN, {ended}");
        assert_eq!((pair.hosts[1].tcp.time_wait_count(), beside.claims()), (1, 1));
    }
    assert_eq!(say(&mut pair, 1000, SYN, (10_000, 0)), None, "another process answers it");
    assert_eq!((pair.hosts[1].tcp.time_wait_count(), beside.claims()), (0, 0));
}

/// Handshakes that a closed listener forgets are reset only where other processes would be silent about them.
#[test]
fn exe_8_lone_listener_closes_silently() {
    for has_others in [false, true] {
        let mut pair = pair();
        let beside = owner(&mut pair);
        beside.has_others.store(has_others, Relaxed);
        let listener = listen(&mut pair, None);
        say(&mut pair, 1000, SYN, (500, 0)).unwrap();
        end(&mut pair, 1, [listener]);
        let resets = pair.hosts[1].tcp.counters().out_rsts.get();
        assert_eq!(resets, u64::from(has_others));
        assert_eq!(beside.claims(), 0);
    }
}
