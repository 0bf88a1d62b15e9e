//! The transmit half of a queue: from the rings of the CPUs into the tx ring, and what is sent back
//! to where it belongs.

use std::collections::VecDeque;

use mem::frame::BEFORE_PACKET_BYTES;
use mem::{Frame, Pool};
use path::Packet;
use path::coalesce::cut;
use path::parse::Link;
use path::pieces::Reader;

use crate::device::egress::{Departures, LaneId};
use crate::device::sink::{SendDrop, Sent};
use crate::sys::xdp::{Continued, KernelLied, Kicked, Socket};

/// Frames that are put into the tx ring at once.
const BATCH_FRAMES: u32 = 256;

/// The most pieces that a frame is sent in: `MAX_SKB_FRAGS` and the head (`linux/skbuff.h`).
const PIECES_MAX: u32 = 17;

/// Ethernet's header, and what a VLAN tag adds to it.
const ETHERNET_BYTES: u32 = 14;
const TAG_BYTES: u32 = 4;
const TAGGED: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];

/// What is to be sent of one queue.
pub(super) struct Transmit {
    departures: Departures,
    /// Segments that have left their rings, and are not in the tx ring yet; oldest first.
    waiting: VecDeque<Segment>,
    /// What lies in the tx ring, by index; filled from `counted` to its end.
    slots: Box<[Slot]>,
    /// The index up to which it is counted what became of it.
    counted: u32,
    /// The end of what is in the tx ring.
    end: u32,
    /// Of the packet that is being counted: what was sent of it, and whether anything was not.
    part: Part,
    /// The longest IP packet that the device sends.
    mtu: u32,
    /// What one frame that the kernel is given can hold.
    room_bytes: u32,
    /// Whether a frame may be sent in pieces.
    is_scattered: bool,
    /// The link was down when the kernel was last called.
    is_down: bool,
    cut: Vec<Packet>,
}

/// A frame that is to be sent.
struct Segment {
    lane: LaneId,
    frame: Frame,
    /// Whether it is the last one of its packet.
    is_last: bool,
}

/// A descriptor in the tx ring.
#[derive(Clone, Copy)]
struct Slot {
    lane: LaneId,
    len_bytes: u32,
    ends: Ends,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Piece,
    Frame,
    Packet,
}

#[derive(Clone, Copy, Default)]
struct Part {
    bytes: u64,
    is_spoilt: bool,
}

impl Transmit {
    /// For a tx ring of so many entries, none if the queue sends nothing.
    pub(super) fn new(departures: Departures, entries: u32, mtu: u32) -> Self {
        let empty = Slot { lane: LaneId(0), len_bytes: 0, ends: Ends::Piece };
        Self {
            departures,
            waiting: VecDeque::new(),
            slots: vec![empty; entries as usize].into(),
            counted: 0,
            end: 0,
            part: Part::default(),
            mtu,
            room_bytes: 0,
            is_scattered: false,
            is_down: false,
            cut: Vec::new(),
        }
    }

    /// Where packets come from.
    pub(super) fn departures(&self) -> &Departures {
        &self.departures
    }

    /// Says what frames the kernel takes: chunks of this size, one for a frame or several.
    pub(super) fn set_chunks(&mut self, chunk_bytes: u32, is_scattered: bool) {
        self.room_bytes = chunk_bytes - BEFORE_PACKET_BYTES;
        self.is_scattered = is_scattered;
    }

    /// Says what the MTU is now.
    pub(super) fn set_mtu(&mut self, mtu: u32) {
        self.mtu = mtu;
    }

    /// Whether anybody sends.
    pub(super) fn is_used(&self) -> bool {
        self.departures.has_lanes()
    }

    /// Whether there is something to be sent, and a link to send it by.
    pub(super) fn has_work(&self) -> bool {
        !self.is_down && self.has_unsent()
    }

