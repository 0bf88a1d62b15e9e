//! The segments of a merged packet, one by one.
//!
//! The first segment's frame keeps its headers; they are the packet's. Each further frame begins at
//! its payload. Its own headers, just before, are dead: whatever they said, the packet's say, or can
//! be computed. What cannot, when the segment arrived, is written over their end.

use std::fmt;

use mem::Frame;
use mem::chain::Followers;

use crate::packet::{Arrival, Packet};
use crate::pieces::{Stretches, bytes_in};

/// Arrival number and timestamp.
const TAG_BYTES: usize = 12;

/// A segment of a packet; of one that was not merged, all of it.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// The frame's place in the order of arrival.
    pub arrival: Arrival,
    /// When the source says it arrived; 0 if it does not say.
    pub timestamp_ns: u64,
    /// Where its payload begins in that of the packet.
    pub offset: u32,
    /// Its payload, as far as it was captured, and lies in its frame itself: of a packet
    /// [in pieces](Packet::is_in_pieces), see [`payload_fragments`](Self::payload_fragments).
    pub payload: &'a [u8],
    frame: &'a Frame,
    /// Where in the frame and its pieces the payload begins.
    begin: usize,
    len: usize,
}

impl<'a> Segment<'a> {
    fn of_frame(frame: &'a Frame, (begin, len): (usize, usize), whole: &Packet) -> Self {
        let bytes = frame.data().get(begin..).unwrap_or_default();
        let (payload, _) = bytes.split_at(len.min(bytes.len()));
        let Packet { arrival, timestamp_ns, .. } = *whole;
        Self { arrival, timestamp_ns, offset: 0, payload, frame, begin, len }
    }

    /// All of its payload, as far as it was captured, in the stretches in which it lies.
    pub fn payload_fragments(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.stretches()
    }

    fn stretches(&self) -> Stretches<'a> {
        bytes_in(self.frame, self.begin..self.begin.saturating_add(self.len))
    }
}

impl Packet {
    /// How many frames this packet was merged of; 1 if it was not.
    #[must_use]
    pub fn segment_count(&self) -> u32 {
        u32::from(self.frame.follower_count()) + 1
    }

    /// The segments, in the order of arrival.
    #[must_use]
    pub fn segments(&self) -> Segments<'_> {
        Segments { packet: self, next: 0, followers: self.frame.followers() }
    }

    /// The bytes of the packet as one: its headers with the first segment's payload, then the other
    /// payloads, without what was behind them, each with its pieces behind it. Of a datagram that was
    /// [reassembled](crate::network::reassembly) in several frames (with a `gso_size` of 0), those.
    pub fn fragments(&self) -> Fragments<'_> {
        let first_len = match self.gso_size {
            1.. if self.is_merged() => usize::from(self.headers.payload_offset) + self.first_len(),
            _ => usize::MAX,
        };
        let segments = Segments { next: 1, ..self.segments() };
        Fragments { here: bytes_in(&self.frame, 0..first_len), segments }
    }

    /// The length of the first segment's payload, of a packet that was merged.
    fn first_len(&self) -> usize {
        self.headers.payload_len.min(self.gso_size).into()
    }

    /// The place in the order of arrival of the last segment.
    #[must_use]
    pub fn last_arrival(&self) -> Arrival {
        let last = self.frame.followers().last();
        last.map_or(self.arrival, |frame| read_tag(frame).0)
    }
}

/// See [`Packet::fragments`].
pub struct Fragments<'a> {
    /// What is left of the frame in hand.
    here: Stretches<'a>,
    /// Those of the other frames.
    segments: Segments<'a>,
}

impl<'a> Iterator for Fragments<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            if let Some(bytes) = self.here.next() {
                return Some(bytes);
            }
            let segment = self.segments.next()?;
            if segment.payload.len() == segment.len {
                return Some(segment.payload); // nothing of it is in pieces
            }
            self.here = segment.stretches();
        }
    }
}

impl fmt::Debug for Fragments<'_> {
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
        let offset = self.next * u32::from(packet.gso_size);
        let segment = if self.next == 0 {
            let is_sized = packet.gso_size > 0 && packet.is_merged();
            let len = if is_sized { packet.first_len() } else { packet.headers.payload_len.into() };
            let begin = match packet.headers.payload_offset {
                0 => usize::MAX, // nobody knows of any
                begin => begin.into(),
            };
            Segment::of_frame(&packet.frame, (begin, len), packet)
        } else {
            let frame = self.followers.next()?;
            let (arrival, timestamp_ns) = read_tag(frame);
            let left = u32::from(packet.headers.payload_len).saturating_sub(offset);
            let len = left.min(packet.gso_size.into()) as usize;
            let is_reassembled = packet.gso_size == 0;
            let len = if is_reassembled { usize::MAX } else { len };
            let segment = Segment::of_frame(frame, (0, len), packet);
            Segment { arrival, timestamp_ns, offset, ..segment }
        };
        self.next += 1;
        Some(segment)
    }
}

/// Notes in a packet's headers, which are dead from now on, when it arrived, and has its frame begin
/// behind them.
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
    if packet.is_in_pieces() {
        give_back_copied(&mut packet.frame);
    }
}

/// Has payload that was copied in along with the headers be where the rest of it is, too: so it is
/// mostly one stretch. What was pulled in of several pieces stays.
fn give_back_copied(frame: &mut Frame) {
    let copied = frame.len_bytes();
    let _ = frame.push_to_frags(copied);
}

/// What [`tag`] noted.
pub(super) fn read_tag(frame: &Frame) -> (Arrival, u64) {
    let tag = frame.headroom().last_chunk::<TAG_BYTES>().copied().unwrap_or_default();
    let [a, b, c, d, timestamp @ ..] = tag;
    (Arrival(u32::from_ne_bytes([a, b, c, d])), u64::from_ne_bytes(timestamp))
}
