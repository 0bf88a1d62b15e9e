//! A fragment: its position in the datagram, as given by its headers.

use forebay_rx::packet::Packet;
use forebay_rx::parse::Network;
use forebay_rx::parse::extension::{
    AUTHENTICATION, DESTINATION_OPTIONS, ExtensionWalk, FRAGMENT, HOP_BY_HOP, NO_NEXT_HEADER,
    ROUTING,
};

use crate::network::{NetworkDrop, ipv6};

/// Key of a datagram, common to its fragments: addresses, identification, in IPv4 (RFC 791,
/// section 3.2) but not in IPv6 (RFC 8200, section 4.5) the protocol, and the device where addresses are of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Key {
    /// Source and destination; in IPv4 padded with zeros.
    pub(super) addresses: [u8; 32],
    pub(super) id: u32,
    pub(super) protocol: u8,
    /// Device that fragments to a link-local address or group of IPv6 arrived on (`ipv6_frag_rcv`); 0 for others.
    pub(super) device: u8,
}

/// Position of a fragment: `start < 65,536`, and `end - start <= 65,535`.
#[derive(Clone, Copy, Debug)]
pub(super) struct FragmentPart {
    pub(super) key: Key,
    /// Range of the fragment in the datagram's payload: `start <= x < end`.
    pub(super) start: u32,
    pub(super) end: u32,
    /// True if no more fragments follow.
    pub(super) is_last: bool,
    /// Offset of the fragment's payload in the frame.
    pub(super) data_at: u16,
    /// Bit mask with the bit of the ECN field's value set.
    pub(super) ecn: u8,
    /// Length of the IPv4 header, which counts as part of the fragment's size.
    pub(super) header_len: u32,
    /// The "don't fragment" flag of IPv4.
    pub(super) has_df: bool,
}

/// Position of the fragment header in an IPv6 packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct FragmentHeader {
    pub(super) at: usize,
    /// Offset of the "next header" field that announces the fragment header.
    pub(super) named_at: usize,
}

const IPV6_BYTES: usize = 40;
const FRAGMENT_HEADER_BYTES: usize = 8;

/// Largest payload length of an IPv6 header (`IPV6_MAXPLEN`).
const IPV6_PAYLOAD_MAX_BYTES: u32 = 65_535;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

impl FragmentPart {
    /// Reads a packet that [`parse`](forebay_rx::parse) reports as a fragment and whose IP header
    /// is valid.
    pub(super) fn read(packet: &Packet) -> Result<Self, NetworkDrop> {
        let bytes = packet.frame.data();
        let at = usize::from(packet.headers.network_offset);
        match packet.headers.network {
            Network::Ipv4 => ipv4(bytes, at),
            Network::Ipv6 => ipv6(bytes, at, packet.headers.device),
            Network::Other => Err(NetworkDrop::UnhandledProto),
        }
    }
}

/// `ip_frag_queue` in the kernel's `net/ipv4/ip_fragment.c`.
fn ipv4(bytes: &[u8], at: usize) -> Result<FragmentPart, NetworkDrop> {
    const MORE_FRAGMENTS: u16 = 0x2000;
    const DO_NOT_FRAGMENT: u16 = 0x4000;
    const OFFSET_MASK: u16 = 0x1fff;
    let header: &[u8; 20] = field(bytes, at).ok_or(NetworkDrop::PktTooSmall)?;
    let header_len = usize::from(header[0] & 0x0f) * 4;
    let total_len = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let flags = u16::from_be_bytes([header[6], header[7]]);
    let data_len = total_len.checked_sub(header_len).ok_or(NetworkDrop::IpInhdr)?;
    let data_at = at + header_len;
    if data_at + data_len > bytes.len() {
        return Err(NetworkDrop::PktTooSmall);
    }
    let mut addresses = [0; 32];
    addresses[..8].copy_from_slice(&header[12..20]);
    let id = u32::from(u16::from_be_bytes([header[4], header[5]]));
    let start = u32::from(flags & OFFSET_MASK) * 8;
    Ok(FragmentPart {
        key: Key { addresses, id, protocol: header[9], device: 0 },
        start,
        end: start + len_bytes(data_len),
        is_last: flags & MORE_FRAGMENTS == 0,
        data_at: offset(data_at),
        ecn: 1 << (header[1] & 3),
        header_len: len_bytes(header_len),
        has_df: flags & DO_NOT_FRAGMENT != 0,
    })
}

