//! Flow table of one rx queue: the current CPU of each flow (RFS-4, RFS-7).
//!
//! Read and written by the polling CPU only, without locks or atomics.

use forebay_buf::Position;

use super::ids::{FenceId, HoldId, SlotId};
use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Default number of slots.
pub const RPS_FLOW_CNT: u32 = 4096;

/// Maximum number of slots (RFS-10): 2.25 GiB of tables, which are written at once.
pub const RPS_FLOW_CNT_MAX: u32 = 1 << 26;

/// Slot of the flow table: twelve bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// Tail position of the slot's last packet in the backlog of its CPU.
    pub(super) tail: Position,
    /// Flow of that packet; several flows can share a slot.
    pub(super) last_flow: FlowHash,
    /// CPU of the last packet, or one of the marks below.
    cpu: u16,
    /// Hold of the slot's packets, or [`Slot::NO_HOLD`].
    hold: u16,
}

const _: () = assert!(size_of::<Slot>() == 12, "five slots fit a cache line");
const _: () = assert!(
    Slot::UNSEEN_CPU < Slot::FENCED[0]
        && Slot::FENCED[0] < Slot::FENCED[1]
        && Slot::FENCED[1] < Slot::NO_CPU,
    "each mark means one thing, and lies above all CPU ids"
);
const _: () = assert!(RPS_FLOW_CNT.is_power_of_two() && RPS_FLOW_CNT_MAX.is_power_of_two());

/// Current CPU of a slot's packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CurrentCpu {
    /// No packet so far.
    None,
    /// CPU of the last packet.
    On(CpuId),
    /// Unknown, or held: all packets of the slot are in front of this fence.
    BehindFence(FenceId),
}

impl Slot {
    /// `RPS_NO_CPU`.
    const NO_CPU: u16 = u16::MAX;
    const FENCED: [u16; 2] = [u16::MAX - 2, u16::MAX - 1];
    /// Slot of a new table that has not been taken over from the previous one.
    const UNSEEN_CPU: u16 = u16::MAX - 3;
    const NO_HOLD: u16 = u16::MAX;
    pub(super) const EMPTY: Self = Self {
        tail: Position(0),
        last_flow: FlowHash::NONE,
        cpu: Self::NO_CPU,
        hold: Self::NO_HOLD,
    };

    /// Slot not yet taken over from the previous table, which is read as long as it is kept.
    const UNSEEN: Self = Self { cpu: Self::UNSEEN_CPU, ..Self::EMPTY };

    /// Slot of which only the fence behind its packets is known.
    pub(super) const fn fenced(fence: FenceId) -> Self {
        Self { cpu: Self::FENCED[fence.index()], ..Self::EMPTY }
    }

    pub(super) fn current_cpu(self) -> CurrentCpu {
        match self.cpu {
            Self::NO_CPU | Self::UNSEEN_CPU => CurrentCpu::None,
            cpu if cpu == Self::FENCED[0] => CurrentCpu::BehindFence(FenceId::A),
            cpu if cpu == Self::FENCED[1] => CurrentCpu::BehindFence(FenceId::B),
            cpu => CurrentCpu::On(CpuId(cpu)),
        }
    }

    /// Current CPU, if the slot records one.
    pub(super) fn cpu(self) -> Option<CpuId> {
        (self.cpu < Self::UNSEEN_CPU).then_some(CpuId(self.cpu))
    }

    /// True if the slot has not been taken over yet.
    pub(super) fn is_unseen(self) -> bool {
        self.cpu == Self::UNSEEN_CPU
    }

    /// Hold of the slot's packets, if any.
    pub(super) fn hold(self) -> Option<HoldId> {
        (self.hold != Self::NO_HOLD).then_some(HoldId(self.hold))
    }

    pub(super) fn set_hold(&mut self, hold: Option<HoldId>) {
        debug_assert_ne!(hold, Some(HoldId(Self::NO_HOLD)), "an id that means none");
        self.hold = hold.map_or(Self::NO_HOLD, |hold| hold.0);
    }

