//! Listeners and connections, as lists for observers.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use forebay_stack::tcp::{Flow, Listening, TcpInfo};

use super::super::Net;
use super::shards::{ShardIndex, TcpShards};

/// Sockets of a shard that are looked at while it is locked, so that a segment waits for a few
/// microseconds at most.
const SOCKETS_A_LOOK: u32 = 32;

/// Sockets that are looked at in all, so that the work is bounded.
const LOOKED_AT_MAX: u32 = 100_000;

/// Connection with its bytes, by which a heap orders it.
struct ByBytes {
    bytes: u64,
    of: (Flow, TcpInfo),
}

impl Net {
    /// Numbers of TCP connections by state, with the names of `ss`. Reading them takes no lock.
    #[must_use]
    pub fn tcp_states(&self) -> Vec<(&'static str, u64)> {
        self.0.tcp.levels()
    }

    /// TCP listeners by address, at most `most`.
    #[must_use]
    pub fn tcp_listeners(&self, most: usize) -> Vec<Listening> {
        self.0.tcp.listening(most)
    }

    /// TCP connections with the most bytes sent and received, at most `most`, the largest first.
    /// At most 100,000 are looked at, in small parts, about 0.1 µs for each.
    #[must_use]
    pub fn tcp_connections(&self, most: usize) -> Vec<(Flow, TcpInfo)> {
        self.0.tcp.largest(most)
    }

    /// Memory of the buffers of all TCP connections, in bytes.
    #[must_use]
    pub fn tcp_memory_bytes(&self) -> u64 {
        self.0.tcp.memory.bytes()
    }
}

impl TcpShards {
    /// Number of connections, handshakes and connections in TIME-WAIT.
    pub(in crate::net) fn flow_count(&self) -> usize {
        self.indices().map(|index| self.shard(index).tcp.flow_count()).sum()
    }

    /// Numbers of connections by state. No shard is locked.
    fn levels(&self) -> Vec<(&'static str, u64)> {
        let mut sums: Vec<(&'static str, u64)> = Vec::new();
        for levels in &self.levels {
            for (place, (state, count)) in levels.iter().enumerate() {
                match sums.get_mut(place) {
                    Some((_, sum)) => *sum += u64::from(count),
                    None => sums.push((state, count.into())),
                }
            }
        }
        sums
    }

    /// Listeners in the order of their addresses, at most `most`.
    fn listening(&self, most: usize) -> Vec<Listening> {
        let mut listed: Vec<Listening> = Vec::new();
        // All shards have the same listeners.
        for listening in self.shard(ShardIndex(0)).tcp.listening() {
            // One that takes both families listens at two addresses; the second one is what was asked for.
            match listed.iter().position(|it| Arc::ptr_eq(&it.queues, &listening.queues)) {
                Some(same) => listed[same] = listening,
                None if listed.len() == most => break,
                None => listed.push(listening),
            }
        }
        listed
    }

    /// Connections with the most bytes sent and received, at most `most`, the largest first. The shards
    /// are looked through in small parts, and between them segments are processed.
    fn largest(&self, most: usize) -> Vec<(Flow, TcpInfo)> {
        let mut largest = BinaryHeap::new();
        if most == 0 {
            return Vec::new();
        }
        let shards = u32::try_from(self.indices().len()).unwrap_or(u32::MAX).max(1);
        for index in self.indices() {
            let mut first = 0;
            loop {
                let shard = self.shard(index);
                let end = shard.tcp.slots().min(LOOKED_AT_MAX / shards);
                if first >= end {
                    break;
                }
                let next = end.min(first + SOCKETS_A_LOOK);
                for (flow, info) in shard.tcp.connections(first..next) {
                    let bytes = info.tally.bytes_sent + info.tally.bytes_received;
                    largest.push(Reverse(ByBytes { bytes, of: (flow, info) }));
                    if largest.len() > most {
                        largest.pop();
                    }
                }
                first = next;
            }
        }
        let largest = largest.into_sorted_vec().into_iter();
        largest.map(|Reverse(ByBytes { of, .. })| of).collect()
    }
}

impl PartialEq for ByBytes {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for ByBytes {}

impl PartialOrd for ByBytes {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByBytes {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.bytes.cmp(&other.bytes)
    }
}
