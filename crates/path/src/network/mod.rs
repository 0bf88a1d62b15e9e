//! Network: IP as a host receives it. What comes out is what Linux 6.18 would hand to a UDP socket
//! with its default settings (RFC 1122, RFC 8200), and every other packet has a reason.
//!
//! ```text
//! link ─► ipv4 ─► ipv4_options ─┬─► (reassembly) ─┬─► udp ─► Datagram
//!      └► ipv6 ─► extensions ───┘                 └─► icmp ─► Answer
//! ```
// Bytes from outside are taken by patterns and checked slices only.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::panic))]

pub mod compose;
mod link; //         whom a frame is addressed to
mod slots; //        what is found by its hash, in lists
mod wire; //         how much of a packet there is
mod ipv4; //         header, addresses, routes
mod ipv4_options;
mod ipv6; //         header, addresses
mod extensions; //   IPv6's extension headers and their options
mod udp; //          lengths and checksums
mod icmp; //         echo, and errors that come in
mod icmp_error; //   port unreachable
mod rate_limit; //   how often

pub mod arp;
pub mod counters;
pub mod drop;
pub mod identity;
pub mod ndisc;
pub mod neighbours;
pub mod reassembly;

use std::net::IpAddr;
use std::sync::Arc;

use mem::Pool;

use crate::packet::Packet;
use crate::parse::checksum::Sum;
use crate::parse::{Checksum, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Fragment, Headers, Transport};
use arp::ETHERTYPE_ARP;
pub use counters::NetworkCounters;
use counters::{IcmpCounters, IpCounters};
pub use drop::NetworkDrop;
use extensions::{Progress, Walked};
use icmp::Asked;
pub use identity::{Identity, Prefix};
use ipv6::Ipv6;
use link::PacketType;
pub use neighbours::Heard;
use rate_limit::{Allowed, RateLimit};
use reassembly::{Fragments, FragmentsConfig, Reassembly};
use wire::{Extent, Wire};

/// How a CPU's network layer is set up: the kernel's sysctls, with its defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NetworkConfig {
    /// `icmp_ratelimit`: how often a destination is told of an error, once its first few messages
    /// are used up.
    pub icmp_ratelimit_ns: u64,
    /// `icmp_msgs_per_sec`: errors told of by this CPU in all.
    pub icmp_msgs_per_sec: u32,
    /// `icmp_msgs_burst`: errors told of at once.
    pub icmp_msgs_burst: u32,
    /// How many fragments wait for others, and for how long.
    pub fragments: FragmentsConfig,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            icmp_ratelimit_ns: 1_000_000_000,
            icmp_msgs_per_sec: 1000,
            icmp_msgs_burst: 50,
            fragments: FragmentsConfig::default(),
        }
    }
}

/// What became of a packet.
#[must_use]
#[derive(Debug)]
pub enum Received {
    /// A whole, valid UDP datagram for this host: `headers` describe it, its frame ends where its IP
    /// packet does, and begins with the link header still.
    Datagram(Packet),
    /// A packet to be sent out by the device that the received one came from, as it is: an answer.
    Answer(Packet),
    /// Its work is done; its frame is to go home.
    Taken(Packet),
    /// It said where a neighbour is; if it asked, too, it now is the answer.
    Heard(Packet, Heard),
    /// A fragment: its frame waits for the others.
    Kept,
    /// Nobody gets it.
    Dropped(Packet, NetworkDrop),
}

/// The network layer of one CPU.
#[derive(Debug)]
pub struct Network {
    fragments: Fragments,
    /// What a fragment took with it, on its way to the pool; empty in between.
    spoiled: Vec<(Packet, NetworkDrop)>,
    limit: RateLimit,
    counters: Arc<NetworkCounters>,
}

impl Network {
    /// One that counts here.
    #[must_use]
    pub fn new(config: NetworkConfig, counters: Arc<NetworkCounters>) -> Self {
        let fragments = Fragments::new(config.fragments);
        Self { fragments, spoiled: Vec::new(), limit: RateLimit::new(config), counters }
    }

