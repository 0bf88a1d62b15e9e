//! Classes of entries, each with a limit, so that entries that a stranger causes displace only their like.

use super::super::slots::{SlotList, SlotPlace};
use super::entry::NeighbourClass;
use super::{NEIGHBOURS_MAX, Neighbours, WAITING_IN_ALL_MAX};

/// Upper bound on unresolved neighbours: each has a slot for one send.
const SOUGHT_MAX: usize = WAITING_IN_ALL_MAX;

/// Upper bound on neighbours only observed, and on those used that have not answered yet.
const DOUBTED_MAX: usize = 128;

/// List index for the entries of a class: unresolved ones in order of creation, others in order of
/// the last use or observation.
pub(super) const BY_CLASS: usize = 0;

/// Upper bound on entries of all classes.
pub(super) const ENTRIES_MAX: usize = NEIGHBOURS_MAX + SOUGHT_MAX + 2 * DOUBTED_MAX;

/// Entries by class. No class takes room from another.
#[derive(Debug)]
pub(super) struct NeighbourClasses {
    pub(super) sought: ClassMembers,
    pub(super) heard: ClassMembers,
    pub(super) tried: ClassMembers,
    pub(super) proven: ClassMembers,
}

/// The entries of a class.
#[derive(Debug)]
pub(super) struct ClassMembers {
    pub(super) list: SlotList,
    pub(super) count: usize,
    /// Upper bound on `count`.
    pub(super) most: usize,
}

impl Default for NeighbourClasses {
    fn default() -> Self {
        let none = |most| ClassMembers { list: SlotList::default(), count: 0, most };
        Self {
            sought: none(SOUGHT_MAX),
            heard: none(DOUBTED_MAX),
            tried: none(DOUBTED_MAX),
            proven: none(NEIGHBOURS_MAX),
        }
    }
}

impl NeighbourClasses {
    pub(super) fn members(&mut self, class: NeighbourClass) -> &mut ClassMembers {
        match class {
            NeighbourClass::Sought => &mut self.sought,
            NeighbourClass::Heard => &mut self.heard,
            NeighbourClass::Tried => &mut self.tried,
            NeighbourClass::Proven => &mut self.proven,
        }
    }
}

impl Neighbours {
    /// Evicts the first entry of a class if it is full.
    pub(super) fn make_room(&mut self, class: NeighbourClass) {
        let members = self.classes.members(class);
        if members.count >= members.most
            && let Some(first) = members.list.first()
        {
            self.remove(first);
        }
    }

    /// Makes room for a neighbour that is sought for an answer only: evicts the one that has been sought for longest without
    /// packets that wait for it. False if packets wait for each.
    pub(super) fn make_room_for_answer(&mut self) -> bool {
        let ClassMembers { ref list, count, most } = self.classes.sought;
        if count < most {
            return true;
        }
        let behind = |&place: &SlotPlace| self.slots.behind(BY_CLASS, place);
        let oldest = std::iter::successors(list.first(), behind)
            .find(|&place| self.slots[place].waiting.is_empty());
        oldest.inspect(|&oldest| self.remove(oldest)).is_some()
    }

    pub(super) fn join(&mut self, class: NeighbourClass, place: SlotPlace) {
        let members = self.classes.members(class);
        self.slots.push_last(BY_CLASS, &mut members.list, place);
        members.count += 1;
        self.slots[place].class = class;
    }

    pub(super) fn leave(&mut self, place: SlotPlace) {
        let members = self.classes.members(self.slots[place].class);
        self.slots.unlink(BY_CLASS, &mut members.list, place);
        members.count -= 1;
    }

    /// Records a use or an observation.
    pub(super) fn touch(&mut self, place: SlotPlace, is_use: bool, now_ns: u64) {
        let neighbour = &mut self.slots[place];
        if neighbour.is_used && !is_use {
            return; // an observation must not change the LRU order, which is that of use
        }
        (neighbour.is_used, neighbour.touched_ns) = (is_use, now_ns);
        self.classify(place);
        let class = self.slots[place].class;
        if class != NeighbourClass::Sought {
            self.leave(place);
            self.join(class, place);
        }
    }

    /// Moves an entry to the class of its state.
    pub(super) fn classify(&mut self, place: SlotPlace) {
        let (from, to) = (self.slots[place].class, self.slots[place].class_now());
        if from == to {
            return;
        }
        self.make_room(to);
        self.leave(place);
        self.join(to, place);
    }
}
