//! The queue from any CPU to a socket's single reader, in order.
//!
//! Each CPU has a lane to the reader, which takes packets out by their
//! [tickets](forebay_rx::ordered_queue). A run of packets of any length costs one charge, one draw
//! of tickets and one publication.
//!
//! A lane joins when its CPU has the first packet for the socket. The reader adopts the lane when
//! the packet of a drawn ticket is in no lane that it has adopted before.

use std::fmt;
use std::sync::{Arc, PoisonError};

use forebay_buf::cache::OwnLine;
use forebay_buf::sync::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use forebay_rx::ordered_queue::{LaneConsumer, LaneProducer, Lanes, Sequencer, lane};
use forebay_rx::packet::Packet;

use super::SocketId;
use super::account::{Account, size};
use super::counters::{CounterTable, LaneCounters, OwnCounters};

/// Upper bound on packets queued between one CPU and one reader, independent of `rcvbuf`.
pub const SLOTS_MAX: u32 = 1 << 16;

/// Parameters of a queue.
#[derive(Clone, Copy, Debug)]
pub struct SocketQueueConfig {
    /// The socket.
    pub id: SocketId,
    /// Limit on the bytes of packet memory that the socket may hold.
    pub rcvbuf: u32,
    /// Initial capacity of each ring, in packets: rounded up to a power of two, at most
    /// [`SLOTS_MAX`]. A full ring grows while the socket is below `rcvbuf`.
    pub slots: u32,
}

/// Wakes a socket's reader, and any other waiters.
pub trait WakeReader: Send + Sync {
    /// Called by any CPU when a packet or a notification has arrived.
    fn wake(&self, queue: &SocketQueue);
}

/// Creates a queue, which the CPUs of `counters` put packets into: what they open their producers from, and the
/// reader's end.
#[must_use]
pub fn open(
    config: SocketQueueConfig,
    counters: &Arc<CounterTable>,
    reader: Arc<dyn WakeReader>,
) -> (Arc<SocketQueue>, SocketQueueConsumer) {
    starting_at(config, 0, counters, reader)
}

/// Creates a queue of a socket alone with one producer per CPU, in CPU order, whose reader does not need to be woken.
#[must_use]
pub fn queue(
    config: SocketQueueConfig,
    cpus: usize,
) -> (Vec<SocketQueueProducer>, SocketQueueConsumer) {
    let counters = Arc::new(CounterTable::new(cpus, config.id.index() + 1));
    let (queue, consumer) = open(config, &counters, Arc::new(Awake));
    ((0..cpus).filter_map(|cpu| queue.producer(cpu)).collect(), consumer)
}

/// A reader that does not sleep, or that the caller wakes.
#[derive(Clone, Copy, Debug)]
pub struct Awake;

impl WakeReader for Awake {
    fn wake(&self, _: &SocketQueue) {}
}

fn starting_at(
    config: SocketQueueConfig,
    ticket: u32,
    counters: &Arc<CounterTable>,
    reader: Arc<dyn WakeReader>,
) -> (Arc<SocketQueue>, SocketQueueConsumer) {
    let queue = Arc::new(SocketQueue {
        id: config.id,
        slots: config.slots.clamp(1, SLOTS_MAX).next_power_of_two(),
        account: Account::new(config.id, config.rcvbuf, Arc::clone(counters)),
        tickets: Sequencer::starting_at(ticket),
        is_waiting: OwnLine(AtomicBool::new(false)),
        is_closed: AtomicBool::new(false),
        told: AtomicU8::new(0),
        joined: AtomicU32::new(0),
        joining: Joining::new(Some(Vec::new())),
        reader,
        takes_merged: AtomicBool::new(false),
    });
    let lanes = Lanes::new(ticket, Vec::new());
    let consumer = SocketQueueConsumer { queue: Arc::clone(&queue), lanes, in_hand_bytes: 0 };
    (queue, consumer)
}

/// Lanes that the reader has not adopted yet; `None` once the reader is gone.
#[cfg(all(loom, test))]
type Joining = loom::sync::Mutex<Option<Vec<LaneConsumer>>>;
#[cfg(not(all(loom, test)))]
#[expect(clippy::disallowed_types, reason = "held to push one lane, once for each CPU")]
type Joining = std::sync::Mutex<Option<Vec<LaneConsumer>>>;

