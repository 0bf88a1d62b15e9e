//! `bench ring`: one word from one CPU to another, in bulk.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use forebay::sys;
use mem::Position;
use mem::ring::{Consumer, ring};

use super::BenchArgs;
use super::figures::Figures;
use super::pair::{self, CpuPair, Probe};
use super::solo::{as_f64, nanoseconds};
use crate::failure::Failure;

const CAPACITY: u32 = 1024;

/// Objects in one repeat: a few tens of milliseconds.
const OBJECTS: u64 = 4_000_000;

/// What the two sides agree on.
#[derive(Default)]
struct Rounds {
    probe: Probe,
    /// The round that may begin; `u64::MAX` ends the consumer.
    begun: AtomicU64,
    /// The round that the consumer has done, and the sum of what it got.
    done: AtomicU64,
    sum: AtomicU64,
}

const END: u64 = u64::MAX;

pub(super) fn run(args: &BenchArgs, cpus: CpuPair) -> Result<Figures, Failure> {
    let bulk = u64::from(args.bulk);
    let objects = OBJECTS - OBJECTS % bulk;
    let (mut producer, consumer) = ring(CAPACITY, Position(0));
    let rounds = Arc::new(Rounds::default());
    let other = Arc::clone(&rounds);
    let batch = args.bulk as usize;
    let reader = thread::spawn(move || {
        // Unpinned figures are still figures.
        let _ = sys::pin_to(cpus.there);
        read(consumer, &other, objects, batch);
    });
    let mut round = 0;
    let mut lost = false;
    let mut filled = Vec::with_capacity(batch);
    let figures = pair::measure(args, "ring", "ns/object", &rounds.probe, || {
        round += 1;
        let started = Instant::now();
        rounds.begun.store(round, Ordering::Release);
        for first in (0..objects).step_by(batch) {
            filled.extend(first + 1..=first + bulk);
            while !producer.push_all(&mut filled) {}
            producer.publish();
        }
        while rounds.done.load(Ordering::Acquire) < round {}
        let elapsed = started.elapsed();
        lost |= rounds.sum.load(Ordering::Relaxed) != objects * (objects + 1) / 2;
        nanoseconds(elapsed) / as_f64(usize::try_from(objects).unwrap_or(1))
    });
    rounds.begun.store(END, Ordering::Release);
    // It has nothing to panic about.
    let _ = reader.join();
    if lost {
        return Err(Failure::usage("objects were lost in the ring", "this is a bug: report it"));
    }
    Ok(figures.with("bulk", args.bulk).with("capacity", CAPACITY))
}

fn read(mut consumer: Consumer<u64>, rounds: &Rounds, objects: u64, batch: usize) {
    let mut taken = Vec::with_capacity(batch);
    for round in 1.. {
        loop {
            match rounds.begun.load(Ordering::Acquire) {
                END => return,
                begun if begun >= round => break,
                _ => rounds.probe.answer_if_asked(),
            }
        }
        let (mut sum, mut got) = (0u64, 0);
        while got < objects {
            got += consumer.take(batch, &mut taken) as u64;
            sum = taken.drain(..).fold(sum, u64::wrapping_add);
            consumer.release();
        }
        rounds.sum.store(sum, Ordering::Relaxed);
        rounds.done.store(round, Ordering::Release);
    }
}
