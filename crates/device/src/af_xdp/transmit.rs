//! Transmit half of a queue: from the rings of the CPUs into the tx ring, and sent frames back to
//! their owners.

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::{Frame, Pool};
use forebay_rx::Packet;
use forebay_rx::nonlinear::PieceReader;
use forebay_rx::sink::{SendDrop, Sent};
use forebay_sys::xdp::{Continued, InvalidXdpRing, Kicked, Socket};

use crate::tx_queue::{
    LaneId, Outgoing, OutgoingSegment, OutgoingShape, TxQueueConsumer, longest_frame_bytes,
};

/// Maximum number of frames put into the tx ring at once.
const BATCH_FRAMES: u32 = 256;

/// Maximum number of pieces of a frame: `MAX_SKB_FRAGS` and the head (`linux/skbuff.h`).
const PIECES_MAX: u32 = 17;

/// Transmit state of one queue.
pub(super) struct XdpTransmit {
    outgoing: Outgoing,
    /// Contents of the tx ring, by index; valid from `counted` up to `end`.
    slots: Box<[TxSlot]>,
    /// Index up to which results were counted.
    counted: u32,
    /// End of the tx ring's contents.
    end: u32,
    /// Counts of the packet whose last frame was not counted yet.
    part: TxPart,
    limits: XdpTxLimits,
    /// True if the link was down at the last call of the kernel.
    is_down: bool,
}

/// Limits of the device and the kernel for packets.
#[derive(Clone, Copy)]
struct XdpTxLimits {
    /// Longest IP packet that the device sends.
    mtu: u32,
    /// Payload bytes of one frame of the tx ring.
    room_bytes: u32,
    /// True if a frame may be sent in several pieces.
    is_scattered: bool,
}

impl XdpTxLimits {
    /// Returns how a packet can be sent, or why it cannot.
    fn shape(self, packet: &Packet) -> Result<OutgoingShape, SendDrop> {
        if packet.gso_size() > 0 {
            return Ok(OutgoingShape::Cut);
        }
        let pieces_max = if self.is_scattered { PIECES_MAX } else { 1 };
        let longest = longest_frame_bytes(packet, self.mtu)?.min(self.room_bytes * pieces_max);
        // A reassembled datagram in several frames (`frag_list`) is longer than any one frame.
        if packet.frame.total_len_bytes() > longest || packet.is_chain() {
            Err(SendDrop::TooLong)
        } else {
            Ok(OutgoingShape::Whole)
        }
    }
}

/// Descriptor in the tx ring.
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
    /// Transmit state for a tx ring of `entries`; 0 if the queue cannot send.
    pub(super) fn new(consumer: TxQueueConsumer, entries: u32, mtu: u32) -> Self {
        let empty = TxSlot { lane: LaneId(0), len_bytes: 0, ends: DescriptorEnds::Piece };
        Self {
            outgoing: Outgoing::new(consumer),
            slots: vec![empty; entries as usize].into(),
            counted: 0,
            end: 0,
            part: TxPart::default(),
            limits: XdpTxLimits { mtu, room_bytes: 0, is_scattered: false },
            is_down: false,
        }
    }

    /// Lanes that packets come from.
    pub(super) fn consumer(&self) -> &TxQueueConsumer {
        self.outgoing.consumer()
    }

    /// Sets the chunk size, and whether a frame may be sent in several chunks.
    pub(super) fn set_chunks(&mut self, chunk_bytes: u32, is_scattered: bool) {
        self.limits.room_bytes = chunk_bytes - BEFORE_PACKET_BYTES;
        self.limits.is_scattered = is_scattered;
    }

    /// Sets the MTU.
    pub(super) fn set_mtu(&mut self, mtu: u32) {
        self.limits.mtu = mtu;
    }

    /// True if any CPU has a lane to this queue.
    pub(super) fn is_used(&self) -> bool {
        self.consumer().has_lanes()
    }

    /// True if there are packets to send, and the link is up.
    pub(super) fn has_work(&self) -> bool {
        !self.is_down && self.has_unsent()
    }

    /// True if there are packets to send.
    pub(super) fn has_unsent(&self) -> bool {
        self.counted != self.end || self.outgoing.has_some()
    }

    /// Sends as many packets as the kernel takes, and returns sent frames to the pool. Returns the
    /// number of frames put into the tx ring.
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
                        // No memory is free now: the packet stays first in line.
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

    /// Puts a copy of a frame into the tx ring. Needed for a frame that the kernel cannot send
    /// itself: outside the registered memory, or in several pieces. Returns false if no memory is
    /// free.
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

    /// Calls the kernel until it has taken all frames, or takes no more for now. Each call takes at
    /// least one, so the number of calls is at most the number of frames.
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

    /// Counts the frames that the kernel has taken as sent, except the last one if the device
    /// dropped it.
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
    /// Counts packets that the kernel has not taken as dropped.
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
