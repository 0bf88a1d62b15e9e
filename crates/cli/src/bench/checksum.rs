//! `bench checksum`: the Internet checksum.

use std::hint::black_box;

use forebay_rx::parse::checksum::Sum;

use super::figures::Figures;
use super::{BenchArgs, solo};

pub(super) fn run(args: &BenchArgs) -> Figures {
    const BUFFERS: usize = 64;
    let buffers: Vec<Vec<u8>> =
        (0..BUFFERS).map(|fill| vec![fill.to_le_bytes()[0]; usize::from(args.len)]).collect();
    let figures = solo::measure(args, "checksum", "ns/packet", BUFFERS, || {
        for buffer in &buffers {
            black_box(Sum::of(black_box(buffer)).fold());
        }
    });
    figures.with("len_bytes", args.len)
}
