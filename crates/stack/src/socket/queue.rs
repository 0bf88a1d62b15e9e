//! From any CPU to a socket's one reader, in order.
//!
//! Each CPU has a lane to the reader, and packets are taken out by their [tickets](path::tickets). A
//! run of packets costs one charge, one draw and one publication, however long it is.
//!
//! A lane joins when its CPU has the first packet for the socket. The reader meets it when a ticket has
//! been drawn whose packet lies in none of the lanes that it knows.

use std::fmt;
use std::sync::{Arc, PoisonError};

use mem::cache::OwnLine;
use mem::sync::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use path::packet::Packet;
use path::tickets::{Feeder, Lane, Lanes, Tickets, lane};

use super::SocketId;
use super::account::{Account, LaneCounters, size};

/// The most packets that wait between one CPU and one reader. Whatever `rcvbuf` allows.
pub const SLOTS_MAX: u32 = 1 << 16;

/// Configuration of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    /// Socket that it belongs to.
    pub id: SocketId,
    /// The most bytes of packet memory that the socket may hold.
    pub rcvbuf: u32,
    /// Packets that each ring has room for to begin with: rounded up to a power of two, at most
    /// [`SLOTS_MAX`]. A ring grows when `rcvbuf` allows more.
    pub slots: u32,
    /// Number of CPUs that put packets in.
    pub cpus: usize,
}

/// Wakes a socket's reader, and whoever else waits for the socket.
pub trait WakeReader: Send + Sync {
    /// Something has come: a packet, or the socket was told something. Called by any CPU.
    fn wake(&self, hub: &Hub);
}

/// Makes a queue: what its CPUs make their inlets of, and the reader's end.
#[must_use]
pub fn open(config: QueueConfig, reader: Arc<dyn WakeReader>) -> (Arc<Hub>, Outlet) {
    starting_at(config, 0, reader)
}

/// Makes a queue whose CPUs are all there, an inlet for each in their order, and whose reader nobody
/// needs to wake.
#[must_use]
pub fn queue(config: QueueConfig) -> (Vec<Inlet>, Outlet) {
    let (hub, outlet) = open(config, Arc::new(Awake));
    ((0..config.cpus).filter_map(|cpu| hub.inlet(cpu)).collect(), outlet)
}

/// A reader that does not sleep, or is woken by who is told to.
#[derive(Clone, Copy, Debug)]
pub struct Awake;

impl WakeReader for Awake {
    fn wake(&self, _: &Hub) {}
}

fn starting_at(
    config: QueueConfig,
    ticket: u32,
    reader: Arc<dyn WakeReader>,
) -> (Arc<Hub>, Outlet) {
    let hub = Arc::new(Hub {
        id: config.id,
        slots: config.slots.clamp(1, SLOTS_MAX).next_power_of_two(),
        account: Account::new(config.rcvbuf, config.cpus),
        tickets: Tickets::starting_at(ticket),
        is_waiting: OwnLine(AtomicBool::new(false)),
        is_closed: AtomicBool::new(false),
        told: AtomicU8::new(0),
        joined: AtomicU32::new(0),
        joining: Joining::new(Some(Vec::new())),
        reader,
        takes_merged: AtomicBool::new(false),
    });
    let lanes = Lanes::new(ticket, Vec::new());
    let outlet = Outlet { hub: Arc::clone(&hub), lanes, in_hand_bytes: 0 };
    (hub, outlet)
}

/// Lanes that the reader has not met; None once there is no reader.
#[cfg(all(loom, test))]
type Joining = loom::sync::Mutex<Option<Vec<Lane>>>;
#[cfg(not(all(loom, test)))]
#[expect(clippy::disallowed_types, reason = "held to push one lane, once for each CPU")]
type Joining = std::sync::Mutex<Option<Vec<Lane>>>;

/// State that all ends of one socket's rings share.
pub struct Hub {
    id: SocketId,
    /// Of each ring, to begin with.
    slots: u32,
    account: Account,
    tickets: Tickets,
    /// The reader sleeps, or is about to. It sets this; the CPU that clears it wakes the reader.
    is_waiting: OwnLine<AtomicBool>,
    /// There is no reader any more.
    is_closed: AtomicBool,
    /// The reader takes several datagrams in one packet (`UDP_GRO`).
    takes_merged: AtomicBool,
    /// Of [`REFUSED`] and [`ENDED`].
    told: AtomicU8,
    /// Number of lanes that have been put in `joining`, ever.
    joined: AtomicU32,
    joining: Joining,
    reader: Arc<dyn WakeReader>,
}

/// A peer says that nobody listens where the socket's datagrams go.
const REFUSED: u8 = 1;
/// No packet will come any more.
const ENDED: u8 = 2;

impl Hub {
    /// Socket that it belongs to.
    #[must_use]
    pub fn id(&self) -> SocketId {
        self.id
    }

