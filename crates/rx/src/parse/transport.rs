//! TCP (RFC 9293), UDP (RFC 768), and the start of ICMP.

use super::{
    Checksum, DatagramFields, Flaw, Headers, Network, Seen, Stop, Transport, Verify, checksum,
};

/// Protocol number of TCP.
pub(super) const TCP: u8 = 6;
/// Protocol number of UDP.
pub(super) const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// Minimum length of a transport header: ports, or the first fields of ICMP. Bytes behind a shorter
/// packet are padding, and must not be taken for ports.
const LEAST_BYTES: usize = 4;
const TCP_FIXED_BYTES: usize = 20;
/// Part of a TCP header that must be captured for its fields to count: up to the window.
pub(super) const TCP_SEEN_BYTES: usize = 16;
const UDP_BYTES: usize = 8;
const ICMP_FIXED_BYTES: usize = 4;

pub(super) fn walk(
    seen: &Seen<'_>,
    datagram: &DatagramFields,
    verify: Verify,
    headers: &mut Headers,
) -> Result<(), Stop> {
    let start = datagram.transport_offset;
    let known = matches!(headers.protocol, TCP | UDP | ICMP | ICMPV6);
    if !known {
        return Ok(());
    }
    if datagram.end.saturating_sub(start) < LEAST_BYTES {
        return Err(Stop::Flaw(Flaw::TransportHeader));
    }
    if start >= seen.bytes.len() {
        return Err(Stop::Snapped);
    }
    headers.transport_offset = offset(start);
    let segment = TransportFields { start, end: datagram.end, pseudo_sum: datagram.pseudo_sum };
    match (headers.protocol, headers.network) {
        (TCP, _) => tcp(seen, &segment, verify, headers),
        (UDP, _) => udp(seen, &segment, verify, headers),
        (ICMP, Network::Ipv4) | (ICMPV6, Network::Ipv6) => icmp(seen, &segment, headers),
        _ => Ok(()),
    }
}

/// Transport header and payload, as delimited by the IP header.
pub(super) struct TransportFields {
    pub(super) start: usize,
    pub(super) end: usize,
    /// As in [`DatagramFields`].
    pub(super) pseudo_sum: Option<checksum::Sum>,
}

impl TransportFields {
    fn len(&self) -> usize {
        self.end - self.start
    }

    /// Checks that the header's fixed part is inside the packet.
    fn holds(&self, header_bytes: usize) -> Result<(), Stop> {
        if header_bytes <= self.len() { Ok(()) } else { Err(Stop::Flaw(Flaw::TransportHeader)) }
    }
}

fn tcp(
    seen: &Seen<'_>,
    segment: &TransportFields,
    verify: Verify,
    headers: &mut Headers,
) -> Result<(), Stop> {
    segment.holds(TCP_FIXED_BYTES)?;
    let header = seen.header::<TCP_SEEN_BYTES>(segment.start, Flaw::TransportHeader)?;
    let header_len = usize::from(header[12] >> 4) * 4;
    // RFC 9293, section 3.1: at least five words of header, which end inside the segment.
    if header_len < TCP_FIXED_BYTES || header_len > segment.len() {
        return Err(Stop::Flaw(Flaw::TransportHeader));
    }
    set_payload(headers, segment.start + header_len, segment.end);
    seen.header::<TCP_FIXED_BYTES>(segment.start, Flaw::TransportHeader)?;
    headers.transport = Transport::Tcp;
    headers.l4_checksum = judge(seen, segment, segment.len(), verify, headers);
    Ok(())
}

fn udp(
    seen: &Seen<'_>,
    segment: &TransportFields,
    verify: Verify,
    headers: &mut Headers,
) -> Result<(), Stop> {
    segment.holds(UDP_BYTES)?;
    let &[.., high, low] = seen.header::<6>(segment.start, Flaw::TransportHeader)?;
    let len = match usize::from(u16::from_be_bytes([high, low])) {
        0 if segment.len() > usize::from(u16::MAX) => segment.len(), // RFC 2675
        len => len,
    };
    // RFC 768: the length includes the header.
    if len < UDP_BYTES {
        return Err(Stop::Flaw(Flaw::UdpLength));
    }
    set_payload(headers, segment.start + UDP_BYTES, segment.start + len);
    let header = seen.header::<UDP_BYTES>(segment.start, Flaw::TransportHeader)?;
    headers.transport = Transport::Udp;
    if len > segment.len() {
        // A first fragment has the UDP length of the whole datagram.
        let is_whole = headers.fragment.is_whole();
        return if is_whole { Err(Stop::Flaw(Flaw::UdpLength)) } else { Ok(()) };
    }
    headers.l4_checksum = match (header[6], header[7], headers.network) {
        (0, 0, _) if verify == Verify::Nothing => Checksum::Unknown,
        (0, 0, Network::Ipv6) => Checksum::Bad, // RFC 8200, section 8.1
        (0, 0, _) => Checksum::Unknown,
        _ => judge(seen, segment, len, verify, headers),
    };
    Ok(())
}

fn icmp(seen: &Seen<'_>, segment: &TransportFields, headers: &mut Headers) -> Result<(), Stop> {
    segment.holds(ICMP_FIXED_BYTES)?;
    seen.header::<ICMP_FIXED_BYTES>(segment.start, Flaw::TransportHeader)?;
    headers.transport = Transport::Icmp;
    set_payload(headers, segment.start + ICMP_FIXED_BYTES, segment.end);
    Ok(())
}

/// Judges the checksum of a segment of `len` bytes, unless the device has done so: from the
/// device's sum, or by summing the segment, if it was captured in full and is a whole datagram.
pub(super) fn judge(
    seen: &Seen<'_>,
    segment: &TransportFields,
    len: usize,
    verify: Verify,
    headers: &Headers,
) -> Checksum {
    if headers.l4_checksum != Checksum::Unknown {
        return headers.l4_checksum;
    }
    let (Some(pseudo_sum), true) = (segment.pseudo_sum, headers.fragment.is_whole()) else {
        return Checksum::Unknown;
    };
    let told = seen.device_sum.and_then(|sum| sum.of_segment(seen, segment.start, len));
    let summed = || match verify {
        Verify::Checksums => seen.sum(segment.start..segment.start + len),
        Verify::Nothing => None,
    };
    match told.or_else(summed) {
        Some(sum) => checksum::judge(pseudo_sum.plus_len(len).plus(sum)),
        None => Checksum::Unknown,
    }
}

fn set_payload(headers: &mut Headers, start: usize, end: usize) {
    headers.payload_offset = offset(start);
    headers.payload_len = offset(end.saturating_sub(start));
}

/// Offset or length as 16 bits. Headers end far below 65,535; only the payload of a segment that a
/// device was to cut can be longer, and its length saturates.
fn offset(at: usize) -> u16 {
    u16::try_from(at).unwrap_or(u16::MAX)
}
