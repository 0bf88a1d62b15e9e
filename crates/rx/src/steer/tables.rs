//! The flow table, and the replaced tables that it takes over from.
//!
//! A new table is allocated empty by whoever requests it, so the polling CPU only swaps it in. The
//! old table is kept unchanged until the fence behind all packets that it knows has been passed: a
//! slot of the new table takes its state from the old one when it is first read. Afterwards the old
//! table holds no relevant state, and is retired to be freed off the path.

use super::fence::Fences;
use super::flow_table::{Fenced, FlowTable, RPS_FLOW_CNT, RPS_FLOW_CNT_MAX, Slot};
use super::ids::{FenceId, SlotId};
use super::stay::Stay;
use crate::backlog::Backlogs;

/// Maximum number of slots of the previous table that one slot takes its state from; if there are
/// more, the fence stands for all of them. Each of those takes its state from at most
/// [`DEEPER_SLOTS_MAX`] slots of the table before it.
pub const OLDER_SLOTS_MAX: u32 = 64;

/// Maximum number of slots read per slot one table further back. See [`OLDER_SLOTS_MAX`].
pub const DEEPER_SLOTS_MAX: u32 = 8;

/// Maximum number of replaced tables that are read, one for each fence that may stand. After more
/// replacements the last fence stands for all tables.
const OLDER_TABLES_MAX: usize = 2;

/// Maximum number of retired tables kept to be freed off the path; further ones are freed at once.
const RETIRED_MAX: usize = 8;

const _: () = assert!(OLDER_TABLES_MAX == 2, "one older table for each fence that may stand");
const _: () = assert!(OLDER_SLOTS_MAX.is_power_of_two() && DEEPER_SLOTS_MAX.is_power_of_two());

/// Flow table, and the arrays beside it; created empty.
#[derive(Debug)]
pub struct FlowTables {
    pub(super) slots: FlowTable,
    /// Stay of each slot; accessed only while desired and current CPU differ.
    pub(super) stays: Box<[Stay]>,
    pub(super) has_rfs: bool,
}

impl FlowTables {
    /// Memory of a slot, in bytes.
    pub const SLOT_BYTES: usize = size_of::<Slot>() + size_of::<Stay>();

    /// Creates tables of at least `rps_flow_cnt` slots, rounded up to a power of two (RFS-9). 0
    /// means a queue without RFS (RFS-10): [`RPS_FLOW_CNT`] slots, which keep flows in order.
    /// Allocates and initializes all of that memory.
    #[must_use]
    pub fn new(rps_flow_cnt: u32) -> Self {
        let has_rfs = rps_flow_cnt > 0;
        let slots = FlowTable::new(if has_rfs { rps_flow_cnt } else { RPS_FLOW_CNT });
        let stays = vec![Stay::default(); slots.len() + 1].into();
        Self { slots, stays, has_rfs }
    }

    /// Creates empty tables of the same size.
    #[must_use]
    pub fn alike(&self) -> Self {
        let slots = u32::try_from(self.slots.len()).unwrap_or(RPS_FLOW_CNT_MAX);
        Self { has_rfs: self.has_rfs, ..Self::new(slots) }
    }
}

/// Tables of a queue, and the state from before the current one.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) now: FlowTables,
    before: TableBefore,
    retired: Vec<FlowTables>,
}

/// Source of the state of unseen slots.
#[derive(Debug)]
enum TableBefore {
    /// Empty: no packet from before is unprocessed.
    Nothing,
    /// State in these older tables, the latest one first.
    Older(Vec<Older>),
    /// Unknown: packets from before are in front of this fence.
    Fenced(FenceId),
}

/// A table that was replaced.
#[derive(Debug)]
struct Older {
    tables: FlowTables,
    /// Fence raised at the replacement.
    fence: FenceId,
}

impl Tables {
    pub(super) fn new(rps_flow_cnt: u32) -> Self {
        let (before, retired) = (TableBefore::Nothing, Vec::new());
        Self { now: FlowTables::new(rps_flow_cnt), before, retired }
    }

    /// Slot as recorded.
    pub(super) fn get(&self, slot: SlotId) -> Slot {
        self.now.slots.get(slot)
    }

    /// Slot as recorded; an unseen one as in the older tables.
    #[inline]
    pub(super) fn seen(&self, slot: SlotId, fences: &Fences, backlogs: &Backlogs) -> Slot {
        let at = self.get(slot);
        if at.is_unseen() { self.as_before(slot, fences, backlogs) } else { at }
    }

