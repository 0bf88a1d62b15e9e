//! Held packets by their addresses: a fragment may belong to any flow between its own.
//!
//! Chains by a keyed hash, as many as places. Nobody outside can put many pairs of addresses into
//! one chain, so a fragment passes over one packet of other addresses on average. All held packets
//! of the fragment's own addresses are flushed with it, so each visit of those is paid for once,
//! when the packet was held.

use super::links::{HashLinkEnds, HashLinks};

/// Number of four-byte words in two IPv6 addresses.
const WORDS_MAX: usize = 8;

/// Places by a hash of the addresses of their held packets.
#[derive(Debug)]
pub(super) struct Between {
    /// Factor for each word, and an addend.
    key: [u64; WORDS_MAX + 1],
    /// Hash of each place.
    hashes: Box<[u32]>,
    links: HashLinks,
    /// By the upper bits of the hash, oldest place first. Their number is a power of two.
    chains: Box<[HashLinkEnds]>,
}

impl Between {
    /// Creates an index of `places` places, a power of two, without held packets.
    pub(super) fn new(places: usize, seed: u64) -> Self {
        let mut state = seed;
        Self {
            key: std::array::from_fn(|_| split_mix(&mut state)),
            hashes: vec![0; places].into(),
            links: HashLinks::new(places),
            chains: vec![HashLinkEnds::EMPTY; places].into(),
        }
    }

    /// Adds a place with a held packet between these addresses.
    pub(super) fn add(&mut self, place: usize, addresses: &[u8]) {
        let hash = self.hash(addresses);
        self.hashes[place] = hash;
        let chain = self.chain(hash);
        self.links.push_last(&mut self.chains[chain], place);
    }

    /// Removes a place.
    pub(super) fn remove(&mut self, place: usize) {
        let chain = self.chain(self.hashes[place]);
        self.links.unlink(&mut self.chains[chain], place);
    }

    /// Oldest place with a held packet that may be between these addresses.
    pub(super) fn first(&self, addresses: &[u8]) -> Option<usize> {
        let hash = self.hash(addresses);
        self.from(self.chains[self.chain(hash)].first(), hash)
    }

    /// Next place with the same hash of addresses as `place`.
    pub(super) fn next(&self, place: usize) -> Option<usize> {
        self.from(self.links.behind(place), self.hashes[place])
    }

    /// First place with this hash, from `place` on.
    fn from(&self, mut place: Option<usize>, hash: u32) -> Option<usize> {
        while let Some(at) = place.filter(|&at| self.hashes[at] != hash) {
            place = self.links.behind(at);
        }
        place
    }

    /// Sum of products. Strongly universal (Dietzfelbinger), which is enough because no hash is
    /// ever disclosed; cheap, because every held packet pays for it.
    fn hash(&self, addresses: &[u8]) -> u32 {
        let (factors, [.., more]) = (&self.key[..WORDS_MAX], self.key);
        let words = addresses.as_chunks().0.iter().map(|&word| u32::from_ne_bytes(word));
        let products = words.zip(factors).map(|(word, factor)| factor.wrapping_mul(word.into()));
        let sum = products.fold(more, u64::wrapping_add);
        u32::try_from(sum >> u32::BITS).unwrap_or(0)
    }

    fn chain(&self, hash: u32) -> usize {
        let bits = self.chains.len().trailing_zeros();
        // Lossless: there are fewer chains than 2^16.
        usize::try_from(u64::from(hash) >> (u32::BITS - bits)).unwrap_or(0)
    }
}

/// Next number of the sequence of a seed (SplitMix64 of Steele, Lea and Flood).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLACES: usize = 64;

    /// Addresses of either IP version, few enough to collide.
    fn addresses(number: u8) -> Vec<u8> {
        let half = if number.is_multiple_of(2) { 4 } else { 16 };
        [vec![number / 16; half], vec![number % 16; half]].concat()
    }

    fn found(between: &Between, addresses: &[u8]) -> Vec<usize> {
        std::iter::successors(between.first(addresses), |&place| between.next(place)).collect()
    }

    proptest! {
        #[test]
        fn full_scan_agrees(
            seed: u64,
            steps in proptest::collection::vec((0..PLACES, 0u8..32), 0..300),
        ) {
            let mut between = Between::new(PLACES, seed);
            let mut twin: Vec<(usize, u8)> = Vec::new();
            for (place, number) in steps {
                if let Some(at) = twin.iter().position(|&(held, _)| held == place) {
                    twin.remove(at);
                    between.remove(place);
                } else {
                    twin.push((place, number));
                    between.add(place, &addresses(number));
                }
                for number in 0..32 {
                    let those = twin.iter().filter(|(_, held)| *held == number);
                    let expected: Vec<_> = those.map(|&(place, _)| place).collect();
                    // With so few pairs, no two have the same hash of 32 bits.
                    prop_assert_eq!(found(&between, &addresses(number)), expected);
                }
            }
        }
    }

    /// Number of places in the chain of these addresses.
    fn passed(between: &Between, addresses: &[u8]) -> usize {
        let chain = between.chain(between.hash(addresses));
        let first = between.chains[chain].first();
        std::iter::successors(first, |&place| between.links.behind(place)).count()
    }

    #[test]
    fn promise_3_fragment_search_averages_one_stranger() {
        const MANY: u32 = 4096;
        let pair = |from: u32, to: u32| [from.to_be_bytes(), to.to_be_bytes()].concat();
        // One pair for all flows; another source for each flow; sources one bit apart.
        let kinds: [fn(u32) -> (u32, u32); 3] =
            [|_| (1, 2), |flow| (flow, 2), |flow| (flow << 20, flow)];
        for (seed, kind) in (7..).zip(kinds) {
            let mut between = Between::new(MANY as usize, seed);
            for flow in 0..MANY {
                let (from, to) = kind(flow);
                between.add(flow as usize, &pair(from, to));
            }
            let strangers = (0..MANY).map(|number| pair(0xc0a8_0000 + number, 3));
            let passed: usize = strangers.map(|stranger| passed(&between, &stranger)).sum();
            assert!(passed <= 2 * MANY as usize, "{passed} for {MANY} fragments");
        }
    }
}
