//! The ring against a plain queue: any operations and capacity, counters that begin anywhere.
#![no_main]

use std::collections::VecDeque;

use arbitrary::Arbitrary;
use forebay_buf::Position;
use forebay_buf::ring::ring;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Run {
    capacity_log: u8,
    start: u32,
    operations: Vec<Operation>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Operation {
    Push,
    PushAll(u8),
    Publish,
    Take(u8),
    Release,
    Observe,
}

/// Reference model. Values are numbered; each queue holds those in its stage.
#[derive(Default)]
struct Oracle {
    pushed: u32,
    released: u32,
    staged: VecDeque<u32>,
    visible: VecDeque<u32>,
    /// Number of visible values that the consumer's last look found.
    seen: usize,
    in_hand: u32,
}

impl Oracle {
    fn room(&self, capacity: u32) -> u32 {
        capacity - (self.pushed - self.released)
    }

    fn push(&mut self) {
        self.staged.push_back(self.pushed);
        self.pushed += 1;
    }

    /// The consumer looks again when it has taken all values of its last look.
    fn look(&mut self) {
        if self.seen == 0 {
            self.seen = self.visible.len();
        }
    }
}

fuzz_target!(|run: Run| {
    let (capacity, start) = (1 << (run.capacity_log % 8), Position(run.start));
    // Boxes let the sanitizer see a slot that is read twice or never.
    let (mut producer, mut consumer) = ring::<Box<u32>>(capacity, start);
    let mut oracle = Oracle::default();
    for operation in run.operations {
        match operation {
            Operation::Push => {
                let pushed = producer.push(Box::new(oracle.pushed));
                assert_eq!(pushed.is_ok(), oracle.room(capacity) > 0);
                if let Ok(position) = pushed {
                    oracle.push();
                    assert_eq!(position, start.plus(oracle.pushed));
                }
            }
            Operation::PushAll(count) => {
                let fits = u32::from(count) <= oracle.room(capacity);
                let mut values: Vec<_> =
                    (oracle.pushed..).take(count.into()).map(Box::new).collect();
                assert_eq!(producer.push_all(&mut values), fits);
                assert_eq!(values.len(), if fits { 0 } else { count.into() });
                if fits {
                    (0..count).for_each(|_| oracle.push());
                }
            }
            Operation::Publish => {
                assert_eq!(producer.publish(), !oracle.staged.is_empty());
                oracle.visible.append(&mut oracle.staged);
            }
            Operation::Take(max) => {
                oracle.look();
                let count = oracle.seen.min(max.into());
                let mut out = Vec::new();
                assert_eq!(consumer.take(max.into(), &mut out), count);
                assert!(out.into_iter().map(|value| *value).eq(oracle.visible.drain(..count)));
                oracle.seen -= count;
                oracle.in_hand += u32::try_from(count).expect("at most max");
            }
            Operation::Release => {
                consumer.release();
                oracle.released += std::mem::take(&mut oracle.in_hand);
            }
            Operation::Observe => {
                assert_eq!(producer.observe_head(), start.plus(oracle.released));
                assert_eq!(producer.queued(), oracle.pushed - oracle.released);
            }
        }
        oracle.look();
        assert_eq!(consumer.queued() as usize, oracle.seen);
        assert_eq!(consumer.in_hand(), oracle.in_hand);
        assert_eq!(consumer.taken(), start.plus(oracle.released + oracle.in_hand));
        assert_eq!(producer.tail(), start.plus(oracle.pushed));
        assert!(producer.queued() <= capacity);
    }
    // Either end may be dropped first; the remaining values are dropped with the second.
    if run.start.is_multiple_of(2) {
        drop(producer);
    }
});