    /// Judges a packet that [`parse`](crate::parse) has walked over, and that came in on a device on
    /// which we are `on`. What is dropped has been counted.
    pub fn receive(
        &mut self,
        mut packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Received {
        let packet_type = match link::packet_type(&mut packet, on) {
            Ok(packet_type) => packet_type,
            Err(reason) => return self.dropped(packet, reason),
        };
        match ethertype(&packet) {
            Some(ETHERTYPE_IPV4) => self.ipv4(packet, on, now_ns, pool),
            Some(ETHERTYPE_IPV6) => self.ipv6(packet, packet_type, on, now_ns, pool),
            Some(ETHERTYPE_ARP) if on.is_whole_host => {
                match arp::receive(&mut packet, on, packet_type == PacketType::Host) {
                    Ok(heard) => Received::Heard(packet, heard),
                    Err(reason) => self.dropped(packet, reason),
                }
            }
            // The kernel's.
            Some(ETHERTYPE_ARP) => Received::Taken(packet),
            _ => self.dropped(packet, NetworkDrop::UnhandledProto),
        }
    }

    /// Answers a datagram for whose port there is no socket: port unreachable, as often as the
    /// kernel would. The datagram is dropped, and counted so; the answer is another packet.
    pub fn unreachable(
        &mut self,
        packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Received {
        let is_ipv6 = packet.headers.network == crate::parse::Network::Ipv6;
        self.udp_counters(packet.headers.network).no_ports.add(1);
        if let Some(host) = icmp_error::whom_to_tell(&packet, on)
            && self.may_tell(host, now_ns)
            && let Some(error) = icmp_error::port_unreachable(&packet, on, pool)
        {
            let (ip, icmp) = self.ip_and_icmp(is_ipv6);
            ip.out_requests.add(1);
            icmp.out_msgs.add(1);
            icmp.out_dest_unreachs.add(1);
            self.counters.drops.add(NetworkDrop::NoSocket, u64::from(packet.segment_count()));
            pool.put(packet.frame);
            return Received::Answer(error);
        }
        self.dropped(packet, NetworkDrop::NoSocket)
    }

    /// Whether the limits let us tell a host of an error now.
    fn may_tell(&mut self, host: IpAddr, now_ns: u64) -> bool {
        let allowed = self.limit.take(host, now_ns);
        let (_, icmp) = self.ip_and_icmp(host.is_ipv6());
        match allowed {
            Allowed::Yes => return true,
            Allowed::NotHost => icmp.out_rate_limit_host.add(1),
            Allowed::NotAny => icmp.out_rate_limit_global.add(1),
        }
        false
    }

    /// Gives up datagrams that were not complete in time. Their frames go to `dropped`.
    pub fn expire(&mut self, now_ns: u64, dropped: &mut Vec<(Packet, NetworkDrop)>) {
        let before = dropped.len();
        self.fragments.expire(now_ns, dropped);
        for (packet, reason) in dropped.iter().skip(before) {
            self.counters.drops.add(*reason, u64::from(packet.segment_count()));
        }
        self.count_failures();
    }

    /// The fragments that wait.
    #[must_use]
    pub fn fragments(&self) -> &Fragments {
        &self.fragments
    }

    /// Counts a datagram that no socket gets, for this reason.
    pub fn drop_datagram(&self, packet: &Packet, reason: NetworkDrop) {
        let udp = self.udp_counters(packet.headers.network);
        self.counters.drops.add(reason, u64::from(packet.segment_count()));
        match reason {
            NetworkDrop::SocketRcvbuff => {
                udp.rcvbuf_errors.add(1);
                udp.in_errors.add(1);
            }
            NetworkDrop::NotJoined | NetworkDrop::NoSocket => udp.ignored_multi.add(1),
            _ => udp.in_errors.add(1),
        }
    }

    /// Counts datagrams that sockets got.
    pub fn delivered(&self, over: crate::parse::Network, datagrams: u64) {
        self.udp_counters(over).in_datagrams.add(datagrams);
    }

    fn udp_counters(&self, over: crate::parse::Network) -> &counters::UdpCounters {
        match over {
            crate::parse::Network::Ipv6 => &self.counters.udp6,
            _ => &self.counters.udp,
        }
    }

    /// The counters, for whoever wants to read them.
    #[must_use]
    pub fn counters(&self) -> &Arc<NetworkCounters> {
        &self.counters
    }

    fn ipv4(
        &mut self,
        mut packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Received {
        let ipv4 = match ipv4::receive(&Wire::of(&packet), on, &self.counters.ip) {
            Ok(ipv4) => ipv4,
            Err(reason) => return self.dropped(packet, reason),
        };
        trim(&mut packet, ipv4.total_len);
        if ipv4.is_fragment {
            self.counters.ip.reasm_reqds.add(1);
            packet = match self.reassemble(packet, now_ns, pool) {
                Ok(whole) => whole,
                Err(received) => return received,
            };
        }
        self.ipv4_protocol(packet, on)
    }

    /// `ip_protocol_deliver_rcu`: a packet whose header was judged, and that is whole.
    fn ipv4_protocol(&mut self, packet: Packet, on: &Identity) -> Received {
        let header = Wire::of(&packet).bytes;
        let Some(&[first, _, _, _, _, _, _, _, _, protocol, _, _, ref addresses @ ..]) =
            header.first_chunk::<{ ipv4::FIXED_BYTES }>()
        else {
            return self.dropped(packet, NetworkDrop::IpInhdr);
        };
        let place = Place {
            protocol,
            offset: usize::from(packet.headers.network_offset) + usize::from(first & 0x0f) * 4,
            pseudo_sum: Sum::of(addresses).plus_word(protocol.into()),
            is_ipv6: false,
        };
        self.protocol(packet, &place, on)
    }

    fn ipv6(
        &mut self,
        mut packet: Packet,
        packet_type: PacketType,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Received {
        let ipv6 = match ipv6::receive(&Wire::of(&packet), on, &self.counters.ip6) {
            Ok(ipv6) => ipv6,
            Err(reason) => return self.dropped(packet, reason),
        };
        trim(&mut packet, ipv6.total_len);
        let mut progress = Progress { packet_type, was_fragment: false };
        let mut walked = self.walk(&packet, &ipv6, progress);
        if walked == Ok(Walked::Fragment) {
            packet = match self.reassemble(packet, now_ns, pool) {
                Ok(whole) => whole,
                Err(received) => return received,
            };
            progress.was_fragment = true;
            let again = ipv6::again(Wire::of(&packet).bytes);
            walked = again.and_then(|ipv6| self.walk(&packet, &ipv6, progress));
        }
        match walked {
            Ok(Walked::Protocol { protocol, offset }) => {
                self.ipv6_protocol(packet, protocol, offset, on)
            }
            Ok(Walked::Fragment) => self.dropped(packet, NetworkDrop::Ipv6BadExthdr),
            Err(reason) => self.dropped(packet, reason),
        }
    }

    fn walk(
        &self,
        packet: &Packet,
        ipv6: &Ipv6,
        progress: Progress,
    ) -> Result<Walked, NetworkDrop> {
        extensions::walk(Wire::of(packet).bytes, ipv6, progress, &self.counters.ip6)
    }

    /// `ip6_protocol_deliver_rcu`, behind the extension headers.
    fn ipv6_protocol(
        &mut self,
        packet: Packet,
        protocol: u8,
        offset: usize,
        on: &Identity,
    ) -> Received {
        let bytes = Wire::of(&packet).bytes;
        let addresses = bytes.get(8..ipv6::FIXED_BYTES).unwrap_or_default();
        let place = Place {
            protocol,
            offset: usize::from(packet.headers.network_offset) + offset,
            pseudo_sum: Sum::of(addresses).plus_word(protocol.into()),
            is_ipv6: true,
        };
        self.protocol(packet, &place, on)
    }

    /// Puts a fragment to the others. What it spoils goes home.
    fn reassemble(
        &mut self,
        packet: Packet,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Result<Packet, Received> {
        let is_ipv6 = packet.headers.network == crate::parse::Network::Ipv6;
        let fails = self.counters.ip6.reasm_fails.get();
        let reassembly = self.fragments.add(packet, now_ns, pool, &mut self.spoiled);
        for (packet, reason) in self.spoiled.drain(..) {
            self.counters.drops.add(reason, u64::from(packet.segment_count()));
            pool.put(packet.frame);
        }
        self.count_failures();
        match reassembly {
            Reassembly::Waits => Err(Received::Kept),
            Reassembly::Dropped(packet, reason) => {
                // It was wrong in itself, and no datagram failed for it.
                let is_wrong = reason != NetworkDrop::DupFrag && reason != NetworkDrop::FragNomem;
                if is_ipv6 && is_wrong && fails == self.counters.ip6.reasm_fails.get() {
                    self.counters.ip6.in_hdr_errors.add(1);
                }
                Err(self.dropped(packet, reason))
            }
            Reassembly::Complete(packet) => {
                self.ip_and_icmp(is_ipv6).0.reasm_oks.add(1);
                Ok(packet)
            }
        }
    }

    fn count_failures(&self) {
        let [ipv4, ipv6] = self.fragments.failures();
        for (ip, failures) in [(&self.counters.ip, ipv4), (&self.counters.ip6, ipv6)] {
            ip.reasm_fails.raise_to(failures.fails);
            ip.reasm_timeout.raise_to(failures.timeouts);
        }
    }

    fn ip_and_icmp(&self, is_ipv6: bool) -> (&IpCounters, &IcmpCounters) {
        let counters = &self.counters;
        if is_ipv6 { (&counters.ip6, &counters.icmp6) } else { (&counters.ip, &counters.icmp) }
    }

    fn protocol(&mut self, packet: Packet, place: &Place, on: &Identity) -> Received {
        let counters = if place.is_ipv6 { &self.counters.ip6 } else { &self.counters.ip };
        match (place.protocol, place.is_ipv6) {
            (udp::UDP, _) => {
                counters.in_delivers.add(1);
                self.udp(packet, place, on)
            }
            (icmp::ICMP, false) | (icmp::ICMPV6, true) => {
                counters.in_delivers.add(1);
                self.icmp(packet, place, on)
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
        let len = if packet.is_merged() {
            // It was judged over all its frames when they were joined.
            match udp::judged_before(&packet.headers, counters) {
                Ok(len) => len,
                Err(reason) => return self.dropped(packet, reason),
            }
        } else {
            let segment = udp::Segment {
                bytes: packet.frame.data().get(place.offset..).unwrap_or_default(),
                pseudo_sum: place.pseudo_sum,
                checksum: place.known_checksum(&packet.headers),
                is_ipv6: place.is_ipv6,
                is_to_many,
            };
            match udp::receive(&segment, counters) {
                Ok(len) => len,
                Err(reason) => return self.dropped(packet, reason),
            }
        };
        place.describe(&mut packet.headers, len);
        Received::Datagram(packet)
    }

    fn icmp(&mut self, mut packet: Packet, place: &Place, on: &Identity) -> Received {
        let (ip, icmp) = self.ip_and_icmp(place.is_ipv6);
        if packet.is_merged() {
            return Received::Taken(packet); // too large to be answered from one frame
        }
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
            Ok(Asked::Echo | Asked::Nothing) => Received::Taken(packet),
        }
    }

    fn dropped(&self, packet: Packet, reason: NetworkDrop) -> Received {
        self.counters.drops.add(reason, u64::from(packet.segment_count()));
        Received::Dropped(packet, reason)
    }
}

/// Where a transport header is, and what it is summed up with.
struct Place {
    protocol: u8,
    /// From the frame's first byte on.
    offset: usize,
    /// Of the addresses and the protocol.
    pseudo_sum: Sum,
    is_ipv6: bool,
}

impl Place {
    /// What parsing found out about the checksum, if it walked to the same place.
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

/// The innermost EtherType. Of a frame without link header, by the IP version.
fn ethertype(packet: &Packet) -> Option<u16> {
    use crate::parse::Network as Parsed;
    match packet.headers.network {
        Parsed::Ipv4 => Some(ETHERTYPE_IPV4),
        Parsed::Ipv6 => Some(ETHERTYPE_IPV6),
        Parsed::Other => {
            let at = usize::from(packet.headers.network_offset).checked_sub(2)?;
            let field = packet.frame.data().get(at..)?.first_chunk()?;
            Some(u16::from_be_bytes(*field))
        }
    }
}

/// Takes off what stands behind an IP packet of `total_len` bytes. One that was merged has nothing
/// there.
fn trim(packet: &mut Packet, total_len: usize) {
    let end = usize::from(packet.headers.network_offset) + total_len;
    match u32::try_from(end) {
        Ok(end) if end < packet.frame.len_bytes() && !packet.is_merged() => {
            packet.frame.set_len(end);
            packet.wire_len = end;
        }
        _ => {}
    }
}
