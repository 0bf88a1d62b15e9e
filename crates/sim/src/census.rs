//! Location of all packets, for the laws to check.

use forebay_rx::{CpuId, RxQueue};

/// Snapshot of the number of packets at each location.
#[derive(Clone, Debug, Default)]
pub(crate) struct Census {
    /// Backlogs, in order of their queues and CPUs.
    pub(crate) backlogs: Vec<Backlog>,
    /// Capacity of each backlog.
    pub(crate) backlog_max: u64,
    /// Number of packets in the current batch of each CPU.
    pub(crate) in_hand: Vec<u64>,
    pub(crate) batch_max: u64,
    /// Number of packets held until their flow may move.
    pub(crate) held: u64,
    pub(crate) hold_max: u64,
    /// Number of packets, by queue, that stayed although they should have moved, because no more
    /// could be held.
    pub(crate) unheld: Vec<u64>,
    /// Number of packets held for more segments.
    pub(crate) coalescing: u64,
    /// Longest time that packets are held for more segments.
    pub(crate) coalesce_ns: u64,
    /// Number of packets on backlogs and in current batches.
    pub(crate) queued: u64,
    /// True if a packet may consist of several frames.
    pub(crate) merges: bool,
    /// Number of frames in use.
    pub(crate) frames_away: u64,
    /// Number of frames that were delivered but not returned yet.
    pub(crate) frames_done: u64,
}

impl Census {
    /// Backlog from a queue to a CPU.
    pub(crate) fn backlog(&self, queue: RxQueue, cpu: CpuId) -> Option<Backlog> {
        let key = |it: &Backlog| (it.queue, it.cpu);
        let index = self.backlogs.binary_search_by_key(&(queue, cpu), key).ok()?;
        self.backlogs.get(index).copied()
    }
}

/// Packets queued from one queue for one CPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backlog {
    pub(crate) queue: RxQueue,
    pub(crate) cpu: CpuId,
    /// Number of frames, merged or not.
    pub(crate) frames: u64,
    /// Number of packets, including those that the CPU is not yet seen to have completed: its limit
    /// applies to this.
    pub(crate) packets: u64,
}
