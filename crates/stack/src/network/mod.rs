//! Network: IP as a host receives it. The output is what Linux 6.18 would hand to a UDP socket with
//! its default settings (RFC 1122, RFC 8200), and every other packet has a drop reason.
//!
//! ```text
//! link ─► ipv4 ─► ipv4_options ─┬─► (reassembly) ─┬─► udp ─► Datagram
//!      └► ipv6 ─► extensions ───┘                 └─► icmp ─► Answer
//! ```
// Bytes from outside are taken by patterns and checked slices only.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::panic))]

#[expect(clippy::indexing_slicing, reason = "it writes headers into room that it made")]
pub mod compose;
#[expect(clippy::indexing_slicing, reason = "it writes headers into room that it made")]
pub mod fragment_out;
mod link; //         whom a frame is addressed to
mod slots; //        what is found by its hash, in lists
mod wire; //         how much of a packet there is
mod ipv4; //         header, addresses, routes
mod ipv4_options;
mod ipv6; //         header, addresses
mod extensions; //   IPv6's extension headers and their options
mod internet; //     all of them, and fragments
mod transport; //    what is delivered, what is answered
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

use arp::ETHERTYPE_ARP;
pub use counters::NetworkCounters;
use counters::{IcmpCounters, IpCounters};
pub use drop::NetworkDrop;
use forebay_buf::Pool;
use forebay_rx::packet::Packet;
use forebay_rx::parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
pub use icmp_error::ErrorRefusal;
pub use identity::{Identity, Prefix};
use link::PacketType;
pub use neighbours::NeighbourEvent;
use rate_limit::{Allowed, RateLimit};
use reassembly::{Fragments, FragmentsConfig, GivenUp};
use wire::{Extent, Wire};

/// Configuration of a CPU's network layer: the kernel's sysctls, with its defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NetworkConfig {
    /// `icmp_ratelimit`: interval of errors to one destination, once its burst is used up, in ns.
    pub icmp_ratelimit_ns: u64,
    /// `icmp_msgs_per_sec`: errors sent per second by this CPU in all.
    pub icmp_msgs_per_sec: u32,
    /// `icmp_msgs_burst`: errors sent at once.
    pub icmp_msgs_burst: u32,
    /// Limits for waiting fragments.
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

/// Result of [`NetworkLayer::receive`].
#[must_use]
#[derive(Debug)]
pub enum NetworkVerdict {
    /// A complete, valid UDP datagram for this host: described by `headers`; the frame still begins
    /// with the link header and ends where the IP packet does.
    Datagram(Packet),
    /// A packet to be sent out of the device that the received one came from, unchanged: an answer.
    Answer(Packet),
    /// Processed completely; the frame is to be returned to its pool.
    Taken(Packet),
    /// A message about a neighbour's address; if it was a request, the packet is now the answer.
    Heard(Packet, NeighbourEvent),
    /// An ICMP port unreachable for one of our datagrams. The frame is to be returned to its pool.
    Refused(Packet, ErrorRefusal),
    /// A fragment: its frame waits for the others.
    Kept,
    /// Dropped.
    Dropped(Packet, NetworkDrop),
}

/// The network layer of one CPU.
#[derive(Debug)]
pub struct NetworkLayer {
    /// Waiting fragments of the host.
    fragments: Arc<Fragments>,
    /// Fragments that reassembly gave up, until returned to the pool; empty otherwise.
    given_up: GivenUp,
    limit: RateLimit,
    counters: Arc<NetworkCounters>,
}

impl NetworkLayer {
    /// Creates the network layer of a host of one CPU, with these counters.
    #[must_use]
    pub fn new(config: NetworkConfig, counters: Arc<NetworkCounters>) -> Self {
        let fragments = Arc::new(Fragments::new(config.fragments));
        Self::sharing(fragments, config, counters)
    }

