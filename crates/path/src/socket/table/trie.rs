//! A map that is a value: changed, it becomes another one, which shares with it all that is the same.
//!
//! Readers walk over it without a lock, for nothing in it ever changes. A change copies one branch on
//! each level, and a level tells 64 keys apart.

use std::fmt;
use std::sync::Arc;

/// Bits of a key that a level tells apart, the lowest ones first.
const LEVEL_BITS: u32 = 6;

/// Values by keys.
pub(super) struct Trie<V> {
    root: Branch<V>,
}

struct Branch<V> {
    /// Which of the level's 64 there are.
    present: u64,
    /// Those, in order.
    children: Arc<[Child<V>]>,
}

#[derive(Clone)]
enum Child<V> {
    Branch(Branch<V>),
    /// The only key from here on.
    Leaf(u32, V),
}

impl<V: Clone> Trie<V> {
    /// The value of a key.
    pub(super) fn get(&self, key: u32) -> Option<&V> {
        let (mut branch, mut rest) = (&self.root, key);
        loop {
            match branch.child(rest)? {
                Child::Leaf(of, value) => return (*of == key).then_some(value),
                Child::Branch(next) => (branch, rest) = (next, rest >> LEVEL_BITS),
            }
        }
    }

    /// The same map, but for a key's value; None: it has none.
    pub(super) fn with(&self, key: u32, value: Option<V>) -> Self {
        Self { root: self.root.with(0, key, value) }
    }

    /// Whether there is nothing in it.
    pub(super) fn is_empty(&self) -> bool {
        self.root.present == 0
    }

    /// Each value, in no order.
    pub(super) fn for_each<'a>(&'a self, mut each: impl FnMut(&'a V)) {
        self.root.for_each(&mut each);
    }
}

impl<V: Clone> Branch<V> {
    fn child(&self, rest: u32) -> Option<&Child<V>> {
        let bit = bit_of(rest);
        (self.present & bit != 0).then(|| &self.children[self.place_of(bit)])
    }

    /// Where the child of a bit stands, or would.
    fn place_of(&self, bit: u64) -> usize {
        (self.present & (bit - 1)).count_ones() as usize
    }

    fn with(&self, level: u32, key: u32, value: Option<V>) -> Self {
        let bit = bit_of(key.unbounded_shr(level * LEVEL_BITS));
        let old = (self.present & bit != 0).then(|| &self.children[self.place_of(bit)]);
        let new = match (old, value) {
            (None, value) => value.map(|value| Child::Leaf(key, value)),
            (Some(Child::Leaf(of, _)), value) if *of == key => {
                value.map(|value| Child::Leaf(key, value))
            }
            (Some(leaf @ Child::Leaf(..)), None) => Some(leaf.clone()),
            // They part further down, as they differ.
            (Some(Child::Leaf(of, there)), value) => {
                let alone = Self::default().with(level + 1, *of, Some(there.clone()));
                Some(Child::Branch(alone.with(level + 1, key, value)))
            }
            (Some(Child::Branch(branch)), value) => branch.with(level + 1, key, value).folded(),
        };
        self.with_child(bit, new)
    }

    /// As what it stands in the branch above.
    fn folded(self) -> Option<Child<V>> {
        match &*self.children {
            [] => None,
            [leaf @ Child::Leaf(..)] => Some(leaf.clone()),
            _ => Some(Child::Branch(self)),
        }
    }

    fn with_child(&self, bit: u64, new: Option<Child<V>>) -> Self {
        let at = self.place_of(bit);
        let behind = if self.present & bit != 0 { at + 1 } else { at };
        let (before, after) = (&self.children[..at], &self.children[behind..]);
        let present = if new.is_some() { self.present | bit } else { self.present & !bit };
        let children = before.iter().cloned().chain(new).chain(after.iter().cloned());
        Self { present, children: children.collect() }
    }

    fn for_each<'a>(&'a self, each: &mut impl FnMut(&'a V)) {
        for child in &*self.children {
            match child {
                Child::Branch(branch) => branch.for_each(each),
                Child::Leaf(_, value) => each(value),
            }
        }
    }
}

fn bit_of(rest: u32) -> u64 {
    1 << (rest % (1 << LEVEL_BITS))
}

impl<V> Clone for Trie<V> {
    fn clone(&self) -> Self {
        Self { root: self.root.clone() }
    }
}

impl<V> Clone for Branch<V> {
    fn clone(&self) -> Self {
        Self { present: self.present, children: Arc::clone(&self.children) }
    }
}

impl<V> Default for Trie<V> {
    fn default() -> Self {
        Self { root: Branch::default() }
    }
}

impl<V> Default for Branch<V> {
    fn default() -> Self {
        Self { present: 0, children: Arc::default() }
    }
}

impl<V: Clone + fmt::Debug> fmt::Debug for Trie<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut values = f.debug_set();
        self.for_each(|value| {
            values.entry(value);
        });
        values.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Many that are alike in some of their bits.
    fn key() -> impl Strategy<Value = u32> {
        prop_oneof![0u32..100, (0u32..4).prop_map(|high| high << 30 | 5), any::<u32>()]
    }

    proptest! {
        /// Whatever is put in and taken out, it has what a map would have; and what it was before, it is
        /// still.
        #[test]
        fn a_trie_is_a_map_whose_past_stays(
            changes in proptest::collection::vec((key(), any::<Option<u16>>()), 0..300),
            at in any::<proptest::sample::Index>(),
            others in proptest::collection::vec(key(), 10),
        ) {
            let (mut trie, mut map) = (Trie::default(), BTreeMap::new());
            let (kept_at, mut kept) = (at.index(changes.len() + 1), None);
            let same = |trie: &Trie<u16>, map: &BTreeMap<u32, u16>| {
                let mut values = Vec::new();
                trie.for_each(|value| values.push(*value));
                let mut expected: Vec<_> = map.values().copied().collect();
                values.sort_unstable();
                expected.sort_unstable();
                values == expected
                    && trie.is_empty() == map.is_empty()
                    && map.iter().all(|(key, value)| trie.get(*key) == Some(value))
                    && others.iter().all(|key| trie.get(*key) == map.get(key))
            };
            for (number, (key, value)) in changes.into_iter().enumerate() {
                if number == kept_at {
                    kept = Some((trie.clone(), map.clone()));
                }
                trie = trie.with(key, value);
                match value {
                    Some(value) => map.insert(key, value),
                    None => map.remove(&key),
                };
                prop_assert!(same(&trie, &map));
            }
            if let Some((trie, map)) = kept {
                prop_assert!(same(&trie, &map));
            }
            let keys: Vec<_> = map.keys().copied().collect();
            for key in keys {
                trie = trie.with(key, None);
            }
            prop_assert!(trie.is_empty(), "nothing is left of it");
        }
    }
}
