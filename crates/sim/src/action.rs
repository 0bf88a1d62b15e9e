//! What happens to a run besides packets: changes and faults.

use std::sync::Arc;

use forebay::random::Random;
use path::hash::Hasher;
use path::{CpuId, RxQueue};

use crate::cpu_set::CpuSet;

/// From and to, both included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span(pub(crate) u64, pub(crate) u64);

impl Span {
    pub(crate) fn draw(self, random: &mut Random) -> u64 {
        random.between(self.0, self.1.max(self.0))
    }
}

/// Something that happens again and again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recurring {
    pub(crate) action: Action,
    pub(crate) every_ns: Span,
}

/// Changes and faults as a scenario has them; what exactly is drawn when the time comes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// Another mask, of the scenario's CPUs; of `least` of them at least.
    RpsCpus { least: usize },
    /// The flow tables are rewritten, with one of these sizes.
    RpsFlowCnt(&'static [u32]),
    /// The socket-flow table is rewritten, with one of these sizes.
    SockFlowEntries(&'static [u32]),
    /// Backlogs take as many packets as one of these.
    MaxBacklog(&'static [u32]),
    /// Flows are hashed under another key.
    HashKey,
    /// Segments are merged before steering, behind it, or no more.
    Coalesce,
    /// The flow limit is turned on or off. The reference has none.
    FlowLimit,
    /// The reader of a flow moves to another CPU.
    ReaderMoves,
    /// A CPU is taken out, and put back after a while.
    CpuOut { lasts_ns: Span },
    /// The thread of a CPU dies with what it has in hand, and is replaced after a while.
    Kill { lasts_ns: Span },
    /// A CPU delivers nothing for a while.
    Pause { lasts_ns: Span },
    /// A CPU takes many times as long for everything for a while.
    Slow { lasts_ns: Span },
    /// So many packets arrive at once.
    Burst { packets: Span },
}

/// A live change, as a machine is told of it.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    RpsCpus(CpuSet),
    RpsFlowCnt(u32),
    SockFlowEntries(u32),
    MaxBacklog(u32),
    HashKey(Arc<Hasher>),
    Coalesce(CoalesceAt),
    FlowLimit(bool),
    /// The CPUs that run.
    Online(CpuSet),
    /// Somebody has noticed that a CPU is gone: the kernel's `dev_cpu_dead`, run by another CPU.
    CpuDead {
        gone: CpuId,
        runs_on: CpuId,
    },
    /// Another CPU polls a queue.
    PollingCpu(RxQueue, CpuId),
}

/// Where segments are merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum CoalesceAt {
    #[default]
    Nowhere,
    Arrive,
    Deliver,
}
