//! `bench steer`: the whole way of a packet across two CPUs, through the real intake and delivery.
//!
//! A frame is allocated and filled, parsed, hashed, steered, and handed over; the other CPU reads
//! it and returns the frame.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::pool::{CHUNK_ALIGN_BYTES, ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Position};
use forebay_rx::arrive::Burst;
use forebay_rx::backlog::NETDEV_MAX_BACKLOG;
use forebay_rx::delivery::Batch;
use forebay_rx::hash::toeplitz::STANDARD_KEY;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::intake::IntakeConfig;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{self, Verify, View};
use forebay_rx::steer::{
    HOLD_MAX, MoveAfter, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES, SockFlowTable, SpreadPolicy,
    SteerConfig,
};
use forebay_rx::{Delivery, Handler, Intake, Packet, RxQueue};
use forebay_sys as sys;

use super::figures::{Figures, RoundSpread};
use super::input::{self, Sample};
use super::pair::{self, CpuPair, Probe};
use super::solo::{as_f64, nanoseconds};
use super::{BenchArgs, BenchHash};
use crate::failure::Failure;

const RING_CAPACITY: u32 = 1024;

/// Minimum chunk size, that of the engine's smallest chunks.
const CHUNK_BYTES_MIN: u32 = 2048;

/// Number of chunks of that size; of larger ones fewer fill the caches as well. Both exceed the
/// frames in flight: a ring, a burst, and batches being returned.
const CHUNKS: u32 = 8191;
const LARGE_CHUNKS: u32 = 2047;

/// Duration of a repeat.
const REPEAT: Duration = Duration::from_millis(60);

/// Bursts between two readings of the clock.
const BURSTS: usize = 32;

/// State that the two sides share.
struct SharedTables {
    probe: Probe,
    delivered: AtomicU64,
    end: AtomicBool,
    sock_flows: Arc<SockFlowTable>,
    /// True if the application records its CPU, and flows follow it.
    rfs: AtomicBool,
}

pub(super) fn run(args: &BenchArgs, cpus: CpuPair) -> Result<Figures, Failure> {
    let hasher = Arc::new(hasher(args)?);
    let (packets, hashes) = steerable(input::packets(args.file.as_deref())?, &hasher, args.hash)?;
    let verify = if args.verify { Verify::Checksums } else { Verify::Nothing };
    let mut intake = intake(cpus, hasher, verify, args.bulk);
    let lane = intake.connect(cpus.consumer, RING_CAPACITY, Position(0), false);
    intake.set_rps_cpus([cpus.consumer], 0);
    let [pool, other_pool] = pools(&packets)?;
    let sock_flows = SockFlowTable::new(RPS_SOCK_FLOW_ENTRIES, cpus.consumer.index() + 1);
    let shared = Arc::new(SharedTables {
        probe: Probe::default(),
        delivered: AtomicU64::new(0),
        end: AtomicBool::new(false),
        sock_flows: Arc::new(sock_flows),
        rfs: AtomicBool::new(false),
    });
    let other = Arc::clone(&shared);
    let batch = args.bulk as usize;
    let reader = thread::spawn(move || {
        // Ignored: figures of an unpinned thread are still valid.
        let _ = sys::pin_to(cpus.consumer);
        deliver(Delivery::new(cpus.consumer, vec![lane], batch), other_pool, &other);
    });
    let mut sender = Sender { packets, hashes, pool, intake, sent: 0, next: 0 };
    let mut ratios = Vec::new();
    let figures = pair::measure(args, "steer", "ns/packet", &shared.probe, || {
        if !args.rfs {
            return sender.repeat(batch, &shared);
        }
        sender.follow(&shared, false);
        let without = sender.repeat(batch, &shared);
        sender.follow(&shared, true);
        let with = sender.repeat(batch, &shared);
        ratios.push(with / without);
        with
    });
    shared.end.store(true, Ordering::Release);
    // The thread does not panic.
    let _ = reader.join();
    let hash = match args.hash {
        BenchHash::Given => "given",
        BenchHash::Keyed => "keyed",
        BenchHash::Toeplitz => "toeplitz",
    };
    Ok(figures
        .with("input", input::name(args.file.as_deref()))
        .with("packets", sender.packets.len())
        .with("hash", hash)
        .with("burst", args.bulk)
        .with("verify", args.verify)
        .with("to_without_rfs", RoundSpread::of(&ratios))
        .with("dropped", sender.intake.counters().dropped())
        .with("frames_away", sender.pool.in_use()))
}

/// The polling CPU's side.
struct Sender {
    packets: Vec<Sample>,
    hashes: Vec<FlowHash>,
    pool: Pool,
    intake: Intake,
    sent: u64,
    next: usize,
}

impl Sender {
    /// Sends for one repeat, and waits until all packets have arrived. Returns nanoseconds per
    /// packet.
    fn repeat(&mut self, batch: usize, shared: &SharedTables) -> f64 {
        let bulk = u32::try_from(batch).unwrap_or(u32::MAX);
        let mut burst = Burst::default();
        let (started, first) = (Instant::now(), self.sent);
        while started.elapsed() < REPEAT {
            for _ in 0..BURSTS {
                while self.intake.room_for(bulk) < bulk {}
                self.pool.collect();
                self.receive(batch, &mut burst);
                self.sent += burst.packets.len() as u64;
                self.intake.observe();
                let now_ns = self.sent;
                self.intake.turn(now_ns, &mut burst, &mut self.pool).for_each(drop);
            }
        }
        while shared.delivered.load(Ordering::Acquire) < self.sent {}
        nanoseconds(started.elapsed()) / as_f64(usize::try_from(self.sent - first).unwrap_or(1))
    }

