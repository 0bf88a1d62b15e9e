//! IPv6 extension headers and their options, as in the kernel's `exthdrs.c`.

use forebay_rx::parse::extension::{
    DESTINATION_OPTIONS, ExtensionWalk, FRAGMENT, HOP_BY_HOP, NO_NEXT_HEADER, ROUTING,
};

use super::counters::IpCounters;
use super::drop::NetworkDrop;
use super::ipv6::{FIXED_BYTES, Ipv6};
use super::link::PacketType;

/// Reserved bits of a fragment header's offset field.
const RESERVED_BITS: u8 = 0x06;
/// Upper bound on the options of one header, padding not counted: `max_hbh_opts_number` and
/// `max_dst_opts_number`.
const OPTIONS_MAX: u32 = 8;
/// Upper bound on consecutive bytes of padding, which aligns to at most 8 bytes.
const PADDING_MAX: usize = 7;

/// Result of walking the extension headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Walked {
    /// Reached the header of a protocol, behind that of a fragment or not.
    Protocol { protocol: u8, offset: usize, was_fragment: bool },
    /// Reached the header of a fragment.
    Fragment,
}

/// State of a packet before the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ExtensionProgress {
    pub(super) packet_type: PacketType,
    /// True if the packet was reassembled from fragments: a second fragment header is then invalid.
    pub(super) was_fragment: bool,
}

/// Walks from the header that [`Ipv6`] found to the protocol's header. `packet` begins with the
/// fixed header, and ends where the payload does.
pub(super) fn walk(
    packet: &[u8],
    ipv6: &Ipv6,
    mut progress: ExtensionProgress,
    counters: &IpCounters,
) -> Result<Walked, NetworkDrop> {
    let mut walk = ExtensionWalk { kind: ipv6.next, at: ipv6.offset };
    let wrong = |reason| {
        counters.in_hdr_errors.add(1);
        Err(reason)
    };
    loop {
        let offset = walk.at;
        match walk.kind {
            DESTINATION_OPTIONS => {
                let Some(header) = walk.take(packet) else {
                    return wrong(NetworkDrop::Ipv6BadExthdr);
                };
                if let Err(reason) = options(packet, offset, header, OptionsHeader::Destination) {
                    return wrong(reason);
                }
            }
            ROUTING => {
                let Some(header) = walk.take(packet) else {
                    return wrong(NetworkDrop::Ipv6BadExthdr);
                };
                routing(packet, header, progress.packet_type, counters)?;
            }
            FRAGMENT if progress.was_fragment => return wrong(NetworkDrop::Ipv6BadExthdr),
            FRAGMENT => {
                counters.reasm_reqds.add(1);
                let (false, Some(&[_, _, high, low, ..])) = (ipv6.has_no_len, walk.take(packet))
                else {
                    return wrong(NetworkDrop::Ipv6BadExthdr);
                };
                if high != 0 || low & !RESERVED_BITS != 0 {
                    return Ok(Walked::Fragment);
                }
                counters.reasm_oks.add(1);
                progress.was_fragment = true;
            }
            // No payload follows, by intent (RFC 8200, section 4.7).
            NO_NEXT_HEADER => {
                counters.in_delivers.add(1);
                return Err(NetworkDrop::IpNoproto);
            }
            protocol => {
                let was_fragment = progress.was_fragment;
                return Ok(Walked::Protocol { protocol, offset, was_fragment });
            }
        }
    }
}

/// Validates the hop-by-hop options after the fixed header. Returns the next header and its offset.
pub(super) fn hop_by_hop(packet: &[u8], ipv6: &Ipv6) -> Result<(u8, usize), NetworkDrop> {
    let bytes = packet.get(..ipv6.total_len).unwrap_or_default();
    let mut walk = ExtensionWalk { kind: HOP_BY_HOP, at: FIXED_BYTES };
    let header = walk.take(bytes).ok_or(NetworkDrop::IpInhdr)?;
    options(packet, FIXED_BYTES, header, OptionsHeader::HopByHop { ipv6 })?;
    Ok((walk.kind, walk.at))
}

/// The header that the options belong to.
#[derive(Clone, Copy)]
enum OptionsHeader<'a> {
    HopByHop { ipv6: &'a Ipv6 },
    Destination,
}