    /// Memory that the socket holds, and may hold.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Makes the end that a CPU puts packets into, by the CPU's place: once for each. None if there is
    /// no reader any more.
    #[must_use]
    pub fn inlet(self: &Arc<Self>, cpu: usize) -> Option<Inlet> {
        let (feeder, lane) = lane(self.slots);
        self.joining.lock().unwrap_or_else(PoisonError::into_inner).as_mut()?.push(lane);
        // Release: pairs with the Acquire in `Outlet::meet`.
        self.joined.fetch_add(1, Ordering::Release);
        Some(Inlet { cpu, hub: Arc::clone(self), feeder })
    }

    /// True if there is something for a reader who has taken all before the ticket `due`: a packet, or
    /// something that the socket was told.
    #[must_use]
    pub fn has_news(&self, due: u32) -> bool {
        self.tickets.has_drawn(due) || self.told.load(Ordering::Relaxed) != 0
    }

    /// Tells the socket that nobody listens where its datagrams go. Returns as [`Inlet::put`] does.
    pub fn refuse(&self) -> Put {
        self.told.fetch_or(REFUSED, Ordering::Relaxed);
        // Pairs with the fence in `Outlet::arm`, as that in `Inlet::send` does.
        fence(Ordering::SeqCst);
        if self.has_to_wake() { Put::WakeReader } else { Put::Done }
    }

    /// Takes back that somebody [said so](Self::refuse). Returns whether somebody had.
    #[must_use]
    pub fn take_refusal(&self) -> bool {
        self.told.load(Ordering::Relaxed) & REFUSED != 0
            && self.told.fetch_and(!REFUSED, Ordering::Relaxed) & REFUSED != 0
    }

    /// Tells the socket that no packet will come any more, and wakes its readers.
    pub fn end(&self) {
        self.told.fetch_or(ENDED, Ordering::Release);
        self.wake_reader();
    }

    /// Wakes the reader: to be called by whoever was [told to](Put::WakeReader).
    pub fn wake_reader(&self) {
        self.reader.wake(self);
    }

    /// True if there is no reader any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// True if the reader sleeps, and the caller is the one to wake it.
    fn has_to_wake(&self) -> bool {
        let is_waiting = &self.is_waiting.0;
        // AcqRel: a reader that is woken sees what was published.
        let clear = || {
            is_waiting.compare_exchange(true, false, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        is_waiting.load(Ordering::Relaxed) && clear()
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hub({:?}, closed: {})", self.id, self.is_closed())
    }
}

/// Outcome of packets that were put into a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Put {
    /// The reader is awake, or others see to that.
    Done,
    /// The reader sleeps, and the caller is the one to [wake](Hub::wake_reader) it.
    WakeReader,
    /// There is no reader any more. The packets are the caller's still, and this inlet should be
    /// dropped: what the reader left in it goes home then.
    Closed,
}

/// The end of a queue that one CPU puts packets into.
#[derive(Debug)]
pub struct Inlet {
    cpu: usize,
    hub: Arc<Hub>,
    feeder: Feeder,
}

impl Inlet {
    /// Socket that it belongs to.
    #[must_use]
    pub fn id(&self) -> SocketId {
        self.hub.id
    }

    /// State that all ends share.
    #[must_use]
    pub fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Puts `packets` in, oldest first; those that the socket may not hold go to the end of
    /// `dropped`, and are counted. The vector is empty afterwards, unless the socket is closed.
    pub fn put(&mut self, packets: &mut Vec<Packet>, dropped: &mut Vec<Packet>) -> Put {
        if self.hub.is_closed() {
            return Put::Closed;
        }
        let (slots, refused_before) = (self.room_for(packets.len()), dropped.len());
        self.hub.account.charge(packets, slots, dropped);
        let counters = self.counters();
        if dropped.len() > refused_before {
            counters.dropped.add(datagrams(&dropped[refused_before..]));
        }
        if packets.is_empty() {
            return Put::Done;
        }
        counters.queued.add(datagrams(packets));
        self.send(packets)
    }

    /// Hands packets over that there is room for.
    fn send(&mut self, packets: &mut Vec<Packet>) -> Put {
        let drawn = self.hub.tickets.draw(packets);
        // Pairs with the fence in `Outlet::arm`: either the reader sees these tickets drawn, and
        // does not sleep, or what is read of its sleep below is not older.
        fence(Ordering::SeqCst);
        self.feeder.send(drawn, packets);
        if self.hub.has_to_wake() { Put::WakeReader } else { Put::Done }
    }

    /// Packets that the ring takes; it grows for `count` if it may.
    fn room_for(&mut self, count: usize) -> usize {
        let room = self.feeder.room_for(count);
        if room >= count || self.hub.account.is_full() {
            return room;
        }
        self.feeder.grow_for(count, SLOTS_MAX)
    }

