//! UDP as `__udp4_lib_rcv` and `__udp6_lib_rcv` judge it, up to the socket.

use super::counters::UdpCounters;
use super::drop::NetworkDrop;
use crate::parse::checksum::{Sum, judge};
use crate::parse::{Checksum, Headers, Transport};

pub(super) const UDP: u8 = 17;
pub(super) const HEADER_BYTES: usize = 8;

/// A datagram's header and payload, by the IP header's account.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment<'a> {
    /// From the UDP header to the end of the IP packet.
    pub(super) bytes: &'a [u8],
    /// The sum of the addresses and the protocol.
    pub(super) pseudo_sum: Sum,
    /// What is known of the checksum already.
    pub(super) checksum: Checksum,
    pub(super) is_ipv6: bool,
    /// Whether no single socket is meant: then a missing checksum over IPv6 is passed over in
    /// silence.
    pub(super) is_to_many: bool,
}

/// Judges a datagram. Returns how long it is, its header included.
pub(super) fn receive(segment: &Segment<'_>, counters: &UdpCounters) -> Result<usize, NetworkDrop> {
    let wrong = |reason| {
        counters.in_errors.add(1);
        Err(reason)
    };
    let Some(&[_, _, _, _, high, low, check @ ..]) = segment.bytes.first_chunk::<HEADER_BYTES>()
    else {
        return wrong(NetworkDrop::PktTooSmall);
    };
    let len = match usize::from(u16::from_be_bytes([high, low])) {
        0 if segment.is_ipv6 => segment.bytes.len(), // RFC 2675, whatever the length
        len => len,
    };
    let Some(datagram) = segment.bytes.get(..len).filter(|_| len >= HEADER_BYTES) else {
        return wrong(NetworkDrop::PktTooSmall);
    };
    let has_checksum = check != [0, 0];
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
            judge(segment.pseudo_sum.plus_len(len).plus(Sum::of(datagram)))
        }
        (true, _, known) => known,
    };
    if checksum == Checksum::Bad {
        counters.in_csum_errors.add(1);
        return wrong(NetworkDrop::UdpCsum);
    }
    Ok(len)
}

/// The same of a datagram in several frames, by what was found out when they were joined.
pub(super) fn judged_before(
    headers: &Headers,
    counters: &UdpCounters,
) -> Result<usize, NetworkDrop> {
    let is_udp = headers.transport == Transport::Udp && headers.flaw.is_none();
    let reason = match headers.l4_checksum {
        Checksum::Good | Checksum::Unknown if is_udp => {
            return Ok(usize::from(headers.payload_len) + HEADER_BYTES);
        }
        Checksum::Bad if is_udp => {
            counters.in_csum_errors.add(1);
            NetworkDrop::UdpCsum
        }
        _ => NetworkDrop::PktTooSmall,
    };
    counters.in_errors.add(1);
    Err(reason)
}
