//! Growth of a ring: a second ring continues where the first one ends.

use super::{Consumer, Producer, ring};
use crate::position::Position;
use crate::sync::{Arc, Ordering};

impl<T: Send> Producer<T> {
    /// Continues in a ring of `capacity` slots, if this ring has fewer. Everything pushed so far is
    /// published, and stays in the old ring until the consumer has processed it.
    ///
    /// # Panics
    /// If `capacity` is not a power of two from 1 to 2^31.
    pub fn grow(&mut self, capacity: u32) {
        if capacity <= self.capacity() {
            return;
        }
        self.publish();
        let (larger, consumer) = ring(capacity, self.tail);
        // SAFETY: `has_grown` is not set, so the cell is the producer's.
        self.shared.larger.with_mut(|larger| unsafe { *larger = Some(consumer) });
        // Release: pairs with the Acquire load in `Consumer::follow`, for the cell and the last
        // tail of this ring.
        self.shared.tail.0.has_grown.store(1, Ordering::Release);
        let outgrown = std::mem::replace(&mut self.shared, Arc::clone(&larger.shared));
        self.outgrown.push_back((outgrown, self.tail));
    }

    /// Head counter, if the consumer is still in an outgrown ring.
    #[inline]
    pub(super) fn outgrown_head(&mut self) -> Option<Position> {
        if self.outgrown.is_empty() { None } else { self.look_at_outgrown() }
    }

    #[cold]
    fn look_at_outgrown(&mut self) -> Option<Position> {
        while let Some((outgrown, end)) = self.outgrown.front() {
            // Acquire: pairs with the Release store in `Consumer::release`.
            let head = Position(outgrown.head.0.load(Ordering::Acquire));
            if head != *end {
                return Some(head);
            }
            self.outgrown.pop_front();
        }
        None
    }
}

impl<T: Send> Consumer<T> {
    /// Continues in the ring that this one has grown into, if there is one and everything in this
    /// one is taken and processed. Returns true if there may be more to take.
    #[inline]
    pub(super) fn follow(&mut self) -> bool {
        // Acquire: pairs with the Release store in `Producer::grow`.
        self.head == self.taken
            && self.shared.tail.0.has_grown.load(Ordering::Acquire) == 1
            && self.follow_larger()
    }

    #[cold]
    fn follow_larger(&mut self) -> bool {
        // The last tail is visible with the flag; the one read before it may be older.
        self.tail_seen = Position(self.shared.tail.0.position.load(Ordering::Acquire));
        if self.tail_seen != self.taken {
            return true;
        }
        // SAFETY: `has_grown` is set, so the cell is the consumer's.
        let larger = self.shared.larger.with_mut(|larger| unsafe { (*larger).take() });
        match larger {
            Some(larger) => {
                *self = larger;
                true
            }
            None => false, // taken before: `self` is the larger ring
        }
    }
}
