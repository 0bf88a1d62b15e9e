//! Single-producer, single-consumer ring, by which packets pass from one CPU to another.
//!
//! Producer and consumer are two types, each held by one thread. The ring's counters are the head
//! and tail counters of RFS (RFS-5):
//!
//! * **tail** is advanced by [`Producer::publish`], once for a burst of [`Producer::push`]es;
//! * **head** is advanced by [`Consumer::release`], after the packets that [`Consumer::take`] moved
//!   out have been *processed*, not when they are taken (ordering hazard H13).
//!
//! A slot belongs to the consumer from the publish that filled it to the release that frees it.
//!
//! A ring can grow. Its producer continues in a larger ring, whose counters continue those of the
//! first one; the consumer follows once it has processed everything in the first. Both ends see one
//! ring.

mod grow; // a second ring that goes on where the first one ends

use std::collections::VecDeque;
use std::fmt;
use std::mem::MaybeUninit;

use crate::cache::{OwnLine, prefetch_to_write};
use crate::position::Position;
use crate::sync::{Arc, AtomicU32, Ordering, UnsafeCell};

/// Creates a ring of `capacity` slots whose counters both begin at `start`.
///
/// # Panics
/// If `capacity` is not a power of two from 1 to 2^31: counters that wrap at 2^32 need that.
#[must_use]
pub fn ring<T: Send>(capacity: u32, start: Position) -> (Producer<T>, Consumer<T>) {
    assert!(
        capacity.is_power_of_two(),
        "a ring's capacity is a power of two from 1 to 2^31, not {capacity}"
    );
    let shared = Arc::new(RingShared {
        head: OwnLine(AtomicU32::new(start.0)),
        tail: OwnLine(Tail { position: AtomicU32::new(start.0), has_grown: AtomicU32::new(0) }),
        slots: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
        mask: capacity - 1,
        larger: UnsafeCell::new(None),
    });
    let producer = Producer {
        shared: Arc::clone(&shared),
        tail: start,
        published: start,
        head_seen: start,
        outgrown: VecDeque::new(),
    };
    let consumer = Consumer { shared, taken: start, head: start, tail_seen: start };
    (producer, consumer)
}

struct RingShared<T> {
    /// Written by the consumer (Release), read by the producer (Acquire).
    head: OwnLine<AtomicU32>,
    /// Written by the producer (Release), read by the consumer (Acquire).
    tail: OwnLine<Tail>,
    /// Slots `[head, tail)` are filled; the consumer may have moved some of them out already.
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    mask: u32,
    /// Consumer of the larger ring that follows. Accessed by the producer until `has_grown` is set,
    /// then by the consumer.
    larger: UnsafeCell<Option<Consumer<T>>>,
}

struct Tail {
    position: AtomicU32,
    /// 1 once nothing more is put into this ring.
    has_grown: AtomicU32,
}

// SAFETY: a slot is touched by the producer while its position is outside [head, tail) and by the
// consumer while it is inside; the Release store of one end and the Acquire load of the other order
// the two. `larger` is the producer's before the Release store of `has_grown`, and the consumer's
// after its Acquire load. `T: Send` since values cross threads.
unsafe impl<T: Send> Send for RingShared<T> {}
// SAFETY: as above; no `&T` is ever shared.
unsafe impl<T: Send> Sync for RingShared<T> {}

/// Distance in slots at which a slot is prefetched before it is filled: its line arrives from the
/// consumer's CPU in the time that a few packets take.
const PREFETCH_AHEAD: u32 = 8;

impl<T> RingShared<T> {
    /// `count` slots from `at` on, in two slices: up to the end of the array, and from its
    /// beginning.
    fn slots_from(&self, at: Position, count: usize) -> [&[UnsafeCell<MaybeUninit<T>>]; 2] {
        let start = (at.0 & self.mask) as usize;
        let (before, from) = self.slots.split_at(start);
        let first = count.min(from.len());
        [&from[..first], &before[..count - first]]
    }

    fn slot(&self, at: Position) -> &UnsafeCell<MaybeUninit<T>> {
        &self.slots[(at.0 & self.mask) as usize]
    }
}

impl<T> Drop for RingShared<T> {
    fn drop(&mut self) {
        // Both ends are gone: Consumer's Drop has set head to the position taken, Producer's has
        // published what it pushed, so exactly [head, tail) is filled.
        let mut at = Position(self.head.0.load(Ordering::Acquire));
        let tail = Position(self.tail.0.position.load(Ordering::Acquire));
        while at != tail {
            // SAFETY: the slot is filled, see above, and `&mut self` excludes everyone else.
            self.slot(at).with_mut(|slot| unsafe { slot.cast::<T>().drop_in_place() });
            at = at.plus(1);
        }
    }
}

/// End of a ring that fills it. Held by one thread; not `Clone`.
pub struct Producer<T> {
    shared: Arc<RingShared<T>>,
    /// Position of the next packet; ahead of `published` within a burst.
    tail: Position,
    /// Position that the consumer may see: the value of `shared.tail`.
    published: Position,
    /// Last value read from the head of the ring or of the first outgrown one; never ahead of it.
    head_seen: Position,
    /// Smaller rings that the consumer had not left when last observed, and the end of each.
    outgrown: VecDeque<(Arc<RingShared<T>>, Position)>,
}

