//! Network: IP as a host receives it. The layer delivers the UDP datagrams and TCP segments that Linux
//! 6.18 with default settings would hand to a socket (RFC 1122, RFC 8200). Every other packet is
//! consumed (answered, noted, or kept for reassembly), or dropped for a [reason](NetworkDrop).
//!
//! ```text
//! link ─► ipv4 ─► ipv4_options ─┬─► (reassembly) ─┬─► udp ─► Datagram
//!      ├► ipv6 ─► extensions ───┘                 ├─► tcp ─► Segment
//!      └► arp ─► Heard                            └─► icmp ─► Answer
//! ```
// Received bytes are accessed by patterns and checked slices only.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::panic))]

#[expect(clippy::indexing_slicing, reason = "it writes headers into room that it made")]
pub mod compose; // headers of packets to be sent
#[expect(
    clippy::indexing_slicing,
    reason = "headers are written into space that was made for them"
)]
pub mod fragment_out; // fragmentation of sent datagrams
mod link; //         link-layer addressing
mod slots; //        a hash table whose items are linked into lists
mod wire; //         received and claimed length of a packet
mod ipv4; //         header, addresses, routes
mod ipv4_options; // options of an IPv4 header
mod ipv6; //         header, addresses
mod extensions; //   IPv6 extension headers and their options
mod internet; //     from the network header to the transport header, through reassembly
mod transport; //    delivery and answers
mod udp; //          lengths and checksums
mod tcp; //          lengths and checksums, and segments quoted by ICMP errors
mod icmp; //         echo, and received errors
mod icmp_error; //   port unreachable as sent, and received errors about our datagrams
mod rate_limit; //   rate limits of ICMP errors

pub mod reassembly; // datagrams from fragments
pub mod identity; //   addresses of this host on a device
pub mod neighbours; // the hosts of a link, and their MAC addresses
pub mod arp; //        messages about them over IPv4
pub mod ndisc; //      messages about them over IPv6
pub mod drop; //       reasons for a drop
pub mod counters; //   counters of /proc/net/snmp

use std::net::IpAddr;
use std::sync::Arc;

use arp::ETHERTYPE_ARP;
pub use counters::NetworkCounters;
use counters::{IcmpCounters, IpCounters};
pub use drop::NetworkDrop;
use forebay_buf::Pool;
use forebay_rx::packet::Packet;
use forebay_rx::parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
pub use icmp_error::{DatagramTooBig, ErrorRefusal};
pub use identity::{Identity, Prefix};
use link::PacketType;
pub use neighbours::NeighbourEvent;
use rate_limit::{Allowed, RateLimit};
use reassembly::{Fragments, FragmentsConfig, GivenUp};
pub use tcp::TcpPathError;
use wire::{Extent, Wire};

/// Configuration of a CPU's network layer: the kernel's sysctls, with its defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NetworkConfig {
    /// `icmp_ratelimit`: interval between errors to one destination once its burst is used up, in
    /// ns.
    pub icmp_ratelimit_ns: u64,
    /// `icmp_msgs_per_sec`: errors that this CPU sends per second to all destinations together.
    pub icmp_msgs_per_sec: u32,
    /// `icmp_msgs_burst`: errors sent at once.
    pub icmp_msgs_burst: u32,
    /// Limits for incomplete datagrams.
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
    /// A valid TCP segment for this host, perhaps merged, described by `headers` as a datagram is.
    Segment(Packet),
    /// An ICMP error about a TCP segment of ours. The frame is to be returned to its pool.
    PathError(Packet, Box<TcpPathError>),
    /// A complete, valid UDP datagram for this host, described by `headers`. The frame still begins
    /// with the link header, and ends where the IP packet does.
    Datagram(Packet),
    /// An answer: to be sent out of the device that the received packet arrived on, unchanged unless it is
    /// [longer than the MTU](fragment_out::FragmentedAnswer).
    Answer(Packet),
    /// A packet that needs no further processing; its frame is to be returned to its pool.
    Taken(Packet),
    /// A message about a neighbour's address. If it was a request, the packet is now the answer.
    Heard(Packet, NeighbourEvent),
    /// An ICMP port unreachable for one of our datagrams. The frame is to be returned to its pool.
    Refused(Packet, ErrorRefusal),
    /// An ICMP error about one of our datagrams: it was too large for its path. The frame is to be returned to its pool.
    TooBig(Packet, Box<DatagramTooBig>),
    /// A fragment that waits for the rest of its datagram.
    Kept,
    /// A dropped packet and the reason.
    Dropped(Packet, NetworkDrop),
}

/// The network layer of one CPU.
#[derive(Debug)]
pub struct NetworkLayer {
    /// Incomplete datagrams of the host.
    fragments: Arc<Fragments>,
    /// Fragments that reassembly gave up, until they are counted and returned; empty between calls.
    given_up: GivenUp,
    limit: RateLimit,
    /// True if TCP is processed here; else its packets have no protocol.
    takes_tcp: bool,
    counters: Arc<NetworkCounters>,
}

