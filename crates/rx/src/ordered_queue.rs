//! Ordered queue from many CPUs to one consumer.
//!
//! Each CPU has a ring to the consumer, its *lane*. Packets draw *tickets*, numbers from one
//! counter, when they are sent, and are taken by ticket, whichever lane they are in. A flow that
//! moves from one CPU to another therefore stays in order: the new CPU draws its tickets after the
//! old one.
//!
//! A ticket is drawn only when there is room for its packet, and the packet is published right
//! after. A packet that is missing for a ticket will therefore be published in a moment, and the
//! consumer retries. A run of packets costs one draw and one publication, whatever its length.
//!
//! The owner decides on the CPUs that share the tickets, those that may join, and the one that is
//! woken: a socket's queue (`forebay_stack::socket::queue`), or a device's tx queue.

use std::collections::VecDeque;

use forebay_buf::Position;
use forebay_buf::cache::OwnLine;
use forebay_buf::ring::{Consumer, Producer, ring};
use forebay_buf::sync::{AtomicU32, Ordering};

use crate::packet::{Arrival, Packet};

/// Maximum number of packets taken from a ring at once.
const TAKE_MAX: usize = 64;

/// Counter that tickets are drawn from, shared by all ends.
#[derive(Debug)]
pub struct Sequencer {
    /// Next ticket. Every CPU draws from this counter.
    next: OwnLine<AtomicU32>,
}

impl Sequencer {
    /// Creates a sequencer of tickets from `first` on; tickets wrap at 2^32.
    #[must_use]
    pub fn starting_at(first: u32) -> Self {
        Self { next: OwnLine(AtomicU32::new(first)) }
    }

    /// True if the ticket `due` has been drawn, given that all before it have been.
    #[must_use]
    pub fn has_drawn(&self, due: u32) -> bool {
        self.next() != due
    }

    /// The ticket that is drawn next.
    #[must_use]
    pub fn next(&self) -> u32 {
        // Relaxed: a consumer that must not miss a packet is woken for it, or adds a fence.
        self.next.0.load(Ordering::Relaxed)
    }

    /// Draws a ticket for each packet. The packets are to be [sent](LaneProducer::send) at once,
    /// because all later tickets wait for them.
    pub fn draw(&self, packets: &[Packet]) -> SequenceRange {
        #[expect(clippy::cast_possible_truncation, reason = "there is room for them in a ring")]
        let count = packets.len() as u32;
        // Relaxed: a CPU that sends packets of a flow after another CPU has sent some comes after
        // that CPU in the order of this counter, too.
        SequenceRange(self.next.0.fetch_add(count, Ordering::Relaxed))
    }
}

/// First of the tickets drawn for a run of packets.
#[derive(Debug)]
#[must_use]
pub struct SequenceRange(u32);

/// Creates a lane: the end of a CPU, and that of the consumer. `slots` is a power of two.
#[must_use]
pub fn lane(slots: u32) -> (LaneProducer, LaneConsumer) {
    let (producer, consumer) = ring(slots, Position(0));
    (LaneProducer { ring: producer }, LaneConsumer { ring: consumer, taken: VecDeque::new() })
}

/// Producing end of a lane, used by one CPU.
#[derive(Debug)]
pub struct LaneProducer {
    ring: Producer<Packet>,
}

impl LaneProducer {
    /// Number of packets for which there is room. The consumer's progress is read only if the known
    /// room is less than `count`.
    pub fn room_for(&mut self, count: usize) -> usize {
        let room = self.room();
        if room >= count {
            return room;
        }
        self.ring.refreshed_queued();
        self.room()
    }

    /// Grows the lane for `count` packets, up to `slots_max`, a power of two. Returns the room
    /// afterwards, in packets.
    pub fn grow_for(&mut self, count: usize, slots_max: u32) -> usize {
        let wanted = count.saturating_add(self.ring.queued() as usize);
        let wanted = u32::try_from(wanted).unwrap_or(slots_max).min(slots_max);
        self.ring.grow(wanted.next_power_of_two());
        self.room()
    }

    fn room(&self) -> usize {
        // After growth, `queued` includes the packets in the previous ring.
        debug_assert!(self.ring.queued() <= self.ring.capacity(), "more packets than slots");
        (self.ring.capacity() - self.ring.queued()) as usize
    }

    /// Sends packets for which there is room, and publishes them to the consumer. Empties the
    /// vector.
    pub fn send(&mut self, SequenceRange(mut ticket): SequenceRange, packets: &mut Vec<Packet>) {
        for packet in &mut *packets {
            packet.arrival = Arrival(ticket);
            ticket = ticket.wrapping_add(1);
        }
        let all = self.ring.push_all(packets);
        debug_assert!(all, "there was room for them");
        self.ring.publish();
    }
}

/// Consuming end of one CPU's lane.
#[derive(Debug)]
pub struct LaneConsumer {
    ring: Consumer<Packet>,
    /// Packets taken from the ring before their tickets were due.
    taken: VecDeque<Packet>,
}