    /// Records that a packet of `flow` was queued to `cpu`, at `tail`.
    pub(super) fn record(&mut self, flow: FlowHash, cpu: CpuId, tail: Position) {
        debug_assert!(cpu.0 < Self::UNSEEN_CPU, "CPU {} is one of the marks", cpu.0);
        *self = Self { tail, last_flow: flow, cpu: cpu.0, hold: self.hold };
    }

    /// Slot as taken over by another table: held packets are in a line, and a fence already passed
    /// counts as none.
    fn carried(self, fences: Fenced) -> Self {
        match self.current_cpu() {
            _ if self.is_unseen() => Self::EMPTY,
            _ if self.hold().is_some() => Self::fenced(fences.raised),
            CurrentCpu::BehindFence(fence) if !fences.standing[fence.index()] => Self::EMPTY,
            _ => self,
        }
    }

    /// Joins two slots into one; `pending` gives the number of packets that a CPU must process up
    /// to a position.
    fn merged_with(
        self,
        other: Self,
        fences: Fenced,
        pending: &mut impl FnMut(CpuId, Position) -> u32,
    ) -> Self {
        debug_assert!(
            self.hold().is_none() && other.hold().is_none(),
            "held packets are in a line before slots are merged"
        );
        let [ahead, others] = [self, other].map(|slot| match slot.current_cpu() {
            CurrentCpu::None => 0,
            CurrentCpu::On(cpu) => pending(cpu, slot.tail),
            CurrentCpu::BehindFence(_) => u32::MAX,
        });
        match (ahead, others) {
            (0, 0) if self.cpu().is_some() => self,
            (0, _) => other,
            (_, 0) => self,
            _ if self.cpu == other.cpu && ahead >= others => self,
            _ if self.cpu == other.cpu => other,
            // Two CPUs have packets of the slot to process: only the fence covers both.
            _ => Self::fenced(fences.raised),
        }
    }
}

/// Fences at the takeover of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fenced {
    /// Fences not passed yet.
    pub(super) standing: [bool; 2],
    /// Fence raised now, behind everything.
    pub(super) raised: FenceId,
}

/// Flow table: slots by hash. A slot covers a range of hash values. The RPS map also splits the
/// hash values into ranges, so all flows of a slot have the same CPU in it, unless a boundary of
/// the map falls inside the slot: see [`FlowTable::range`]. Packets without a hash have a slot of
/// their own, the last.
#[derive(Debug)]
pub(super) struct FlowTable {
    slots: Box<[Slot]>,
    /// Shift from a hash to its slot.
    shift: u32,
}

impl FlowTable {
    /// Creates an empty table of `rps_flow_cnt` slots, rounded up to a power of two (RFS-9),
    /// between 2 and [`RPS_FLOW_CNT_MAX`].
    pub(super) fn new(rps_flow_cnt: u32) -> Self {
        let slots = rps_flow_cnt.clamp(2, RPS_FLOW_CNT_MAX).next_power_of_two();
        Self {
            slots: vec![Slot::UNSEEN; slots as usize + 1].into(),
            shift: u32::BITS - slots.trailing_zeros(),
        }
    }

    /// Slots here that share hash values with `slot` of `other`; `None` if more than `slots_max`.
    pub(super) fn slots_of(
        &self,
        other: &Self,
        slot: SlotId,
        slots_max: u32,
    ) -> Option<impl Iterator<Item = SlotId> + use<>> {
        debug_assert!(slot.index() <= other.len(), "no slot of that table");
        let (first, many) = if slot.index() == other.len() {
            (self.slot_of_no_hash(), 1)
        } else {
            let many = 1u32 << other.shift.saturating_sub(self.shift);
            (self.slot_of_value(slot.0 << other.shift), many)
        };
        (many <= slots_max).then(|| (first.0..first.0 + many).map(SlotId))
    }

