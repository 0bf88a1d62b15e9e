//! IPv6 validation as in `ip6_rcv`, up to the extension headers.

use std::net::Ipv6Addr;

use forebay_rx::parse::extension::HOP_BY_HOP;

use super::counters::IpCounters;
use super::drop::NetworkDrop;
use super::identity::Identity;
use super::{Extent, Wire, extensions};

pub(super) const FIXED_BYTES: usize = 40;

/// Fields of a valid header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ipv6 {
    /// End of the packet, relative to its header.
    pub(super) total_len: usize,
    /// Type of the header after the fixed header and the hop-by-hop options.
    pub(super) next: u8,
    /// Offset of that header from the fixed one.
    pub(super) offset: usize,
    /// True if the length field is 0: the length is then unknown, and fragments are not accepted.
    pub(super) has_no_len: bool,
}

/// Validates a packet that begins with its IPv6 header.
pub(super) fn receive(
    wire: &Wire<'_>,
    on: &Identity,
    counters: &IpCounters,
) -> Result<Ipv6, NetworkDrop> {
    counters.in_receives.add(1);
    if !on.has_ipv6() {
        counters.in_discards.add(1);
        return Err(NetworkDrop::Ipv6disabled);
    }
    let ipv6 = header(wire, counters)?;
    let (_, destination) = addresses(wire.bytes).ok_or(NetworkDrop::IpInhdr)?;
    if destination.is_multicast() {
        return if on.is_joined(destination.into()) {
            Ok(ipv6)
        } else {
            Err(NetworkDrop::NotJoined)
        };
    }
    if on.is_own(destination.into()) {
        return Ok(ipv6);
    }
    counters.in_addr_errors.add(1);
    Err(NetworkDrop::IpInaddrerrors)
}

/// `ip6_rcv_core`.
fn header(wire: &Wire<'_>, counters: &IpCounters) -> Result<Ipv6, NetworkDrop> {
    let wrong = |reason| {
        counters.in_hdr_errors.add(1);
        Err(reason)
    };
    let Some(fixed) = wire.bytes.first_chunk::<FIXED_BYTES>() else {
        return wrong(wire.missing(FIXED_BYTES, NetworkDrop::IpInhdr));
    };
    if fixed[0] >> 4 != 6 {
        return wrong(NetworkDrop::UnhandledProto);
    }
    if let Err(reason) = judge_addresses(fixed) {
        return wrong(reason);
    }
    let payload_len = usize::from(u16::from_be_bytes([fixed[4], fixed[5]]));
    let next = fixed[6];
    // Without a length the packet is a jumbogram, or extends to the end of the frame.
    let has_no_len = payload_len == 0;
    let mut ipv6 =
        Ipv6 { total_len: FIXED_BYTES + payload_len, next, offset: FIXED_BYTES, has_no_len };
    if has_no_len && next == HOP_BY_HOP {
        ipv6.total_len = wire.len;
    }
    match wire.holds(ipv6.total_len) {
        Extent::Short => {
            counters.in_truncated_pkts.add(1);
            return Err(NetworkDrop::PktTooSmall);
        }
        Extent::Snapped => return Err(NetworkDrop::Snapped),
        Extent::Whole => {}
    }
    if next == HOP_BY_HOP {
        match extensions::hop_by_hop(wire.bytes, &ipv6) {
            Ok((next, offset)) => (ipv6.next, ipv6.offset) = (next, offset),
            Err(reason) => return wrong(reason),
        }
    }
    Ok(ipv6)
}

/// Fields of a header that was validated before; `bytes` is the whole packet.
pub(super) fn again(bytes: &[u8]) -> Result<Ipv6, NetworkDrop> {
    let &[_, _, _, _, _, _, next, ..] =
        bytes.first_chunk::<FIXED_BYTES>().ok_or(NetworkDrop::IpInhdr)?;
    let mut ipv6 = Ipv6 { total_len: bytes.len(), next, offset: FIXED_BYTES, has_no_len: false };
    if next == HOP_BY_HOP {
        (ipv6.next, ipv6.offset) = extensions::hop_by_hop(bytes, &ipv6)?;
    }
    Ok(ipv6)
}

/// Source and destination address.
pub(super) fn addresses(header: &[u8]) -> Option<(Ipv6Addr, Ipv6Addr)> {
    let source = header.get(8..)?.first_chunk::<16>()?;
    let destination = header.get(24..)?.first_chunk::<16>()?;
    Some((Ipv6Addr::from(*source), Ipv6Addr::from(*destination)))
}

/// Rejects addresses that must not appear on a link (RFC 4291).
fn judge_addresses(header: &[u8; FIXED_BYTES]) -> Result<(), NetworkDrop> {
    let (source, destination) = addresses(header).ok_or(NetworkDrop::IpInhdr)?;
    let is_reserved_scope = |group: Ipv6Addr| matches!(group.octets()[1] & 0x0f, 0 | 1);
    if source.is_loopback() || destination.is_loopback() {
        // Section 2.5.3: never outside of a node.
        return Err(NetworkDrop::IpLocalnet);
    }
    if destination.is_multicast() && is_reserved_scope(destination) {
        // Section 2.7: scope 0 is reserved, and scope 1 does not leave the interface.
        return Err(NetworkDrop::IpInvalidDest);
    }
    if source.is_multicast() {
        // Section 2.7: a group is never a source.
        return Err(NetworkDrop::IpInvalidSource);
    }
    Ok(())
}
