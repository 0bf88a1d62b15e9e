//! The flow table of one rx queue: where each flow is now (RFS-4, RFS-7).
//!
//! Only the polling CPU reads or writes it: no lock, no atomic.

use mem::Position;

use super::ids::{HoldId, SlotId};
use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Slots when nobody says otherwise.
pub const RPS_FLOW_CNT: u32 = 4096;

/// The most slots that the kernel allows (RFS-10).
pub const RPS_FLOW_CNT_MAX: u32 = 1 << 30;

/// Where the packets of a slot are: twelve bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// The tail position of the slot's last packet, in the backlog of `cpu`.
    pub(super) tail: Position,
    /// The flow of that packet: flows share slots.
    pub(super) last_flow: FlowHash,
    /// The CPU that the last packet went to, or [`Slot::NO_CPU`].
    cpu: u16,
    /// The hold that the slot's packets wait in, or [`Slot::NO_HOLD`].
    hold: u16,
}

impl Slot {
    /// `RPS_NO_CPU`.
    const NO_CPU: u16 = u16::MAX;
    const NO_HOLD: u16 = u16::MAX;
    const EMPTY: Self = Self {
        tail: Position(0),
        last_flow: FlowHash::NONE,
        cpu: Self::NO_CPU,
        hold: Self::NO_HOLD,
    };

    /// The CPU that the last packet went to.
    pub(super) fn cpu(self) -> Option<CpuId> {
        (self.cpu != Self::NO_CPU).then_some(CpuId(self.cpu))
    }

    /// The hold that the slot's packets wait in.
    pub(super) fn hold(self) -> Option<HoldId> {
        (self.hold != Self::NO_HOLD).then_some(HoldId(self.hold))
    }

    pub(super) fn set_hold(&mut self, hold: Option<HoldId>) {
        self.hold = hold.map_or(Self::NO_HOLD, |hold| hold.0);
    }

    /// Notes that a packet of `flow` went to `cpu`, at `tail`.
    pub(super) fn record(&mut self, flow: FlowHash, cpu: CpuId, tail: Position) {
        *self = Self { tail, last_flow: flow, cpu: cpu.0, hold: self.hold };
    }
}

/// Slots by hash. A slot serves a range of hash values, so that the RPS map, which splits the
/// hash values into ranges too, wants one CPU for all flows of a slot; only where a boundary of
/// the map falls inside a slot are there two, see [`FlowTable::range`].
#[derive(Debug)]
pub(super) struct FlowTable {
    slots: Box<[Slot]>,
    /// A slot's hash values share all bits above this one.
    shift: u32,
}

impl FlowTable {
    /// An empty table of at least `rps_flow_cnt` slots, rounded up to a power of two (RFS-9) and
    /// kept within 2 to [`RPS_FLOW_CNT_MAX`].
    pub(super) fn new(rps_flow_cnt: u32) -> Self {
        let slots = rps_flow_cnt.clamp(2, RPS_FLOW_CNT_MAX).next_power_of_two();
        Self {
            slots: vec![Slot::EMPTY; slots as usize].into(),
            shift: u32::BITS - slots.trailing_zeros(),
        }
    }

    /// The slot of a flow.
    pub(super) fn slot_of(&self, hash: FlowHash) -> SlotId {
        SlotId(hash.0 >> self.shift)
    }

    /// The first and last hash value that a slot serves.
    pub(super) fn range(&self, slot: SlotId) -> [FlowHash; 2] {
        let first = slot.0 << self.shift;
        [FlowHash(first), FlowHash(first | ((1 << self.shift) - 1))]
    }

    pub(super) fn get(&self, slot: SlotId) -> Slot {
        self.slots[slot.index()]
    }

    pub(super) fn get_mut(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[slot.index()]
    }

    /// The number of slots.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfs_9_sizes_are_rounded_up_to_a_power_of_two() {
        let len = |rps_flow_cnt| FlowTable::new(rps_flow_cnt).len();
        assert_eq!([0, 1, 2, 3, 4096, 4097].map(len), [2, 2, 2, 4, 4096, 8192]);
    }

    #[test]
    fn slots_cover_all_hash_values_in_ranges_that_do_not_overlap() {
        let table = FlowTable::new(8);
        let ranges: Vec<_> = (0..8).map(|slot| table.range(SlotId(slot))).collect();
        assert_eq!(ranges[0][0], FlowHash(0));
        assert_eq!(ranges[7][1], FlowHash(u32::MAX));
        for (slot, pair) in (0..).zip(ranges.windows(2)) {
            assert_eq!(pair[0][1].0 + 1, pair[1][0].0);
            assert_eq!(pair[0].map(|hash| table.slot_of(hash)), [SlotId(slot); 2]);
        }
    }
}
