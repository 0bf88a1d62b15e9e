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

const IPV4_BYTES: u16 = 20;
const IPV6_BYTES: u16 = 40;
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
    let Some(datagram) = datagram(bytes, headers.link) else { return false };
    let start = usize::from(datagram.transport_offset);
    let end = start + usize::from(datagram.segment_len);
    let Some(segment) = segment(bytes, &datagram) else { return false };
    if end > (wire_len as usize).max(bytes.len()) {
        return false;
    }
    headers.network = datagram.network;
    headers.transport = segment.transport;
    headers.protocol = datagram.protocol;
    headers.network_offset = datagram.network_offset;
    headers.transport_offset = datagram.transport_offset;
    headers.payload_offset = datagram.transport_offset + segment.header_len;
    headers.payload_len = segment.len - segment.header_len;
    if verify == Verify::Checksums || device_sum.is_some() {
        let seen = Seen { device_sum, ..Seen::new(bytes, wire_len, headers.link) };
        judge(headers, &seen, &datagram, segment.len, verify);
    }
    true
}

/// IP header and the length of its payload.
struct Datagram<'a> {
    network: Network,
    protocol: u8,
    network_offset: u8,
    transport_offset: u16,
    segment_len: u16,
    /// Source and destination address.
    addresses: &'a [u8],
}

#[inline]
fn datagram(bytes: &[u8], link: Link) -> Option<Datagram<'_>> {
    let (network_offset, ethertype) = match link {
        Link::Ethernet => {
            let &[.., e0, e1, _, _, t0, t1] = bytes.first_chunk::<18>()?;
            match u16::from_be_bytes([e0, e1]) {
                TAG_8021Q => (18, u16::from_be_bytes([t0, t1])),
                ethertype => (14, ethertype),
            }
        }
        Link::Ip => (0, if bytes.first()? >> 4 == 4 { ETHERTYPE_IPV4 } else { ETHERTYPE_IPV6 }),
    };
    let behind = bytes.get(usize::from(network_offset)..)?;
    match ethertype {
        ETHERTYPE_IPV4 => ipv4(behind, network_offset),
        ETHERTYPE_IPV6 => ipv6(behind, network_offset),
        _ => None,
    }
}

#[inline]
fn ipv4(behind: &[u8], network_offset: u8) -> Option<Datagram<'_>> {
    let header = behind.first_chunk::<20>()?;
    let fragment = u16::from_be_bytes([header[6], header[7]]);
    let is_whole = fragment & (MORE_FRAGMENTS | OFFSET_MASK) == 0;
    if header[0] != IPV4_WITHOUT_OPTIONS || !is_whole {
        return None;
    }
    Some(Datagram {
        network: Network::Ipv4,
        protocol: header[9],
        network_offset,
        transport_offset: u16::from(network_offset) + IPV4_BYTES,
        segment_len: u16::from_be_bytes([header[2], header[3]]).checked_sub(IPV4_BYTES)?,
        addresses: &header[12..],
    })
}

#[inline]
fn ipv6(behind: &[u8], network_offset: u8) -> Option<Datagram<'_>> {
    let header = behind.first_chunk::<40>()?;
    if header[0] >> 4 != 6 {
        return None;
    }
    Some(Datagram {
        network: Network::Ipv6,
        protocol: header[6],
        network_offset,
        transport_offset: u16::from(network_offset) + IPV6_BYTES,
        segment_len: u16::from_be_bytes([header[4], header[5]]),
        addresses: &header[8..],
    })
}

/// Transport header, and its length with the payload.
struct Segment {
    transport: Transport,
    header_len: u16,
    len: u16,
}

#[inline]
fn segment(bytes: &[u8], datagram: &Datagram<'_>) -> Option<Segment> {
    let behind = bytes.get(usize::from(datagram.transport_offset)..)?;
    let segment = match datagram.protocol {
        TCP => {
            let header = behind.first_chunk::<20>()?;
            let header_len = u16::from(header[12] >> 4) * 4;
            (header_len >= TCP_BYTES).then_some(())?;
            Segment { transport: Transport::Tcp, header_len, len: datagram.segment_len }
        }
        UDP => {
            let &[.., l0, l1, sum0, sum1] = behind.first_chunk::<8>()?;
            ([sum0, sum1] != [0; 2]).then_some(())?;
            let len = u16::from_be_bytes([l0, l1]);
            Segment { transport: Transport::Udp, header_len: UDP_BYTES, len }
        }
        _ => return None,
    };
    let fits = segment.header_len <= segment.len && segment.len <= datagram.segment_len;
    fits.then_some(segment)
}

/// Judges the checksums.
#[inline]
fn judge(
    headers: &mut Headers,
    seen: &Seen<'_>,
    datagram: &Datagram<'_>,
    len: u16,
    verify: Verify,
) {
    let start = usize::from(datagram.transport_offset);
    let ip_header = seen.bytes.get(usize::from(datagram.network_offset)..start);
    if let (Verify::Checksums, Network::Ipv4, Some(header)) = (verify, datagram.network, ip_header)
    {
        headers.ip_checksum = checksum::judge(sum_of_words(header));
    }
    let pseudo_sum = sum_of_words(datagram.addresses).plus_word(u16::from(datagram.protocol));
    let end = start + usize::from(datagram.segment_len);
    let segment = TransportFields { start, end, pseudo_sum: Some(pseudo_sum) };
    headers.l4_checksum = transport::judge(seen, &segment, len.into(), verify, headers);
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
