//! From any CPU to a socket's one reader, in order.
//!
//! Each CPU has a lane to the reader, and packets are taken out by their [tickets](crate::tickets). A
//! run of packets costs one charge, one draw and one publication, however long it is.

use std::sync::Arc;

#[cfg(all(loom, test))]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(all(loom, test)))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

use super::SocketId;
use super::account::{Account, LaneCounters, size};
use crate::packet::Packet;
use crate::tickets::{Feeder, Lanes, OwnLine, Tickets, lane};

/// The most packets that wait between one CPU and one reader. Whatever `rcvbuf` allows.
pub const SLOTS_MAX: u32 = 1 << 16;

/// What a queue is made for.
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    /// Whose it is.
    pub id: SocketId,
    /// The most bytes of packet memory that the socket may hold.
    pub rcvbuf: u32,
    /// Packets that each ring has room for to begin with: rounded up to a power of two, at most
    /// [`SLOTS_MAX`]. A ring grows when `rcvbuf` allows more.
    pub slots: u32,
    /// How many CPUs put packets in.
    pub cpus: usize,
}

/// Makes a queue: an inlet for each CPU, in their order, and the reader's end.
#[must_use]
pub fn queue(config: QueueConfig) -> (Vec<Inlet>, Outlet) {
    starting_at(config, 0)
}

fn starting_at(config: QueueConfig, ticket: u32) -> (Vec<Inlet>, Outlet) {
    let hub = Arc::new(Hub {
        account: Account::new(config.rcvbuf, config.cpus),
        tickets: Tickets::starting_at(ticket),
        is_waiting: OwnLine(AtomicBool::new(false)),
        is_closed: AtomicBool::new(false),
    });
    let slots = config.slots.clamp(1, SLOTS_MAX).next_power_of_two();
    let (inlets, lanes) = (0..config.cpus)
        .map(|cpu| {
            let (feeder, lane) = lane(slots);
            (Inlet { id: config.id, cpu, hub: Arc::clone(&hub), feeder }, lane)
        })
        .unzip();
    let lanes = Lanes::new(ticket, lanes);
    let outlet = Outlet { id: config.id, hub, lanes, in_hand_bytes: 0 };
    (inlets, outlet)
}

/// What the ends of one socket's rings share.
#[derive(Debug)]
struct Hub {
    account: Account,
    tickets: Tickets,
    /// The reader sleeps, or is about to. It sets this; the CPU that clears it wakes the reader.
    is_waiting: OwnLine<AtomicBool>,
    /// There is no reader any more.
    is_closed: AtomicBool,
}

/// What came of packets that were put into a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Put {
    /// The reader is awake, or others see to that.
    Done,
    /// The reader sleeps, and the caller is the one to wake it.
    WakeReader,
    /// There is no reader any more. The packets are the caller's still, and this inlet should be
    /// dropped: what the reader left in it goes home then.
    Closed,
}

/// The end of a queue that one CPU puts packets into.
#[derive(Debug)]
pub struct Inlet {
    id: SocketId,
    cpu: usize,
    hub: Arc<Hub>,
    feeder: Feeder,
}

impl Inlet {
    /// Whose it is.
    #[must_use]
    pub fn id(&self) -> SocketId {
        self.id
    }

    /// Puts `packets` in, oldest first; those that the socket may not hold go to the end of
    /// `dropped`, and are counted. The vector is empty afterwards, unless the socket is closed.
    pub fn put(&mut self, packets: &mut Vec<Packet>, dropped: &mut Vec<Packet>) -> Put {
        if self.is_closed() {
            return Put::Closed;
        }
        let (slots, refused_before) = (self.room_for(packets.len()), dropped.len());
        self.hub.account.charge(packets, slots, dropped);
        let counters = self.counters();
        if dropped.len() > refused_before {
            counters.dropped.add(frames(&dropped[refused_before..]));
        }
        if packets.is_empty() {
            return Put::Done;
        }
        counters.queued.add(frames(packets));
        self.send(packets)
    }

