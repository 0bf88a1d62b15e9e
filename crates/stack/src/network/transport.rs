//! From the transport header on: delivery and answers.

use std::net::IpAddr;

use forebay_buf::Pool;
use forebay_rx::packet::{Packet, Shape};
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{Checksum, Fragment, Headers, Transport, View};

use super::icmp::{self, EchoAsked};
use super::icmp_error::DatagramError;
use super::link::{self, PacketType};
use super::{Identity, NetworkDrop, NetworkLayer, NetworkVerdict, icmp_error, ndisc, tcp, udp};

/// Position of a transport header, and its pseudo-header.
pub(super) struct TransportHeader {
    pub(super) protocol: u8,
    /// Offset from the first byte of the frame.
    pub(super) offset: usize,
    /// Sum of the pseudo-header without its length: addresses and protocol.
    pub(super) pseudo_sum: Sum,
    pub(super) is_ipv6: bool,
    /// True if it came in fragments over IPv6, or with the header of one.
    pub(super) was_ipv6_fragment: bool,
}

/// Bytes of a packet from its transport header on, delimited by the IP header.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransportBytes<'a> {
    /// The packet that contains them.
    pub(super) packet: &'a Packet,
    /// Offset in the packet's first frame.
    pub(super) offset: usize,
}

impl<'a> TransportBytes<'a> {
    /// Bytes in the packet's first frame.
    pub(super) fn first(&self) -> &'a [u8] {
        self.packet.frame.data().get(self.offset..).unwrap_or_default()
    }

    /// Number of bytes present, from the transport header on.
    pub(super) fn len(&self) -> usize {
        let len = match self.packet.is_chain() {
            true => self.packet.fragments().map(<[u8]>::len).sum(),
            false => self.packet.frame.data().len(),
        };
        len.saturating_sub(self.offset)
    }

    /// Sum of the first `len` bytes, as far as they are present.
    pub(super) fn sum(&self, len: usize) -> Sum {
        if !self.packet.is_chain() {
            let place = self.offset..self.offset.saturating_add(len);
            return Sum::of(self.packet.frame.data().get(place).unwrap_or_default());
        }
        let (mut skip, mut left) = (self.offset, len);
        Sum::of_pieces(self.packet.fragments().map(move |bytes| -> &'a [u8] {
            let (before, bytes) = bytes.split_at(skip.min(bytes.len()));
            let (bytes, _) = bytes.split_at(left.min(bytes.len()));
            skip -= before.len();
            left -= bytes.len();
            bytes
        }))
    }
}

impl TransportHeader {
    /// Checksum state from parsing, if parsing found the same transport header.
    fn known_checksum(&self, headers: &Headers, transport: Transport) -> Checksum {
        if headers.transport == transport && usize::from(headers.transport_offset) == self.offset {
            headers.l4_checksum
        } else {
            Checksum::Unknown
        }
    }

    /// Describes a valid datagram or segment of `len` bytes, of which `header_len` are its header,
    /// overriding the result of parsing.
    fn describe(&self, headers: &mut Headers, transport: Transport, len: usize, header_len: usize) {
        let offset = |at: usize| u16::try_from(at).unwrap_or(u16::MAX);
        headers.transport = transport;
        headers.protocol = self.protocol;
        headers.flaw = None;
        headers.l4_checksum = Checksum::Good;
        headers.transport_offset = offset(self.offset);
        headers.payload_offset = offset(self.offset + header_len);
        headers.payload_len = offset(len - header_len);
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
            (tcp::TCP, _) if self.takes_tcp => {
                counters.in_delivers.add(1);
                self.tcp(packet, place, on)
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
            bytes: TransportBytes { packet: &packet, offset: place.offset },
            pseudo_sum: place.pseudo_sum,
            checksum: place.known_checksum(&packet.headers, Transport::Udp),
            is_ipv6: place.is_ipv6,
            is_to_many,
        };
        let len = match udp::receive(&segment, counters) {
            Ok(len) => len,
            Err(reason) => return self.dropped(packet, reason),
        };
        place.describe(&mut packet.headers, Transport::Udp, len, udp::HEADER_BYTES);
        NetworkVerdict::Datagram(packet)
    }

