//! Parser of a block of the rx ring: `struct tpacket_block_desc` and frames, each behind its
//! `struct tpacket3_hdr` (include/uapi/linux/if_packet.h).
//!
//! Contents are not trusted: every offset and length is checked against the block before use.

use std::fmt;

use forebay_rx::coalesce::gso::VIRTIO_NET_HDR_BYTES;

/// Size of `struct tpacket_block_desc`; a block's frames begin after it.
const DESCRIPTOR_BYTES: usize = 48;
const NUM_PKTS_AT: usize = 12;
const OFFSET_TO_FIRST_PKT_AT: usize = 16;

/// Size of a VLAN tag in a frame.
pub(crate) const TAG_BYTES: usize = 4;

/// Size of `struct tpacket3_hdr`.
const HEADER_BYTES: usize = 48;

/// `ETH_P_8021Q` of include/uapi/linux/if_ether.h: TPID of a stripped tag whose TPID is not
/// reported.
const ETH_P_8021Q: u16 = 0x8100;

/// Contradiction in the kernel's description of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InvalidBlock {
    /// A frame begins outside of the block or inside the block's descriptor.
    Offset,
    /// A frame's bytes, or the `virtio_net_hdr` before them, lie outside of the block or overlap
    /// the `tpacket3_hdr`.
    Frame,
}

impl fmt::Display for InvalidBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Offset => "a frame that begins outside of its block",
            Self::Frame => "a frame that ends outside of its block",
        })
    }
}

/// Read position in a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockCursor {
    /// Number of frames not passed.
    left: u32,
    /// Offset of the next frame's header.
    at: usize,
}

impl BlockCursor {
    /// Position of a block's first frame.
    pub(crate) fn at_start(block: &[u8]) -> Result<Self, InvalidBlock> {
        let descriptor = block.first_chunk::<DESCRIPTOR_BYTES>().ok_or(InvalidBlock::Offset)?;
        let left = u32_at(descriptor, NUM_PKTS_AT);
        let at = u32_at(descriptor, OFFSET_TO_FIRST_PKT_AT) as usize;
        // The descriptor is no frame.
        if left > 0 && at < DESCRIPTOR_BYTES {
            return Err(InvalidBlock::Offset);
        }
        Ok(Self { left, at })
    }

    /// Returns the next frame; `None` behind the last.
    pub(crate) fn frame<'a>(&self, block: &'a [u8]) -> Result<Option<RingFrame<'a>>, InvalidBlock> {
        if self.left == 0 { Ok(None) } else { RingFrame::at(block, self.at).map(Some) }
    }

    /// Moves behind a frame that [`frame`](Self::frame) returned.
    pub(crate) fn pass(&mut self, frame: &RingFrame<'_>) -> Result<(), InvalidBlock> {
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            // Frames that overlap could be read without end.
            if (frame.next as usize) < HEADER_BYTES {
                return Err(InvalidBlock::Offset);
            }
            self.at += frame.next as usize;
        }
        Ok(())
    }
}

/// Frame in a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RingFrame<'a> {
    /// Captured bytes: the whole frame, unless it is larger than a block.
    pub(crate) bytes: &'a [u8],
    /// The `struct virtio_net_hdr` before the frame, in native byte order.
    pub(crate) vnet_hdr: [u8; VIRTIO_NET_HDR_BYTES],
    /// Length of the frame on arrival, without a stripped tag.
    pub(crate) wire_len: u32,
    /// Time of arrival, in nanoseconds since 1970.
    pub(crate) timestamp_ns: u64,
    /// Receive hash; only valid if requested (`RingLayout::hashes`).
    pub(crate) hash: u32,
    /// Outer VLAN tag, if the device or the kernel stripped it.
    pub(crate) tag: Option<Tag>,
    /// True if frames were dropped since the statistics were last read (`TP_STATUS_LOSING`).
    pub(crate) is_losing: bool,
    /// Distance from this frame's header to the next one's, in bytes.
    next: u32,
}

