//! Reception of ICMP and ICMPv6: checksums, counters, and echo.

use std::net::{IpAddr, Ipv6Addr};

use forebay_rx::packet::Packet;
use forebay_rx::parse::checksum::{Sum, judge};
use forebay_rx::parse::{Checksum, Headers, Verify, parse_into};

use super::counters::IcmpCounters;
use super::drop::NetworkDrop;
use super::identity::Identity;
use super::ipv4;
use super::link::turn_round;

/// Protocol number of ICMP.
pub(super) const ICMP: u8 = 1;
/// Protocol number of ICMPv6.
pub(super) const ICMPV6: u8 = 58;

pub(super) const DEST_UNREACH: u8 = 3;
pub(super) const DEST_UNREACH_V6: u8 = 1;
const ECHO: u8 = 8;
const ECHO_REPLY: u8 = 0;
const ECHO_V6: u8 = 128;
const ECHO_REPLY_V6: u8 = 129;
const TIMESTAMP: u8 = 13;
/// Highest defined type (`NR_ICMP_TYPES`).
const LAST_TYPE: u8 = 18;
pub(super) const HEADER_BYTES: usize = 8;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const DEFAULT_TTL: u8 = 64;

/// A received message.
#[derive(Clone, Copy, Debug)]
pub(super) struct IcmpMessage<'a> {
    /// Bytes from the ICMP header to the end of the IP packet.
    pub(super) bytes: &'a [u8],
    /// Sum of the ICMPv6 pseudo-header: addresses, length and protocol.
    pub(super) pseudo_sum: Sum,
    /// True if the packet was sent to a multicast or broadcast address.
    pub(super) is_to_many: bool,
}

/// Action that a message calls for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EchoAsked {
    Echo,
    /// None: the message is only counted.
    Nothing,
}

/// `icmp_rcv`.
pub(super) fn receive(
    message: &IcmpMessage<'_>,
    counters: &IcmpCounters,
) -> Result<EchoAsked, NetworkDrop> {
    let kind = judged(message, counters)?;
    let wrong = |reason| {
        counters.in_errors.add(1);
        Err(reason)
    };
    match kind {
        // `icmp_echo_ignore_broadcasts`: an answer to all would amplify a spoofed request.
        ECHO | TIMESTAMP if message.is_to_many => return wrong(NetworkDrop::IpInvalidDest),
        ECHO => {
            counters.in_echos.add(1);
            return Ok(EchoAsked::Echo);
        }
        ECHO_REPLY => counters.in_echo_reps.add(1),
        DEST_UNREACH => counters.in_dest_unreachs.add(1),
        11 => counters.in_time_excds.add(1),
        12 => counters.in_parm_probs.add(1),
        // RFC 1122, section 3.2.2: an unknown type is discarded silently.
        _ if kind > LAST_TYPE => return wrong(NetworkDrop::UnhandledProto),
        _ => {}
    }
    Ok(EchoAsked::Nothing)
}

/// `icmpv6_rcv`.
pub(super) fn receive_v6(
    message: &IcmpMessage<'_>,
    counters: &IcmpCounters,
) -> Result<EchoAsked, NetworkDrop> {
    match judged(message, counters)? {
        ECHO_V6 => {
            counters.in_echos.add(1);
            return Ok(EchoAsked::Echo);
        }
        ECHO_REPLY_V6 => counters.in_echo_reps.add(1),
        DEST_UNREACH_V6 => counters.in_dest_unreachs.add(1),
        2 => counters.in_pkt_too_bigs.add(1),
        3 => counters.in_time_excds.add(1),
        4 => counters.in_parm_probs.add(1),
        _ => {}
    }
    Ok(EchoAsked::Nothing)
}

/// Validates length and checksum. Returns the ICMP type.
fn judged(message: &IcmpMessage<'_>, counters: &IcmpCounters) -> Result<u8, NetworkDrop> {
    counters.in_msgs.add(1);
    if judge(message.pseudo_sum.plus(Sum::of(message.bytes))) == Checksum::Bad {
        counters.in_csum_errors.add(1);
        counters.in_errors.add(1);
        return Err(NetworkDrop::IcmpCsum);
    }
    let Some(&[kind, ..]) = message.bytes.first_chunk::<HEADER_BYTES>() else {
        counters.in_errors.add(1);
        return Err(NetworkDrop::PktTooSmall);
    };
    Ok(kind)
}

/// Turns an echo request into its reply, in place: without IP options or extension headers. The
/// message begins at `offset`. Returns false if no reply is possible.
pub(super) fn echo(packet: &mut Packet, offset: usize, on: &Identity) -> bool {
    let replied = match packet.headers.network {
        forebay_rx::parse::Network::Ipv4 => echo_v4(packet, offset),
        forebay_rx::parse::Network::Ipv6 => echo_v6(packet, offset, on),
        forebay_rx::parse::Network::Other => None,
    };
    if replied.is_none() {
        return false;
    }
    turn_round(packet.frame.data_mut(), packet.headers.link, on);
    describe(packet);
    true
}

