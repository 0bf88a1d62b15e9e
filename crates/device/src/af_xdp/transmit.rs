//! The transmit half of a queue: from the rings of the CPUs into the tx ring, and what is sent back
//! to where it belongs.

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::{Frame, Pool};
use forebay_rx::Packet;
use forebay_rx::nonlinear::PieceReader;
use forebay_rx::sink::{SendDrop, Sent};
use forebay_sys::xdp::{Continued, InvalidXdpRing, Kicked, Socket};

use crate::tx_queue::{
    LaneId, Outgoing, OutgoingSegment, OutgoingShape, TxQueueConsumer, longest_frame_bytes,
};

/// Frames that are put into the tx ring at once.
const BATCH_FRAMES: u32 = 256;

/// The most pieces that a frame is sent in: `MAX_SKB_FRAGS` and the head (`linux/skbuff.h`).
const PIECES_MAX: u32 = 17;

/// Packets to be sent of one queue.
pub(super) struct XdpTransmit {
    outgoing: Outgoing,
    /// Contents of the tx ring, by index; filled from `counted` to its end.
    slots: Box<[TxSlot]>,
    /// The index up to which it is counted what became of it.
    counted: u32,
    /// The end of what is in the tx ring.
    end: u32,
    /// Of the packet that is being counted: what was sent of it, and whether anything was not.
    part: TxPart,
    limits: XdpTxLimits,
    /// The link was down when the kernel was last called.
    is_down: bool,
}

/// Packets that the device and the kernel take.
#[derive(Clone, Copy)]
struct XdpTxLimits {
    /// The longest IP packet that the device sends.
    mtu: u32,
    /// Bytes that one frame given to the kernel can hold.
    room_bytes: u32,
    /// True if a frame may be sent in pieces.
    is_scattered: bool,
}

impl XdpTxLimits {
    /// Way in which a packet can be sent, or the reason why it cannot.
    fn shape(self, packet: &Packet) -> Result<OutgoingShape, SendDrop> {
        if packet.gso_size() > 0 {
            return Ok(OutgoingShape::Cut);
        }
        let pieces_max = if self.is_scattered { PIECES_MAX } else { 1 };
        let longest = longest_frame_bytes(packet, self.mtu)?.min(self.room_bytes * pieces_max);
        // A datagram in several frames is longer than any of them.
        if packet.frame.total_len_bytes() > longest || packet.is_chain() {
            Err(SendDrop::TooLong)
        } else {
            Ok(OutgoingShape::Whole)
        }
    }
}

/// A descriptor in the tx ring.
#[derive(Clone, Copy)]
struct TxSlot {
    lane: LaneId,
    len_bytes: u32,
    ends: DescriptorEnds,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DescriptorEnds {
    Piece,
    Frame,
    Packet,
}

#[derive(Clone, Copy, Default)]
struct TxPart {
    bytes: u64,
    is_spoilt: bool,
}

impl XdpTransmit {
    /// For a tx ring of so many entries, none if the queue sends nothing.
    pub(super) fn new(departures: TxQueueConsumer, entries: u32, mtu: u32) -> Self {
        let empty = TxSlot { lane: LaneId(0), len_bytes: 0, ends: DescriptorEnds::Piece };
        Self {
            outgoing: Outgoing::new(departures),
            slots: vec![empty; entries as usize].into(),
            counted: 0,
            end: 0,
            part: TxPart::default(),
            limits: XdpTxLimits { mtu, room_bytes: 0, is_scattered: false },
            is_down: false,
        }
    }

    /// Lanes that packets come from.
    pub(super) fn departures(&self) -> &TxQueueConsumer {
        self.outgoing.departures()
    }

    /// Says what frames the kernel takes: chunks of this size, one for a frame or several.
    pub(super) fn set_chunks(&mut self, chunk_bytes: u32, is_scattered: bool) {
        self.limits.room_bytes = chunk_bytes - BEFORE_PACKET_BYTES;
        self.limits.is_scattered = is_scattered;
    }

    /// Says what the MTU is now.
    pub(super) fn set_mtu(&mut self, mtu: u32) {
        self.limits.mtu = mtu;
    }

    /// True if anybody sends.
    pub(super) fn is_used(&self) -> bool {
        self.departures().has_lanes()
    }

    /// True if there is something to be sent, and a link to send it by.
    pub(super) fn has_work(&self) -> bool {
        !self.is_down && self.has_unsent()
    }

