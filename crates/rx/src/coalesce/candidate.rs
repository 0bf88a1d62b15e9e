//! Conditions for a packet to be merged at all, independent of the held packet of its flow.

use super::CoalesceMode;
use super::compare::{HEADER_BYTES_MAX, Own};
use super::lro::Timestamps;
use super::refusal::MergeRefusal;
use super::tunnel::TUNNEL_HEADER_BYTES_MAX;
use super::wire::{
    ACK, CWR, FIN, IPV4_BYTES, IPV6_BYTES, ODD_CHECKSUM, PSH, RST, SYN, TCP_BYTES, UDP_BYTES, URG,
};
use crate::packet::Packet;
use crate::parse::checksum::{self, Sum};
use crate::parse::extension::{DESTINATION_OPTIONS, ExtensionWalk, HOP_BY_HOP, ROUTING};
use crate::parse::{Checksum, Fragment, Network, Transport, is_plain};

const RESERVED_BIT: u8 = 0x80;
const CONGESTION_EXPERIENCED: u8 = 0x03;

/// Packet that may be merged: complete, correct, and of a kind that can be restored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Length of all headers, in bytes.
    pub(super) header_len: usize,
    pub(super) payload_len: u32,
    /// Header fields that differ between segments.
    pub(super) own: Own,
}

impl Candidate {
    /// True if no segment may follow this one.
    pub(super) fn ends(&self) -> bool {
        self.own.flags & (PSH | FIN) != 0
    }
}

/// Examines a parsed packet by itself; a packet in a [tunnel](super::tunnel) by its inner headers.
pub(super) fn examine(
    packet: &Packet,
    is_inside: bool,
    mode: CoalesceMode,
) -> Result<Candidate, MergeRefusal> {
    let headers = &packet.headers;
    let bytes = packet.frame.data();
    let start = usize::from(headers.network_offset);
    let Some((link_header, rest)) = bytes.split_at_checked(start) else {
        return Err(MergeRefusal::Flaw);
    };
    if packet.is_chain() {
        return Err(MergeRefusal::Merged); // only its first segment is in this frame
    }
    if packet.is_gso() {
        return Err(MergeRefusal::WholeGso);
    }
    // The checksum of a fragment covers the whole datagram, not this payload alone. Checked before
    // flaws: a tiny first fragment has one, and may not overtake its flow either.
    if headers.fragment != Fragment::Whole {
        return Err(MergeRefusal::Fragment);
    }
    // Lengths that contradict each other could not be restored.
    if headers.flaw.is_some() {
        return Err(MergeRefusal::Flaw);
    }
    let is_tcp = match headers.transport {
        Transport::Tcp => true,
        Transport::Udp if mode == CoalesceMode::Gro => false,
        // A truncated packet may lack the header that would tell its protocol.
        Transport::Other if packet.frame.total_len_bytes() != packet.wire_len => {
            return Err(MergeRefusal::Snapped);
        }
        _ => return Err(MergeRefusal::Protocol),
    };
    if !is_inside && !is_plain(link_header) {
        return Err(MergeRefusal::Protocol);
    }
    let network_len = usize::from(headers.transport_offset).saturating_sub(start);
    let tos = match headers.network {
        Network::Ipv4 => ipv4(rest, network_len, headers.ip_checksum)?,
        Network::Ipv6 => ipv6(rest, network_len)?,
        Network::Other => return Err(MergeRefusal::Protocol),
    };
    if mode == CoalesceMode::Lro && tos & CONGESTION_EXPERIENCED == CONGESTION_EXPERIENCED {
        return Err(MergeRefusal::CongestionMark);
    }
    let Some(segment) = rest.get(network_len..) else { return Err(MergeRefusal::Snapped) };
    let candidate = if is_tcp { tcp(packet, segment, mode)? } else { udp(packet, segment)? };
    let longest = if is_inside { TUNNEL_HEADER_BYTES_MAX } else { HEADER_BYTES_MAX };
    if candidate.header_len > longest {
        return Err(MergeRefusal::Extension); // nothing else makes headers so long
    }
    Ok(candidate)
}

/// Returns the type of service.
pub(super) fn ipv4(
    rest: &[u8],
    network_len: usize,
    checksum: Checksum,
) -> Result<u8, MergeRefusal> {
    let Some(header) = rest.first_chunk::<IPV4_BYTES>() else { return Err(MergeRefusal::Flaw) };
    // Not merged by the kernel, either (`inet_gro_receive`).
    if network_len != IPV4_BYTES || header[6] & RESERVED_BIT != 0 {
        return Err(MergeRefusal::IpOptions);
    }
    let verdict = match checksum {
        Checksum::Unknown => checksum::judge(Sum::of(header)),
        known => known,
    };
    if verdict != Checksum::Good {
        return Err(MergeRefusal::IpChecksum);
    }
    if [header[10], header[11]] == ODD_CHECKSUM {
        return Err(MergeRefusal::OddChecksum);
    }
    Ok(header[1])
}

/// Returns the traffic class.
pub(super) fn ipv6(rest: &[u8], network_len: usize) -> Result<u8, MergeRefusal> {
    let Some(header) = rest.first_chunk::<IPV6_BYTES>() else { return Err(MergeRefusal::Flaw) };
    let is_jumbogram = [header[4], header[5]] == [0; 2];
    let options = rest.get(IPV6_BYTES..network_len).ok_or(MergeRefusal::Flaw)?;
    // A merged packet has 16 bits of length, and other extension headers may differ by segment.
    if is_jumbogram || !are_shared(header[6], options) {
        return Err(MergeRefusal::Extension);
    }
    Ok(header[0] << 4 | header[1] >> 4)
}