/// State shared by all ends of one socket's rings.
pub struct SocketQueue {
    id: SocketId,
    /// Initial capacity of each ring.
    slots: u32,
    account: Account,
    tickets: Sequencer,
    /// True if the reader sleeps or is about to. The reader sets it; the CPU that clears it wakes
    /// the reader.
    is_waiting: OwnLine<AtomicBool>,
    /// True once the socket has no reader.
    is_closed: AtomicBool,
    /// True if the reader accepts several datagrams in one packet (`UDP_GRO`).
    takes_merged: AtomicBool,
    /// Notifications: [`REFUSED`] and [`ENDED`].
    told: AtomicU8,
    /// Number of lanes put into `joining` so far.
    joined: AtomicU32,
    joining: Joining,
    reader: Arc<dyn WakeReader>,
}

/// A peer answered a datagram of the socket with port unreachable.
const REFUSED: u8 = 1;
/// No more packets will arrive.
const ENDED: u8 = 2;

impl SocketQueue {
    /// The socket.
    #[must_use]
    pub fn id(&self) -> SocketId {
        self.id
    }

    /// The socket's account.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Creates the end that the CPU with index `cpu` puts packets into; to be called once per CPU.
    /// `None` if the reader is gone.
    #[must_use]
    pub fn producer(self: &Arc<Self>, cpu: usize) -> Option<SocketQueueProducer> {
        debug_assert!(cpu < self.account.lanes().len(), "no account for CPU index {cpu}");
        let (feeder, lane) = lane(self.slots);
        let counters = self.account.join(cpu);
        self.joining.lock().unwrap_or_else(PoisonError::into_inner).as_mut()?.push(lane);
        // Release: pairs with the Acquire in `SocketQueueConsumer::meet`.
        self.joined.fetch_add(1, Ordering::Release);
        Some(SocketQueueProducer { counters, queue: Arc::clone(self), feeder })
    }

    /// True if a packet or a notification is available to a reader whose next ticket is `due`.
    #[must_use]
    pub fn has_news(&self, due: u32) -> bool {
        self.tickets.has_drawn(due) || self.told.load(Ordering::Relaxed) != 0
    }

    /// As [`has_news`](Self::has_news) for one of several waiters. If nothing is available, the next CPU that puts a
    /// packet in wakes the readers, although a CPU that wakes them for an earlier packet has declared them awake.
    #[must_use]
    pub fn has_news_else_arm(&self, due: u32) -> bool {
        if self.has_news(due) {
            return true;
        }
        self.set_waiting();
        // Stays armed even so: another waiter may have done the same, and may sleep.
        self.has_news(due)
    }

    /// Announces a waiter, who looks for news from then on.
    fn set_waiting(&self) {
        self.is_waiting.0.store(true, Ordering::Relaxed);
        // Pairs with the fences in `SocketQueueProducer::send` and `refuse`.
        fence(Ordering::SeqCst);
    }

    /// The ticket that the next packet put in draws.
    #[must_use]
    pub(crate) fn next_ticket(&self) -> u32 {
        self.tickets.next()
    }

    /// Notifies the socket of a port unreachable answer. The result is as for
    /// [`SocketQueueProducer::put`].
    pub fn refuse(&self) -> Enqueue {
        self.told.fetch_or(REFUSED, Ordering::Relaxed);
        // Pairs with the fence in `SocketQueue::set_waiting`, as the one in
        // `SocketQueueProducer::send` does.
        fence(Ordering::SeqCst);
        if self.has_to_wake() { Enqueue::WakeReader } else { Enqueue::Done }
    }

    /// Clears the notification of [`refuse`](Self::refuse). Returns true if it was set.
    #[must_use]
    pub fn take_refusal(&self) -> bool {
        self.told.load(Ordering::Relaxed) & REFUSED != 0
            && self.told.fetch_and(!REFUSED, Ordering::Relaxed) & REFUSED != 0
    }

    /// Notifies the socket that no more packets will arrive, and wakes its readers.
    pub fn end(&self) {
        self.told.fetch_or(ENDED, Ordering::Release);
        self.wake_reader();
    }

    /// Wakes the reader: to be called after [`Enqueue::WakeReader`].
    pub fn wake_reader(&self) {
        self.reader.wake(self);
    }

    /// True once the socket has no reader.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// True if the reader sleeps and the caller has to wake it. At most one caller per sleep gets
    /// true.
    fn has_to_wake(&self) -> bool {
        let is_waiting = &self.is_waiting.0;
        // AcqRel: the woken reader sees what this CPU has published.
        let clear = || {
            is_waiting.compare_exchange(true, false, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        is_waiting.load(Ordering::Relaxed) && clear()
    }
}

impl fmt::Debug for SocketQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SocketQueue({:?}, closed: {})", self.id, self.is_closed())
    }
}

