//! Families of UDP sockets and of the network layer.

use std::fmt::{self, Display, Write};
use std::ops::Range;

use forebay::net::Net;
use forebay::net::counters::{NetworkDrop, SocketCounts};
use forebay_stack::network::neighbours::NeighbourDrops;
use prometheus_client::registry::Unit;

use crate::families::{Families, Label, gauge};
use crate::metrics::CountedSocket;

/// Upper bound of the sockets that have samples of their own, in the order of their slots. The memory
/// of all others is summed, as `other`.
pub const SOCKETS_LISTED_MAX: usize = 10_000;

/// Label of the sockets without samples of their own.
const OTHER: &str = "other";

/// Sockets with samples of their own, and the sum of the others.
#[derive(Default)]
pub(crate) struct ListedSockets {
    bound: u64,
    named: Vec<NamedSocket>,
    /// Labels of the named ones.
    labels: String,
    /// Packet memory of the others, and its limit. Their counters are left out: the sum falls when
    /// one of them is closed, which no counter does.
    others: Option<(u32, u32)>,
}

/// Socket with samples of its own.
struct NamedSocket {
    /// Places of its number and its local address among the labels.
    number: Range<usize>,
    local: Range<usize>,
    counts: SocketCounts,
}

impl ListedSockets {
    /// Adds a socket, behind all others.
    pub(crate) fn add(&mut self, (number, local, counts): CountedSocket) {
        self.bound += 1;
        if self.named.len() < SOCKETS_LISTED_MAX {
            let (number, local) = (self.label(number), self.label(local));
            self.named.push(NamedSocket { number, local, counts });
        } else {
            let (rmem, rcvbuf) = self.others.unwrap_or_default();
            let sum = (rmem.saturating_add(counts.rmem), rcvbuf.saturating_add(counts.rcvbuf));
            self.others = Some(sum);
        }
    }

    fn label(&mut self, value: impl Display) -> Range<usize> {
        let start = self.labels.len();
        // Writing to a string does not fail.
        let _ = write!(self.labels, "{value}");
        start..self.labels.len()
    }

    fn labels_of(&self, of: &NamedSocket) -> [Label<'_>; 2] {
        let text = |of: &Range<usize>| &self.labels[of.clone()];
        [("socket", text(&of.number)), ("local", text(&of.local))]
    }

