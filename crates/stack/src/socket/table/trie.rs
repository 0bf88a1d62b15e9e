//! A persistent map: a change creates a new map, which shares all unchanged parts with the old one.
//!
//! Readers need no lock, as a map never changes once created. A change copies one branch per level,
//! and a level distinguishes 256 keys.

use std::fmt;
use std::sync::Arc;

/// Bits of the key per level, the lowest ones first.
const LEVEL_BITS: u32 = 8;

/// A map from keys to values.
pub(super) struct Trie<V> {
    root: Branch<V>,
}

struct Branch<V> {
    present: Present,
    /// Children that are present, in order.
    children: Arc<[Child<V>]>,
}

#[derive(Clone)]
enum Child<V> {
    Branch(Branch<V>),
    /// The only key in this subtree.
    Leaf(u32, V),
}

/// Bitmap of a branch's 256 children.
#[derive(Clone, Copy, Default)]
struct Present {
    words: [u64; WORDS],
    /// Number of children in the preceding words.
    before: [u8; WORDS],
}

const WORDS: usize = (1 << LEVEL_BITS) / u64::BITS as usize;

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

    /// Copy of the map with a key's value replaced, or removed if `None`.
    pub(super) fn with(&self, key: u32, value: Option<V>) -> Self {
        Self { root: self.root.with(0, key, value) }
    }

    /// True if the map is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.root.children.is_empty()
    }

    /// Calls `each` for every value, in no particular order.
    pub(super) fn for_each<'a>(&'a self, mut each: impl FnMut(&'a V)) {
        self.root.for_each(&mut each);
    }
}

impl<V: Clone> Branch<V> {
    fn child(&self, rest: u32) -> Option<&Child<V>> {
        let digit = digit_of(rest);
        self.present.has(digit).then(|| &self.children[self.present.place_of(digit)])
    }

    fn with(&self, level: u32, key: u32, value: Option<V>) -> Self {
        let rest = key.unbounded_shr(level * LEVEL_BITS);
        let old = self.child(rest);
        let new = match (old, value) {
            (None, value) => value.map(|value| Child::Leaf(key, value)),
            (Some(Child::Leaf(of, _)), value) if *of == key => {
                value.map(|value| Child::Leaf(key, value))
            }
            (Some(leaf @ Child::Leaf(..)), None) => Some(leaf.clone()),
            // The two keys differ, so they part at a lower level.
            (Some(Child::Leaf(of, there)), value) => {
                let alone = Self::default().with(level + 1, *of, Some(there.clone()));
                Some(Child::Branch(alone.with(level + 1, key, value)))
            }
            (Some(Child::Branch(branch)), value) => branch.with(level + 1, key, value).folded(),
        };
        self.with_child(digit_of(rest), new)
    }

    /// The child that represents this branch in its parent.
    fn folded(self) -> Option<Child<V>> {
        match &*self.children {
            [] => None,
            [leaf @ Child::Leaf(..)] => Some(leaf.clone()),
            _ => Some(Child::Branch(self)),
        }
    }

    fn with_child(&self, digit: u8, new: Option<Child<V>>) -> Self {
        let at = self.present.place_of(digit);
        let behind = if self.present.has(digit) { at + 1 } else { at };
        let (before, after) = (&self.children[..at], &self.children[behind..]);
        let present = self.present.with(digit, new.is_some());
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

impl Present {
    fn has(&self, digit: u8) -> bool {
        let (word, bit) = place_in(digit);
        self.words[word] & bit != 0
    }

    /// Position of a digit's child among those present, or its insertion point.
    fn place_of(&self, digit: u8) -> usize {
        let (word, bit) = place_in(digit);
        usize::from(self.before[word]) + (self.words[word] & (bit - 1)).count_ones() as usize
    }

    fn with(mut self, digit: u8, is_present: bool) -> Self {
        let (word, bit) = place_in(digit);
        self.words[word] =
            if is_present { self.words[word] | bit } else { self.words[word] & !bit };
        let mut before = 0u32;
        for (word, count) in self.words.iter().zip(&mut self.before) {
            *count = before.to_le_bytes()[0]; // 192 at most
            before += word.count_ones();
        }
        self
    }
}

/// Word index of a digit, and its bit there.
fn place_in(digit: u8) -> (usize, u64) {
    (usize::from(digit >> 6), 1 << (digit & 63))
}

/// Digit of the current level.
fn digit_of(rest: u32) -> u8 {
    rest.to_le_bytes()[0]
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
        Self { present: Present::default(), children: Arc::default() }
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

    /// Keys, many of which share some of their bits.
    fn key() -> impl Strategy<Value = u32> {
        prop_oneof![0u32..100, (0u32..4).prop_map(|high| high << 30 | 5), any::<u32>()]
    }

    proptest! {
        /// After any changes, the trie equals a map; and a copy kept from before is unchanged.
        #[test]
        fn trie_is_a_persistent_map(
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