    fn tcp(
        &mut self,
        mut packet: Packet,
        place: &TransportHeader,
        on: &Identity,
    ) -> NetworkVerdict {
        if packet.view().destination().is_some_and(|destination| on.is_to_many(destination)) {
            // `tcp_v4_rcv`: a connection has two ends.
            return self.dropped(packet, NetworkDrop::IpInvalidDest);
        }
        if link::addressed_to_host(&packet, on) != Ok(PacketType::Host) {
            // `tcp_v4_rcv`, `tcp_v6_rcv`: all hosts of the link would answer.
            return self.dropped(packet, NetworkDrop::UnicastInL2Multicast);
        }
        let segment = tcp::TcpBytes {
            bytes: TransportBytes { packet: &packet, offset: place.offset },
            pseudo_sum: place.pseudo_sum,
            checksum: place.known_checksum(&packet.headers, Transport::Tcp),
        };
        match tcp::receive(&segment) {
            Ok((len, header_len)) => {
                place.describe(&mut packet.headers, Transport::Tcp, len, header_len);
                if place.is_ipv6 && is_syn_from_mapped(&packet.view()) {
                    self.counters.ip6.in_hdr_errors.add(1);
                    return self.dropped(packet, NetworkDrop::IpInvalidSource);
                }
                NetworkVerdict::Segment(packet)
            }
            Err(reason) => self.dropped(packet, reason),
        }
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
        let of_datagram = icmp_error::quoted(bytes, place.is_ipv6);
        let from = packet.view().source();
        let path_error = self.takes_tcp.then(|| tcp::quoted(bytes, from, place.is_ipv6)).flatten();
        match asked {
            Err(reason) => self.dropped(packet, reason),
            Ok(EchoAsked::Echo)
                if on.is_whole_host && icmp::echo(&mut packet, place.offset, on) =>
            {
                ip.out_requests.add(1);
                icmp.out_msgs.add(1);
                icmp.out_echo_reps.add(1);
                NetworkVerdict::Answer(packet)
            }
            Ok(EchoAsked::Nothing) if place.is_ipv6 && on.is_whole_host && of_neighbours => {
                if place.was_ipv6_fragment {
                    // `ndisc_suppress_frag_ndisc`: filters on the way do not look behind that header.
                    return self.dropped(packet, NetworkDrop::Ipv6NdiscFrag);
                }
                match ndisc::receive(&mut packet, place.offset, on) {
                    Ok(heard) => NetworkVerdict::Heard(packet, heard),
                    Err(reason) => self.dropped(packet, reason),
                }
            }
            Ok(EchoAsked::Echo | EchoAsked::Nothing) => match (of_datagram, path_error) {
                (Some(DatagramError::Refused(flow)), _) => NetworkVerdict::Refused(packet, flow),
                (Some(DatagramError::TooBig(about)), _) => {
                    NetworkVerdict::TooBig(packet, Box::new(about))
                }
                (None, Some(error)) => NetworkVerdict::PathError(packet, Box::new(error)),
                (None, None) => NetworkVerdict::Taken(packet),
            },
        }
    }
}

/// True if a connection would be opened from an IPv4 address inside IPv6 (`tcp_v6_conn_request`): applications would take
/// its peer for one over IPv4.
fn is_syn_from_mapped(view: &View<'_>) -> bool {
    const SYN: u16 = 0x02;
    const ACK: u16 = 0x10;
    let is_mapped = |source| matches!(source, IpAddr::V6(it) if it.to_ipv4_mapped().is_some());
    view.tcp_flags().is_some_and(|flags| flags & (SYN | ACK) == SYN)
        && view.source().is_some_and(is_mapped)
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
