//! `bench parse`: the walk over the headers.

use std::hint::black_box;

use forebay_rx::parse::{self, Verify};

use super::figures::Figures;
use super::{BenchArgs, input, solo};
use crate::failure::Failure;

pub(super) fn run(args: &BenchArgs) -> Result<Figures, Failure> {
    let packets = input::packets(args.file.as_deref())?;
    let verify = if args.verify { Verify::Checksums } else { Verify::Nothing };
    let figures = solo::measure(args, "parse", "ns/packet", packets.len(), || {
        for packet in &packets {
            black_box(parse::parse(&packet.bytes, packet.wire_len, packet.link, verify));
        }
    });
    Ok(figures.with("input", input::name(args.file.as_deref())).with("verify", args.verify))
}