impl<T: Send> Producer<T> {
    /// Puts `value` into the ring, not yet visible to the consumer, and returns the tail counter
    /// after it. Once the head reaches that position, the value has been processed.
    ///
    /// # Errors
    /// Returns `value` if the ring is full.
    pub fn push(&mut self, value: T) -> Result<Position, T> {
        if self.queued() == self.capacity() && self.refreshed_queued() == self.capacity() {
            return Err(value);
        }
        prefetch_to_write(
            std::ptr::from_ref(self.shared.slot(self.tail.plus(PREFETCH_AHEAD))).cast(),
        );
        self.shared.slot(self.tail).with_mut(|slot| {
            // SAFETY: tail - head < capacity, so the slot is outside [head, tail): ours.
            unsafe { slot.cast::<T>().write(value) };
        });
        self.tail = self.tail.plus(1);
        Ok(self.tail)
    }

    /// Puts all of `values` into the ring, not yet visible to the consumer, and empties the vector.
    /// Returns false, and moves nothing, if there is no room for all of them.
    #[must_use]
    pub fn push_all(&mut self, values: &mut Vec<T>) -> bool {
        let count = values.len();
        let capacity = self.capacity() as usize;
        let fits = |queued: u32| queued as usize + count <= capacity;
        if !fits(self.queued()) && !fits(self.refreshed_queued()) {
            return false;
        }
        let mut rest = values.drain(..);
        for slots in self.shared.slots_from(self.tail, count) {
            for (slot, value) in slots.iter().zip(rest.by_ref()) {
                // SAFETY: tail - head + count <= capacity, so the slots are outside [head, tail).
                slot.with_mut(|slot| unsafe { slot.cast::<T>().write(value) });
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most the capacity")]
        let pushed = count as u32;
        self.tail = self.tail.plus(pushed);
        true
    }

    /// Makes everything pushed so far visible to the consumer. Returns true if anything was new.
    pub fn publish(&mut self) -> bool {
        if self.published == self.tail {
            return false;
        }
        self.published = self.tail;
        // Release: pairs with the Acquire load in `Consumer::queued`, which orders slot contents.
        self.shared.tail.0.position.store(self.tail.0, Ordering::Release);
        true
    }

    /// Reads the consumer's head: every position up to the one returned is processed, and the
    /// writes of that processing are visible.
    pub fn observe_head(&mut self) -> Position {
        if let Some(head) = self.outgrown_head() {
            self.head_seen = head;
            return head;
        }
        // Acquire: pairs with the Release store in `Consumer::release`.
        self.head_seen = Position(self.shared.head.0.load(Ordering::Acquire));
        self.head_seen
    }

    /// Head as last observed; does not touch the consumer's cache line.
    #[must_use]
    pub fn head_seen(&self) -> Position {
        self.head_seen
    }

    /// Tail counter, unpublished packets included.
    #[must_use]
    pub fn tail(&self) -> Position {
        self.tail
    }

    /// Upper bound of the packets that are in the ring or being processed, by the head last
    /// observed.
    #[must_use]
    pub fn queued(&self) -> u32 {
        self.tail.since(self.head_seen)
    }

    /// As [`queued`](Self::queued), after reading the head anew.
    pub fn refreshed_queued(&mut self) -> u32 {
        self.observe_head();
        self.queued()
    }

    /// Number of slots.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.shared.mask + 1
    }
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        self.shared.tail.0.position.store(self.tail.0, Ordering::Release);
    }
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Producer({:?}..{:?})", self.head_seen, self.tail)
    }
}

/// End of a ring that empties it. Held by one thread; not `Clone`.
pub struct Consumer<T> {
    shared: Arc<RingShared<T>>,
    /// Position up to which packets were moved out; ahead of `head` while packets are being
    /// processed.
    taken: Position,
    /// Position up to which packets were processed: the value of `shared.head`.
    head: Position,
    /// The last value read from `shared.tail`; never ahead of it.
    tail_seen: Position,
}

impl<T: Send> Consumer<T> {
    /// Moves up to `max` values to the end of `out`, oldest first, and returns their number.
    ///
    /// The head counter does not pass these packets until [`release`](Self::release).
    pub fn take(&mut self, max: usize, out: &mut Vec<T>) -> usize {
        let count = (self.queued() as usize).min(max);
        for slots in self.shared.slots_from(self.taken, count) {
            out.extend(slots.iter().map(|slot| {
                // SAFETY: taken < tail_seen, so the slot was filled and published; it is read out
                // once, since `taken` advances and Drop starts from there.
                slot.with(|slot| unsafe { slot.cast::<T>().read() })
            }));
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most what is queued")]
        let taken = count as u32;
        self.taken = self.taken.plus(taken);
        count
    }

    /// Declares everything taken so far processed: the head counter advances to there.
    pub fn release(&mut self) {
        if self.head != self.taken {
            self.head = self.taken;
            // Release: pairs with the Acquire load in `Producer::observe_head`.
            self.shared.head.0.store(self.head.0, Ordering::Release);
        }
    }

    /// Lower bound of the values that can be taken: those found by the last read of the tail. The
    /// tail is read anew when none of these are left; a read costs a cache line that the producer
    /// writes.
    pub fn queued(&mut self) -> u32 {
        if self.taken == self.tail_seen {
            // Acquire: pairs with the Release store in `Producer::publish`.
            self.tail_seen = Position(self.shared.tail.0.position.load(Ordering::Acquire));
            if self.taken == self.tail_seen && self.follow() {
                return self.queued();
            }
        }
        self.tail_seen.since(self.taken)
    }

    /// Number of values that are taken and not yet released.
    #[must_use]
    pub fn in_hand(&self) -> u32 {
        self.taken.since(self.head)
    }

    /// Position of the last value taken.
    #[must_use]
    pub fn taken(&self) -> Position {
        self.taken
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        // Values that were taken are no longer in the ring, processed or not.
        self.shared.head.0.store(self.taken.0, Ordering::Release);
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Consumer({:?}, {} in hand)", self.taken, self.taken.since(self.head))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