    /// Initial state of a slot that joins these slots of the previous table. If their packets are
    /// on several CPUs, or held, the slot starts behind the raised fence.
    pub(super) fn merged(
        &self,
        slot: SlotId,
        olds: impl Iterator<Item = Slot>,
        fences: Fenced,
        mut pending: impl FnMut(CpuId, Position) -> u32,
    ) -> Slot {
        let carried = olds.map(|old| old.carried(fences));
        let merged = carried.reduce(|one, other| one.merged_with(other, fences, &mut pending));
        let mut merged = merged.unwrap_or(Slot::EMPTY);
        if slot.index() < self.len() && self.slot_of_value(merged.last_flow.0) != slot {
            // The flow of the last packet belongs to another slot of this table.
            merged.last_flow = FlowHash::NONE;
        }
        debug_assert!(merged.hold().is_none(), "what was held is in a line now");
        debug_assert!(!merged.is_unseen(), "a slot is taken over once");
        merged
    }

    /// Slot of a flow.
    pub(super) fn slot_of(&self, hash: FlowHash) -> SlotId {
        if hash.is_some() { self.slot_of_value(hash.0) } else { self.slot_of_no_hash() }
    }

    /// Slot of all packets without a hash.
    #[cold]
    fn slot_of_no_hash(&self) -> SlotId {
        SlotId(u32::try_from(self.len()).unwrap_or(u32::MAX))
    }

    fn slot_of_value(&self, hash: u32) -> SlotId {
        let slot = SlotId(hash >> self.shift);
        debug_assert!(slot.index() < self.len(), "the slot of packets without a hash has no value");
        slot
    }

    /// Shift from a hash to its slot.
    pub(super) fn shift(&self) -> u32 {
        self.shift
    }

    /// First and last hash value of a slot.
    pub(super) fn range(&self, slot: SlotId) -> [FlowHash; 2] {
        debug_assert!(slot.index() < self.len(), "packets without a hash have no range");
        let first = slot.0 << self.shift;
        [FlowHash(first), FlowHash(first | ((1 << self.shift) - 1))]
    }

    pub(super) fn get(&self, slot: SlotId) -> Slot {
        self.slots[slot.index()]
    }

    pub(super) fn prefetch(&self, slot: SlotId) {
        forebay_buf::prefetch_value(&self.slots[slot.index()]);
    }

    pub(super) fn get_mut(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[slot.index()]
    }

    pub(super) fn set(&mut self, slot: SlotId, to: Slot) {
        self.slots[slot.index()] = to;
    }

    /// Number of slots, not counting the one for packets without a hash.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Heads of the CPUs; their tails are ten packets on, across the wrap.
    const HEAD: Position = Position(u32::MAX - 4);

    fn pending(_: CpuId, tail: Position) -> u32 {
        tail.pending(HEAD, HEAD.plus(10))
    }

    fn slot() -> impl Strategy<Value = Slot> {
        let on = (0u16..3, 0u32..14, 1u32..5, 0u8..9).prop_map(|(cpu, tail, flow, held)| {
            let tail = Position(HEAD.0.wrapping_sub(3)).plus(tail); // some are processed
            let hold = if held == 0 { 7 } else { Slot::NO_HOLD };
            Slot { tail, last_flow: FlowHash(flow), cpu, hold }
        });
        let held = Slot { hold: 5, ..Slot::fenced(FenceId::A) };
        prop_oneof![
            3 => Just(Slot::EMPTY),
            8 => on,
            1 => Just(Slot::fenced(FenceId::A)),
            1 => Just(Slot::fenced(FenceId::B)),
            1 => Just(held),
        ]
    }