/// Parses the packet again after it was rewritten.
pub(super) fn describe(packet: &mut Packet) {
    let Packet { frame, headers, wire_len, device_sum, .. } = packet;
    (*wire_len, *device_sum) = (frame.len_bytes(), None);
    *headers = Headers { link: headers.link, ..Headers::default() };
    parse_into(headers, frame.data(), *wire_len, None, Verify::Nothing);
}

fn echo_v4(packet: &mut Packet, offset: usize) -> Option<()> {
    let start = move_header(packet, offset, IPV4_BYTES)?;
    let (header, message) =
        packet.frame.data_mut().get_mut(start..)?.split_first_chunk_mut::<IPV4_BYTES>()?;
    let len = u16::try_from(IPV4_BYTES + message.len()).ok()?;
    let [first, _, high, low, _, _, flags, place, ttl, _, _, _, addresses @ ..] = header;
    let (source, destination) = addresses.split_at_mut(4);
    source.swap_with_slice(destination);
    [*high, *low] = len.to_be_bytes();
    (*first, *flags, *place, *ttl) = (0x45, 0, 0, DEFAULT_TTL);
    ipv4::sum_up(header);
    reply(message, ECHO_REPLY, Sum::default())
}

fn echo_v6(packet: &mut Packet, offset: usize, on: &Identity) -> Option<()> {
    let start = move_header(packet, offset, IPV6_BYTES)?;
    let (header, message) =
        packet.frame.data_mut().get_mut(start..)?.split_first_chunk_mut::<IPV6_BYTES>()?;
    let len = u16::try_from(message.len()).ok()?;
    let [first, class, flow_high, flow_low, high, low, next, hops, addresses @ ..] = header;
    (*first, *class, *flow_high, *flow_low) = (*first & 0x6f, *class & 0xf0, 0, 0);
    [*high, *low] = len.to_be_bytes();
    (*next, *hops) = (ICMPV6, DEFAULT_TTL);
    let (source, destination) = addresses.split_at_mut(16);
    source.swap_with_slice(destination);
    // A request to a group is answered from a unicast address.
    let asked = Ipv6Addr::from(*source.first_chunk::<16>()?);
    let asker = Ipv6Addr::from(*destination.first_chunk::<16>()?);
    if asker.is_unspecified() {
        // No address to reply to.
        return None;
    }
    if asked.is_multicast() {
        source.copy_from_slice(&own_towards(asker, on)?.octets());
    }
    let pseudo = Sum::of(addresses).plus_len(message.len()).plus_word(ICMPV6.into());
    reply(message, ECHO_REPLY_V6, pseudo)
}

/// Changes a message's type, and updates the checksum.
fn reply(message: &mut [u8], to_kind: u8, pseudo_sum: Sum) -> Option<()> {
    let [kind, _, sum @ ..] = message.first_chunk_mut::<4>()?;
    (*kind, *sum) = (to_kind, [0; 2]);
    let total = !pseudo_sum.plus(Sum::of(message)).fold();
    let [_, _, sum @ ..] = message.first_chunk_mut::<4>()?;
    *sum = total.to_be_bytes();
    Some(())
}

/// Source address for a reply to `asker`: one in the same subnet, else one of the same scope.
fn own_towards(asker: Ipv6Addr, on: &Identity) -> Option<Ipv6Addr> {
    let own = |prefix: &super::Prefix| match prefix.address {
        IpAddr::V6(address) => Some((*prefix, address)),
        IpAddr::V4(_) => None,
    };
    let is_link_local = |address: &Ipv6Addr| address.is_unicast_link_local();
    let mut ours = on.addresses.iter().filter_map(own);
    let near = ours.clone().find(|(prefix, _)| prefix.contains(asker.into()));
    near.or_else(|| ours.find(|(_, own)| is_link_local(own) == is_link_local(&asker)))
        .map(|(_, own)| own)
}

/// Moves the link header and the fixed IP header up to the message at `offset`, and drops the bytes
/// in front. Returns the offset of the IP header.
fn move_header(packet: &mut Packet, offset: usize, fixed_bytes: usize) -> Option<usize> {
    let start = usize::from(packet.headers.network_offset);
    let between = offset.checked_sub(start + fixed_bytes)?;
    if between > 0 && offset <= packet.frame.data().len() {
        packet.frame.data_mut().copy_within(..start + fixed_bytes, between);
        packet.frame.pull(u32::try_from(between).ok()?);
    }
    Some(start)
}
