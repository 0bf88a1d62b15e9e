//! Connections of a flow, for observers.

use std::net::SocketAddr;

use forebay_control::FlowName;
use forebay_control::connection::FlowConnection;
use forebay_rx::hash::FlowHash;
use forebay_stack::tcp::{Flow, Found};

use super::super::endpoint::plain;
use super::super::shared::NetState;

/// Connections reported for one hash, at most.
const TOLD_MAX: usize = 16;

impl NetState {
    /// Connections of a flow: of a name, in either direction; of a hash, those whose last segment had
    /// it, for which the shards are looked through one after the other.
    pub(in crate::net) fn connections_of(
        &self,
        name: &FlowName,
        hash: FlowHash,
    ) -> Vec<FlowConnection> {
        let flows = match *name {
            FlowName::Hash(_) => {
                let of_shard = |shard| self.tcp.flows_of(shard, hash, TOLD_MAX);
                self.tcp.indices().flat_map(of_shard).take(TOLD_MAX).collect()
            }
            FlowName::Endpoints { source, destination, ports: Some([from, to]), .. } => {
                let [theirs, ours] = [(source, from), (destination, to)]
                    .map(|(address, port)| plain(SocketAddr::new(address, port)));
                vec![Flow { ours, theirs }, Flow { ours: theirs, theirs: ours }]
            }
            FlowName::Endpoints { ports: None, .. } => Vec::new(),
        };
        let found = |flow| Some(reported(&flow, self.tcp.find(&flow)?));
        flows.into_iter().filter_map(found).collect()
    }
}

fn reported(flow: &Flow, found: Found) -> FlowConnection {
    let (state, words, waits) = match found {
        Found::Connection(info) => (info.state.name(), info.words(), info.waits()),
        Found::Handshake => ("SYN-RECV", Vec::new(), Vec::new()),
        Found::TimeWait => ("TIME-WAIT", Vec::new(), Vec::new()),
    };
    FlowConnection { local: flow.ours, peer: flow.theirs, state, words, waits }
}
