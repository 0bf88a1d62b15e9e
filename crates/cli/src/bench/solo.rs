//! Repeats on one core.
//!
//! The other hardware thread of the core may be used by other programs at any time. So a fixed loop
//! runs before and after each repeat; if either run took much longer than the best one, the repeat
//! is dropped and counted.

use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::Serialize;

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
    /// At most `reps` samples: undisturbed ones or, if every one was disturbed, the least disturbed.
    counted: Vec<f64>,
    dropped: usize,
    all_disturbed: bool,
}

/// Collects the results of `sample`, with the fixed loop before and after each.
pub(super) fn samples(args: &BenchArgs, mut sample: impl FnMut() -> f64) -> Samples {
    let mut best_ns = f64::INFINITY;
    for _ in 0..50 {
        best_ns = best_ns.min(calibrate());
    }
    let started = Instant::now();
    let reps = args.reps as usize;
    let (mut kept, mut disturbed) = (Vec::new(), Vec::new());
    while kept.len() < reps && started.elapsed().as_secs() < args.secs {
        let before_ns = calibrate();
        let value = sample();
        let after_ns = calibrate();
        best_ns = best_ns.min(before_ns).min(after_ns);
        let slowest_ns = before_ns.max(after_ns);
        if slowest_ns > best_ns * DISTURBED {
            disturbed.push(Disturbed { slowest_ns, value });
        } else {
            kept.push(value);
        }
    }
    Samples::of(kept, disturbed, reps)
}

/// Spread of one region of a benchmark.
#[derive(Debug, Serialize)]
pub(super) struct RegionSpread {
    #[serde(flatten)]
    spread: RoundSpread,
    /// True if every repeat was disturbed.
    all_disturbed: bool,
}

/// A repeat beside which the fixed loop took `slowest_ns`.
struct Disturbed {
    slowest_ns: f64,
    value: f64,
}

impl Samples {
    fn of(kept: Vec<f64>, mut disturbed: Vec<Disturbed>, reps: usize) -> Self {
        let repeats = kept.len() + disturbed.len();
        let all_disturbed = kept.is_empty();
        let counted = if all_disturbed {
            disturbed.sort_by(|one, other| one.slowest_ns.total_cmp(&other.slowest_ns));
            disturbed.into_iter().take(reps).map(|repeat| repeat.value).collect()
        } else {
            kept
        };
        Self { dropped: repeats - counted.len(), counted, all_disturbed }
    }

    pub(super) fn spread(&self) -> RoundSpread {
        RoundSpread::of(&self.counted)
    }

    /// Spread as part of a line with several.
    pub(super) fn region(&self) -> RegionSpread {
        RegionSpread { spread: self.spread(), all_disturbed: self.all_disturbed }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_disturbed_repeats_count_without_others() {
        let disturbed = || [9.0, 2.0, 5.0].map(|ns| Disturbed { slowest_ns: ns, value: ns * 10.0 });
        let samples = Samples::of(Vec::new(), disturbed().into(), 2);
        assert_eq!(
            (samples.counted, samples.dropped, samples.all_disturbed),
            (vec![20.0, 50.0], 1, true)
        );
        let samples = Samples::of(vec![7.0], disturbed().into(), 2);
        assert_eq!(
            (samples.counted, samples.dropped, samples.all_disturbed),
            (vec![7.0], 3, false)
        );
    }
}
