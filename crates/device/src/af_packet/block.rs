//! Parser of a block of the rx ring: `struct tpacket_block_desc` and frames, each behind its
//! `struct tpacket3_hdr` (include/uapi/linux/if_packet.h); and of a slot for one frame, behind its
//! `struct tpacket2_hdr`.
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

/// Size of `struct tpacket2_hdr`.
const SLOT_HEADER_BYTES: usize = 32;

/// `ETH_P_8021Q` of include/uapi/linux/if_ether.h: TPID of a stripped tag whose TPID is not
/// reported.
const ETH_P_8021Q: u16 = 0x8100;

/// Contradiction in the kernel's description of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InvalidBlock {
    /// A frame begins outside of the block or inside the block's descriptor.
    Offset,
    /// A frame's bytes, or the `virtio_net_hdr` before them, lie outside of the block or overlap
    /// the frame's header.
    Frame,
    /// The socket does not have a frame that is longer than its slot.
    Absent,
}

impl fmt::Display for InvalidBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Offset => "a frame that begins outside of its block",
            Self::Frame => "a frame that ends outside of its block",
            Self::Absent => "a whole frame in the socket, which has none",
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
        // The descriptor is not a frame.
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
    /// Receive hash; only valid if requested (`BlockRingLayout::hashes`).
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
    /// The stripped tag of a frame with this status, if it has one.
    fn stripped(status: u32, tci: u16, tpid: u16) -> Option<Self> {
        let is_typed = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
        let tag = Self { tpid: if is_typed { tpid } else { ETH_P_8021Q }, tci };
        (status & libc::TP_STATUS_VLAN_VALID != 0).then_some(tag)
    }

    /// Wire format of the tag, as it follows the addresses.
    pub(crate) fn to_bytes(self) -> [u8; TAG_BYTES] {
        let ([a, b], [c, d]) = (self.tpid.to_be_bytes(), self.tci.to_be_bytes());
        [a, b, c, d]
    }
}

/// Completeness of the frame in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SlotContent {
    /// The slot has the whole frame.
    Whole,
    /// The slot has the beginning, and the socket the whole frame (`TP_STATUS_COPY`).
    InSocket,
    /// The slot has the beginning, and the rest is lost: the socket had no room for it.
    Cut,
}

impl<'a> RingFrame<'a> {
    /// The frame of a slot.
    pub(crate) fn in_slot(slot: &'a [u8]) -> Result<(Self, SlotContent), InvalidBlock> {
        let header = slot.first_chunk::<SLOT_HEADER_BYTES>().ok_or(InvalidBlock::Offset)?;
        let [status, wire_len, kept] = std::array::from_fn(|word| u32_at(header, word * 4));
        let mac = usize::from(u16_at(header, 12));
        let (vnet_hdr, bytes) = behind_vnet_hdr(slot, mac, SLOT_HEADER_BYTES)?;
        let bytes = bytes.get(..kept as usize).ok_or(InvalidBlock::Frame)?;
        let content = match status & libc::TP_STATUS_COPY {
            0 if kept >= wire_len => SlotContent::Whole,
            0 => SlotContent::Cut,
            _ => SlotContent::InSocket,
        };
        let frame = Self {
            bytes,
            vnet_hdr: *vnet_hdr,
            wire_len,
            timestamp_ns: time_ns(u32_at(header, 16), u32_at(header, 20)),
            hash: 0,
            tag: Tag::stripped(status, u16_at(header, 24), u16_at(header, 26)),
            is_losing: status & libc::TP_STATUS_LOSING != 0,
            next: 0,
        };
        Ok((frame, content))
    }

