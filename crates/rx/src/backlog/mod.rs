//! Backlog: the rings from the polling CPU of a queue to the delivering CPUs.
//!
//! One ring per (rx queue, CPU), with the kernel's `netdev_max_backlog` and flow limit. The drain
//! rule of steering reads the rings' counters to observe the progress of a CPU.

mod flow_limit; // the kernel's flow limit (`skb_flow_limit`)
mod stamps; //     times at which packets were queued

pub use flow_limit::{FLOW_LIMIT_HISTORY, FlowLimit};
use forebay_buf::Position;
use forebay_buf::ring::{Consumer, Producer, ring};

use stamps::{StampReader, StampWriter, stamps};

use crate::counters::Histogram;
use crate::cpu::{CpuId, RxQueue};
use crate::drop_reason::DropReason;
use crate::hash::FlowHash;
use crate::packet::{Arrival, Packet};
use crate::steer_reason::SteerReason;

/// Default `netdev_max_backlog`, as in the kernel.
pub const NETDEV_MAX_BACKLOG: u32 = 1000;

/// Maximum capacity of a backlog ring, in packets.
pub const BACKLOG_CAPACITY_MAX: u32 = 1 << 20;

/// Number of turns for which the CPUs' heads are refreshed after a request.
const WATCH_TURNS: u32 = 64;

const _: () = assert!(BACKLOG_CAPACITY_MAX.is_power_of_two(), "capacities are powers of two");
const _: () = assert!(NETDEV_MAX_BACKLOG < BACKLOG_CAPACITY_MAX, "a ring holds one more");

/// Record of a steering decision, for traces. Travels beside the packet in a ring of its own, if
/// notes are enabled.
#[derive(Clone, Copy, Debug)]
pub struct Note {
    /// Number of the packet in the order of arrival.
    pub arrival: Arrival,
    /// Time at which the packet was queued, in ns.
    pub enqueued_ns: u64,
    /// Epoch of the configuration that decided.
    pub epoch: u32,
    /// Reason for this CPU.
    pub steer_reason: SteerReason,
    /// Tail counter of the backlog after this packet.
    pub position: Position,
    /// If the packet moved its flow: the head counter of the old backlog that allowed the move.
    pub head_old: Option<Position>,
    /// Flow of the previous packet in the slot, which `head_old` had to pass; another flow if they
    /// share the slot, [`FlowHash::NONE`] if there was none.
    pub previous_flow: FlowHash,
}

/// Consuming end of one backlog ring, owned by a [`Delivery`](crate::Delivery).
#[derive(Debug)]
pub struct BacklogRing {
    /// Rx queue of its packets.
    pub(crate) rx_queue: RxQueue,
    pub(crate) packets: Consumer<Packet>,
    pub(crate) notes: Option<Consumer<Note>>,
    stamps: StampReader,
}

impl BacklogRing {
    /// Records the waits of the last `count` packets taken, as far as they were stamped.
    pub(crate) fn record_waits(&mut self, count: u32, now_ns: u64, waits: &Histogram) {
        self.stamps.record(self.packets.taken(), count, now_ns, waits);
    }

    /// Declares all packets taken so far processed: advances the head.
    pub(crate) fn release(&mut self) {
        // Notes first, so that room for a packet implies room for its note.
        if let Some(notes) = &mut self.notes {
            notes.release();
            debug_assert_eq!(notes.taken(), self.packets.taken(), "a packet without its note");
        }
        self.packets.release();
        debug_assert_eq!(self.packets.in_hand(), 0, "the head passes all that was taken");
    }
}

/// Capacity of a ring for one packet more than `netdev_max_backlog`.
#[must_use]
pub fn capacity_for(netdev_max_backlog: u32) -> u32 {
    netdev_max_backlog.saturating_add(1).min(BACKLOG_CAPACITY_MAX).next_power_of_two()
}

