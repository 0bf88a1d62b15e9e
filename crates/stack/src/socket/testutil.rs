//! Datagrams for tests of sockets.

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Link, Verify, parse};

/// Headers before the UDP header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Layout {
    V4,
    V4Tagged,
    V4NoLink,
    /// IPv4 with 40 bytes of options.
    V4Options,
    V6,
    /// IPv6 with 8 bytes of destination options.
    V6Extension,
}

/// A pool of large chunks.
pub(super) fn pool() -> Pool {
    pools_of(64).0
}

/// A pool of large chunks, and one of small ones.
pub(super) fn pools_of(chunks: u32) -> (Pool, Pool) {
    let class = |chunk_bytes| vec![ChunkClass { chunk_bytes, chunks }];
    let shares = [class(2048), class(512)];
    let mut pools = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap();
    let small = pools.remove(1);
    (pools.remove(0), small)
}

/// A datagram in a large chunk, parsed, from port 1000 to port 53.
pub(super) fn datagram(pool: &mut Pool, layout: Layout, payload: &[u8]) -> Packet {
    let bytes = bytes(layout, payload);
    // Requesting this much selects a large chunk.
    let mut frame = pool.allocate(1500).unwrap();
    frame.copy_from(&bytes);
    let wire_len = frame.len_bytes();
    let link = if layout == Layout::V4NoLink { Link::Ip } else { Link::Ethernet };
    let mut packet = Packet::received(frame, Arrival(0), wire_len, link);
    packet.headers = parse(&bytes, wire_len, link, Verify::Nothing);
    packet
}

fn bytes(layout: Layout, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    if layout != Layout::V4NoLink {
        bytes.extend([2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]);
    }
    if layout == Layout::V4Tagged {
        bytes.extend([0x81, 0, 0, 7]);
    }
    let udp_len = u16::try_from(payload.len() + 8).unwrap();
    if matches!(layout, Layout::V6 | Layout::V6Extension) {
        let extension: &[u8] =
            if layout == Layout::V6Extension { &[17, 0, 1, 4, 0, 0, 0, 0] } else { &[] };
        let ip_len = udp_len + u16::try_from(extension.len()).unwrap();
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend(ip_len.to_be_bytes());
        bytes.extend([if extension.is_empty() { 17 } else { 60 }, 64]);
        bytes.extend([[0xfd; 16], [0xfe; 16]].concat());
        bytes.extend(extension);
    } else {
        if layout != Layout::V4NoLink {
            bytes.extend([8, 0]);
        }
        let header_words = if layout == Layout::V4Options { 15 } else { 5 };
        let ip_len = udp_len + 4 * u16::from(header_words);
        bytes.extend([0x40 | header_words, 0]);
        bytes.extend(ip_len.to_be_bytes());
        bytes.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        bytes.resize(bytes.len() + 4 * usize::from(header_words - 5), 1);
    }
    bytes.extend([1000u16, 53, udp_len, 0].map(u16::to_be_bytes).concat());
    bytes.extend(payload);
    bytes
}
