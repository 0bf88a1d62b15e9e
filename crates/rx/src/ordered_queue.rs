//! From many CPUs to one taker, in order.
//!
//! Each CPU has a ring to the taker, its *lane*. Packets draw numbers, *tickets*, as they are
//! handed in, and are taken out by number, whichever lane they lie in: a flow that moves from one
//! CPU to another stays in order, for the new CPU draws its tickets after the old one has.
//!
//! A ticket is drawn when there is room for its packet, and the packet is shown right after: what
//! is not there yet will be in a moment, and the taker comes back for it. A run of packets costs
//! one draw and one publication, however long it is.
//!
//! The owner says who shares the tickets, who may join and who is woken: a socket's queue
//! (`forebay_stack::socket::queue`), or a device's way out.

use std::collections::VecDeque;

use forebay_buf::Position;
use forebay_buf::cache::OwnLine;
use forebay_buf::ring::{Consumer, Producer, ring};
use forebay_buf::sync::{AtomicU32, Ordering};

use crate::packet::{Arrival, Packet};

/// Packets that are taken out of a ring at once.
const TAKE_MAX: usize = 64;

/// The counter that tickets are drawn from. Shared by all ends.
#[derive(Debug)]
pub struct Sequencer {
    /// The next one. Every CPU draws from it.
    next: OwnLine<AtomicU32>,
}

impl Sequencer {
    /// Tickets from `first` on; they wrap at 2^32.
    #[must_use]
    pub fn starting_at(first: u32) -> Self {
        Self { next: OwnLine(AtomicU32::new(first)) }
    }

    /// True if any was drawn after those before `due`.
    #[must_use]
    pub fn has_drawn(&self, due: u32) -> bool {
        // Relaxed: whoever must not miss a packet is woken for it, or fences this off.
        self.next.0.load(Ordering::Relaxed) != due
    }

    /// Draws a ticket for each of these packets. They are to be [handed in](LaneProducer::send) at
    /// once: all that is drawn later waits for them.
    pub fn draw(&self, packets: &[Packet]) -> SequenceRange {
        #[expect(clippy::cast_possible_truncation, reason = "there is room for them in a ring")]
        let count = packets.len() as u32;
        // Relaxed: who hands packets of a flow in after another CPU has done so comes after it in
        // the order of this counter too.
        SequenceRange(self.next.0.fetch_add(count, Ordering::Relaxed))
    }
}

/// The first of the tickets that were drawn for a run of packets.
#[derive(Debug)]
#[must_use]
pub struct SequenceRange(u32);

/// Makes a lane: the CPU's end, and the taker's. `slots` is a power of two.
#[must_use]
pub fn lane(slots: u32) -> (LaneProducer, LaneConsumer) {
    let (producer, consumer) = ring(slots, Position(0));
    (LaneProducer { ring: producer }, LaneConsumer { ring: consumer, taken: VecDeque::new() })
}

/// The end of a lane that one CPU hands packets in at.
#[derive(Debug)]
pub struct LaneProducer {
    ring: Producer<Packet>,
}

impl LaneProducer {
    /// Number of packets for which there is room. The taker's progress is looked at only if it was
    /// less than `count` before.
    pub fn room_for(&mut self, count: usize) -> usize {
        let room = self.room();
        if room >= count {
            return room;
        }
        self.ring.refreshed_queued();
        self.room()
    }

    /// Makes room for `count` packets, as far as a lane of `slots_max`, a power of two, has it.
    /// Returns how many there is room for then.
    pub fn grow_for(&mut self, count: usize, slots_max: u32) -> usize {
        let wanted = count.saturating_add(self.ring.queued() as usize);
        let wanted = u32::try_from(wanted).unwrap_or(slots_max).min(slots_max);
        self.ring.grow(wanted.next_power_of_two());
        self.room()
    }

    fn room(&self) -> usize {
        // A ring that has just grown counts what lies in the one before, too.
        (self.ring.capacity() - self.ring.queued()) as usize
    }