/// Producing ends of one rx queue's backlog rings, owned by an [`Intake`](crate::Intake).
#[derive(Debug)]
pub struct Backlogs {
    rx_queue: RxQueue,
    /// By [`CpuId::index`].
    targets: Vec<Option<BacklogTarget>>,
    /// Targets with packets not yet published, in the order of the first.
    touched: Vec<CpuId>,
    netdev_max_backlog: u32,
    flow_limit: Option<FlowLimit>,
    /// Number of turns for which heads are still refreshed.
    watch_turns: u32,
    /// True if packets are stamped with the time at which they were queued.
    is_stamped: bool,
}

#[derive(Debug)]
struct BacklogTarget {
    packets: Producer<Packet>,
    notes: Option<Producer<Note>>,
    stamps: StampWriter,
    /// Head at the start of the turn, read before the clock.
    head_before: Position,
    /// Head read later during the turn.
    head_during: Option<Position>,
    touched: bool,
}

/// Progress of a CPU towards the last packet of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Depth {
    /// Processed before this turn began, by this head counter.
    Drained(Position),
    /// Possibly in the CPU's current batch; number of unprocessed packets up to this one.
    Near(u32),
    /// More than a batch away; number of unprocessed packets up to this one.
    Far(u32),
}

impl Backlogs {
    /// Creates the backlogs of `rx_queue`, without targets; `cpus` is the highest CPU id plus one.
    #[must_use]
    pub fn new(rx_queue: RxQueue, cpus: usize, netdev_max_backlog: u32) -> Self {
        Self {
            rx_queue,
            targets: (0..cpus).map(|_| None).collect(),
            touched: Vec::with_capacity(cpus),
            netdev_max_backlog,
            flow_limit: None,
            watch_turns: 0,
            is_stamped: false,
        }
    }

    /// Adds the ring to `cpu` with a capacity of `capacity` packets (a power of two) and counters
    /// from `start`; returns its consuming end. With `noted`, every packet has its [`Note`].
    ///
    /// # Panics
    /// If `cpu` is not below the `cpus` of [`new`](Self::new), or `capacity` is not a power of two.
    #[must_use]
    pub fn connect(
        &mut self,
        cpu: CpuId,
        capacity: u32,
        start: Position,
        noted: bool,
    ) -> BacklogRing {
        let (packets, consumer) = ring(capacity, start);
        let (stamps, consumer_stamps) = stamps();
        let (notes, consumer_notes) = noted.then(|| ring(capacity, start)).unzip();
        debug_assert!(
            self.targets[cpu.index()].is_none(),
            "a second ring to a CPU would reorder its packets"
        );
        self.targets[cpu.index()] = Some(BacklogTarget {
            packets,
            notes,
            stamps,
            head_before: start,
            head_during: None,
            touched: false,
        });
        BacklogRing {
            rx_queue: self.rx_queue,
            packets: consumer,
            notes: consumer_notes,
            stamps: consumer_stamps,
        }
    }

    /// CPUs that packets can go to.
    pub fn cpus(&self) -> impl Iterator<Item = CpuId> {
        self.tails().map(|(cpu, _)| cpu)
    }

    /// Sets `netdev_max_backlog`. As in the kernel, a backlog holds one packet more, at most
    /// [`BACKLOG_CAPACITY_MAX`]. Rings that are too small grow.
    pub fn set_netdev_max_backlog(&mut self, packets: u32) {
        self.netdev_max_backlog = packets;
        for target in self.targets.iter_mut().flatten() {
            // Notes first, so that every visible packet has a visible note.
            if let Some(notes) = &mut target.notes {
                notes.grow(capacity_for(packets));
            }
            target.packets.grow(capacity_for(packets));
        }
    }

    /// Turns stamps on or off.
    pub fn set_stamped(&mut self, is_stamped: bool) {
        self.is_stamped = is_stamped;
    }

    /// Turns the flow limit on or off. Returns the one before.
    pub fn set_flow_limit(&mut self, flow_limit: Option<FlowLimit>) -> Option<FlowLimit> {
        std::mem::replace(&mut self.flow_limit, flow_limit)
    }

    /// True if the flow limit is on.
    #[must_use]
    pub fn has_flow_limit(&self) -> bool {
        self.flow_limit.is_some()
    }