    /// Sets whether flows follow their application.
    fn follow(&mut self, shared: &SharedTables, rfs: bool) {
        shared.rfs.store(rfs, Ordering::Relaxed);
        self.intake.set_sock_flows(rfs.then(|| Arc::clone(&shared.sock_flows)), 0);
    }

    /// Fills a burst, as a device would.
    fn receive(&mut self, count: usize, burst: &mut Burst) {
        while burst.packets.len() < count {
            let packet = &self.packets[self.next];
            let len_bytes = u32::try_from(packet.bytes.len()).unwrap_or(u32::MAX);
            let Some(frame) = self.pool.allocate(len_bytes) else { break };
            let arrival = Arrival::of_frame(self.next as u64);
            let received = Packet::received(frame, arrival, packet.wire_len, packet.link);
            burst.packets.push(Packet { hash: self.hashes[self.next], ..received });
            if let Some(received) = burst.packets.last_mut() {
                received.frame.copy_from(&packet.bytes);
            }
            self.next = if self.next + 1 < self.packets.len() { self.next + 1 } else { 0 };
        }
    }
}

pub(super) fn hasher(args: &BenchArgs) -> Result<Hasher, Failure> {
    match args.hash {
        BenchHash::Keyed => Ok(Hasher::keyed(&[7; 16], false)),
        BenchHash::Toeplitz | BenchHash::Given => Hasher::toeplitz(&STANDARD_KEY)
            .map_err(|error| Failure::usage(error.to_string(), "this is a bug: report it")),
    }
}

/// Packets that have a flow hash, each with the hash that a device would report, or none. Packets
/// without a flow hash (such as ARP) would stay on the polling CPU, which delivers nothing here.
fn steerable(
    packets: Vec<Sample>,
    hasher: &Hasher,
    hash: BenchHash,
) -> Result<(Vec<Sample>, Vec<FlowHash>), Failure> {
    let hashed = |packet: Sample| {
        let headers = parse::parse(&packet.bytes, packet.wire_len, packet.link, Verify::Nothing);
        let flow = hasher.hash(&View::new(&packet.bytes, &headers));
        let given = if hash == BenchHash::Given { flow } else { FlowHash::NONE };
        flow.is_some().then_some((packet, given))
    };
    let (packets, hashes): (Vec<_>, Vec<_>) = packets.into_iter().filter_map(hashed).unzip();
    if packets.is_empty() {
        return Err(Failure::usage("the capture holds no packet with a flow hash", "give another"));
    }
    Ok((packets, hashes))
}

fn intake(cpus: CpuPair, hasher: Arc<Hasher>, verify: Verify, bulk: u32) -> Intake {
    Intake::new(IntakeConfig {
        queue: RxQueue(0),
        cpus: cpus.consumer.index() + 1,
        verify,
        completes_checksums: false,
        hasher,
        coalesce: None,
        steer: SteerConfig {
            polling_cpu: cpus.producer,
            rps_flow_cnt: RPS_FLOW_CNT,
            move_after: MoveAfter::default(),
            hold_max: HOLD_MAX,
            spread: SpreadPolicy::Always,
            batch_max: bulk,
        },
        netdev_max_backlog: NETDEV_MAX_BACKLOG,
    })
}

fn pools(packets: &[Sample]) -> Result<[Pool; 2], Failure> {
    let largest = packets.iter().map(|packet| packet.bytes.len()).max().unwrap_or(0);
    let chunk_bytes =
        u32::try_from(largest).unwrap_or(u32::MAX).saturating_add(BEFORE_PACKET_BYTES);
    let chunks = if chunk_bytes <= CHUNK_BYTES_MIN {
        ChunkClass { chunk_bytes: CHUNK_BYTES_MIN, chunks: CHUNKS }
    } else {
        let chunk_bytes = chunk_bytes.next_multiple_of(CHUNK_ALIGN_BYTES);
        ChunkClass { chunk_bytes, chunks: LARGE_CHUNKS }
    };
    let shares = [vec![chunks], vec![]];
    let region = sys::map_packet_memory(region_bytes(&shares))?;
    let pools = carve(region, &shares).ok().and_then(|pools| pools.try_into().ok());
    pools.ok_or_else(|| Failure::usage("the region is too small", "this is a bug: report it"))
}

fn deliver(mut delivery: Delivery, mut pool: Pool, shared: &SharedTables) {
    let mut look = Look { shared, sum: 0 };
    let mut delivered = 0;
    loop {
        let done = delivery.turn(64, &mut pool, &mut look);
        if done > 0 {
            pool.flush();
            delivered += done as u64;
            shared.delivered.store(delivered, Ordering::Release);
        } else if shared.end.load(Ordering::Acquire) {
            std::hint::black_box(look.sum);
            return;
        } else {
            shared.probe.answer_if_asked();
        }
    }
}

/// Reads three words of each packet, as the peer's benchmark does.
struct Look<'a> {
    shared: &'a SharedTables,
    sum: u64,
}

impl Handler for Look<'_> {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        if self.shared.rfs.load(Ordering::Relaxed) {
            let flows = batch.packets.iter().map(|packet| packet.hash);
            flows.for_each(|flow| self.shared.sock_flows.record(flow, batch.cpu));
        }
        for packet in batch.packets.iter() {
            packet.frame.prefetch();
        }
        for packet in batch.packets.iter() {
            let (words, _) = packet.frame.data().as_chunks::<8>();
            for at in [1, 3, 5] {
                let word = words.get(at).copied().map_or(0, u64::from_ne_bytes);
                self.sum = self.sum.wrapping_add(word);
            }
        }
    }
}
