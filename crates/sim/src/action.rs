//! Events of a run other than packets: changes and faults.

use std::sync::Arc;

use forebay_rx::hash::Hasher;
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::random::Random;

use crate::cpu_set::CpuSet;

/// An inclusive range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span(pub(crate) u64, pub(crate) u64);

impl Span {
    pub(crate) fn draw(self, random: &mut Random) -> u64 {
        random.between(self.0, self.1.max(self.0))
    }
}

/// An action that recurs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recurring {
    pub(crate) action: Action,
    pub(crate) every_ns: Span,
}

/// Changes and faults of a scenario; the details are drawn when they occur.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// Writes another mask, with at least `least` of the scenario's CPUs.
    RpsCpus { least: usize },
    /// Rewrites the flow tables, with one of these sizes.
    RpsFlowCnt(&'static [u32]),
    /// Rewrites the socket-flow table, with one of these sizes.
    SockFlowEntries(&'static [u32]),
    /// Sets the backlog limit to one of these numbers of packets.
    MaxBacklog(&'static [u32]),
    /// Changes the key that flows are hashed under.
    HashKey,
    /// Merges segments before steering, after it, or not at all.
    Coalesce,
    /// Turns the flow limit on or off. The reference has none.
    FlowLimit,
    /// Moves the reader of a flow to another CPU.
    ReaderMoves,
    /// Takes a CPU offline, and brings it back after a while.
    CpuOut { lasts_ns: Span },
    /// Kills the thread of a CPU with its dequeued batch, and replaces the thread after a while.
    Kill { lasts_ns: Span },
    /// Stops delivery on a CPU for a while.
    Pause { lasts_ns: Span },
    /// Slows a CPU down by a large factor for a while.
    Slow { lasts_ns: Span },
    /// Lets this many packets arrive at once.
    Burst { packets: Span },
}

/// A live change, as passed to a machine.
#[derive(Clone, Debug)]
pub(crate) enum SimChange {
    RpsCpus(CpuSet),
    RpsFlowCnt(u32),
    SockFlowEntries(u32),
    MaxBacklog(u32),
    HashKey(Arc<Hasher>),
    Coalesce(SimCoalesceAt),
    FlowLimit(bool),
    /// The CPUs that are online.
    Online(CpuSet),
    /// A CPU's removal was noticed: the kernel's `dev_cpu_dead`, run by another CPU.
    CpuDead {
        gone: CpuId,
        runs_on: CpuId,
    },
    /// Moves the polling of a queue to another CPU.
    PollingCpu(RxQueue, CpuId),
}

/// Stage at which segments are merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum SimCoalesceAt {
    #[default]
    Nowhere,
    Arrive,
    Deliver,
}
