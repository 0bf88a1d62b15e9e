//! Whether two segments have the same headers, but for what may differ between segments of one
//! packet.

use super::CoalesceMode;
use super::candidate::{FIN, IPV4_BYTES, IPV6_BYTES, PSH, TCP_BYTES, UDP_BYTES};
use super::refusal::Refusal;
use crate::packet::Packet;
use crate::parse::{Headers, Network, Transport};

const ETHERNET_BYTES: usize = 14;
const TIMESTAMPS_BYTES: usize = 12;
const DONT_FRAGMENT: usize = 6;

/// The bits of a word that must agree, from its bytes as they lie in memory.
const fn mask(bytes: [u8; 8]) -> u64 {
    u64::from_ne_bytes(bytes)
}

/// All but the total length and the id; all but the checksum.
const IPV4_MASKS: [u64; 2] =
    [mask([!0, !0, 0, 0, 0, 0, !0, !0]), mask([!0, !0, 0, 0, !0, !0, !0, !0])];
/// All but the payload length.
const IPV6_MASK: u64 = mask([!0, !0, !0, !0, 0, 0, !0, !0]);
/// The ports, not the sequence number; not what ends a packet; not the checksum. Of UDP, ports only.
const PORTS_MASK: u64 = mask([!0, !0, !0, !0, 0, 0, 0, 0]);
const GRO_MASK: u64 = mask([!0, !0, !0, !0, !0, !(PSH | FIN), !0, !0]);
/// Neither acknowledgement nor window.
const LRO_MASK: u64 = mask([0, 0, 0, 0, !0, !(PSH | FIN), 0, 0]);

/// Compares the headers of two candidates. Sequence numbers, lengths and ids are told apart
/// elsewhere.
pub(super) fn same_headers(first: &Packet, next: &Packet, mode: CoalesceMode) -> bool {
    let headers = &first.headers;
    let len = usize::from(headers.payload_offset);
    if next.headers.payload_offset != headers.payload_offset || next.headers.link != headers.link {
        return false;
    }
    let (Some(a), Some(b)) = (first.frame.data().get(..len), next.frame.data().get(..len)) else {
        return false;
    };
    // Equal link headers have the network header at the same place, equal network headers the
    // transport's, so these offsets are both packets'.
    let (Some((a_link, a)), Some((b_link, b))) =
        (split(a, headers.network_offset.into()), split(b, headers.network_offset.into()))
    else {
        return false;
    };
    let network_len = usize::from(headers.transport_offset) - usize::from(headers.network_offset);
    let (Some((a_network, a)), Some((b_network, b))) =
        (split(a, network_len), split(b, network_len))
    else {
        return false;
    };
    same_link(a_link, b_link)
        && match headers.network {
            Network::Ipv4 => same_ipv4(a_network, b_network),
            Network::Ipv6 => same_ipv6(a_network, b_network),
            Network::Other => false,
        }
        && match headers.transport {
            Transport::Tcp => same_tcp(a, b, mode),
            Transport::Udp => same_udp(a, b),
            Transport::Icmp | Transport::Other => false,
        }
}

fn split(bytes: &[u8], at: usize) -> Option<(&[u8], &[u8])> {
    bytes.split_at_checked(at)
}

