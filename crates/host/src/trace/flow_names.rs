//! How a trace names flows and their packets: by stamps, TCP connections, or hashes.

use std::collections::HashMap;

use path::Packet;

use crate::device::synthetic::{STAMP_BYTES, STAMP_MAGIC};

/// Connections that are told apart; further ones go by their hash.
const CONNECTIONS_MAX: usize = 1 << 20;

/// A packet's place in its flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FlowName {
    /// The flow.
    pub(super) flow: u64,
    /// Where in it: a sequence number that rises.
    pub(super) sequence: u64,
}

/// The names given so far.
#[derive(Debug, Default)]
pub(super) struct FlowNames {
    connections: HashMap<Endpoints, Connection>,
}

/// Addresses and ports as they stand in the packet.
type Endpoints = (Box<[u8]>, [u8; 4]);

/// One direction of a TCP connection.
#[derive(Clone, Copy, Debug)]
struct Connection {
    number: u64,
    /// The stream offset of its last packet, all 64 bits of it.
    offset: u64,
}

impl FlowNames {
    /// The name of a packet, which was frame `frame` of its source.
    pub(super) fn of(&mut self, packet: &Packet, frame: u64) -> FlowName {
        stamp(packet)
            .or_else(|| self.connection(packet))
            .unwrap_or(FlowName { flow: packet.hash.0.into(), sequence: frame })
    }

    fn connection(&mut self, packet: &Packet) -> Option<FlowName> {
        let view = packet.view();
        let sequence = view.tcp_sequence()?;
        let endpoints = (view.address_bytes()?.into(), *view.port_bytes()?);
        let number = self.connections.len();
        if number >= CONNECTIONS_MAX && !self.connections.contains_key(&endpoints) {
            return None;
        }
        let connection = self
            .connections
            .entry(endpoints)
            .or_insert(Connection { number: number as u64, offset: sequence.into() });
        connection.offset = unwrap_near(sequence, connection.offset);
        Some(FlowName { flow: connection.number, sequence: connection.offset })
    }
}

/// The name that a stamped payload carries.
pub(super) fn stamp(packet: &Packet) -> Option<FlowName> {
    let view = packet.view();
    let stamp = view.payload().first_chunk::<STAMP_BYTES>()?;
    let (magic, rest) = stamp.split_first_chunk::<4>()?;
    let (flow, sequence) = rest.split_first_chunk::<4>()?;
    (*magic == STAMP_MAGIC).then_some(FlowName {
        flow: u32::from_be_bytes(*flow).into(),
        sequence: u64::from_be_bytes(*sequence.first_chunk()?),
    })
}

/// The 64-bit offset nearest to `offset` that ends in `sequence`.
fn unwrap_near(sequence: u32, offset: u64) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "sequence numbers are the low half")]
    let low = offset as u32;
    offset.saturating_add_signed(sequence.wrapping_sub(low).cast_signed().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_offsets_go_on_where_sequence_numbers_wrap() {
        assert_eq!(unwrap_near(5, (1 << 32) - 10), (1 << 32) + 5);
        assert_eq!(unwrap_near(u32::MAX, 1 << 32), (1 << 32) - 1);
        assert_eq!(unwrap_near(7, 7), 7);
    }
}