    /// Hands packets in that there is room for, and shows them to the taker. The vector is empty
    /// afterwards.
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

/// The taker's end of one CPU's lane.
#[derive(Debug)]
pub struct LaneConsumer {
    ring: Consumer<Packet>,
    /// Taken out of the ring before their turn.
    taken: VecDeque<Packet>,
}

impl LaneConsumer {
    /// Moves the packets that are due, `max` at most, to the end of `out`, and counts `due` on.
    /// Returns how many.
    fn take(&mut self, due: &mut u32, max: usize, out: &mut Vec<Packet>) -> usize {
        let before = out.len();
        if self.taken.is_empty() {
            // They mostly are due, all of them: so they go straight to where they are wanted.
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

    /// Sees to it that the oldest packet is in hand, if one is here.
    fn look(&mut self) {
        if self.taken.is_empty() && self.ring.queued() > 0 {
            let mut taken = Vec::from(std::mem::take(&mut self.taken));
            self.ring.take(TAKE_MAX, &mut taken);
            self.ring.release();
            self.taken = taken.into();
        }
    }

    /// Lets all that is here go home, and returns how many packets that were.
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

/// True if a packet is the one that is due; then the next one is.
fn is_next(packet: &Packet, due: &mut u32) -> bool {
    let is_due = packet.arrival.0 == *due;
    *due = due.wrapping_add(is_due.into());
    is_due
}

/// All lanes to one taker, in the order in which they joined. One thread's.
#[derive(Debug)]
pub struct Lanes {
    lanes: Vec<LaneConsumer>,
    /// The ticket of the packet that comes next.
    due: u32,
    /// The lane that the last one came from: the next ones mostly do, too.
    at: usize,
}

impl Lanes {
    /// Lanes whose packets draw [tickets](Sequencer::starting_at) from `first` on.
    #[must_use]
    pub fn new(first: u32, lanes: Vec<LaneConsumer>) -> Self {
        Self { lanes, due: first, at: 0 }
    }

    /// One more lane.
    pub fn join(&mut self, lane: LaneConsumer) {
        self.lanes.push(lane);
    }

    /// Number of lanes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lanes.len()
    }

    /// The ticket of the packet that comes next.
    #[must_use]
    pub fn due(&self) -> u32 {
        self.due
    }

    /// True if packets have drawn tickets that have not been taken out. The first of them may be a
    /// moment away: then there is none to be taken yet.
    #[must_use]
    pub fn has_some(&self, tickets: &Sequencer) -> bool {
        tickets.has_drawn(self.due)
    }

    /// Moves up to `max` packets to the end of `out`, in the order of their tickets, and returns
    /// how many.
    pub fn take(&mut self, tickets: &Sequencer, max: usize, out: &mut Vec<Packet>) -> usize {
        let before = out.len();
        while out.len() - before < max && self.take_some(tickets, max - (out.len() - before), out) {
        }
        out.len() - before
    }

    /// Takes what one lane has that is due. Returns whether there was any.
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

    /// Takes the packet that comes next, if it is here. With it comes its lane's number.
    pub fn take_one(&mut self) -> Option<(usize, Packet)> {
        let Self { lanes, due, at } = self;
        let count = lanes.len();
        for number in (*at..count).chain(0..(*at).min(count)) {
            let lane = &mut lanes[number];
            lane.look();
            if let Some(packet) = lane.taken.pop_front_if(|packet| is_next(packet, due)) {
                *at = number;
                return Some((number, packet));
            }
        }
        None
    }

    /// The packet that comes next, if it is here. It stays.
    pub fn peek(&mut self) -> Option<&Packet> {
        let Self { lanes, due, .. } = self;
        let mut oldest = lanes.iter_mut().filter_map(|lane| {
            lane.look();
            lane.taken.front()
        });
        oldest.find(|packet| packet.arrival.0 == *due)
    }

    /// Lets all that is here go home; what a CPU is handing in right now goes with its own end.
    /// Returns how many packets that were, by lane.
    pub fn clear(&mut self) -> Vec<u64> {
        self.lanes.iter_mut().map(LaneConsumer::clear).collect()
    }
}