    /// Creates one of several network layers that share the waiting fragments, since flows move
    /// between their CPUs.
    #[must_use]
    pub fn sharing(
        fragments: Arc<Fragments>,
        config: NetworkConfig,
        counters: Arc<NetworkCounters>,
    ) -> Self {
        let (given_up, limit) = (GivenUp::default(), RateLimit::new(config));
        Self { fragments, given_up, limit, counters }
    }

    /// Validates a packet that [`parse`](forebay_rx::parse) has walked over, received on a device on which
    /// this host is `on`. Drops are counted already.
    pub fn receive(
        &mut self,
        mut packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> NetworkVerdict {
        let packet_type = match link::packet_type(&mut packet, on) {
            Ok(packet_type) => packet_type,
            Err(reason) => return self.dropped(packet, reason),
        };
        match ethertype(&packet) {
            Some(ETHERTYPE_IPV4) => self.ipv4(packet, on, now_ns, pool),
            Some(ETHERTYPE_IPV6) => self.ipv6(packet, packet_type, on, now_ns, pool),
            Some(ETHERTYPE_ARP) if on.is_whole_host => {
                match arp::receive(&mut packet, on, packet_type == PacketType::Host) {
                    Ok(heard) => NetworkVerdict::Heard(packet, heard),
                    Err(reason) => self.dropped(packet, reason),
                }
            }
            // The kernel's.
            Some(ETHERTYPE_ARP) => NetworkVerdict::Taken(packet),
            _ => self.dropped(packet, NetworkDrop::UnhandledProto),
        }
    }

    /// Answers a datagram to a port without a socket: port unreachable, subject to the kernel's rate
    /// limits. The datagram is dropped and counted as such; the answer is a new packet.
    pub fn unreachable(
        &mut self,
        packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> NetworkVerdict {
        let is_ipv6 = packet.headers.network == forebay_rx::parse::Network::Ipv6;
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
            return NetworkVerdict::Answer(error);
        }
        self.dropped(packet, NetworkDrop::NoSocket)
    }

    /// True if the rate limits allow an error message to `host` now.
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

    /// Drops datagrams that were not complete in time. Their frames go to `dropped`.
    pub fn expire(&mut self, now_ns: u64, dropped: &mut Vec<(Packet, NetworkDrop)>) {
        self.fragments.expire(now_ns, &mut self.given_up);
        self.count_given_up();
        dropped.append(&mut self.given_up.packets);
    }

    /// Drops all waiting fragments, whichever CPU received them: no others will come. Their frames
    /// go back to their pool.
    pub fn end(&mut self) {
        self.fragments.clear(&mut self.given_up);
        self.count_given_up();
        self.given_up.packets.clear();
    }

    /// The waiting fragments.
    #[must_use]
    pub fn fragments(&self) -> &Fragments {
        &self.fragments
    }

    /// Counts a datagram that no socket gets, by reason.
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

    /// Counts datagrams delivered to sockets.
    pub fn delivered(&self, over: forebay_rx::parse::Network, datagrams: u64) {
        self.udp_counters(over).in_datagrams.add(datagrams);
    }

    fn udp_counters(&self, over: forebay_rx::parse::Network) -> &counters::UdpCounters {
        match over {
            forebay_rx::parse::Network::Ipv6 => &self.counters.udp6,
            _ => &self.counters.udp,
        }
    }

    /// The counters, for any reader.
    #[must_use]
    pub fn counters(&self) -> &Arc<NetworkCounters> {
        &self.counters
    }

    fn ip_and_icmp(&self, is_ipv6: bool) -> (&IpCounters, &IcmpCounters) {
        let counters = &self.counters;
        if is_ipv6 { (&counters.ip6, &counters.icmp6) } else { (&counters.ip, &counters.icmp) }
    }

    fn dropped(&self, packet: Packet, reason: NetworkDrop) -> NetworkVerdict {
        self.counters.drops.add(reason, u64::from(packet.segment_count()));
        NetworkVerdict::Dropped(packet, reason)
    }
}

/// The innermost EtherType; of a frame without link header, derived from the IP version.
fn ethertype(packet: &Packet) -> Option<u16> {
    use forebay_rx::parse::Network as Parsed;
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
