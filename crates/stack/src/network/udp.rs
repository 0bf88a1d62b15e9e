//! UDP validation as in `__udp4_lib_rcv` and `__udp6_lib_rcv`, up to the socket lookup.

use forebay_rx::parse::Checksum;
use forebay_rx::parse::checksum::{Sum, judge};

use super::counters::UdpCounters;
use super::drop::NetworkDrop;
use super::transport::TransportBytes;

pub(super) const UDP: u8 = 17;
pub(super) const HEADER_BYTES: usize = 8;

/// A UDP header and payload, delimited by the IP header.
#[derive(Clone, Copy, Debug)]
pub(super) struct UdpSegment<'a> {
    pub(super) bytes: TransportBytes<'a>,
    /// Sum of the pseudo-header without its length: addresses and protocol.
    pub(super) pseudo_sum: Sum,
    /// Checksum state known so far.
    pub(super) checksum: Checksum,
    pub(super) is_ipv6: bool,
    /// True for multicast and broadcast: a packet over IPv6 without a checksum is then not counted
    /// as an error.
    pub(super) is_to_many: bool,
}

/// Validates a datagram. Returns its length, header included.
pub(super) fn receive(
    segment: &UdpSegment<'_>,
    counters: &UdpCounters,
) -> Result<usize, NetworkDrop> {
    let wrong = |reason| {
        counters.in_errors.add(1);
        Err(reason)
    };
    let header = segment.bytes.first();
    let Some(&[_, _, _, _, high, low, check @ ..]) = header.first_chunk::<HEADER_BYTES>() else {
        return wrong(NetworkDrop::PktTooSmall);
    };
    let there = segment.bytes.len();
    let len = match usize::from(u16::from_be_bytes([high, low])) {
        0 if segment.is_ipv6 => there, // RFC 2675 allows 0 for jumbograms; accepted for any length
        len => len,
    };
    // RFC 768: the length includes the header; it cannot exceed the IP payload.
    if len < HEADER_BYTES || len > there {
        return wrong(NetworkDrop::PktTooSmall);
    }
    let has_checksum = check != [0, 0];
    // IPv6 requires a checksum (RFC 8200, section 8.1).
    if !has_checksum && segment.is_ipv6 && segment.is_to_many {
        counters.ignored_multi.add(1);
        return Err(NetworkDrop::UdpCsum);
    }
    let checksum = match (has_checksum, segment.is_ipv6, segment.checksum) {
        (false, is_ipv6, _) => {
            if is_ipv6 {
                Checksum::Bad
            } else {
                Checksum::Good
            }
        }
        (true, _, Checksum::Unknown) => {
            judge(segment.pseudo_sum.plus_len(len).plus(segment.bytes.sum(len)))
        }
        (true, _, known) => known,
    };
    if checksum == Checksum::Bad {
        counters.in_csum_errors.add(1);
        return wrong(NetworkDrop::UdpCsum);
    }
    Ok(len)
}
