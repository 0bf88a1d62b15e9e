//! Packet: a frame, and the metadata that the stages add.

use std::num::NonZeroU16;

use forebay_buf::{Frame, Pool};

use crate::hash::FlowHash;
use crate::nonlinear::PieceReader;
use crate::parse::checksum::Sum;
use crate::parse::{DeviceSum, Headers, Link, Transport, Verify, View};

/// Packet: a frame and its metadata. Moved by value through every queue, so it fits one cache line.
#[derive(Debug)]
pub struct Packet {
    /// Bytes from the link header on: all of them, or those at the front of a
    /// [nonlinear](Self::is_nonlinear) packet, with the rest in pieces.
    pub frame: Frame,
    /// Time of arrival, in ns since 1970; 0 if the source has no timestamps.
    pub timestamp_ns: u64,
    /// Number in the order of arrival, modulo 2^32. In a [lane](crate::ordered_queue) the packet's
    /// ticket takes its place.
    pub arrival: Arrival,
    /// Length on the wire; longer than the captured bytes if the capture is truncated.
    pub wire_len: u32,
    /// Hash of the flow. Set by the source if the device computes it, else by the intake (RPS-5).
    pub hash: FlowHash,
    /// Offsets of the headers. The source sets the link type.
    pub headers: Headers,
    /// Payload length of each segment but the last, if the packet has several; see
    /// [`shape`](Self::shape).
    pub segment_size: SegmentSize,
    /// Sum over the frame that came with it, by the device (`CHECKSUM_COMPLETE`) or the copy into
    /// packet memory. Kept by packets that are not merged (LRO-1).
    pub device_sum: Option<DeviceSum>,
}

const _: () = assert!(size_of::<Packet>() <= 64, "a packet is at most one cache line");

/// Payload length of each segment but the last. Meaningful only with the packet's frames: see
/// [`Packet::shape`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SegmentSize(Option<NonZeroU16>);

/// Layout of a packet's bytes in frames, and number of wire packets that it represents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// One packet, in one frame.
    Single,
    /// One frame, to be segmented into payloads of this length (GSO).
    Gso(NonZeroU16),
    /// Merged segments with payloads of this length, each in its own frame, with the headers of the
    /// first (GRO).
    Merged(NonZeroU16),
    /// One datagram in several frames, those behind the first with payload alone: reassembled from
    /// fragments when no frame was large enough (`frag_list`).
    FragList,
}

impl Packet {
    /// Creates a packet from a frame just received, `wire_len` bytes long on the wire.
    #[inline] // built in place: see `Frame::len_bytes`
    #[must_use]
    pub fn received(frame: Frame, arrival: Arrival, wire_len: u32, link: Link) -> Self {
        Self {
            frame,
            timestamp_ns: 0,
            arrival,
            wire_len,
            hash: FlowHash::NONE,
            headers: Headers { link, ..Headers::default() },
            segment_size: SegmentSize::default(),
            device_sum: None,
        }
    }

    /// Copies a received frame's bytes in. With checksum verification, also sums them while
    /// copying, which saves a second pass, and stores the sum as the device's.
    ///
    /// # Panics
    /// If the frame has less room.
    #[inline]
    pub fn fill(&mut self, bytes: &[u8], verify: Verify) {
        match verify {
            Verify::Nothing => self.frame.copy_from(bytes),
            Verify::Checksums => {
                let sum = Sum::taken(self.frame.copy_summing(bytes));
                self.device_sum = DeviceSum::of_sum(sum, bytes, self.headers.link);
            }
        }
    }

    /// True if part of the payload is in pieces of memory shared with a device
    /// (`skb_is_nonlinear`). The frame itself holds a private copy of the headers, at the latest
    /// once the packet is [parsed](crate::parse::parse_packet). To read more, iterate the
    /// [`fragments`] or take a [copy](Self::copied): the device may change the pieces at any time.
    ///
    /// For a packet in several frames the first one decides: if it has no pieces, none has.
    ///
    /// [`fragments`]: Self::fragments
    #[inline]
    #[must_use]
    pub fn is_nonlinear(&self) -> bool {
        self.frame.frag_count() > 0
    }