impl LaneConsumer {
    /// Moves the packets that are due, at most `max`, to the end of `out`, and advances `due`.
    /// Returns their number.
    fn take(&mut self, due: &mut u32, max: usize, out: &mut Vec<Packet>) -> usize {
        let before = out.len();
        if self.taken.is_empty() {
            // Mostly all packets are due, so they are taken directly into `out`.
            self.ring.take(max.min(TAKE_MAX), out);
            self.ring.release();
            let due_count = out[before..].iter().take_while(|packet| is_next(packet, due)).count();
            self.taken.extend(out.drain(before + due_count..));
        } else {
            while out.len() - before < max
                && let Some(packet) = self.taken.pop_front_if(|packet| is_next(packet, due))
            {
                out.push(packet);
            }
        }
        out.len() - before
    }

    /// Moves published packets to `taken` if that is empty, so that the oldest one is at its front.
    fn look(&mut self) {
        if self.taken.is_empty() && self.ring.queued() > 0 {
            let mut taken = Vec::from(std::mem::take(&mut self.taken));
            self.ring.take(TAKE_MAX, &mut taken);
            self.ring.release();
            self.taken = taken.into();
        }
    }

    /// Drops all published packets, which returns their frames to their owners. Returns their
    /// number.
    fn clear(&mut self) -> u64 {
        let mut count = 0;
        loop {
            self.look();
            if self.taken.is_empty() {
                return count;
            }
            count += self.taken.len() as u64;
            self.taken.clear();
        }
    }
}

/// True if the packet is due; `due` then advances to the next one.
fn is_next(packet: &Packet, due: &mut u32) -> bool {
    let is_due = packet.arrival.0 == *due;
    *due = due.wrapping_add(is_due.into());
    is_due
}

/// All lanes to one consumer, in the order in which they joined. Used by one thread.
#[derive(Debug)]
pub struct Lanes {
    lanes: Vec<LaneConsumer>,
    /// Ticket of the next packet.
    due: u32,
    /// Lane of the last packet: mostly that of the next ones, too.
    at: usize,
}

impl Lanes {
    /// Creates lanes whose packets draw [tickets](Sequencer::starting_at) from `first` on.
    #[must_use]
    pub fn new(first: u32, lanes: Vec<LaneConsumer>) -> Self {
        Self { lanes, due: first, at: 0 }
    }

    /// Adds a lane.
    pub fn join(&mut self, lane: LaneConsumer) {
        self.lanes.push(lane);
    }

    /// Number of lanes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lanes.len()
    }

    /// Ticket of the next packet.
    #[must_use]
    pub fn due(&self) -> u32 {
        self.due
    }

    /// True if tickets have been drawn whose packets have not been taken. The next packet may not
    /// be published at this moment; then there is none to take.
    #[must_use]
    pub fn has_some(&self, tickets: &Sequencer) -> bool {
        tickets.has_drawn(self.due)
    }

    /// Moves up to `max` packets to the end of `out`, in the order of their tickets. Returns their
    /// number.
    pub fn take(&mut self, tickets: &Sequencer, max: usize, out: &mut Vec<Packet>) -> usize {
        let (before, first) = (out.len(), self.due);
        while out.len() - before < max && self.take_some(tickets, max - (out.len() - before), out) {
        }
        debug_assert!(out.len() - before <= max, "more packets than requested");
        debug_assert_eq!(
            self.due.wrapping_sub(first) as usize,
            out.len() - before,
            "each packet has the ticket after that of the one before"
        );
        out.len() - before
    }

    /// Takes the due packets of one lane. Returns true if there were any.
    fn take_some(&mut self, tickets: &Sequencer, max: usize, out: &mut Vec<Packet>) -> bool {
        let Self { lanes, due, at } = self;
        if lanes.get_mut(*at).is_some_and(|lane| lane.take(due, max, out) > 0) {
            return true;
        }
        if !self.has_some(tickets) {
            return false;
        }
        let Self { lanes, due, at } = self;
        match lanes.iter_mut().position(|lane| lane.take(due, max, out) > 0) {
            Some(lane) => *at = lane,
            None => return false,
        }
        true
    }

    /// Takes the next packet, if it is published, with the number of its lane.
    pub fn take_one(&mut self) -> Option<(usize, Packet)> {
        let Self { lanes, due, at } = self;
        let count = lanes.len();
        for number in (*at..count).chain(0..(*at).min(count)) {
            let lane = &mut lanes[number];
            lane.look();
            if let Some(packet) = lane.taken.pop_front_if(|packet| is_next(packet, due)) {
                *at = number;
                debug_assert_eq!(packet.arrival.0.wrapping_add(1), *due, "a packet out of turn");
                return Some((number, packet));
            }
        }
        None
    }

    /// Next packet, if it is published, without taking it.
    pub fn peek(&mut self) -> Option<&Packet> {
        let Self { lanes, due, .. } = self;
        let mut oldest = lanes.iter_mut().filter_map(|lane| {
            lane.look();
            lane.taken.front()
        });
        oldest.find(|packet| packet.arrival.0 == *due)
    }

    /// Drops all published packets; a packet that a CPU is sending right now is freed with that
    /// CPU's end. Returns the number of dropped packets by lane.
    pub fn clear(&mut self) -> Vec<u64> {
        self.lanes.iter_mut().map(LaneConsumer::clear).collect()
    }
}
