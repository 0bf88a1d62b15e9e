//! `bench steer`: the whole way of a packet across two CPUs, through the real intake and delivery.
//!
//! Frame allocated and filled, parsed, hashed, steered, handed over; read on the other CPU, and its
//! frame returned.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay::sys;
use mem::frame::BEFORE_PACKET_BYTES;
use mem::pool::{CHUNK_ALIGN_BYTES, ChunkClass, carve, region_bytes};
use mem::{Pool, Position};
use path::arrive::Burst;
use path::backlog::NETDEV_MAX_BACKLOG;
use path::delivery::Batch;
use path::hash::toeplitz::STANDARD_KEY;
use path::hash::{FlowHash, Hasher};
use path::intake::IntakeConfig;
use path::packet::Arrival;
use path::parse::{self, Verify, View};
use path::steer::{HOLD_MAX, MoveAfter, RPS_FLOW_CNT, SpreadPolicy, SteerConfig, Tick};
use path::{Delivery, Handler, Intake, Packet, RxQueue};

use super::figures::Figures;
use super::input::{self, Sample};
use super::pair::{self, CpuPair, Probe};
use super::solo::{as_f64, nanoseconds};
use super::{BenchArgs, BenchHash};
use crate::failure::Failure;

const RING_CAPACITY: u32 = 1024;

/// Chunks are at least this large, as the engine's smallest are.
const CHUNK_BYTES_MIN: u32 = 2048;

/// Chunks of that size, and of larger ones, of which fewer fill the caches as well. Either is more
/// than what can be under way: a ring, a burst, and lots on their way home.
const CHUNKS: u32 = 8191;
const LARGE_CHUNKS: u32 = 2047;

/// How long a repeat takes.
const REPEAT: Duration = Duration::from_millis(60);

/// Bursts between looks at the clock.
const BURSTS: usize = 32;

/// What the two sides agree on.
#[derive(Default)]
struct Shared {
    probe: Probe,
    delivered: AtomicU64,
    end: AtomicBool,
}

pub(super) fn run(args: &BenchArgs, cpus: CpuPair) -> Result<Figures, Failure> {
    let hasher = Arc::new(hasher(args)?);
    let (packets, hashes) = steerable(input::packets(args.file.as_deref())?, &hasher, args.hash)?;
    let verify = if args.verify { Verify::Checksums } else { Verify::Nothing };
    let mut intake = intake(cpus, hasher, verify, args.bulk);
    let lane = intake.connect(cpus.there, RING_CAPACITY, Position(0), false);
    intake.set_rps_cpus([cpus.there], 0);
    let [mut pool, other_pool] = pools(&packets)?;
    let shared = Arc::new(Shared::default());
    let other = Arc::clone(&shared);
    let batch = args.bulk as usize;
    let reader = thread::spawn(move || {
        // Unpinned figures are still figures.
        let _ = sys::pin_to(cpus.there);
        deliver(Delivery::new(cpus.there, vec![lane], batch), other_pool, &other);
    });
    let mut sent = 0u64;
    let mut burst = Burst::default();
    let mut next = 0;
    let figures = pair::measure(args, "steer", "ns/packet", &shared.probe, || {
        let (started, first) = (Instant::now(), sent);
        while started.elapsed() < REPEAT {
            for _ in 0..BURSTS {
                while intake.room_for(args.bulk) < args.bulk {}
                pool.collect();
                next = receive(&packets, &hashes, next, batch, &mut pool, &mut burst);
                sent += burst.packets.len() as u64;
                intake.observe();
                let tick = Tick { now_ns: sent, busy_ns: 0 };
                intake.turn(tick, &mut burst).for_each(drop);
            }
        }
        while shared.delivered.load(Ordering::Acquire) < sent {}
        nanoseconds(started.elapsed()) / as_f64(usize::try_from(sent - first).unwrap_or(1))
    });
    shared.end.store(true, Ordering::Release);
    // It has nothing to panic about.
    let _ = reader.join();
    let hash = match args.hash {
        BenchHash::Given => "given",
        BenchHash::Keyed => "keyed",
        BenchHash::Toeplitz => "toeplitz",
    };
    Ok(figures
        .with("input", input::name(args.file.as_deref()))
        .with("packets", packets.len())
        .with("hash", hash)
        .with("burst", args.bulk)
        .with("verify", args.verify)
        .with("dropped", intake.counters().dropped())
        .with("frames_away", pool.away()))
}

pub(super) fn hasher(args: &BenchArgs) -> Result<Hasher, Failure> {
    match args.hash {
        BenchHash::Keyed => Ok(Hasher::keyed(&[7; 16], false)),
        BenchHash::Toeplitz | BenchHash::Given => Hasher::toeplitz(&STANDARD_KEY)
            .map_err(|error| Failure::usage(error.to_string(), "this is a bug: report it")),
    }
}

/// The packets that have a flow hash, and the hash that a device would give each, or none. Packets
/// without one (ARP, say) stay on the polling CPU, which delivers nothing here.
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
        cpus: cpus.there.index() + 1,
        verify,
        hasher,
        coalesce: None,
        steer: SteerConfig {
            polling_cpu: cpus.here,
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

/// Fills a burst, as a device would; returns where the next one begins.
fn receive(
    packets: &[Sample],
    hashes: &[FlowHash],
    mut next: usize,
    count: usize,
    pool: &mut Pool,
    burst: &mut Burst,
) -> usize {
    while burst.packets.len() < count {
        let packet = &packets[next];
        let len_bytes = u32::try_from(packet.bytes.len()).unwrap_or(u32::MAX);
        let Some(frame) = pool.allocate(len_bytes) else { break };
        let arrival = Arrival::of_frame(next as u64);
        let received = Packet::received(frame, arrival, packet.wire_len, packet.link);
        burst.packets.push(Packet { hash: hashes[next], ..received });
        if let Some(received) = burst.packets.last_mut() {
            received.frame.copy_from(&packet.bytes);
        }
        next = if next + 1 < packets.len() { next + 1 } else { 0 };
    }
    next
}

fn deliver(mut delivery: Delivery, mut pool: Pool, shared: &Shared) {
    let mut look = Look { sum: 0 };
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

/// Reads three words of each packet, as the peer does.
struct Look {
    sum: u64,
}

impl Handler for Look {
    fn handle(&mut self, batch: &mut Batch<'_>) {
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
