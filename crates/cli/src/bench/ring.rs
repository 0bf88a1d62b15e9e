//! `bench ring`: 64-bit words from one CPU to another, in bulk.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use forebay_buf::Position;
use forebay_buf::ring::{Consumer, ring};
use forebay_sys as sys;

use super::BenchArgs;
use super::figures::Figures;
use super::pair::{self, CpuPair, Rounds};
use super::solo::{as_f64, nanoseconds};
use crate::failure::Failure;

const CAPACITY: u32 = 1024;

/// Objects per repeat, which takes some tens of milliseconds.
const OBJECTS: u64 = 4_000_000;

pub(super) fn run(args: &BenchArgs, cpus: CpuPair) -> Result<Figures, Failure> {
    let bulk = u64::from(args.bulk);
    let objects = OBJECTS - OBJECTS % bulk;
    let (mut producer, consumer) = ring(CAPACITY, Position(0));
    let rounds = Arc::new(Rounds::default());
    let other = Arc::clone(&rounds);
    let batch = args.bulk as usize;
    let reader = thread::spawn(move || {
        // Ignored: figures of an unpinned thread are still valid.
        let _ = sys::pin_to(cpus.consumer);
        read(consumer, &other, objects, batch)
    });
    let mut round = 0;
    let mut filled = Vec::with_capacity(batch);
    let figures = pair::measure(args, "ring", "ns/object", &rounds.probe, || {
        round += 1;
        let started = Instant::now();
        rounds.open(round);
        for first in (0..objects).step_by(batch) {
            filled.extend(first + 1..=first + bulk);
            while !producer.push_all(&mut filled) {}
            producer.publish();
        }
        rounds.wait_until_closed(round);
        nanoseconds(started.elapsed()) / as_f64(usize::try_from(objects).unwrap_or(1))
    });
    rounds.end();
    if !reader.join().unwrap_or(false) {
        return Err(Failure::usage("objects were lost in the ring", "this is a bug: report it"));
    }
    Ok(figures.with("bulk", args.bulk).with("capacity", CAPACITY))
}

/// Reads all rounds. Returns true if every object arrived, judged by their sum.
fn read(mut consumer: Consumer<u64>, rounds: &Rounds, objects: u64, batch: usize) -> bool {
    let mut taken = Vec::with_capacity(batch);
    let mut complete = true;
    let mut round = 1;
    while rounds.wait_until_open(round) {
        let (mut sum, mut got) = (0u64, 0);
        while got < objects {
            got += consumer.take(batch, &mut taken) as u64;
            sum = taken.drain(..).fold(sum, u64::wrapping_add);
            consumer.release();
        }
        complete &= sum == objects * (objects + 1) / 2;
        rounds.close(round);
        round += 1;
    }
    complete
}
