//! Neighbour discovery (RFC 4861) as in the kernel's `net/ipv6/ndisc.c`, on devices where the
//! kernel does not act for this host. Answers and sends solicitations, and learns from
//! solicitations and advertisements. Router discovery is not included.

use std::net::{IpAddr, Ipv6Addr};

use forebay_buf::{Frame, Pool};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{Headers, Link, Verify, parse_into};

use super::identity::ALL_NODES;
use super::neighbours::{NeighbourEvent, NeighbourObservation, Replaces};
use super::{Identity, NetworkDrop, Prefix};

/// ICMPv6 type of a solicitation.
pub const SOLICITATION: u8 = 135;
/// ICMPv6 type of an advertisement.
pub const ADVERTISEMENT: u8 = 136;

/// Hop limit of all messages: a packet forwarded by a router cannot have it.
const HOP_LIMIT: u8 = 255;

const ICMPV6: u8 = 58;
const ETHERNET_BYTES: usize = 14;
const IPV6_BYTES: usize = 40;
/// Length of a message without options.
const MESSAGE_BYTES: usize = 24;
const OPTION_BYTES: usize = 8;
const SOURCE_STATION: u8 = 1;
const TARGET_STATION: u8 = 2;
/// Flags of an advertisement.
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// A parsed message.
#[derive(Clone, Copy, Debug)]
struct NdiscMessage {
    kind: u8,
    flags: u8,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    target: Ipv6Addr,
    /// Link-layer address from the option that belongs to this type of message.
    lladdr: Option<[u8; 6]>,
    /// Source MAC address of the frame.
    came_from: Option<[u8; 6]>,
}

/// Processes a solicitation or an advertisement: an ICMPv6 message at `at`, with a valid checksum,
/// which extends to the end of the frame. A solicitation for one of our addresses is turned into
/// its answer in place.
///
/// # Errors
/// If the message is invalid, or not one that a correct host would send.
pub fn receive(
    packet: &mut Packet,
    at: usize,
    on: &Identity,
) -> Result<NeighbourEvent, NetworkDrop> {
    if !on.is_whole_host {
        return Ok(NeighbourEvent::default()); // the kernel answers
    }
    let message = NdiscMessage::read(packet, at)?;
    match message.kind {
        SOLICITATION => solicited(packet, &message, on),
        _ => advertised(&message, on),
    }
}

/// `ndisc_recv_ns`.
fn solicited(
    packet: &mut Packet,
    message: &NdiscMessage,
    on: &Identity,
) -> Result<NeighbourEvent, NetworkDrop> {
    let NdiscMessage { source, destination, target, lladdr, came_from, .. } = *message;
    // Duplicate address detection: the sender is about to take the address.
    let is_probe = source.is_unspecified();
    if is_probe {
        let group = Prefix { address: target.into(), bits: 128 }.solicited_node();
        if group != Some(destination) || lladdr.is_some() {
            // RFC 4861, section 7.1.1: a probe goes to the solicited-node group, without the
            // option.
            return Err(NetworkDrop::IpInvalidSource);
        }
    }
    // Not for addresses of other interfaces.
    if !on.is_on_device(target.into()) {
        return Ok(NeighbourEvent::default());
    }
    let back_to = lladdr.or(came_from);
    let is_to_group = destination.is_multicast();
    let answer = Advertisement {
        target,
        to: if is_probe { ALL_NODES } else { source },
        lladdr: if is_probe { Some(group_lladdr(ALL_NODES)) } else { back_to },
        flags: if is_probe { OVERRIDE } else { SOLICITED | if is_to_group { OVERRIDE } else { 0 } },
        with_lladdr: is_to_group,
    };
    answer.put(packet, on)?;
    let sighting = NeighbourObservation {
        address: source.into(),
        mac: lladdr,
        is_welcome: true,
        replaces: Replaces::Now,
        is_confirmed: false,
    };
    let is_known = !is_probe && can_be_a_neighbour(source, on);
    Ok(NeighbourEvent { sighting: is_known.then_some(sighting), is_answer: true })
}

