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
