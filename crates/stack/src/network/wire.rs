//! A packet from its network header on, and how much of it there is.

use path::packet::Packet;
use path::parse::Checksum;

use super::drop::NetworkDrop;

/// What was received, from the network header on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wire<'a> {
    /// The bytes: of a packet in several frames, the first one's.
    pub(super) bytes: &'a [u8],
    /// How long it was on the wire, padding included.
    pub(super) len: usize,
    /// What parsing found out about an IPv4 header.
    pub(super) ip_checksum: Checksum,
    /// More frames follow the first.
    is_chain: bool,
}

/// Whether as much is there as a header says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Extent {
    Whole,
    /// It was on the wire, but the capture ends before.
    Snapped,
    /// It was never there.
    Short,
}

impl<'a> Wire<'a> {
    pub(super) fn of(packet: &'a Packet) -> Self {
        let offset = usize::from(packet.headers.network_offset);
        let bytes = packet.frame.data().get(offset..).unwrap_or_default();
        let len = (packet.wire_len as usize).saturating_sub(offset).max(bytes.len());
        let is_chain = packet.is_chain();
        Self { bytes, len, ip_checksum: packet.headers.ip_checksum, is_chain }
    }

    /// Whether `len` bytes are there.
    pub(super) fn holds(&self, len: usize) -> Extent {
        if len > self.len {
            Extent::Short
        } else if len > self.bytes.len() && !self.is_chain {
            Extent::Snapped
        } else {
            Extent::Whole
        }
    }

    /// Why a header that ends behind `len` bytes is not there, if not for `reason`.
    pub(super) fn missing(&self, len: usize, reason: NetworkDrop) -> NetworkDrop {
        if len <= self.len { NetworkDrop::Snapped } else { reason }
    }
}
