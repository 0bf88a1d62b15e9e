//! A hash table whose items are also linked into a few lists. Its users bound the number of items.
//!
//! Items never move, and every operation but lookup and removal takes constant time, so under a
//! flood each packet costs the same as the first one. Lookup and removal walk over one bucket; the
//! hashes are keyed, so an attacker cannot force collisions.

#![allow(clippy::indexing_slicing, reason = "places are ours, not the wire's")]

use std::ops::{Index, IndexMut};

/// Index of a stored item, valid until the item is removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlotPlace(u32);

/// Items of one type. Each item is in at most one list of each of `LISTS` kinds.
#[derive(Debug)]
pub(crate) struct SourceSlots<T, const LISTS: usize> {
    /// First slot of each bucket, by the low bits of the hash. The number of buckets is a power of
    /// two.
    buckets: Box<[Option<SlotPlace>]>,
    slots: Vec<SourceSlot<T, LISTS>>,
    /// First free slot; the others are linked by `next`.
    free: Option<SlotPlace>,
}

#[derive(Debug)]
struct SourceSlot<T, const LISTS: usize> {
    hash: u64,
    /// Next slot of the bucket, or next free slot.
    next: Option<SlotPlace>,
    links: [SlotLinks; LISTS],
    /// `None` if the slot is free.
    value: Option<T>,
}

#[derive(Clone, Copy, Debug, Default)]
struct SlotLinks {
    before: Option<SlotPlace>,
    behind: Option<SlotPlace>,
}

/// Head and tail of a list.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SlotList {
    first: Option<SlotPlace>,
    last: Option<SlotPlace>,
}

impl SlotList {
    /// The item that has been in the list longest.
    pub(crate) fn first(&self) -> Option<SlotPlace> {
        self.first
    }

    /// True if the list is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

impl<T, const LISTS: usize> SourceSlots<T, LISTS> {
    /// Creates a table sized for up to `expected` items. More are accepted.
    pub(crate) fn new(expected: usize) -> Self {
        let buckets = expected.clamp(1, 1 << 20).next_power_of_two();
        Self { buckets: vec![None; buckets].into(), slots: Vec::new(), free: None }
    }

    /// Stores an item under `hash`.
    pub(crate) fn insert(&mut self, hash: u64, value: T) -> SlotPlace {
        let bucket = self.bucket(hash);
        let slot = SourceSlot {
            hash,
            next: self.buckets[bucket],
            links: [SlotLinks::default(); LISTS],
            value: Some(value),
        };
        let place = if let Some(place) = self.free {
            self.free = self.slot(place).next;
            *self.slot_mut(place) = slot;
            place
        } else {
            // Lossless: each item takes packet memory or has a limit, so there are far fewer than
            // 2^32.
            let place = SlotPlace(u32::try_from(self.slots.len()).unwrap_or(u32::MAX));
            self.slots.push(slot);
            place
        };
        self.buckets[bucket] = Some(place);
        place
    }

    /// Finds an item stored under `hash` for which `is` returns true.
    pub(crate) fn find(&self, hash: u64, is: impl Fn(&T) -> bool) -> Option<SlotPlace> {
        let mut next = self.buckets[self.bucket(hash)];
        while let Some(place) = next {
            let slot = self.slot(place);
            if slot.hash == hash && slot.value.as_ref().is_some_and(&is) {
                return Some(place);
            }
            next = slot.next;
        }
        None
    }

    /// Removes an item that is in no list any more. `None` if the slot is free.
    pub(crate) fn remove(&mut self, place: SlotPlace) -> Option<T> {
        let value = self.slot_mut(place).value.take()?;
        let bucket = self.bucket(self.slot(place).hash);
        let behind = self.slot(place).next;
        if self.buckets[bucket] == Some(place) {
            self.buckets[bucket] = behind;
        } else {
            let mut at = self.buckets[bucket];
            while let Some(before) = at {
                at = self.slot(before).next;
                if at == Some(place) {
                    self.slot_mut(before).next = behind;
                }
            }
        }
        self.slot_mut(place).next = self.free;
        self.free = Some(place);
        Some(value)
    }

