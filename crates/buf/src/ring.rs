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
mod tests {
    use std::collections::VecDeque;
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Operation {
        Push(u8),
        PushAll(u8),
        Publish,
        Take(u8),
        Release,
        Observe,
        Grow,
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            (0u8..12).prop_map(Operation::Push),
            (0u8..12).prop_map(Operation::PushAll),
            Just(Operation::Publish),
            (0u8..12).prop_map(Operation::Take),
            Just(Operation::Release),
            Just(Operation::Observe),
            Just(Operation::Grow),
        ]
    }

    /// Reference model: a ring of `capacity` on plain queues.
    #[derive(Default)]
    struct Oracle {
        staged: VecDeque<Box<u32>>,
        visible: VecDeque<Box<u32>>,
        /// Number of values that had been pushed at each growth that the consumer has not seen.
        growths: VecDeque<u32>,
        /// Number of visible values that the consumer's last look found.
        seen: usize,
        taken: u32,
        in_hand: u32,
        processed: u32,
        pushed: u32,
    }

    impl Oracle {
        /// The consumer's look, made if nothing is left of its last one: up to the next growth, and
        /// past it only when nothing is taken and unreleased.
        fn look(&mut self) {
            if self.seen > 0 {
                return;
            }
            while self.growths.front().is_some_and(|at| *at == self.taken) && self.in_hand == 0 {
                self.growths.pop_front();
            }
            let up_to_growth =
                self.growths.front().map_or(usize::MAX, |at| (at - self.taken) as usize);
            self.seen = self.visible.len().min(up_to_growth);
        }

        fn push_all(&mut self, producer: &mut Producer<Box<u32>>, count: u8, capacity: u32) {
            let mut values: Vec<_> =
                (self.pushed..self.pushed + u32::from(count)).map(Box::new).collect();
            let queued = self.staged.len() + self.visible.len() + self.in_hand as usize;
            let fits = queued + values.len() <= capacity as usize;
            let copies = values.clone();
            assert_eq!(producer.push_all(&mut values), fits);
            assert_eq!(values.is_empty(), fits || count == 0);
            if fits {
                self.staged.extend(copies);
                self.pushed += u32::from(count);
            }
        }
    }

    fn run(mut capacity: u32, start: Position, operations: &[Operation]) {
        let (mut producer, mut consumer) = ring(capacity, start);
        let mut oracle = Oracle::default();
        for &operation in operations {
            match operation {
                Operation::Push(count) => {
                    for _ in 0..count {
                        let queued = oracle.staged.len() + oracle.visible.len();
                        let full = queued + oracle.in_hand as usize == capacity as usize;
                        let pushed = producer.push(Box::new(oracle.pushed));
                        assert_eq!(pushed.is_err(), full);
                        if let Ok(position) = pushed {
                            oracle.staged.push_back(Box::new(oracle.pushed));
                            oracle.pushed += 1;
                            assert_eq!(position, start.plus(oracle.pushed));
                        }
                    }
                }
                Operation::PushAll(count) => {
                    oracle.push_all(&mut producer, count, capacity);
                }
                Operation::Publish => {
                    assert_eq!(producer.publish(), !oracle.staged.is_empty());
                    oracle.visible.append(&mut oracle.staged);
                }
                Operation::Take(max) => {
                    let mut out = Vec::new();
                    oracle.look();
                    let count = consumer.take(max.into(), &mut out);
                    assert_eq!(count, oracle.seen.min(max.into()));
                    oracle.seen -= count;
                    oracle.taken += u32::try_from(count).unwrap();
                    let expected: Vec<_> = oracle.visible.drain(..count).collect();
                    assert_eq!(out, expected);
                    oracle.in_hand += u32::try_from(count).unwrap();
                }
                Operation::Release => {
                    consumer.release();
                    oracle.processed += oracle.in_hand;
                    oracle.in_hand = 0;
                }
                Operation::Observe => {
                    assert_eq!(producer.observe_head(), start.plus(oracle.processed));
                }
                Operation::Grow => {
                    if capacity < 256 {
                        capacity *= 2;
                        producer.grow(capacity);
                        oracle.visible.append(&mut oracle.staged);
                        oracle.growths.push_back(oracle.pushed);
                    }
                }
            }
            assert_eq!(consumer.in_hand(), oracle.in_hand);
            oracle.look();
            assert_eq!(consumer.queued() as usize, oracle.seen);
        }
        if operations.len().is_multiple_of(2) {
            drop(producer);
        }
        // The rest is dropped with the ring: Box lets miri see a leak or a double free.
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 512 }))]
        #[test]
        fn ring_equals_queue_from_any_start(
            log in 0u32..6,
            start in prop_oneof![any::<u32>(), Just(0u32.wrapping_sub(3)), Just((1u32 << 31) - 3)],
            operations in proptest::collection::vec(operation(), 0..if cfg!(miri) { 20 } else { 60 }),
        ) {
            run(1 << log, Position(start), &operations);
        }
    }

    #[test]
    fn rfs_5_head_moves_at_release() {
        let (mut producer, mut consumer) = ring(4, Position(u32::MAX));
        let position = producer.push('a').unwrap();
        producer.publish();
        let mut out = Vec::new();
        consumer.take(1, &mut out);
        assert_eq!(position.pending(producer.observe_head(), producer.tail()), 1);
        consumer.release();
        assert_eq!(position.pending(producer.observe_head(), producer.tail()), 0);
    }

    #[test]
    fn values_left_behind_are_dropped_once() {
        let value = Rc::new(());
        // `Rc` is not `Send`; the ring stays on this thread.
        struct Local(#[expect(dead_code, reason = "held for its count")] Rc<()>);
        // SAFETY: never leaves the thread.
        unsafe impl Send for Local {}
        let (mut producer, mut consumer) = ring(8, Position(0));
        for _ in 0..6 {
            assert!(producer.push(Local(Rc::clone(&value))).is_ok());
        }
        producer.publish();
        let mut out = Vec::new();
        consumer.take(2, &mut out);
        assert_eq!(Rc::strong_count(&value), 7);
        drop((producer, consumer));
        assert_eq!(Rc::strong_count(&value), 3, "two in hand");
    }

    #[test]
    fn two_threads_pass_values_in_order() {
        let total: u32 = if cfg!(miri) { 200 } else { 200_000 };
        let (mut producer, mut consumer) = ring(64, Position(u32::MAX - 100));
        let sender = std::thread::spawn(move || {
            for value in 0..total {
                while producer.push(value).is_err() {
                    producer.publish();
                    std::thread::yield_now();
                }
                if value % 7 == 0 {
                    producer.publish();
                }
            }
        });
        let mut out = Vec::new();
        while out.len() < total as usize {
            if consumer.take(32, &mut out) == 0 {
                std::thread::yield_now();
            }
            consumer.release();
        }
        sender.join().unwrap();
        assert!(out.into_iter().eq(0..total));
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::thread;

    use super::*;

    /// One slot and three values, two slots and four: every slot is reused, so a slot read after
    /// its release, or written before it, is found.
    #[test]
    fn slots_pass_without_a_race() {
        for (capacity, total) in [(1, 3), (2, 4)] {
            let mut model = loom::model::Builder::new();
            // A thread that spins is preempted at every turn: three preemptions besides those of
            // `yield_now` bound the search.
            model.preemption_bound = Some(3);
            model.check(move || {
                let (mut producer, mut consumer) = ring(capacity, Position(u32::MAX));
                let sender = thread::spawn(move || {
                    let mut value = 0u32;
                    while value < total {
                        if producer.push(value).is_ok() {
                            value += 1;
                        } else {
                            thread::yield_now();
                        }
                        producer.publish();
                    }
                });
                let mut out = Vec::new();
                while out.len() < total as usize {
                    if consumer.take(2, &mut out) == 0 {
                        thread::yield_now();
                    }
                    consumer.release();
                }
                sender.join().unwrap();
                assert!(out.into_iter().eq(0..total));
            });
        }
    }

    /// A ring of one slot that grows to two while a value is in it, or none, or one is being
    /// processed: every value arrives once, in order, and the head never advances too early.
    #[test]
    fn grown_ring_stays_one_ring() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            const TOTAL: u32 = 3;
            let (mut producer, mut consumer) = ring(1, Position(u32::MAX));
            let done = loom::sync::Arc::new(loom::cell::UnsafeCell::new(0));
            let work = done.clone();
            let worker = thread::spawn(move || {
                let mut out = Vec::new();
                while out.len() < TOTAL as usize {
                    if consumer.take(2, &mut out) == 0 {
                        thread::yield_now();
                    }
                    // SAFETY: the producer looks only after the head has passed everything.
                    work.with_mut(|work| unsafe { *work = out.len() });
                    consumer.release();
                }
                assert!(out.into_iter().eq(0..TOTAL));
            });
            assert!(producer.push(0).is_ok());
            producer.publish();
            producer.grow(2);
            let (mut value, mut last) = (1, Position(0));
            while value < TOTAL {
                match producer.push(value) {
                    Ok(position) => (value, last) = (value + 1, position),
                    Err(_) => thread::yield_now(),
                }
                producer.publish();
            }
            if last.pending(producer.observe_head(), producer.tail()) == 0 {
                // SAFETY: the worker has released the last value.
                assert_eq!(done.with(|done| unsafe { *done }), TOTAL as usize);
            }
            worker.join().unwrap();
        });
    }

    /// The consumer's writes while it processed a packet are visible to a producer that sees the
    /// head pass that packet. The drain rule relies on it (RFS-6).
    #[test]
    fn passed_head_shows_finished_work() {
        loom::model(|| {
            let (mut producer, mut consumer) = ring(2, Position(0));
            let work = loom::sync::Arc::new(loom::cell::UnsafeCell::new(0));
            let done = work.clone();
            let position = producer.push(()).unwrap();
            producer.publish();
            let worker = thread::spawn(move || {
                let mut out = Vec::new();
                while consumer.take(1, &mut out) == 0 {
                    thread::yield_now();
                }
                // SAFETY: the producer looks only after the release below.
                done.with_mut(|work| unsafe { *work = 1 });
                consumer.release();
            });
            if position.pending(producer.observe_head(), producer.tail()) == 0 {
                // SAFETY: the worker has released what it worked on.
                assert_eq!(work.with(|work| unsafe { *work }), 1);
            }
            worker.join().unwrap();
        });
    }
}
