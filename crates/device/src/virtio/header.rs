//! Header that a virtio device puts before a packet (virtio 1.2, section 5.1.6).

use forebay_rx::coalesce::gso::{
    DATA_VALID, GSO_NONE, NEEDS_CSUM, VIRTIO_NET_HDR_BYTES, VirtioNetHdr,
};
use forebay_rx::hash::FlowHash;

/// Length of the virtio 1 header, which always has the number of buffers.
pub(super) const HEADER_BYTES: u32 = 12;
/// Length of the header with a hash (`VIRTIO_NET_F_HASH_REPORT`).
pub(super) const HASH_HEADER_BYTES: u32 = 20;

/// Private copy of a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NetHeader {
    /// Checksum and segmentation offloads of the packet.
    pub offloads: VirtioNetHdr,
    /// Number of buffers of the packet.
    pub num_buffers: u16,
    /// Hash of the device, if it has computed one.
    pub hash: FlowHash,
}

impl NetHeader {
    /// True for an ordinary packet: complete, of one segment and, if the device's hash would be
    /// used, without one. The rest of the header must then be ignored (NET4, NET5, NET6).
    #[inline]
    pub(super) fn says_nothing(&self, uses_hash: bool) -> bool {
        let VirtioNetHdr { flags, gso_type, .. } = self.offloads;
        flags & (NEEDS_CSUM | DATA_VALID) == 0
            && gso_type == GSO_NONE
            && !(uses_hash && self.hash.is_some())
    }

    /// Decodes a header. Without a hash, the last 8 bytes are ignored.
    #[inline]
    #[must_use]
    pub(super) fn from_bytes(bytes: &[u8; HASH_HEADER_BYTES as usize], has_hash: bool) -> Self {
        let &[
            a,
            b,
            c,
            d,
            e,
            f,
            g,
            h,
            i,
            j,
            low,
            high,
            h0,
            h1,
            h2,
            h3,
            report_low,
            report_high,
            _,
            _,
        ] = bytes;
        let offloads: [u8; VIRTIO_NET_HDR_BYTES] = [a, b, c, d, e, f, g, h, i, j];
        let is_hashed = has_hash && [report_low, report_high] != [0; 2];
        let hash = u32::from_le_bytes([h0, h1, h2, h3]);
        Self {
            offloads: VirtioNetHdr::from_bytes(offloads),
            num_buffers: u16::from_le_bytes([low, high]),
            hash: if is_hashed { FlowHash::computed(hash) } else { FlowHash::NONE },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [u8; 20] =
        [1, 4, 54, 0, 0xa8, 5, 34, 0, 16, 0, 3, 0, 0xef, 0xbe, 0xad, 0xde, 2, 0, 9, 9];

    #[test]
    fn fields_little_endian_at_specified_offsets() {
        let header = NetHeader::from_bytes(&BYTES, true);
        let offloads = VirtioNetHdr {
            flags: 1,
            gso_type: 4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
        };
        let hash = FlowHash::computed(0xdead_beef);
        assert_eq!(header, NetHeader { offloads, num_buffers: 3, hash });
    }

    #[test]
    fn rps_5_hash_needs_agreement() {
        assert_eq!(NetHeader::from_bytes(&BYTES, false).hash, FlowHash::NONE);
        let mut unhashed = BYTES;
        unhashed[16] = 0;
        assert_eq!(NetHeader::from_bytes(&unhashed, true).hash, FlowHash::NONE);
    }
}
