//! A line of `lro.jsonl`: a packet that left coalescing.

use path::Packet;
use path::parse::{Network, Transport};
use serde::Serialize;

/// TCP's flags from the lowest bit on.
const FLAG_LETTERS: [char; 8] = ['F', 'S', 'R', 'P', 'A', 'U', 'E', 'C'];

#[derive(Serialize)]
struct Left<'a> {
    r#in: &'a [u64],
    payload_len: usize,
    gso_size: u16,
    flags: String,
    hex: String,
}

#[derive(Serialize)]
struct Lost<'a> {
    r#in: &'a [u64],
    drop: &'a str,
}

/// The line of a packet merged of these frames.
pub(super) fn row(packet: &Packet, frames: &[u64]) -> String {
    let bytes: Vec<_> = packet.fragments().flatten().copied().collect();
    let flags = packet.view().tcp_flags().unwrap_or(0);
    let set = (0..).zip(FLAG_LETTERS).filter(|(bit, _)| flags >> bit & 1 == 1);
    line(&Left {
        r#in: frames,
        payload_len: payload_len(packet),
        gso_size: packet.gso_size,
        flags: set.map(|(_, letter)| letter).collect(),
        hex: hex(&bytes),
    })
}

/// The line of frames that were dropped before or behind coalescing.
pub(super) fn lost(frames: &[u64], reason: &str) -> String {
    line(&Lost { r#in: frames, drop: reason })
}

/// What TCP or UDP carry; of other protocols, what IP carries.
fn payload_len(packet: &Packet) -> usize {
    let headers = &packet.headers;
    if let (Transport::Tcp | Transport::Udp, 1..) = (headers.transport, headers.payload_offset) {
        return headers.payload_len.into();
    }
    let view = packet.view();
    let (Some(field), Some(header_len)) = (view.network_len_field(), view.network_header_len())
    else {
        return 0;
    };
    match headers.network {
        Network::Ipv4 => usize::from(field).saturating_sub(header_len.into()),
        _ => field.into(),
    }
}

fn line(value: &impl Serialize) -> String {
    // Numbers and strings always can be written.
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0x0f)]).collect()
}
