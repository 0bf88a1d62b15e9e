//! Memory of a queue, from which it explains afterwards why a flow is where it is.
//!
//! Everything here is bounded and written only when something happens that is rare or costs more
//! than writing it down: a move, a drop.

use std::collections::VecDeque;

use super::ids::SlotId;
use crate::cpu::CpuId;
use crate::drop_reason::DropReason;
use crate::hash::FlowHash;
use crate::steer_reason::SteerReason;

/// Moves that are remembered.
pub const MOVES_MAX: usize = 1024;

/// Flows whose drops are remembered, a power of two.
const DROPS: usize = 256;

/// Flows whose slots are watched at once.
pub const WATCHES_MAX: usize = 16;

/// Flows that are named as sharing a watched slot.
pub const SHARERS_MAX: usize = 16;

/// A slot's move to another CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// Time at which the first packet went to the new CPU.
    pub at_ns: u64,
    /// Flow of that packet.
    pub flow: FlowHash,
    /// The slot.
    pub slot: SlotId,
    /// The old CPU.
    pub from: CpuId,
    /// The new one.
    pub to: CpuId,
    /// Origin of the desired CPU.
    pub wish: SteerReason,
    /// Manner of the move: at once ([`SteerReason::Drained`]), or after packets were held
    /// ([`SteerReason::Held`]).
    pub steer_reason: SteerReason,
    /// Packets up to the slot's last one that the old CPU had before it when the wish was first
    /// refused; 0 if it never was, or had been seen to be drained in the middle of a turn.
    pub ahead: u32,
    /// Packets that followed their predecessors meanwhile.
    pub stayed: u32,
    /// From the first refusal to the move.
    pub waited_ns: u64,
    /// Part of that time for which its packets were held.
    pub held_ns: u64,
}

/// Packets of a flow that were dropped for one reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drops {
    /// The flow.
    pub flow: FlowHash,
    /// Reason.
    pub reason: DropReason,
    /// The CPU they were to go to, if that was known.
    pub cpu: Option<CpuId>,
    /// Frames, at least: flows that came between may have been forgotten.
    pub frames: u64,
    /// Time at which the last of them was dropped.
    pub last_ns: u64,
}

/// The memory of one queue.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    moves: VecDeque<Move>,
    /// By the lower bits of the flow's hash and the reason; made when first needed.
    drops: Vec<Option<Drops>>,
}

impl Journal {
    pub(super) fn moved(&mut self, moved: Move) {
        if self.moves.len() == MOVES_MAX {
            self.moves.pop_front();
        }
        self.moves.push_back(moved);
    }

    /// Forgets the moves: their flows had hashes that are other flows' now.
    pub(super) fn forget_moves(&mut self) {
        self.moves.clear();
    }

    /// Notes that frames of a flow were dropped.
    pub(crate) fn dropped(&mut self, drops: Drops) {
        if self.drops.is_empty() {
            self.drops.resize(DROPS, None);
        }
        let place = (drops.flow.0 as usize + drops.reason.index() * 37) % DROPS;
        let entry = &mut self.drops[place];
        let is_same = |known: &Drops| known.flow == drops.flow && known.reason == drops.reason;
        let known = entry.filter(is_same).map_or(0, |known| known.frames);
        *entry = Some(Drops { frames: known + drops.frames, ..drops });
    }

    /// The moves that are remembered, oldest first.
    pub(crate) fn moves(&self) -> impl Iterator<Item = &Move> {
        self.moves.iter()
    }

    /// Remembered drops of a flow.
    pub(crate) fn drops_of(&self, flow: FlowHash) -> impl Iterator<Item = Drops> {
        self.drops.iter().flatten().filter(move |drops| drops.flow == flow).copied()
    }
}

/// The flows that use a flow's slot, while somebody wants to know.
#[derive(Clone, Debug)]
pub(super) struct FlowWatch {
    pub(super) flow: FlowHash,
    pub(super) slot: SlotId,
    pub(super) since_ns: u64,
    flows: Vec<FlowHash>,
}

impl FlowWatch {
    pub(super) fn new(flow: FlowHash, slot: SlotId, since_ns: u64) -> Self {
        Self { flow, slot, since_ns, flows: Vec::with_capacity(SHARERS_MAX) }
    }

    pub(super) fn see(&mut self, flow: FlowHash) {
        if self.flows.len() < SHARERS_MAX && !self.flows.contains(&flow) {
            self.flows.push(flow);
        }
    }

    pub(super) fn flows(&self) -> &[FlowHash] {
        &self.flows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drops(flow: u32, frames: u64) -> Drops {
        let (reason, cpu) = (DropReason::BacklogFull, Some(CpuId(1)));
        Drops { flow: FlowHash(flow), reason, cpu, frames, last_ns: frames }
    }

    #[test]
    fn drops_by_flow_bounded_and_additive() {
        let mut journal = Journal::default();
        journal.dropped(drops(5, 2));
        journal.dropped(drops(5, 3));
        journal.dropped(Drops { reason: DropReason::HoldFull, ..drops(5, 7) });
        let known: Vec<_> =
            journal.drops_of(FlowHash(5)).map(|drops| (drops.reason, drops.frames)).collect();
        assert_eq!(known, [(DropReason::HoldFull, 7), (DropReason::BacklogFull, 5)]);
        (0..10_000).for_each(|flow| journal.dropped(drops(flow, 1)));
        assert_eq!(journal.drops.len(), DROPS);
    }

    #[test]
    fn watch_names_flows_once_and_few() {
        let mut watch = FlowWatch::new(FlowHash(1), SlotId(0), 0);
        [1, 2, 1, 2].map(FlowHash).into_iter().for_each(|flow| watch.see(flow));
        assert_eq!(watch.flows(), [1, 2].map(FlowHash));
        (0..100).map(FlowHash).for_each(|flow| watch.see(flow));
        assert_eq!(watch.flows().len(), SHARERS_MAX);
    }
}
