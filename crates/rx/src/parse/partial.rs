//! Partial checksums: the kernel leaves all but the pseudo header's sum to the device, and a
//! virtual device passes that on.

use forebay_buf::Frame;

use super::checksum::Sum;
use super::device_sum::{DeviceSum, skipped};
use super::{Checksum, Headers, Link, NETWORK_BYTES_MIN, Transport, View, ipv6};
use crate::nonlinear::sum_in;
use crate::packet::Packet;

/// Offset of TCP's checksum in its header.
const TCP_CSUM_OFFSET: u16 = 16;

/// Offset of UDP's checksum in its header; no other supported transport has its checksum there.
const UDP_CSUM_OFFSET: u16 = 6;

/// Error of an impossible checksum field: outside the frame, not behind an IP header, or at an odd
/// offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoSuchField;

/// Completes the checksum at `csum_offset` from `csum_start`, whose field holds the pseudo header's
/// sum, over all of the frame from `csum_start` on: the kernel's `skb_checksum_help`. A UDP
/// checksum of 0 becomes 0xffff.
///
/// # Errors
/// If the field is not inside the frame; nothing is changed then.
pub fn complete_checksum(
    bytes: &mut [u8],
    csum_start: u16,
    csum_offset: u16,
) -> Result<(), NoSuchField> {
    let rest = Sum::of(bytes.get(csum_start.into()..).ok_or(NoSuchField)?);
    complete_with(bytes, csum_start, csum_offset, rest).map(drop)
}

/// Completes the checksum of a frame that may have pieces, with the field in the frame itself. If the
/// device's sum is known, only headers are read. Returns the sum that a device would compute now.
pub(crate) fn complete_knowing(
    device_sum: Option<DeviceSum>,
    frame: &mut Frame,
    link: Link,
    csum_start: u16,
    csum_offset: u16,
) -> Result<Option<DeviceSum>, NoSuchField> {
    let (first, start) = (skipped(link), usize::from(csum_start));
    let is_place =
        start >= first + usize::from(NETWORK_BYTES_MIN) && (start - first).is_multiple_of(2);
    let bytes = frame.data();
    let (true, Some(before)) = (is_place, bytes.get(first..start)) else {
        return Err(NoSuchField);
    };
    let before = Sum::of(before);
    let rest =
        device_sum.map_or_else(|| sum_from(frame, start, usize::MAX), |sum| sum.without(before));
    let field = complete_with(frame.data_mut(), csum_start, csum_offset, rest)?;
    // The bytes from `csum_start` on now sum up to the complement of the field's old value, because
    // a sum and its complement in the field cancel out.
    Ok(DeviceSum::new(before.plus_word(!field).fold()))
}

/// Completes the checksum of a parsed packet whose field holds the pseudo header's sum only,
/// without a mark that says so; the packet then counts as verified. `None` if there is nothing to
/// complete.
///
/// A complete checksum looks like a partial one once in 65,536 packets; completing it again does
/// not change it.
pub(crate) fn complete_partial(packet: &mut Packet) -> Option<()> {
    let Packet { frame, headers, device_sum, .. } = packet;
    let may_be = headers.l4_checksum != Checksum::Good
        && headers.flaw.is_none()
        && headers.fragment.is_whole();
    if !may_be || !holds_pseudo_sum(frame.data(), headers) {
        return None;
    }
    let end = usize::from(headers.payload_offset) + usize::from(headers.payload_len);
    if end > frame.total_len_bytes() as usize {
        return None;
    }
    let csum_offset = csum_offset(headers.transport)?;
    let rest = sum_from(frame, headers.transport_offset.into(), end);
    complete_with(frame.data_mut(), headers.transport_offset, csum_offset, rest).ok()?;
    headers.l4_checksum = Checksum::Good;
    *device_sum = None;
    Some(())
}

/// Sum of the bytes from `start` to `end` or the packet's end, in the frame and its pieces.
fn sum_from(frame: &Frame, start: usize, end: usize) -> Sum {
    sum_in(frame, start..end.min(frame.total_len_bytes() as usize))
}

/// Offset of the checksum in a header of TCP or UDP.
pub(crate) fn csum_offset(transport: Transport) -> Option<u16> {
    match transport {
        Transport::Tcp => Some(TCP_CSUM_OFFSET),
        Transport::Udp => Some(UDP_CSUM_OFFSET),
        Transport::Icmp | Transport::Other | Transport::Tunnel => None,
    }
}

/// True if the checksum field of TCP or UDP holds the pseudo header's sum and nothing else. False
/// for a packet with segments left in an IPv6 routing header, whose sender summed another address.
pub(crate) fn holds_pseudo_sum(bytes: &[u8], headers: &Headers) -> bool {
    let Headers { transport_offset, payload_offset, payload_len, protocol, .. } = *headers;
    let Some(csum_offset) = csum_offset(headers.transport) else { return false };
    let at = usize::from(transport_offset) + usize::from(csum_offset);
    let Some(field) = bytes.get(at..).and_then(<[u8]>::first_chunk) else { return false };
    let Some(addresses) = View::new(bytes, headers).address_bytes() else { return false };
    let len = usize::from(payload_offset - transport_offset) + usize::from(payload_len);
    let sum = Sum::of_addresses(addresses).plus_word(protocol.into()).plus_len(len).fold();
    u16::from_be_bytes(*field) == sum && !ipv6::has_segments_left(bytes, headers)
}

/// Writes the complement of a sum into the field. Returns the field's old value.
fn complete_with(
    bytes: &mut [u8],
    csum_start: u16,
    csum_offset: u16,
    rest: Sum,
) -> Result<u16, NoSuchField> {
    let header = bytes.get_mut(csum_start.into()..).filter(|_| csum_offset.is_multiple_of(2));
    let field = header.and_then(|header| header.get_mut(csum_offset.into()..));
    let field: &mut [u8; 2] = field.and_then(<[u8]>::first_chunk_mut).ok_or(NoSuchField)?;
    let before = u16::from_be_bytes(*field);
    let checksum = match (!rest.fold(), csum_offset) {
        (0, UDP_CSUM_OFFSET) => u16::MAX, // 0 means no checksum (RFC 768)
        (checksum, _) => checksum,
    };
    *field = checksum.to_be_bytes();
    Ok(before)
}
