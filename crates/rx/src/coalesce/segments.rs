//! The segments of a merged packet, one by one.
//!
//! The first segment's frame keeps its headers; they are the packet's. Each further frame begins at
//! its payload. Its own headers, just before, are dead: whatever they said, the packet's say, or
//! can be computed. What cannot, when the segment arrived, is written over their end.

use std::fmt;
use std::num::NonZeroU16;

use forebay_buf::Frame;
use forebay_buf::chain::Followers;

use crate::nonlinear::{Stretches, bytes_in};
use crate::packet::{Arrival, Packet, Shape};

/// Arrival number and timestamp.
const TAG_BYTES: usize = 12;

/// A segment of a packet; of one that was not merged, all of it.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// The frame's place in the order of arrival.
    pub arrival: Arrival,
    /// Time of arrival, by the source; 0 if it does not say.
    pub timestamp_ns: u64,
    /// Offset of its payload in that of the packet.
    pub offset: u32,
    /// Payload, as far as it was captured, and lies in its frame itself: of a packet
    /// [in pieces](Packet::is_nonlinear), and of a datagram
    /// [in several frames](crate::packet::Shape::FragList), see
    /// [`payload_fragments`](Self::payload_fragments).
    pub payload: &'a [u8],
    frame: &'a Frame,
    /// True if it goes on in the frames that follow.
    is_list: bool,
    /// Offset of the payload in the frame and its pieces.
    begin: usize,
    len: usize,
}

impl<'a> Segment<'a> {
    fn of_frame(frame: &'a Frame, (begin, len): (usize, usize), whole: &Packet) -> Self {
        let bytes = frame.data().get(begin..).unwrap_or_default();
        let (payload, _) = bytes.split_at(len.min(bytes.len()));
        let Packet { arrival, timestamp_ns, .. } = *whole;
        let is_list = whole.shape() == Shape::FragList;
        Self { arrival, timestamp_ns, offset: 0, payload, frame, is_list, begin, len }
    }

    /// All of its payload, as far as it was captured, in the stretches in which it lies.
    pub fn payload_fragments(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut left = self.len;
        let (frame, is_list) = (self.frame, self.is_list);
        let others = move || frame.followers().flat_map(|frame| bytes_in(frame, 0..usize::MAX));
        let others = is_list.then(others).into_iter().flatten();
        self.stretches().chain(others).map_while(move |bytes| {
            let bytes = bytes.get(..left).unwrap_or(bytes);
            left -= bytes.len();
            (!bytes.is_empty()).then_some(bytes)
        })
    }

    fn stretches(&self) -> Stretches<'a> {
        bytes_in(self.frame, self.begin..self.begin.saturating_add(self.len))
    }
}

impl Packet {
    /// Number of frames that this packet was merged of; 1 if it was not. A datagram is one, however
    /// many fragments it came in.
    #[must_use]
    pub fn segment_count(&self) -> u32 {
        if self.is_merged() { u32::from(self.frame.follower_count()) + 1 } else { 1 }
    }

    /// Packets of the wire that it stands for: those that it was merged of, or is yet to be cut
    /// into.
    #[must_use]
    pub fn wire_count(&self) -> u32 {
        match self.shape() {
            Shape::Single | Shape::FragList => 1,
            Shape::Merged(_) => u32::from(self.frame.follower_count()) + 1,
            Shape::Gso(size) => self.headers.payload_len.div_ceil(size.get()).max(1).into(),
        }
    }

    /// The segments, in the order of arrival.
    #[must_use]
    pub fn segments(&self) -> Segments<'_> {
        Segments { packet: self, next: 0, followers: self.frame.followers() }
    }

    /// The bytes of the packet as one: its headers with the first segment's payload, then the other
    /// payloads, without what was behind them, each with its pieces behind it. Of a datagram in
    /// [several frames](Shape::FragList), the bytes of those.
    pub fn fragments(&self) -> SegmentFragments<'_> {
        let first_len = match self.shape() {
            Shape::Merged(size) => usize::from(self.headers.payload_offset) + self.first_len(size),
            _ => usize::MAX,
        };
        let segments = Segments { next: 1, ..self.segments() };
        SegmentFragments { here: bytes_in(&self.frame, 0..first_len), segments }
    }

    /// Copies of the payload what there is room for: that of all segments, one behind the other.
    /// Returns how much that is.
    pub fn copy_payload(&self, room: &mut [u8]) -> usize {
        if !self.is_chain() && !self.is_nonlinear() {
            let view = self.view();
            let payload = view.payload();
            let len = payload.len().min(room.len());
            room[..len].copy_from_slice(&payload[..len]);
            return len;
        }
        let mut len = 0;
        for bytes in self.segments().flat_map(|segment| segment.payload_fragments()) {
            let room = &mut room[len..];
            let fits = bytes.len().min(room.len());
            room[..fits].copy_from_slice(&bytes[..fits]);
            len += fits;
        }
        len
    }

    /// The length of the first segment's payload, of a packet that was merged.
    fn first_len(&self, size: NonZeroU16) -> usize {
        self.headers.payload_len.min(size.get()).into()
    }

    /// The place in the order of arrival of the last segment.
    #[must_use]
    pub fn last_arrival(&self) -> Arrival {
        let last = self.frame.followers().last().filter(|_| self.is_merged());
        last.map_or(self.arrival, |frame| read_tag(frame).0)
    }
}

