//! Frames by etherparse, and manual changes to them.

use etherparse::PacketBuilder;
use forebay_rx::parse::{
    Checksum, Fragment, Headers, Link, Network, Transport, Verify, checksum, parse,
};

pub(crate) const MACS: [[u8; 6]; 2] = [[2; 6], [4; 6]];
pub(crate) const ADDRESSES_V4: [[u8; 4]; 2] = [[10, 0, 0, 1], [10, 0, 0, 2]];
pub(crate) const ADDRESSES_V6: [[u8; 16]; 2] = [[0x20; 16], [0xfd; 16]];
const TTL: u8 = 64;

/// Offset at which the headers of a frame without tags begin.
pub(crate) const IP: usize = 14;
pub(crate) const AFTER_IPV4: usize = IP + 20;
pub(crate) const AFTER_IPV6: usize = IP + 40;

/// Headers of [`udp4`].
pub(crate) const UDP4: Headers = Headers {
    link: Link::Ethernet,
    network: Network::Ipv4,
    transport: Transport::Udp,
    protocol: 17,
    fragment: Fragment::Whole,
    flaw: None,
    ip_checksum: Checksum::Good,
    l4_checksum: Checksum::Good,
    network_offset: 14,
    device: 0,
    transport_offset: 34,
    payload_offset: 42,
    payload_len: 5,
};

/// Headers of [`tcp4`].
pub(crate) const TCP4: Headers =
    Headers { transport: Transport::Tcp, protocol: 6, payload_offset: 54, ..UDP4 };

/// Headers of [`udp6`].
pub(crate) const UDP6: Headers = Headers {
    network: Network::Ipv6,
    ip_checksum: Checksum::Unknown,
    transport_offset: 54,
    payload_offset: 62,
    ..UDP4
};

pub(crate) fn udp4() -> Frame {
    let [from, to] = ADDRESSES_V4;
    let builder = PacketBuilder::ethernet2(MACS[0], MACS[1]).ipv4(from, to, TTL).udp(1000, 53);
    Frame::new(|bytes| builder.write(bytes, b"query").unwrap())
}

pub(crate) fn tcp4() -> Frame {
    let [from, to] = ADDRESSES_V4;
    let builder = PacketBuilder::ethernet2(MACS[0], MACS[1]).ipv4(from, to, TTL);
    Frame::new(|bytes| builder.tcp(1000, 80, 7, 512).psh().write(bytes, b"query").unwrap())
}

pub(crate) fn icmp4() -> Frame {
    let [from, to] = ADDRESSES_V4;
    let builder = PacketBuilder::ethernet2(MACS[0], MACS[1]).ipv4(from, to, TTL);
    Frame::new(|bytes| builder.icmpv4_echo_request(1, 2).write(bytes, b"query").unwrap())
}

pub(crate) fn udp6() -> Frame {
    let [from, to] = ADDRESSES_V6;
    let builder = PacketBuilder::ethernet2(MACS[0], MACS[1]).ipv6(from, to, TTL).udp(1000, 53);
    Frame::new(|bytes| builder.write(bytes, b"query").unwrap())
}

/// An IPv6 extension header of `len_bytes` zeros, its number and its body behind the first byte,
/// which the chain fills in.
pub(crate) type Extension = (u8, Vec<u8>);

/// [`udp6`] with extension headers before the transport.
pub(crate) fn extended(extensions: &[Extension]) -> Frame {
    let kinds = extensions.iter().map(|(kind, _)| *kind).chain([17]);
    let kinds: Vec<_> = kinds.collect();
    let chain = extensions.iter().zip(&kinds[1..]);
    let chain = chain.flat_map(|((_, body), &next)| [&[next], body.as_slice()].concat());
    let chain: Vec<_> = chain.collect();
    let payload_len = u16::try_from(8 + 5 + chain.len()).unwrap();
    udp6()
        .insert(AFTER_IPV6, &chain)
        .edit(IP + 6, &[kinds[0]])
        .edit(IP + 4, &payload_len.to_be_bytes())
}

/// Headers of a frame in which the transport is `bytes` further back.
pub(crate) fn later_by(bytes: u16, headers: Headers) -> Headers {
    Headers {
        transport_offset: headers.transport_offset + bytes,
        payload_offset: headers.payload_offset + bytes,
        ..headers
    }
}

/// Frame as on the wire, and number of captured bytes.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) bytes: Vec<u8>,
    captured: usize,
    link: Link,
}

impl Frame {
    pub(crate) fn new(write: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut bytes = Vec::new();
        write(&mut bytes);
        Self { captured: bytes.len(), bytes, link: Link::Ethernet }
    }

    pub(crate) fn edit(mut self, at: usize, bytes: &[u8]) -> Self {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub(crate) fn insert(mut self, at: usize, bytes: &[u8]) -> Self {
        self.bytes.splice(at..at, bytes.iter().copied());
        self.captured += bytes.len();
        self
    }

    pub(crate) fn padded(self, bytes: usize) -> Self {
        let end = self.bytes.len();
        self.insert(end, &vec![0; bytes])
    }

    /// Frame that ends after `len` bytes on the wire.
    pub(crate) fn cut(mut self, len: usize) -> Self {
        self.bytes.truncate(len);
        self.captured = self.bytes.len();
        self
    }

    /// Frame truncated to `len` bytes by the capture.
    pub(crate) fn snapped(mut self, len: usize) -> Self {
        self.captured = len;
        self
    }

    /// Frame without its link header.
    pub(crate) fn bare(mut self) -> Self {
        self.bytes.drain(..IP);
        self.captured = self.bytes.len();
        self.link = Link::Ip;
        self
    }

    /// Frame with a recomputed IPv4 header checksum.
    pub(crate) fn resummed(mut self) -> Self {
        let header_len = usize::from(self.bytes[IP] & 15) * 4;
        self = self.edit(IP + 10, &[0, 0]);
        // Unit tests compare this sum with a slow twin.
        let sum = !checksum::Sum::of(&self.bytes[IP..IP + header_len]).fold();
        self.edit(IP + 10, &sum.to_be_bytes())
    }

    pub(crate) fn seen(&self) -> &[u8] {
        &self.bytes[..self.captured]
    }

    pub(crate) fn parse(&self) -> Headers {
        let wire_len = u32::try_from(self.bytes.len()).unwrap();
        parse(self.seen(), wire_len, self.link, Verify::Checksums)
    }
}
