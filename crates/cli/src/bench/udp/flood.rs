//! A flood of datagrams to one socket: producer threads and one reader.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{self, Verify};
use forebay_rx::{CpuId, Packet};
use forebay_stack::socket::SocketId;
use forebay_stack::socket::copy_cache::{BUFFERS_MAX, CopyCache};
use forebay_stack::socket::queue::{
    Enqueue, SocketQueueConfig, SocketQueueConsumer, SocketQueueProducer, queue,
};
use forebay_stack::socket::reclaim::{
    BufferReclaimer, FrameReturn, ReclaimCounters, ReclaimPolicy,
};
use forebay_sys as sys;

use super::super::input::Sample;
use super::super::solo::{as_f64, nanoseconds};
use crate::failure::Failure;

/// Duration of a repeat.
const REPEAT: Duration = Duration::from_millis(30);

/// Requested size of a device's frames: large enough for an Ethernet frame.
const DEVICE_ROOM_BYTES: u32 = 1514;
const CHUNKS: ChunkClass = ChunkClass { chunk_bytes: 2048, chunks: 2047 };
const SMALL_CHUNKS: ChunkClass = ChunkClass { chunk_bytes: 512, chunks: 1023 };

/// Upper bound on datagrams that the reader takes at once.
const READ_MAX: usize = 64;

/// Load of one repeat.
#[derive(Clone, Copy)]
pub(super) struct FloodLoad {
    pub(super) policy: ReclaimPolicy,
    /// The reader's work per datagram.
    pub(super) work: Work,
    /// Datagrams per second from all producers together. `None`: as many as possible.
    pub(super) offered_pps: Option<f64>,
}

/// Result of one repeat.
#[derive(Clone, Copy, Default)]
pub(super) struct FloodOutcome {
    /// Datagrams read, in thousands per second.
    pub(super) kpps: f64,
    /// Packets put in or dropped, in thousands per second.
    pub(super) offered_kpps: f64,
    /// The reader's CPU time per datagram read, idle time excluded.
    pub(super) reader_ns: f64,
    /// The producers' CPU time per packet offered.
    pub(super) producer_ns: f64,
    /// Total CPU time.
    pub(super) reader_cpu_s: f64,
    pub(super) producers_cpu_s: f64,
    /// Datagrams that the socket had no room for.
    pub(super) dropped: usize,
}

/// Work of a given duration: arithmetic in which each step depends on the previous one.
#[derive(Clone, Copy)]
pub(super) struct Work {
    steps: u32,
}

impl Work {
    /// Determines the number of steps that take `ns`.
    pub(super) fn of_ns(ns: u32) -> Self {
        const STEPS: u32 = 100_000;
        let fastest = (0..50).map(|_| {
            let started = Instant::now();
            black_box(Self { steps: STEPS }.work(black_box(1)));
            started.elapsed()
        });
        let step_ns = nanoseconds(fastest.min().unwrap_or_default()) / f64::from(STEPS);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "as near as steps are long"
        )]
        let steps = (f64::from(ns) / step_ns) as u32;
        Self { steps }
    }

    /// Does the work. The result depends on `x`, so that the CPU cannot start before `x` is known.
    fn work(self, x: u64) -> u64 {
        (0..self.steps).fold(x, |x, _| black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 1))
    }
}

/// A socket, its reader, and the producers.
pub(super) struct Flood {
    producers: Vec<FloodProducer>,
    reader: FloodReader,
}

impl Flood {
    /// Creates a flood with `producers` producers on all CPUs but the last, which is the reader's.
    pub(super) fn new(
        producers: u8,
        rcvbuf: u32,
        bulk: usize,
        cpus: &[CpuId],
    ) -> Result<Self, Failure> {
        let (&reader_cpu, others) = cpus.split_last().unwrap_or((&CpuId(0), &[]));
        let mut shares = vec![vec![CHUNKS]; producers.into()];
        shares.resize(2 * usize::from(producers), vec![SMALL_CHUNKS]);
        let region = sys::map_packet_memory(region_bytes(&shares))?;
        let mut pools = carve(region, &shares)
            .map_err(|error| Failure::usage(error.to_string(), "this is a bug: report it"))?;
        let small = pools.split_off(producers.into());
        let slots = u32::try_from(READ_MAX).unwrap_or(u32::MAX);
        let config = SocketQueueConfig { id: SocketId(0), rcvbuf, slots };
        let (producers, consumer) = queue(config, producers.into());
        let way_back = FrameReturn::new(pools[0].return_handle());
        let producers =
            (0..).zip(pools).zip(small).zip(producers).map(|(((slot, pool), small), producer)| {
                let cache = Region::allocate(CopyCache::region_bytes(BUFFERS_MAX));
                let counters = Arc::<ReclaimCounters>::default();
                FloodProducer {
                    cpu: others.iter().copied().cycle().nth(slot.into()),
                    pool,
                    producer,
                    relief: BufferReclaimer::new(
                        Some(CopyCache::new(cache, slot)),
                        Some(small),
                        counters,
                    ),
                    bulk,
                    next: 0,
                }
            });
        let reader = FloodReader { cpu: reader_cpu, consumer, way_back, seen: 0 };
        Ok(Self { producers: producers.collect(), reader })
    }

