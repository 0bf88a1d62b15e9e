//! Counters of one CPU's network layer, named as in `/proc/net/snmp` and `/proc/net/snmp6`.

use super::drop::NetworkDrop;
use crate::counter::StackCounter;

/// Counters written by one CPU, and read by any thread.
#[derive(Debug, Default)]
pub struct NetworkCounters {
    /// IPv4.
    pub ip: IpCounters,
    /// IPv6.
    pub ip6: IpCounters,
    /// ICMP.
    pub icmp: IcmpCounters,
    /// ICMPv6.
    pub icmp6: IcmpCounters,
    /// UDP over IPv4.
    pub udp: UdpCounters,
    /// UDP over IPv6.
    pub udp6: UdpCounters,
    /// Frames dropped, by [`NetworkDrop::index`].
    pub drops: DropCounters,
}

/// `Ip:` in `/proc/net/snmp`, `Ip6` in `/proc/net/snmp6`.
#[derive(Debug, Default)]
pub struct IpCounters {
    /// Packets received: including invalid ones, excluding those to other hosts' MAC addresses.
    pub in_receives: StackCounter,
    /// Packets dropped because of their header.
    pub in_hdr_errors: StackCounter,
    /// Packets dropped because of their destination.
    pub in_addr_errors: StackCounter,
    /// Packets dropped because of an unknown protocol.
    pub in_unknown_protos: StackCounter,
    /// Packets shorter than their header says.
    pub in_truncated_pkts: StackCounter,
    /// Valid packets dropped.
    pub in_discards: StackCounter,
    /// Packets delivered to a protocol; a reassembled datagram counts once.
    pub in_delivers: StackCounter,
    /// Packets sent.
    pub out_requests: StackCounter,
    /// Fragments received for reassembly.
    pub reasm_reqds: StackCounter,
    /// Datagrams reassembled.
    pub reasm_oks: StackCounter,
    /// Reassembly failures.
    pub reasm_fails: StackCounter,
    /// Datagrams whose reassembly timed out.
    pub reasm_timeout: StackCounter,
}

/// `Icmp:` in `/proc/net/snmp`, `Icmp6` in `/proc/net/snmp6`.
#[derive(Debug, Default)]
pub struct IcmpCounters {
    /// Messages received, including invalid ones.
    pub in_msgs: StackCounter,
    /// Invalid messages.
    pub in_errors: StackCounter,
    /// Messages with a wrong checksum.
    pub in_csum_errors: StackCounter,
    /// Destination unreachable.
    pub in_dest_unreachs: StackCounter,
    /// Time exceeded.
    pub in_time_excds: StackCounter,
    /// Parameter problem.
    pub in_parm_probs: StackCounter,
    /// Packet too big: ICMPv6.
    pub in_pkt_too_bigs: StackCounter,
    /// Echo requests.
    pub in_echos: StackCounter,
    /// Echo replies.
    pub in_echo_reps: StackCounter,
    /// Messages sent.
    pub out_msgs: StackCounter,
    /// Messages not sent because of the limit per destination.
    pub out_rate_limit_host: StackCounter,
    /// Messages not sent because of the limit for all destinations together.
    pub out_rate_limit_global: StackCounter,
    /// Echo replies sent.
    pub out_echo_reps: StackCounter,
    /// Destination unreachable sent.
    pub out_dest_unreachs: StackCounter,
}

/// `Udp:` in `/proc/net/snmp`, `Udp6` in `/proc/net/snmp6`.
#[derive(Debug, Default)]
pub struct UdpCounters {
    /// Datagrams delivered to sockets.
    pub in_datagrams: StackCounter,
    /// Datagrams to ports without a socket.
    pub no_ports: StackCounter,
    /// Datagrams that could not be delivered for another reason.
    pub in_errors: StackCounter,
    /// Datagrams sent.
    pub out_datagrams: StackCounter,
    /// Datagrams that did not fit in the socket's receive buffer.
    pub rcvbuf_errors: StackCounter,
    /// Datagrams that could not be sent for lack of memory.
    pub sndbuf_errors: StackCounter,
    /// Datagrams with a wrong checksum.
    pub in_csum_errors: StackCounter,
    /// Multicast or broadcast datagrams without a matching socket.
    pub ignored_multi: StackCounter,
}

/// One counter for each [`NetworkDrop`].
#[derive(Debug)]
pub struct DropCounters([StackCounter; NetworkDrop::ALL.len()]);

impl Default for DropCounters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| StackCounter::default()))
    }
}

impl DropCounters {
    /// Number of frames dropped for this reason.
    #[must_use]
    pub fn get(&self, reason: NetworkDrop) -> u64 {
        self.counter(reason).get()
    }

    /// Number of frames dropped.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().map(StackCounter::get).sum()
    }

    pub(crate) fn add(&self, reason: NetworkDrop, frames: u64) {
        self.counter(reason).add(frames);
    }

    #[expect(clippy::indexing_slicing, reason = "there is one for each reason")]
    fn counter(&self, reason: NetworkDrop) -> &StackCounter {
        &self.0[reason.index()]
    }
}
