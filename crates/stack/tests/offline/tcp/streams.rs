//! Laws of streams: every byte arrives once and in order, and both ends come to an end.

use std::net::Shutdown;

use forebay_stack::tcp::{
    Algorithm, MtuProbing, Tcp, TcpConfig, TcpError, TcpOptions, TcpOut, TcpSocket,
};
use proptest::prelude::*;

use super::pair::{Faults, Pair};

/// Steps after which a stream counts as hanging.
const STEPS: u32 = 400_000;

/// One direction of a stream.
struct Direction {
    from: (usize, TcpSocket),
    to: (usize, TcpSocket),
    sent: usize,
    len: usize,
    received: usize,
    is_over: bool,
}

pub(super) fn byte_of(at: usize) -> u8 {
    u8::try_from((at.wrapping_mul(2_654_435_761) >> 7) % 251).unwrap()
}

impl Direction {
    fn new(from: (usize, TcpSocket), to: (usize, TcpSocket), len: usize) -> Self {
        Self { from, to, sent: 0, len, received: 0, is_over: false }
    }

    /// Writes a random part of what is left, and closes at the end.
    fn write(&mut self, pair: &mut Pair) {
        if self.sent > self.len {
            return;
        }
        let (host, socket) = self.from;
        if self.sent == self.len {
            pair.call(host, |tcp, out| tcp.shutdown(socket, Shutdown::Write, out)).unwrap();
            self.sent += 1;
            return;
        }
        let most = usize::try_from(pair.random(6000) + 1).unwrap();
        let bytes: Vec<u8> = (self.sent..self.len.min(self.sent + most)).map(byte_of).collect();
        match pair.call(host, |tcp, out| tcp.write(socket, &bytes, Default::default(), out)) {
            Ok(written) => self.sent += written,
            Err(TcpError::WouldBlock) => {}
            Err(error) => panic!("a write failed: {error:?}"),
        }
    }

    /// Reads a random number of bytes, and compares them.
    fn read(&mut self, pair: &mut Pair) {
        let (host, socket) = self.to;
        let mut room = vec![0; usize::try_from(pair.random(9000) + 1).unwrap()];
        match pair.call(host, |tcp, out| tcp.read(socket, &mut room, out)) {
            Ok(0) => {
                assert_eq!(self.received, self.len, "the end came early");
                self.is_over = true;
            }
            Ok(len) => {
                for (at, &byte) in room[..len].iter().enumerate() {
                    assert_eq!(byte, byte_of(self.received + at), "byte {}", self.received + at);
                }
                self.received += len;
            }
            Err(TcpError::WouldBlock) => {}
            Err(error) => panic!("a read failed: {error:?}"),
        }
    }
}

/// Sends streams both ways over a path with these faults, and checks all laws.
pub(super) fn run(
    seed: u64,
    faults: Faults,
    configs: [TcpConfig; 2],
    lens: [usize; 2],
    options: TcpOptions,
) {
    let mut pair = Pair::new(seed, faults, configs);
    let (client, server) = pair.open(80);
    for (host, socket) in [(0, client), (1, server)] {
        pair.call(host, |tcp, out| tcp.set_options(socket, options, out)).unwrap();
    }
    let (here, there) = ((0, client), (1, server));
    let mut directions =
        [Direction::new(here, there, lens[0]), Direction::new(there, here, lens[1])];
    let mut steps = 0;
    while !directions.iter().all(|direction| direction.is_over) {
        for direction in &mut directions {
            if pair.random(3) > 0 {
                direction.write(&mut pair);
            }
            if !direction.is_over && pair.random(4) > 0 {
                direction.read(&mut pair);
            }
        }
        pair.step();
        steps += 1;
        assert!(
            steps < STEPS,
            "hangs at {:?} of {lens:?} after {} s: {:?} {:?}",
            directions.each_ref().map(|direction| (direction.sent, direction.received)),
            pair.now_us / 1_000_000,
            pair.hosts[0].tcp.info(client),
            pair.hosts[1].tcp.info(server),
        );
    }
    pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
    pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    pair.check_rest();
}

/// Bytes written while no frame is free leave later, once, and count as sent only then.
#[test]
fn tcp_6_data_wait_for_a_frame() {
    let mut pair = Pair::new(1, Faults::default(), [TcpConfig::default(); 2]);
    let (client, server) = pair.open(80);
    let pool = &mut pair.hosts[0].pool;
    let taken: Vec<_> = std::iter::from_fn(|| pool.allocate(1000)).collect();
    let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
        tcp.write(client, &[7; 5000], Default::default(), out)
    };
    assert_eq!(pair.call(0, write), Ok(5000));
    let info = pair.hosts[0].tcp.info(client).unwrap().unwrap();
    assert_eq!((info.unacked, info.unsent_bytes), (0, 5000));
    taken.into_iter().for_each(|frame| pair.hosts[0].pool.put(frame));
    let mut received: Vec<u8> = Vec::new();
    while received.len() < 5000 {
        assert!(pair.step(), "a timer waits for the frame");
        let mut room = [0; 5000];
        let len = pair.call(1, |tcp, out| tcp.read(server, &mut room, out)).unwrap_or(0);
        received.extend(&room[..len]);
    }
    assert_eq!(received, [7; 5000]);
    assert_eq!(pair.hosts[0].tcp.counters().retrans_segs.get(), 0);
    for (host, socket) in [(0, client), (1, server)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
    pair.check_rest();
}