    /// Whether there is something to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        self.counted != self.end || !self.waiting.is_empty() || self.departures.has_some()
    }

    /// Sends what there is, as far as the kernel takes it, and takes back the frames of what was sent.
    /// Returns how many frames went into the tx ring.
    pub(super) fn turn(
        &mut self,
        socket: &mut Socket,
        pool: &mut Pool,
    ) -> Result<usize, KernelLied> {
        if socket.is_sending() {
            socket.complete(u32::MAX, |frame| pool.put(frame))?;
        }
        let put = if self.has_unsent() { self.put(socket, pool)? } else { 0 };
        if self.counted != self.end {
            self.kick(socket)?;
            socket.complete(u32::MAX, |frame| pool.put(frame))?;
        }
        Ok(put)
    }

    /// Fills the tx ring.
    fn put(&mut self, socket: &mut Socket, pool: &mut Pool) -> Result<usize, KernelLied> {
        let mut room = socket.send_room(BATCH_FRAMES)?.min(BATCH_FRAMES);
        let mut count = 0;
        while room > 0 {
            let Some(segment) = self.waiting.pop_front().or_else(|| self.next(pool)) else { break };
            let len_bytes = segment.frame.total_len_bytes();
            let pieces = len_bytes.div_ceil(self.room_bytes);
            if pieces > room {
                self.waiting.push_front(segment);
                break;
            }
            let Segment { lane, frame, is_last } = segment;
            let end = if is_last { Ends::Packet } else { Ends::Frame };
            match if pieces == 1 { socket.send(frame, Continued::No) } else { Err(frame) } {
                Ok(()) => self.note(Slot { lane, len_bytes, ends: end }),
                Err(frame) => {
                    if !self.copy(&frame, (lane, end), socket, pool) {
                        // No memory now; it goes when there is some.
                        self.waiting.push_front(Segment { lane, frame, is_last });
                        break;
                    }
                    pool.put(frame);
                }
            }
            room -= pieces;
            count += 1;
        }
        Ok(count)
    }

    fn note(&mut self, slot: Slot) {
        let mask = self.slots.len() - 1;
        self.slots[self.end as usize & mask] = slot;
        self.end = self.end.wrapping_add(1);
    }

    /// Puts a copy of a frame into the tx ring that the kernel cannot be given itself: it lies in
    /// memory of another kind, or in pieces. Returns whether there was memory for it.
    fn copy(
        &mut self,
        frame: &Frame,
        (lane, end): (LaneId, Ends),
        socket: &mut Socket,
        pool: &mut Pool,
    ) -> bool {
        let mut pieces = Vec::new();
        let mut bytes = Reader::at(frame, 0);
        let mut left = frame.total_len_bytes();
        while left > 0 {
            let len_bytes = left.min(self.room_bytes);
            let piece = pool.allocate(self.room_bytes);
            let Some(mut piece) = piece.filter(|piece| socket.takes(piece)) else { return false };
            piece.set_len(len_bytes);
            if bytes.read(piece.data_mut()).is_none() {
                return false;
            }
            pieces.push(piece);
            left -= len_bytes;
        }
        let last = pieces.len().saturating_sub(1);
        for (number, piece) in pieces.into_iter().enumerate() {
            let len_bytes = piece.len_bytes();
            let (ends, continued) =
                if number == last { (end, Continued::No) } else { (Ends::Piece, Continued::Yes) };
            let sent = socket.send(piece, continued);
            debug_assert!(sent.is_ok(), "it was asked whether it takes them");
            self.note(Slot { lane, len_bytes, ends });
        }
        true
    }

    /// The next packet, or its first segment; those that cannot be sent are dropped and counted.
    fn next(&mut self, pool: &mut Pool) -> Option<Segment> {
        loop {
            let (lane, packet) = self.departures.next()?;
            if packet.gso_size == 0 {
                match self.refuses(&packet) {
                    None => return Some(Segment { lane, frame: packet.frame, is_last: true }),
                    Some(reason) => self.drop_packet(lane, reason, [packet], pool),
                }
                continue;
            }
            if let Err(whole) = cut(packet, pool, &mut self.cut) {
                self.drop_packet(lane, SendDrop::Full, [whole], pool);
                continue;
            }
            let mut segments = std::mem::take(&mut self.cut);
            match segments.iter().find_map(|segment| self.refuses(segment)) {
                Some(reason) => self.drop_packet(lane, reason, segments.drain(..), pool),
                None => {
                    let count = segments.len();
                    let numbered = (1..).zip(segments.drain(..));
                    self.waiting.extend(numbered.map(|(number, Packet { frame, .. })| Segment {
                        lane,
                        frame,
                        is_last: number == count,
                    }));
                }
            }
            self.cut = segments;
            if let Some(segment) = self.waiting.pop_front() {
                return Some(segment);
            }
        }
    }

    /// Why it cannot be sent, if it cannot.
    fn refuses(&self, packet: &Packet) -> Option<SendDrop> {
        let bytes = packet.frame.data();
        let Some(&[a, b]) = bytes.get(12..14).and_then(<[u8]>::first_chunk) else {
            return Some(SendDrop::LinkHeader);
        };
        if packet.headers.link != Link::Ethernet {
            return Some(SendDrop::LinkHeader);
        }
        let tag_bytes = if TAGGED.contains(&[a, b]) { TAG_BYTES } else { 0 };
        let pieces_max = if self.is_scattered { PIECES_MAX } else { 1 };
        let longest = (self.mtu + ETHERNET_BYTES + tag_bytes).min(self.room_bytes * pieces_max);
        (packet.frame.total_len_bytes() > longest).then_some(SendDrop::TooLong)
    }

    fn drop_packet(
        &self,
        lane: LaneId,
        reason: SendDrop,
        frames: impl IntoIterator<Item = Packet>,
        pool: &mut Pool,
    ) {
        frames.into_iter().for_each(|packet| pool.put(packet.frame));
        if let Some(counters) = self.departures.counters(lane) {
            counters.add_dropped(reason, 1);
        }
    }

    /// Calls the kernel until it has taken all, or takes no more now. Each call takes some, so there
    /// are at most as many as there are frames.
    fn kick(&mut self, socket: &mut Socket) -> Result<(), KernelLied> {
        loop {
            let kicked = socket.kick();
            let taken = socket.sent()?;
            let has_advanced = taken != self.counted;
            self.count(taken, kicked == Kicked::Dropped && has_advanced);
            self.is_down = [Kicked::Down, Kicked::Gone].contains(&kicked);
            let goes_on = [Kicked::Again, Kicked::Dropped].contains(&kicked);
            if !(goes_on && has_advanced) || self.counted == self.end {
                return Ok(());
            }
        }
    }

    /// Counts what the kernel has taken: all of it was sent, but for the last frame if the device
    /// dropped that.
    fn count(&mut self, taken: u32, is_last_dropped: bool) {
        let mask = self.slots.len().wrapping_sub(1);
        let (mut lane, mut sent, mut dropped) = (LaneId(0), Sent::default(), 0);
        while self.counted != taken {
            let slot = self.slots[self.counted as usize & mask];
            self.counted = self.counted.wrapping_add(1);
            if slot.lane != lane {
                self.add(lane, std::mem::take(&mut sent), std::mem::take(&mut dropped));
                lane = slot.lane;
            }
            self.part.bytes += u64::from(slot.len_bytes);
            if slot.ends == Ends::Piece {
                continue;
            }
            let bytes = std::mem::take(&mut self.part.bytes);
            if is_last_dropped && self.counted == taken {
                self.part.is_spoilt = true;
            } else {
                sent.frames += 1;
                sent.bytes += bytes;
            }
            if slot.ends == Ends::Packet {
                let is_spoilt = std::mem::take(&mut self.part.is_spoilt);
                *if is_spoilt { &mut dropped } else { &mut sent.packets } += 1;
            }
        }
        self.add(lane, sent, dropped);
    }

    fn add(&self, lane: LaneId, sent: Sent, dropped: u64) {
        if let Some(counters) = self.departures.counters(lane) {
            counters.add_sent(sent);
            counters.add_dropped(SendDrop::Refused, dropped);
        }
    }
}

impl Drop for Transmit {
    /// What was not sent will not be. What is in the rings of the CPUs is counted there.
    fn drop(&mut self) {
        let mask = self.slots.len().wrapping_sub(1);
        let unsent = |lane| {
            if let Some(counters) = self.departures.counters(lane) {
                counters.add_dropped(SendDrop::Down, 1);
            }
        };
        let mut index = self.counted;
        while index != self.end {
            let slot = self.slots[index as usize & mask];
            if slot.ends == Ends::Packet {
                unsent(slot.lane);
            }
            index = index.wrapping_add(1);
        }
        self.waiting.iter().filter(|segment| segment.is_last).for_each(|last| unsent(last.lane));
    }
}
