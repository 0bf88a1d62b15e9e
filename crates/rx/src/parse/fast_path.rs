//! Fast path: the headers of nearly every packet, found without a loop.
//!
//! Ethernet with at most one 802.1Q tag, or bare IP; a whole IPv4 datagram without options, or IPv6
//! without extension headers; TCP, or UDP with a checksum. Headers are captured and consistent. All
//! other frames are left to the general [walk](super::parse_by_walk), which finds the same in these.

use super::ethernet::TAG_8021Q;
use super::ipv4::{MORE_FRAGMENTS, OFFSET_MASK};
use super::transport::{self, TCP, TransportFields, UDP};
use super::{
    DeviceSum, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Headers, Link, Network, Seen, Transport, Verify,
    checksum,
};

const IPV4_BYTES: u8 = 20;
const IPV6_BYTES: u8 = 40;
const TCP_BYTES: u16 = 20;
const UDP_BYTES: u16 = 8;

/// Version 4, and a header of five words.
const IPV4_WITHOUT_OPTIONS: u8 = 0x45;

/// Finds the headers of a linear frame. Returns false, with `headers` unchanged, if they are not
/// those of the fast path.
#[inline]
#[must_use]
pub(super) fn parse(
    headers: &mut Headers,
    bytes: &[u8],
    wire_len: u32,
    device_sum: Option<DeviceSum>,
    verify: Verify,
) -> bool {
    let is_found = match headers.link {
        Link::Ethernet => behind_ethernet(headers, bytes, wire_len),
        Link::Ip => behind_nothing(headers, bytes, wire_len),
    };
    if is_found && (verify == Verify::Checksums || device_sum.is_some()) {
        judge(headers, &Seen { device_sum, ..Seen::new(bytes, wire_len, headers.link) }, verify);
    }
    is_found
}

