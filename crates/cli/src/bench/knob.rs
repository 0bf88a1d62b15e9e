//! `bench knob`: the cost per turn of knobs that can change at any time.

use std::hint::black_box;

use forebay_engine::log::Writer;

use super::figures::Figures;
use super::{BenchArgs, solo};

/// Checks per round.
const LOOKS: usize = 1024;

pub(super) fn run(args: &BenchArgs) -> Figures {
    let mut changes = Writer::default();
    let mut cursor = changes.cursor();
    // One change is made and read before: measured is the check that finds no other.
    changes.append(1);
    let read = cursor.next();
    let figures = solo::measure(args, "knob", "ns/look", LOOKS, || {
        for _ in 0..LOOKS {
            black_box(black_box(&mut cursor).next());
        }
    });
    figures.with("read_before", read)
}
