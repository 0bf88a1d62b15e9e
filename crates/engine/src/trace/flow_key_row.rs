//! Rows of `flowkey.csv`: the flow key of each frame.

use forebay_rx::Packet;
use forebay_rx::flow_key::FlowKey;
use forebay_rx::hash::Hasher;

use super::parse_row::{Seen, field};

pub(super) const HEADER: &str = "frame,rule,layers,src,dst,proto,sport,dport,id,hash\n";

/// Row of a frame, for which the headers are walked to the flow key.
pub(super) fn row(packet: &Packet, frame: u64, seen: &Seen<'_>, hasher: &Hasher) -> String {
    let view = seen.view();
    let key = FlowKey::of(&view, packet.wire_len, hasher.rules());
    let innermost = key.innermost();
    let (source_port, destination_port) = innermost.ports().unzip();
    let fields = [
        frame.to_string(),
        key.rule.name().to_owned(),
        key.layers.to_string(),
        field(innermost.source()),
        field(innermost.destination()),
        field(innermost.protocol()),
        field(source_port),
        field(destination_port),
        key.id.map(|id| hex::encode(id.as_bytes())).unwrap_or_default(),
        format!("{:08x}", hasher.hash_of(&view, packet.wire_len, packet.hash).0),
    ];
    fields.join(",") + "\n"
}

/// Row of a frame that never reached packet memory.
pub(super) fn refused(frame: u64) -> String {
    format!("{frame}{}\n", ",".repeat(HEADER.matches(',').count()))
}
