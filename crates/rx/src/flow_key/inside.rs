//! Walk from one IP header to the next inner one, through the headers of tunnels.

use super::layers::{Layer, Layers};
use super::level::Level;
use super::over_udp::{geneve, udp, vxlan, vxlan_gpe};
use super::rest::Rest;
use super::rules::{FlowKeyRules, KeyDepth};
use super::{KeyRule, WALKED_BYTES_MAX};
use crate::parse::checksum::Sum;
use crate::parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, Link, Network, link_layer};

/// Maximum number of labels of an MPLS stack that are walked over.
const MPLS_LABELS_MAX: usize = 16;

/// Maximum number of label stacks in one another, in pseudowires, that are looked through for an IP
/// header.
const LABEL_STACKS_MAX: usize = 4;

/// Least length of Ethernet's payload: shorter packets are padded.
const ETHERNET_PAYLOAD_LEAST: usize = 46;

/// Length of Ethernet's trailer, the frame check sequence, which some captures contain.
const ETHERNET_TRAILER_BYTES: usize = 4;

/// First byte of multicast addresses, which are not sources.
const IPV6_MULTICAST: u8 = 0xff;

/// PPPoE version 1, type 1, code 0: session data (RFC 2516, section 4).
const PPPOE_SESSION: [u8; 2] = [0x11, 0];
const PPPOE_BYTES: usize = 6;

const ETHERTYPE_BRIDGED: u16 = 0x6558;
const ETHERTYPE_PPPOE_SESSION: u16 = 0x8864;
const ETHERTYPE_MPLS: u16 = 0x8847;
const ETHERTYPE_MPLS_MULTICAST: u16 = 0x8848;
const ETHERTYPE_NSH: u16 = 0x894f;
const ETHERTYPE_PPP: u16 = 0x880b;
/// ERSPAN without a header of its own (type I), or with one of eight bytes (type II).
const ETHERTYPE_ERSPAN: u16 = 0x88be;
/// ERSPAN with a header of twelve bytes (type III).
const ETHERTYPE_ERSPAN_III: u16 = 0x22eb;

const IPIP: u8 = 4;
const IPV6: u8 = 41;
const GRE: u8 = 47;
const ESP: u8 = 50;
const ETHERIP: u8 = 97;
const L2TP: u8 = 115;
const MPLS_IN_IP: u8 = 137;
/// Ethernet frame, as in segment routing (RFC 8986, section 10.1).
const ETHERNET: u8 = 143;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const UDP: u8 = 17;

/// Contents behind an IP header.
pub(super) enum Step<'a> {
    /// Another IP header.
    Inner(Level<'a>),
    /// Packet quoted by an ICMP error, in the direction in which it was sent.
    Quoted(Level<'a>),
    /// Number that distinguishes flows between two hosts.
    Number(NumberOf, u32),
    /// Connection ID of QUIC.
    Connection(&'a [u8]),
}

/// Header that holds a [`Step::Number`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NumberOf {
    /// Security parameters index.
    Esp,
    /// Session ID.
    L2tpv3,
    /// Tunnel endpoint ID of a message without an IP packet.
    Gtpu,
}

/// Header that comes next.
#[derive(Clone, Copy)]
pub(super) enum NextHeader {
    Ethernet,
    Ip(Network),
    Gre,
    Ppp,
    Pppoe,
    Mpls,
    Nsh,
    Vxlan,
    VxlanGpe,
    Geneve,
}

/// Next header, and the rest that begins with it.
pub(super) type At<'a> = (NextHeader, Rest<'a>);