    /// Adds the families of the sockets.
    pub(crate) fn encode(&self, families: &mut Families<'_>) -> fmt::Result {
        let bound = ("sockets", "UDP sockets bound now");
        families.gauges(bound, None, [([] as [Label<'_>; 0], gauge(self.bound))])?;
        let each = |count: fn(&SocketCounts) -> u64| {
            self.named.iter().map(move |of| (self.labels_of(of), count(&of.counts)))
        };
        let queued = ("socket_datagrams", "Datagrams queued to the socket, read or not");
        families.counters(queued, None, each(|of| of.queued))?;
        let errors =
            ("socket_receive_buffer_errors", "Datagrams dropped for lack of receive buffer");
        families.counters(errors, None, each(|of| of.rcvbuf_errors))?;
        let gauges = |count: fn(&SocketCounts) -> u32, others: Option<u32>| {
            let own =
                self.named.iter().map(move |of| (self.labels_of(of), f64::from(count(&of.counts))));
            let others = others.map(|sum| ([("socket", OTHER), ("local", OTHER)], f64::from(sum)));
            own.chain(others)
        };
        let (rmem, rcvbuf) = self.others.unzip();
        let memory = ("socket_memory", "Packet memory charged to the socket");
        families.gauges(memory, Some(&Unit::Bytes), gauges(|of| of.rmem, rmem))?;
        let buffer = ("socket_receive_buffer", "Upper limit of that memory (SO_RCVBUF)");
        families.gauges(buffer, Some(&Unit::Bytes), gauges(|of| of.rcvbuf, rcvbuf))
    }
}

/// Adds the drops of the network layer by reason, and its counters by the kernel's names.
pub(crate) fn encode_network(net: &Net, families: &mut Families<'_>) -> fmt::Result {
    let dropped = ("network_drops", "Frames dropped after delivery, by reason");
    let each = NetworkDrop::ALL.into_iter().map(|reason| {
        let count = net.counters().iter().map(|counters| counters.drops.get(reason)).sum();
        ([("reason", reason.name())], count)
    });
    families.counters(dropped, None, each)?;
    let neighbours = ("neighbour_drops", "Datagrams dropped while they waited for a neighbour");
    let each = neighbour_drops(net).map(|(reason, count)| ([("reason", reason)], count));
    families.counters(neighbours, None, each)?;
    let (snmp, netstat, snmp6) = (net.snmp(), net.netstat(), net.snmp6());
    let events =
        ("network_events", "Counters of /proc/net/snmp, netstat and snmp6, by their names there");
    let each = snmp_counters(&snmp).chain(snmp_counters(&netstat)).chain(snmp6_counters(&snmp6));
    families.counters(
        events,
        None,
        each.collect::<Vec<_>>().iter().map(|(name, count)| ([("name", name.as_str())], *count)),
    )
}

/// Datagrams dropped while they waited for a neighbour, by reason.
pub(crate) fn neighbour_drops(net: &Net) -> [(&'static str, u64); 3] {
    let NeighbourDrops { neigh_queuefull, neigh_failed, neigh_dead } = net.neighbour_drops();
    [
        ("neigh_queuefull", neigh_queuefull),
        ("neigh_failed", neigh_failed),
        ("neigh_dead", neigh_dead),
    ]
}

/// Counters in pairs of lines: the names after a protocol, and the values after the same.
fn snmp_counters(text: &str) -> impl Iterator<Item = (String, u64)> {
    let lines: Vec<_> = text.lines().filter_map(|line| line.split_once(": ")).collect();
    let pairs = lines.chunks_exact(2).flat_map(|pair| {
        let [(protocol, names), (_, values)] = [pair[0], pair[1]];
        let values = values.split(' ').filter_map(|value| value.parse().ok());
        let named = names.split(' ').map(|name| format!("{protocol}{name}"));
        named.zip(values).collect::<Vec<_>>()
    });
    pairs.collect::<Vec<_>>().into_iter()
}

/// Counters in lines with a name and a value.
fn snmp6_counters(text: &str) -> impl Iterator<Item = (String, u64)> {
    text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn listed(sockets: usize) -> ListedSockets {
        let mut listed = ListedSockets::default();
        for number in 0..sockets {
            let (queued, by_cpu, rcvbuf_errors, rmem, rcvbuf) = (5, Vec::new(), 1, u32::MAX, 2);
            let counts = SocketCounts { queued, by_cpu, rcvbuf_errors, rmem, rcvbuf };
            listed.add((number, SocketAddr::from(([10, 0, 0, 1], 53)), counts));
        }
        listed
    }

    #[test]
    fn met_4_excess_sockets_are_summed() {
        let few = listed(SOCKETS_LISTED_MAX);
        assert_eq!((few.named.len(), few.others), (SOCKETS_LISTED_MAX, None));
        let many = listed(SOCKETS_LISTED_MAX + 3);
        assert_eq!(many.named.len(), SOCKETS_LISTED_MAX);
        assert_eq!(many.bound, SOCKETS_LISTED_MAX as u64 + 3);
        let last = many.named.last().unwrap();
        assert_eq!(many.labels_of(last), [("socket", "9999"), ("local", "10.0.0.1:53")]);
        assert_eq!(many.others, Some((u32::MAX, 6)));
    }

    #[test]
    fn snmp_texts_become_named_counters() {
        let text = "Ip: InReceives InDelivers\nIp: 7 5\nUdp: NoPorts\nUdp: 2\n";
        let named: Vec<_> = snmp_counters(text).collect();
        let expected = [("IpInReceives", 7), ("IpInDelivers", 5), ("UdpNoPorts", 2)];
        assert_eq!(named, expected.map(|(name, count)| (name.to_owned(), count)));
        let named: Vec<_> = snmp6_counters("Ip6InReceives   \t3\nbroken\n").collect();
        assert_eq!(named, [("Ip6InReceives".to_owned(), 3)]);
    }
}