/// `ndisc_recv_na`.
fn advertised(message: &NdiscMessage, on: &Identity) -> Result<NeighbourEvent, NetworkDrop> {
    let NdiscMessage { flags, destination, target, lladdr, .. } = *message;
    let is_solicited = flags & SOLICITED != 0;
    if is_solicited && destination.is_multicast() {
        // RFC 4861, section 7.1.2: a solicited advertisement is never multicast.
        return Err(NetworkDrop::IpInvalidDest);
    }
    let sighting = NeighbourObservation {
        address: target.into(),
        mac: lladdr,
        is_welcome: false,
        replaces: if flags & OVERRIDE != 0 { Replaces::Now } else { Replaces::Never },
        is_confirmed: is_solicited,
    };
    let is_neighbours = can_be_a_neighbour(target, on);
    Ok(NeighbourEvent { sighting: is_neighbours.then_some(sighting), is_answer: false })
}

fn can_be_a_neighbour(address: Ipv6Addr, on: &Identity) -> bool {
    let is_nobodys = address.is_unspecified() || address.is_multicast() || address.is_loopback();
    !is_nobodys && !on.is_own(address.into())
}

impl NdiscMessage {
    fn read(packet: &Packet, at: usize) -> Result<Self, NetworkDrop> {
        let bytes = packet.frame.data();
        let network_offset = usize::from(packet.headers.network_offset);
        let fixed: &[u8; IPV6_BYTES] = field(bytes, network_offset)?;
        let &[kind, code, _, _, flags, ..]: &[u8; MESSAGE_BYTES] = field(bytes, at)?;
        if fixed[7] != HOP_LIMIT || code != 0 {
            // RFC 4861, section 7.1: from beyond the link, or of an unknown code.
            return Err(NetworkDrop::IpInhdr);
        }
        let address = |at| field::<16>(bytes, at).map(|&address| Ipv6Addr::from(address));
        let target = address(at + 8)?;
        if target.is_multicast() {
            return Err(NetworkDrop::IpInvalidDest);
        }
        let wanted = if kind == SOLICITATION { SOURCE_STATION } else { TARGET_STATION };
        let options = bytes.get(at + MESSAGE_BYTES..).unwrap_or_default();
        let came_from = match packet.headers.link {
            Link::Ethernet => field(bytes, 6).ok().copied(),
            Link::Ip => None,
        };
        Ok(Self {
            kind,
            flags,
            source: address(network_offset + 8)?,
            destination: address(network_offset + 24)?,
            target,
            lladdr: lladdr(options, wanted)?,
            came_from,
        })
    }
}

/// Link-layer address in the option of type `wanted`; if there are several, the first one
/// (`ndisc_parse_options`).
fn lladdr(mut options: &[u8], wanted: u8) -> Result<Option<[u8; 6]>, NetworkDrop> {
    let mut found = None;
    while !options.is_empty() {
        let [kind, len, ..] = *options else { return Err(NetworkDrop::PktTooSmall) };
        let len = usize::from(len) * OPTION_BYTES;
        let option = options.get(..len).filter(|option| !option.is_empty());
        let option = option.ok_or(NetworkDrop::PktTooSmall)?;
        if kind == wanted && found.is_none() {
            let &[_, _, ref mac @ ..] =
                <&[u8; OPTION_BYTES]>::try_from(option).map_err(|_| NetworkDrop::PktTooSmall)?;
            found = Some(*mac);
        }
        options = options.get(len..).unwrap_or_default();
    }
    Ok(found.filter(|mac| mac[0] & 1 == 0))
}

/// An advertisement of one of our addresses.
#[derive(Clone, Copy, Debug)]
struct Advertisement {
    target: Ipv6Addr,
    to: Ipv6Addr,
    lladdr: Option<[u8; 6]>,
    flags: u8,
    with_lladdr: bool,
}

