//! The reader's end of a socket: packets taken out, and the return of their frames.

use std::collections::VecDeque;

use forebay_buf::Pool;
use forebay_buf::pool::FREE_BATCH_FRAMES;
use forebay_rx::Packet;
use forebay_rx::coalesce::resegment;

use super::queue::SocketQueueConsumer;
use super::reclaim::{FrameReturn, ReclaimPolicy};

/// Datagrams taken out of the queue at once by calls that read a single one.
const TAKE_MAX: usize = 64;

/// Reader state, used by one thread at a time.
#[derive(Debug)]
pub struct SocketReader {
    /// The queue that the reader takes from.
    pub consumer: SocketQueueConsumer,
    way_back: FrameReturn,
    /// Packets taken out of the queue, but not read yet.
    ready: VecDeque<Packet>,
    /// Scratch buffer between queue and `ready`; empty between calls.
    scratch: Vec<Packet>,
    /// Packets read one by one whose frames have not been returned yet.
    done: Vec<Packet>,
    /// True if a merged packet is read as one (`UDP_GRO`).
    takes_merged: bool,
    /// Ticket of the first packet of those taken out at once, from which `ready` comes.
    ready_from: u32,
    /// Last turn of the CPU that reads inline, and the first ticket that was not drawn at its end.
    turn: Option<u64>,
    turn_end: u32,
}

impl SocketReader {
    /// Creates the reader of `consumer`. Frames are returned through `home`.
    #[must_use]
    pub fn new(consumer: SocketQueueConsumer, home: Pool) -> Self {
        Self {
            ready_from: consumer.due(),
            turn: None,
            turn_end: consumer.due(),
            consumer,
            way_back: FrameReturn::new(home),
            ready: VecDeque::new(),
            scratch: Vec::new(),
            done: Vec::new(),
            takes_merged: false,
        }
    }

    /// True if packets were taken out of the queue but not read yet.
    #[must_use]
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Marks what is queued at the end of a turn of the CPU that the reader turns itself, once for each turn.
    pub fn mark_turn(&mut self, turn: u64) {
        if self.turn.replace(turn) != Some(turn) {
            self.turn_end = self.consumer.queue().next_ticket();
        }
    }

    /// True if packets queued before the last [mark](Self::mark_turn) are unread. The first may not be visible yet.
    #[must_use]
    pub fn has_of_turn(&self) -> bool {
        let first = if self.has_ready() { self.ready_from } else { self.consumer.due() };
        self.turn_end.wrapping_sub(first).cast_signed() > 0
    }

    /// Sets whether a merged packet is read as one, from now on.
    pub fn set_takes_merged(&mut self, takes_merged: bool) {
        self.takes_merged = takes_merged;
        self.consumer.set_takes_merged(takes_merged);
    }

    /// The next packet, which stays unread.
    pub fn peek(&mut self) -> Option<&Packet> {
        self.fill(TAKE_MAX);
        self.ready.front()
    }

    /// Takes the next packet.
    #[expect(clippy::should_implement_trait, reason = "it is none: there may be more later")]
    pub fn next(&mut self) -> Option<Packet> {
        self.fill(TAKE_MAX);
        self.ready.pop_front()
    }

    /// Takes up to `max` packets.
    pub fn take(&mut self, max: usize, mut each: impl FnMut(Packet)) -> usize {
        self.fill(max);
        let count = max.min(self.ready.len());
        self.ready.drain(..count).for_each(&mut each);
        count
    }

    fn fill(&mut self, max: usize) {
        if !self.ready.is_empty() {
            return;
        }
        self.ready_from = self.consumer.due();
        if self.consumer.take(max, &mut self.scratch) == 0 {
            return self.flush_returns();
        }
        if self.takes_merged || self.scratch.iter().all(|packet| !packet.is_merged()) {
            return self.ready.extend(self.scratch.drain(..));
        }
        let mut segments = Vec::new();
        for packet in self.scratch.drain(..) {
            resegment(packet, &mut segments);
        }
        self.ready.extend(segments);
    }

    /// Returns a packet that was read.
    pub fn give_back(&mut self, packet: Packet, policy: ReclaimPolicy) {
        self.done.push(packet);
        if self.ready.is_empty() || self.done.len() >= FREE_BATCH_FRAMES {
            self.way_back.give_back(&mut self.done, &mut self.consumer, policy);
        }
    }

    /// Returns many packets that were read.
    pub fn give_back_all(&mut self, packets: impl Iterator<Item = Packet>, policy: ReclaimPolicy) {
        self.done.extend(packets);
        self.way_back.give_back(&mut self.done, &mut self.consumer, policy);
    }

    /// Uncharges `bytes`, the `truesize` of packets that were returned by other means.
    pub fn let_go(&mut self, bytes: u32) {
        self.consumer.uncharge(bytes);
    }

    /// Sends returned frames back now: no later call would, as the reader may be about to sleep.
    fn flush_returns(&mut self) {
        self.way_back.flush(&mut self.consumer);
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue::{Enqueue, SocketQueueConfig, SocketQueueProducer, queue};
    use super::super::testutil::{Layout, datagram, pools_of};
    use super::*;
    use crate::socket::SocketId;

    /// A reader, and the ends of two CPUs.
    fn reader() -> (SocketReader, Vec<SocketQueueProducer>) {
        let (_, home) = pools_of(1);
        let config = SocketQueueConfig { id: SocketId(0), slots: 64, rcvbuf: 1 << 20 };
        let (producers, consumer) = queue(config, 2);
        (SocketReader::new(consumer, home), producers)
    }

    #[test]
    fn rfs_6_turn_ends_at_its_mark() {
        let (mut pool, _) = pools_of(64);
        let (mut reader, mut producers) = reader();
        let mut put = |cpu: usize, count: usize| {
            let mut packets =
                (0..count).map(|_| datagram(&mut pool, Layout::V4, b"x")).collect::<Vec<_>>();
            assert_eq!(producers[cpu].put(&mut packets, &mut Vec::new()), Enqueue::Done);
        };
        reader.mark_turn(1);
        assert!(!reader.has_of_turn());
        put(0, 3);
        reader.mark_turn(1);
        assert!(!reader.has_of_turn(), "queued after the turn");
        reader.mark_turn(2);
        put(1, 5);
        let mut taken = Vec::new();
        let mut left = Vec::new();
        while reader.has_of_turn() {
            reader.take(2, |packet| taken.push(packet));
            left.push(reader.has_of_turn());
            reader.mark_turn(2);
        }
        assert_eq!((taken.len(), left), (4, vec![true, false]), "two at once");
        reader.peek().unwrap();
        assert!(!reader.has_of_turn(), "what is taken out in advance is of another CPU");
        reader.mark_turn(3);
        assert!(reader.has_of_turn());
        reader.take(64, |packet| taken.push(packet));
        assert_eq!((taken.len(), reader.has_of_turn()), (8, false));
    }
}