    /// Memory that the socket holds, and may hold.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.hub.account
    }

    /// Counters of this CPU for the socket.
    #[must_use]
    pub fn counters(&self) -> &LaneCounters {
        self.hub.account.lane(self.cpu)
    }

    /// True if the reader takes several datagrams in one packet. Merged ones it takes apart itself if
    /// not; those that are [yet to be cut](path::packet::Shape::Gso) are cut before they are put in.
    #[must_use]
    pub fn takes_merged(&self) -> bool {
        self.hub.takes_merged.load(Ordering::Relaxed)
    }
}

/// Datagrams that packets stand for.
fn datagrams(packets: &[Packet]) -> u64 {
    packets.iter().map(|packet| u64::from(packet.wire_count())).sum()
}

/// The end of a queue that the socket's reader takes packets out of. Dropping it closes the socket.
#[derive(Debug)]
pub struct Outlet {
    hub: Arc<Hub>,
    lanes: Lanes,
    /// Memory that was taken out and is still charged.
    in_hand_bytes: u32,
}

impl Outlet {
    /// Socket that it belongs to.
    #[must_use]
    pub fn id(&self) -> SocketId {
        self.hub.id
    }

    /// State that all ends share.
    #[must_use]
    pub fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Moves up to `max` packets to the end of `out`, in the order in which they were put in, and
    /// returns how many. They stay charged until [`uncharge`](Self::uncharge).
    pub fn take(&mut self, max: usize, out: &mut Vec<Packet>) -> usize {
        let before = out.len();
        loop {
            let taken = out.len() - before;
            self.lanes.take(&self.hub.tickets, max - taken, out);
            // What comes next may lie in a lane that is new.
            if out.len() - before == max || !self.has_some() || !self.meet() {
                break;
            }
        }
        let taken = &out[before..];
        self.in_hand_bytes += taken.iter().map(size).sum::<u32>();
        taken.len()
    }

    /// The packet that comes next, if it is here. It stays.
    pub fn peek(&mut self) -> Option<&Packet> {
        if self.has_some() {
            self.meet();
        }
        self.lanes.peek()
    }

    /// Meets lanes that have joined. Returns whether there were any.
    fn meet(&mut self) -> bool {
        // Acquire: pairs with the Release in `Hub::inlet`.
        if self.hub.joined.load(Ordering::Acquire) as usize == self.lanes.count() {
            return false;
        }
        let joining =
            self.hub.joining.lock().unwrap_or_else(PoisonError::into_inner).replace(vec![]);
        let mut has_met = false;
        for lane in joining.into_iter().flatten() {
            self.lanes.join(lane);
            has_met = true;
        }
        has_met
    }

    /// True if packets have been put in that have not been taken out. The first of them may be a
    /// moment away: then [`take`](Self::take) gives none yet.
    #[must_use]
    pub fn has_some(&self) -> bool {
        self.lanes.has_some(&self.hub.tickets)
    }

    /// The ticket of the packet that comes next: all before it have been taken.
    #[must_use]
    pub fn due(&self) -> u32 {
        self.lanes.due()
    }

    /// Says that the reader goes to sleep. True if nothing is there: whoever puts a packet in from
    /// now on wakes it. False if something came in between: the reader is awake, and
    /// [takes](Self::take) it, or [what it was told](Hub::take_refusal).
    #[must_use]
    pub fn arm(&mut self) -> bool {
        let is_waiting = &self.hub.is_waiting.0;
        is_waiting.store(true, Ordering::Relaxed);
        // Pairs with the fence in `Inlet::send`.
        fence(Ordering::SeqCst);
        let has_news = self.has_some() || self.hub.told.load(Ordering::Relaxed) & REFUSED != 0;
        if has_news {
            self.disarm();
        }
        !has_news
    }

    /// Says that the reader is awake though nobody woke it.
    pub fn disarm(&mut self) {
        self.hub.is_waiting.0.store(false, Ordering::Relaxed);
    }

    /// Says whether packets of several datagrams are taken, from now on.
    pub fn set_takes_merged(&mut self, takes_merged: bool) {
        self.hub.takes_merged.store(takes_merged, Ordering::Relaxed);
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

    /// Memory that the socket holds, and may hold.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.hub.account
    }
}

impl Outlet {
    /// Closes the socket: it has no reader any more.
    pub fn close(&mut self) {
        // What a CPU is putting in right now goes home with its inlet.
        self.hub.is_closed.store(true, Ordering::Relaxed);
        // No lane joins any more.
        let joining = self.hub.joining.lock().unwrap_or_else(PoisonError::into_inner).take();
        joining.into_iter().flatten().for_each(|lane| self.lanes.join(lane));
        self.lanes.clear();
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
#[cfg(loom)]
mod models;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
