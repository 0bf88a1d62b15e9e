//! Instructions of the hottest functions: `counts CASE ROUNDS` runs one of them ROUNDS times.
//! `./ci.sh counts` counts the instructions of two runs, and compares the cost of a further round
//! with `counts.limits`. Counts do not depend on other load of the machine.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a program for developers")]

use std::hint::black_box;
use std::sync::Arc;

use etherparse::PacketBuilder;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::ring::ring;
use forebay_buf::sum::sum;
use forebay_buf::{Pool, Position, Region};
use forebay_rx::arrive::{Burst, PollStatus};
use forebay_rx::coalesce::{CoalesceConfig, Coalescer};
use forebay_rx::counters::CoalesceCounters;
use forebay_rx::delivery::Batch;
use forebay_rx::hash::toeplitz::{STANDARD_KEY, Toeplitz};
use forebay_rx::hash::{Hasher, Keyed};
use forebay_rx::intake::IntakeConfig;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{DeviceSum, Headers, Link, Verify, parse, parse_into};
use forebay_rx::steer::{HOLD_MAX, MoveAfter, RPS_FLOW_CNT, SpreadPolicy, SteerConfig};
use forebay_rx::{CpuId, Delivery, Handler, Intake, Packet, RxQueue};

/// Number of packets in a burst.
const BURST: usize = 64;

/// Case of the benchmark. Each round is one packet, word or frame, or a burst of them.
type Case = fn(rounds: u32);

const CASES: [(&str, Case); 12] = [
    ("parse_udp4", |rounds| parsed(&udp4(18), Verify::Nothing, rounds)),
    ("parse_tcp6", |rounds| parsed(&tcp6(64), Verify::Nothing, rounds)),
    ("verify_udp4_1500", |rounds| parsed(&udp4(1458), Verify::Checksums, rounds)),
    ("verify_told_udp4", |rounds| told(&udp4(18), rounds)),
    ("hash_keyed", hash_keyed),
    ("hash_toeplitz", |rounds| hash_toeplitz(&[10, 0, 0, 1, 10, 0, 0, 2], rounds)),
    ("hash_toeplitz6", |rounds| hash_toeplitz(&[7; 32], rounds)),
    ("sum_1500", sum_1500),
    ("ring_burst", ring_burst),
    ("pool_frame", pool_frame),
    ("steered_burst", steered_burst),
    ("merged_burst", merged_burst),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [case, rounds] = &arguments[..] else {
        // `cargo bench` and `cargo test` pass options of their own, and run all cases once.
        CASES.iter().for_each(|(_, run)| run(1));
        return;
    };
    let (_, run) = CASES.iter().find(|(name, _)| name == case).expect("a case by that name");
    run(rounds.parse().expect("a number of rounds"));
}

fn parsed(frame: &[u8], verify: Verify, rounds: u32) {
    let wire_len = u32::try_from(frame.len()).unwrap();
    let mut headers;
    for _ in 0..rounds {
        // In place, as in a packet.
        headers = Headers::default();
        parse_into(&mut headers, black_box(frame), wire_len, None, verify);
        black_box(&headers);
    }
}

/// Parses and verifies a frame that came with a sum over its bytes.
fn told(frame: &[u8], rounds: u32) {
    let wire_len = u32::try_from(frame.len()).unwrap();
    let sum = DeviceSum::of_frame(frame, Link::Ethernet);
    for _ in 0..rounds {
        let mut headers = Headers::default();
        parse_into(&mut headers, black_box(frame), wire_len, black_box(sum), Verify::Checksums);
        black_box(&headers);
    }
}

fn hash_keyed(rounds: u32) {
    let keyed = Keyed::new(&[7; 16], false);
    for _ in 0..rounds {
        black_box(keyed.hash(black_box(&[10, 0, 0, 1, 10, 0, 0, 2]), Some(&[1, 2, 3, 4])));
    }
}

fn hash_toeplitz(addresses: &[u8], rounds: u32) {
    let toeplitz = Toeplitz::new(&STANDARD_KEY, 36).unwrap();
    for _ in 0..rounds {
        black_box(toeplitz.hash_tuple(black_box(addresses), Some(&[1, 2, 3, 4])));
    }
}

fn sum_1500(rounds: u32) {
    let bytes = vec![0x5a; 1500];
    for _ in 0..rounds {
        black_box(sum(black_box(&bytes)));
    }
}