    /// Appends an item to `list`, which is of kind `kind`.
    pub(crate) fn push_last(&mut self, kind: usize, list: &mut SlotList, place: SlotPlace) {
        self.slot_mut(place).links[kind] = SlotLinks { before: list.last, behind: None };
        match list.last {
            Some(last) => self.slot_mut(last).links[kind].behind = Some(place),
            None => list.first = Some(place),
        }
        list.last = Some(place);
    }

    /// Removes an item from `list`, which must contain it.
    pub(crate) fn unlink(&mut self, kind: usize, list: &mut SlotList, place: SlotPlace) {
        let SlotLinks { before, behind } = std::mem::take(&mut self.slot_mut(place).links[kind]);
        match before {
            Some(before) => self.slot_mut(before).links[kind].behind = behind,
            None => list.first = behind,
        }
        match behind {
            Some(behind) => self.slot_mut(behind).links[kind].before = before,
            None => list.last = before,
        }
    }

    /// The item after `place` in its list of kind `kind`.
    pub(crate) fn behind(&self, kind: usize, place: SlotPlace) -> Option<SlotPlace> {
        self.slot(place).links[kind].behind
    }

    fn bucket(&self, hash: u64) -> usize {
        // Lossless: fewer buckets than 2^20.
        usize::try_from(hash & (self.buckets.len() as u64 - 1)).unwrap_or(0)
    }

    fn slot(&self, place: SlotPlace) -> &SourceSlot<T, LISTS> {
        &self.slots[place.0 as usize]
    }

    fn slot_mut(&mut self, place: SlotPlace) -> &mut SourceSlot<T, LISTS> {
        &mut self.slots[place.0 as usize]
    }
}

impl<T, const LISTS: usize> Index<SlotPlace> for SourceSlots<T, LISTS> {
    type Output = T;

    fn index(&self, place: SlotPlace) -> &T {
        self.slot(place).value.as_ref().expect("a place is forgotten when it is free")
    }
}

impl<T, const LISTS: usize> IndexMut<SlotPlace> for SourceSlots<T, LISTS> {
    fn index_mut(&mut self, place: SlotPlace) -> &mut T {
        self.slot_mut(place).value.as_mut().expect("a place is forgotten when it is free")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compared with a queue; few hash values, so that items share buckets.
        #[test]
        fn stored_found_lists_keep_order(
            steps in proptest::collection::vec((0u8..4, any::<u8>()), 0..200),
        ) {
            let mut slots = SourceSlots::<u8, 1>::new(4);
            let mut list = SlotList::default();
            let mut twin = VecDeque::new();
            for (step, value) in steps {
                let hash = u64::from(value % 8);
                let found = slots.find(hash, |&stored| stored == value);
                prop_assert_eq!(found.is_some(), twin.contains(&value));
                match (step, found) {
                    (0 | 1, None) => {
                        let place = slots.insert(hash, value);
                        slots.push_last(0, &mut list, place);
                        twin.push_back(value);
                    }
                    (2, Some(place)) => {
                        slots.unlink(0, &mut list, place);
                        prop_assert_eq!(slots.remove(place), Some(value));
                        prop_assert_eq!(slots.remove(place), None);
                        twin.retain(|&stored| stored != value);
                    }
                    (3, Some(place)) => {
                        slots.unlink(0, &mut list, place);
                        slots.push_last(0, &mut list, place);
                        twin.retain(|&stored| stored != value);
                        twin.push_back(value);
                    }
                    _ => {}
                }
                let mut at = list.first();
                let mut stored = Vec::new();
                while let Some(place) = at {
                    stored.push(slots[place]);
                    at = slots.behind(0, place);
                }
                prop_assert_eq!(list.is_empty(), twin.is_empty());
                prop_assert_eq!(stored, Vec::from(twin.clone()));
            }
        }
    }
}
