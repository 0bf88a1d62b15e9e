//! From the transport header on: delivery and answers.

use forebay_buf::Pool;
use forebay_rx::packet::{Packet, Shape};
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{Checksum, Fragment, Headers, Transport};

use super::icmp::{self, EchoAsked};
use super::{Identity, NetworkDrop, NetworkLayer, NetworkVerdict, icmp_error, ndisc, udp};

/// Position of a transport header, and its pseudo-header.
pub(super) struct TransportHeader {
    pub(super) protocol: u8,
    /// Offset from the first byte of the frame.
    pub(super) offset: usize,
    /// Sum of the pseudo-header without its length: addresses and protocol.
    pub(super) pseudo_sum: Sum,
    pub(super) is_ipv6: bool,
}

impl TransportHeader {
    /// Checksum state from parsing, if parsing found the same transport header.
    fn known_checksum(&self, headers: &Headers) -> Checksum {
        if headers.transport == Transport::Udp
            && usize::from(headers.transport_offset) == self.offset
        {
            headers.l4_checksum
        } else {
            Checksum::Unknown
        }
    }

    /// Describes a valid datagram of `len` bytes, overriding the result of parsing.
    fn describe(&self, headers: &mut Headers, len: usize) {
        let offset = |at: usize| u16::try_from(at).unwrap_or(u16::MAX);
        headers.transport = Transport::Udp;
        headers.protocol = self.protocol;
        headers.flaw = None;
        headers.l4_checksum = Checksum::Good;
        headers.transport_offset = offset(self.offset);
        headers.payload_offset = offset(self.offset + udp::HEADER_BYTES);
        headers.payload_len = offset(len - udp::HEADER_BYTES);
        if !headers.fragment.is_whole() {
            headers.fragment = Fragment::Atomic;
        }
    }
}

impl NetworkLayer {
    pub(super) fn protocol(
        &mut self,
        packet: Packet,
        place: &TransportHeader,
        on: &Identity,
        pool: &mut Pool,
    ) -> NetworkVerdict {
        let counters = if place.is_ipv6 { &self.counters.ip6 } else { &self.counters.ip };
        match (place.protocol, place.is_ipv6) {
            (udp::UDP, _) => {
                counters.in_delivers.add(1);
                self.udp(packet, place, on)
            }
            (icmp::ICMP, false) | (icmp::ICMPV6, true) => {
                counters.in_delivers.add(1);
                match together(packet, pool) {
                    Ok(packet) => self.icmp(packet, place, on),
                    Err(packet) => self.dropped(packet, NetworkDrop::Nomem),
                }
            }
            _ => {
                counters.in_unknown_protos.add(1);
                self.dropped(packet, NetworkDrop::IpNoproto)
            }
        }
    }

    fn udp(
        &mut self,
        mut packet: Packet,
        place: &TransportHeader,
        on: &Identity,
    ) -> NetworkVerdict {
        let counters = if place.is_ipv6 { &self.counters.udp6 } else { &self.counters.udp };
        let is_to_many =
            packet.view().destination().is_some_and(|destination| on.is_to_many(destination));
        let segment = udp::UdpSegment {
            packet: &packet,
            offset: place.offset,
            pseudo_sum: place.pseudo_sum,
            checksum: place.known_checksum(&packet.headers),
            is_ipv6: place.is_ipv6,
            is_to_many,
        };
        let len = match udp::receive(&segment, counters) {
            Ok(len) => len,
            Err(reason) => return self.dropped(packet, reason),
        };
        place.describe(&mut packet.headers, len);
        NetworkVerdict::Datagram(packet)
    }

    fn icmp(
        &mut self,
        mut packet: Packet,
        place: &TransportHeader,
        on: &Identity,
    ) -> NetworkVerdict {
        let (ip, icmp) = self.ip_and_icmp(place.is_ipv6);
        let bytes = packet.frame.data().get(place.offset..).unwrap_or_default();
        let destination = packet.view().destination();
        let message = icmp::IcmpMessage {
            bytes,
            pseudo_sum: place.pseudo_sum.plus_len(bytes.len()),
            is_to_many: destination.is_some_and(|destination| on.is_to_many(destination)),
        };
        let asked = if place.is_ipv6 {
            icmp::receive_v6(&message, icmp)
        } else {
            icmp::receive(&icmp::IcmpMessage { pseudo_sum: Sum::default(), ..message }, icmp)
        };
        let of_neighbours =
            matches!(bytes.first(), Some(&(ndisc::SOLICITATION | ndisc::ADVERTISEMENT)));
        // A longer reply would have to be fragmented.
        let fits = packet.wire_len.saturating_sub(packet.headers.network_offset.into()) <= on.mtu;
        let refused = icmp_error::refused(bytes, place.is_ipv6);
        match asked {
            Err(reason) => self.dropped(packet, reason),
            Ok(EchoAsked::Echo)
                if on.is_whole_host && fits && icmp::echo(&mut packet, place.offset, on) =>
            {
                ip.out_requests.add(1);
                icmp.out_msgs.add(1);
                icmp.out_echo_reps.add(1);
                NetworkVerdict::Answer(packet)
            }
            Ok(EchoAsked::Nothing) if place.is_ipv6 && on.is_whole_host && of_neighbours => {
                match ndisc::receive(&mut packet, place.offset, on) {
                    Ok(heard) => NetworkVerdict::Heard(packet, heard),
                    Err(reason) => self.dropped(packet, reason),
                }
            }
            Ok(EchoAsked::Echo | EchoAsked::Nothing) => match refused {
                Some(flow) => NetworkVerdict::Refused(packet, flow),
                None => NetworkVerdict::Taken(packet),
            },
        }
    }
}

/// Copies a chain into one frame, so that the packet can be validated and answered in place; the
/// original frames go back to the pool.
///
/// # Errors
/// Returns the packet if no frame is large enough.
fn together(mut packet: Packet, pool: &mut Pool) -> Result<Packet, Packet> {
    if packet.shape() == Shape::FragList {
        match packet.copied_whole(pool) {
            Some(copy) => pool.put(std::mem::replace(&mut packet.frame, copy)),
            None => return Err(packet),
        }
    }
    Ok(packet)
}