    /// Runs one repeat.
    pub(super) fn repeat(&mut self, load: FloodLoad, samples: &[Sample]) -> FloodOutcome {
        let bulk = self.producers.first().map_or(1, |producer| producer.bulk);
        let dropped_before = self.reader.consumer.account().dropped();
        let run = FloodRun {
            load,
            burst_every: load.offered_pps.map(|pps| {
                let bursts_per_s = pps / as_f64(self.producers.len() * bulk);
                Duration::from_secs_f64(1.0 / bursts_per_s.max(1.0))
            }),
            start: Barrier::new(self.producers.len() + 2),
            end: AtomicBool::new(false),
            samples,
        };
        let Self { producers, reader } = self;
        let (read, sent) = thread::scope(|scope| {
            let run = &run;
            let senders: Vec<_> = producers
                .iter_mut()
                .map(|producer| scope.spawn(move || producer.produce(run)))
                .collect();
            let reading = scope.spawn(move || reader.read(run));
            run.start.wait();
            thread::sleep(REPEAT);
            run.end.store(true, Ordering::Release);
            // The threads do not panic.
            let read = reading.join().unwrap_or_default();
            let sent: Vec<_> =
                senders.into_iter().map(|sender| sender.join().unwrap_or_default()).collect();
            (read, sent)
        });
        self.reader.empty();
        let sent_count = sent.iter().map(|side| side.count).sum::<usize>();
        let sent_cpu_ns = sent.iter().map(|side| side.cpu_ns).sum::<f64>();
        let dropped = self.reader.consumer.account().dropped() - dropped_before;
        FloodOutcome {
            kpps: as_f64(read.count) * 1e6 / read.wall_ns,
            offered_kpps: sent.iter().map(|side| as_f64(side.count) * 1e6 / side.wall_ns).sum(),
            reader_ns: (read.cpu_ns - read.idle_ns).max(0.0) / as_f64(read.count.max(1)),
            producer_ns: sent_cpu_ns / as_f64(sent_count.max(1)),
            reader_cpu_s: read.cpu_ns / 1e9,
            producers_cpu_s: sent_cpu_ns / 1e9,
            dropped: usize::try_from(dropped).unwrap_or(usize::MAX),
        }
    }

    /// Number of frames in use.
    pub(super) fn away(&mut self) -> usize {
        let away = |producer: &mut FloodProducer| {
            producer.pool.in_use() + producer.relief.cache().map_or(0, CopyCache::away)
        };
        self.producers.iter_mut().map(away).sum()
    }
}

/// State that the threads of one repeat share.
struct FloodRun<'a> {
    load: FloodLoad,
    /// Interval between two bursts of one producer.
    burst_every: Option<Duration>,
    start: Barrier,
    end: AtomicBool,
    samples: &'a [Sample],
}

impl FloodRun<'_> {
    fn is_over(&self) -> bool {
        self.end.load(Ordering::Acquire)
    }
}

/// Schedule of bursts.
struct FloodPace {
    every: Duration,
    due: Instant,
}

impl FloodPace {
    /// True if a burst is due; the next one is then scheduled. Bursts missed while another process
    /// had the CPU are not made up for: they would be a larger burst than configured.
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = now >= self.due;
        if is_due {
            let is_late = now - self.due > self.every;
            self.due = if is_late { now } else { self.due } + self.every;
        }
        is_due
    }
}

/// Work done by one thread.
#[derive(Clone, Copy, Default)]
struct FloodSide {
    count: usize,
    wall_ns: f64,
    cpu_ns: f64,
    /// CPU time spent without anything to do.
    idle_ns: f64,
}

/// Starting time of a thread.
struct Began {
    wall: Instant,
    cpu_ns: u64,
}

