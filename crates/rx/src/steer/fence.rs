//! Fences: barriers behind all packets under way when the slots of a flow table lose their meaning.
//!
//! A fence is raised when the flow table is replaced by one whose slots cannot tell the CPU of a
//! flow's packets. It records the tails of all backlogs; the packets held at that time become its
//! *line*. A packet behind the fence waits until everything in front of it has been processed.
//!
//! Once every CPU has passed its tail, the line goes to one CPU, in order: packets of a flow stay
//! in order, whatever their hashes are. A line that was filled at two times has a *seam*.
//! Coalescing must not hold packets of one flow under two hashes, so packets after the seam wait
//! until those before it have been processed.
//!
//! At most two fences stand. The front one is passed once the backlogs and its line are processed,
//! whatever happens behind it; the second one waits for the front one. A fence raised while two
//! stand moves the second one further back. Nothing in front of a fence therefore waits for that
//! fence, and packets advance however often tables are replaced.

use std::collections::VecDeque;

use forebay_buf::Position;

use super::hold::{HoldList, Holds};
use super::ids::FenceId;
use crate::backlog::Backlogs;
use crate::cpu::CpuId;

/// Fences that have not been passed, the front one first.
#[derive(Debug)]
pub(super) struct Fences {
    standing: VecDeque<Fence>,
    /// Id of the next fence, if that is a new one.
    next: FenceId,
}

/// A fence that has not been passed.
#[derive(Debug)]
pub(super) struct Fence {
    id: FenceId,
    /// Position of the last packet in front of the fence, on each CPU's backlog.
    tails: Vec<(CpuId, Position)>,
    pub(super) line: HoldList,
    /// CPU that the line goes to, from its first packet on.
    pub(super) line_to: Option<CpuId>,
    /// Time at which the oldest hold of the line began, if the line had packets.
    pub(super) held_since_ns: Option<u64>,
}

impl Fences {
    pub(super) fn new() -> Self {
        Self { standing: VecDeque::with_capacity(2), next: FenceId::A }
    }

    /// Id of the fence that the next [`raise`](Self::raise) adds or moves.
    pub(super) fn to_raise(&self) -> FenceId {
        if self.standing.len() < 2 { self.next } else { self.next.other() }
    }

    /// Raises a fence behind all packets under way, and moves all held packets to its line.
    pub(super) fn raise(&mut self, holds: &mut Holds, backlogs: &Backlogs) {
        let to_raise = self.to_raise();
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
        debug_assert_eq!(
            self.standing.back().map(|fence| fence.id),
            Some(to_raise),
            "slots wait for another fence"
        );
        debug_assert!(holds.active().is_empty(), "what is held waits in front of the fence");
    }

    /// Front fence, which waits for packets only.
    pub(super) fn front_mut(&mut self) -> Option<&mut Fence> {
        self.standing.front_mut()
    }

    /// Removes the front fence, which must have been passed.
    pub(super) fn lift(&mut self) {
        let lifted = self.standing.pop_front();
        debug_assert!(lifted.is_some_and(|fence| fence.line.is_empty()), "packets would be lost");
    }

    pub(super) fn stands(&self, id: FenceId) -> bool {
        self.standing.iter().any(|fence| fence.id == id)
    }

    /// True if a fence stands.
    pub(super) fn is_any(&self) -> bool {
        !self.standing.is_empty()
    }
}

impl Fence {
    /// True if all CPUs have processed the packets in front of the fence on their backlogs.
    pub(super) fn is_passed(&self, backlogs: &mut Backlogs) -> bool {
        backlogs.watch();
        self.tails.iter().all(|&(cpu, tail)| backlogs.pending(cpu, tail) == 0)
    }

    /// Moves the fence behind a packet of its line, which was queued to `cpu` at `tail`.
    pub(super) fn step_behind(&mut self, cpu: CpuId, tail: Position) {
        debug_assert!(
            self.tails.iter().any(|(at, _)| *at == cpu),
            "a line goes to a CPU whose backlog the fence watches"
        );
        for (at, last) in &mut self.tails {
            if *at == cpu {
                *last = tail;
            }
        }
    }
}