/// See [`Packet::fragments`].
pub struct SegmentFragments<'a> {
    /// Rest of the frame in hand.
    here: Stretches<'a>,
    /// Segments of the other frames.
    segments: Segments<'a>,
}

impl<'a> Iterator for SegmentFragments<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            if let Some(bytes) = self.here.next() {
                return Some(bytes);
            }
            if self.segments.packet.shape() == Shape::FragList {
                self.here = bytes_in(self.segments.followers.next()?, 0..usize::MAX);
                continue;
            }
            let segment = self.segments.next()?;
            if segment.payload.len() == segment.len {
                return Some(segment.payload); // nothing of it is in pieces
            }
            self.here = segment.stretches();
        }
    }
}

impl fmt::Debug for SegmentFragments<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fragments(of {:?})", self.segments)
    }
}

/// See [`Packet::segments`].
#[derive(Debug)]
pub struct Segments<'a> {
    packet: &'a Packet,
    /// The number of the next segment.
    next: u32,
    followers: Followers<'a>,
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        let packet = self.packet;
        let size = match packet.shape() {
            Shape::Merged(size) => Some(size),
            Shape::Single | Shape::Gso(_) | Shape::FragList => None,
        };
        let segment = if self.next == 0 {
            let all = usize::from(packet.headers.payload_len);
            let len = size.map_or(all, |size| packet.first_len(size));
            let begin = match packet.headers.payload_offset {
                0 => usize::MAX, // nobody knows of any
                begin => begin.into(),
            };
            Segment::of_frame(&packet.frame, (begin, len), packet)
        } else {
            let size = u32::from(size?.get());
            let frame = self.followers.next()?;
            let (arrival, timestamp_ns) = read_tag(frame);
            let offset = self.next * size;
            let left = u32::from(packet.headers.payload_len).saturating_sub(offset);
            let segment = Segment::of_frame(frame, (0, left.min(size) as usize), packet);
            Segment { arrival, timestamp_ns, offset, ..segment }
        };
        self.next += 1;
        Some(segment)
    }
}

/// Notes in a packet's headers, which are dead from now on, when it arrived, and has its frame
/// begin behind them.
pub(super) fn tag(packet: &mut Packet) {
    let header_len = packet.headers.payload_offset;
    let arrival = packet.arrival.0.to_ne_bytes();
    let timestamp = packet.timestamp_ns.to_ne_bytes();
    let header = packet.frame.data_mut().get_mut(..header_len.into());
    // IP and transport headers have at least 28 bytes.
    if let Some(tag) = header.and_then(<[u8]>::last_chunk_mut::<TAG_BYTES>) {
        tag[..4].copy_from_slice(&arrival);
        tag[4..].copy_from_slice(&timestamp);
    }
    packet.frame.pull(header_len.into());
    if packet.is_nonlinear() {
        give_back_copied(&mut packet.frame);
    }
}

/// Has payload that was copied in along with the headers be where the rest of it is, too: so it is
/// mostly one stretch. What was pulled in of several pieces stays.
fn give_back_copied(frame: &mut Frame) {
    let copied = frame.len_bytes();
    let _ = frame.push_to_frags(copied);
}

/// Note of [`tag`].
pub(super) fn read_tag(frame: &Frame) -> (Arrival, u64) {
    let tag = frame.headroom().last_chunk::<TAG_BYTES>().copied().unwrap_or_default();
    let [a, b, c, d, timestamp @ ..] = tag;
    (Arrival(u32::from_ne_bytes([a, b, c, d])), u64::from_ne_bytes(timestamp))
}