fn same_link(a: &[u8], b: &[u8]) -> bool {
    // Mostly these are as long as this, and compared in two loads.
    match (<&[u8; ETHERNET_BYTES]>::try_from(a), <&[u8; ETHERNET_BYTES]>::try_from(b)) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

fn same_ipv4(a: &[u8], b: &[u8]) -> bool {
    let (Ok(a), Ok(b)) = (<&[u8; IPV4_BYTES]>::try_from(a), <&[u8; IPV4_BYTES]>::try_from(b))
    else {
        return false;
    };
    let differ = |at| word(a, at) ^ word(b, at);
    let destination = u32::from_ne_bytes([a[16], a[17], a[18], a[19]])
        ^ u32::from_ne_bytes([b[16], b[17], b[18], b[19]]);
    differ(0) & IPV4_MASKS[0] | differ(8) & IPV4_MASKS[1] | u64::from(destination) == 0
}

fn same_ipv6(a: &[u8], b: &[u8]) -> bool {
    let (Some((a, a_options)), Some((b, b_options))) =
        (a.split_first_chunk::<IPV6_BYTES>(), b.split_first_chunk::<IPV6_BYTES>())
    else {
        return false;
    };
    let differ = |at| word(a, at) ^ word(b, at);
    let addresses = differ(8) | differ(16) | differ(24) | differ(32);
    differ(0) & IPV6_MASK | addresses == 0 && a_options == b_options
}

fn same_tcp(a: &[u8], b: &[u8], mode: CoalesceMode) -> bool {
    let (Some((a, a_options)), Some((b, b_options))) =
        (a.split_first_chunk::<TCP_BYTES>(), b.split_first_chunk::<TCP_BYTES>())
    else {
        return false;
    };
    let differ = |at| word(a, at) ^ word(b, at);
    let mask = if mode == CoalesceMode::Gro { GRO_MASK } else { LRO_MASK };
    let urgent = u64::from(a[18] ^ b[18] | a[19] ^ b[19]);
    differ(0) & PORTS_MASK | differ(8) & mask | urgent == 0
        && (mode == CoalesceMode::Lro || same_options(a_options, b_options))
}

fn same_options(a: &[u8], b: &[u8]) -> bool {
    match (<&[u8; TIMESTAMPS_BYTES]>::try_from(a), <&[u8; TIMESTAMPS_BYTES]>::try_from(b)) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

fn same_udp(a: &[u8], b: &[u8]) -> bool {
    let (Some(a), Some(b)) = (a.first_chunk::<UDP_BYTES>(), b.first_chunk::<UDP_BYTES>()) else {
        return false;
    };
    (word(a, 0) ^ word(b, 0)) & PORTS_MASK == 0
}

/// Eight bytes of a header as they lie in memory.
fn word<const N: usize>(header: &[u8; N], at: usize) -> u64 {
    header[at..].first_chunk().copied().map_or(0, u64::from_ne_bytes)
}

/// Names the first difference between headers that are not the same.
#[cold]
pub(super) fn difference(first: &Packet, next: &Packet, mode: CoalesceMode) -> Refusal {
    let (a, b) = (first.view(), next.view());
    let is_flow = a.address_bytes() == b.address_bytes()
        && a.port_bytes() == b.port_bytes()
        && first.headers.transport == next.headers.transport;
    let link = |packet: &Packet| packet.headers.network_offset.into();
    if !is_flow {
        Refusal::OtherFlow
    } else if a.bytes().get(..link(first)) != b.bytes().get(..link(next)) {
        Refusal::LinkHeader
    } else if a.ttl() != b.ttl() {
        Refusal::Ttl
    } else if traffic_class(first) != traffic_class(next) {
        Refusal::Tos
    } else if network_rest(first) != network_rest(next) {
        Refusal::IpHeader
    } else {
        tcp_difference(first, next, mode)
    }
}

fn tcp_difference(first: &Packet, next: &Packet, mode: CoalesceMode) -> Refusal {
    let header = |packet: &Packet| -> Option<[u8; TCP_BYTES]> {
        packet.frame.data().get(packet.headers.transport_offset.into()..)?.first_chunk().copied()
    };
    let (Some(a), Some(b)) = (header(first), header(next)) else { return Refusal::OtherFlow };
    if mode == CoalesceMode::Gro && a[8..12] != b[8..12] {
        Refusal::Acknowledgement
    } else if mode == CoalesceMode::Gro && a[14..16] != b[14..16] {
        Refusal::Window
    } else if a[12] & 0xf0 != b[12] & 0xf0 {
        Refusal::OtherOptions
    } else if (a[13] ^ b[13]) & !(PSH | FIN) != 0 || a[12] != b[12] || a[18..] != b[18..] {
        Refusal::OtherFlags
    } else {
        Refusal::OtherOptions
    }
}

/// IPv4's type of service, IPv6's traffic class.
fn traffic_class(packet: &Packet) -> Option<u8> {
    let Headers { network, network_offset, .. } = packet.headers;
    let &[first, second] = packet.frame.data().get(network_offset.into()..)?.first_chunk()?;
    Some(if network == Network::Ipv4 { second } else { first << 4 | second >> 4 })
}

/// What is left to differ in the network header: don't-fragment; flow label, extension headers.
fn network_rest(packet: &Packet) -> Option<(&[u8], &[u8])> {
    let Headers { network, network_offset, transport_offset, .. } = packet.headers;
    let header = packet.frame.data().get(network_offset.into()..transport_offset.into())?;
    match network {
        Network::Ipv4 => Some((header.get(DONT_FRAGMENT..DONT_FRAGMENT + 2)?, &[])),
        _ => Some((header.get(1..4)?, header.get(IPV6_BYTES..)?)),
    }
}
