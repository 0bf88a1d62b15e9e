//! Port unreachable messages, as sent by `icmp_send` and `icmp6_send`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use forebay_buf::{Frame, Pool};
use forebay_rx::packet::Packet;
use forebay_rx::parse::Network;
use forebay_rx::parse::checksum::Sum;

use super::icmp::{DEST_UNREACH, DEST_UNREACH_V6, HEADER_BYTES, ICMP, ICMPV6, describe};
use super::identity::Identity;
use super::link::{self, PacketType, turn_round};
use super::udp::UDP;
use super::{ipv4, ipv6};

/// Code of port unreachable.
const PORT_UNREACHABLE: u8 = 3;
const PORT_UNREACHABLE_V6: u8 = 4;
/// Largest error message over IPv4 (RFC 1812, section 4.3.2.3) and over IPv6 (RFC 4443, section
/// 2.4).
const IPV4_ERROR_BYTES: usize = 576;
const IPV6_ERROR_BYTES: usize = 1280;
/// Type of service of errors: internetwork control, plus the received packet's TOS bits (`RT_TOS`).
const INTERNETWORK_CONTROL: u8 = 0xc0;
const TOS_MASK: u8 = 0x1e;
const TTL: u8 = 64;
/// Mask of an IPv4 header's fragment offset.
const OFFSET_MASK: u16 = 0x1fff;

/// Destination of an error; `None` if the packet was multicast or broadcast, or its source is
/// invalid.
pub(super) fn recipient(packet: &Packet, on: &Identity) -> Option<IpAddr> {
    let is_to_us = link::addressed_to_host(packet, on) == Ok(PacketType::Host);
    let (source, destination) = (packet.view().source()?, packet.view().destination()?);
    let is_host = match source {
        IpAddr::V4(source) => is_host_v4(source, on),
        IpAddr::V6(source) => is_host_v6(source),
    };
    (is_to_us && is_host && on.is_own(destination)).then_some(source)
}

fn is_host_v4(source: Ipv4Addr, on: &Identity) -> bool {
    !(source.is_unspecified()
        || source.is_multicast()
        || source.is_loopback()
        || on.is_broadcast(source))
}

fn is_host_v6(source: Ipv6Addr) -> bool {
    !(source.is_unspecified() || source.is_multicast() || source.is_loopback())
}

/// Builds the port unreachable message for a packet. `None` if no frame is free.
pub(super) fn port_unreachable(packet: &Packet, on: &Identity, pool: &mut Pool) -> Option<Packet> {
    let start = usize::from(packet.headers.network_offset);
    let (link_header, quoted) = packet.frame.data().split_at_checked(start)?;
    let message = match packet.headers.network {
        Network::Ipv4 => over_ipv4(link_header, quoted, on, pool)?,
        Network::Ipv6 => over_ipv6(link_header, quoted, pool)?,
        Network::Other => return None,
    };
    let len = message.len_bytes();
    let mut error = Packet::received(message, packet.arrival, len, packet.headers.link);
    turn_round(error.frame.data_mut(), packet.headers.link, on);
    describe(&mut error);
    Some(error)
}

/// A datagram of ours that was answered by port unreachable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErrorRefusal {
    /// Address and port that the datagram was sent from.
    pub ours: (IpAddr, u16),
    /// Address and port that the datagram was sent to.
    pub theirs: (IpAddr, u16),
}

/// Datagram quoted by a port unreachable message with a valid checksum (`__udp4_lib_err`,
/// `__udp6_lib_err`). `None` for other messages.
pub(super) fn refused(message: &[u8], is_ipv6: bool) -> Option<ErrorRefusal> {
    let (&[kind, code, ..], quoted) = message.split_first_chunk::<HEADER_BYTES>()?;
    let (ours, theirs, ports): (IpAddr, IpAddr, _) = if is_ipv6 {
        let (source, destination) = ipv6::addresses(quoted)?;
        let &[.., next, _] = quoted.first_chunk::<8>()?;
        let is_so = (kind, code, next) == (DEST_UNREACH_V6, PORT_UNREACHABLE_V6, UDP);
        (source.into(), destination.into(), is_so.then(|| quoted.get(ipv6::FIXED_BYTES..))??)
    } else {
        let (source, destination) = ipv4::addresses(quoted)?;
        let &[first, _, _, _, _, _, flags, place, _, protocol] = quoted.first_chunk::<10>()?;
        // Only the first fragment has the ports.
        let is_first = u16::from_be_bytes([flags, place]) & OFFSET_MASK == 0;
        let is_so = (kind, code, protocol) == (DEST_UNREACH, PORT_UNREACHABLE, UDP) && is_first;
        let header_len = usize::from(first & 0xf) * 4;
        (source.into(), destination.into(), is_so.then(|| quoted.get(header_len..))??)
    };
    let &[source_high, source_low, high, low] = ports.first_chunk::<4>()?;
    Some(ErrorRefusal {
        ours: (ours, u16::from_be_bytes([source_high, source_low])),
        theirs: (theirs, u16::from_be_bytes([high, low])),
    })
}

