//! Choice of the SYNs that are answered by cookies, in a flood that is faster than answers can be sent.
//!
//! Up to a limit, SYNs are answered as they come. Beyond it, only a SYN that came before is answered: a client repeats a
//! SYN that got no answer, and a flood of made-up SYNs does not.

/// Bits of a generation: 64 KiB.
const BITS: u64 = 1 << 19;
const WORDS: usize = 1 << 13;

/// Time in which SYNs are remembered by one generation, in µs. A SYN is known for one to two of these, and
/// Linux sends one again after a second.
const GENERATION_US: u64 = 3_000_000;

/// Time in which answers may be saved up, as a part of a second.
const SAVED_PART_OF_S: u64 = 10;

/// Allowance of answers, and memory of the SYNs that were not answered: two Bloom filters of different age.
#[derive(Debug, Default)]
pub(super) struct SynFilter {
    /// Answers that may be sent, in millionths, and the time of this, in µs.
    allowance_millionths: u64,
    counted_us: u64,
    /// Current generation, and the one before; none before the first flood.
    seen: [Vec<u64>; 2],
    began_us: u64,
}

impl SynFilter {
    /// True if a SYN with this keyed hash may be answered. At most `limit_per_s` are that came for the first time;
    /// 0 for no limit.
    pub(super) fn admits(&mut self, hash: u64, limit_per_s: u32, now_us: u64) -> bool {
        limit_per_s == 0
            || self.is_within(limit_per_s.into(), now_us)
            || self.came_before(hash, now_us)
    }

    fn is_within(&mut self, limit_per_s: u64, now_us: u64) -> bool {
        let since_us = now_us.saturating_sub(self.counted_us);
        self.counted_us = now_us;
        // A limit below this part of a second still allows one.
        let saved_max = (limit_per_s * 1_000_000 / SAVED_PART_OF_S).max(1_000_000);
        let saved = self.allowance_millionths.saturating_add(since_us.saturating_mul(limit_per_s));
        self.allowance_millionths = saved.min(saved_max);
        let is_within = self.allowance_millionths >= 1_000_000;
        if is_within {
            self.allowance_millionths -= 1_000_000;
        }
        is_within
    }

    /// True if the SYN is remembered. From now on it is.
    fn came_before(&mut self, hash: u64, now_us: u64) -> bool {
        self.age(now_us);
        let places =
            [hash % BITS, (hash >> 32) % BITS].map(|bit| (word(bit / 64), 1 << (bit % 64)));
        let [current, before] = &mut self.seen;
        let is_known = |seen: &[u64]| {
            places.iter().all(|&(word, mask)| seen.get(word).is_some_and(|bits| bits & mask != 0))
        };
        let came_before = is_known(current) || is_known(before);
        for (word, mask) in places {
            current[word] |= mask;
        }
        came_before
    }

    /// Begins a generation if the current one is old.
    fn age(&mut self, now_us: u64) {
        let age_us = now_us.saturating_sub(self.began_us);
        let is_first = self.seen[0].is_empty();
        if !is_first && age_us < GENERATION_US {
            return;
        }
        self.began_us = now_us;
        self.seen.swap(0, 1);
        self.seen[0].clear();
        self.seen[0].resize(WORDS, 0);
        if age_us >= 2 * GENERATION_US {
            self.seen[1].clear();
        }
    }
}

fn word(index: u64) -> usize {
    usize::try_from(index).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hash of a number (splitmix64).
    fn hash(number: u64) -> u64 {
        let mut bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    #[test]
    fn tcp_13_first_syns_have_limit() {
        let mut filter = SynFilter::default();
        let answered =
            (0..100_000).filter(|&syn| filter.admits(hash(syn), 1000, 10_000_000 + syn * 20));
        // 2 s of 1000, what was saved up, and SYNs that the filter takes for others.
        let answered = answered.count();
        assert!((2000..8000).contains(&answered), "{answered}");
        assert!((0..1000).all(|syn| SynFilter::default().admits(hash(syn), 0, 0)), "no limit");
    }

    #[test]
    fn tcp_13_repeated_syns_are_answered() {
        let mut filter = SynFilter::default();
        let from_us = 50_000_000;
        while filter.admits(hash(0), 10, from_us) {}
        let refused: Vec<u64> =
            (1..1000).filter(|&syn| !filter.admits(hash(syn), 10, from_us)).collect();
        assert!(refused.len() > 990);
        let mut flood = 1_000_000;
        for (after_us, is_known) in
            [(1_000_000, true), (GENERATION_US - 1, true), (9_000_000, false)]
        {
            for at in 0..1000 {
                flood += 1;
                filter.admits(hash(flood), 10, from_us + after_us / 1000 * at);
            }
            let again = |syn: &&u64| filter.came_before(hash(**syn), from_us + after_us);
            let known = refused.iter().filter(again).count();
            let expected =
                if is_known { refused.len()..refused.len() + 1 } else { 0..refused.len() / 10 };
            assert!(expected.contains(&known), "{known} after {after_us}");
        }
    }
}