impl Began {
    fn now() -> Self {
        Self { wall: Instant::now(), cpu_ns: sys::thread_cpu_ns() }
    }

    fn side(&self, count: usize, idle_ns: u64) -> FloodSide {
        let [cpu_ns, idle_ns] = [sys::thread_cpu_ns() - self.cpu_ns, idle_ns]
            .map(|ns| nanoseconds(Duration::from_nanos(ns)));
        FloodSide { count, wall_ns: nanoseconds(self.wall.elapsed()), cpu_ns, idle_ns }
    }
}

/// A receiving CPU.
struct FloodProducer {
    cpu: Option<CpuId>,
    pool: Pool,
    producer: SocketQueueProducer,
    relief: BufferReclaimer,
    bulk: usize,
    next: usize,
}

impl FloodProducer {
    fn produce(&mut self, run: &FloodRun<'_>) -> FloodSide {
        // Ignored: figures of an unpinned thread are still valid.
        let _ = self.cpu.map(sys::pin_to);
        let (mut packets, mut dropped) = (Vec::new(), Vec::new());
        run.start.wait();
        let began = Began::now();
        let mut sent = 0;
        let mut pace = run.burst_every.map(|every| FloodPace { every, due: began.wall });
        while !run.is_over() {
            if pace.as_mut().is_some_and(|pace| !pace.is_due()) {
                std::hint::spin_loop();
                continue;
            }
            self.pool.collect();
            self.receive(run.samples, &mut packets);
            sent += packets.len();
            let Self { pool, producer, relief, .. } = self;
            relief.reclaim(run.load.policy, producer.account(), &mut packets, pool);
            // The reader neither sleeps nor closes the socket, so the result needs no action.
            let (Enqueue::Done | Enqueue::WakeReader | Enqueue::Closed) =
                producer.put(&mut packets, &mut dropped);
            dropped.drain(..).for_each(|packet: Packet| pool.put(packet.frame));
        }
        began.side(sent, 0)
    }

    /// Fills a burst, as a device would.
    fn receive(&mut self, samples: &[Sample], packets: &mut Vec<Packet>) {
        while packets.len() < self.bulk {
            let Some(frame) = self.pool.allocate(DEVICE_ROOM_BYTES) else { break };
            let Sample { bytes, wire_len, link } = &samples[self.next];
            packets.push(Packet::received(frame, Arrival(0), *wire_len, *link));
            if let Some(Packet { frame, headers, .. }) = packets.last_mut() {
                frame.copy_from(bytes);
                parse::parse_into(headers, frame.data(), *wire_len, None, Verify::Nothing);
            }
            self.next = if self.next + 1 < samples.len() { self.next + 1 } else { 0 };
        }
    }
}

/// The application's thread.
struct FloodReader {
    cpu: CpuId,
    consumer: SocketQueueConsumer,
    way_back: FrameReturn,
    seen: u64,
}

impl FloodReader {
    fn read(&mut self, run: &FloodRun<'_>) -> FloodSide {
        let _ = sys::pin_to(self.cpu);
        let mut taken = Vec::with_capacity(READ_MAX);
        run.start.wait();
        let began = Began::now();
        let (mut count, mut idle_ns, mut idle_since) = (0, 0, None);
        while !run.is_over() {
            if self.consumer.take(READ_MAX, &mut taken) == 0 {
                idle_since.get_or_insert_with(sys::thread_cpu_ns);
                std::hint::spin_loop();
                continue;
            }
            if let Some(since) = idle_since.take() {
                idle_ns += sys::thread_cpu_ns() - since;
            }
            count += taken.len();
            taken.iter().for_each(|packet| packet.frame.prefetch());
            for packet in &taken {
                let word = packet.view().payload().first_chunk().copied();
                self.seen ^= word.map_or(0, u64::from_ne_bytes);
                self.seen = run.load.work.work(self.seen);
            }
            self.way_back.give_back(&mut taken, &mut self.consumer, run.load.policy);
        }
        black_box(self.seen);
        idle_ns += idle_since.map_or(0, |since| sys::thread_cpu_ns() - since);
        began.side(count, idle_ns)
    }

    /// Reads the remaining packets.
    fn empty(&mut self) {
        let mut taken = Vec::new();
        while self.consumer.take(READ_MAX, &mut taken) > 0 {
            self.way_back.give_back(&mut taken, &mut self.consumer, ReclaimPolicy::Owner);
        }
    }
}
