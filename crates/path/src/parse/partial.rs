//! Checksums that are not complete yet: the kernel leaves it to the device to add up all but the
//! pseudo header, and a device that is none passes that on.

use super::checksum::Sum;
use super::device_sum::{DeviceSum, skipped};
use super::{Headers, Link, NETWORK_BYTES_MIN, Transport, View};

/// Where TCP's checksum stands in its header.
const TCP_CSUM_OFFSET: usize = 16;

/// Where UDP's checksum stands in its header, and no other transport's that is summed up so.
pub(crate) const UDP_CSUM_OFFSET: usize = 6;

/// A checksum field that does not lie where one can: inside the frame, behind an IP header, at an
/// even place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoSuchField;

/// Completes the checksum at `csum_offset` from `csum_start`, whose field holds the pseudo header's
/// sum, over all of the frame from `csum_start` on: the kernel's `skb_checksum_help`. A UDP
/// checksum of 0 becomes 0xffff.
///
/// # Errors
/// When the field does not lie in the frame; then nothing is changed.
pub fn complete_checksum(
    bytes: &mut [u8],
    csum_start: usize,
    csum_offset: usize,
) -> Result<(), NoSuchField> {
    let rest = Sum::of(bytes.get(csum_start..).ok_or(NoSuchField)?);
    complete_with(bytes, csum_start, csum_offset, rest).map(drop)
}

/// The same for a frame of which the device's sum may be known: then only its headers are looked
/// at. Returns what a device would sum up now.
pub(crate) fn complete_knowing(
    device_sum: Option<DeviceSum>,
    bytes: &mut [u8],
    link: Link,
    csum_start: usize,
    csum_offset: usize,
) -> Result<Option<DeviceSum>, NoSuchField> {
    let first = skipped(link);
    let is_place =
        csum_start >= first + NETWORK_BYTES_MIN && (csum_start - first).is_multiple_of(2);
    let (true, Some(before), Some(rest)) =
        (is_place, bytes.get(first..csum_start), bytes.get(csum_start..))
    else {
        return Err(NoSuchField);
    };
    let before = Sum::of(before);
    let rest = device_sum.map_or_else(|| Sum::of(rest), |sum| sum.without(before));
    let field = complete_with(bytes, csum_start, csum_offset, rest)?;
    // A word and its opposite sum up to nothing, so all that is left is the opposite of what the
    // field held.
    Ok(DeviceSum::new(before.plus_word(!field).fold()))
}

/// Whether the checksum field of TCP or UDP holds the pseudo header's sum, and nothing of the rest.
/// Not told of a packet with an IPv6 routing header, whose sender summed up another address.
pub(crate) fn holds_pseudo_sum(bytes: &[u8], headers: &Headers) -> bool {
    let Headers { transport_offset, payload_offset, payload_len, protocol, .. } = *headers;
    let at = usize::from(transport_offset)
        + match headers.transport {
            Transport::Tcp => TCP_CSUM_OFFSET,
            Transport::Udp => UDP_CSUM_OFFSET,
            Transport::Icmp | Transport::Other => return false,
        };
    let Some(field) = bytes.get(at..).and_then(<[u8]>::first_chunk) else { return false };
    let Some(addresses) = View::new(bytes, headers).address_bytes() else { return false };
    let len = usize::from(payload_offset - transport_offset) + usize::from(payload_len);
    let sum = Sum::of(addresses).plus_word(protocol.into()).plus_len(len).fold();
    u16::from_be_bytes(*field) == sum
}

/// Puts the opposite of a sum into the field. Returns what it held.
fn complete_with(
    bytes: &mut [u8],
    csum_start: usize,
    csum_offset: usize,
    rest: Sum,
) -> Result<u16, NoSuchField> {
    let header = bytes.get_mut(csum_start..).filter(|_| csum_offset.is_multiple_of(2));
    let field = header.and_then(|header| header.get_mut(csum_offset..));
    let field: &mut [u8; 2] = field.and_then(<[u8]>::first_chunk_mut).ok_or(NoSuchField)?;
    let before = u16::from_be_bytes(*field);
    let checksum = match (!rest.fold(), csum_offset) {
        (0, UDP_CSUM_OFFSET) => u16::MAX, // a 0 would say that there is none
        (checksum, _) => checksum,
    };
    *field = checksum.to_be_bytes();
    Ok(before)
}
