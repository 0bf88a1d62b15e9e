//! Why a flow is where it is.

use super::Steering;
use super::flow_table::Whereabouts;
use super::journal::{Move, Watch};
use crate::backlog::Backlogs;
use crate::because::Because;
use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Where a flow is, and why: what [`Steering::state_of`] tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FlowState {
    /// Its slot of the flow table; `None`: it has no hash, and shares a slot with all such.
    pub slot: Option<u32>,
    /// How many slots the table has.
    pub slots: usize,
    /// The CPU that the slot's last packet went to. `None`: there was none, or only the fence
    /// knows.
    pub cpu: Option<CpuId>,
    /// Whether the slot waits for the fence of a table that was replaced.
    pub is_fenced: bool,
    /// The CPU that the flow's next packet should go to, and why.
    pub wish: (CpuId, Because),
    /// Packets that the CPU still has to process up to the slot's last one.
    pub ahead: u32,
    /// Packets of the slot that are held, and since when.
    pub held: Option<(usize, u64)>,
    /// The flow of the slot's last packet.
    pub last_flow: FlowHash,
    /// Flows that used the slot since it is watched, this one included; [`SHARERS_MAX`] at most.
    pub sharers: Vec<FlowHash>,
    /// Moves of the slot that are remembered, oldest first: those that a flow began that is still
    /// in it.
    pub moves: Vec<Move>,
}

impl Steering {
    /// Begins to note which flows share the slot of this one.
    pub fn watch(&mut self, flow: FlowHash) {
        self.watch = Some(Watch::new(self.table.slot_of(flow)));
    }

    /// Where a flow is, and why.
    #[must_use]
    pub fn state_of(&self, flow: FlowHash, backlogs: &Backlogs) -> FlowState {
        let slot = self.table.slot_of(flow);
        let at = self.table.get(slot);
        let hold =
            at.hold().and_then(|id| Some((self.holds.len_of(id), self.holds.get(id)?.since_ns)));
        let moves = self.journal.moves();
        let moves = moves.filter(|moved| self.table.slot_of(moved.flow) == slot);
        let watch = self.watch.as_ref().filter(|watch| watch.slot == slot);
        FlowState {
            slot: flow.is_some().then_some(slot.0),
            slots: self.table.len(),
            cpu: at.cpu(),
            is_fenced: at.whereabouts() == Whereabouts::Fenced && self.fence.is_some(),
            wish: self.wishes.of(flow, &self.table, slot),
            ahead: at.cpu().map_or(0, |cpu| backlogs.pending(cpu, at.tail)),
            held: hold,
            last_flow: at.last_flow,
            sharers: watch.map_or_else(Vec::new, |watch| watch.flows().to_vec()),
            moves: moves.copied().collect(),
        }
    }
}