impl NetworkLayer {
    /// Creates the network layer of a host of one CPU, with these counters.
    #[must_use]
    pub fn new(config: NetworkConfig, counters: Arc<NetworkCounters>) -> Self {
        let fragments = Arc::new(Fragments::new(config.fragments));
        Self::with_fragments(fragments, config, counters)
    }

    /// Creates one of several network layers that share `fragments`, since flows move between CPUs.
    #[must_use]
    pub fn with_fragments(
        fragments: Arc<Fragments>,
        config: NetworkConfig,
        counters: Arc<NetworkCounters>,
    ) -> Self {
        let (given_up, limit) = (GivenUp::default(), RateLimit::new(config));
        Self { fragments, given_up, limit, takes_tcp: false, counters }
    }

    /// Processes TCP, too: [`NetworkVerdict::Segment`] and [`NetworkVerdict::PathError`] may follow.
    pub fn take_tcp(&mut self) {
        self.takes_tcp = true;
    }

    /// Validates a packet that [`parse`](forebay_rx::parse) has walked over, received on a device
    /// on which this host has the identity `on`. Drops are already counted.
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
            // The kernel processes ARP on this device.
            Some(ETHERTYPE_ARP) => NetworkVerdict::Taken(packet),
            _ => self.dropped(packet, NetworkDrop::UnhandledProto),
        }
    }

    /// Answers a datagram to a port without a socket by port unreachable, subject to the kernel's
    /// rate limits. The datagram is dropped and counted as such; the answer is a new packet.
    pub fn unreachable(
        &mut self,
        packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> NetworkVerdict {
        let is_ipv6 = packet.headers.network == forebay_rx::parse::Network::Ipv6;
        self.udp_counters(packet.headers.network).no_ports.add(1);
        if let Some(host) = icmp_error::recipient(&packet, on)
            && self.may_send_error(host, now_ns)
            && let Some(error) = icmp_error::port_unreachable(&packet, on, pool)
        {
            let (ip, icmp) = self.ip_and_icmp(is_ipv6);
            ip.out_requests.add(1);
            icmp.out_msgs.add(1);
            icmp.out_dest_unreachs.add(1);
            self.counters.drops.add(NetworkDrop::NoSocket, u64::from(packet.wire_count()));
            pool.put(packet.frame);
            return NetworkVerdict::Answer(error);
        }
        self.dropped(packet, NetworkDrop::NoSocket)
    }

    /// True if the rate limits allow an error message to `host` now.
    fn may_send_error(&mut self, host: IpAddr, now_ns: u64) -> bool {
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

    /// Drops all waiting fragments at shutdown, whichever CPU received them. Their frames return to
    /// their pools.
    pub fn end(&mut self) {
        self.fragments.clear(&mut self.given_up);
        self.count_given_up();
        self.given_up.packets.clear();
    }

    /// Incomplete datagrams of the host.
    #[must_use]
    pub fn fragments(&self) -> &Fragments {
        &self.fragments
    }

    /// Counts a datagram that is delivered to no socket, by reason.
    pub fn count_drop(&self, packet: &Packet, reason: NetworkDrop) {
        let udp = self.udp_counters(packet.headers.network);
        self.counters.drops.add(reason, u64::from(packet.wire_count()));
        match reason {
            NetworkDrop::SocketRcvbuff => {
                udp.rcvbuf_errors.add(1);
                udp.in_errors.add(1);
            }
            NetworkDrop::NotJoined | NetworkDrop::NoSocket => udp.ignored_multi.add(1),
            NetworkDrop::PktTooSmall
            | NetworkDrop::UdpCsum
            | NetworkDrop::Nomem
            | NetworkDrop::SocketClose => udp.in_errors.add(1),
            // Found before UDP is reached: the lines of IP and ICMP count them. Or the process that has the datagram does.
            NetworkDrop::Otherhost
            | NetworkDrop::OtherProcess
            | NetworkDrop::UnhandledProto
            | NetworkDrop::Snapped
            | NetworkDrop::IpInhdr
            | NetworkDrop::IpCsum
            | NetworkDrop::IpInvalidSource
            | NetworkDrop::IpInvalidDest
            | NetworkDrop::IpLocalnet
            | NetworkDrop::IpLocalSource
            | NetworkDrop::UnicastInL2Multicast
            | NetworkDrop::IpInaddrerrors
            | NetworkDrop::SourceRoute
            | NetworkDrop::IpNoproto
            | NetworkDrop::Ipv6disabled
            | NetworkDrop::Ipv6BadExthdr
            | NetworkDrop::Ipv6NdiscFrag
            | NetworkDrop::DupFrag
            | NetworkDrop::FragOverlap
            | NetworkDrop::FragInvalid
            | NetworkDrop::FragTooFar
            | NetworkDrop::FragNomem
            | NetworkDrop::FragReasmTimeout
            | NetworkDrop::IcmpCsum
            | NetworkDrop::TcpCsum => {}
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
        self.counters.drops.add(reason, u64::from(packet.wire_count()));
        NetworkVerdict::Dropped(packet, reason)
    }
}

/// Innermost EtherType. Of a frame without a link header, derived from the IP version.
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
