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
/// Code of a packet that must not be fragmented, and type of one that is too big over IPv6.
const FRAGMENTATION_NEEDED: u8 = 4;
const PACKET_TOO_BIG_V6: u8 = 2;
/// Next header of a fragment over IPv6, and mask of its offset.
const FRAGMENT: u8 = 44;
const OFFSET_MASK_V6: u16 = 0xfff8;
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

/// A datagram of ours that was too large for a link of its path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DatagramTooBig {
    /// Addresses and ports of the datagram.
    pub flow: ErrorRefusal,
    /// Largest packet that the link takes, as the router claims.
    pub mtu_bytes: u32,
}

/// Error about a datagram of ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DatagramError {
    Refused(ErrorRefusal),
    TooBig(DatagramTooBig),
}

/// Datagram quoted by an error with a valid checksum (`__udp4_lib_err`, `__udp6_lib_err`): of port unreachable, and of a
/// packet that was too big, unless it was no larger than the link takes. `None` for other messages.
pub(super) fn quoted(message: &[u8], is_ipv6: bool) -> Option<DatagramError> {
    let (&[kind, code, _, _, m0, m1, m2, m3], quoted) =
        message.split_first_chunk::<HEADER_BYTES>()?;
    let (ours, theirs, ports, len_bytes): (IpAddr, IpAddr, _, u32) = if is_ipv6 {
        let (source, destination) = ipv6::addresses(quoted)?;
        let &[_, _, _, _, high, low, next, _] = quoted.first_chunk::<8>()?;
        let len_bytes = ipv6::FIXED_BYTES + usize::from(u16::from_be_bytes([high, low]));
        let behind = quoted.get(ipv6::FIXED_BYTES..)?;
        let ports = ports_v6(next, behind)?;
        (source.into(), destination.into(), ports, u32::try_from(len_bytes).ok()?)
    } else {
        let (source, destination) = ipv4::addresses(quoted)?;
        let &[first, _, high, low, _, _, flags, place, _, protocol] = quoted.first_chunk::<10>()?;
        // Only the first fragment has the ports.
        let is_first = u16::from_be_bytes([flags, place]) & OFFSET_MASK == 0;
        let header_len = usize::from(first & 0xf) * 4;
        let ports = quoted.get(header_len..).filter(|_| protocol == UDP && is_first)?;
        (source.into(), destination.into(), ports, u16::from_be_bytes([high, low]).into())
    };
    let &[source_high, source_low, high, low] = ports.first_chunk::<4>()?;
    let flow = ErrorRefusal {
        ours: (ours, u16::from_be_bytes([source_high, source_low])),
        theirs: (theirs, u16::from_be_bytes([high, low])),
    };
    let mtu_bytes = match (is_ipv6, kind, code) {
        (false, DEST_UNREACH, PORT_UNREACHABLE) | (true, DEST_UNREACH_V6, PORT_UNREACHABLE_V6) => {
            return Some(DatagramError::Refused(flow));
        }
        (false, DEST_UNREACH, FRAGMENTATION_NEEDED) => u16::from_be_bytes([m2, m3]).into(),
        (true, PACKET_TOO_BIG_V6, _) => u32::from_be_bytes([m0, m1, m2, m3]),
        _ => return None,
    };
    (len_bytes > mtu_bytes).then_some(DatagramError::TooBig(DatagramTooBig { flow, mtu_bytes }))
}

/// UDP header behind an IPv6 header, or behind that of a first fragment of ours.
fn ports_v6(next: u8, behind: &[u8]) -> Option<&[u8]> {
    if next == UDP {
        return Some(behind);
    }
    let (&[of_fragment, _, high, low, ..], behind) = behind.split_first_chunk::<8>()?;
    let is_first = u16::from_be_bytes([high, low]) & OFFSET_MASK_V6 == 0;
    (next == FRAGMENT && of_fragment == UDP && is_first).then_some(behind)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Error that quotes a datagram from port 53 to port 9, of this length and its headers.
    fn error(kind: u8, code: u8, mtu_bytes: u32, len_bytes: u16, fragment: Option<u16>) -> Vec<u8> {
        let mut message = vec![kind, code, 0, 0];
        message.extend(mtu_bytes.to_be_bytes());
        let is_ipv6 =
            kind == PACKET_TOO_BIG_V6 || code == PORT_UNREACHABLE_V6 && kind == DEST_UNREACH_V6;
        if is_ipv6 {
            let next = if fragment.is_some() { FRAGMENT } else { UDP };
            message.extend([0x60, 0, 0, 0]);
            message.extend((len_bytes - 40).to_be_bytes());
            message.extend([next, 64]);
            message.extend([[0xfd; 16], [0xfe; 16]].as_flattened());
            if let Some(place) = fragment {
                message.extend([UDP, 0]);
                message.extend(place.to_be_bytes());
                message.extend([0; 4]);
            }
        } else {
            message.extend([0x45, 0]);
            message.extend(len_bytes.to_be_bytes());
            message.extend([0, 0]);
            message.extend(fragment.unwrap_or(0x4000).to_be_bytes());
            message.extend([64, UDP, 0, 0, 10, 9, 0, 1, 192, 0, 2, 1]);
        }
        message.extend([0, 53, 0, 9, 0, 0, 0, 0]);
        message
    }

    #[test]
    fn udp_30_errors_quote_what_was_too_big() {
        let told = |message: &[u8], is_ipv6| match quoted(message, is_ipv6) {
            Some(DatagramError::TooBig(DatagramTooBig { flow, mtu_bytes })) => {
                assert_eq!((flow.ours.1, flow.theirs.1), (53, 9));
                Some(mtu_bytes)
            }
            Some(DatagramError::Refused(_)) | None => None,
        };
        let v4 = |mtu, len, fragment| told(&error(3, 4, mtu, len, fragment), false);
        let v6 = |mtu, len, fragment| told(&error(2, 0, mtu, len, fragment), true);
        assert_eq!((v4(1300, 1301, None), v6(1300, 1301, None)), (Some(1300), Some(1300)));
        assert_eq!(v4(0, 1301, None), Some(0));
        assert_eq!((v4(1300, 1300, None), v6(1300, 1300, None)), (None, None), "it fits");
        assert_eq!(
            (v4(1300, 1400, Some(0x2000)), v4(1300, 1400, Some(0x2001))),
            (Some(1300), None)
        );
        assert_eq!((v6(1300, 1400, Some(1)), v6(1300, 1400, Some(9))), (Some(1300), None));
        assert_eq!(told(&error(11, 0, 1300, 1400, None), false), None);
        let whole = error(3, 4, 1300, 1400, None);
        assert!((0..whole.len() - 4).all(|len| told(&whole[..len], false).is_none()));
    }
}