    fn at(block: &'a [u8], at: usize) -> Result<Self, InvalidBlock> {
        let behind = block.get(at..).ok_or(InvalidBlock::Offset)?;
        let header = behind.first_chunk::<HEADER_BYTES>().ok_or(InvalidBlock::Offset)?;
        let [next, seconds, nanos, kept, wire_len, status] =
            std::array::from_fn(|word| u32_at(header, word * 4));
        let mac = usize::from(u16_at(header, 24));
        let (vnet_hdr, bytes) = behind_vnet_hdr(behind, mac, HEADER_BYTES)?;
        let bytes = bytes.get(..kept as usize).ok_or(InvalidBlock::Frame)?;
        let tci = u16::try_from(u32_at(header, 32) & 0xffff).unwrap_or_default();
        Ok(Self {
            bytes,
            vnet_hdr: *vnet_hdr,
            wire_len,
            timestamp_ns: time_ns(seconds, nanos),
            hash: u32_at(header, 28),
            tag: Tag::stripped(status, tci, u16_at(header, 36)),
            is_losing: status & libc::TP_STATUS_LOSING != 0,
            next,
        })
    }
}

/// The `virtio_net_hdr` and the bytes behind it, of a frame at `mac`.
fn behind_vnet_hdr(
    bytes: &[u8],
    mac: usize,
    header_bytes: usize,
) -> Result<(&[u8; VIRTIO_NET_HDR_BYTES], &[u8]), InvalidBlock> {
    let before = mac.checked_sub(VIRTIO_NET_HDR_BYTES).filter(|&at| at >= header_bytes);
    let before = bytes.get(before.ok_or(InvalidBlock::Frame)?..).ok_or(InvalidBlock::Frame)?;
    before.split_first_chunk().ok_or(InvalidBlock::Frame)
}

fn time_ns(seconds: u32, nanos: u32) -> u64 {
    u64::from(seconds) * 1_000_000_000 + u64::from(nanos)
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

    /// Slot of 2 KiB with a frame, laid out as by the kernel.
    fn slot(frame: &[u8], status: u32, wire_len: u32) -> Vec<u8> {
        let mut slot = vec![0; 2048];
        put(&mut slot, 0, status);
        put(&mut slot, 4, wire_len);
        put(&mut slot, 8, u32::try_from(frame.len()).unwrap());
        put(&mut slot, 12, 82); // tp_mac, and a tp_net of 0
        put(&mut slot, 16, 1_700_000_000);
        put(&mut slot, 20, 7);
        put(&mut slot, 24, 0x88a8_6064); // tp_vlan_tci, tp_vlan_tpid
        slot[72] = 9;
        slot[82..][..frame.len()].copy_from_slice(frame);
        slot
    }

    #[test]
    fn slot_reads_as_kernel_wrote() {
        let tagged = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
        let whole = slot(&[3; 60], libc::TP_STATUS_USER | tagged, 60);
        let (frame, content) = RingFrame::in_slot(&whole).unwrap();
        assert_eq!(
            (frame.bytes, frame.vnet_hdr[0], content),
            (&[3; 60][..], 9, SlotContent::Whole)
        );
        assert_eq!(frame.timestamp_ns, 1_700_000_000_000_000_007);
        assert_eq!(frame.tag.unwrap().to_bytes(), [0x88, 0xa8, 0x60, 0x64]);
        let long = slot(&[3; 1900], libc::TP_STATUS_USER | libc::TP_STATUS_COPY, 9000);
        let (frame, content) = RingFrame::in_slot(&long).unwrap();
        assert_eq!((frame.wire_len, frame.tag, content), (9000, None, SlotContent::InSocket));
        let lost = slot(&[3; 1900], libc::TP_STATUS_USER, 9000);
        assert_eq!(RingFrame::in_slot(&lost).unwrap().1, SlotContent::Cut);
    }

    #[test]
    fn promise_5_invalid_slot_is_detected() {
        for (at, word) in [(8, 2048 - 81), (8, u32::MAX), (12, 41), (12, 0), (12, 0xffff)] {
            let mut slot = slot(&[1; 60], libc::TP_STATUS_USER, 60);
            put(&mut slot, at, word);
            assert_eq!(RingFrame::in_slot(&slot), Err(InvalidBlock::Frame), "{word} at {at}");
        }
        assert_eq!(RingFrame::in_slot(&[0; 31]), Err(InvalidBlock::Offset));
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
