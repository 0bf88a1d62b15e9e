//! A packet from its network header on, with its captured and original length.

use forebay_rx::packet::Packet;
use forebay_rx::parse::Checksum;

use super::drop::NetworkDrop;

/// Bytes received, from the network header on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wire<'a> {
    /// The bytes present; those of the first frame if the packet is in several.
    pub(super) bytes: &'a [u8],
    /// Length on the wire, padding included.
    pub(super) len: usize,
    /// Checksum state of an IPv4 header, from parsing.
    pub(super) ip_checksum: Checksum,
    /// True if more frames follow the first one.
    is_chain: bool,
}

/// Result of comparing a header's length with the bytes present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Extent {
    Whole,
    /// Present on the wire, but cut off by the capture.
    Snapped,
    /// Longer than the packet on the wire.
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

    /// Compares the packet's length with `len` bytes that a header claims.
    pub(super) fn holds(&self, len: usize) -> Extent {
        if len > self.len {
            Extent::Short
        } else if len > self.bytes.len() && !self.is_chain {
            Extent::Snapped
        } else {
            Extent::Whole
        }
    }

    /// Drop reason for a header that should end at `len` and is not present: `Snapped` if the
    /// capture cut it off, else `reason`.
    pub(super) fn missing(&self, len: usize, reason: NetworkDrop) -> NetworkDrop {
        if len <= self.len { NetworkDrop::Snapped } else { reason }
    }
}
