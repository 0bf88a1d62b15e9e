//! IPv4 (RFC 791).

use super::{DatagramFields, Flaw, Fragment, Headers, Network, Seen, Stop, Verify, checksum};

const FIXED_BYTES: usize = 20;
pub(super) const MORE_FRAGMENTS: u16 = 0x2000;
pub(super) const OFFSET_MASK: u16 = 0x1fff;

pub(super) fn walk(
    seen: &Seen<'_>,
    verify: Verify,
    headers: &mut Headers,
) -> Result<DatagramFields, Stop> {
    let start = usize::from(headers.network_offset);
    let &[first] = seen.header::<1>(start, Flaw::IpHeader)?;
    let header_len = usize::from(first & 0x0f) * 4;
    // RFC 791, section 3.1: version 4, and at least five words of header.
    if first >> 4 != 4 || header_len < FIXED_BYTES {
        return Err(Stop::Flaw(Flaw::IpHeader));
    }
    headers.network = Network::Ipv4;
    let header = seen.header::<FIXED_BYTES>(start, Flaw::IpHeader)?;
    headers.protocol = header[9];
    headers.fragment = fragment(u16::from_be_bytes([header[6], header[7]]));

    let end = end_of_packet(seen, start, header_len, headers, [header[2], header[3]])?;
    let transport_offset = start + header_len;
    if let (Verify::Checksums, Some(whole)) = (verify, seen.bytes.get(start..transport_offset)) {
        headers.ip_checksum = checksum::judge(checksum::Sum::of(whole));
    }
    let (transport_offset, protocol) = match headers.fragment {
        Fragment::Later => (transport_offset, header[9]), // no header follows IP
        _ => skip_authentication(seen, transport_offset, end, header[9])?,
    };
    headers.protocol = protocol;
    let pseudo_sum = checksum::Sum::of(&header[12..20]).plus_word(u16::from(protocol));
    Ok(DatagramFields { transport_offset, end, pseudo_sum: Some(pseudo_sum) })
}

fn fragment(field: u16) -> Fragment {
    match (field & OFFSET_MASK, field & MORE_FRAGMENTS) {
        (0, 0) => Fragment::Whole,
        (0, _) => Fragment::First,
        _ => Fragment::Later,
    }
}

/// End of the packet by its total length. A length of 0 means the end of the frame: a sender's own
/// capture has it on segments that the device was to cut.
fn end_of_packet(
    seen: &Seen<'_>,
    start: usize,
    header_len: usize,
    headers: &mut Headers,
    total_len: [u8; 2],
) -> Result<usize, Stop> {
    let total_len = usize::from(u16::from_be_bytes(total_len));
    if total_len == 0 {
        headers.flaw = Some(Flaw::IpLength);
        return Ok(seen.wire_len);
    }
    if total_len < header_len {
        return Err(Stop::Flaw(Flaw::IpLength));
    }
    if start + total_len > seen.wire_len {
        headers.flaw = Some(Flaw::IpLength);
    }
    Ok(seen.wire_len.min(start + total_len))
}

/// Skips an authentication header (RFC 4302), the only extension header of IPv4.
fn skip_authentication(
    seen: &Seen<'_>,
    at: usize,
    end: usize,
    protocol: u8,
) -> Result<(usize, u8), Stop> {
    const AUTHENTICATION: u8 = 51;
    const FIXED_BYTES: usize = 12;
    if protocol != AUTHENTICATION {
        return Ok((at, protocol));
    }
    if at + FIXED_BYTES > end {
        return Err(Stop::Flaw(Flaw::Extension)); // what follows is padding
    }
    let &[next, len] = seen.header::<2>(at, Flaw::Extension)?;
    Ok((at + (usize::from(len) + 2) * 4, next))
}
