//! Bytes that the application wrote and the peer has not acknowledged.

use std::collections::VecDeque;

use super::seq::{Seq, len_u32};

/// Send queue of a connection. It keeps a copy of the bytes: they may have to be sent again.
#[derive(Debug)]
pub(super) struct SendQueue {
    /// `None` while there are no bytes: an idle connection keeps no memory.
    held: Option<Box<Held>>,
    /// Sequence number of the first byte.
    start: Seq,
}

/// Bytes, and the packets that they were written into (`sk_write_queue`).
#[derive(Debug, Default)]
struct Held {
    bytes: VecDeque<u8>,
    /// Packets that no more is written into and that were not sent whole: each ends behind `snd_nxt`, as
    /// [`SendQueue::forget_packets`] is called wherever that moves over bytes of the queue.
    filled: VecDeque<Filled>,
    /// Marks of the packet that the next byte goes into.
    last: PacketMarks,
}

impl Held {
    /// Start of the packet that is written into, when all before `next` was sent.
    fn last_begin(&self, next: Seq) -> Seq {
        self.filled.back().map_or(next, |filled| filled.end.later(next))
    }
}

/// A packet that no more is written into.
#[derive(Clone, Copy, Debug)]
struct Filled {
    end: Seq,
    marks: PacketMarks,
}

/// Marks of a packet of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct PacketMarks {
    /// PSH at its end.
    pub(super) is_pushed: bool,
    /// End of a record: what follows is not merged with it (`MSG_EOR`).
    pub(super) ends_record: bool,
    /// Has bytes of a zero-copy write, with which no others are merged (`skb_shift`).
    pub(super) is_zero_copy: bool,
}

/// Packet that the next byte to be sent is in.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedPacket {
    pub(super) end: Seq,
    pub(super) marks: PacketMarks,
    /// True of the last one, into which more may be written.
    pub(super) is_last: bool,
}

impl SendQueue {
    pub(super) fn new(start: Seq) -> Self {
        Self { held: None, start }
    }

    pub(super) fn len_bytes(&self) -> u32 {
        self.held.as_ref().map_or(0, |held| len_u32(held.bytes.len()))
    }

    /// Sequence number behind the last byte (`write_seq`).
    pub(super) fn end(&self) -> Seq {
        self.start + self.len_bytes()
    }

