//! Families of UDP sockets and of the network layer.

use std::fmt;
use std::net::SocketAddr;

use forebay::net::Net;
use forebay::net::counters::{NetworkDrop, SocketCounts};
use prometheus_client::registry::Unit;

use crate::families::{Families, Label, gauge};

/// Upper bound of the sockets that have samples of their own, in the order of their slots. The memory
/// of all others is summed, as `other`.
pub const SOCKETS_LISTED_MAX: usize = 10_000;

/// Label of the sockets without samples of their own.
const OTHER: &str = "other";

/// Socket with samples of its own, or the sum of several.
struct NamedSocket {
    number: String,
    local: String,
    counts: SocketCounts,
}

impl NamedSocket {
    fn labels(&self) -> [Label<'_>; 2] {
        [("socket", &self.number), ("local", &self.local)]
    }
}

/// Adds the families of these sockets, which have numbers and local addresses.
pub(crate) fn encode_sockets(
    sockets: Vec<(usize, SocketAddr, SocketCounts)>,
    families: &mut Families<'_>,
) -> fmt::Result {
    let bound = ("sockets", "UDP sockets bound now");
    families.gauges(bound, None, [([] as [Label<'_>; 0], gauge(sockets.len() as u64))])?;
    let sockets = listed(sockets);
    // The others' sum falls when one of them is closed, which no counter does.
    let each = |count: fn(&SocketCounts) -> u64| {
        let own = sockets.iter().filter(|socket| socket.number != OTHER);
        own.map(move |socket| (socket.labels(), count(&socket.counts)))
    };
    let queued = ("socket_datagrams", "Datagrams queued to the socket, read or not");
    families.counters(queued, None, each(|of| of.queued))?;
    let errors = ("socket_receive_buffer_errors", "Datagrams dropped for lack of receive buffer");
    families.counters(errors, None, each(|of| of.rcvbuf_errors))?;
    let gauges = |count: fn(&SocketCounts) -> u32| {
        sockets.iter().map(move |socket| (socket.labels(), f64::from(count(&socket.counts))))
    };
    let memory = ("socket_memory", "Packet memory charged to the socket");
    families.gauges(memory, Some(&Unit::Bytes), gauges(|of| of.rmem))?;
    let buffer = ("socket_receive_buffer", "Upper limit of that memory (SO_RCVBUF)");
    families.gauges(buffer, Some(&Unit::Bytes), gauges(|of| of.rcvbuf))
}

/// Adds the drops of the network layer by reason, and its counters by the kernel's names.
pub(crate) fn encode_network(net: &Net, families: &mut Families<'_>) -> fmt::Result {
    let dropped = ("network_drops", "Frames dropped after delivery, by reason");
    let each = NetworkDrop::ALL.into_iter().map(|reason| {
        let count = net.counters().iter().map(|counters| counters.drops.get(reason)).sum();
        ([("reason", reason.name())], count)
    });
    families.counters(dropped, None, each)?;
    let waiting = net.neighbour_drops();
    let neighbours = ("neighbour_drops", "Datagrams dropped while they waited for a neighbour");
    let each = [
        ("neigh_queuefull", waiting.neigh_queuefull),
        ("neigh_failed", waiting.neigh_failed),
        ("neigh_dead", waiting.neigh_dead),
    ];
    families.counters(
        neighbours,
        None,
        each.map(|(reason, count)| ([("reason", reason)], count)),
    )?;
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

/// Sockets with samples of their own, and the sum of the others.
fn listed(mut sockets: Vec<(usize, SocketAddr, SocketCounts)>) -> Vec<NamedSocket> {
    let others = sockets.split_off(sockets.len().min(SOCKETS_LISTED_MAX));
    let named = sockets.into_iter().map(|(number, local, counts)| NamedSocket {
        number: number.to_string(),
        local: local.to_string(),
        counts,
    });
    let sum = others.into_iter().map(|(_, _, counts)| counts).reduce(|sum, more| SocketCounts {
        queued: sum.queued + more.queued,
        by_cpu: Vec::new(),
        rcvbuf_errors: sum.rcvbuf_errors + more.rcvbuf_errors,
        rmem: sum.rmem.saturating_add(more.rmem),
        rcvbuf: sum.rcvbuf.saturating_add(more.rcvbuf),
    });
    let (number, local) = (OTHER.to_owned(), OTHER.to_owned());
    named.chain(sum.map(|counts| NamedSocket { number, local, counts })).collect()
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
    use super::*;

    fn socket(number: usize, queued: u64) -> (usize, SocketAddr, SocketCounts) {
        let (by_cpu, rcvbuf_errors, rmem, rcvbuf) = (Vec::new(), 1, u32::MAX, 2);
        let counts = SocketCounts { queued, by_cpu, rcvbuf_errors, rmem, rcvbuf };
        (number, SocketAddr::from(([10, 0, 0, 1], 53)), counts)
    }

    #[test]
    fn met_4_excess_sockets_are_summed() {
        let few = listed((0..SOCKETS_LISTED_MAX).map(|number| socket(number, 1)).collect());
        assert_eq!(few.len(), SOCKETS_LISTED_MAX);
        let many = listed((0..SOCKETS_LISTED_MAX + 3).map(|number| socket(number, 5)).collect());
        assert_eq!(many.len(), SOCKETS_LISTED_MAX + 1);
        let [.., last, other] = many.as_slice() else { panic!("too few") };
        assert_eq!(last.labels(), [("socket", "9999"), ("local", "10.0.0.1:53")]);
        assert_eq!(other.labels(), [("socket", OTHER), ("local", OTHER)]);
        assert_eq!((other.counts.queued, other.counts.rcvbuf_errors), (15, 3));
        assert_eq!((other.counts.rmem, other.counts.rcvbuf), (u32::MAX, 6));
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