    /// Copy in one frame from `pool`. A merged packet's payloads follow each other, to be
    /// [segmented](crate::coalesce::cut()) again. Without a frame that large, a copy in as many
    /// frames as this packet has; `None` without memory.
    #[must_use]
    pub fn copied(&self, pool: &mut Pool) -> Option<Self> {
        let frame = self.copied_whole(pool).or_else(|| self.copied_by_frame(pool))?;
        Some(Self { frame, ..*self })
    }

    /// Copy of the packet's bytes in one frame from `pool`; `None` if none is free.
    #[must_use]
    pub fn copied_whole(&self, pool: &mut Pool) -> Option<Frame> {
        let len_bytes = self.fragments().map(<[u8]>::len).sum::<usize>();
        let len_bytes = u32::try_from(len_bytes).ok()?;
        let mut frame = pool.allocate(len_bytes)?;
        frame.set_len(len_bytes);
        let mut room = frame.data_mut();
        for bytes in self.fragments() {
            let (to, rest) = room.split_at_mut(bytes.len());
            to.copy_from_slice(bytes);
            room = rest;
        }
        Some(frame)
    }

    fn copied_by_frame(&self, pool: &mut Pool) -> Option<Frame> {
        if !self.is_chain() {
            return None;
        }
        let dead_len = usize::from(self.headers.payload_offset);
        let mut head = copied(&self.frame, 0, pool)?;
        for follower in self.frame.followers() {
            let Some(follower) = copied(follower, dead_len, pool) else {
                pool.put(head);
                return None;
            };
            head.append(follower);
        }
        Some(head)
    }

    /// Linearizes the packet: copies its pieces into frames from `pool` (`skb_linearize`). A merged
    /// packet keeps its segments.
    ///
    /// # Errors
    /// Without memory: the number of frames that the packet had. They are returned to their owners.
    pub fn linearized(mut self, pool: &mut Pool) -> Result<Self, u32> {
        let frames = self.segment_count();
        let dead_len = usize::from(self.headers.payload_offset);
        let followers = self.frame.take_followers();
        let head = together(self.frame, 0, pool);
        let mut whole = head;
        for follower in followers {
            match (&mut whole, together(follower, dead_len, pool)) {
                (Some(head), Some(follower)) => head.append(follower),
                (_, follower) => {
                    follower.into_iter().chain(whole.take()).for_each(|frame| pool.put(frame));
                }
            }
        }
        whole.map(|frame| Self { frame, ..self }).ok_or(frames)
    }

    /// Layout of the packet. To be checked before more than the headers is read.
    #[inline]
    #[must_use]
    pub fn shape(&self) -> Shape {
        match (self.segment_size.0, self.is_chain()) {
            (None, false) => Shape::Single,
            (Some(size), false) => Shape::Gso(size),
            (Some(size), true) => Shape::Merged(size),
            (None, true) => Shape::FragList,
        }
    }

    /// Payload length of each segment but the last, of a merged or GSO packet; else 0.
    #[inline]
    #[must_use]
    pub fn gso_size(&self) -> u16 {
        self.segment_size.0.map_or(0, NonZeroU16::get)
    }

    /// Sets the payload length of segments: those in its frames, or those to be cut of its single
    /// frame. 0: one wire packet.
    #[inline]
    pub fn set_gso_size(&mut self, gso_size: u16) {
        self.segment_size = SegmentSize(NonZeroU16::new(gso_size));
    }

    /// True if the packet has several frames, each with a part of the payload.
    #[inline]
    #[must_use]
    pub fn is_chain(&self) -> bool {
        self.frame.follower_count() > 0
    }

    /// True if the packet was merged from several frames, which it still holds.
    #[inline]
    #[must_use]
    pub fn is_merged(&self) -> bool {
        matches!(self.shape(), Shape::Merged(_))
    }

    /// True if the segments are inside a tunnel: a device, the kernel or a socket must get them one
    /// by one (see [`cut`](crate::coalesce::cut())), unless it takes the header of
    /// [`describe_tunnel`](crate::coalesce::gso::describe_tunnel).
    #[inline]
    #[must_use]
    pub fn is_merged_tunnel(&self) -> bool {
        self.headers.transport == Transport::Tunnel
    }

