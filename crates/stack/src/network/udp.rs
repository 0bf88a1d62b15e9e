//! UDP validation as in `__udp4_lib_rcv` and `__udp6_lib_rcv`, up to the socket lookup.

use forebay_rx::packet::Packet;
use forebay_rx::parse::Checksum;
use forebay_rx::parse::checksum::{Sum, judge};

use super::counters::UdpCounters;
use super::drop::NetworkDrop;

pub(super) const UDP: u8 = 17;
pub(super) const HEADER_BYTES: usize = 8;

/// A UDP header and payload, delimited by the IP header.
#[derive(Clone, Copy, Debug)]
pub(super) struct UdpSegment<'a> {
    /// The packet that contains the segment.
    pub(super) packet: &'a Packet,
    /// Offset in the packet's first frame. The segment ends where the IP packet does.
    pub(super) offset: usize,
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
    let header = segment.packet.frame.data().get(segment.offset..).unwrap_or_default();
    let Some(&[_, _, _, _, high, low, check @ ..]) = header.first_chunk::<HEADER_BYTES>() else {
        return wrong(NetworkDrop::PktTooSmall);
    };
    let there = segment.len();
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
            judge(segment.pseudo_sum.plus_len(len).plus(segment.sum(len)))
        }
        (true, _, known) => known,
    };
    if checksum == Checksum::Bad {
        counters.in_csum_errors.add(1);
        return wrong(NetworkDrop::UdpCsum);
    }
    Ok(len)
}

impl<'a> UdpSegment<'a> {
    /// Number of bytes present, from the UDP header on.
    fn len(&self) -> usize {
        let len = match self.packet.is_chain() {
            true => self.packet.fragments().map(<[u8]>::len).sum(),
            false => self.packet.frame.data().len(),
        };
        len.saturating_sub(self.offset)
    }

    /// Sum of the first `len` bytes, as far as they are present.
    fn sum(&self, len: usize) -> Sum {
        if !self.packet.is_chain() {
            let place = self.offset..self.offset.saturating_add(len);
            return Sum::of(self.packet.frame.data().get(place).unwrap_or_default());
        }
        let (mut skip, mut left) = (self.offset, len);
        Sum::of_pieces(self.packet.fragments().map(move |bytes| -> &'a [u8] {
            let (before, bytes) = bytes.split_at(skip.min(bytes.len()));
            let (bytes, _) = bytes.split_at(left.min(bytes.len()));
            skip -= before.len();
            left -= bytes.len();
            bytes
        }))
    }
}
