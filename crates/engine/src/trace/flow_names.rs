//! Names of flows and their packets in a trace, from stamps, TCP connections or hashes.
//!
//! Each kind has a number range of its own, so that no two flows get the same name:
//!
//! | numbers | source of the name |
//! |---|---|
//! | below 2^32 | the stamp's flow |
//! | 2^32 and up | the flow hash, added to 2^32 |
//! | 2^33 and up | the TCP connection, counted from there |
//! | 2^34 and up | the rx queue, added to 2^34, of packets without a hash |

use std::collections::HashMap;

use forebay_device::synthetic::{STAMP_BYTES, STAMP_MAGIC};
use forebay_rx::coalesce::Segment;
use forebay_rx::hash::FlowHash;
use forebay_rx::{Packet, RxQueue};

/// Maximum number of connections with names of their own; further ones are named by hash.
const CONNECTIONS_MAX: usize = 1 << 20;

/// First number of flows that are named by hash: past all stamps.
const HASHES: u64 = 1 << 32;

/// First number of TCP connections: past all hashes.
const CONNECTIONS: u64 = 1 << 33;

/// First number of packets without a hash: past all connections.
const UNSTEERED: u64 = 1 << 34;

/// Name of a packet: its flow, and its position there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TracedFlowName {
    /// The flow.
    pub(super) flow: u64,
    /// Position in the flow: an increasing sequence number.
    pub(super) sequence: u64,
}

/// Names given so far.
#[derive(Debug, Default)]
pub(super) struct FlowNames {
    connections: HashMap<Endpoints, TracedConnection>,
    /// Flow of the last packet with each hash, unless it is named by the hash.
    by_hash: HashMap<FlowHash, u64>,
}

/// Addresses and ports, in the packet's bytes.
type Endpoints = (Box<[u8]>, [u8; 4]);

/// One direction of a TCP connection.
#[derive(Clone, Copy, Debug)]
struct TracedConnection {
    number: u64,
    /// Stream offset of its last packet, extended to 64 bits.
    offset: u64,
}

impl TracedConnection {
    /// Connection whose first packet has this sequence number. Its stream begins past offset 2^32,
    /// so that older segments that come later have offsets, too.
    fn begun(number: u64, sequence: u32) -> Self {
        Self { number, offset: 1 << 32 | u64::from(sequence) }
    }
}

impl FlowNames {
    /// Name of a segment of a packet that was frame `frame` of its source.
    pub(super) fn of(
        &mut self,
        (packet, queue): (&Packet, RxQueue),
        segment: &Segment<'_>,
        frame: u64,
    ) -> TracedFlowName {
        let name = stamp(packet, segment).or_else(|| self.connection(packet, segment.offset));
        let Some(name) = name else {
            let has_hash = packet.hash.is_some();
            let flow = if has_hash { by_hash(packet.hash) } else { UNSTEERED + u64::from(queue.0) };
            return TracedFlowName { flow, sequence: frame };
        };
        if self.by_hash.len() < CONNECTIONS_MAX || self.by_hash.contains_key(&packet.hash) {
            self.by_hash.insert(packet.hash, name.flow);
        }
        name
    }

    /// Number of a flow whose packets have this hash.
    pub(super) fn number_of(&self, hash: FlowHash) -> u64 {
        self.by_hash.get(&hash).copied().unwrap_or_else(|| by_hash(hash))
    }

    fn connection(&mut self, packet: &Packet, offset: u32) -> Option<TracedFlowName> {
        let view = packet.view();
        let sequence = view.tcp_sequence()?.wrapping_add(offset);
        let endpoints = (view.address_bytes()?.into(), *view.port_bytes()?);
        let known = self.connections.len();
        // The map is full: further connections are named by hash.
        if known >= CONNECTIONS_MAX && !self.connections.contains_key(&endpoints) {
            return None;
        }
        let connection = self
            .connections
            .entry(endpoints)
            .or_insert_with(|| TracedConnection::begun(CONNECTIONS + known as u64, sequence));
        connection.offset = unwrap_near(sequence, connection.offset);
        Some(TracedFlowName { flow: connection.number, sequence: connection.offset })
    }
}

/// Number of a flow that is named by its hash.
fn by_hash(hash: FlowHash) -> u64 {
    HASHES + u64::from(hash.0)
}

/// Name in a stamped payload. A payload in a tunnel is not searched for a stamp: merged or not, such a
/// packet is named by its hash.
pub(super) fn stamp(packet: &Packet, segment: &Segment<'_>) -> Option<TracedFlowName> {
    if packet.is_merged_tunnel() {
        return None;
    }
    let mut stamp = [0; STAMP_BYTES];
    let mut bytes = segment.payload_fragments().flatten();
    for byte in &mut stamp {
        *byte = *bytes.next()?;
    }
    let (magic, rest) = stamp.split_first_chunk::<4>()?;
    let (flow, sequence) = rest.split_first_chunk::<4>()?;
    (*magic == STAMP_MAGIC).then_some(TracedFlowName {
        flow: u32::from_be_bytes(*flow).into(),
        sequence: u64::from_be_bytes(*sequence.first_chunk()?),
    })
}

/// The 64-bit offset nearest to `offset` whose lower half is `sequence`.
fn unwrap_near(sequence: u32, offset: u64) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "sequence numbers are the low half")]
    let low = offset as u32;
    offset.saturating_add_signed(sequence.wrapping_sub(low).cast_signed().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_segments_have_lower_offsets() {
        let first = TracedConnection::begun(CONNECTIONS, 5).offset;
        let older = [4, 0, u32::MAX, 1 << 31 | 6].map(|sequence| unwrap_near(sequence, first));
        assert!(older[0] < first && older.is_sorted_by(|newer, older| newer > older), "{older:?}");
    }

    #[test]
    fn stream_offsets_cross_sequence_wrap() {
        assert_eq!(unwrap_near(5, (1 << 32) - 10), (1 << 32) + 5);
        assert_eq!(unwrap_near(u32::MAX, 1 << 32), (1 << 32) - 1);
        assert_eq!(unwrap_near(7, 7), 7);
    }
}
