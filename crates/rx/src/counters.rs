//! Counters with one writer each: the stage that owns them. Everyone else only reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::coalesce::refusal::{FlushReason, MergeRefusal};
use crate::drop_reason::DropReason;
use crate::steer_reason::SteerReason;

/// Counter that one thread writes and any thread reads, without locked instructions.
///
/// Only this crate, whose stages own the counters, can write them:
///
/// ```compile_fail,E0624
/// forebay_rx::counters::Counter::default().add(1);
/// ```
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Value; may be slightly old when read by another thread.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `count`. Only the writer calls this: a load and a store, no read-modify-write.
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.get().wrapping_add(count), Ordering::Relaxed);
    }

    /// Replaces the value. Only the writer calls this.
    pub(crate) fn set(&self, value: u64) {
        // Most values stay, and a store would take the cache line from those who read it.
        if value != self.get() {
            self.0.store(value, Ordering::Relaxed);
        }
    }

    /// Raises the value to at least `value`. Only the writer calls this.
    pub(crate) fn raise_to(&self, value: u64) {
        if value > self.get() {
            self.0.store(value, Ordering::Relaxed);
        }
    }
}

/// Number of buckets of a [`Histogram`].
const HISTOGRAM_BUCKETS: usize = 40;

/// Distribution of a value, in buckets whose upper bounds are powers of two. One thread writes, and
/// any thread reads.
#[derive(Debug)]
pub struct Histogram {
    /// Number of values by bucket: the last of `2^(n-1) < value <= 2^n` and all above.
    buckets: [Counter; HISTOGRAM_BUCKETS],
    sum: Counter,
}

impl Histogram {
    /// Buckets in order: the upper bound of each, inclusive, and the number of values in it. The
    /// last bucket has no bound.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bound = |index| (index + 1 < HISTOGRAM_BUCKETS).then_some(1_u64 << index);
        self.buckets.iter().enumerate().map(move |(index, count)| (bound(index), count.get()))
    }

    /// Sum of all values; may be a little older or newer than the buckets.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum.get()
    }

    /// Adds a value, `count` times. Only the writer calls this.
    pub(crate) fn record(&self, value: u64, count: u64) {
        let log2 = u64::BITS - value.saturating_sub(1).leading_zeros();
        let index = (log2 as usize).min(HISTOGRAM_BUCKETS - 1);
        self.buckets[index].add(count);
        self.sum.add(value.saturating_mul(count));
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: [const { Counter(AtomicU64::new(0)) }; _], sum: Counter::default() }
    }
}

/// Counters of one intake. Written by the CPU that polls its queue.
#[derive(Debug)]
pub struct IntakeCounters {
    /// Number of frames from the source, refused ones included.
    pub frames: Counter,
    /// Number of bytes of those frames on the wire.
    pub bytes: Counter,
    /// Number of frames that the kernel dropped before the source could take them; not among
    /// `frames`.
    pub kernel_dropped: Counter,
    /// Number of dropped frames, by [`DropReason::index`].
    pub drops: [Counter; DropReason::ALL.len()],
    /// Number of frames with inconsistent headers ([`Flaw`](crate::parse::Flaw)).
    pub flawed: Counter,
    /// Number of frames with a wrong IPv4 header checksum.
    pub ip_checksum_bad: Counter,
    /// Number of frames with a wrong TCP or UDP checksum.
    pub l4_checksum_bad: Counter,
    /// Number of partial TCP or UDP checksums (pseudo header only) that were completed.
    pub checksums_completed: Counter,
    /// Number of packets without a hash, which stay on the polling CPU.
    pub unsteered: Counter,
    /// Number of times that a flow-table slot changed its CPU.
    pub moves: Counter,
    /// Number of packets that followed their predecessors to a CPU that the slot should leave.
    pub stays: Counter,
    /// Number of held moves begun.
    pub holds: Counter,
    /// Number of packets that followed their predecessors because no more could be held.
    pub unheld: Counter,
    /// Longest held move, in ns.
    pub held_max_ns: Counter,
    /// Durations of held moves, in ns.
    pub held_ns: Arc<Histogram>,
    /// CPUs that the load needs now.
    pub active_cpus: Counter,
    /// Changes of that number.
    pub resized: Counter,
    /// Number of groups of hash values assigned to another CPU because of the load.
    pub balanced: Counter,
    /// Load of the busiest CPU in percent of the mean, as expected after the last balancing round.
    pub imbalance_percent: Counter,
    /// Largest such load before a round that moved a group.
    pub imbalance_max_percent: Counter,
    /// Coalescing on arrival.
    pub coalesce: Arc<CoalesceCounters>,
    /// Counters of each target, by [`CpuId::index`](crate::CpuId::index).
    pub per_cpu: Box<[TargetCounters]>,
}

/// Counters of an intake for one target CPU, in frames: a merged packet counts as many as it was
/// merged from.
#[derive(Debug, Default)]
pub struct TargetCounters {
    /// Number of frames put on the backlog, by [`SteerReason::index`].
    pub(crate) by_reason: [Counter; SteerReason::ALL.len()],
    /// Number of frames refused by the backlog for lack of room, or by its flow limit.
    pub dropped: Counter,
}

impl TargetCounters {
    /// Number of frames put on the backlog for this reason.
    #[must_use]
    pub fn enqueued_for(&self, reason: SteerReason) -> u64 {
        self.by_reason[reason.index()].get()
    }