/// `ipv6_frag_rcv` and `ip6_frag_queue` in the kernel's `net/ipv6/reassembly.c`.
fn ipv6(bytes: &[u8], at: usize, device: u8) -> Result<FragmentPart, NetworkDrop> {
    const MORE_FRAGMENTS: u16 = 1;
    const OFFSET_MASK: u16 = 0xfff8;
    let header: &[u8; IPV6_BYTES] = field(bytes, at).ok_or(NetworkDrop::PktTooSmall)?;
    let found = fragment_header(bytes, at).ok_or(NetworkDrop::Ipv6BadExthdr)?;
    let &[_, _, high, low, ref id @ ..] =
        field::<FRAGMENT_HEADER_BYTES>(bytes, found.at).ok_or(NetworkDrop::Ipv6BadExthdr)?;
    let place = u16::from_be_bytes([high, low]);
    // A jumbogram must not be a fragment (RFC 2675, section 3), so the length is in the fixed
    // header.
    let end = at + IPV6_BYTES + usize::from(u16::from_be_bytes([header[4], header[5]]));
    let data_at = found.at + FRAGMENT_HEADER_BYTES;
    // An atomic fragment is not a fragment: parsing found another fragment header behind it.
    if place & (OFFSET_MASK | MORE_FRAGMENTS) == 0 || end < data_at {
        return Err(NetworkDrop::Ipv6BadExthdr);
    }
    if end > bytes.len() {
        return Err(NetworkDrop::PktTooSmall);
    }
    let (start, is_last) = (u32::from(place & OFFSET_MASK), place & MORE_FRAGMENTS == 0);
    if start == 0 && lacks_transport_header(bytes.get(..end).unwrap_or_default(), at) {
        return Err(NetworkDrop::FragInvalid);
    }
    let end = start + len_bytes(end - data_at);
    if end > IPV6_PAYLOAD_MAX_BYTES || (!is_last && !end.is_multiple_of(8)) {
        // RFC 8200, section 4.5: too long a datagram, or a length that is not a multiple of 8.
        return Err(NetworkDrop::FragInvalid);
    }
    let mut addresses = [0; 32];
    addresses.copy_from_slice(&header[8..40]);
    let (_, destination) = ipv6::addresses(header).ok_or(NetworkDrop::PktTooSmall)?;
    let is_of_link = destination.is_multicast() || destination.is_unicast_link_local();
    let device = if is_of_link { device } else { 0 };
    Ok(FragmentPart {
        key: Key { addresses, id: u32::from_be_bytes(*id), protocol: 0, device },
        start,
        end,
        is_last,
        data_at: offset(data_at),
        ecn: 1 << (header[1] >> 4 & 3),
        header_len: 0,
        has_df: false,
    })
}

/// Finds the first fragment header of the IPv6 packet at `at`.
pub(super) fn fragment_header(bytes: &[u8], at: usize) -> Option<FragmentHeader> {
    let mut named_at = at + 6;
    let mut walk = ExtensionWalk { kind: *bytes.get(named_at)?, at: at + IPV6_BYTES };
    while walk.kind != FRAGMENT {
        if !is_followed(walk.kind) {
            return None;
        }
        named_at = walk.at;
        walk.pass(*field(bytes, walk.at)?);
    }
    Some(FragmentHeader { at: walk.at, named_at })
}

/// True if a first fragment ends before its upper-layer header does (RFC 7112, RFC 8200 section
/// 4.5), by the rules of the kernel's `ipv6frag_thdr_truncated`. `bytes` end with the packet.
fn lacks_transport_header(bytes: &[u8], at: usize) -> bool {
    let Some(&kind) = bytes.get(at + 6) else { return false };
    let mut walk = ExtensionWalk { kind, at: at + IPV6_BYTES };
    while is_followed(walk.kind) {
        if walk.kind == FRAGMENT && is_later(bytes, walk.at) {
            return false;
        }
        let Some(&first) = field(bytes, walk.at) else { return false };
        walk.pass(first);
    }
    let transport_len = match walk.kind {
        NO_NEXT_HEADER => return false,
        TCP => 20,
        UDP | ICMPV6 => 8,
        _ => 1,
    };
    walk.at + transport_len > bytes.len()
}

/// True for the extension headers that the kernel walks over (`ipv6_ext_hdr`).
fn is_followed(kind: u8) -> bool {
    matches!(kind, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION_OPTIONS)
}

/// True if the fragment header at `at` has a non-zero offset.
fn is_later(bytes: &[u8], at: usize) -> bool {
    field(bytes, at + 2).is_some_and(|&field| u16::from_be_bytes(field) & 0xfff8 != 0)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<&[u8; N]> {
    bytes.get(at..)?.first_chunk()
}

/// Converts a length of at most 65,535.
fn len_bytes(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Converts an offset. Headers end within the first 64 KiB of a frame, as IP packets are not
/// longer.
fn offset(at: usize) -> u16 {
    u16::try_from(at).unwrap_or(u16::MAX)
}