    /// Memory that the queue occupies.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.held.as_ref().map_or(0, |held| held.bytes.capacity() as u64)
    }

    /// Reserves memory for a whole write at once, instead of growing packet by packet.
    pub(super) fn reserve(&mut self, len: usize) {
        self.held.get_or_insert_default().bytes.reserve(len);
    }

    /// Appends to the last packet.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.held.get_or_insert_default().bytes.extend(bytes);
        }
    }

    /// Start of the packet that is written into, when all before `next` was sent.
    pub(super) fn last_begin(&self, next: Seq) -> Seq {
        self.held.as_ref().map_or(next, |held| held.last_begin(next))
    }

    /// Packets of bytes that were not sent, when all before `next` was sent.
    pub(super) fn unsent_packets(&self, next: Seq) -> u32 {
        let (Some(held), end) = (&self.held, self.end()) else { return 0 };
        let begin = held.last_begin(next);
        len_u32(held.filled.len()) + u32::from(begin.is_before(end))
    }

    /// True if the next byte begins another packet: there is none of which nothing was sent, it is full, or a
    /// record ends there.
    pub(super) fn is_last_full(&self, next: Seq, goal: u32) -> bool {
        let (Some(held), end) = (&self.held, self.end()) else { return true };
        let begin = held.last_begin(next);
        !next.is_before(end) || end - begin >= goal || held.last.ends_record
    }

    /// Room of the last packet, whose size is `goal` bytes at most, when all before `next` was sent; begins
    /// another one if that is full. `is_first`: a new write appends to the packet, which takes its PSH back
    /// (`tcp_sendmsg_locked`).
    pub(super) fn begin_packet(&mut self, next: Seq, goal: u32, is_first: bool) -> u32 {
        let end = self.end();
        let held = self.held.get_or_insert_default();
        if !next.is_before(end) {
            held.filled.clear();
            held.last = PacketMarks::default();
            return goal;
        }
        let begin = held.last_begin(next);
        let room = goal.saturating_sub(end - begin);
        if room == 0 || held.last.ends_record {
            held.filled.push_back(Filled { end, marks: std::mem::take(&mut held.last) });
            return goal;
        }
        if is_first {
            held.last.is_pushed = false;
        }
        room
    }

    /// Marks of the last packet.
    pub(super) fn last_marks(&mut self) -> &mut PacketMarks {
        &mut self.held.get_or_insert_default().last
    }

    /// Packet that `next` is in, which was not sent.
    pub(super) fn packet_at(&self, next: Seq) -> QueuedPacket {
        let end = self.end();
        let Some(held) = &self.held else {
            return QueuedPacket { end, marks: PacketMarks::default(), is_last: true };
        };
        match held.filled.iter().find(|filled| filled.end.is_after(next)) {
            Some(&Filled { end, marks }) => QueuedPacket { end, marks, is_last: false },
            None => QueuedPacket { end, marks: held.last, is_last: true },
        }
    }

    /// Moves bytes of the following packet into the one that `next` is in, so that it has `len_bytes`, unless a
    /// record ends between them (`tcp_grow_skb`).
    pub(super) fn grow_packet(&mut self, next: Seq, len_bytes: u32) {
        let end = self.end();
        let Some(held) = &mut self.held else { return };
        let Some(&first) = held.filled.front() else { return };
        let missing = len_bytes.saturating_sub(first.end - next);
        if missing == 0 || first.marks.ends_record {
            return;
        }
        let (second_end, second) =
            held.filled.get(1).map_or((end, held.last), |second| (second.end, second.marks));
        if first.marks.is_zero_copy || second.is_zero_copy {
            return;
        }
        if missing < second_end - first.end {
            held.filled[0].end += missing;
            return;
        }
        let marks = PacketMarks {
            is_pushed: first.marks.is_pushed || second.is_pushed,
            ends_record: second.ends_record,
            is_zero_copy: false,
        };
        held.filled.pop_front();
        match held.filled.front_mut() {
            Some(joined) => joined.marks = marks,
            None => held.last = marks,
        }
    }

    /// Moves bytes of following packets into the one that `next` is in, until that has `len_bytes`. Returns false,
    /// and moves none, if a record ends before (`tcp_can_coalesce_send_queue_head`), or with bytes of a zero-copy write.
    pub(super) fn gather_packet(&mut self, next: Seq, len_bytes: u32) -> bool {
        let end = next + len_bytes;
        if !self.may_gather(end) {
            return false;
        }
        while self.packet_at(next).end.is_before(end) {
            let before = self.packet_at(next).end;
            self.grow_packet(next, len_bytes);
            debug_assert!(
                self.packet_at(next).end != before,
                "a packet before {end:?} does not grow"
            );
            if self.packet_at(next).end == before {
                return false;
            }
        }
        true
    }

    /// True if the packets up to `end` may be one.
    fn may_gather(&self, end: Seq) -> bool {
        if end.is_after(self.end()) {
            return false;
        }
        let Some(held) = &self.held else { return true };
        let whole = held.filled.iter().take_while(|packet| packet.end.is_before(end)).count();
        let behind = held.filled.get(whole).map_or(held.last, |packet| packet.marks);
        let is_apart = |marks: PacketMarks| marks.ends_record || marks.is_zero_copy;
        whole == 0
            || !behind.is_zero_copy
                && !held.filled.iter().take(whole).any(|packet| is_apart(packet.marks))
    }

    /// Forgets packets that were sent whole.
    pub(super) fn forget_packets(&mut self, next: Seq) {
        let Some(held) = &mut self.held else { return };
        while held.filled.front().is_some_and(|filled| !filled.end.is_after(next)) {
            held.filled.pop_front();
        }
    }

    /// Bytes of a range, in up to two parts. A range that the queue does not hold gives fewer.
    pub(super) fn range(&self, start: Seq, len_bytes: u32) -> [&[u8]; 2] {
        let (first, second) =
            self.held.as_ref().map_or((&[][..], &[][..]), |held| held.bytes.as_slices());
        let skip = start.bytes_since(self.start) as usize;
        let end = skip + len_bytes as usize;
        let part = |bytes: &'_ [u8], offset: usize| -> Option<(usize, usize)> {
            let from = skip.max(offset) - offset;
            let to = end.clamp(offset, offset + bytes.len()) - offset;
            (from < to).then_some((from, to))
        };
        let cut =
            |bytes, offset| part(bytes, offset).map_or(&[][..], |(from, to)| &bytes[from..to]);
        [cut(first, 0), cut(second, first.len())]
    }

    /// Forgets bytes before `end`: they were acknowledged.
    pub(super) fn acknowledge(&mut self, end: Seq) {
        let Some(held) = &mut self.held else { return };
        let len = (end.bytes_since(self.start) as usize).min(held.bytes.len());
        held.bytes.drain(..len);
        self.start += len_u32(len);
        self.held.take_if(|held| held.bytes.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tcp_51_refused_gathering_moves_nothing() {
        let ends_of = |queue: &SendQueue| {
            let held = queue.held.as_ref().unwrap();
            held.filled.iter().map(|packet| packet.end).collect::<Vec<_>>()
        };
        for zero_copy in 0..4 {
            let mut queue = SendQueue::new(Seq(0));
            for number in 0..4 {
                assert_eq!(queue.begin_packet(Seq(0), 100, true), 100);
                queue.write(&[0; 100]);
                queue.last_marks().is_zero_copy = number == zero_copy;
            }
            let before = ends_of(&queue);
            assert_eq!(before, [Seq(100), Seq(200), Seq(300)]);
            let len_bytes = zero_copy * 100 + 50;
            assert_eq!(queue.gather_packet(Seq(0), len_bytes), zero_copy == 0);
            assert!(!queue.gather_packet(Seq(0), 350) && !queue.gather_packet(Seq(0), 401));
            assert_eq!(ends_of(&queue), before);
            if zero_copy > 1 {
                assert!(
                    queue.gather_packet(Seq(0), zero_copy * 100),
                    "what is before is one packet"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn tcp_6_send_queue_keeps_the_stream(
            start: u32, steps in prop::collection::vec((0_u32..300, 0_u32..300, 0_u32..400, 0_u32..400), 1..40),
        ) {
            let mut queue = SendQueue::new(Seq(start));
            let (mut stream, mut acked) = (Vec::new(), 0);
            for (write, ack, from, len) in steps {
                let bytes: Vec<u8> = (0..write).map(|at| u8::try_from((len_u32(stream.len()) + at) % 251).unwrap()).collect();
                queue.write(&bytes);
                stream.extend(bytes);
                acked = (acked + ack).min(len_u32(stream.len()));
                queue.acknowledge(Seq(start) + acked);
                prop_assert_eq!(queue.end(), Seq(start) + len_u32(stream.len()));
                let from = (acked + from).min(len_u32(stream.len()));
                let [first, second] = queue.range(Seq(start) + from, len);
                let to = (from + len).min(len_u32(stream.len()));
                prop_assert_eq!([first, second].concat(), &stream[from as usize..to as usize]);
            }
        }
    }
}