    /// Number of frames put on the backlog.
    #[must_use]
    pub fn enqueued(&self) -> u64 {
        self.by_reason.iter().map(Counter::get).sum()
    }
}

impl IntakeCounters {
    /// Creates counters at zero, for targets below `cpus`.
    #[must_use]
    pub fn new(cpus: usize) -> Self {
        let zero = Counter::default;
        Self {
            frames: zero(),
            bytes: zero(),
            kernel_dropped: zero(),
            drops: Default::default(),
            flawed: zero(),
            ip_checksum_bad: zero(),
            l4_checksum_bad: zero(),
            checksums_completed: zero(),
            unsteered: zero(),
            moves: zero(),
            stays: zero(),
            holds: zero(),
            unheld: zero(),
            held_max_ns: zero(),
            held_ns: Arc::default(),
            active_cpus: zero(),
            resized: zero(),
            balanced: zero(),
            imbalance_percent: zero(),
            imbalance_max_percent: zero(),
            coalesce: Arc::default(),
            per_cpu: (0..cpus).map(|_| TargetCounters::default()).collect(),
        }
    }

    /// Number of frames put on any backlog.
    #[must_use]
    pub fn enqueued(&self) -> u64 {
        self.per_cpu.iter().map(TargetCounters::enqueued).sum()
    }

    /// Number of frames dropped for any reason.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.drops.iter().map(Counter::get).sum()
    }
}

/// Counters of one [`Coalescer`](crate::coalesce::Coalescer). Written by the CPU that runs it.
#[derive(Debug)]
pub struct CoalesceCounters {
    /// Number of frames in.
    pub segments_in: Counter,
    /// Number of packets out; a merged packet counts once.
    pub packets_out: Counter,
    /// Number of bytes out; headers of a merged packet count once.
    pub bytes_out: Counter,
    /// Number of frames that were not added to a packet, by [`MergeRefusal::index`].
    pub refused: [Counter; MergeRefusal::ALL.len()],
    /// Number of flushed packets, by [`FlushReason::index`].
    pub flushes: [Counter; FlushReason::ALL.len()],
}

impl Default for CoalesceCounters {
    fn default() -> Self {
        Self {
            segments_in: Counter::default(),
            packets_out: Counter::default(),
            bytes_out: Counter::default(),
            refused: [const { Counter(AtomicU64::new(0)) }; _],
            flushes: [const { Counter(AtomicU64::new(0)) }; _],
        }
    }
}

/// Counters of one delivery. Written by its CPU.
#[derive(Debug, Default)]
pub struct DeliveryCounters {
    /// Number of packets taken from backlogs.
    pub taken: Counter,
    /// Number of frames handled, those of merged packets included.
    pub frames: Counter,
    /// Number of bytes handled; headers of a merged packet count once.
    pub bytes: Counter,
    /// Number of batches handled.
    pub batches: Counter,
    /// Number of frames in the current batch when the CPU's thread died, dropped as
    /// [`CpuLost`](DropReason::CpuLost).
    pub lost: Counter,
    /// Largest number of packets seen in one backlog ring.
    pub backlog_max: Counter,
    /// Numbers of packets in the batches.
    pub batch_packets: Histogram,
    /// Waits of packets from the turn that queued them to the handler, in ns; while measured.
    pub wait_ns: Histogram,
    /// Durations of the handler's calls, in ns; while measured.
    pub handler_ns: Histogram,
    /// Ages of the oldest packet of each batch when the handler gets it, from its timestamp, in ns;
    /// while measured.
    pub latency_ns: Histogram,
    /// Coalescing on delivery.
    pub coalesce: Arc<CoalesceCounters>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn met_5_bucket_bounds_are_inclusive() {
        let histogram = Histogram::default();
        for value in [0, 1, 2, 3, 4, 5, 1 << 38, (1 << 38) + 1, u64::MAX] {
            histogram.record(value, 1);
        }
        let filled: Vec<_> = histogram.buckets().filter(|(_, count)| *count > 0).collect();
        let expected =
            [(Some(1), 2), (Some(2), 1), (Some(4), 2), (Some(8), 1), (Some(1 << 38), 1), (None, 2)];
        assert_eq!(filled, expected);
        let histogram = Histogram::default();
        histogram.record(10, 3);
        assert_eq!(histogram.sum(), 30);
        assert_eq!(histogram.buckets().map(|(_, count)| count).sum::<u64>(), 3);
    }

    /// Nobody else writes: see the example of [`Counter`], which must not compile.
    #[test]
    fn promise_7_reader_sees_monotonic_counter() {
        const COUNTS: u64 = if cfg!(miri) { 100 } else { 100_000 };
        let counter = Arc::new(Counter::default());
        let written = Arc::clone(&counter);
        #[expect(clippy::disallowed_methods, reason = "a reader beside the path")]
        let writer = std::thread::spawn(move || (0..COUNTS).for_each(|_| written.add(1)));
        let mut last = 0;
        while last < COUNTS {
            let now = counter.get();
            assert!(now >= last, "{now} after {last}");
            last = now;
        }
        writer.join().unwrap();
        assert_eq!(counter.get(), COUNTS);
        counter.raise_to(COUNTS - 1);
        assert_eq!(counter.get(), COUNTS);
    }
}