    /// Hands packets over that there is room for.
    fn send(&mut self, packets: &mut Vec<Packet>) -> Put {
        let drawn = self.hub.tickets.draw(packets);
        // Pairs with the fence in `Outlet::arm`: either the reader sees these tickets drawn, and
        // does not sleep, or what is read of its sleep below is not older.
        fence(Ordering::SeqCst);
        self.feeder.send(drawn, packets);
        let is_waiting = &self.hub.is_waiting.0;
        // AcqRel: a reader that is woken sees what was published.
        let clear = || {
            is_waiting.compare_exchange(true, false, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if is_waiting.load(Ordering::Relaxed) && clear() { Put::WakeReader } else { Put::Done }
    }

    /// How many packets the ring takes; it grows for `count` if it may.
    fn room_for(&mut self, count: usize) -> usize {
        let room = self.feeder.room_for(count);
        if room >= count || self.hub.account.is_full() {
            return room;
        }
        self.feeder.grow_for(count, SLOTS_MAX)
    }

    /// What the socket holds, and may hold.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.hub.account
    }

    /// What this CPU counts of the socket.
    #[must_use]
    pub fn counters(&self) -> &LaneCounters {
        self.hub.account.lane(self.cpu)
    }

    /// Whether the reader is slower than what comes: more than half of `rcvbuf` is held (UDP-1).
    #[must_use]
    pub fn is_under_pressure(&self) -> bool {
        self.hub.account.is_under_pressure()
    }

    /// Whether there is no reader any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.hub.is_closed.load(Ordering::Relaxed)
    }
}

/// Frames that packets consist of.
fn frames(packets: &[Packet]) -> u64 {
    packets.iter().map(|packet| u64::from(packet.frame.follower_count()) + 1).sum()
}

/// The end of a queue that the socket's reader takes packets out of. Dropping it closes the socket.
#[derive(Debug)]
pub struct Outlet {
    id: SocketId,
    hub: Arc<Hub>,
    lanes: Lanes,
    /// What was taken out and is still charged.
    in_hand_bytes: u32,
}

impl Outlet {
    /// Whose it is.
    #[must_use]
    pub fn id(&self) -> SocketId {
        self.id
    }

    /// Moves up to `max` packets to the end of `out`, in the order in which they were put in, and
    /// returns how many. They stay charged until [`uncharge`](Self::uncharge).
    pub fn take(&mut self, max: usize, out: &mut Vec<Packet>) -> usize {
        let before = out.len();
        self.lanes.take(&self.hub.tickets, max, out);
        let taken = &out[before..];
        self.in_hand_bytes += taken.iter().map(size).sum::<u32>();
        taken.len()
    }

    /// The packet that comes next, if it is here. It stays.
    pub fn peek(&mut self) -> Option<&Packet> {
        self.lanes.peek()
    }

    /// Whether packets have been put in that have not been taken out. The first of them may be a
    /// moment away: then [`take`](Self::take) gives none yet.
    #[must_use]
    pub fn has_some(&self) -> bool {
        self.lanes.has_some(&self.hub.tickets)
    }

    /// Says that the reader goes to sleep. True if nothing is there: whoever puts a packet in from
    /// now on wakes it. False if something came in between: the reader is awake, and
    /// [takes](Self::take) it.
    #[must_use]
    pub fn arm(&mut self) -> bool {
        let is_waiting = &self.hub.is_waiting.0;
        is_waiting.store(true, Ordering::Relaxed);
        // Pairs with the fence in `Inlet::send`.
        fence(Ordering::SeqCst);
        let has_some = self.has_some();
        if has_some {
            self.disarm();
        }
        !has_some
    }

    /// Says that the reader is awake though nobody woke it.
    pub fn disarm(&mut self) {
        self.hub.is_waiting.0.store(false, Ordering::Relaxed);
    }

    /// The `truesize` of all that was taken out and is still charged.
    #[must_use]
    pub fn in_hand_bytes(&self) -> u32 {
        self.in_hand_bytes
    }

    /// Relieves the socket of packets that were taken out and whose memory has gone home: the sum of
    /// their `truesize` as it was then. More than is [in hand](Self::in_hand_bytes) is not taken off.
    pub fn uncharge(&mut self, bytes: u32) {
        let bytes = bytes.min(self.in_hand_bytes);
        self.in_hand_bytes -= bytes;
        self.hub.account.relieve(bytes);
    }

    /// What the socket holds, and may hold.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.hub.account
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        // What a CPU is putting in right now goes home with its inlet.
        self.hub.is_closed.store(true, Ordering::Relaxed);
        self.lanes.clear();
    }
}

#[cfg(test)]
#[cfg(loom)]
mod models;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
