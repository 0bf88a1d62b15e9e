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
        let up_to_growth = self.growths.front().map_or(usize::MAX, |at| (at - self.taken) as usize);
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
