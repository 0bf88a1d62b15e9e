//! Header that a virtio device puts before a packet (virtio 1.2, section 5.1.6).

use forebay_rx::coalesce::gso::{
    DATA_VALID, GSO_NONE, NEEDS_CSUM, VIRTIO_NET_HDR_BYTES, VirtioNetHdr,
};
use forebay_rx::hash::FlowHash;

/// The header of a device with virtio 1: with the count of buffers, used or not.
pub(super) const HEADER_BYTES: u32 = 12;
/// The same with a hash behind it (`VIRTIO_NET_F_HASH_REPORT`).
pub(super) const HASH_HEADER_BYTES: u32 = 20;

/// A header as it was copied in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NetHeader {
    /// Checksum that the packet lacks, and the manner in which it is cut.
    pub offloads: VirtioNetHdr,
    /// Buffers that the packet lies in.
    pub num_buffers: u16,
    /// The device's hash, if it took one.
    pub hash: FlowHash,
}

impl NetHeader {
    /// True if the packet is as any: complete, of one segment and, if the device's hash would be used,
    /// without one. The rest of the header is not to be looked at then (NET4, NET5, NET6).
    #[inline]
    pub(super) fn says_nothing(&self, uses_hash: bool) -> bool {
        let VirtioNetHdr { flags, gso_type, .. } = self.offloads;
        flags & (NEEDS_CSUM | DATA_VALID) == 0
            && gso_type == GSO_NONE
            && !(uses_hash && self.hash.is_some())
    }

    /// Reads it. Of a header without a hash, the last 8 bytes are not looked at.
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
