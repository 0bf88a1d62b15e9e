//! Journal of a queue: recent moves and drops, which explain a flow's CPU afterwards.
//!
//! All of it is bounded, and written only on events that are rare or cost more than the record: a
//! move, a drop.

use std::collections::VecDeque;

use super::ids::SlotId;
use crate::cpu::CpuId;
use crate::drop_reason::DropReason;
use crate::flow_key::KeyRule;
use crate::hash::FlowHash;
use crate::steer_reason::SteerReason;

/// Maximum number of remembered moves.
pub const MOVES_MAX: usize = 1024;

/// Number of remembered pairs of a flow and a reason to drop; a power of two.
const DROPS: usize = 256;

/// Number of pairs in a set. A new pair replaces the one whose last drop is the oldest.
const WAYS: usize = 8;

const _: () = assert!((DROPS / WAYS).is_power_of_two(), "the lower bits of a hash select a set");

/// Maximum number of flows whose slots are watched at once.
pub const WATCHES_MAX: usize = 16;

/// Maximum number of flows recorded per watched slot.
pub const SHARERS_MAX: usize = 16;

/// Move of a slot to another CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// Time at which the first packet went to the new CPU.
    pub at_ns: u64,
    /// Flow of that packet.
    pub flow: FlowHash,
    /// Slot that moved.
    pub slot: SlotId,
    /// Old CPU.
    pub from: CpuId,
    /// New CPU.
    pub to: CpuId,
    /// Origin of the desired CPU.
    pub desired_by: SteerReason,
    /// Manner of the move: at once ([`SteerReason::Drained`]), or after packets were held
    /// ([`SteerReason::Held`]).
    pub steer_reason: SteerReason,
    /// Number of packets that the old CPU had to process, up to the slot's last one, when the move
    /// was first refused; 0 if it was never refused, or if the CPU was seen to be drained in the
    /// middle of a turn.
    pub ahead: u32,
    /// Number of packets that followed their predecessors meanwhile.
    pub stayed: u32,
    /// Time from the first refusal to the move.
    pub waited_ns: u64,
    /// Part of that time for which packets of the slot were held.
    pub held_ns: u64,
}

/// Packets of a flow that were dropped for one reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drops {
    /// Flow of the packets.
    pub flow: FlowHash,
    /// Reason.
    pub reason: DropReason,
    /// Target CPU, if known.
    pub cpu: Option<CpuId>,
    /// Minimum number of frames: records of earlier drops may have been overwritten by other flows.
    pub frames: u64,
    /// Time of the last drop.
    pub last_ns: u64,
}

/// Journal of one queue.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    moves: VecDeque<Move>,
    /// Sets by the lower bits of the flow's hash and the reason; allocated at the first drop.
    drops: Vec<Option<Drops>>,
}

impl Journal {
    pub(super) fn moved(&mut self, moved: Move) {
        debug_assert_ne!(moved.from, moved.to, "a move changes the CPU");
        if self.moves.len() == MOVES_MAX {
            self.moves.pop_front();
        }
        self.moves.push_back(moved);
        debug_assert!(self.moves.len() <= MOVES_MAX, "remembered moves are bounded");
    }

    /// Forgets the moves: their hashes belong to other flows now.
    pub(super) fn forget_moves(&mut self) {
        self.moves.clear();
    }

    /// Records dropped frames of a flow.
    pub(crate) fn dropped(&mut self, drops: Drops) {
        if self.drops.is_empty() {
            self.drops.resize(DROPS, None);
        }
        let first = (drops.flow.0 as usize + drops.reason.index() * 37) * WAYS % DROPS;
        let set = &mut self.drops[first..first + WAYS];
        let is_same = |known: &Drops| known.flow == drops.flow && known.reason == drops.reason;
        let place =
            set.iter().position(|entry| entry.as_ref().is_some_and(is_same)).or_else(|| {
                // An empty entry is the oldest.
                (0..WAYS).min_by_key(|&way| set[way].map(|known| known.last_ns))
            });
        let entry = &mut set[place.unwrap_or(0)];
        let known = entry.filter(is_same).map_or(0, |known| known.frames);
        *entry = Some(Drops { frames: known + drops.frames, ..drops });
    }

    /// Remembered moves, oldest first.
    pub(crate) fn moves(&self) -> impl Iterator<Item = &Move> {
        self.moves.iter()
    }

    /// Remembered drops of a flow.
    pub(crate) fn drops_of(&self, flow: FlowHash) -> impl Iterator<Item = Drops> {
        self.drops.iter().flatten().filter(move |drops| drops.flow == flow).copied()
    }
}

/// Flows that use the slot of a watched flow.
#[derive(Clone, Debug)]
pub(super) struct FlowWatch {
    pub(super) flow: FlowHash,
    pub(super) slot: SlotId,
    pub(super) since_ns: u64,
    /// Rule of the key of the watched flow's last packet that was no ICMP error, and the packet's time.
    pub(super) rule: Option<(KeyRule, u64)>,
    flows: Vec<FlowHash>,
}

impl FlowWatch {
    pub(super) fn new(flow: FlowHash, slot: SlotId, since_ns: u64) -> Self {
        Self { flow, slot, since_ns, rule: None, flows: Vec::with_capacity(SHARERS_MAX) }
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
        assert_eq!(known, [(DropReason::BacklogFull, 5), (DropReason::HoldFull, 7)]);
        // A flow that drops again and again is remembered, however many flows of its set drop once.
        for (flow, now) in (5..).step_by(DROPS).skip(1).take(1000).zip(10..) {
            journal.dropped(drops(flow, now));
            journal.dropped(drops(5, now));
        }
        assert!(journal.drops_of(FlowHash(5)).any(|drops| drops.frames > 100_000));
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