/// Result of putting packets into a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Enqueue {
    /// Nothing to do: the reader is awake, or another CPU wakes it.
    Done,
    /// The reader sleeps, and the caller has to [wake](SocketQueue::wake_reader) it.
    WakeReader,
    /// The socket has no reader any more. The packets still belong to the caller, which should drop
    /// this producer: packets left in its lane are then returned to their pools.
    Closed,
}

/// The end of a queue that one CPU puts packets into.
#[derive(Debug)]
pub struct SocketQueueProducer {
    counters: OwnCounters,
    queue: Arc<SocketQueue>,
    feeder: LaneProducer,
}

impl SocketQueueProducer {
    /// The socket.
    #[must_use]
    pub fn id(&self) -> SocketId {
        self.queue.id
    }

    /// The state shared by all ends.
    #[must_use]
    pub fn queue(&self) -> &Arc<SocketQueue> {
        &self.queue
    }

    /// Puts `packets` in, oldest first. Packets that exceed the socket's limit are moved to the end
    /// of `dropped`, and counted. `packets` is empty afterwards, unless the socket is closed.
    pub fn put(&mut self, packets: &mut Vec<Packet>, dropped: &mut Vec<Packet>) -> Enqueue {
        if self.queue.is_closed() {
            return Enqueue::Closed;
        }
        let (slots, refused_before) = (self.room_for(packets.len()), dropped.len());
        let all = packets.len() + refused_before;
        self.queue.account.charge(packets, slots, dropped);
        debug_assert_eq!(packets.len() + dropped.len(), all, "a packet is charged or dropped");
        let counters = self.counters();
        if dropped.len() > refused_before {
            counters.dropped.add(datagrams(&dropped[refused_before..]));
        }
        if packets.is_empty() {
            return Enqueue::Done;
        }
        counters.queued.add(datagrams(packets));
        self.send(packets)
    }

    /// Publishes packets for which the ring has room.
    fn send(&mut self, packets: &mut Vec<Packet>) -> Enqueue {
        let drawn = self.queue.tickets.draw(packets);
        // Pairs with the fence in `SocketQueue::set_waiting`: either the reader sees these tickets
        // as drawn and does not sleep, or `has_to_wake` below sees that the reader sleeps.
        fence(Ordering::SeqCst);
        self.feeder.send(drawn, packets);
        debug_assert!(packets.is_empty(), "packets left after all were published");
        if self.queue.has_to_wake() { Enqueue::WakeReader } else { Enqueue::Done }
    }

    /// Number of packets that the ring has room for. The ring grows for `count` packets if allowed.
    fn room_for(&mut self, count: usize) -> usize {
        let room = self.feeder.room_for(count);
        // More slots would not help: the socket's limit refuses the packets.
        if room >= count || self.queue.account.is_full() {
            return room;
        }
        self.feeder.grow_for(count, SLOTS_MAX)
    }

    /// The socket's account.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.queue.account
    }

    /// Counters of the socket for this CPU.
    #[must_use]
    pub fn counters(&self) -> &LaneCounters {
        &self.counters
    }

    /// True if the reader accepts several datagrams in one packet. If not, the reader splits merged
    /// packets itself, but [GSO](forebay_rx::packet::Shape::Gso) packets must be segmented before
    /// they are put in.
    #[must_use]
    pub fn takes_merged(&self) -> bool {
        self.queue.takes_merged.load(Ordering::Relaxed)
    }
}

/// Number of datagrams in these packets.
fn datagrams(packets: &[Packet]) -> u64 {
    packets.iter().map(|packet| u64::from(packet.wire_count())).sum()
}

/// The end of a queue that the socket's reader takes packets out of. Drop closes the socket.
#[derive(Debug)]
pub struct SocketQueueConsumer {
    queue: Arc<SocketQueue>,
    lanes: Lanes,
    /// `truesize` of packets taken out and still charged.
    in_hand_bytes: u32,
}

impl SocketQueueConsumer {
    /// The socket.
    #[must_use]
    pub fn id(&self) -> SocketId {
        self.queue.id
    }

    /// The state shared by all ends.
    #[must_use]
    pub fn queue(&self) -> &Arc<SocketQueue> {
        &self.queue
    }