    /// True if the packet came from the kernel as one frame of several segments, not yet cut (GSO)
    /// or merged by the kernel (GRO). Counted as one frame; its checksum field holds the pseudo
    /// header's sum, but all checksums in a [tunnel](Self::is_merged_tunnel) are complete. See [`carry_into`](crate::coalesce::gso::VirtioNetHdr::carry_into).
    #[inline]
    #[must_use]
    pub fn is_gso(&self) -> bool {
        matches!(self.shape(), Shape::Gso(_))
    }

    /// Header fields and payload of the first frame: of a merged packet the first segment, of a
    /// nonlinear packet or a [datagram in several frames](Shape::FragList) the part in the frame
    /// itself. The whole payload is that of the [segments](Self::segments).
    #[must_use]
    pub fn view(&self) -> View<'_> {
        let bytes = self.frame.data();
        let bytes = match self.segment_size.0 {
            Some(size) if self.is_chain() => self.with_first_payload(size),
            _ => bytes,
        };
        View::new(bytes, &self.headers)
    }

    /// Bytes up to the end of the first payload. The second segment does not follow the bytes
    /// behind it.
    #[inline(never)] // rare, so kept out of `view`
    fn with_first_payload(&self, size: NonZeroU16) -> &[u8] {
        let bytes = self.frame.data();
        let end = usize::from(self.headers.payload_offset) + usize::from(size.get());
        bytes.get(..end).unwrap_or(bytes)
    }
}

/// Frame without pieces: the given one, or a copy. The last `before` bytes of the headroom are
/// copied, too: in a follower they hold the dead headers, of which some fields are still read.
fn together(frame: Frame, before: usize, pool: &mut Pool) -> Option<Frame> {
    if frame.frag_count() == 0 {
        return Some(frame);
    }
    let copy = copied(&frame, before, pool);
    pool.put(frame);
    copy
}

fn copied(frame: &Frame, before: usize, pool: &mut Pool) -> Option<Frame> {
    let headroom = frame.headroom();
    let (_, before) = headroom.split_at(headroom.len().saturating_sub(before));
    let before_len = u32::try_from(before.len()).ok()?;
    let len_bytes = before_len.checked_add(frame.total_len_bytes())?;
    let mut copy = pool.allocate(len_bytes)?;
    copy.set_len(len_bytes);
    let (to_before, to) = copy.data_mut().split_at_mut(before.len());
    to_before.copy_from_slice(before);
    PieceReader::at(frame, 0).read(to)?;
    copy.pull(before_len);
    Some(copy)
}

/// Number of a frame on its source, modulo 2^32; increases along each rx queue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Arrival(pub u32);

impl Arrival {
    /// Creates the number from the low half of a frame's full number.
    #[must_use]
    pub fn of_frame(frame: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the number is kept modulo 2^32")]
        Self(frame as u32)
    }

    /// True if this frame came after `other`, given that they are less than 2^31 frames apart.
    #[must_use]
    pub fn is_after(self, other: Self) -> bool {
        let distance = self.0.wrapping_sub(other.0);
        distance != 0 && distance < 1 << 31
    }

    /// Full number of the frame, given a number less than 2^31 frames away.
    #[must_use]
    pub fn unwrap_near(self, frame: u64) -> u64 {
        let ahead = self.0.wrapping_sub(Self::of_frame(frame).0).cast_signed();
        frame.saturating_add_signed(ahead.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_compare_across_wrap() {
        for frame in [0, 5, (1 << 32) - 1, 1 << 32, (7 << 32) + 3] {
            for ahead in [0, 1, 1 << 20] {
                let later = frame + ahead;
                let (first, second) = (Arrival::of_frame(frame), Arrival::of_frame(later));
                assert_eq!(second.is_after(first), ahead > 0);
                assert!(!first.is_after(second));
                assert_eq!(second.unwrap_near(frame), later);
                assert_eq!(first.unwrap_near(later), frame);
            }
        }
    }
}