/// VLAN tag (IEEE 802.1Q).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag {
    /// EtherType of the tag: 0x8100 or 0x88a8.
    pub(crate) tpid: u16,
    /// Priority and VLAN id (TCI).
    pub(crate) tci: u16,
}

impl Tag {
    /// Wire format of the tag, as it follows the addresses.
    pub(crate) fn to_bytes(self) -> [u8; TAG_BYTES] {
        let ([a, b], [c, d]) = (self.tpid.to_be_bytes(), self.tci.to_be_bytes());
        [a, b, c, d]
    }
}

impl<'a> RingFrame<'a> {
    fn at(block: &'a [u8], at: usize) -> Result<Self, InvalidBlock> {
        let behind = block.get(at..).ok_or(InvalidBlock::Offset)?;
        let header = behind.first_chunk::<HEADER_BYTES>().ok_or(InvalidBlock::Offset)?;
        let [next, seconds, nanos, kept, wire_len, status] =
            std::array::from_fn(|word| u32_at(header, word * 4));
        let mac = usize::from(u16_at(header, 24));
        let before = mac.checked_sub(VIRTIO_NET_HDR_BYTES).filter(|&at| at >= HEADER_BYTES);
        let before = behind.get(before.ok_or(InvalidBlock::Frame)?..).ok_or(InvalidBlock::Frame)?;
        let (vnet_hdr, bytes) = before.split_first_chunk().ok_or(InvalidBlock::Frame)?;
        let bytes = bytes.get(..kept as usize).ok_or(InvalidBlock::Frame)?;
        let tag = || Tag {
            tci: u16::try_from(u32_at(header, 32) & 0xffff).unwrap_or_default(),
            tpid: match status & libc::TP_STATUS_VLAN_TPID_VALID {
                0 => ETH_P_8021Q,
                _ => u16_at(header, 36),
            },
        };
        Ok(Self {
            bytes,
            vnet_hdr: *vnet_hdr,
            wire_len,
            timestamp_ns: u64::from(seconds) * 1_000_000_000 + u64::from(nanos),
            hash: u32_at(header, 28),
            tag: (status & libc::TP_STATUS_VLAN_VALID != 0).then(tag),
            is_losing: status & libc::TP_STATUS_LOSING != 0,
            next,
        })
    }
}

fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |word| u32::from_ne_bytes(*word))
}

