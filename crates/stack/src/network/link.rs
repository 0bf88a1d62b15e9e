//! Link-layer addressing: the kernel's `eth_type_trans`, and its handling of priority tags in
//! `__netif_receive_skb_core`.

use forebay_rx::packet::Packet;
use forebay_rx::parse::{Headers, Link, Network, Verify, parse_into};

use super::drop::NetworkDrop;
use super::identity::Identity;

/// Length of the two addresses of an Ethernet header.
const MACS_BYTES: usize = 12;
/// Length of an Ethernet header without tags.
const ETHERNET_BYTES: usize = 14;
const TAG_BYTES: usize = 4;
const TAG_8021Q: [u8; 2] = [0x81, 0x00];
const TAG_8021AD: [u8; 2] = [0x88, 0xa8];
const VLAN_ID_HIGH: u8 = 0x0f;
const BROADCAST: [u8; 6] = [0xff; 6];
/// Bit of the first byte that marks a group address.
const GROUP: u8 = 1;

/// The kernel's `pkt_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PacketType {
    /// Sent to this host.
    Host,
    /// Sent to all hosts on the link.
    Broadcast,
    /// Sent to a group on the link.
    Multicast,
}

/// Determines the type of a frame by its destination. If a packet has more priority tags than
/// parsing walks over, the tags are stripped and the packet is parsed again.
///
/// # Errors
/// If the packet is not for this host, or of an unknown protocol.
pub(super) fn packet_type(packet: &mut Packet, on: &Identity) -> Result<PacketType, NetworkDrop> {
    if packet.headers.link == Link::Ip {
        let is_ip = packet.headers.network != Network::Other;
        return if is_ip { Ok(PacketType::Host) } else { Err(NetworkDrop::UnhandledProto) };
    }
    let network_offset = usize::from(packet.headers.network_offset);
    let is_tagged = network_offset != ETHERNET_BYTES || packet.headers.network == Network::Other;
    if is_tagged {
        let tags = priority_tags(packet.frame.data())?;
        if packet.headers.network == Network::Other && tags > 0 {
            strip(packet, tags);
        }
    }
    addressed_to(packet.frame.data(), on)
}

/// Type of a packet that [`packet_type`] accepted before.
pub(super) fn addressed_to_host(packet: &Packet, on: &Identity) -> Result<PacketType, NetworkDrop> {
    match packet.headers.link {
        Link::Ip => Ok(PacketType::Host),
        Link::Ethernet => addressed_to(packet.frame.data(), on),
    }
}

/// Swaps source and destination, so that the frame goes back to its sender.
pub(super) fn turn_round(bytes: &mut [u8], link: Link, on: &Identity) {
    if let (Link::Ethernet, Some(link_addresses)) = (link, bytes.first_chunk_mut::<MACS_BYTES>()) {
        let (to, from) = link_addresses.split_at_mut(6);
        to.swap_with_slice(from);
        if let Some(mac) = on.mac {
            from.copy_from_slice(&mac); // the destination may have been a group
        }
    }
}

fn addressed_to(bytes: &[u8], on: &Identity) -> Result<PacketType, NetworkDrop> {
    let Some(destination) = bytes.first_chunk::<6>() else { return Err(NetworkDrop::PktTooSmall) };
    match on.mac {
        Some(mac) if mac == *destination => Ok(PacketType::Host),
        _ if *destination == BROADCAST => Ok(PacketType::Broadcast),
        _ if destination[0] & GROUP != 0 => Ok(PacketType::Multicast),
        Some(_) => Err(NetworkDrop::Otherhost),
        None => Ok(PacketType::Host),
    }
}

/// Number of priority tags (VLAN 0) before the EtherType.
fn priority_tags(bytes: &[u8]) -> Result<usize, NetworkDrop> {
    let behind = bytes.get(MACS_BYTES..).ok_or(NetworkDrop::PktTooSmall)?;
    let mut tags = 0;
    for tag in behind.chunks(TAG_BYTES) {
        match *tag {
            [a, b, high, low] if [a, b] == TAG_8021Q || [a, b] == TAG_8021AD => {
                if high & VLAN_ID_HIGH != 0 || low != 0 {
                    return Err(NetworkDrop::Otherhost);
                }
                tags += 1;
            }
            // `skb_vlan_untag` pulls two bytes beyond the tag.
            [_, _] | [_, _, _] if tags > 0 => return Err(NetworkDrop::PktTooSmall),
            [high, low, ..] if u16::from_be_bytes([high, low]) < 0x0600 => {
                return Err(NetworkDrop::UnhandledProto); // 802.2: a length, not a type
            }
            [0x08, 0x00, ..] | [0x86, 0xdd, ..] | [0x08, 0x06, ..] => return Ok(tags),
            [_, _, ..] => return Err(NetworkDrop::UnhandledProto),
            _ => return Err(NetworkDrop::PktTooSmall),
        }
    }
    Err(NetworkDrop::PktTooSmall)
}

/// Removes tags from the link header, and parses the packet again.
#[cold]
fn strip(packet: &mut Packet, tags: usize) {
    let tags_bytes = tags * TAG_BYTES;
    let bytes = packet.frame.data_mut();
    if bytes.len() < MACS_BYTES + tags_bytes {
        return;
    }
    bytes.copy_within(..MACS_BYTES, tags_bytes);
    let gone = u32::try_from(tags_bytes).unwrap_or(0);
    packet.frame.pull(gone);
    packet.wire_len = packet.wire_len.saturating_sub(gone);
    packet.device_sum = None;
    packet.headers = Headers { device: packet.headers.device, ..Headers::default() };
    let bytes = packet.frame.data();
    parse_into(&mut packet.headers, bytes, packet.wire_len, None, Verify::Checksums);
}
