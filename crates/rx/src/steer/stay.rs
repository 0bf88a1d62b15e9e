//! Stays of packets on a CPU that is not the desired one.

use forebay_buf::Position;

use super::Steering;
use super::flow_table::Slot;
use super::ids::SlotId;
use crate::hash::FlowHash;

/// Stay of a slot's packets on a CPU that is not desired. Flows of one slot may have different
/// desired CPUs, and masks may change faster than a saturated CPU drains.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stay {
    pub(super) since_ns: u64,
    /// Number of packets that stayed.
    pub(super) packets: u32,
    /// Number of packets ahead at the start of the stay; also 0 if the last packet had just been
    /// processed.
    pub(super) ahead: u32,
    /// Position of the last packet that stayed, or of the one before the stay.
    pub(super) tail: Position,
}

impl Stay {
    /// Stay as it is, or one that begins now.
    pub(super) fn begun(self, now_ns: u64, ahead: u32, tail: Position) -> Self {
        if self.packets == 0 { Self { since_ns: now_ns, packets: 0, ahead, tail } } else { self }
    }
}

impl Steering {
    /// Counts a packet that stays on a CPU that is not desired.
    pub(super) fn count_stay(&mut self, slot: SlotId) {
        self.tally.stays += 1;
        let stay = &mut self.tables.now.stays[slot.index()];
        stay.packets = stay.packets.saturating_add(1);
    }

    /// Counts a packet that stays because it cannot be held.
    pub(super) fn count_unholdable(&mut self, slot: SlotId) {
        self.tally.unheld += 1;
        self.count_stay(slot);
    }

    /// Stay of a slot's packets, as of the next packet of `flow`. It is over if the flow's last packet had this CPU as its
    /// desired one. After a packet of another flow that is not known, and the stay goes on.
    pub(super) fn stay_at(&self, slot: SlotId, at: Slot, flow: FlowHash) -> Stay {
        let stay = self.tables.now.stays[slot.index()];
        let is_over = at.last_flow == flow && at.tail != stay.tail;
        if is_over { Stay::default() } else { stay }
    }

    /// True if a held move is due.
    pub(super) fn is_overdue(&self, slot: SlotId, now_ns: u64) -> bool {
        let stay = self.tables.now.stays[slot.index()];
        stay.packets >= self.move_after.packets
            || now_ns.saturating_sub(stay.since_ns) >= self.move_after.time_ns
    }
}
