//! Families of TCP sockets.

use std::fmt;

use forebay::net::Net;
use forebay_stack::tcp::{Flow, Listening, TcpInfo};
use prometheus_client::registry::Unit;

use crate::families::{Families, Label, gauge};

/// Upper bound of the listeners that have samples of their own.
pub const LISTENERS_LISTED_MAX: usize = 256;

/// Upper bound of the connections in a view: those with the most bytes sent and received.
pub const CONNECTIONS_LISTED_MAX: usize = 50;

/// Adds the numbers of connections, and the queues of listeners.
pub(crate) fn encode(net: &Net, families: &mut Families<'_>) -> fmt::Result {
    let states = ("tcp_connections", "TCP connections by state, with the names of ss");
    let each = net.tcp_states();
    families.gauges(
        states,
        None,
        each.iter().map(|(state, of)| ([("state", *state)], gauge(*of))),
    )?;
    let memory = ("tcp_memory", "Memory of the buffers of all TCP connections");
    let none: [Label<'_>; 0] = [];
    families.gauges(memory, Some(&Unit::Bytes), [(none, gauge(net.tcp_memory_bytes()))])?;
    let listeners: Vec<_> = net.tcp_listeners(LISTENERS_LISTED_MAX).iter().map(named).collect();
    let each = |count: fn(&Listening) -> u32| {
        listeners.iter().map(move |(socket, local, of)| {
            ([("socket", socket.as_str()), ("local", local.as_str())], f64::from(count(of)))
        })
    };
    let waiting = ("tcp_listener_waiting_connections", "Connections that wait to be accepted");
    families.gauges(waiting, None, each(|of| of.queues.waiting()))?;
    let backlog = ("tcp_listener_backlog", "Connections that may wait to be accepted, less one");
    families.gauges(backlog, None, each(|of| of.backlog))?;
    let handshakes = ("tcp_listener_handshakes", "Handshakes that are not complete");
    families.gauges(handshakes, None, each(|of| of.queues.handshakes()))
}

fn named(of: &Listening) -> (String, String, Listening) {
    (of.socket.index().to_string(), of.local.to_string(), of.clone())
}

/// Connection with the texts of its labels.
struct NamedConnection {
    local: String,
    peer: String,
    info: TcpInfo,
}

impl NamedConnection {
    fn of((flow, info): (Flow, TcpInfo)) -> Self {
        Self { local: flow.ours.to_string(), peer: flow.theirs.to_string(), info }
    }

    fn labels(&self) -> [Label<'_>; 2] {
        [("local", &self.local), ("peer", &self.peer)]
    }
}

/// Adds the largest connections.
pub(crate) fn encode_connections(net: &Net, families: &mut Families<'_>) -> fmt::Result {
    let largest = net.tcp_connections(CONNECTIONS_LISTED_MAX).into_iter();
    let largest: Vec<_> = largest.map(NamedConnection::of).collect();
    let about = ("tcp_connection", "TCP connections with the most bytes, and their states");
    let facts = largest.iter().map(|of| {
        let [local, peer] = of.labels();
        [local, peer, ("state", of.info.state.name())]
    });
    families.infos(about, facts)?;
    let each =
        |count: fn(&TcpInfo) -> u64| largest.iter().map(move |of| (of.labels(), count(&of.info)));
    let sent = ("tcp_connection_sent", "Bytes that the connection sent, retransmissions counted");
    families.counters(sent, Some(&Unit::Bytes), each(|of| of.tally.bytes_sent))?;
    let received = ("tcp_connection_received", "Bytes that the connection received in order");
    families.counters(received, Some(&Unit::Bytes), each(|of| of.tally.bytes_received))?;
    let resent = ("tcp_connection_segments_resent", "Segments that the connection sent again");
    families.counters(resent, None, each(|of| of.resent.total().into()))?;
    let now = |count: fn(&TcpInfo) -> u32| {
        largest.iter().map(move |of| (of.labels(), f64::from(count(&of.info))))
    };
    let unread = ("tcp_connection_unread", "Bytes received that the application has not read");
    families.gauges(unread, Some(&Unit::Bytes), now(|of| of.unread_bytes))?;
    let queued = ("tcp_connection_unacknowledged", "Bytes written that the peer has not confirmed");
    let bytes = |of: &TcpInfo| of.unsent_bytes.saturating_add(of.unacked_bytes);
    families.gauges(queued, Some(&Unit::Bytes), now(bytes))
}