fn u16_at<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    bytes[at..].first_chunk().map_or(0, |word| u16::from_ne_bytes(*word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK_BYTES: usize = 4096;

    /// Block with frames of these bytes, laid out as by the kernel.
    fn block(frames: &[&[u8]]) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES];
        put(&mut block, NUM_PKTS_AT, u32::try_from(frames.len()).unwrap());
        put(&mut block, OFFSET_TO_FIRST_PKT_AT, 48);
        let mut at = DESCRIPTOR_BYTES;
        for (number, frame) in (1..).zip(frames) {
            let len = u32::try_from(frame.len()).unwrap();
            let next = (MAC + frame.len()).next_multiple_of(16);
            let is_last = number == frames.len();
            put(&mut block, at, if is_last { 0 } else { u32::try_from(next).unwrap() });
            put(&mut block, at + 4, 1_700_000_000);
            put(&mut block, at + 8, u32::try_from(number).unwrap());
            put(&mut block, at + 12, len);
            put(&mut block, at + 16, len + 1);
            put(&mut block, at + 24, u32::try_from(MAC).unwrap()); // tp_mac, and a tp_net of 0
            block[at + MAC - 10] = u8::try_from(number).unwrap();
            block[at + MAC..][..frame.len()].copy_from_slice(frame);
            at += next;
        }
        block
    }

    /// Offset of the Ethernet header in the kernel's layout: behind `tpacket3_hdr`, `sockaddr_ll`
    /// and room for a `virtio_net_hdr`, so that the network header is aligned.
    const MAC: usize = 98;

    fn put(block: &mut [u8], at: usize, word: u32) {
        block[at..at + 4].copy_from_slice(&word.to_ne_bytes());
    }

    fn read(block: &[u8]) -> Result<Vec<RingFrame<'_>>, InvalidBlock> {
        let mut cursor = BlockCursor::at_start(block)?;
        let mut frames = Vec::new();
        while let Some(frame) = cursor.frame(block)? {
            cursor.pass(&frame)?;
            frames.push(frame);
        }
        Ok(frames)
    }

    #[test]
    fn frames_read_as_kernel_wrote() {
        let frames = [&[1; 60][..], &[], &[3; 1000]];
        let block = block(&frames);
        let read = read(&block).unwrap();
        assert_eq!(read.iter().map(|frame| frame.bytes).collect::<Vec<_>>(), frames);
        assert_eq!(read[2].timestamp_ns, 1_700_000_000_000_000_003);
        assert_eq!((read[2].wire_len, read[2].vnet_hdr[0]), (1001, 3));
        assert_eq!((read[2].tag, read[2].is_losing), (None, false));
    }

    #[test]
    fn stripped_tag_keeps_known_type() {
        let mut block = block(&[&[0; 60]]);
        put(&mut block, 48 + 32, 0x6064);
        put(&mut block, 48 + 36, 0x88a8);
        put(&mut block, 48 + 20, libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_LOSING);
        let frame = read(&block).unwrap()[0];
        assert_eq!(frame.tag.unwrap().to_bytes(), [0x81, 0, 0x60, 0x64]);
        assert!(frame.is_losing);
        let both = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
        put(&mut block, 48 + 20, both);
        let frame = read(&block).unwrap()[0];
        assert_eq!(frame.tag.unwrap().to_bytes(), [0x88, 0xa8, 0x60, 0x64]);
    }

    #[test]
    fn promise_5_invalid_block_is_detected() {
        let frames = [&[1; 60][..], &[2; 60]];
        for (at, word, lie) in [
            (OFFSET_TO_FIRST_PKT_AT, 47, InvalidBlock::Offset), // inside the descriptor
            (OFFSET_TO_FIRST_PKT_AT, 4049, InvalidBlock::Offset), // no room for a header
            (OFFSET_TO_FIRST_PKT_AT, u32::MAX, InvalidBlock::Offset),
            (NUM_PKTS_AT, 3, InvalidBlock::Offset), // the last one has no next
            (48, 0, InvalidBlock::Offset),          // the first one again, for ever
            (48, 5000, InvalidBlock::Offset),
            (48 + 12, 4096 - 48 - 97, InvalidBlock::Frame), // one byte too long
            (48 + 12, u32::MAX, InvalidBlock::Frame),
            (48 + 24, 57, InvalidBlock::Frame), // before it is the header itself
            (48 + 24, 0, InvalidBlock::Frame),
            (48 + 24, 0xffff, InvalidBlock::Frame),
        ] {
            let mut block = block(&frames);
            put(&mut block, at, word);
            assert_eq!(read(&block), Err(lie), "{word} at {at}");
        }
        assert_eq!(read(&[0; 40]), Err(InvalidBlock::Offset));
    }

    proptest! {
        #[test]
        fn promise_5_any_block_ends_reading(
            words in proptest::collection::vec((0usize..1023, any::<u32>(), 0u32..5000), 0..40),
            frames in 0usize..20,
        ) {
            let mut block = block(&vec![&[7; 60][..]; frames]);
            for (at, word, small) in words {
                put(&mut block, at * 4, if at % 2 == 0 { word } else { small });
            }
            // A frame takes at least its header, which bounds the number of frames.
            if let Ok(read) = read(&block) {
                prop_assert!(read.len() <= BLOCK_BYTES / HEADER_BYTES);
            }
        }
    }
}
