//! Law: streams are whole whatever options their applications change meanwhile, over bad paths and with little memory.

use std::net::Shutdown;
use std::num::NonZeroU32;

use forebay_stack::tcp::{
    Algorithm, MtuProbing, PathError, Seq, TcpConfig, TcpError, TcpSocket, WriteFlags,
};

use super::pair::{Faults, Pair};
use super::streams::byte_of;

/// Steps after which a stream counts as hanging.
const STEPS: u32 = 60_000;
/// Steps in which options change.
const CHANGING_STEPS: u32 = 3_000;

/// One end of the connection.
struct End {
    socket: TcpSocket,
    /// Bytes to be written in all, and so far.
    len: usize,
    sent: usize,
    received: usize,
    is_shut: bool,
    has_read_all: bool,
}

impl End {
    fn new(socket: TcpSocket, len: usize) -> Self {
        Self { socket, len, sent: 0, received: 0, is_shut: false, has_read_all: false }
    }
}

fn is_one_of(pair: &mut Pair, count: u64) -> bool {
    pair.random(count) == 0
}

fn number(pair: &mut Pair, limit: u64) -> u32 {
    u32::try_from(pair.random(limit)).unwrap()
}

fn config(random: &mut Pair) -> TcpConfig {
    let probing = [MtuProbing::Off, MtuProbing::AfterBlackHole, MtuProbing::Always];
    TcpConfig {
        timestamps: is_one_of(random, 2),
        window_scaling: is_one_of(random, 2),
        sack: !is_one_of(random, 4),
        asks_ecn: is_one_of(random, 2),
        rmem: (4_000 + number(random, 200_000), 250_000 + number(random, 1_000_000)),
        gso_bytes: if is_one_of(random, 2) { 60_000 } else { 0 },
        pushes_large_packets: is_one_of(random, 2),
        pacing: is_one_of(random, 3),
        mtu_probing: probing[number(random, 3) as usize],
        congestion: algorithm(random),
        received_bytes: if is_one_of(random, 4) { 30_000 + random.random(50_000) } else { 1 << 30 },
        memory_bytes: if is_one_of(random, 4) { 40_000 + random.random(50_000) } else { 1 << 30 },
        ..TcpConfig::default()
    }
}

fn algorithm(random: &mut Pair) -> Algorithm {
    if is_one_of(random, 2) { Algorithm::NewReno } else { Algorithm::Cubic }
}

/// Changes an option of an end, or its route.
fn change(pair: &mut Pair, host: usize, socket: TcpSocket) {
    let mut options = pair.hosts[host].tcp.options(socket).unwrap();
    match pair.random(9) {
        0 => options.rcvbuf = Some(2_304 + number(pair, 60_000)),
        1 => options.sndbuf = Some(4_608 + number(pair, 60_000)),
        2 => options.window_clamp = NonZeroU32::new(1 + number(pair, 60_000)),
        3 => options.cork = is_one_of(pair, 2),
        4 => options.nodelay = is_one_of(pair, 2),
        5 => options.unsent_limit = NonZeroU32::new(1 + number(pair, 6_000)),
        6 => options.congestion = Some(algorithm(pair)),
        7 => {
            let mtu = 600 + number(pair, 901);
            pair.call(host, |tcp, out| tcp.set_route_mtu(socket, mtu, out)).unwrap();
        }
        _ => {
            let error = PathError::TooBig { mtu_bytes: number(pair, 1_500) };
            let flow = pair.hosts[host].tcp.flow(socket).unwrap();
            let seq = Seq(pair.last[host].0);
            pair.call(host, |tcp, out| tcp.receive_error(&flow, seq, error, out));
        }
    }
    pair.call(host, |tcp, out| tcp.set_options(socket, options, out)).unwrap();
}