/// Goes one step inward. `None` if the rules stop at this header, or nothing readable follows.
pub(super) fn step<'a>(
    level: &Level<'a>,
    rules: &FlowKeyRules,
    layers: &mut Layers,
) -> Option<Step<'a>> {
    if level.headers.network == Network::Other {
        let link = link_layer(level.rest.bytes, level.headers.link);
        let next = NextHeader::of_ethertype(link.ethertype?, rules.depth)?;
        let rest = level.rest.seen(WALKED_BYTES_MAX).behind(link.network_offset.into())?;
        return follow((next, rest), rules.depth, layers).map(Step::Inner);
    }
    let (protocol, rest) = (level.headers.protocol, level.payload()?);
    if protocol == UDP {
        return udp(rest, rules, layers);
    }
    let at = match (rules.depth, protocol) {
        (KeyDepth::Outer, _) => return None,
        (_, IPIP) => {
            layers.push(Layer::Ipip)?;
            (NextHeader::Ip(Network::Ipv4), rest)
        }
        (_, IPV6) => {
            layers.push(Layer::SixInFour)?;
            (NextHeader::Ip(Network::Ipv6), rest)
        }
        (_, GRE) => (NextHeader::Gre, rest),
        (_, ESP) => return number(rest.bytes, Layer::Esp, NumberOf::Esp, layers),
        (_, L2TP) => return number(rest.bytes, Layer::L2tpv3, NumberOf::L2tpv3, layers),
        (_, ICMP | ICMPV6) => {
            let at = quoted(rest, level.headers.network, protocol)?;
            return follow(at, rules.depth, layers).map(Step::Quoted);
        }
        (KeyDepth::Inner, MPLS_IN_IP) => (NextHeader::Mpls, rest),
        (KeyDepth::Inner, ETHERNET) => (NextHeader::Ethernet, rest),
        (KeyDepth::Inner, ETHERIP) => (NextHeader::Ethernet, etherip(rest)?),
        _ => return None,
    };
    follow(at, rules.depth, layers).map(Step::Inner)
}

/// Rule of the packets of a protocol for which [`step`] goes further inward, other than UDP.
pub(super) fn rule_of_protocol(protocol: u8, depth: KeyDepth) -> Option<KeyRule> {
    match (depth, protocol) {
        (KeyDepth::Outer, _) => None,
        (_, IPIP | IPV6 | GRE) => Some(KeyRule::Inner),
        (_, ESP) => Some(KeyRule::Esp),
        (_, L2TP) => Some(KeyRule::L2tpv3),
        (_, ICMP | ICMPV6) => Some(KeyRule::Icmp),
        (KeyDepth::Inner, MPLS_IN_IP | ETHERNET | ETHERIP) => Some(KeyRule::Inner),
        _ => None,
    }
}

/// Follows headers to the next IP header. Every header except Ethernet and PPP adds a layer, and
/// those two are followed by one that does, so the number of layers bounds the walk.
pub(super) fn follow<'a>(
    mut at: At<'a>,
    depth: KeyDepth,
    layers: &mut Layers,
) -> Option<Level<'a>> {
    loop {
        let (next, rest) = at;
        at = match next {
            NextHeader::Ip(network) => return ip(rest, network),
            NextHeader::Ethernet => {
                let link = link_layer(rest.bytes, Link::Ethernet);
                match link.ethertype? {
                    ETHERTYPE_IPV4 | ETHERTYPE_IPV6 => return Level::inner(rest, Link::Ethernet),
                    other => {
                        let behind = rest.behind(link.network_offset.into())?;
                        (NextHeader::of_ethertype(other, depth)?, behind)
                    }
                }
            }
            NextHeader::Gre => gre(rest, depth, layers)?,
            NextHeader::Ppp => ppp(rest, depth)?,
            NextHeader::Pppoe => pppoe(rest, layers)?,
            NextHeader::Mpls => mpls(rest, layers)?,
            NextHeader::Nsh => nsh(rest, layers)?,
            NextHeader::Vxlan => vxlan(rest, layers)?,
            NextHeader::VxlanGpe => vxlan_gpe(rest, layers)?,
            NextHeader::Geneve => geneve(rest, depth, layers)?,
        };
    }
}

impl NextHeader {
    fn of_ethertype(ethertype: u16, depth: KeyDepth) -> Option<Self> {
        Some(match (depth, ethertype) {
            (KeyDepth::Outer, _) => return None,
            (_, ETHERTYPE_IPV4) => Self::Ip(Network::Ipv4),
            (_, ETHERTYPE_IPV6) => Self::Ip(Network::Ipv6),
            (_, ETHERTYPE_PPPOE_SESSION) => Self::Pppoe,
            (KeyDepth::Inner, ETHERTYPE_MPLS | ETHERTYPE_MPLS_MULTICAST) => Self::Mpls,
            (KeyDepth::Inner, ETHERTYPE_NSH) => Self::Nsh,
            _ => return None,
        })
    }