/// True if all segments of a flow can share all these extension headers.
pub(super) fn are_shared(next: u8, bytes: &[u8]) -> bool {
    let mut walk = ExtensionWalk { kind: next, at: 0 };
    while walk.at < bytes.len() {
        if take_shared(&mut walk, bytes) != Some(true) {
            return false;
        }
    }
    true
}

/// Moves past an extension header that all segments of a flow can share: options, and a routing
/// header without segments left. Returns false at another one: behind a header with segments left,
/// the checksum covers another destination than that of the IP header. `None` if it is cut short.
pub(super) fn take_shared(walk: &mut ExtensionWalk, bytes: &[u8]) -> Option<bool> {
    const SEGMENTS_LEFT: usize = 3;
    if !matches!(walk.kind, HOP_BY_HOP | DESTINATION_OPTIONS | ROUTING) {
        return Some(false);
    }
    let mut behind = *walk;
    let header = behind.take(bytes)?;
    let is_shared = walk.kind != ROUTING || header.get(SEGMENTS_LEFT) == Some(&0);
    if is_shared {
        *walk = behind;
    }
    Some(is_shared)
}

fn tcp(packet: &Packet, segment: &[u8], mode: CoalesceMode) -> Result<Candidate, MergeRefusal> {
    let Some(header) = segment.first_chunk::<TCP_BYTES>() else {
        return Err(MergeRefusal::Snapped);
    };
    let flags = header[13];
    // Each of these concerns its own segment; the kernel flushes on them, too (`tcp_gro_receive`).
    if flags & (SYN | RST | URG | CWR) != 0 {
        return Err(MergeRefusal::TcpFlags);
    }
    let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
    let checksum = u16::from_be_bytes([header[16], header[17]]);
    let candidate = whole(packet, Own { id_ahead: 0, sequence, checksum, flags })?;
    if [header[16], header[17]] == ODD_CHECKSUM {
        return Err(MergeRefusal::OddChecksum);
    }
    if mode == CoalesceMode::Lro {
        // As in `inet_lro.c`: no flags but ACK and PSH, and no options but timestamps.
        if flags & !PSH != ACK || header[12] & 0x0f != 0 {
            return Err(MergeRefusal::TcpFlags);
        }
        let options_len = candidate.header_len - usize::from(packet.headers.transport_offset);
        let options = segment.get(TCP_BYTES..options_len).unwrap_or_default();
        if !options.is_empty() && Timestamps::of(options).is_none() {
            return Err(MergeRefusal::TcpOptions);
        }
    }
    Ok(candidate)
}

fn udp(packet: &Packet, segment: &[u8]) -> Result<Candidate, MergeRefusal> {
    let Some(header) = segment.first_chunk::<UDP_BYTES>() else {
        return Err(MergeRefusal::Snapped);
    };
    // The checksum of the merged packet is computed from those of its segments.
    if [header[6], header[7]] == [0; 2] {
        return Err(MergeRefusal::NoChecksum);
    }
    let checksum = u16::from_be_bytes([header[6], header[7]]);
    let candidate = whole(packet, Own { id_ahead: 0, sequence: 0, checksum, flags: 0 })?;
    ends_with_ip(packet)?;
    Ok(candidate)
}

/// Checks that a UDP datagram ends where its IP packet does, and that this is the end of the frame.
pub(super) fn ends_with_ip(packet: &Packet) -> Result<(), MergeRefusal> {
    let headers = &packet.headers;
    let before = match headers.network {
        Network::Ipv6 => IPV6_BYTES,
        _ => 0,
    };
    let len = packet.view().network_len_field().map_or(0, usize::from);
    let end = usize::from(headers.network_offset) + before + len;
    if usize::from(headers.payload_offset) + usize::from(headers.payload_len) != end {
        return Err(MergeRefusal::UdpLength);
    }
    if packet.frame.total_len_bytes() as usize == end { Ok(()) } else { Err(MergeRefusal::Padded) }
}

/// Conditions common to TCP and UDP: the packet is complete, verified, and has a payload.
fn whole(packet: &Packet, own: Own) -> Result<Candidate, MergeRefusal> {
    let headers = &packet.headers;
    let header_len = usize::from(headers.payload_offset);
    let len = packet.frame.total_len_bytes();
    let is_whole = len == packet.wire_len
        && len as usize >= header_len + usize::from(headers.payload_len)
        // Headers outside the frame itself have not been pulled in by parsing.
        && packet.frame.data().len() >= header_len;
    if !is_whole {
        return Err(MergeRefusal::Snapped);
    }
    // A merged packet gets a correct checksum, which would hide a wrong payload.
    match headers.l4_checksum {
        Checksum::Good => {}
        Checksum::Bad => return Err(MergeRefusal::L4Checksum),
        Checksum::Unknown => return Err(MergeRefusal::Unverified),
    }
    if headers.payload_len == 0 {
        return Err(MergeRefusal::NoPayload);
    }
    if !packet.hash.is_some() {
        return Err(MergeRefusal::NoHash);
    }
    Ok(Candidate { header_len, payload_len: headers.payload_len.into(), own })
}