/// Writes some of what is left, or closes at the end.
fn write(pair: &mut Pair, host: usize, end: &mut End) {
    if end.sent == end.len {
        if !std::mem::replace(&mut end.is_shut, true) {
            let shut = Shutdown::Write;
            pair.call(host, |tcp, out| tcp.shutdown(end.socket, shut, out)).unwrap();
        }
        return;
    }
    let most = 1 + number(pair, 30_000) as usize;
    let bytes: Vec<u8> = (end.sent..end.len.min(end.sent + most)).map(byte_of).collect();
    let flags = WriteFlags {
        is_urgent: is_one_of(pair, 20),
        more_follows: is_one_of(pair, 5),
        ends_record: is_one_of(pair, 5),
        ends_packet: is_one_of(pair, 20),
        ..WriteFlags::default()
    };
    match pair.call(host, |tcp, out| tcp.write(end.socket, &bytes, flags, out)) {
        Ok(written) => end.sent += written,
        Err(error) => assert_eq!(error, TcpError::WouldBlock),
    }
}

/// Reads some, and compares it with what the peer wrote, `len` bytes in all.
fn read(pair: &mut Pair, host: usize, end: &mut End, len: usize) {
    let mut room = vec![0; 1 + number(pair, 20_000) as usize];
    match pair.call(host, |tcp, out| tcp.read(end.socket, &mut room, out)) {
        Ok(0) => {
            assert_eq!(end.received, len, "the end came early");
            end.has_read_all = true;
        }
        Ok(count) => {
            let expected = (end.received..end.received + count).map(byte_of);
            assert!(room[..count].iter().copied().eq(expected), "behind {}", end.received);
            end.received += count;
        }
        Err(error) => assert_eq!(error, TcpError::WouldBlock),
    }
}

fn run(seed: u64) {
    let mut random = Pair::new(seed, Faults::default(), [TcpConfig::default(); 2]);
    (0..20).for_each(|_| _ = random.random(2)); // the first ones are much alike
    let configs = [config(&mut random), config(&mut random)];
    let faults = Faults {
        loss: number(&mut random, 12),
        repeat: number(&mut random, 8),
        reorder: number(&mut random, 25),
        delay_us: random.random(40_000),
        merges: is_one_of(&mut random, 2),
        ..Faults::default()
    };
    let chunks = if is_one_of(&mut random, 4) { 64 + number(&mut random, 100) } else { 8192 };
    let mut pair = Pair::with_chunks(chunks, seed, faults, configs);
    let (client, server) = pair.open(80);
    let lens = [400_000, 60_000].map(|limit| number(&mut random, limit) as usize);
    let mut ends = [End::new(client, lens[0]), End::new(server, lens[1])];
    for (host, end) in ends.iter().enumerate() {
        let mut options = pair.hosts[host].tcp.options(end.socket).unwrap();
        options.oob_inline = true;
        pair.call(host, |tcp, out| tcp.set_options(end.socket, options, out)).unwrap();
    }
    let mut steps = 0;
    while !ends.iter().all(|end| end.has_read_all) {
        for (host, end) in ends.iter_mut().enumerate() {
            if is_one_of(&mut pair, 30) && steps < CHANGING_STEPS {
                change(&mut pair, host, end.socket);
            }
            if end.sent == end.len || !is_one_of(&mut pair, 3) {
                write(&mut pair, host, end);
            }
            if !end.has_read_all && !is_one_of(&mut pair, 5) {
                read(&mut pair, host, end, lens[1 - host]);
            }
        }
        pair.step();
        steps += 1;
        let done = || ends.iter().map(|end| (end.sent, end.received)).collect::<Vec<_>>();
        assert!(steps < STEPS, "a stream hangs: {:?} of {lens:?}", done());
    }
    pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
    pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    pair.check_rest();
}

/// Seeds of each test run. To look for defects, try some thousands.
const SEEDS: u64 = 40;
/// Seed whose buffer's threshold fell below a segment, so that no window was announced.
const SMALL_THRESHOLD: u64 = 668;

/// Each seed is told with its panic, as the name of its thread.
#[test]
fn tcp_6_random_calls_lose_nothing() {
    for seed in (1..=SEEDS).chain([SMALL_THRESHOLD]) {
        let named = std::thread::Builder::new().name(format!("seed {seed}"));
        let thread = named.spawn(move || run(seed)).unwrap();
        thread.join().unwrap();
    }
}