/// Validates the options of a header at `offset` in the packet (`ip6_parse_tlv`).
fn options(
    packet: &[u8],
    offset: usize,
    header: &[u8],
    whose: OptionsHeader<'_>,
) -> Result<(), NetworkDrop> {
    const PAD_1: u8 = 0;
    const PAD_N: u8 = 1;
    let mut rest = header.get(2..).unwrap_or_default();
    let (mut padding, mut count) = (0, 0);
    loop {
        let at = offset + header.len() - rest.len();
        let option = match *rest {
            [] => return Ok(()),
            [PAD_1, ..] => rest.get(..1),
            [_] => None,
            [_, len, ..] => rest.get(..usize::from(len) + 2),
        };
        let option = option.ok_or(NetworkDrop::IpInhdr)?;
        match *option {
            [PAD_1] => padding += 1,
            [PAD_N, _, ref zeros @ ..] => {
                padding += option.len();
                if zeros.iter().any(|byte| *byte != 0) {
                    return Err(NetworkDrop::IpInhdr);
                }
            }
            _ => {
                count += 1;
                if count > OPTIONS_MAX {
                    return Err(NetworkDrop::IpInhdr);
                }
                match whose {
                    OptionsHeader::HopByHop { ipv6 } => {
                        hop_by_hop_option(packet, at, option, ipv6)?;
                    }
                    OptionsHeader::Destination => unknown_option(option)?,
                }
                padding = 0;
            }
        }
        if padding > PADDING_MAX {
            return Err(NetworkDrop::IpInhdr);
        }
        rest = rest.get(option.len()..).unwrap_or_default();
    }
}

/// Validates a hop-by-hop option at `at`.
fn hop_by_hop_option(
    packet: &[u8],
    at: usize,
    option: &[u8],
    ipv6: &Ipv6,
) -> Result<(), NetworkDrop> {
    const ROUTER_ALERT: u8 = 5;
    const CALIPSO: u8 = 7;
    const IOAM: u8 = 49;
    const JUMBO: u8 = 194;
    match *option {
        [ROUTER_ALERT, 2, ..] => Ok(()),
        // CALIPSO needs a domain of interpretation, and none is configured.
        [ROUTER_ALERT | CALIPSO, ..] => Err(NetworkDrop::IpInhdr),
        // IOAM data must be aligned to 4 bytes.
        [IOAM, ..] if !at.is_multiple_of(4) => Err(NetworkDrop::IpInhdr),
        [JUMBO, 4, a, b, c, d] if at % 4 == 2 && ipv6.has_no_len => {
            let len = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            // No packet here is longer than 65,535 bytes, so a jumbo length that is valid exceeds
            // this packet.
            let is_needed = len > usize::from(u16::MAX);
            let is_short = len > packet.len().saturating_sub(FIXED_BYTES);
            Err(if is_needed && is_short { NetworkDrop::PktTooSmall } else { NetworkDrop::IpInhdr })
        }
        [JUMBO, ..] => Err(NetworkDrop::IpInhdr),
        _ => unknown_option(option),
    }
}

/// Accepts or rejects an unknown option by the two highest bits of its type.
fn unknown_option(option: &[u8]) -> Result<(), NetworkDrop> {
    match option.first() {
        Some(0..=0x3f) => Ok(()),
        // The highest bits are not 00: the packet is to be discarded (RFC 8200, section 4.2).
        _ => Err(NetworkDrop::UnhandledProto),
    }
}

/// Accepts a routing header at its final destination (`ipv6_rthdr_rcv`). RPL and segment routing
/// are not enabled.
fn routing(
    packet: &[u8],
    header: &[u8],
    packet_type: PacketType,
    counters: &IpCounters,
) -> Result<(), NetworkDrop> {
    const RPL: u8 = 3;
    const SEGMENT_ROUTING: u8 = 4;
    const MULTICAST: u8 = 0xff;
    if packet.get(24) == Some(&MULTICAST) || packet_type != PacketType::Host {
        counters.in_addr_errors.add(1);
        return Err(NetworkDrop::Ipv6BadExthdr);
    }
    match *header {
        [_, _, RPL | SEGMENT_ROUTING, ..] => Err(NetworkDrop::Ipv6BadExthdr),
        [_, _, _, 0, ..] => Ok(()),
        _ => {
            counters.in_hdr_errors.add(1);
            Err(NetworkDrop::Ipv6BadExthdr)
        }
    }
}