    /// Refreshes the cached heads of all CPUs, while requested. Called before the clock is read for
    /// the turn, so the heads are older than `now`.
    pub fn observe(&mut self) {
        let watched = self.watch_turns > 0;
        self.watch_turns = self.watch_turns.saturating_sub(1);
        for target in self.targets.iter_mut().flatten() {
            if watched && target.packets.queued() > 0 {
                target.packets.observe_head();
            }
            target.head_before = target.packets.head_seen();
            debug_assert!(
                target.packets.queued() <= target.packets.capacity(),
                "a head behind its ring"
            );
            target.head_during = None;
        }
    }

    /// Requests refreshed heads for the next 64 turns, when flows are about to move. A refresh
    /// takes a cache line from a CPU that is about to write it, so it is not done without need.
    pub fn watch(&mut self) {
        self.watch_turns = WATCH_TURNS;
    }

    /// Progress of `cpu` towards the packet at `tail`, with batches of at most `batch_max` packets.
    pub fn depth(&mut self, cpu: CpuId, tail: Position, batch_max: u32) -> Depth {
        self.watch();
        // Without a ring nothing proves that the packet was processed, so its flow must wait.
        let Some(target) = self.target(cpu) else { return Depth::Near(0) };
        let now = target.packets.tail();
        if tail.pending(target.head_before, now) == 0 {
            return Depth::Drained(target.head_before);
        }
        let head = *target.head_during.get_or_insert_with(|| target.packets.observe_head());
        match tail.pending(head, now) {
            ahead if ahead > batch_max => Depth::Far(ahead),
            ahead => Depth::Near(ahead),
        }
    }

    /// Number of packets unprocessed by `cpu` at the start of the turn, up to the one at `tail`.
    #[must_use]
    pub fn pending(&self, cpu: CpuId, tail: Position) -> u32 {
        let target = self.targets.get(cpu.index()).and_then(Option::as_ref);
        target.map_or(0, |target| tail.pending(target.head_before, target.packets.tail()))
    }

    /// Number of packets unprocessed by `cpu` now, up to the one at `tail`.
    pub fn pending_now(&mut self, cpu: CpuId, tail: Position) -> u32 {
        let pending = |target: &mut BacklogTarget| {
            tail.pending(target.packets.observe_head(), target.packets.tail())
        };
        self.target(cpu).map_or(0, pending)
    }

    /// Current head counters of all CPUs.
    pub fn heads(&mut self) -> impl Iterator<Item = (CpuId, Position)> {
        let head = |target: &mut BacklogTarget| target.packets.observe_head();
        (0..)
            .zip(&mut self.targets)
            .filter_map(move |(cpu, target)| Some((CpuId(cpu), head(target.as_mut()?))))
    }

    /// Current head and tail counters of all CPUs.
    pub fn ends(&mut self) -> impl Iterator<Item = (CpuId, [Position; 2])> {
        let ends =
            |target: &mut BacklogTarget| [target.packets.observe_head(), target.packets.tail()];
        (0..)
            .zip(&mut self.targets)
            .filter_map(move |(cpu, target)| Some((CpuId(cpu), ends(target.as_mut()?))))
    }

    /// Tail counters of all CPUs.
    pub fn tails(&self) -> impl Iterator<Item = (CpuId, Position)> {
        let tail = |target: &BacklogTarget| target.packets.tail();
        (0..)
            .zip(&self.targets)
            .filter_map(move |(cpu, target)| Some((CpuId(cpu), tail(target.as_ref()?))))
    }

    /// True if the backlog of `cpu` has room for a packet.
    pub fn has_room(&mut self, cpu: CpuId) -> bool {
        self.has_room_for(cpu, 1)
    }

    /// Room of an empty backlog: as in the kernel, `netdev_max_backlog` plus one.
    #[must_use]
    pub fn limit(&self) -> u32 {
        let capacities = self.targets.iter().flatten().map(|target| target.packets.capacity());
        capacities.fold(self.netdev_max_backlog.saturating_add(1), u32::min)
    }