    /// Slot as from [`seen`](Self::seen), which is recorded from now on.
    #[inline]
    pub(super) fn see(&mut self, slot: SlotId, fences: &Fences, backlogs: &Backlogs) -> Slot {
        let at = self.get(slot);
        if !at.is_unseen() {
            return at;
        }
        let at = self.as_before(slot, fences, backlogs);
        debug_assert!(!at.is_unseen(), "a slot is taken over once");
        debug_assert!(at.hold().is_none(), "holds of older tables are in a line");
        self.now.slots.set(slot, at);
        at
    }

    #[cold]
    fn as_before(&self, slot: SlotId, fences: &Fences, backlogs: &Backlogs) -> Slot {
        match &self.before {
            TableBefore::Nothing => Slot::EMPTY,
            TableBefore::Older(older) => {
                let look = TableLook { fences, backlogs };
                look.at_older(&self.now.slots, slot, older, OLDER_SLOTS_MAX)
            }
            TableBefore::Fenced(fence) => Slot::fenced(*fence),
        }
    }

    /// Replaces the current tables. The old ones know the CPUs of all packets in front of `fence`.
    pub(super) fn replace(&mut self, tables: FlowTables, fence: FenceId) {
        let older = Older { tables: std::mem::replace(&mut self.now, tables), fence };
        match &mut self.before {
            TableBefore::Nothing => self.before = TableBefore::Older(vec![older]),
            TableBefore::Older(all) if all.len() < OLDER_TABLES_MAX => all.insert(0, older),
            TableBefore::Older(_) | TableBefore::Fenced(_) => {
                self.retire(older.tables);
                self.forget(TableBefore::Fenced(fence));
            }
        }
    }

    /// Replaces the current tables, whose records are void: `fence` stands for all of them.
    pub(super) fn replace_by_fence(&mut self, tables: FlowTables, fence: FenceId) {
        let old = std::mem::replace(&mut self.now, tables);
        self.retire(old);
        self.forget(TableBefore::Fenced(fence));
    }

    /// Retires the tables whose fence has been passed.
    pub(super) fn passed(&mut self, fences: &Fences) {
        match &mut self.before {
            TableBefore::Nothing => {}
            TableBefore::Older(older) => {
                while let Some(last) = older.pop_if(|last| !fences.stands(last.fence)) {
                    retire(&mut self.retired, last.tables);
                }
                debug_assert!(
                    older.iter().all(|older| fences.stands(older.fence)),
                    "fences are passed in the order in which tables were replaced"
                );
                if older.is_empty() {
                    self.before = TableBefore::Nothing;
                }
            }
            TableBefore::Fenced(fence) if fences.stands(*fence) => {}
            TableBefore::Fenced(_) => self.before = TableBefore::Nothing,
        }
    }

    /// Keeps a table until it is [taken](Self::take_retired) to be freed.
    pub(super) fn retire(&mut self, tables: FlowTables) {
        retire(&mut self.retired, tables);
    }

    /// Takes a retired table.
    pub(super) fn take_retired(&mut self) -> Option<FlowTables> {
        self.retired.pop()
    }

    fn forget(&mut self, now: TableBefore) {
        if let TableBefore::Older(older) = std::mem::replace(&mut self.before, now) {
            older.into_iter().for_each(|older| self.retire(older.tables));
        }
    }
}

fn retire(retired: &mut Vec<FlowTables>, tables: FlowTables) {
    if retired.len() < RETIRED_MAX {
        retired.push(tables);
    }
    debug_assert!(retired.len() <= RETIRED_MAX, "retired tables are bounded");
}

/// Fences and backlogs, as of the reading of an older table.
#[derive(Clone, Copy)]
struct TableLook<'a> {
    fences: &'a Fences,
    backlogs: &'a Backlogs,
}

impl TableLook<'_> {
    /// State of a slot of `table` in the tables before it.
    fn at_older(self, table: &FlowTable, slot: SlotId, older: &[Older], slots_max: u32) -> Slot {
        debug_assert!(older.len() <= OLDER_TABLES_MAX, "more older tables than fences");
        let Some((before, rest)) = older.split_first() else { return Slot::EMPTY };
        // Passed: all packets that the older tables know are processed.
        if !self.fences.stands(before.fence) {
            return Slot::EMPTY;
        }
        let old = &before.tables.slots;
        let Some(slots) = old.slots_of(table, slot, slots_max) else {
            // Reading more slots would make the turn too long.
            return Slot::fenced(before.fence);
        };
        let olds = slots.map(|slot| match old.get(slot) {
            at if at.is_unseen() => self.at_older(old, slot, rest, DEEPER_SLOTS_MAX),
            at => at,
        });
        let standing = [FenceId::A, FenceId::B].map(|fence| self.fences.stands(fence));
        let fences = Fenced { standing, raised: before.fence };
        table.merged(slot, olds, fences, |cpu, tail| self.backlogs.pending(cpu, tail))
    }
}
