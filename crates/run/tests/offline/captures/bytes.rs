//! Capture files made byte by byte, valid or invalid.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

/// Byte order of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    Little,
    Big,
}

impl Order {
    pub(crate) fn u64(self, number: u64) -> [u8; 8] {
        match self {
            Self::Little => number.to_le_bytes(),
            Self::Big => number.to_be_bytes(),
        }
    }

    fn u32(self, number: u32) -> [u8; 4] {
        match self {
            Self::Little => number.to_le_bytes(),
            Self::Big => number.to_be_bytes(),
        }
    }

    pub(crate) fn u16(self, number: u16) -> [u8; 2] {
        match self {
            Self::Little => number.to_le_bytes(),
            Self::Big => number.to_be_bytes(),
        }
    }

    /// An option of a pcapng block.
    pub(crate) fn option(self, code: u16, value: &[u8]) -> Vec<u8> {
        let header = [self.u16(code), self.u16(u16::try_from(value.len()).unwrap())].concat();
        padded([&header, value].concat())
    }
}

/// A `LINUX_SLL` header of an IPv4 packet for this host, from Ethernet.
pub(crate) const SLL: [u8; 16] = [0, 0, 0, 1, 0, 6, 2, 0, 0, 0, 0, 9, 0, 0, 8, 0];

/// A `LINUX_SLL2` header of an IPv4 packet for this host, from Ethernet.
pub(crate) const SLL2: [u8; 20] = [8, 0, 0, 0, 0, 0, 0, 3, 0, 1, 0, 6, 2, 0, 0, 0, 0, 9, 0, 0];

/// A classic capture with microseconds.
pub(crate) fn pcap(order: Order, link_type: u32, records: &[u8]) -> Vec<u8> {
    let start = [&order.u32(0xa1b2_c3d4)[..], &order.u16(2), &order.u16(4), &[0; 8]].concat();
    [&start, &order.u32(65_535)[..], &order.u32(link_type), records].concat()
}

/// A record of a classic capture.
pub(crate) fn record(order: Order, seconds: u32, wire_len: u32, bytes: &[u8]) -> Vec<u8> {
    let header = [seconds, 0, len(bytes), wire_len].map(|field| order.u32(field));
    [header.as_flattened(), bytes].concat()
}

/// A block of a pcapng capture.
pub(crate) fn block(order: Order, kind: u32, body: &[u8]) -> Vec<u8> {
    let body = padded(body.to_vec());
    let total = order.u32(len(&body) + 12);
    [&order.u32(kind), &total, &body[..], &total].concat()
}

/// A section header of a section of unknown length.
pub(crate) fn section(order: Order) -> Vec<u8> {
    let version = [&order.u32(0x1a2b_3c4d)[..], &order.u16(1), &order.u16(0)].concat();
    block(order, 0x0a0d_0d0a, &[&version, &[0xff; 8][..]].concat())
}

/// An interface description.
pub(crate) fn interface(order: Order, link: u16, snaplen: u32, options: &[Vec<u8>]) -> Vec<u8> {
    let fixed = [&order.u16(link)[..], &[0; 2], &order.u32(snaplen)].concat();
    block(order, 1, &[fixed, options.concat()].concat())
}

/// Option with the duration of a tick of the interface's clock.
pub(crate) fn tsresol(order: Order, value: u8) -> Vec<u8> {
    order.option(9, &[value])
}

/// An enhanced packet.
pub(crate) fn enhanced(
    order: Order,
    interface: u32,
    ticks: u64,
    wire_len: u32,
    bytes: &[u8],
) -> Vec<u8> {
    let high = u32::try_from(ticks >> 32).unwrap();
    let low = u32::try_from(ticks & u64::from(u32::MAX)).unwrap();
    let fields = [interface, high, low, len(bytes), wire_len].map(|field| order.u32(field));
    block(order, 6, &[fields.as_flattened(), bytes].concat())
}

/// A simple packet.
pub(crate) fn simple(order: Order, wire_len: u32, bytes: &[u8]) -> Vec<u8> {
    block(order, 3, &[&order.u32(wire_len), bytes].concat())
}

/// The file compressed into one gzip member.
pub(crate) fn gzip(file: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(file).unwrap();
    encoder.finish().unwrap()
}

fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn len(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap()
}
