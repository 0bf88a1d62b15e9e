//! The flow table, and those that it takes over from.
//!
//! A table of another size comes empty, made by whoever asks for it, so the CPU that polls only puts it
//! in place of the old one. That stays as it is until the fence behind everything that it knows has been
//! passed: a slot that is looked at for the first time asks it where its packets are. Afterwards it
//! knows nothing that counts, and goes back to be freed elsewhere.

use super::SteerWait;
use super::fence::Fences;
use super::flow_table::{Fenced, FlowTable, RPS_FLOW_CNT, RPS_FLOW_CNT_MAX, Slot};
use super::ids::{FenceId, SlotId};
use crate::backlog::Backlogs;

/// The most slots of an older table that one slot asks: where it has more the fence answers for all of
/// them. A slot of that one asks at most [`DEEPER_SLOTS_MAX`] of the table before it.
pub const OLDER_SLOTS_MAX: u32 = 64;

/// See [`OLDER_SLOTS_MAX`].
pub const DEEPER_SLOTS_MAX: u32 = 8;

/// The most tables that are asked, one for each fence that may stand. Where more are replaced before
/// the fences are passed, the last fence answers for all of them.
const OLDER_TABLES_MAX: usize = 2;

/// Tables that wait to be freed elsewhere; more are freed where they are.
const RETIRED_MAX: usize = 8;

/// A flow table that nothing is noted in yet, and what stands beside it.
#[derive(Debug)]
pub struct FlowTables {
    pub(super) slots: FlowTable,
    /// Touched only where wish and slot disagree.
    pub(super) waits: Box<[SteerWait]>,
    pub(super) has_rfs: bool,
}

impl FlowTables {
    /// Memory of a slot, in bytes.
    pub const SLOT_BYTES: usize = size_of::<Slot>() + size_of::<SteerWait>();

    /// Tables of at least `rps_flow_cnt` slots, rounded up to a power of two (RFS-9). 0 is for a queue
    /// without RFS (RFS-10): [`RPS_FLOW_CNT`] slots to keep the order by. It takes the time that so much
    /// memory takes.
    #[must_use]
    pub fn new(rps_flow_cnt: u32) -> Self {
        let has_rfs = rps_flow_cnt > 0;
        let slots = FlowTable::new(if has_rfs { rps_flow_cnt } else { RPS_FLOW_CNT });
        let waits = vec![SteerWait::default(); slots.len() + 1].into();
        Self { slots, waits, has_rfs }
    }

    /// Empty ones of the same size.
    #[must_use]
    pub fn alike(&self) -> Self {
        let slots = u32::try_from(self.slots.len()).unwrap_or(RPS_FLOW_CNT_MAX);
        Self { has_rfs: self.has_rfs, ..Self::new(slots) }
    }
}

/// The table of a queue, and what is known from before it.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) now: FlowTables,
    before: TableBefore,
    retired: Vec<FlowTables>,
}

/// State of a slot that nothing is noted of.
#[derive(Debug)]
enum TableBefore {
    /// Nothing that counts.
    Nothing,
    /// State in these older tables, the last one first.
    Older(Vec<Older>),
    /// Nobody knows: in front of this fence.
    Fenced(FenceId),
}

/// A table that was replaced.
#[derive(Debug)]
struct Older {
    tables: FlowTables,
    /// The fence that was raised then.
    fence: FenceId,
}

impl Tables {
    pub(super) fn new(rps_flow_cnt: u32) -> Self {
        let (before, retired) = (TableBefore::Nothing, Vec::new());
        Self { now: FlowTables::new(rps_flow_cnt), before, retired }
    }

    /// A slot as it is noted.
    pub(super) fn get(&self, slot: SlotId) -> Slot {
        self.now.slots.get(slot)
    }

    /// A slot, with what is known from before.
    #[inline]
    pub(super) fn seen(&self, slot: SlotId, fences: &Fences, backlogs: &Backlogs) -> Slot {
        let at = self.get(slot);
        if at.is_unseen() { self.as_before(slot, fences, backlogs) } else { at }
    }

    /// The same; it is noted from now on.
    #[inline]
    pub(super) fn see(&mut self, slot: SlotId, fences: &Fences, backlogs: &Backlogs) -> Slot {
        let at = self.get(slot);
        if !at.is_unseen() {
            return at;
        }
        let at = self.as_before(slot, fences, backlogs);
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

    /// Puts tables in place of those that there are, which know where all packets in front of `fence`
    /// are.
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

    /// The same, where nothing that is noted counts any more.
    pub(super) fn replace_by_fence(&mut self, tables: FlowTables, fence: FenceId) {
        let old = std::mem::replace(&mut self.now, tables);
        self.retire(old);
        self.forget(TableBefore::Fenced(fence));
    }

    /// A fence was passed: what was known of the packets in front of it is of no use.
    pub(super) fn passed(&mut self, fences: &Fences) {
        match &mut self.before {
            TableBefore::Nothing => {}
            TableBefore::Older(older) => {
                while let Some(last) = older.pop_if(|last| !fences.stands(last.fence)) {
                    retire(&mut self.retired, last.tables);
                }
                if older.is_empty() {
                    self.before = TableBefore::Nothing;
                }
            }
            TableBefore::Fenced(fence) if fences.stands(*fence) => {}
            TableBefore::Fenced(_) => self.before = TableBefore::Nothing,
        }
    }

    /// Has a table wait that is of no more use.
    pub(super) fn retire(&mut self, tables: FlowTables) {
        retire(&mut self.retired, tables);
    }

    /// Takes a table that is of no more use.
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
}

/// Fences and backlogs at the time when an older table is asked.
#[derive(Clone, Copy)]
struct TableLook<'a> {
    fences: &'a Fences,
    backlogs: &'a Backlogs,
}

impl TableLook<'_> {
    /// State of a slot of `table` in the tables before it.
    fn at_older(self, table: &FlowTable, slot: SlotId, older: &[Older], slots_max: u32) -> Slot {
        let Some((before, rest)) = older.split_first() else { return Slot::EMPTY };
        if !self.fences.stands(before.fence) {
            return Slot::EMPTY;
        }
        let old = &before.tables.slots;
        let Some(slots) = old.slots_of(table, slot, slots_max) else {
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
