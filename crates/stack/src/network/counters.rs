//! Counters of one CPU's network layer, named as in `/proc/net/snmp` and `/proc/net/snmp6`.

use forebay_rx::counters::Counter;

use super::drop::NetworkDrop;

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
    pub in_receives: Counter,
    /// Packets dropped because of their header.
    pub in_hdr_errors: Counter,
    /// Packets dropped because of their destination.
    pub in_addr_errors: Counter,
    /// Packets dropped because of an unknown protocol.
    pub in_unknown_protos: Counter,
    /// Packets shorter than their header says.
    pub in_truncated_pkts: Counter,
    /// Valid packets dropped.
    pub in_discards: Counter,
    /// Packets delivered to a protocol; a reassembled datagram counts once.
    pub in_delivers: Counter,
    /// Packets sent.
    pub out_requests: Counter,
    /// Fragments received for reassembly.
    pub reasm_reqds: Counter,
    /// Datagrams reassembled.
    pub reasm_oks: Counter,
    /// Reassembly failures.
    pub reasm_fails: Counter,
    /// Datagrams whose reassembly timed out.
    pub reasm_timeout: Counter,
}

/// `Icmp:` in `/proc/net/snmp`, `Icmp6` in `/proc/net/snmp6`.
#[derive(Debug, Default)]
pub struct IcmpCounters {
    /// Messages received, including invalid ones.
    pub in_msgs: Counter,
    /// Invalid messages.
    pub in_errors: Counter,
    /// Messages with a wrong checksum.
    pub in_csum_errors: Counter,
    /// Destination unreachable.
    pub in_dest_unreachs: Counter,
    /// Time exceeded.
    pub in_time_excds: Counter,
    /// Parameter problem.
    pub in_parm_probs: Counter,
    /// Packet too big: ICMPv6.
    pub in_pkt_too_bigs: Counter,
    /// Echo requests.
    pub in_echos: Counter,
    /// Echo replies.
    pub in_echo_reps: Counter,
    /// Messages sent.
    pub out_msgs: Counter,
    /// Messages not sent because of the limit per destination.
    pub out_rate_limit_host: Counter,
    /// Messages not sent because of the limit for all destinations together.
    pub out_rate_limit_global: Counter,
    /// Echo replies sent.
    pub out_echo_reps: Counter,
    /// Destination unreachable sent.
    pub out_dest_unreachs: Counter,
}

/// `Udp:` in `/proc/net/snmp`, `Udp6` in `/proc/net/snmp6`.
#[derive(Debug, Default)]
pub struct UdpCounters {
    /// Datagrams delivered to sockets.
    pub in_datagrams: Counter,
    /// Datagrams to ports without a socket.
    pub no_ports: Counter,
    /// Datagrams that could not be delivered for another reason.
    pub in_errors: Counter,
    /// Datagrams sent.
    pub out_datagrams: Counter,
    /// Datagrams that did not fit in the socket's receive buffer.
    pub rcvbuf_errors: Counter,
    /// Datagrams that could not be sent for lack of memory.
    pub sndbuf_errors: Counter,
    /// Datagrams with a wrong checksum.
    pub in_csum_errors: Counter,
    /// Multicast or broadcast datagrams without a matching socket.
    pub ignored_multi: Counter,
}

/// One counter for each [`NetworkDrop`].
#[derive(Debug)]
pub struct DropCounters([Counter; NetworkDrop::ALL.len()]);

impl Default for DropCounters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Counter::default()))
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
        self.0.iter().map(Counter::get).sum()
    }

    pub(crate) fn add(&self, reason: NetworkDrop, frames: u64) {
        self.counter(reason).add(frames);
    }

    #[expect(clippy::indexing_slicing, reason = "there is one for each reason")]
    fn counter(&self, reason: NetworkDrop) -> &Counter {
        &self.0[reason.index()]
    }
}
