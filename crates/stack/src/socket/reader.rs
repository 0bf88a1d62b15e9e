//! The reader's end of a socket: what it has taken out, and the way home for that.

use std::collections::VecDeque;

use mem::Pool;
use mem::pool::LOT_FRAMES;
use path::Packet;
use path::coalesce::resegment;

use super::policy::{BufferPolicy, WayBack};
use super::queue::Outlet;

/// Datagrams that are taken out of the queue at once, for calls that read one.
const TAKE_MAX: usize = 64;

/// One at a time has it.
#[derive(Debug)]
pub struct Reader {
    /// The queue that it takes from.
    pub outlet: Outlet,
    way_back: WayBack,
    /// Taken out of the queue, and not read.
    ready: VecDeque<Packet>,
    /// For packets on their way from the queue.
    scratch: Vec<Packet>,
    /// Read one by one, and not given back yet.
    done: Vec<Packet>,
    /// True if merged datagrams are read as one (`UDP_GRO`).
    takes_merged: bool,
}

impl Reader {
    /// The end of `outlet`. What it reads goes home by `home`.
    #[must_use]
    pub fn new(outlet: Outlet, home: Pool) -> Self {
        Self {
            outlet,
            way_back: WayBack::new(home),
            ready: VecDeque::new(),
            scratch: Vec::new(),
            done: Vec::new(),
            takes_merged: false,
        }
    }

    /// True if something was taken out of the queue that has not been read.
    #[must_use]
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Says whether merged datagrams are read as one, from now on.
    pub fn set_takes_merged(&mut self, takes_merged: bool) {
        self.takes_merged = takes_merged;
        self.outlet.set_takes_merged(takes_merged);
    }

    /// The next packet, which stays.
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
        if self.outlet.take(max, &mut self.scratch) == 0 {
            return self.settle();
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

    /// Gives a packet back that was read.
    pub fn give_back(&mut self, packet: Packet, policy: BufferPolicy) {
        self.done.push(packet);
        if self.ready.is_empty() || self.done.len() >= LOT_FRAMES {
            self.way_back.give_back(&mut self.done, &mut self.outlet, policy);
        }
    }

    /// The same for many.
    pub fn give_back_all(&mut self, packets: impl Iterator<Item = Packet>, policy: BufferPolicy) {
        self.done.extend(packets);
        self.way_back.give_back(&mut self.done, &mut self.outlet, policy);
    }

    /// Relieves the socket of packets that went another way, with their `truesize`.
    pub fn let_go(&mut self, bytes: u32) {
        self.outlet.uncharge(bytes);
    }

    /// Sends home what was given back: nobody else does, and the reader may be about to sleep.
    fn settle(&mut self) {
        self.way_back.send(&mut self.outlet);
    }
}
