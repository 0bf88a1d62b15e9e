//! Fields of a parsed packet, read at the offsets in its headers.

use std::net::IpAddr;

use super::{Fragment, Headers, Network, transport};

/// Bytes of a packet with its parsed headers. No accessor panics; a field that the packet does not
/// have is `None` or empty.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    bytes: &'a [u8],
    headers: &'a Headers,
}

impl<'a> View<'a> {
    /// Creates a view of `bytes` with the headers that [`parse`](super::parse) found in them.
    #[must_use]
    pub fn new(bytes: &'a [u8], headers: &'a Headers) -> Self {
        Self { bytes, headers }
    }

    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Offsets and kinds of the headers.
    #[must_use]
    pub fn headers(&self) -> &'a Headers {
        self.headers
    }

    /// Source address of the outermost IP header.
    #[must_use]
    pub fn source(&self) -> Option<IpAddr> {
        match self.headers.network {
            Network::Other => None,
            Network::Ipv4 => self.network_field::<4>(12).map(IpAddr::from),
            Network::Ipv6 => self.network_field::<16>(8).map(IpAddr::from),
        }
    }

    /// Destination address of the outermost IP header; a routing header is not followed.
    #[must_use]
    pub fn destination(&self) -> Option<IpAddr> {
        match self.headers.network {
            Network::Other => None,
            Network::Ipv4 => self.network_field::<4>(16).map(IpAddr::from),
            Network::Ipv6 => self.network_field::<16>(24).map(IpAddr::from),
        }
    }

    /// Source and destination address as bytes, four or sixteen each.
    #[inline]
    #[must_use]
    pub fn address_bytes(&self) -> Option<&'a [u8]> {
        let start = usize::from(self.headers.network_offset);
        match self.headers.network {
            Network::Other => None,
            Network::Ipv4 => self.bytes.get(start + 12..start + 20),
            Network::Ipv6 => self.bytes.get(start + 8..start + 40),
        }
    }

    /// True if this is a fragment, or marked as one.
    #[must_use]
    pub fn is_fragment(&self) -> bool {
        self.headers.fragment != Fragment::Whole
    }

    /// Source and destination port of TCP or UDP as bytes, even if the header is truncated behind
    /// them.
    #[inline]
    #[must_use]
    pub fn port_bytes(&self) -> Option<&'a [u8; 4]> {
        match (self.headers.protocol, self.headers.fragment) {
            (_, Fragment::Later) => None,
            (transport::TCP | transport::UDP, _) => {
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

    /// IPv4 protocol, or IPv6 next header after the last extension header.
    #[must_use]
    pub fn protocol(&self) -> Option<u8> {
        let at = match self.headers.network {
            Network::Other => return None,
            Network::Ipv4 => 9,
            Network::Ipv6 => 6,
        };
        // Cut off inside the fixed header, the first field is all there is to go by.
        let [first] = self.network_field(at)?;
        Some(if self.address_bytes().is_some() { self.headers.protocol } else { first })
    }

    /// Type of service of IPv4, or traffic class of IPv6.
    #[must_use]
    pub fn traffic_class(&self) -> Option<u8> {
        let [first, second] = self.network_field(0)?;
        match self.headers.network {
            Network::Other => None,
            Network::Ipv4 => Some(second),
            Network::Ipv6 => Some(first << 4 | second >> 4),
        }
    }

    /// Time to live, or hop limit.
    #[must_use]
    pub fn ttl(&self) -> Option<u8> {
        let at = match self.headers.network {
            Network::Other => return None,
            Network::Ipv4 => 8,
            Network::Ipv6 => 7,
        };
        self.network_field(at).map(|[ttl]| ttl)
    }

    /// Length of the fixed network header and its IPv4 options.
    #[must_use]
    pub fn network_header_len(&self) -> Option<u8> {
        match self.headers.network {
            Network::Other => None,
            Network::Ipv4 => self.network_field(0).map(|[first]| (first & 0x0f) * 4),
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
        self.network_field(at).map(u16::from_be_bytes)
    }

    /// TCP sequence number.
    #[must_use]
    pub fn tcp_sequence(&self) -> Option<u32> {
        self.tcp_field(4).map(u32::from_be_bytes)
    }

    /// Twelve flag bits of TCP, reserved ones included.
    #[must_use]
    pub fn tcp_flags(&self) -> Option<u16> {
        self.tcp_field(12).map(|flags| u16::from_be_bytes(flags) & 0x0fff)
    }

    /// Payload of the transport, as far as it was captured.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        let start = usize::from(self.headers.payload_offset);
        if start == 0 {
            return &[];
        }
        let end = (start + usize::from(self.headers.payload_len)).min(self.bytes.len());
        self.bytes.get(start..end).unwrap_or_default()
    }

    /// Length of the datagram's payload on the wire, if known: a UDP header has it for the whole
    /// datagram, a TCP header in a fragment does not.
    #[must_use]
    pub fn payload_len(&self) -> Option<u16> {
        let whole = self.headers.fragment.is_whole() || self.headers.protocol == transport::UDP;
        (self.headers.payload_offset > 0 && whole && self.port_bytes().is_some())
            .then_some(self.headers.payload_len)
    }

    fn network_field<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        field(self.bytes, usize::from(self.headers.network_offset) + at)
    }

    fn transport_bytes(&self) -> Option<&'a [u8]> {
        match self.headers.transport_offset {
            0 => None,
            start => self.bytes.get(start.into()..),
        }
    }

    /// Field of the TCP header, if the header was captured up to the window and the IP packet does
    /// not end before; bytes behind the packet are padding.
    fn tcp_field<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let is_tcp = self.headers.protocol == transport::TCP && self.port_bytes().is_some();
        let header = self.transport_bytes().filter(|_| is_tcp)?.get(..transport::TCP_SEEN_BYTES)?;
        let header_end = usize::from(self.headers.transport_offset) + transport::TCP_SEEN_BYTES;
        if header_end > self.packet_end()? {
            return None;
        }
        header.get(at..)?.first_chunk().copied()
    }

    /// End of the packet by its IP header; unbounded if the length is 0.
    pub(crate) fn packet_end(&self) -> Option<usize> {
        let before = match self.headers.network {
            Network::Other => return None,
            Network::Ipv4 => 0,
            Network::Ipv6 => 40,
        };
        Some(match self.network_len_field()? {
            0 => usize::MAX,
            len => usize::from(self.headers.network_offset) + before + usize::from(len),
        })
    }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}
