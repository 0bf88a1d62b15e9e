//! A point in a ring's life.

use std::fmt;

/// A ring's head or tail counter: the number of packets that had passed that end, modulo 2^32.
///
/// Counters of a ring only ever advance, and head and tail are never further apart than the
/// ring's capacity. So two positions of *one* ring compare by their distance, and wrapping is no
/// event at all. A position says nothing about another ring.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Position(pub u32);

impl Position {
    /// The position `count` packets later.
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// Number of packets that lie between `earlier` and this position (modulo 2^32).
    #[must_use]
    pub const fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }

    /// Number of packets up to and including this position that are still ahead of a consumer that has
    /// processed everything up to `head`; 0 when this one has been processed.
    ///
    /// `tail` is the ring's tail now. A position outside `(head, tail]` has been processed, also
    /// one remembered for more than half a turn of the counter, which a signed comparison would
    /// mistake for a future one. One remembered for a whole turn may count as pending again, for
    /// as long as what lies there: its flow is delayed, never reordered.
    #[must_use]
    pub const fn pending(self, head: Self, tail: Self) -> u32 {
        let ahead = self.since(head);
        if ahead <= tail.since(head) { ahead } else { 0 }
    }
}

impl fmt::Debug for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfs_6_position_pending_between_head_and_tail() {
        for base in [0, 1, 0x7fff_fff0, 0x8000_0000, 0xffff_fff0, u32::MAX] {
            let head = Position(base);
            let tail = head.plus(10);
            assert_eq!(head.pending(head, tail), 0, "what the head has reached is processed");
            assert_eq!(head.plus(1).pending(head, tail), 1);
            assert_eq!(tail.pending(head, tail), 10);
            for ago in [1, 1000, 0x7fff_ffff, 0x8000_0000, 0xffff_0000] {
                assert_eq!(Position(base.wrapping_sub(ago)).pending(head, tail), 0, "{ago} ago");
            }
        }
    }
}
