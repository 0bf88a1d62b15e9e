//! Fields of a parsed packet, read where the headers say they are.

use std::net::IpAddr;

use super::{Fragment, Headers, Network, Transport, transport};

/// A packet's bytes together with what parsing found: every accessor is total, and `None` or
/// empty where the packet has no such thing.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    bytes: &'a [u8],
    headers: &'a Headers,
}

impl<'a> View<'a> {
    /// Looks at `bytes` with the headers that [`parse`](super::parse) found in them.
    #[must_use]
    pub fn new(bytes: &'a [u8], headers: &'a Headers) -> Self {
        Self { bytes, headers }
    }

    /// Source and destination address as they stand in the outermost IP header.
    #[must_use]
    pub fn addresses(&self) -> Option<(IpAddr, IpAddr)> {
        match self.headers.network {
            Network::Other => None,
            Network::Ipv4 => {
                let [source, destination] = self.address_pair::<4>(12)?;
                Some((source.into(), destination.into()))
            }
            Network::Ipv6 => {
                let [source, destination] = self.address_pair::<16>(8)?;
                Some((source.into(), destination.into()))
            }
        }
    }

    /// Source and destination address as bytes: four each, or sixteen.
    #[must_use]
    pub fn address_bytes(&self) -> Option<&'a [u8]> {
        let start = usize::from(self.headers.network_offset);
        match self.headers.network {
            Network::Other => None,
            Network::Ipv4 => self.bytes.get(start + 12..start + 20),
            Network::Ipv6 => self.bytes.get(start + 8..start + 40),
        }
    }

    /// Whether this is a piece of a datagram.
    #[must_use]
    pub fn is_fragment(&self) -> bool {
        self.headers.fragment != Fragment::Whole
    }

    /// Source and destination port of TCP or UDP as bytes, also of a header that is cut short
    /// behind them.
    #[must_use]
    pub fn port_bytes(&self) -> Option<&'a [u8; 4]> {
        match (self.headers.protocol, self.headers.fragment) {
            (transport::TCP | transport::UDP, Fragment::Whole | Fragment::First) => {
                self.transport_bytes().and_then(<[u8]>::first_chunk)
            }
            _ => None,
        }
    }

    /// Source and destination port of TCP or UDP.
    #[must_use]
    pub fn ports(&self) -> Option<(u16, u16)> {
        let &[a, b, c, d] = self.port_bytes()?;
        Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])))
    }

    /// Time to live, or hop limit.
    #[must_use]
    pub fn ttl(&self) -> Option<u8> {
        let at = match self.headers.network {
            Network::Other => return None,
            Network::Ipv4 => 8,
            Network::Ipv6 => 7,
        };
        self.network_bytes()?.get(at).copied()
    }

    /// Length of the fixed network header and its IPv4 options.
    #[must_use]
    pub fn network_header_len(&self) -> Option<u8> {
        match self.headers.network {
            Network::Other => None,
            Network::Ipv4 => Some((self.network_bytes()?.first()? & 0x0f) * 4),
            Network::Ipv6 => Some(40),
        }
    }

    /// The length field of the IP header: IPv4's total length, IPv6's payload length.
    #[must_use]
    pub fn network_len_field(&self) -> Option<u16> {
        let at = match self.headers.network {
            Network::Other => return None,
            Network::Ipv4 => 2,
            Network::Ipv6 => 4,
        };
        field(self.network_bytes()?, at).map(u16::from_be_bytes)
    }

    /// TCP's sequence number.
    #[must_use]
    pub fn tcp_sequence(&self) -> Option<u32> {
        field(self.tcp_bytes()?, 4).map(u32::from_be_bytes)
    }

    /// TCP's twelve flag bits, reserved ones included.
    #[must_use]
    pub fn tcp_flags(&self) -> Option<u16> {
        field(self.tcp_bytes()?, 12).map(|flags| u16::from_be_bytes(flags) & 0x0fff)
    }

    /// The transport's payload, as far as it was captured.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        let start = usize::from(self.headers.payload_offset);
        if start == 0 {
            return &[];
        }
        let end = (start + usize::from(self.headers.payload_len)).min(self.bytes.len());
        self.bytes.get(start..end).unwrap_or_default()
    }

    /// How long the payload was on the wire, if there is a transport header to say so.
    #[must_use]
    pub fn payload_len(&self) -> Option<u16> {
        match (self.headers.transport, self.headers.payload_offset) {
            (Transport::Tcp | Transport::Udp, 1..) => Some(self.headers.payload_len),
            _ => None,
        }
    }

    fn network_bytes(&self) -> Option<&'a [u8]> {
        self.bytes.get(self.headers.network_offset.into()..)
    }

    fn transport_bytes(&self) -> Option<&'a [u8]> {
        match self.headers.transport_offset {
            0 => None,
            start => self.bytes.get(start.into()..),
        }
    }

    fn tcp_bytes(&self) -> Option<&'a [u8]> {
        let is_tcp = self.headers.protocol == transport::TCP;
        self.transport_bytes().filter(|_| is_tcp && self.headers.fragment != Fragment::Later)
    }

    fn address_pair<const N: usize>(&self, at: usize) -> Option<[[u8; N]; 2]> {
        let network = self.network_bytes()?;
        Some([field(network, at)?, field(network, at + N)?])
    }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}
