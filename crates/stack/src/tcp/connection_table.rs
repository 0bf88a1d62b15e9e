//! Table of connections by their ends: a hash table with a key, so that nobody can aim at one bucket. It grows by a
//! bucket at a time (linear hashing), so that no insertion waits for the others, and its order is never visible.

use std::marker::PhantomData;

use super::flow::{Flow, FlowHasher, HashedFlow, PackedFlow};
use super::slots::{self, Slots};

/// Buckets of an empty table.
const BUCKETS_MIN: usize = 64;
const MASK_MIN: u32 = 63;
const NONE: u32 = u32::MAX;

/// Values by flow (`tcp_hashinfo`). The number of flows is bounded by its user.
#[derive(Debug)]
pub(super) struct ConnectionTable<T> {
    hasher: FlowHasher,
    /// First entry of each bucket, by the low bits of the hash's high half.
    buckets: Vec<u32>,
    /// Mask of those bits: the smallest power of two that is not less than the number of buckets, less one.
    /// A bucket that does not exist yet is part of the one without its highest bit.
    mask: u32,
    entries: Slots<Entry>,
    values: PhantomData<T>,
}

/// A value that fits in a word.
pub(super) trait Word: Copy {
    fn word(self) -> u32;
    fn of_word(word: u32) -> Self;
}

#[derive(Debug)]
struct Entry {
    flow: PackedFlow,
    value: u32,
    /// Next entry of the bucket.
    next: u32,
}

impl<T: Word> ConnectionTable<T> {
    /// Memory of one flow, its bucket included.
    pub(super) const ENTRY_BYTES: usize = size_of::<Entry>() + size_of::<u32>();

    pub(super) fn new(hasher: FlowHasher) -> Self {
        let (buckets, entries) = (vec![NONE; BUCKETS_MIN], Slots::default());
        Self { hasher, buckets, mask: MASK_MIN, entries, values: PhantomData }
    }

    pub(super) fn hashed(&self, flow: &Flow) -> HashedFlow {
        self.hasher.hashed(flow)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() as usize
    }

    fn bucket(&self, hash: u32) -> usize {
        let index = (hash & self.mask) as usize;
        if index < self.buckets.len() { index } else { (hash & (self.mask >> 1)) as usize }
    }

    pub(super) fn find(&self, flow: &Flow) -> Option<T> {
        self.find_hashed(&self.hashed(flow))
    }

    pub(super) fn find_hashed(&self, flow: &HashedFlow) -> Option<T> {
        let (flow, hash) = (PackedFlow::of(flow.flow()), flow.high());
        let mut at = self.buckets[self.bucket(hash)];
        while let Some(entry) = self.entries.at(at) {
            if entry.flow == flow {
                return Some(T::of_word(entry.value));
            }
            at = entry.next;
        }
        None
    }

    /// Sets the value of a flow.
    pub(super) fn insert(&mut self, flow: &Flow, value: T) {
        self.remove(flow);
        if self.entries.len() as usize >= self.buckets.len() {
            self.grow();
        }
        let (flow, hash) = (PackedFlow::of(flow), self.hashed(flow).high());
        let (value, bucket) = (value.word(), self.bucket(hash));
        let next = self.buckets[bucket];
        self.buckets[bucket] = self.entries.insert(Entry { flow, value, next });
    }

    pub(super) fn remove(&mut self, flow: &Flow) {
        let (flow, hash) = (PackedFlow::of(flow), self.hashed(flow).high());
        let bucket = self.bucket(hash);
        let (mut before, mut at) = (NONE, self.buckets[bucket]);
        while let Some(entry) = self.entries.at(at) {
            let next = entry.next;
            if entry.flow == flow {
                match self.entries.at_mut(before) {
                    Some(before) => before.next = next,
                    None => self.buckets[bucket] = next,
                }
                self.entries.remove(at);
                return;
            }
            (before, at) = (at, next);
        }
    }

    /// Adds a bucket, and moves there what belongs there.
    fn grow(&mut self) {
        let Ok(new) = u32::try_from(self.buckets.len()) else { return };
        if new > self.mask {
            self.mask = self.mask << 1 | 1;
        }
        let old = (new & (self.mask >> 1)) as usize;
        slots::push(&mut self.buckets, NONE);
        let mut at = std::mem::replace(&mut self.buckets[old], NONE);
        while let Some(entry) = self.entries.at_mut(at) {
            // Not kept: an idle connection would pay for it.
            let hash = self.hasher.hashed(&entry.flow.unpacked()).high();
            let is_moved = hash & self.mask == new;
            let bucket = if is_moved { new as usize } else { old };
            let next = std::mem::replace(&mut entry.next, self.buckets[bucket]);
            self.buckets[bucket] = at;
            at = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl Word for u32 {
        fn word(self) -> u32 {
            self
        }

        fn of_word(word: u32) -> Self {
            word
        }
    }

    proptest! {
        #[test]
        fn tcp_10_connection_table_agrees_with_map(
            steps in prop::collection::vec((0_u16..300, any::<bool>(), any::<u32>()), 0..800),
        ) {
            let flow = |port| Flow {
                ours: "192.0.2.1:80".parse().unwrap(),
                theirs: std::net::SocketAddr::new("192.0.2.2".parse().unwrap(), port),
            };
            let (mut table, mut model) = (ConnectionTable::new(FlowHasher::new([3; 16])), BTreeMap::new());
            for (port, inserts, value) in steps {
                if inserts {
                    table.insert(&flow(port), value);
                    model.insert(port, value);
                } else {
                    table.remove(&flow(port));
                    model.remove(&port);
                }
                prop_assert_eq!(table.find(&flow(port)), model.get(&port).copied());
            }
            for port in 0..300 {
                prop_assert_eq!(table.find(&flow(port)), model.get(&port).copied());
            }
            prop_assert_eq!(table.entries.len() as usize, model.len());
        }
    }

    /// Insertions add a bucket at most, and no bucket becomes long.
    #[test]
    fn tcp_10_insertions_move_one_bucket() {
        let mut table = ConnectionTable::new(FlowHasher::new([5; 16]));
        for number in 0..20_000_u32 {
            let theirs = std::net::SocketAddr::from((number.to_be_bytes(), 7));
            let before = table.buckets.len();
            table.insert(&Flow { ours: "192.0.2.1:80".parse().unwrap(), theirs }, number);
            assert!(table.buckets.len() - before <= 1);
        }
        assert!(table.buckets.len() >= 20_000);
        let mut longest = 0;
        for &first in &table.buckets {
            let (mut at, mut count) = (first, 0);
            while let Some(entry) = table.entries.at(at) {
                (at, count) = (entry.next, count + 1);
            }
            longest = longest.max(count);
        }
        assert!(longest < 16, "{longest} entries in one bucket");
    }
}