/// A connection that found no frame for long sends soon after there is one, and is not given up meanwhile.
#[test]
fn tcp_6_frame_after_long_is_used_soon() {
    let mut pair = Pair::new(1, Faults::default(), [TcpConfig::default(); 2]);
    let (client, server) = pair.open(80);
    let pool = &mut pair.hosts[0].pool;
    let taken: Vec<_> = std::iter::from_fn(|| pool.allocate(1)).collect();
    let write =
        |tcp: &mut Tcp, out: &mut TcpOut<'_>| tcp.write(client, &[7; 100], Default::default(), out);
    assert_eq!(pair.call(0, write), Ok(100));
    let free_us = pair.now_us + 100_000_000;
    while pair.now_us < free_us {
        assert!(pair.step(), "a timer waits for the frame");
    }
    let info = pair.hosts[0].tcp.info(client).unwrap().unwrap();
    assert_eq!((info.unacked, info.probes, info.backoff), (0, 0, 0), "the peer was not asked");
    let free_us = pair.now_us;
    taken.into_iter().for_each(|frame| pair.hosts[0].pool.put(frame));
    let mut room = [0; 100];
    while pair.call(1, |tcp, out| tcp.read(server, &mut room, out)) != Ok(100) {
        assert!(pair.step(), "a timer waits for the frame");
    }
    assert!(pair.now_us - free_us <= 1_000_000, "{} µs", pair.now_us - free_us);
    for (host, socket) in [(0, client), (1, server)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
    pair.check_rest();
}

prop_compose! {
    fn faults()(
        loss in 0_u32..15, repeat in 0_u32..10, reorder in 0_u32..30, delay_us in 0_u64..60_000, merges: bool,
    ) -> Faults {
        Faults { loss, repeat, reorder, delay_us, merges, ..Faults::default() }
    }
}

prop_compose! {
    pub(super) fn config()(
        timestamps: bool, window_scaling: bool, sack: bool, ecn: bool, is_reno: bool,
        rmem in 4_000_u32..300_000, gso: bool, is_probed: bool,
    ) -> TcpConfig {
        TcpConfig {
            timestamps, window_scaling, sack,
            // A path that loses 14 % of the packets may lose all of a handshake that gives up as usual.
            syn_retries: 20,
            synack_retries: 20,
            asks_ecn: ecn,
            rmem: (rmem, rmem * 4),
            gso_bytes: if gso { 60_000 } else { 0 },
            mtu_probing: if is_probed { MtuProbing::Always } else { MtuProbing::Off },
            congestion: if is_reno { Algorithm::NewReno } else { Algorithm::Cubic },
            ..TcpConfig::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn tcp_6_streams_survive_a_bad_path(
        seed: u64, faults in faults(), first in config(), second in config(),
        lens: [u16; 2], nodelay: bool,
    ) {
        let options = TcpOptions { nodelay, ..TcpOptions::default() };
        run(seed, faults, [first, second], lens.map(usize::from), options);
    }
}

#[test]
fn tcp_6_merged_segments_make_the_same_stream() {
    for merges in [false, true] {
        let faults = Faults { delay_us: 10_000, merges, ..Faults::default() };
        let config = TcpConfig { gso_bytes: 60_000, ..TcpConfig::default() };
        run(7, faults, [config; 2], [3_000_000, 1_000_000], TcpOptions::default());
    }
}

#[test]
fn tcp_6_end_without_a_frame_follows() {
    let mut pair =
        Pair::new(7, Faults { delay_us: 100, ..Faults::default() }, [TcpConfig::default(); 2]);
    let (client, server) = pair.open(80);
    let pool = &mut pair.hosts[0].pool;
    let all: Vec<_> = std::iter::from_fn(|| pool.allocate(1)).collect();
    pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
    all.into_iter().for_each(|frame| pair.hosts[0].pool.put(frame));
    let is_over =
        |pair: &mut Pair| pair.call(1, |tcp, out| tcp.read(server, &mut [0], out)) == Ok(0);
    while !is_over(&mut pair) {
        assert!(pair.step(), "nothing will send the FIN");
    }
    pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    pair.check_rest();
}
