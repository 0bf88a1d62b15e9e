//! From the transport header on: what is delivered, what is answered.

use mem::Pool;
use path::packet::{Packet, Shape};
use path::parse::checksum::Sum;
use path::parse::{Checksum, Fragment, Headers, Transport};

use super::icmp::{self, Asked};
use super::{Identity, Network, NetworkDrop, Received, icmp_error, ndisc, udp};

/// Offset of a transport header, and the pseudo header that it is summed up with.
pub(super) struct Place {
    pub(super) protocol: u8,
    /// From the frame's first byte on.
    pub(super) offset: usize,
    /// Of the addresses and the protocol.
    pub(super) pseudo_sum: Sum,
    pub(super) is_ipv6: bool,
}

impl Place {
    /// Checksum as parsing found it, if it walked to the same place.
    fn known_checksum(&self, headers: &Headers) -> Checksum {
        if headers.transport == Transport::Udp
            && usize::from(headers.transport_offset) == self.offset
        {
            headers.l4_checksum
        } else {
            Checksum::Unknown
        }
    }

    /// Notes a good datagram of `len` bytes, whatever parsing thought of it.
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

impl Network {
    pub(super) fn protocol(
        &mut self,
        packet: Packet,
        place: &Place,
        on: &Identity,
        pool: &mut Pool,
    ) -> Received {
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

    fn udp(&mut self, mut packet: Packet, place: &Place, on: &Identity) -> Received {
        let counters = if place.is_ipv6 { &self.counters.udp6 } else { &self.counters.udp };
        let is_to_many =
            packet.view().destination().is_some_and(|destination| on.is_to_many(destination));
        let segment = udp::Segment {
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
        Received::Datagram(packet)
    }

    fn icmp(&mut self, mut packet: Packet, place: &Place, on: &Identity) -> Received {
        let (ip, icmp) = self.ip_and_icmp(place.is_ipv6);
        let bytes = packet.frame.data().get(place.offset..).unwrap_or_default();
        let destination = packet.view().destination();
        let message = icmp::Message {
            bytes,
            pseudo_sum: place.pseudo_sum.plus_len(bytes.len()),
            is_to_many: destination.is_some_and(|destination| on.is_to_many(destination)),
        };
        let asked = if place.is_ipv6 {
            icmp::receive_v6(&message, icmp)
        } else {
            icmp::receive(&icmp::Message { pseudo_sum: Sum::default(), ..message }, icmp)
        };
        let of_neighbours =
            matches!(bytes.first(), Some(&(ndisc::SOLICITATION | ndisc::ADVERTISEMENT)));
        let fits = packet.wire_len.saturating_sub(packet.headers.network_offset.into()) <= on.mtu;
        let refused = icmp_error::refused(bytes, place.is_ipv6);
        match asked {
            Err(reason) => self.dropped(packet, reason),
            Ok(Asked::Echo)
                if on.is_whole_host && fits && icmp::echo(&mut packet, place.offset, on) =>
            {
                ip.out_requests.add(1);
                icmp.out_msgs.add(1);
                icmp.out_echo_reps.add(1);
                Received::Answer(packet)
            }
            Ok(Asked::Nothing) if place.is_ipv6 && on.is_whole_host && of_neighbours => {
                match ndisc::receive(&mut packet, place.offset, on) {
                    Ok(heard) => Received::Heard(packet, heard),
                    Err(reason) => self.dropped(packet, reason),
                }
            }
            Ok(Asked::Echo | Asked::Nothing) => match refused {
                Some(flow) => Received::Refused(packet, flow),
                None => Received::Taken(packet),
            },
        }
    }
}

/// A packet in one frame, for whoever judges and answers it where it lies; what it was in goes home.
///
/// # Errors
/// Gives it back where there is no frame so large.
fn together(mut packet: Packet, pool: &mut Pool) -> Result<Packet, Packet> {
    if packet.shape() == Shape::FragList {
        match packet.copied_whole(pool) {
            Some(copy) => pool.put(std::mem::replace(&mut packet.frame, copy)),
            None => return Err(packet),
        }
    }
    Ok(packet)
}