    /// Header announced by an EtherType in a tunnel, where there is one for Ethernet, too.
    pub(super) fn of_tunnelled(ethertype: u16, depth: KeyDepth) -> Option<Self> {
        match ethertype {
            ETHERTYPE_BRIDGED => Some(Self::Ethernet),
            other => Self::of_ethertype(other, depth),
        }
    }

    /// Header announced by the "next protocol" of VXLAN-GPE or of a network service header.
    pub(super) fn of_protocol(protocol: u8) -> Option<Self> {
        Some(match protocol {
            1 => Self::Ip(Network::Ipv4),
            2 => Self::Ip(Network::Ipv6),
            3 => Self::Ethernet,
            4 => Self::Nsh,
            5 => Self::Mpls,
            _ => return None,
        })
    }
}

/// Level of an IP header, if it has the announced version.
fn ip(rest: Rest<'_>, network: Network) -> Option<Level<'_>> {
    let level = Level::inner(rest, Link::Ip)?;
    (level.headers.network == network).then_some(level)
}

/// Packet quoted by an ICMP error, behind the error's eight bytes (RFC 792, RFC 4443).
fn quoted(rest: Rest<'_>, network: Network, protocol: u8) -> Option<At<'_>> {
    let (&[kind, ..], quoted) = rest.split::<8>()?;
    match (network, protocol, kind) {
        // Unreachable, source quench, redirect, time exceeded, parameter problem.
        (Network::Ipv4, ICMP, 3 | 4 | 5 | 11 | 12) | (Network::Ipv6, ICMPV6, 1..=4) => {
            Some((NextHeader::Ip(network), quoted))
        }
        _ => None,
    }
}

/// Number at the start of a header. 0 means none: an L2TPv3 control message, which has its
/// connection ID elsewhere, or a reserved SPI.
pub(super) fn number<'a>(
    bytes: &'a [u8],
    layer: Layer,
    of: NumberOf,
    layers: &mut Layers,
) -> Option<Step<'a>> {
    let number = u32::from_be_bytes(*bytes.first_chunk()?);
    layers.push(layer)?;
    (number != 0).then_some(Step::Number(of, number))
}

/// Frame in Ethernet over IP (RFC 3378), behind a version and reserved bits.
fn etherip(rest: Rest<'_>) -> Option<Rest<'_>> {
    let (&[version, _], frame) = rest.split()?;
    (version >> 4 == 3).then_some(frame)
}

fn gre<'a>(rest: Rest<'a>, depth: KeyDepth, layers: &mut Layers) -> Option<At<'a>> {
    const CHECKSUM: u8 = 0x80;
    const ROUTING: u8 = 0x40;
    const KEY: u8 = 0x20;
    const SEQUENCE: u8 = 0x10;
    const ACKNOWLEDGMENT: u8 = 0x80;
    const ERSPAN_II_BYTES: usize = 8;
    let &[flags, version, high, low] = rest.bytes.first_chunk()?;
    let protocol = u16::from_be_bytes([high, low]);
    let four = |is_there: bool| if is_there { 4 } else { 0 };
    let sequence = four(flags & SEQUENCE != 0);
    let (next, len) = match version & 0x07 {
        0 if flags & ROUTING == 0 => {
            let is_nvgre = flags & (CHECKSUM | KEY | SEQUENCE) == KEY;
            let is_nvgre = is_nvgre && protocol == ETHERTYPE_BRIDGED;
            layers.push(if is_nvgre { Layer::Nvgre } else { Layer::Gre })?;
            let len = 4 + four(flags & CHECKSUM != 0) + four(flags & KEY != 0) + sequence;
            let (next, header) = match (depth, protocol) {
                // Type II has a sequence number and a header of its own, type I has neither.
                (KeyDepth::Inner, ETHERTYPE_ERSPAN) => {
                    (NextHeader::Ethernet, if sequence == 0 { 0 } else { ERSPAN_II_BYTES })
                }
                (KeyDepth::Inner, ETHERTYPE_ERSPAN_III) => {
                    (NextHeader::Ethernet, erspan_iii(rest.behind(len)?)?)
                }
                (KeyDepth::Inner, ETHERTYPE_PPP) => (NextHeader::Ppp, 0),
                _ => (NextHeader::of_tunnelled(protocol, depth)?, 0),
            };
            (next, len + header)
        }
        1 if flags & KEY != 0 && protocol == ETHERTYPE_PPP => {
            layers.push(Layer::Gre)?;
            (NextHeader::Ppp, 8 + sequence + four(version & ACKNOWLEDGMENT != 0))
        }
        _ => return None,
    };
    Some((next, rest.behind(len)?))
}

