//! `bench parse`: the walk over the headers.

use std::hint::black_box;

use forebay_rx::parse::{self, Headers, Verify};

use super::figures::Figures;
use super::{BenchArgs, input, solo};
use crate::failure::Failure;

pub(super) fn run(args: &BenchArgs) -> Result<Figures, Failure> {
    let packets = input::packets(args.file.as_deref())?;
    let verify = if args.verify { Verify::Checksums } else { Verify::Nothing };
    let figures = solo::measure(args, "parse", "ns/packet", packets.len(), || {
        for packet in &packets {
            // In place, as in a packet of the path.
            let mut headers = Headers { link: packet.link, ..Headers::default() };
            parse::parse_into(&mut headers, &packet.bytes, packet.wire_len, None, verify);
            black_box(&headers);
        }
    });
    Ok(figures.with("input", input::name(args.file.as_deref())).with("verify", args.verify))
}
