//! The fence: what slots wait for that have lost their meaning.
//!
//! When the flow table is replaced by one whose slots cannot tell where a flow's packets are, a fence
//! is raised behind everything that is on the way: the tails of all backlogs, and the packets that
//! were held, which form one line. Whoever is told to wait for the fence waits until all of that has
//! been processed.
//!
//! The line goes first, in order, to one CPU, once every CPU has passed the tails: packets of a flow
//! stay in order in it whatever they hash to. Where it was lined up at two times there is a seam: who
//! coalesces behind it must not meet two hashes of one flow at once, so what comes after the seam waits
//! until what is before it has been processed. Nothing in front of a fence waits for it, so another may
//! be raised at any time: it takes over the line, and stands further behind.

use mem::Position;

use crate::backlog::Backlogs;
use crate::cpu::CpuId;

/// A fence that has not been passed.
#[derive(Debug)]
pub(super) struct Fence {
    /// The last packet in front of it on each CPU's backlog.
    tails: Vec<(CpuId, Position)>,
    /// The CPU that the line goes to, once it goes.
    pub(super) line_to: Option<CpuId>,
    /// Since when the line has been held, if there is one.
    pub(super) since_ns: u64,
}

impl Fence {
    /// Behind everything that is on the backlogs.
    pub(super) fn behind(backlogs: &Backlogs, since_ns: u64) -> Self {
        Self { tails: backlogs.tails().collect(), line_to: None, since_ns }
    }

    /// Whether all CPUs have processed what is in front of it on their backlogs.
    pub(super) fn is_passed(&self, backlogs: &mut Backlogs) -> bool {
        backlogs.watch();
        self.tails.iter().all(|&(cpu, tail)| backlogs.pending(cpu, tail) == 0)
    }

    /// Puts it behind a packet of the line, which went to `cpu`.
    pub(super) fn step_behind(&mut self, cpu: CpuId, tail: Position) {
        for (at, behind) in &mut self.tails {
            if *at == cpu {
                *behind = tail;
            }
        }
    }
}
