//! Urgent byte of the peer (RFC 6093), at the kernel's place: the one before the pointer (`tcp_urg`).

use forebay_rx::packet::Packet;

use super::super::error::TcpError;
use super::super::seq::Seq;
use super::super::wire::{Flags, Segment};
use super::{Connection, Context, ReadMode};

/// An urgent byte whose place is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::tcp) struct Urgent {
    at: Seq,
    byte: UrgentByte,
}

/// Fate of an urgent byte (`urg_data`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum UrgentByte {
    Awaited,
    /// Received, in order or out of order.
    Here(u8),
    /// Read out of band.
    Taken,
}

impl Connection {
    /// Notes where the urgent byte is, and the byte itself if the segment has it.
    pub(super) fn note_urgent(
        &mut self,
        packet: Option<&Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) {
        if segment.has(Flags::URG) {
            self.note_urgent_place(segment, cx);
        }
        if let Some(Urgent { at, byte }) = &mut self.receive.urgent
            && *byte == UrgentByte::Awaited
            && let Some(packet) = packet
            && let Some(here) = payload_byte(packet, (*at - segment.seq) as usize)
        {
            *byte = UrgentByte::Here(here);
        }
    }

    /// `tcp_check_urg`.
    fn note_urgent_place(&mut self, segment: &Segment, cx: &mut Context<'_>) {
        // The kernel's reading, unless it is told RFC 1122's: the pointer is behind the urgent byte.
        let behind = u32::from(!cx.config.urgent_at_pointer);
        let at = segment.seq + u32::from(segment.urgent).saturating_sub(behind);
        let is_old = at.is_before(self.read_seq()) || at.is_before(self.receive.next);
        let is_known = self.urgent_seq().is_some_and(|urgent| !at.is_after(urgent));
        if !is_old && !is_known {
            self.skip_urgent(cx);
            self.receive.urgent = Some(Urgent { at, byte: UrgentByte::Awaited });
        }
    }

    /// Removes an urgent byte that is next, unless it belongs to the stream (RFC 6093).
    pub(super) fn skip_urgent(&mut self, cx: &mut Context<'_>) {
        if self.is_urgent_next() {
            self.receive.queue.consume(1, cx.pool);
            self.receive.urgent = None;
        }
    }

    /// True if the first byte to be read is an urgent one that does not belong to the stream.
    pub(super) fn is_urgent_next(&self) -> bool {
        self.is_at_urgent() && !self.options.oob_inline && self.receive.queue.len_bytes() > 0
    }

    /// True if an urgent byte can be taken (`EPOLLPRI`).
    pub(super) fn has_urgent_byte(&self) -> bool {
        self.receive.urgent.is_some_and(|urgent| matches!(urgent.byte, UrgentByte::Here(_)))
    }

    /// Reads the urgent byte, which can be taken once (`MSG_OOB`, `tcp_recv_urg`). The reader passes it
    /// later. `None` if it will not come any more.
    pub(in crate::tcp) fn read_urgent(&mut self, mode: ReadMode) -> Result<Option<u8>, TcpError> {
        let has_ended = self.shut.receive || self.receive.has_fin;
        let Some(urgent) = self.receive.urgent.filter(|_| !self.options.oob_inline) else {
            return Err(TcpError::Invalid);
        };
        match urgent.byte {
            UrgentByte::Here(byte) => {
                if mode == ReadMode::Take {
                    self.receive.urgent = Some(Urgent { byte: UrgentByte::Taken, ..urgent });
                }
                Ok(Some(byte))
            }
            UrgentByte::Taken => Err(TcpError::Invalid),
            UrgentByte::Awaited if has_ended => Ok(None),
            UrgentByte::Awaited => Err(TcpError::WouldBlock),
        }
    }

    /// Sequence number of an urgent byte that the reader has not passed.
    pub(super) fn urgent_seq(&self) -> Option<Seq> {
        self.receive.urgent.map(|urgent| urgent.at)
    }

    /// True if all bytes before an urgent one are here: a look at them ends there.
    pub(in crate::tcp) fn is_urgent_behind_unread(&self) -> bool {
        self.urgent_seq().is_some_and(|urgent| {
            urgent.is_after(self.read_seq()) && !urgent.is_after(self.receive.next)
        })
    }

    /// True if the next byte to read is the urgent one (`SIOCATMARK`).
    pub(in crate::tcp) fn is_at_urgent(&self) -> bool {
        self.urgent_seq() == Some(self.read_seq())
    }
}

/// Byte of a packet's payload, which may be in several frames.
fn payload_byte(packet: &Packet, offset: usize) -> Option<u8> {
    let mut left = offset.checked_add(packet.headers.payload_offset.into())?;
    for part in packet.fragments() {
        if let Some(&byte) = part.get(left) {
            return Some(byte);
        }
        left -= part.len();
    }
    None
}
