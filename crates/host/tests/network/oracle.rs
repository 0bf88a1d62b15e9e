//! Hostile frames, and what the kernel makes of them.

use std::collections::BTreeMap;

use forebay::random::Random;
use path::parse::Verify;

use crate::Test;
use crate::frames::frame;
use crate::kernel::Kernel;
use crate::us::Us;

pub(crate) const TESTS: &[Test] = &[(
    "of_ten_thousand_hostile_frames_those_are_delivered_that_the_kernel_delivers",
    hostile_frames,
)];

/// Frames of a seed.
const FRAMES: u64 = 10_000;
/// Differences that are printed in full.
const SHOWN: usize = 10;

fn hostile_frames() {
    let seed = std::env::var("FOREBAY_SEED").map_or(6, |seed| seed.parse().unwrap());
    let mut random = Random::new(seed);
    let (mut kernel, mut us) = (Kernel::new(), Us::new(false));
    kernel.join();
    let mut fates: BTreeMap<String, u64> = BTreeMap::new();
    let mut differences = Vec::new();
    for number in 0..FRAMES {
        let frame = frame(&mut random, number);
        let expected = kernel.offer(&frame);
        let verify = if number % 2 == 0 { Verify::Checksums } else { Verify::Nothing };
        let (delivered, fate) = us.offer(&frame, verify);
        *fates.entry(fate.clone()).or_default() += 1;
        if delivered != expected {
            differences.push((number, frame, expected, delivered, fate));
        }
    }
    eprintln!("seed {seed}: {fates:#?}");
    for (number, frame, expected, delivered, fate) in differences.iter().take(SHOWN) {
        eprintln!("frame {number}: {}", hex::encode(frame));
        eprintln!("  the kernel: {expected:?}\n  we: {fate} {delivered:?}");
    }
    assert!(differences.is_empty(), "{} differences of seed {seed}", differences.len());
    assert_eq!(us.away(), 0);
}
