//! `bench knob`: what a turn pays for knobs that can change at any time.

use std::hint::black_box;

use forebay_engine::log::Writer;

use super::figures::Figures;
use super::{BenchArgs, solo};

/// Looks in one round.
const LOOKS: usize = 1024;

pub(super) fn run(args: &BenchArgs) -> Figures {
    let mut changes = Writer::default();
    let mut cursor = changes.cursor();
    // One was made, and read: what is measured is that there is no other.
    changes.append(1);
    let read = cursor.next();
    let figures = solo::measure(args, "knob", "ns/look", LOOKS, || {
        for _ in 0..LOOKS {
            black_box(black_box(&mut cursor).next());
        }
    });
    figures.with("read_before", read)
}
