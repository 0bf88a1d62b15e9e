//! Segments that a stranger makes up; used by the fuzz target `tcp`, too.

use std::net::SocketAddr;

use forebay_stack::network::compose::{TcpHeaders, emit_tcp};

use super::pair::Pair;

/// Fields of a segment that a stranger makes up, near those of the connection.
#[derive(Clone, Debug)]
pub(crate) struct Forged {
    pub(crate) seq: i32,
    pub(crate) ack: i32,
    pub(crate) flags: u8,
    pub(crate) window: u16,
    pub(crate) urgent: u16,
    pub(crate) options: Vec<u8>,
    pub(crate) len: usize,
}

impl Forged {
    /// Segment with these flags and so much payload.
    pub(crate) fn plain(flags: u8, len: usize) -> Self {
        Self { seq: 0, ack: 0, flags, window: 100, urgent: 0, options: vec![], len }
    }
}

/// Delivers a segment to port 80 of host 1. Returns sequence number and flags of the answer.
pub(crate) fn say(
    pair: &mut Pair,
    port: u16,
    forged: &Forged,
    numbers: (u32, u32),
) -> Option<(u32, u8)> {
    let ends = (pair.address(0, port), pair.address(1, 80));
    let bytes = bytes_of(forged, pair, ends, numbers).unwrap();
    let (now_us, mut sent) = (pair.now_us, Vec::new());
    let packet = pair.hosts[1].packet(&bytes).unwrap();
    pair.hosts[1].deliver(packet, now_us, &mut sent);
    let answer = sent.first()?;
    Some((u32::from_be_bytes(answer[24..28].try_into().unwrap()), answer[33]))
}

/// The segment as an IP packet, if a frame is free. `base` are numbers that the receiver expects.
pub(crate) fn bytes_of(
    forged: &Forged,
    pair: &mut Pair,
    ends: (SocketAddr, SocketAddr),
    base: (u32, u32),
) -> Option<Vec<u8>> {
    let mut options = forged.options.clone();
    while !options.len().is_multiple_of(4) {
        options.push(0);
    }
    let header_len = 20 + options.len();
    let mut segment = Vec::new();
    let (source, destination) = ends;
    segment.extend(source.port().to_be_bytes());
    segment.extend(destination.port().to_be_bytes());
    segment.extend(base.0.wrapping_add_signed(forged.seq).to_be_bytes());
    segment.extend(base.1.wrapping_add_signed(forged.ack).to_be_bytes());
    segment.extend([u8::try_from(header_len / 4 * 16).unwrap(), forged.flags]);
    segment.extend(forged.window.to_be_bytes());
    segment.extend([0, 0]);
    segment.extend(forged.urgent.to_be_bytes());
    segment.extend(options);
    segment.resize(header_len + forged.len, 7);
    let pool = &mut pair.hosts[1].pool;
    let mut frame = pool.allocate(u32::try_from(segment.len()).unwrap())?;
    frame.copy_from(&segment);
    let headers = TcpHeaders {
        source,
        destination,
        ttl: 64,
        tos: 3,
        header_len: u8::try_from(header_len).unwrap(),
        is_gso: false,
    };
    emit_tcp(&mut frame, &headers).unwrap();
    let bytes = frame.data().to_vec();
    pool.put(frame);
    Some(bytes)
}
