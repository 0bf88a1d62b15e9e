//! Position in a ring: a counter that wraps.

use std::fmt;

/// Value of a ring's head or tail counter: the number of packets that have passed that end, modulo
/// 2^32.
///
/// Counters only advance, and head and tail of a ring are never further apart than its capacity.
/// Two positions of *one* ring therefore compare by their distance, and wrapping needs no special
/// case. Positions of different rings are not comparable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Position(pub u32);

impl Position {
    /// The position `count` packets later.
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// Number of packets between `earlier` and this position (modulo 2^32).
    #[must_use]
    pub const fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }

    /// Number of packets up to and including this position that a consumer at `head` has not
    /// processed; 0 if this position has been processed.
    ///
    /// `tail` is the ring's current tail. A position outside `(head, tail]` has been processed.
    /// A passed position may be one remembered for more than 2^31 packets, which a signed comparison
    /// would take for a future one. A position remembered for 2^32 packets may count as pending
    /// again, until the packet that now has this position is processed: its flow is delayed, never
    /// reordered.
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
