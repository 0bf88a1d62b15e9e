//! Counters with one writer each: the stage that owns them. Everyone else only reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::coalesce::refusal::{FlushReason, MergeRefusal};
use crate::drop_reason::DropReason;

/// A number that one thread raises and any thread reads, without a locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// The value; as of a moment ago when read by another thread.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `count`. Only the writer calls this: a load and a store, no read-modify-write.
    pub fn add(&self, count: u64) {
        self.0.store(self.get().wrapping_add(count), Ordering::Relaxed);
    }

    /// Replaces the value. Only the writer calls this.
    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Raises the value to at least `value`. Only the writer calls this.
    pub(crate) fn raise_to(&self, value: u64) {
        if value > self.get() {
            self.0.store(value, Ordering::Relaxed);
        }
    }
}

/// Counters of one intake. Written by the CPU that polls its queue.
#[derive(Debug)]
pub struct IntakeCounters {
    /// Frames that the source gave, refused ones included.
    pub frames: Counter,
    /// Bytes of them on the wire.
    pub bytes: Counter,
    /// Frames that the kernel dropped before the source could take them: not among `frames`.
    pub kernel_dropped: Counter,
    /// Frames dropped, by [`DropReason::index`].
    pub drops: [Counter; DropReason::ALL.len()],
    /// Frames whose headers lie ([`Flaw`](crate::parse::Flaw)).
    pub flawed: Counter,
    /// Frames with a wrong IPv4 header checksum.
    pub ip_checksum_bad: Counter,
    /// Frames with a wrong TCP or UDP checksum.
    pub l4_checksum_bad: Counter,
    /// TCP or UDP checksums that came with the pseudo header's sum only, and were completed.
    pub checksums_completed: Counter,
    /// Packets without a hash: left on the polling CPU.
    pub unsteered: Counter,
    /// Times that a flow-table slot changed its CPU.
    pub moves: Counter,
    /// Packets sent after their predecessors to a CPU that the slot was to leave.
    pub stays: Counter,
    /// Held moves begun.
    pub holds: Counter,
    /// Packets that followed their predecessors because no more could be held.
    pub unheld: Counter,
    /// The longest that a held move took, in nanoseconds.
    pub held_max_ns: Counter,
    /// Groups of hash values assigned to another CPU because of the load.
    pub balanced: Counter,
    /// Load of the busiest CPU in percent of the mean: expected after the last balancing round.
    pub imbalance_percent: Counter,
    /// The largest before a round that moved anything.
    pub imbalance_max_percent: Counter,
    /// Coalescing on arrival.
    pub coalesce: Arc<CoalesceCounters>,
    /// By [`CpuId::index`](crate::CpuId::index) of the target.
    pub per_cpu: Box<[TargetCounters]>,
}

/// Counters of one intake for one target CPU, in frames: a merged packet is as many as it was
/// merged of.
#[derive(Debug, Default)]
pub struct TargetCounters {
    /// Frames put on the backlog.
    pub enqueued: Counter,
    /// Frames that the backlog had no room for, or its flow limit refused.
    pub dropped: Counter,
}

impl IntakeCounters {
    /// Zeros, for targets below `cpus`.
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
            balanced: zero(),
            imbalance_percent: zero(),
            imbalance_max_percent: zero(),
            coalesce: Arc::default(),
            per_cpu: (0..cpus).map(|_| TargetCounters::default()).collect(),
        }
    }

    /// Frames that were put on a backlog.
    #[must_use]
    pub fn enqueued(&self) -> u64 {
        self.per_cpu.iter().map(|target| target.enqueued.get()).sum()
    }

    /// Frames dropped for any reason.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.drops.iter().map(Counter::get).sum()
    }
}

/// Counters of one [`Coalescer`](crate::coalesce::Coalescer). Written by the CPU that turns it.
#[derive(Debug)]
pub struct CoalesceCounters {
    /// Frames that came to it.
    pub segments_in: Counter,
    /// Packets that left it, merged ones counted once.
    pub packets_out: Counter,
    /// Bytes of them: headers once.
    pub bytes_out: Counter,
    /// Frames that were not added to a packet, by [`MergeRefusal::index`].
    pub refused: [Counter; MergeRefusal::ALL.len()],
    /// Packets that were held and let go, by [`FlushReason::index`].
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
    /// Packets taken from backlogs.
    pub taken: Counter,
    /// Frames that the handler has handled, in whatever packets.
    pub frames: Counter,
    /// Bytes of the packets, a merged one's headers counted once.
    pub bytes: Counter,
    /// Batches they came in.
    pub batches: Counter,
    /// Frames that were in hand when the CPU's thread was lost: dropped as
    /// [`CpuLost`](DropReason::CpuLost).
    pub lost: Counter,
    /// The most packets that were seen waiting in one backlog ring.
    pub backlog_max: Counter,
    /// Coalescing on delivery.
    pub coalesce: Arc<CoalesceCounters>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The proof of "only reads" is the type: what raises a counter is visible in this crate only.
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
