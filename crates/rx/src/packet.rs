//! A packet on its way: one frame and what the stages have found out about it.

use std::num::NonZeroU16;

use forebay_buf::{Frame, Pool};

use crate::hash::FlowHash;
use crate::nonlinear::PieceReader;
use crate::parse::checksum::Sum;
use crate::parse::{DeviceSum, Headers, Link, Verify, View};

/// One packet. It moves by value through every queue, so it is kept to one cache line.
#[derive(Debug)]
pub struct Packet {
    /// The bytes, from the link header on: all of them, or the first ones, with the others
    /// [in pieces](Self::is_nonlinear) behind them.
    pub frame: Frame,
    /// Time of arrival, by the source, in nanoseconds since 1970; 0 if it does not say.
    pub timestamp_ns: u64,
    /// Place in the order of arrival.
    pub arrival: Arrival,
    /// Length on the wire: longer than the frame with its pieces when the capture was cut short.
    pub wire_len: u32,
    /// The flow's hash. A source sets it if the device computes one; then none is computed here
    /// (RPS-5).
    pub hash: FlowHash,
    /// Offsets of the headers. A source sets the link.
    pub headers: Headers,
    /// The payload of each segment but the last, if this packet is of several. What that makes of
    /// the packet, its [shape](Self::shape) says.
    pub segment_size: SegmentSize,
    /// The sum that the device took of the frame, if it does that. A source sets it; a packet that
    /// is not merged keeps it (LRO-1).
    pub device_sum: Option<DeviceSum>,
}

const _: () = assert!(size_of::<Packet>() <= 64, "a packet is at most one cache line");

/// The payload of each segment but the last, of a packet of several. It says nothing without the
/// packet's frames: see [`Packet::shape`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SegmentSize(Option<NonZeroU16>);

/// Layout of a packet's bytes, and the packets of the wire that it stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// One packet, in one frame.
    Single,
    /// One frame that is yet to be cut into segments with so much payload (the kernel's GSO).
    Gso(NonZeroU16),
    /// Segments with so much payload, each in its frame, which all have the headers of the first: it
    /// was merged of them.
    Merged(NonZeroU16),
    /// One datagram in several frames, each behind the first with nothing but payload: it was
    /// reassembled of fragments where no frame was large enough for it (the kernel's `frag_list`).
    FragList,
}

impl Packet {
    /// A frame that was just received, `wire_len` bytes long on the wire.
    #[inline] // built where it stays: see `Frame::len_bytes`
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

    /// Copies a received frame's bytes in. If checksums are to be verified, the bytes are summed up
    /// on the way, which saves a second look at them, and stand as the device's sum.
    ///
    /// # Panics
    /// When there is less room than that.
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

    /// True if some of it lies in pieces: payload, where a device put it in memory that it shares.
    /// The frame itself holds the headers, in private, at the latest when the packet is
    /// [parsed](crate::parse::parse_packet); who looks at more takes the [`fragments`], or
    /// [copies](Self::copied) it. The device may change what lies in pieces while it is looked at.
    ///
    /// Of a packet in several frames, the first one tells: the others have none where it has none.
    ///
    /// [`fragments`]: Self::fragments
    #[inline]
    #[must_use]
    pub fn is_nonlinear(&self) -> bool {
        self.frame.frag_count() > 0
    }

    /// A copy in one frame of `pool`'s, the payloads of a merged packet one behind the other, to be
    /// [cut](crate::coalesce::cut()) again; where there is no frame so large, in as many frames as
    /// this one. `None`: there are no such frames either.
    #[must_use]
    pub fn copied(&self, pool: &mut Pool) -> Option<Self> {
        let frame = self.copied_whole(pool).or_else(|| self.copied_by_frame(pool))?;
        Some(Self { frame, ..*self })
    }

    /// Bytes of the packet in one frame of `pool`; `None`: there is none free.
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

    /// The same packet, with nothing in pieces any more: what was, is copied into frames of `pool`'s. A
    /// merged packet keeps its segments.
    ///
    /// # Errors
    /// With how many frames it was of: there is no memory for it, and what there was has gone home.
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

    /// Layout of its bytes, and the packets of the wire that it stands for. Whoever reads more than
    /// headers asks this first.
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

    /// The payload of each segment but the last, if this packet is of several, merged or yet to be
    /// cut; else 0.
    #[inline]
    #[must_use]
    pub fn gso_size(&self) -> u16 {
        self.segment_size.0.map_or(0, NonZeroU16::get)
    }

    /// Says that it is of segments with so much payload each, those of its frames or, if it is one,
    /// such as it is yet to be cut into. With 0, that it is one packet of the wire.
    #[inline]
    pub fn set_gso_size(&mut self, gso_size: u16) {
        self.segment_size = SegmentSize(NonZeroU16::new(gso_size));
    }

    /// True if other frames follow the first, in which only a part of the payload is then.
    #[inline]
    #[must_use]
    pub fn is_chain(&self) -> bool {
        self.frame.follower_count() > 0
    }

    /// True if it was merged of several frames, which all are here still, one behind the other.
    #[inline]
    #[must_use]
    pub fn is_merged(&self) -> bool {
        matches!(self.shape(), Shape::Merged(_))
    }

    /// True if it came from the kernel as one frame that is yet to be cut into segments (GSO), or
    /// that the kernel had merged (GRO). It is one frame to whoever counts frames, and its checksum
    /// field holds the pseudo header's sum. See
    /// [`carry_into`](crate::coalesce::gso::VirtioNetHdr::carry_into).
    #[inline]
    #[must_use]
    pub fn is_gso(&self) -> bool {
        matches!(self.shape(), Shape::Gso(_))
    }

    /// The fields of the headers, and the payload: of a merged packet, the first segment's; of one in
    /// pieces, or of a [datagram in several frames](Shape::FragList), what lies in the frame itself.
    /// All of the payload is that of the [segments](Self::segments).
    #[must_use]
    pub fn view(&self) -> View<'_> {
        let bytes = self.frame.data();
        let bytes = match self.segment_size.0 {
            Some(size) if self.is_chain() => self.with_first_payload(size),
            _ => bytes,
        };
        View::new(bytes, &self.headers)
    }

    /// The bytes, without what was behind the first segment: that is not followed by the second.
    #[inline(never)] // what is not cut has no part in it
    fn with_first_payload(&self, size: NonZeroU16) -> &[u8] {
        let bytes = self.frame.data();
        let end = usize::from(self.headers.payload_offset) + usize::from(size.get());
        bytes.get(..end).unwrap_or(bytes)
    }
}

/// A frame without pieces: this one, or a copy. The last `before` bytes of the headroom come along,
/// for what was pulled off a follower is not all dead.
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

/// The number of a frame on its source, modulo 2^32; it rises along each rx queue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Arrival(pub u32);

impl Arrival {
    /// Takes the low half of a frame's number.
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

    /// The frame's full number, given one that is less than 2^31 frames away.
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