    /// Moves up to `max` packets to the end of `out`, in the order in which they were put in, and
    /// returns their number. They stay charged until [`uncharge`](Self::uncharge).
    pub fn take(&mut self, max: usize, out: &mut Vec<Packet>) -> usize {
        let before = out.len();
        loop {
            let taken = out.len() - before;
            self.lanes.take(&self.queue.tickets, max - taken, out);
            // The next packet may be in a lane that has just joined.
            if out.len() - before == max || !self.has_some() || !self.meet() {
                break;
            }
        }
        let taken = &out[before..];
        debug_assert!(taken.len() <= max, "took {} packets, {max} at most", taken.len());
        self.in_hand_bytes += taken.iter().map(size).sum::<u32>();
        taken.len()
    }

    /// The next packet, if it is available. It stays in the queue.
    pub fn peek(&mut self) -> Option<&Packet> {
        if self.has_some() {
            self.meet();
        }
        self.lanes.peek()
    }

    /// Adopts lanes that have joined. Returns true if there were any.
    fn meet(&mut self) -> bool {
        // Acquire: pairs with the Release in `SocketQueue::producer`.
        if self.queue.joined.load(Ordering::Acquire) as usize == self.lanes.count() {
            return false;
        }
        let joining =
            self.queue.joining.lock().unwrap_or_else(PoisonError::into_inner).replace(vec![]);
        let mut has_met = false;
        for lane in joining.into_iter().flatten() {
            self.lanes.join(lane);
            has_met = true;
        }
        has_met
    }

    /// True if packets have been put in that have not been taken out. The first of them may not be
    /// visible yet; [`take`](Self::take) then returns 0.
    #[must_use]
    pub fn has_some(&self) -> bool {
        self.lanes.has_some(&self.queue.tickets)
    }

    /// Ticket of the next packet: all packets with earlier tickets have been taken.
    #[must_use]
    pub fn due(&self) -> u32 {
        self.lanes.due()
    }

    /// Announces that the reader is going to sleep. Returns true if nothing is available: the next
    /// CPU that puts a packet in wakes the reader. Returns false if something arrived in between:
    /// the reader counts as awake, and has to [take](Self::take) the packet or [the
    /// notification](SocketQueue::take_refusal).
    #[must_use]
    pub fn arm(&mut self) -> bool {
        self.arm_unless(|queue| queue.told.load(Ordering::Relaxed) & REFUSED != 0)
    }

    /// As [`arm`](Self::arm), for a reader that leaves notifications to others.
    #[must_use]
    pub fn arm_for_packets(&mut self) -> bool {
        self.arm_unless(|_| false)
    }

    fn arm_unless(&mut self, is_told: impl FnOnce(&SocketQueue) -> bool) -> bool {
        self.queue.set_waiting();
        let has_news = self.has_some() || is_told(&self.queue);
        if has_news {
            self.disarm();
        }
        !has_news
    }

    /// Announces that the reader is awake without having been woken.
    pub fn disarm(&mut self) {
        self.queue.is_waiting.0.store(false, Ordering::Relaxed);
    }

    /// Sets whether the reader accepts packets of several datagrams, from now on.
    pub fn set_takes_merged(&mut self, takes_merged: bool) {
        self.queue.takes_merged.store(takes_merged, Ordering::Relaxed);
    }

    /// `truesize` of all packets taken out and still charged.
    #[must_use]
    pub fn in_hand_bytes(&self) -> u32 {
        self.in_hand_bytes
    }

    /// Uncharges packets that were taken out and whose memory has been returned. `bytes` is the sum
    /// of their `truesize` at the time of taking; at most [`in_hand_bytes`](Self::in_hand_bytes) is
    /// uncharged.
    pub fn uncharge(&mut self, bytes: u32) {
        debug_assert!(
            self.in_hand_bytes <= self.queue.account.rmem(),
            "{} bytes in hand, {} charged",
            self.in_hand_bytes,
            self.queue.account.rmem()
        );
        let bytes = bytes.min(self.in_hand_bytes);
        self.in_hand_bytes -= bytes;
        self.queue.account.relieve(bytes);
    }

    /// The socket's account.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.queue.account
    }
}

impl SocketQueueConsumer {
    /// Closes the socket: no reader takes packets any more.
    pub fn close(&mut self) {
        // A CPU may be putting packets in right now; dropping its producer returns them.
        self.queue.is_closed.store(true, Ordering::Relaxed);
        // From here on `producer` returns `None`.
        let joining = self.queue.joining.lock().unwrap_or_else(PoisonError::into_inner).take();
        joining.into_iter().flatten().for_each(|lane| self.lanes.join(lane));
        self.lanes.clear();
    }
}

impl Drop for SocketQueueConsumer {
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
