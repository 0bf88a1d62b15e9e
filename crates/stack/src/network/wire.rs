//! A packet from its network header on, and how much of it there is.

use path::packet::Packet;
use path::parse::Checksum;

use super::drop::NetworkDrop;

/// Received bytes, from the network header on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wire<'a> {
    /// The bytes: of a packet in several frames, the first one's.
    pub(super) bytes: &'a [u8],
    /// Length on the wire, padding included.
    pub(super) len: usize,
    /// Checksum of an IPv4 header, as parsing found it.
    pub(super) ip_checksum: Checksum,
    /// More frames follow the first.
    is_chain: bool,
}

/// Presence of the bytes that a header names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Extent {
    Whole,
    /// On the wire, but behind the end of the capture.
    Snapped,
    /// Never there.
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

    /// Tells if `len` bytes are there.
    pub(super) fn holds(&self, len: usize) -> Extent {
        if len > self.len {
            Extent::Short
        } else if len > self.bytes.len() && !self.is_chain {
            Extent::Snapped
        } else {
            Extent::Whole
        }
    }

    /// Reason why a header that ends behind `len` bytes is not there, if not `reason`.
    pub(super) fn missing(&self, len: usize, reason: NetworkDrop) -> NetworkDrop {
        if len <= self.len { NetworkDrop::Snapped } else { reason }
    }
}