/// Length of the header of ERSPAN type III, with the platform's part if there is one
/// (draft-foschiano-erspan, section 4.3).
fn erspan_iii(rest: Rest<'_>) -> Option<usize> {
    const HAS_PLATFORM: u8 = 1;
    let &[.., flags] = rest.bytes.first_chunk::<12>()?;
    Some(if flags & HAS_PLATFORM == 0 { 12 } else { 20 })
}

/// PPP (RFC 1661), with or without the address and control fields, the protocol in one byte or two.
fn ppp(rest: Rest<'_>, depth: KeyDepth) -> Option<At<'_>> {
    let rest = if rest.bytes.starts_with(&[0xff, 0x03]) { rest.behind(2)? } else { rest };
    let (protocol, behind) = match rest.bytes {
        [short, ..] if short & 1 == 1 => (u16::from(*short), rest.behind(1)?),
        [high, low, ..] => (u16::from_be_bytes([*high, *low]), rest.behind(2)?),
        _ => return None,
    };
    let next = match (protocol, depth) {
        (0x0021, _) => NextHeader::Ip(Network::Ipv4),
        (0x0057, _) => NextHeader::Ip(Network::Ipv6),
        (0x0281 | 0x0283, KeyDepth::Inner) => NextHeader::Mpls,
        _ => return None,
    };
    Some((next, behind))
}

fn pppoe<'a>(rest: Rest<'a>, layers: &mut Layers) -> Option<At<'a>> {
    let (&[version, code, _, _, high, low], behind) = rest.split::<PPPOE_BYTES>()?;
    if [version, code] != PPPOE_SESSION {
        return None;
    }
    layers.push(Layer::Pppoe)?;
    let len = usize::from(u16::from_be_bytes([high, low]));
    Some((NextHeader::Ppp, behind.first(len)))
}

/// Stack of labels. Its payload is recognized by the first bits (RFC 4928): IP, or the control word
/// of a pseudowire (RFC 4385), of which those of Ethernet are followed.
fn mpls<'a>(rest: Rest<'a>, layers: &mut Layers) -> Option<At<'a>> {
    layers.push(Layer::Mpls)?;
    behind_labels(rest, LABEL_STACKS_MAX - 1)
}

