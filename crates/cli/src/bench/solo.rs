//! Repeats on one core.
//!
//! The other hardware thread of the core may be used by other programs at any time. So a fixed loop
//! runs before and after each repeat; if either run took much longer than the best one, the repeat
//! is dropped and counted.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::BenchArgs;
use super::figures::{Figures, RoundSpread};

/// Duration of a repeat.
pub(super) const REPEAT: Duration = Duration::from_millis(10);

/// Factor over the fixed loop's best time from which a repeat counts as disturbed.
const DISTURBED: f64 = 1.35;

const CALIBRATION_ROUNDS: u64 = 20_000;

/// Measures `round`, which processes `count` items, in nanoseconds per item.
pub(super) fn measure(
    args: &BenchArgs,
    name: &'static str,
    unit: &'static str,
    count: usize,
    mut round: impl FnMut(),
) -> Figures {
    samples(args, || repeat(count, &mut round)).figures(name, unit)
}

/// Results of the repeats.
pub(super) struct Samples {
    /// Samples that count: the undisturbed ones, or all if every one was disturbed.
    counted: Vec<f64>,
    dropped: usize,
    all_disturbed: bool,
}

/// Collects the results of `sample`, with the fixed loop before and after each.
pub(super) fn samples(args: &BenchArgs, mut sample: impl FnMut() -> f64) -> Samples {
    let mut best = f64::INFINITY;
    for _ in 0..50 {
        best = best.min(calibrate());
    }
    let started = Instant::now();
    let (mut kept, mut dropped) = (Vec::new(), Vec::new());
    while kept.len() < args.reps as usize && started.elapsed().as_secs() < args.secs {
        let before = calibrate();
        let sample = sample();
        let after = calibrate();
        best = best.min(before).min(after);
        let disturbed = before.max(after) > best * DISTURBED;
        if disturbed { &mut dropped } else { &mut kept }.push(sample);
    }
    let (all_disturbed, counts) = (kept.is_empty(), dropped.len());
    Samples { counted: if all_disturbed { dropped } else { kept }, dropped: counts, all_disturbed }
}

impl Samples {
    pub(super) fn spread(&self) -> RoundSpread {
        RoundSpread::of(&self.counted)
    }

    pub(super) fn figures(&self, name: &'static str, unit: &'static str) -> Figures {
        Figures::new(name, unit, self.spread())
            .with("dropped", self.dropped)
            .with("all_disturbed", self.all_disturbed)
    }
}

fn repeat(count: usize, round: &mut impl FnMut()) -> f64 {
    let started = Instant::now();
    let mut done = 0;
    loop {
        for _ in 0..8 {
            round();
            done += count;
        }
        let elapsed = started.elapsed();
        if elapsed >= REPEAT {
            return nanoseconds(elapsed) / as_f64(done);
        }
    }
}

/// Runs a fixed loop that keeps the arithmetic units busy. Returns its duration, in ns.
fn calibrate() -> f64 {
    let started = Instant::now();
    let (mut x, mut y, mut z, mut w) = (1u64, 2u64, 3u64, 4u64);
    for i in 0..CALIBRATION_ROUNDS {
        x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(i);
        y = (y ^ (y >> 7)).wrapping_add(i);
        z = z.wrapping_add((z << 3) ^ i);
        w ^= w.wrapping_mul(5).wrapping_add(i);
        black_box((x, y, z, w));
    }
    nanoseconds(started.elapsed())
}

pub(super) fn nanoseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub(super) fn as_f64(count: usize) -> f64 {
    count as f64
}