    /// True if every backlog has room for `count` packets.
    pub fn all_have_room_for(&mut self, count: u32) -> bool {
        let cpus = 0..self.targets.len();
        cpus.filter_map(|cpu| u16::try_from(cpu).ok()).all(|cpu| {
            self.targets[usize::from(cpu)].is_none() || self.has_room_for(CpuId(cpu), count)
        })
    }

    /// Queues a packet to `cpu`, not yet visible there. Calls `note` for the packet's note, if
    /// enabled.
    ///
    /// # Errors
    /// Returns the packet with the reason if the backlog or the flow limit refuses it; the tail
    /// counter is unchanged then.
    pub fn enqueue(
        &mut self,
        cpu: CpuId,
        packet: Packet,
        note: impl FnOnce(Position) -> Note,
    ) -> Result<Position, (Packet, DropReason)> {
        // A full backlog drops, as in the kernel's `enqueue_to_backlog`; so does a CPU without a
        // ring.
        if !self.has_room(cpu) {
            return Err((packet, DropReason::BacklogFull));
        }
        let half = self.netdev_max_backlog / 2;
        let Some(target) = self.targets.get_mut(cpu.index()).and_then(Option::as_mut) else {
            return Err((packet, DropReason::BacklogFull));
        };
        if let Some(flow_limit) = &mut self.flow_limit
            && target.packets.queued() >= half
            && target.packets.refreshed_queued() >= half
            && flow_limit.exceeds(packet.hash)
        {
            return Err((packet, DropReason::FlowLimit));
        }
        let position =
            target.packets.push(packet).map_err(|packet| (packet, DropReason::BacklogFull))?;
        debug_assert_eq!(
            position,
            target.packets.tail(),
            "the position is the tail behind a packet"
        );
        if let Some(notes) = &mut target.notes {
            let pushed = notes.push(note(position));
            debug_assert!(pushed.is_ok(), "notes are released before their packets");
            debug_assert_eq!(notes.tail(), position, "a note has the position of its packet");
        }
        if !target.touched {
            target.touched = true;
            self.touched.push(cpu);
        }
        Ok(position)
    }

    /// Publishes the new packets, queued at `now_ns`. Reports each CPU once, for one wake-up per
    /// burst.
    pub fn publish(&mut self, now_ns: u64) -> impl Iterator<Item = CpuId> {
        for cpu in &self.touched {
            if let Some(target) = self.targets[cpu.index()].as_mut() {
                debug_assert!(target.touched, "a CPU is reported once, for a new packet");
                target.touched = false;
                // Notes and stamps first, so that every visible packet has a visible note.
                target.notes.as_mut().map(Producer::publish);
                if self.is_stamped {
                    let tail = target.packets.tail();
                    target.stamps.stamp(tail, || target.packets.observe_head(), now_ns);
                }
                target.packets.publish();
            }
        }
        self.touched.drain(..)
    }

    /// Number of packets queued or being delivered.
    pub fn queued(&mut self) -> u32 {
        self.targets.iter_mut().flatten().map(|target| target.packets.refreshed_queued()).sum()
    }

    /// Number of those packets per CPU, by the cached heads: an upper bound.
    pub fn queued_by_cpu(&self) -> impl Iterator<Item = (CpuId, u32)> {
        let queued = |target: &BacklogTarget| target.packets.queued();
        let targets = (0..).map(CpuId).zip(&self.targets);
        targets.filter_map(move |(cpu, target)| Some((cpu, queued(target.as_ref()?))))
    }

    fn has_room_for(&mut self, cpu: CpuId, count: u32) -> bool {
        let limit = self.netdev_max_backlog.saturating_add(1);
        let Some(target) = self.target(cpu) else { return false };
        let limit = limit.min(target.packets.capacity());
        let fits = |queued: u32| queued.saturating_add(count) <= limit;
        fits(target.packets.queued()) || fits(target.packets.refreshed_queued())
    }

    fn target(&mut self, cpu: CpuId) -> Option<&mut BacklogTarget> {
        self.targets.get_mut(cpu.index())?.as_mut()
    }
}
