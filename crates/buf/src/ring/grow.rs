//! Growth of a ring: in a second one, which takes over where the first one ends.

use super::{Consumer, Producer, ring};
use crate::position::Position;
use crate::sync::{Arc, Ordering};

impl<T: Send> Producer<T> {
    /// Goes on in a ring of `capacity` slots, if that is more than there are. What was pushed so far
    /// is published, and stays where it is until the consumer has processed it.
    ///
    /// # Panics
    /// When `capacity` is not a power of two from 1 to 2^31.
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

    /// The head counter, while the consumer is in a ring that was outgrown.
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
    /// Goes on in the ring that this one has grown into, if it has, and if all of this one was
    /// taken and processed. Returns whether it did.
    #[inline]
    pub(super) fn follow(&mut self) -> bool {
        // Acquire: pairs with the Release store in `Producer::grow`.
        self.head == self.taken
            && self.shared.tail.0.has_grown.load(Ordering::Acquire) == 1
            && self.follow_larger()
    }

    #[cold]
    fn follow_larger(&mut self) -> bool {
        // The last tail is visible with the flag; the one seen before it may be older.
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
            None => false, // it was taken before, and is what `self` is
        }
    }
}
