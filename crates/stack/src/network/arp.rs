//! ARP (RFC 826, RFC 5227) as in the kernel's `arp_process`, on devices where the kernel does not
//! act for this host.

use std::net::{IpAddr, Ipv4Addr};

use forebay_buf::Pool;
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Headers, Link};

use super::neighbours::{NeighbourEvent, NeighbourObservation, Replaces};
use super::{Identity, NetworkDrop};

/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;

/// Accepted hardware and protocol types and address lengths: Ethernet or IEEE 802; IPv4; 6 and 4
/// bytes.
const KINDS: [[u8; 6]; 2] = [[0, 1, 8, 0, 6, 4], [0, 6, 8, 0, 6, 4]];
const REQUEST: [u8; 2] = [0, 1];
const REPLY: [u8; 2] = [0, 2];
const MESSAGE_BYTES: usize = 28;
const ETHERNET_BYTES: usize = 14;
const BROADCAST: [u8; 6] = [0xff; 6];

/// Fields of a message.
#[derive(Clone, Copy, Debug)]
struct ArpMessage {
    operation: [u8; 2],
    sender_mac: [u8; 6],
    sender: Ipv4Addr,
    target_mac: [u8; 6],
    target: Ipv4Addr,
}

/// Processes a message. A request for one of our addresses is turned into its answer in place.
/// `is_to_us` is true if the frame was sent to our own MAC address.
///
/// # Errors
/// If the message is invalid, or not one that a correct host would send.
pub fn receive(
    packet: &mut Packet,
    on: &Identity,
    is_to_us: bool,
) -> Result<NeighbourEvent, NetworkDrop> {
    if !on.is_whole_host {
        return Ok(NeighbourEvent::default()); // the kernel answers
    }
    let at = usize::from(packet.headers.network_offset);
    let message = packet.frame.data().get(at..).ok_or(NetworkDrop::PktTooSmall)?;
    let message = ArpMessage::read(message)?;
    // As in `arp_process`: nobody resolves a multicast or loopback address.
    if message.target.is_multicast() || message.target.is_loopback() {
        return Err(NetworkDrop::IpInvalidDest);
    }
    let is_request = message.operation == REQUEST;
    // Not for addresses of other interfaces, as with `arp_ignore` 1: behind a load balancer many hosts have its address.
    let is_for_us = is_request && on.is_on_device(message.target.into());
    if message.sender.is_unspecified() {
        // A probe before taking the address (RFC 5227): answer that it is ours.
        if is_for_us {
            answer(packet, at, &message, on);
        }
        return Ok(NeighbourEvent { sighting: None, is_answer: is_for_us });
    }
    // Not a host's address, or ours, or a multicast MAC: an entry for it would be forged.
    if !can_be_a_neighbour(message.sender, on) || message.sender_mac[0] & 1 != 0 {
        return Err(NetworkDrop::IpInvalidSource);
    }
    let is_announced = message.sender == message.target
        && (is_request || message.target_mac == message.sender_mac);
    let sighting = NeighbourObservation {
        address: message.sender.into(),
        mac: Some(message.sender_mac),
        is_welcome: is_for_us,
        replaces: if is_for_us || is_announced { Replaces::Now } else { Replaces::WhenSettled },
        // A broadcast reply does not show that the neighbour has received a frame from us.
        is_confirmed: !is_request && is_to_us,
    };
    if is_for_us {
        answer(packet, at, &message, on);
    }
    Ok(NeighbourEvent { sighting: Some(sighting), is_answer: is_for_us })
}

impl ArpMessage {
    fn read(bytes: &[u8]) -> Result<Self, NetworkDrop> {
        let message = bytes.get(..MESSAGE_BYTES).ok_or(NetworkDrop::PktTooSmall)?;
        let (kind, operation) = (field(message, 0), field(message, 6));
        if !KINDS.contains(&kind) || ![REQUEST, REPLY].contains(&operation) {
            return Err(NetworkDrop::UnhandledProto);
        }
        Ok(Self {
            operation,
            sender_mac: field(message, 8),
            sender: field::<4>(message, 14).into(),
            target_mac: field(message, 18),
            target: field::<4>(message, 24).into(),
        })
    }

    fn bytes(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..6].copy_from_slice(&KINDS[0]);
        bytes[6..8].copy_from_slice(&self.operation);
        bytes[8..14].copy_from_slice(&self.sender_mac);
        bytes[14..18].copy_from_slice(&self.sender.octets());
        bytes[18..24].copy_from_slice(&self.target_mac);
        bytes[24..28].copy_from_slice(&self.target.octets());
        bytes
    }
}

/// A field of a message that is long enough.
fn field<const N: usize>(message: &[u8], at: usize) -> [u8; N] {
    message.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N])
}

/// True if another host on the link can have this address.
fn can_be_a_neighbour(address: Ipv4Addr, on: &Identity) -> bool {
    let is_nobodys = address.octets()[0] == 0
        || address.is_loopback()
        || address.is_multicast()
        || on.is_broadcast(address);
    !is_nobodys && !on.is_own(address.into())
}

/// Turns a request into its answer, in place.
fn answer(packet: &mut Packet, at: usize, request: &ArpMessage, on: &Identity) {
    // A device without a MAC address has nothing to answer with.
    let Some(mac) = on.mac else { return };
    let reply = ArpMessage {
        operation: REPLY,
        sender_mac: mac,
        sender: request.target,
        target_mac: request.sender_mac,
        target: request.sender,
    };
    let len_bytes = u32::try_from(at + MESSAGE_BYTES).unwrap_or(u32::MAX);
    packet.frame.set_len(len_bytes.min(packet.frame.len_bytes()));
    let bytes = packet.frame.data_mut();
    if let Some(message) = bytes.get_mut(at..) {
        message.copy_from_slice(&reply.bytes());
    }
    if let Some([link_addresses @ .., _, _]) = bytes.first_chunk_mut::<ETHERNET_BYTES>() {
        let (destination, source) = link_addresses.split_at_mut(6);
        destination.copy_from_slice(&request.sender_mac);
        source.copy_from_slice(&mac);
    }
    packet.wire_len = packet.frame.len_bytes();
    packet.device_sum = None;
}

/// Builds a request for an address, broadcast or to the MAC address known so far. `None` if there
/// is no source address for it, or no free frame.
pub fn request(
    target: Ipv4Addr,
    lladdr: Option<[u8; 6]>,
    on: &Identity,
    pool: &mut Pool,
) -> Option<Packet> {
    let mac = on.mac?;
    let IpAddr::V4(sender) = on.source_towards(target.into())? else { return None };
    let message =
        ArpMessage { operation: REQUEST, sender_mac: mac, sender, target_mac: [0; 6], target };
    let to = lladdr.unwrap_or(BROADCAST);
    let ethertype = ETHERTYPE_ARP.to_be_bytes();
    let bytes = [&to, &mac, ethertype.as_slice(), &message.bytes()].concat();
    let len_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let mut frame = pool.allocate(len_bytes)?;
    frame.copy_from(&bytes);
    let mut packet = Packet::received(frame, Arrival(0), len_bytes, Link::Ethernet);
    packet.headers = Headers { network_offset: 14, ..packet.headers };
    Some(packet)
}