#[inline]
fn behind_ethernet(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> bool {
    let Some(&[.., e0, e1, _, _, t0, t1]) = bytes.first_chunk::<18>() else { return false };
    match u16::from_be_bytes([e0, e1]) {
        ETHERTYPE_IPV4 => ipv4::<14>(headers, bytes, wire_len),
        ETHERTYPE_IPV6 => ipv6::<14>(headers, bytes, wire_len),
        TAG_8021Q => match u16::from_be_bytes([t0, t1]) {
            ETHERTYPE_IPV4 => ipv4::<18>(headers, bytes, wire_len),
            ETHERTYPE_IPV6 => ipv6::<18>(headers, bytes, wire_len),
            _ => false,
        },
        _ => false,
    }
}

#[inline]
fn behind_nothing(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> bool {
    match bytes.first().map(|first| first >> 4) {
        Some(4) => ipv4::<0>(headers, bytes, wire_len),
        Some(_) => ipv6::<0>(headers, bytes, wire_len),
        None => false,
    }
}

/// IPv4 at offset `AT`: a parameter of the function, so that every offset up to the ports is a
/// constant.
#[inline]
fn ipv4<const AT: u8>(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> bool {
    let Some(header) = header::<20>(bytes, AT) else { return false };
    let &[version, _, l0, l1, _, _, f0, f1, _, protocol, ..] = header;
    let is_whole = u16::from_be_bytes([f0, f1]) & (MORE_FRAGMENTS | OFFSET_MASK) == 0;
    let len = u16::from_be_bytes([l0, l1]);
    if version != IPV4_WITHOUT_OPTIONS || !is_whole || len < u16::from(IPV4_BYTES) {
        return false;
    }
    let len = len - u16::from(IPV4_BYTES);
    let (network, transport_offset) = (Network::Ipv4, AT + IPV4_BYTES);
    Datagram { network, protocol, network_offset: AT, transport_offset, len }
        .record(headers, bytes, wire_len)
}

/// IPv6 at offset `AT`.
#[inline]
fn ipv6<const AT: u8>(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> bool {
    let Some(header) = header::<40>(bytes, AT) else { return false };
    let &[version, _, _, _, l0, l1, protocol, ..] = header;
    if version >> 4 != 6 {
        return false;
    }
    let len = u16::from_be_bytes([l0, l1]);
    let (network, transport_offset) = (Network::Ipv6, AT + IPV6_BYTES);
    Datagram { network, protocol, network_offset: AT, transport_offset, len }
        .record(headers, bytes, wire_len)
}

/// Datagram by its IP header.
struct Datagram {
    network: Network,
    protocol: u8,
    network_offset: u8,
    transport_offset: u8,
    /// Length behind the IP header.
    len: u16,
}

impl Datagram {
    /// Records all headers, if they are consistent and captured.
    #[inline]
    fn record(&self, headers: &mut Headers, bytes: &[u8], wire_len: u32) -> bool {
        let Some(segment) = self.segment(bytes) else { return false };
        let end = usize::from(self.transport_offset) + usize::from(self.len);
        let fits = segment.header_len <= segment.len && segment.len <= self.len;
        if !fits || end > (wire_len as usize).max(bytes.len()) {
            return false;
        }
        headers.network = self.network;
        headers.transport = segment.transport;
        headers.protocol = self.protocol;
        headers.network_offset = self.network_offset;
        headers.transport_offset = self.transport_offset.into();
        headers.payload_offset = u16::from(self.transport_offset) + segment.header_len;
        headers.payload_len = segment.len - segment.header_len;
        true
    }

    #[inline]
    fn segment(&self, bytes: &[u8]) -> Option<Segment> {
        match self.protocol {
            TCP => {
                let header = header::<20>(bytes, self.transport_offset)?;
                let header_len = u16::from(header[12] >> 4) * 4;
                (header_len >= TCP_BYTES).then_some(())?;
                Some(Segment { transport: Transport::Tcp, header_len, len: self.len })
            }
            UDP => {
                let &[.., l0, l1, sum0, sum1] = header::<8>(bytes, self.transport_offset)?;
                ([sum0, sum1] != [0; 2]).then_some(())?;
                let len = u16::from_be_bytes([l0, l1]);
                Some(Segment { transport: Transport::Udp, header_len: UDP_BYTES, len })
            }
            _ => None,
        }
    }
}

/// Transport header, and its length with the payload.
struct Segment {
    transport: Transport,
    header_len: u16,
    len: u16,
}

#[inline]
fn header<const BYTES: usize>(bytes: &[u8], at: u8) -> Option<&[u8; BYTES]> {
    bytes.get(usize::from(at)..)?.first_chunk()
}

/// Judges the checksums of the headers that were found.
#[inline(never)]
fn judge(headers: &mut Headers, seen: &Seen<'_>, verify: Verify) {
    let start = usize::from(headers.transport_offset);
    let ip_header = seen.bytes.get(usize::from(headers.network_offset)..start).unwrap_or_default();
    let addresses = match headers.network {
        Network::Ipv4 => ip_header.get(12..),
        _ => ip_header.get(8..),
    };
    if verify == Verify::Checksums && headers.network == Network::Ipv4 {
        headers.ip_checksum = checksum::judge(sum_of_words(ip_header));
    }
    let pseudo_sum =
        sum_of_words(addresses.unwrap_or_default()).plus_word(u16::from(headers.protocol));
    let len = usize::from(headers.payload_offset) - start + usize::from(headers.payload_len);
    let segment = TransportFields { start, end: start + len, pseudo_sum: Some(pseudo_sum) };
    headers.l4_checksum = transport::judge(seen, &segment, len, verify, headers);
}

/// Sum of whole words, fastest for the numbers of them that IPv4 has.
#[inline]
fn sum_of_words(bytes: &[u8]) -> checksum::Sum {
    match bytes.as_chunks::<4>().0 {
        &[a, b] => checksum::Sum::of_words(&[a, b]),
        &[a, b, c, d, e] => checksum::Sum::of_words(&[a, b, c, d, e]),
        words => checksum::Sum::of_words(words),
    }
}