/// Header behind a stack of labels, looked for in this many further stacks.
fn behind_labels(rest: Rest<'_>, stacks: usize) -> Option<At<'_>> {
    const BOTTOM: u8 = 1;
    let mut behind = rest;
    for _ in 0..MPLS_LABELS_MAX {
        let (&[_, _, bits, _], rest) = behind.split()?;
        behind = rest;
        if bits & BOTTOM != 0 {
            return recognized(behind, stacks).or_else(|| pseudowire(behind, stacks));
        }
    }
    None
}

/// Ethernet frame behind a pseudowire's control word, which has four zero bits, flags and a number
/// (RFC 4448, section 4.6).
fn pseudowire(rest: Rest<'_>, stacks: usize) -> Option<At<'_>> {
    let (&[first, ..], frame) = rest.split::<4>()?;
    (first >> 4 == 0 && holds_ethernet(frame, stacks)).then_some((NextHeader::Ethernet, frame))
}

/// Header at the beginning of bytes that no field describes: an Ethernet frame with an IP packet,
/// perhaps behind PPPoE or MPLS, or an IP packet. The first four bits alone prove nothing, since a MAC address may begin with them
/// (RFC 4928, RFC 8469): each packet of a flow would then have a key of its own.
pub(super) fn unannounced(rest: Rest<'_>) -> Option<At<'_>> {
    recognized(rest, LABEL_STACKS_MAX)
}

fn recognized(rest: Rest<'_>, stacks: usize) -> Option<At<'_>> {
    if holds_ethernet(rest, stacks) {
        Some((NextHeader::Ethernet, rest))
    } else if is_ipv4(rest) {
        Some((NextHeader::Ip(Network::Ipv4), rest))
    } else if is_ipv6(rest) {
        Some((NextHeader::Ip(Network::Ipv6), rest))
    } else {
        None
    }
}

/// True if the rest begins with a consistent IPv4 header: its checksum is right, or the packet ends
/// where the rest does. The sender's device may compute the checksum after a capture.
fn is_ipv4(rest: Rest<'_>) -> bool {
    let Some(&[first, _, high, low]) = rest.bytes.first_chunk() else { return false };
    let header_len = usize::from(first & 0x0f) * 4;
    let total_len = usize::from(u16::from_be_bytes([high, low]));
    let Some(header) = rest.bytes.get(..header_len) else { return false };
    first >> 4 == 4
        && header_len >= 20
        && total_len >= header_len
        && (ends_at(rest, total_len) || Sum::of(header).fold() == u16::MAX)
}

/// True if the rest begins with a consistent IPv6 header: a hop limit, a source that may send, and a
/// packet that ends where the rest does.
fn is_ipv6(rest: Rest<'_>) -> bool {
    let Some(&[first, _, _, _, high, low, _, hop_limit, source, ..]) =
        rest.bytes.first_chunk::<40>()
    else {
        return false;
    };
    let end = 40 + usize::from(u16::from_be_bytes([high, low]));
    first >> 4 == 6 && hop_limit > 0 && source != IPV6_MULTICAST && ends_at(rest, end)
}

/// True if a packet of this length is all of the rest, except for a frame's padding and its trailer. This holds for all
/// packets of a flow or for none, whatever their size, and however much of them was captured.
fn ends_at(rest: Rest<'_>, len: usize) -> bool {
    let trailing =
        |rest_len: usize| rest_len == len || (len..=ETHERNET_PAYLOAD_LEAST).contains(&rest_len);
    trailing(rest.len()) || rest.len().checked_sub(ETHERNET_TRAILER_BYTES).is_some_and(trailing)
}

/// True if the rest begins with a PPPoE header of session data that ends where the rest does, with an IP packet in it,
/// perhaps behind labels in at most this many stacks.
fn is_pppoe(rest: Rest<'_>, stacks: usize) -> bool {
    let Some((&[version, code, _, _, high, low], behind)) = rest.split::<PPPOE_BYTES>() else {
        return false;
    };
    let len = usize::from(u16::from_be_bytes([high, low]));
    let is_session = [version, code] == PPPOE_SESSION && ends_at(rest, PPPOE_BYTES + len);
    is_session
        && match ppp(behind.first(len), KeyDepth::Inner) {
            Some((NextHeader::Ip(Network::Ipv4), packet)) => is_ipv4(packet),
            Some((NextHeader::Ip(Network::Ipv6), packet)) => is_ipv6(packet),
            Some((NextHeader::Mpls, labels)) => {
                stacks > 0 && behind_labels(labels, stacks - 1).is_some()
            }
            _ => false,
        }
}

/// True if the rest is an Ethernet frame with an IP packet, perhaps behind PPPoE, or behind labels
/// in at most this many stacks.
fn holds_ethernet(rest: Rest<'_>, stacks: usize) -> bool {
    let link = link_layer(rest.bytes, Link::Ethernet);
    let Some(behind) = rest.behind(link.network_offset.into()) else { return false };
    match link.ethertype {
        Some(ETHERTYPE_IPV4) => is_ipv4(behind),
        Some(ETHERTYPE_IPV6) => is_ipv6(behind),
        Some(ETHERTYPE_PPPOE_SESSION) => is_pppoe(behind, stacks),
        Some(ETHERTYPE_MPLS | ETHERTYPE_MPLS_MULTICAST) => {
            stacks > 0 && behind_labels(behind, stacks - 1).is_some()
        }
        _ => false,
    }
}

fn nsh<'a>(rest: Rest<'a>, layers: &mut Layers) -> Option<At<'a>> {
    const BASE_BYTES: usize = 8;
    let &[version, words, _, protocol] = rest.bytes.first_chunk()?;
    let len = usize::from(words & 0x3f) * 4;
    // RFC 8300, section 2.2: version 0; the length includes the base header.
    if version >> 6 != 0 || len < BASE_BYTES {
        return None;
    }
    layers.push(Layer::Nsh)?;
    Some((NextHeader::of_protocol(protocol)?, rest.behind(len)?))
}