    /// True if there is something to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        self.counted != self.end || self.outgoing.has_some()
    }

    /// Sends what there is, as far as the kernel takes it, and takes back the frames of what was sent.
    /// Returns how many frames went into the tx ring.
    pub(super) fn turn(
        &mut self,
        socket: &mut Socket,
        pool: &mut Pool,
    ) -> Result<usize, InvalidXdpRing> {
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
    fn put(&mut self, socket: &mut Socket, pool: &mut Pool) -> Result<usize, InvalidXdpRing> {
        let mut room = socket.send_room(BATCH_FRAMES)?.min(BATCH_FRAMES);
        let mut count = 0;
        while room > 0 {
            let limits = self.limits;
            let Some(segment) = self.outgoing.next(pool, |packet| limits.shape(packet)) else {
                break;
            };
            let len_bytes = segment.packet.frame.total_len_bytes();
            let pieces = len_bytes.div_ceil(limits.room_bytes);
            if pieces > room {
                self.outgoing.put_back(segment);
                break;
            }
            let OutgoingSegment { lane, mut packet, is_last } = segment;
            let end = if is_last { DescriptorEnds::Packet } else { DescriptorEnds::Frame };
            let whole = packet.frame;
            match if pieces == 1 { socket.send(whole, Continued::No) } else { Err(whole) } {
                Ok(()) => self.note(TxSlot { lane, len_bytes, ends: end }),
                Err(frame) => {
                    if !self.copy(&frame, (lane, end), socket, pool) {
                        // No memory now; it goes when there is some.
                        packet.frame = frame;
                        self.outgoing.put_back(OutgoingSegment { lane, packet, is_last });
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

    fn note(&mut self, slot: TxSlot) {
        let mask = self.slots.len() - 1;
        self.slots[self.end as usize & mask] = slot;
        self.end = self.end.wrapping_add(1);
    }

    /// Puts a copy of a frame into the tx ring that the kernel cannot be given itself: it lies in
    /// memory of another kind, or in pieces. Returns whether there was memory for it.
    fn copy(
        &mut self,
        frame: &Frame,
        (lane, end): (LaneId, DescriptorEnds),
        socket: &mut Socket,
        pool: &mut Pool,
    ) -> bool {
        let mut pieces = Vec::new();
        let mut bytes = PieceReader::at(frame, 0);
        let mut left = frame.total_len_bytes();
        while left > 0 {
            let len_bytes = left.min(self.limits.room_bytes);
            let piece = pool.allocate(self.limits.room_bytes);
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
            let (ends, continued) = if number == last {
                (end, Continued::No)
            } else {
                (DescriptorEnds::Piece, Continued::Yes)
            };
            let sent = socket.send(piece, continued);
            debug_assert!(sent.is_ok(), "it was asked whether it takes them");
            self.note(TxSlot { lane, len_bytes, ends });
        }
        true
    }

    /// Calls the kernel until it has taken all, or takes no more now. Each call takes some, so there
    /// are at most as many as there are frames.
    fn kick(&mut self, socket: &mut Socket) -> Result<(), InvalidXdpRing> {
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
                let (sent, dropped) = (std::mem::take(&mut sent), std::mem::take(&mut dropped));
                self.outgoing.count(lane, sent, SendDrop::Refused, dropped);
                lane = slot.lane;
            }
            self.part.bytes += u64::from(slot.len_bytes);
            if slot.ends == DescriptorEnds::Piece {
                continue;
            }
            let bytes = std::mem::take(&mut self.part.bytes);
            if is_last_dropped && self.counted == taken {
                self.part.is_spoilt = true;
            } else {
                sent.frames += 1;
                sent.bytes += bytes;
            }
            if slot.ends == DescriptorEnds::Packet {
                let is_spoilt = std::mem::take(&mut self.part.is_spoilt);
                *if is_spoilt { &mut dropped } else { &mut sent.packets } += 1;
            }
        }
        self.outgoing.count(lane, sent, SendDrop::Refused, dropped);
    }
}

impl Drop for XdpTransmit {
    /// Gives up packets that the kernel has not taken: they will not be sent.
    fn drop(&mut self) {
        let mask = self.slots.len().wrapping_sub(1);
        let mut index = self.counted;
        while index != self.end {
            let slot = self.slots[index as usize & mask];
            if slot.ends == DescriptorEnds::Packet {
                self.outgoing.count(slot.lane, Sent::default(), SendDrop::Down, 1);
            }
            index = index.wrapping_add(1);
        }
    }
}
