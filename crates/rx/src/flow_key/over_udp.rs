//! Headers behind UDP: tunnels by their ports, and connection IDs of QUIC.

use super::KeyRule;
use super::inside::{At, NextHeader, NumberOf, Step, follow, number, unannounced};
use super::layers::{Layer, Layers};
use super::rest::Rest;
use super::rules::{FlowKeyRules, KeyDepth};

/// Maximum number of extension headers of GTP-U that are walked over.
const GTPU_EXTENSIONS_MAX: usize = 8;

const UDP_HEADER_BYTES: usize = 8;

const PORT_GTPU: u16 = 2152;
const PORT_ESP: u16 = 4500;
const PORT_L2TP: u16 = 1701;
const PORT_VXLAN: u16 = 4789;
const PORT_VXLAN_GPE: u16 = 4790;
/// VXLAN port of Linux, from before IANA assigned one.
const PORT_VXLAN_LINUX: u16 = 8472;
const PORT_GENEVE: u16 = 6081;
const PORT_MPLS: u16 = 6635;

/// Goes inward behind a UDP header, which the rest begins with.
pub(super) fn udp<'a>(
    rest: Rest<'a>,
    rules: &FlowKeyRules,
    layers: &mut Layers,
) -> Option<Step<'a>> {
    let &[_, _, port_high, port_low, len_high, len_low, _, _] = rest.bytes.first_chunk()?;
    let port = u16::from_be_bytes([port_high, port_low]);
    // Bytes behind the datagram are not its payload, though within the IP packet (RFC 9868).
    let datagram = match u16::from_be_bytes([len_high, len_low]) {
        0 if rest.len() > usize::from(u16::MAX) => rest, // a jumbogram (RFC 2675, section 4)
        len => rest.first(len.into()),
    };
    let payload = datagram.behind(UDP_HEADER_BYTES)?;
    if let Some(quic) = rules.quic.filter(|quic| quic.has_port(port)) {
        layers.push(Layer::Quic)?;
        return quic_id(payload.bytes, quic.id_len_bytes()).map(Step::Connection);
    }
    if rules.depth != KeyDepth::Inner {
        return None;
    }
    let next = match port {
        PORT_GTPU => return gtpu(payload, rules.depth, layers),
        PORT_ESP if payload.bytes.starts_with(&[0; 4]) => return None, // IKE (RFC 3948)
        PORT_ESP => return number(payload.bytes, Layer::Esp, NumberOf::Esp, layers),
        PORT_L2TP => return l2tp(payload, rules.depth, layers),
        PORT_VXLAN | PORT_VXLAN_LINUX => NextHeader::Vxlan,
        PORT_VXLAN_GPE => NextHeader::VxlanGpe,
        PORT_GENEVE => NextHeader::Geneve,
        PORT_MPLS => NextHeader::Mpls,
        _ => return None,
    };
    follow((next, payload), rules.depth, layers).map(Step::Inner)
}

/// Rule for UDP packets to this port where the walk goes into every tunnel.
pub(super) fn rule_of_udp_port(port: u16) -> Option<KeyRule> {
    Some(match port {
        PORT_ESP => KeyRule::Esp,
        PORT_L2TP => KeyRule::L2tpv3,
        PORT_GTPU | PORT_VXLAN | PORT_VXLAN_LINUX | PORT_VXLAN_GPE | PORT_GENEVE | PORT_MPLS => {
            KeyRule::Inner
        }
        _ => return None,
    })
}

/// Connection ID chosen by the server, from a short header; a long header may still have the
/// client's choice. The fixed bit is not checked, because it may be greased (RFC 9287).
fn quic_id(payload: &[u8], len_bytes: usize) -> Option<&[u8]> {
    const LONG_HEADER: u8 = 0x80;
    let (first, rest) = payload.split_first()?;
    if first & LONG_HEADER != 0 {
        return None;
    }
    rest.get(..len_bytes)
}

/// Data message of L2TP over UDP, by its flags and version. Control messages name a connection.
fn l2tp<'a>(rest: Rest<'a>, depth: KeyDepth, layers: &mut Layers) -> Option<Step<'a>> {
    const IS_CONTROL: u8 = 0x80;
    const VERSION: u8 = 0x0f;
    let &[flags, version, ..] = rest.bytes.first_chunk::<4>()?;
    if flags & IS_CONTROL != 0 {
        return None;
    }
    match version & VERSION {
        2 => follow(l2tpv2(flags, rest)?, depth, layers).map(Step::Inner),
        // The session comes behind the flags, the version and two reserved bytes (RFC 3931, section
        // 4.1.2).
        3 => number(rest.bytes.get(4..)?, Layer::L2tpv3, NumberOf::L2tpv3, layers),
        _ => None,
    }
}

