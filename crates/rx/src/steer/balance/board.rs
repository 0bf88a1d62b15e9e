//! Board: the loads that the queues of an engine plan for the CPUs, so that they balance together.
//!
//! Each queue records the load that it will send to each CPU after its moves, and plans from the sum of all records. One
//! queue plans at a time. A queue that finds the board claimed tries again in a later turn, so none waits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::NS_PER_S;

/// Minimum time after which the record of a queue that has written no other is dropped.
pub(super) const STALE_NS_MIN: u64 = 200_000_000;

/// Planned loads of all queues. Only the queue that has claimed the board writes to it.
#[derive(Debug)]
pub struct BalanceBoard {
    is_claimed: AtomicBool,
    /// Sums of all records, by [`CpuId::index`](crate::CpuId::index).
    sums: Box<[PlannedAtomic]>,
    /// Records, by queue.
    records: Box<[QueueRecord]>,
    /// Moves that are allowed now, in billionths of one: tokens of a bucket.
    move_tokens: AtomicU64,
    /// Time up to which moves have been added to it.
    saved_until_ns: AtomicU64,
}

/// Loads of one queue.
#[derive(Debug)]
struct QueueRecord {
    /// Loads, by [`CpuId::index`](crate::CpuId::index).
    loads: Box<[PlannedAtomic]>,
    /// Time of the record, or 0 if there is none.
    recorded_ns: AtomicU64,
}

/// Load that is planned for a CPU, in ns of work a second.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Planned {
    pub(super) all_ns: u64,
    /// Part that leaves the CPU if it becomes the busiest one: light groups that do not rest.
    pub(super) light_ns: u64,
}

#[derive(Debug, Default)]
struct PlannedAtomic {
    all_ns: AtomicU64,
    light_ns: AtomicU64,
}

impl PlannedAtomic {
    fn load(&self) -> Planned {
        Planned { all_ns: load(&self.all_ns), light_ns: load(&self.light_ns) }
    }

    fn store(&self, planned: Planned) {
        self.all_ns.store(planned.all_ns, Ordering::Relaxed);
        self.light_ns.store(planned.light_ns, Ordering::Relaxed);
    }
}

impl Planned {
    fn plus(self, other: Self) -> Self {
        Self {
            all_ns: self.all_ns.saturating_add(other.all_ns),
            light_ns: self.light_ns.saturating_add(other.light_ns),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            all_ns: self.all_ns.saturating_sub(other.all_ns),
            light_ns: self.light_ns.saturating_sub(other.light_ns),
        }
    }
}

impl BalanceBoard {
    /// Creates an empty board; `cpus` is the highest CPU id plus one.
    #[must_use]
    pub fn new(queues: usize, cpus: usize) -> Self {
        let zeros = || (0..cpus).map(|_| PlannedAtomic::default()).collect();
        let record = |_| QueueRecord { loads: zeros(), recorded_ns: AtomicU64::new(0) };
        Self {
            is_claimed: AtomicBool::new(false),
            sums: zeros(),
            records: (0..queues).map(record).collect(),
            move_tokens: AtomicU64::new(0),
            saved_until_ns: AtomicU64::new(0),
        }
    }

    /// Claims the board for a round. Returns `None` while another queue is planning.
    pub(super) fn claim(&self) -> Option<BoardClaim<'_>> {
        // Acquire: pairs with the release in `drop`, so that the last plan is seen.
        let is_claimed = self.is_claimed.swap(true, Ordering::Acquire);
        (!is_claimed).then_some(BoardClaim(self))
    }
}

/// Exclusive right to plan, until it is dropped.
#[derive(Debug)]
pub(super) struct BoardClaim<'a>(&'a BalanceBoard);

impl BoardClaim<'_> {
    /// Load that other queues plan for a CPU.
    pub(super) fn others(&self, queue: usize, cpu: usize) -> Planned {
        let planned =
            |at: Option<&PlannedAtomic>| at.map_or(Planned::default(), PlannedAtomic::load);
        let own = self.0.records.get(queue).and_then(|record| record.loads.get(cpu));
        planned(self.0.sums.get(cpu)).minus(planned(own))
    }

    /// Replaces the record of a queue; `loads` by CPU.
    pub(super) fn record(&self, queue: usize, loads: impl Iterator<Item = Planned>, now_ns: u64) {
        let Some(record) = self.0.records.get(queue) else { return };
        record.recorded_ns.store(now_ns.max(1), Ordering::Relaxed);
        for ((own, sum), planned) in record.loads.iter().zip(&self.0.sums).zip(loads) {
            let others = sum.load().minus(own.load());
            own.store(planned);
            sum.store(others.plus(planned));
        }
    }

    /// Removes the records of queues that are idle or no longer balance.
    pub(super) fn forget_stale(&self, now_ns: u64, stale_ns: u64) {
        for (queue, record) in self.0.records.iter().enumerate() {
            let recorded_ns = load(&record.recorded_ns);
            if recorded_ns > 0 && now_ns.saturating_sub(recorded_ns) > stale_ns {
                self.record(queue, std::iter::repeat(Planned::default()), now_ns);
                record.recorded_ns.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Adds the moves of the time that has passed, at most `saved_max_ns` of it, to those allowed now.
    pub(super) fn add_moves(&self, now_ns: u64, moves_per_second: u32, saved_max_ns: u64) {
        let rate = u64::from(moves_per_second);
        let until_ns = self.0.saved_until_ns.fetch_max(now_ns, Ordering::Relaxed);
        let saved = rate.saturating_mul(now_ns.saturating_sub(until_ns));
        let move_min = if rate == 0 { 0 } else { NS_PER_S };
        let saved_max = (rate.saturating_mul(saved_max_ns)).max(move_min);
        let tokens = load(&self.0.move_tokens).saturating_add(saved).min(saved_max);
        self.0.move_tokens.store(tokens, Ordering::Relaxed);
    }

    /// True if a move is allowed now.
    pub(super) fn may_move(&self) -> bool {
        self.moves_left() > 0
    }

    /// Number of moves that are allowed now.
    pub(super) fn moves_left(&self) -> u64 {
        load(&self.0.move_tokens) / NS_PER_S
    }

    /// Counts a move.
    pub(super) fn moved(&self) {
        let left = load(&self.0.move_tokens).saturating_sub(NS_PER_S);
        self.0.move_tokens.store(left, Ordering::Relaxed);
    }
}

impl Drop for BoardClaim<'_> {
    fn drop(&mut self) {
        self.0.is_claimed.store(false, Ordering::Release);
    }
}

fn load(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}
