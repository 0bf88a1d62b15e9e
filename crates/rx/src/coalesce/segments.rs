//! Segments of a merged packet.
//!
//! The first frame keeps its headers, which are those of the packet. Each further frame begins at
//! its payload. Its own headers, just before, are dead: their fields can be taken or computed from
//! the packet's. Arrival number and timestamp cannot, and are written over the end of the dead
//! headers.

use std::fmt;
use std::num::NonZeroU16;

use forebay_buf::Frame;
use forebay_buf::chain::Followers;

use crate::nonlinear::{Stretches, bytes_in};
use crate::packet::{Arrival, Packet, Shape};

/// Length of arrival number and timestamp.
const TAG_BYTES: usize = 12;

/// Segment of a merged packet, or the whole of any other packet.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Number of the frame in the order of arrival.
    pub arrival: Arrival,
    /// Timestamp of the source, in ns; 0 if the source has none.
    pub timestamp_ns: u64,
    /// Offset of the segment's payload in the packet's.
    pub offset: u32,
    /// Captured payload in the frame itself. For a [nonlinear](Packet::is_nonlinear) packet, or a
    /// datagram [in several frames](crate::packet::Shape::FragList), see
    /// [`payload_fragments`](Self::payload_fragments).
    pub payload: &'a [u8],
    frame: &'a Frame,
    /// True if the payload continues in the frames that follow.
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

    /// All of the captured payload, as contiguous stretches of memory.
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
    /// Number of frames that this packet was merged from; 1 if it was not merged. A reassembled
    /// datagram counts as 1.
    #[must_use]
    pub fn segment_count(&self) -> u32 {
        if self.is_merged() { u32::from(self.frame.follower_count()) + 1 } else { 1 }
    }

    /// Number of wire packets that this packet represents: those that it was merged from, or those
    /// that it is to be cut into.
    #[must_use]
    pub fn wire_count(&self) -> u32 {
        match self.shape() {
            Shape::Single | Shape::FragList => 1,
            Shape::Merged(_) => u32::from(self.frame.follower_count()) + 1,
            Shape::Gso(size) => self.headers.payload_len.div_ceil(size.get()).max(1).into(),
        }
    }

    /// Segments, in the order of arrival.
    #[must_use]
    pub fn segments(&self) -> Segments<'_> {
        Segments { packet: self, next: 0, followers: self.frame.followers() }
    }

    /// Bytes of the packet as one: headers and payload of the first segment, then the other
    /// payloads, each with its pieces, and without bytes behind a payload. For a datagram in
    /// [several frames](Shape::FragList), the bytes of all frames.
    pub fn fragments(&self) -> SegmentFragments<'_> {
        let first_len = match self.shape() {
            Shape::Merged(size) => usize::from(self.headers.payload_offset) + self.first_len(size),
            _ => usize::MAX,
        };
        let segments = Segments { next: 1, ..self.segments() };
        SegmentFragments { here: bytes_in(&self.frame, 0..first_len), segments }
    }

    /// Copies the payload of all segments, one behind the other, as far as there is room. Returns
    /// the number of bytes copied.
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

    /// Payload length of the first segment of a merged packet.
    fn first_len(&self, size: NonZeroU16) -> usize {
        self.headers.payload_len.min(size.get()).into()
    }

    /// Number of the last segment in the order of arrival.
    #[must_use]
    pub fn last_arrival(&self) -> Arrival {
        let last = self.frame.followers().last().filter(|_| self.is_merged());
        last.map_or(self.arrival, |frame| read_tag(frame).0)
    }
}

/// Iterator of [`Packet::fragments`].
pub struct SegmentFragments<'a> {
    /// Rest of the current frame.
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
                return Some(segment.payload); // linear
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

/// Iterator of [`Packet::segments`].
#[derive(Debug)]
pub struct Segments<'a> {
    packet: &'a Packet,
    /// Number of the next segment.
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
                0 => usize::MAX, // no payload is known
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

/// Writes arrival number and timestamp over the end of a packet's headers, which are dead from now
/// on, and makes the frame begin behind them.
#[inline(always)]
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

/// Gives payload that was copied along with the headers back to the first piece, where its original
/// is, so that the payload is mostly one stretch. Payload pulled from several pieces stays.
#[cold]
fn give_back_copied(frame: &mut Frame) {
    let copied = frame.len_bytes();
    let _ = frame.push_to_frags(copied);
}

/// Reads the values written by [`tag`].
pub(super) fn read_tag(frame: &Frame) -> (Arrival, u64) {
    let tag = frame.headroom().last_chunk::<TAG_BYTES>().copied().unwrap_or_default();
    let [a, b, c, d, timestamp @ ..] = tag;
    (Arrival(u32::from_ne_bytes([a, b, c, d])), u64::from_ne_bytes(timestamp))
}
