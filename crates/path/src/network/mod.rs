//! Network: IP as a host receives it. What comes out is what Linux 6.18 would hand to a UDP socket
//! with its default settings (RFC 1122, RFC 8200), and every other packet has a reason.
// Bytes from outside are taken by patterns and checked slices only.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::panic))]

pub mod compose;
pub mod counters;
pub mod drop;
pub mod identity;

use std::sync::Arc;

use mem::Pool;

use crate::packet::Packet;
pub use counters::NetworkCounters;
pub use drop::NetworkDrop;
pub use identity::{Identity, Prefix};

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
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self { icmp_ratelimit_ns: 1_000_000_000, icmp_msgs_per_sec: 1000, icmp_msgs_burst: 50 }
    }
}

/// What became of a packet.
#[must_use]
#[derive(Debug)]
pub enum Received {
    /// A whole, valid UDP datagram for this host: `headers` describe it, its frame ends where it
    /// does, and begins with the link header still.
    Datagram(Packet),
    /// A packet to be sent out by the device that the received one came from, as it is: an answer.
    Answer(Packet),
    /// Its work is done; its frame is to go home.
    Taken(Packet),
    /// A fragment: its frame waits for the others.
    Kept,
    /// Nobody gets it.
    Dropped(Packet, NetworkDrop),
}

/// The network layer of one CPU.
#[derive(Debug)]
pub struct Network {
    config: NetworkConfig,
    counters: Arc<NetworkCounters>,
}

impl Network {
    /// One that counts here.
    #[must_use]
    pub fn new(config: NetworkConfig, counters: Arc<NetworkCounters>) -> Self {
        Self { config, counters }
    }

    /// Judges a packet that [`parse`](crate::parse) has walked over, and that came in on a device on
    /// which we are `on`.
    pub fn receive(
        &mut self,
        packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Received {
        let _ = (on, now_ns, pool);
        self.counters.drops.add(NetworkDrop::UnhandledProto, 1);
        Received::Dropped(packet, NetworkDrop::UnhandledProto)
    }

    /// Answers a datagram for whose port there is no socket: port unreachable, as often as the
    /// kernel would.
    pub fn unreachable(
        &mut self,
        packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Received {
        let _ = (on, now_ns, pool, self.config);
        self.counters.drops.add(NetworkDrop::NoSocket, 1);
        Received::Dropped(packet, NetworkDrop::NoSocket)
    }

    /// Gives up datagrams that were not complete in time. Their frames go to `dropped`.
    pub fn expire(&mut self, now_ns: u64, dropped: &mut Vec<(Packet, NetworkDrop)>) {
        let _ = (now_ns, dropped);
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
}