impl Advertisement {
    /// Writes the advertisement over the packet that solicited it.
    fn put(&self, packet: &mut Packet, on: &Identity) -> Result<(), NetworkDrop> {
        let header = [ADVERTISEMENT, 0, 0, 0, self.flags, 0, 0, 0];
        let mut message = [header.as_slice(), &self.target.octets()].concat();
        if let (Some(mac), true) = (on.mac, self.with_lladdr) {
            message.extend([TARGET_STATION, 1]);
            message.extend(mac);
        }
        let Headers { link, network_offset, .. } = packet.headers;
        let at = usize::from(network_offset);
        let len = at + IPV6_BYTES + message.len();
        if len > packet.frame.room_mut().len() {
            return Err(NetworkDrop::Nomem);
        }
        packet.frame.set_len(u32::try_from(len).unwrap_or(u32::MAX));
        let bytes = packet.frame.data_mut();
        if let Some(ip) = bytes.get_mut(at..) {
            ip.copy_from_slice(&in_ipv6(&message, self.target, self.to));
        }
        if let (Some(to), Some(from), Link::Ethernet) = (self.lladdr, on.mac, link)
            && let Some([link_addresses @ .., _, _]) = bytes.first_chunk_mut::<ETHERNET_BYTES>()
        {
            let (destination, source) = link_addresses.split_at_mut(6);
            destination.copy_from_slice(&to);
            source.copy_from_slice(&from);
        }
        noted(packet);
        Ok(())
    }
}

/// Builds a solicitation for a neighbour, to its solicited-node group or to the MAC address known
/// so far. `None` if there is no source address for it, or no free frame.
pub fn solicitation(
    target: Ipv6Addr,
    lladdr: Option<[u8; 6]>,
    on: &Identity,
    pool: &mut Pool,
) -> Option<Packet> {
    let mac = on.mac?;
    let IpAddr::V6(source) = on.source_towards(target.into())? else { return None };
    let group = Prefix { address: target.into(), bits: 128 }.solicited_node()?;
    let to = if lladdr.is_some() { target } else { group };
    let header = [SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
    let option = [SOURCE_STATION, 1];
    let message = [header.as_slice(), &target.octets(), &option, &mac].concat();
    let link_addresses = [lladdr.unwrap_or(group_lladdr(group)), mac].concat();
    let bytes = [link_addresses.as_slice(), &[0x86, 0xdd], &in_ipv6(&message, source, to)].concat();
    let len_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let mut frame: Frame = pool.allocate(len_bytes)?;
    frame.copy_from(&bytes);
    let mut packet = Packet::received(frame, Arrival(0), len_bytes, Link::Ethernet);
    noted(&mut packet);
    Some(packet)
}

/// An IPv6 header followed by the message, with its checksum filled in.
fn in_ipv6(message: &[u8], source: Ipv6Addr, destination: Ipv6Addr) -> Vec<u8> {
    // Lossless: a message with one option.
    let payload_len = u16::try_from(message.len()).unwrap_or(u16::MAX).to_be_bytes();
    let fixed = [0x60, 0, 0, 0, payload_len[0], payload_len[1], ICMPV6, HOP_LIMIT];
    let addresses = [source.octets(), destination.octets()].concat();
    let pseudo = Sum::of(&addresses).plus_word(ICMPV6.into()).plus_len(message.len());
    let sum = !pseudo.plus(Sum::of(message)).fold();
    let mut bytes = [fixed.as_slice(), &addresses, message].concat();
    if let Some(field) = bytes.get_mut(IPV6_BYTES + 2..IPV6_BYTES + 4) {
        field.copy_from_slice(&sum.to_be_bytes());
    }
    bytes
}

/// MAC address of a multicast group (RFC 2464, section 7).
fn group_lladdr(group: Ipv6Addr) -> [u8; 6] {
    let [.., a, b, c, d] = group.octets();
    [0x33, 0x33, a, b, c, d]
}

/// Parses the packet again after its bytes were rewritten.
fn noted(packet: &mut Packet) {
    packet.wire_len = packet.frame.len_bytes();
    packet.device_sum = None;
    packet.set_gso_size(0);
    packet.headers = Headers { link: packet.headers.link, ..Headers::default() };
    let Packet { frame, headers, wire_len, .. } = packet;
    parse_into(headers, frame.data(), *wire_len, None, Verify::Checksums);
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<&[u8; N], NetworkDrop> {
    bytes.get(at..).and_then(<[u8]>::first_chunk).ok_or(NetworkDrop::PktTooSmall)
}