fn over_ipv4(link_header: &[u8], quoted: &[u8], on: &Identity, pool: &mut Pool) -> Option<Frame> {
    const BEFORE: usize = ipv4::FIXED_BYTES + HEADER_BYTES;
    let (source, destination) = ipv4::addresses(quoted)?;
    let mtu = usize::try_from(on.mtu).unwrap_or(usize::MAX).max(BEFORE);
    let quoted = first(quoted, IPV4_ERROR_BYTES.min(mtu) - BEFORE);
    let mut header = [0; ipv4::FIXED_BYTES];
    let total_len = u16::try_from(BEFORE + quoted.len()).ok()?;
    let [version, tos, high, low, _, _, _, _, ttl, protocol, _, _, addresses @ ..] = &mut header;
    *version = 0x45;
    *tos = quoted.get(1)? & TOS_MASK | INTERNETWORK_CONTROL;
    [*high, *low] = total_len.to_be_bytes();
    (*ttl, *protocol) = (TTL, ICMP);
    let (from, to) = addresses.split_at_mut(4);
    from.copy_from_slice(&destination.octets());
    to.copy_from_slice(&source.octets());
    ipv4::sum_up(&mut header);
    let message = message(DEST_UNREACH, PORT_UNREACHABLE, quoted, Sum::default());
    written(&[link_header, &header, &message, quoted], pool)
}

fn over_ipv6(link_header: &[u8], quoted: &[u8], pool: &mut Pool) -> Option<Frame> {
    const BEFORE: usize = ipv6::FIXED_BYTES + HEADER_BYTES;
    let (source, destination) = ipv6::addresses(quoted)?;
    let quoted = first(quoted, IPV6_ERROR_BYTES - BEFORE);
    let mut header = [0; ipv6::FIXED_BYTES];
    let len = HEADER_BYTES + quoted.len();
    let [version, _, _, _, high, low, next, hops, addresses @ ..] = &mut header;
    *version = 0x60;
    [*high, *low] = u16::try_from(len).ok()?.to_be_bytes();
    (*next, *hops) = (ICMPV6, TTL);
    let (from, to) = addresses.split_at_mut(16);
    from.copy_from_slice(&destination.octets());
    to.copy_from_slice(&source.octets());
    let pseudo_sum = Sum::of(addresses).plus_len(len).plus_word(ICMPV6.into());
    let message = message(DEST_UNREACH_V6, PORT_UNREACHABLE_V6, quoted, pseudo_sum);
    written(&[link_header, &header, &message, quoted], pool)
}

/// Builds the ICMP header of a message that quotes `quoted`.
fn message(kind: u8, code: u8, quoted: &[u8], pseudo_sum: Sum) -> [u8; HEADER_BYTES] {
    let [a, b] =
        (!pseudo_sum.plus(Sum::of(&[kind, code])).plus(Sum::of(quoted)).fold()).to_be_bytes();
    [kind, code, a, b, 0, 0, 0, 0]
}

fn first(bytes: &[u8], len_max: usize) -> &[u8] {
    bytes.get(..len_max).unwrap_or(bytes)
}

/// Copies these parts into a new frame.
fn written(parts: &[&[u8]], pool: &mut Pool) -> Option<Frame> {
    let len = u32::try_from(parts.iter().map(|part| part.len()).sum::<usize>()).ok()?;
    let mut frame = pool.allocate(len)?;
    frame.set_len(len);
    let mut rest = frame.data_mut();
    for part in parts {
        let (to, behind) = rest.split_at_mut_checked(part.len())?;
        to.copy_from_slice(part);
        rest = behind;
    }
    Some(frame)
}
