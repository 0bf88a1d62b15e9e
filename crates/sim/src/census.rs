//! Where all packets are, for the laws to look at.

use path::{CpuId, RxQueue};

/// Where packets are, at one time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Census {
    pub(crate) backlogs: Vec<Backlog>,
    /// The most that each may hold.
    pub(crate) backlog_max: u64,
    /// Packets in the hands of each CPU.
    pub(crate) in_hand: Vec<u64>,
    pub(crate) batch_max: u64,
    /// Packets held until their flow may move.
    pub(crate) held: u64,
    pub(crate) hold_max: u64,
    /// By queue: how often a packet that was to move stayed, since no more could be held.
    pub(crate) unheld: Vec<u64>,
    /// Packets held for more segments.
    pub(crate) coalescing: u64,
    /// How long those are held at most.
    pub(crate) coalesce_ns: u64,
    /// Packets on backlogs and in hands.
    pub(crate) queued: u64,
    /// True if a packet may be several frames.
    pub(crate) merges: bool,
    /// Frames in use.
    pub(crate) frames_away: u64,
    /// Those of them that were delivered, and are not back yet.
    pub(crate) frames_done: u64,
}

/// What is queued from one queue for one CPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backlog {
    pub(crate) queue: RxQueue,
    pub(crate) cpu: CpuId,
    /// Frames, merged or not.
    pub(crate) frames: u64,
    /// Packets, and those that the CPU was not yet seen to be done with: what its limit is of.
    pub(crate) packets: u64,
}