/// Passes a burst of words through a ring.
fn ring_burst(rounds: u32) {
    let (mut producer, mut consumer) = ring(128, Position(0));
    let mut numbers = Vec::with_capacity(BURST);
    for _ in 0..rounds {
        numbers.extend(0..BURST as u64);
        assert!(producer.push_all(&mut numbers));
        producer.publish();
        assert_eq!(consumer.take(BURST, &mut numbers), BURST);
        consumer.release();
        numbers.clear();
    }
}

fn pool_frame(rounds: u32) {
    let mut pool = pool();
    for _ in 0..rounds {
        let frame = black_box(pool.allocate(1500).unwrap());
        pool.put(frame);
    }
}

/// Receives a burst of 64 flows, and parses, hashes, steers, delivers and returns it.
fn steered_burst(rounds: u32) {
    let (here, there) = (CpuId(0), CpuId(1));
    let mut intake = Intake::new(IntakeConfig {
        queue: RxQueue(0),
        cpus: 2,
        verify: Verify::Nothing,
        completes_checksums: false,
        hasher: Arc::new(Hasher::keyed(&[7; 16], false)),
        coalesce: None,
        steer: SteerConfig {
            polling_cpu: here,
            rps_flow_cnt: RPS_FLOW_CNT,
            move_after: MoveAfter::default(),
            hold_max: HOLD_MAX,
            spread: SpreadPolicy::Always,
            batch_max: 64,
        },
        netdev_max_backlog: 1000,
    });
    let ring = intake.connect(there, 1024, Position(0), false);
    intake.set_rps_cpus([there], 0);
    let mut delivery = Delivery::new(there, vec![ring], BURST);
    let (mut pool, mut burst) = (pool(), Burst::default());
    let frames: Vec<_> = (0..BURST).map(|flow| udp4(18 + flow)).collect();
    for round in 0..rounds {
        receive(&mut pool, &frames, &mut burst.packets);
        let _ = intake.turn(u64::from(round) * 1000, &mut burst, &mut pool);
        assert_eq!(delivery.turn(BURST, &mut pool, &mut Nobody), BURST);
        pool.flush();
        pool.collect();
    }
}

/// Merges a burst of 64 segments of one TCP connection, and returns the frames.
fn merged_burst(rounds: u32) {
    let mut coalescer =
        Coalescer::new(CoalesceConfig::default(), Arc::<CoalesceCounters>::default());
    let hasher = Hasher::keyed(&[7; 16], false);
    let (mut pool, mut packets, mut out) = (pool(), Vec::new(), Vec::new());
    let frames: Vec<_> = (0..64).map(|at| segment(at * 1000)).collect();
    for _ in 0..rounds {
        receive(&mut pool, &frames, &mut packets);
        for packet in &mut packets {
            packet.hash = hasher.hash(&packet.view());
        }
        coalescer.coalesce(&mut packets, 0, &mut out);
        coalescer.end_poll(PollStatus::Drained, 0, &mut out);
        assert!(out.len() <= 2, "they are of one flow, and in order");
        out.drain(..).for_each(|packet| pool.put(packet.frame));
    }
}

/// Handler that takes no packets: the delivery returns their frames.
struct Nobody;

impl Handler for Nobody {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        black_box(batch.packets.len());
    }
}

fn receive(pool: &mut Pool, frames: &[Vec<u8>], packets: &mut Vec<Packet>) {
    for (number, bytes) in (0..).zip(frames) {
        let len_bytes = u32::try_from(bytes.len()).unwrap();
        let mut frame = pool.allocate(len_bytes).unwrap();
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(number), len_bytes, Link::Ethernet);
        packet.headers = parse(bytes, len_bytes, Link::Ethernet, Verify::Checksums);
        packets.push(packet);
    }
}

fn pool() -> Pool {
    let share = vec![ChunkClass { chunk_bytes: 2048, chunks: 512 }];
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    carve(region, &[share]).unwrap().remove(0)
}

fn udp4(payload_bytes: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    let port = u16::try_from(payload_bytes).unwrap();
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
    builder.udp(port, 53).write(&mut frame, &vec![7; payload_bytes]).unwrap();
    frame
}

fn tcp6(payload_bytes: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv6([1; 16], [2; 16], 64);
    builder.tcp(1000, 80, 1, 500).ack(9).write(&mut frame, &vec![7; payload_bytes]).unwrap();
    frame
}

fn segment(sequence: u32) -> Vec<u8> {
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
    builder.tcp(1000, 80, sequence, 500).ack(9).write(&mut frame, &[7; 1000]).unwrap();
    frame
}
