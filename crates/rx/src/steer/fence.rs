//! Fences: what slots wait for that have lost their meaning.
//!
//! Fences: when the flow table is replaced by one whose slots cannot tell where a flow's packets are, a fence
//! is raised behind everything that is on the way: the tails of all backlogs, and the packets that
//! were held, which form its line. Whoever is told to wait for the fence waits until all of that has
//! been processed.
//!
//! The line goes first, in order, to one CPU, once every CPU has passed the tails: packets of a flow
//! stay in order in it whatever they hash to. Where it was lined up at two times there is a seam: who
//! coalesces behind it must not meet two hashes of one flow at once, so what comes after the seam waits
//! until what is before it has been processed.
//!
//! At most two fences stand. The front one goes its way whatever happens behind it, so it is passed
//! after the backlogs and its line; the one behind it waits for that. What is raised while two stand
//! moves the second one further behind. So nothing in front of a fence waits for it, and however often
//! tables are replaced, packets get on.

use std::collections::VecDeque;

use forebay_buf::Position;

use super::hold::{HoldList, Holds};
use super::ids::FenceId;
use crate::backlog::Backlogs;
use crate::cpu::CpuId;

/// The fences that have not been passed, the front one first.
#[derive(Debug)]
pub(super) struct Fences {
    standing: VecDeque<Fence>,
    /// Name of the next fence, if it is a new one.
    next: FenceId,
}

/// A fence that has not been passed.
#[derive(Debug)]
pub(super) struct Fence {
    id: FenceId,
    /// The last packet in front of it on each CPU's backlog.
    tails: Vec<(CpuId, Position)>,
    pub(super) line: HoldList,
    /// The CPU that the line goes to, once it goes.
    pub(super) line_to: Option<CpuId>,
    /// Since when packets of the line have been held, if there were any.
    pub(super) held_since_ns: Option<u64>,
}

impl Fences {
    pub(super) fn new() -> Self {
        Self { standing: VecDeque::with_capacity(2), next: FenceId::A }
    }

    /// The one that the next [`raise`](Self::raise) is about.
    pub(super) fn to_raise(&self) -> FenceId {
        if self.standing.len() < 2 { self.next } else { self.next.other() }
    }

    /// Raises a fence behind everything there is, and has all that is held join its line.
    pub(super) fn raise(&mut self, holds: &mut Holds, backlogs: &Backlogs) {
        if self.standing.len() < 2 {
            let id = self.next;
            self.next = id.other();
            let (tails, line) = (Vec::new(), HoldList::EMPTY);
            let fence = Fence { id, tails, line, line_to: None, held_since_ns: None };
            self.standing.push_back(fence);
        }
        if let Some(fence) = self.standing.back_mut() {
            fence.tails = backlogs.tails().collect();
            let held_since_ns = holds.line_up(&mut fence.line);
            fence.held_since_ns = fence.held_since_ns.into_iter().chain(held_since_ns).min();
        }
        debug_assert!(self.standing.len() <= 2, "there are names for two");
        debug_assert!(holds.active().is_empty(), "what is held waits in front of the fence");
    }

    /// The one that nothing but packets is in front of.
    pub(super) fn front_mut(&mut self) -> Option<&mut Fence> {
        self.standing.front_mut()
    }

    /// Takes the front one away, which was passed.
    pub(super) fn lift(&mut self) {
        let lifted = self.standing.pop_front();
        debug_assert!(lifted.is_some_and(|fence| fence.line.is_empty()), "packets would be lost");
    }

    pub(super) fn stands(&self, id: FenceId) -> bool {
        self.standing.iter().any(|fence| fence.id == id)
    }

    /// True if there is one.
    pub(super) fn is_any(&self) -> bool {
        !self.standing.is_empty()
    }
}

impl Fence {
    /// True if all CPUs have processed what is in front of it on their backlogs.
    pub(super) fn is_passed(&self, backlogs: &mut Backlogs) -> bool {
        backlogs.watch();
        self.tails.iter().all(|&(cpu, tail)| backlogs.pending(cpu, tail) == 0)
    }

    /// Puts it behind a packet of its line, which went to `cpu`.
    pub(super) fn step_behind(&mut self, cpu: CpuId, tail: Position) {
        for (at, behind) in &mut self.tails {
            if *at == cpu {
                *behind = tail;
            }
        }
    }
}