    /// Slow twin: the state that one slot must have for all of these.
    fn check_one_for_all(new: Slot, olds: &[Slot], fences: Fenced) {
        let ahead = |slot: Slot| slot.cpu().map_or(0, |cpu| pending(cpu, slot.tail));
        let stands = |fence: FenceId| fences.standing[fence.index()];
        // A packet that waits for one of these must wait for it in the new table, too.
        let mut waits: Vec<_> = olds
            .iter()
            .filter_map(|old| match old.current_cpu() {
                _ if old.hold().is_some() => Some(CurrentCpu::BehindFence(fences.raised)),
                CurrentCpu::BehindFence(fence) => stands(fence).then_some(old.current_cpu()),
                at => (ahead(*old) > 0).then_some(at),
            })
            .collect();
        waits.dedup();
        assert_eq!(new.hold(), None, "who was held is in the line");
        match waits.as_slice() {
            [] => assert_eq!(ahead(new), 0, "{new:?} for {olds:?}"),
            [one] => assert_eq!(new.current_cpu(), *one, "{new:?} for {olds:?}"),
            _ if waits.iter().all(|at| *at == waits[0]) => {
                assert_eq!(new.current_cpu(), waits[0], "{new:?} for {olds:?}");
            }
            _ => {
                let raised = CurrentCpu::BehindFence(fences.raised);
                assert_eq!(new.current_cpu(), raised, "{new:?} for {olds:?}");
            }
        }
        if new.cpu().is_some() {
            assert!(olds.iter().all(|old| ahead(new) >= ahead(*old)), "{new:?} for {olds:?}");
            let says_as = |old: &Slot| (new.cpu, new.tail) == (old.cpu, old.tail);
            assert!(olds.iter().any(says_as), "{new:?} for {olds:?}");
        }
        if waits.is_empty() {
            let was_empty = olds.iter().all(|old| old.cpu().is_none());
            assert_eq!(new.cpu().is_none(), was_empty, "{new:?} for {olds:?}");
        }
    }

    proptest! {
        #[test]
        fn promise_1_resized_table_knows_all_flows(
            (slots, log) in (1u32..6).prop_flat_map(|log| (vec(slot(), (1 << log) + 1), Just(log))),
            new_log in 1u32..6,
            standing: [bool; 2],
            raises_a: bool,
        ) {
            let raised = if raises_a { FenceId::A } else { FenceId::B };
            let fences = Fenced { standing, raised };
            let mut old = FlowTable::new(1 << log);
            old.slots.copy_from_slice(&slots);
            let mut new = FlowTable::new(1 << new_log);
            for slot in (0..=new.len()).map(|slot| SlotId(u32::try_from(slot).unwrap())) {
                let olds = old.slots_of(&new, slot, 64).unwrap().map(|slot| old.get(slot));
                new.set(slot, new.merged(slot, olds, fences, pending));
            }
            prop_assert_eq!(new.len(), 1 << new_log);
            // Ends of ranges, of both tables and of any between.
            let values = (0u32..64).flat_map(|part| [part << 26, part << 26 | 0x03ff_ffff]);
            let hashes: Vec<_> = values.map(|value| FlowHash(value.max(1))).collect();
            for slot in (0..=new.len()).map(|slot| SlotId(u32::try_from(slot).unwrap())) {
                let flows = hashes.iter().filter(|hash| new.slot_of(**hash) == slot);
                let mut olds: Vec<_> = flows.map(|hash| old.get(old.slot_of(*hash))).collect();
                if slot == new.slot_of(FlowHash::NONE) {
                    prop_assert!(olds.is_empty());
                    olds.push(old.get(old.slot_of(FlowHash::NONE)));
                }
                check_one_for_all(new.get(slot), &olds, fences);
            }
        }
    }

    #[test]
    fn rfs_9_sizes_round_to_power_of_two() {
        let len = |rps_flow_cnt| FlowTable::new(rps_flow_cnt).len();
        assert_eq!([0, 1, 2, 3, 4096, 4097].map(len), [2, 2, 2, 4, 4096, 8192]);
    }

    #[test]
    fn unhashed_packets_share_no_slot() {
        let table = FlowTable::new(8);
        assert_eq!(table.slot_of(FlowHash::NONE), SlotId(8));
        assert_eq!([1, u32::MAX].map(|hash| table.slot_of(FlowHash(hash)).0), [0, 7]);
    }

    #[test]
    fn slots_partition_hash_values() {
        let table = FlowTable::new(8);
        let ranges: Vec<_> = (0..8).map(|slot| table.range(SlotId(slot))).collect();
        assert_eq!(ranges[0][0], FlowHash(0));
        assert_eq!(ranges[7][1], FlowHash(u32::MAX));
        for (slot, pair) in (0..).zip(ranges.windows(2)) {
            assert_eq!(pair[0][1].0 + 1, pair[1][0].0);
            assert_eq!(pair[0].map(|hash| table.slot_of_value(hash.0)), [SlotId(slot); 2]);
        }
    }
}