/// PPP frame in L2TPv2 (RFC 2661, section 3.1): the flags name the fields before it. It is no layer by
/// itself, as no word of `flowkey.csv` names it.
fn l2tpv2(flags: u8, rest: Rest<'_>) -> Option<At<'_>> {
    const HAS_LENGTH: u8 = 0x40;
    const HAS_SEQUENCE: u8 = 0x08;
    const HAS_OFFSET: u8 = 0x02;
    let (message, ids) = if flags & HAS_LENGTH == 0 {
        (rest, 2)
    } else {
        let &[_, _, high, low] = rest.bytes.first_chunk()?;
        (rest.first(u16::from_be_bytes([high, low]).into()), 4)
    };
    // Two numbers of the tunnel and its session, and two of the message.
    let behind = ids + if flags & HAS_SEQUENCE == 0 { 4 } else { 8 };
    let message = message.behind(behind)?;
    if flags & HAS_OFFSET == 0 {
        return Some((NextHeader::Ppp, message));
    }
    let (offset, message) = message.split()?;
    Some((NextHeader::Ppp, message.behind(u16::from_be_bytes(*offset).into())?))
}

pub(super) fn vxlan<'a>(rest: Rest<'a>, layers: &mut Layers) -> Option<At<'a>> {
    const HAS_VNI: u8 = 0x08;
    let (&[flags, ..], behind) = rest.split::<8>()?;
    // RFC 7348, section 5: the I flag marks a valid header.
    if flags & HAS_VNI == 0 {
        return None;
    }
    layers.push(Layer::Vxlan)?;
    Some((NextHeader::Ethernet, behind))
}

pub(super) fn vxlan_gpe<'a>(rest: Rest<'a>, layers: &mut Layers) -> Option<At<'a>> {
    const HAS_PROTOCOL: u8 = 0x04;
    const IS_OAM: u8 = 0x01;
    let (&[flags, _, _, protocol, ..], behind) = rest.split::<8>()?;
    layers.push(Layer::VxlanGpe)?;
    let next = match flags & (HAS_PROTOCOL | IS_OAM) {
        0 => NextHeader::Ethernet,
        HAS_PROTOCOL => NextHeader::of_protocol(protocol)?,
        _ => return None,
    };
    Some((next, behind))
}

pub(super) fn geneve<'a>(rest: Rest<'a>, depth: KeyDepth, layers: &mut Layers) -> Option<At<'a>> {
    const BASE_BYTES: usize = 8;
    let &[words, _, high, low] = rest.bytes.first_chunk()?;
    // RFC 8926, section 3.4: version 0, others are dropped.
    if words >> 6 != 0 {
        return None;
    }
    layers.push(Layer::Geneve)?;
    let next = NextHeader::of_tunnelled(u16::from_be_bytes([high, low]), depth)?;
    Some((next, rest.behind(BASE_BYTES + usize::from(words & 0x3f) * 4)?))
}

/// GTP-U. A message without an IP packet is identified by its tunnel endpoint ID, if that is not 0.
fn gtpu<'a>(rest: Rest<'a>, depth: KeyDepth, layers: &mut Layers) -> Option<Step<'a>> {
    const VERSION_AND_TYPE: u8 = 0xf0;
    const VERSION_1_GTP: u8 = 0x30;
    const G_PDU: u8 = 255;
    let (&[flags, kind, high, low, ref endpoint @ ..], behind) = rest.split::<8>()?;
    // TS 29.281, section 5.1: version 1, and protocol type GTP rather than GTP'.
    if flags & VERSION_AND_TYPE != VERSION_1_GTP {
        return None;
    }
    layers.push(Layer::Gtpu)?;
    let endpoint = u32::from_be_bytes(*endpoint);
    let len = usize::from(u16::from_be_bytes([high, low]));
    let behind = behind.first(len);
    let at = match gtpu_payload(flags, behind) {
        Some(payload) if kind == G_PDU => unannounced(payload),
        _ => None,
    };
    let level = at.and_then(|at| follow(at, depth, layers));
    let number = (endpoint != 0).then_some(Step::Number(NumberOf::Gtpu, endpoint));
    level.map(Step::Inner).or(number)
}

/// Payload behind GTP-U's optional fields and its extension headers.
fn gtpu_payload(flags: u8, rest: Rest<'_>) -> Option<Rest<'_>> {
    const OPTIONAL_FIELDS: u8 = 0x07;
    const HAS_EXTENSION: u8 = 0x04;
    if flags & OPTIONAL_FIELDS == 0 {
        return Some(rest);
    }
    let (&[.., mut kind], mut behind) = rest.split::<4>()?;
    if flags & HAS_EXTENSION == 0 {
        return Some(behind);
    }
    for _ in 0..GTPU_EXTENSIONS_MAX {
        if kind == 0 {
            return Some(behind);
        }
        let len = usize::from(*behind.bytes.first()?) * 4;
        let extension = behind.bytes.get(..len)?;
        (kind, behind) = (*extension.last()?, behind.behind(len)?);
    }
    (kind == 0).then_some(behind)
}
