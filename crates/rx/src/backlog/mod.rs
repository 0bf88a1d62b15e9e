//! Backlog: the rings between the CPU that polls a queue and the CPUs that its packets go to.
//!
//! One ring for each (rx queue, CPU), with the kernel's `netdev_max_backlog` and flow limit. The
//! ring's counters are what the drain rule of steering reads, so this is also where a CPU's
//! progress is observed.

mod flow_limit;

pub use flow_limit::{FLOW_LIMIT_HISTORY, FlowLimit};
use forebay_buf::Position;
use forebay_buf::ring::{Consumer, Producer, ring};

use crate::cpu::{CpuId, RxQueue};
use crate::drop_reason::DropReason;
use crate::hash::FlowHash;
use crate::packet::{Arrival, Packet};
use crate::steer_reason::SteerReason;

/// The kernel's default of `netdev_max_backlog`.
pub const NETDEV_MAX_BACKLOG: u32 = 1000;

/// The most packets that a backlog ring can be made for.
pub const BACKLOG_CAPACITY_MAX: u32 = 1 << 20;

/// Turns for which the CPUs' progress is looked at after somebody asked.
const WATCH_TURNS: u32 = 64;

/// Decision about a packet, for traces: it travels beside the packet, in a ring of its
/// own, and only when somebody asked for it.
#[derive(Clone, Copy, Debug)]
pub struct Note {
    /// The packet's place in the order of arrival.
    pub arrival: Arrival,
    /// The intake's time when it put the packet on the backlog.
    pub enqueued_ns: u64,
    /// Configuration that the decision was made under.
    pub epoch: u32,
    /// Reason for this CPU.
    pub steer_reason: SteerReason,
    /// The backlog's tail counter after this packet.
    pub position: Position,
    /// If this packet moved its flow to another CPU: the head counter of the old backlog that
    /// allowed it.
    pub head_old: Option<Position>,
    /// The flow of the last packet in its slot before this one, which `head_old` had to pass:
    /// flows share slots. [`FlowHash::NONE`] if there was none.
    pub behind: FlowHash,
}

/// The consuming end of one backlog ring: what a [`Delivery`](crate::Delivery) owns.
#[derive(Debug)]
pub struct BacklogRing {
    /// Source of its packets.
    pub(crate) rx_queue: RxQueue,
    pub(crate) packets: Consumer<Packet>,
    pub(crate) notes: Option<Consumer<Note>>,
}

impl BacklogRing {
    /// Says that what was taken has been processed: the head moves on.
    pub(crate) fn release(&mut self) {
        // Notes first: who sees room for a packet finds room for its note.
        if let Some(notes) = &mut self.notes {
            notes.release();
        }
        self.packets.release();
    }
}

/// Slots of a ring that takes one packet more than `netdev_max_backlog`.
#[must_use]
pub fn capacity_for(netdev_max_backlog: u32) -> u32 {
    netdev_max_backlog.saturating_add(1).min(BACKLOG_CAPACITY_MAX).next_power_of_two()
}

/// The producing ends of one rx queue's backlog rings: what an [`Intake`](crate::Intake) owns.
#[derive(Debug)]
pub struct Backlogs {
    rx_queue: RxQueue,
    /// By [`CpuId::index`].
    targets: Vec<Option<BacklogTarget>>,
    /// Targets with packets that are not yet published, in the order they were first pushed to.
    touched: Vec<CpuId>,
    netdev_max_backlog: u32,
    flow_limit: Option<FlowLimit>,
    /// For how many turns the CPUs' progress is still looked at.
    watch_turns: u32,
}

#[derive(Debug)]
struct BacklogTarget {
    packets: Producer<Packet>,
    notes: Option<Producer<Note>>,
    /// Head of the CPU when the turn began, before its time was read.
    head_before: Position,
    /// Head at a later look during the turn.
    head_during: Option<Position>,
    touched: bool,
}

/// Distance of a CPU from having processed a flow's last packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Depth {
    /// Processed before this turn began: the head counter that shows it.
    Drained(Position),
    /// Perhaps in hand right now: so many packets up to this one.
    Near(u32),
    /// More in front of it than the CPU takes in hand at once: so many.
    Far(u32),
}

impl Backlogs {
    /// The backlogs of `rx_queue`: no targets yet; `cpus` is one more than the highest CPU there
    /// will be.
    #[must_use]
    pub fn new(rx_queue: RxQueue, cpus: usize, netdev_max_backlog: u32) -> Self {
        Self {
            rx_queue,
            targets: (0..cpus).map(|_| None).collect(),
            touched: Vec::with_capacity(cpus),
            netdev_max_backlog,
            flow_limit: None,
            watch_turns: 0,
        }
    }

    /// Adds the ring to `cpu`, of `capacity` packets (a power of two), its counters beginning at
    /// `start`, and returns its other end. With `noted`, every packet has its [`Note`].
    ///
    /// # Panics
    /// When `cpu` is beyond what [`new`](Self::new) was told, or `capacity` no power of two.
    #[must_use]
    pub fn connect(
        &mut self,
        cpu: CpuId,
        capacity: u32,
        start: Position,
        noted: bool,
    ) -> BacklogRing {
        let (packets, lane) = ring(capacity, start);
        let (notes, lane_notes) = noted.then(|| ring(capacity, start)).unzip();
        self.targets[cpu.index()] = Some(BacklogTarget {
            packets,
            notes,
            head_before: start,
            head_during: None,
            touched: false,
        });
        BacklogRing { rx_queue: self.rx_queue, packets: lane, notes: lane_notes }
    }

    /// The CPUs that packets can go to.
    pub fn cpus(&self) -> impl Iterator<Item = CpuId> {
        self.tails().map(|(cpu, _)| cpu)
    }

    /// The most packets that a ring takes now: the kernel's queue holds one more than its limit,
    /// ours [`BACKLOG_CAPACITY_MAX`] at most. Rings that are too small grow.
    pub fn set_netdev_max_backlog(&mut self, packets: u32) {
        self.netdev_max_backlog = packets;
        for target in self.targets.iter_mut().flatten() {
            // Notes first: who sees a packet finds its note.
            if let Some(notes) = &mut target.notes {
                notes.grow(capacity_for(packets));
            }
            target.packets.grow(capacity_for(packets));
        }
    }

    /// Turns the flow limit on or off.
    pub fn set_flow_limit(&mut self, flow_limit: Option<FlowLimit>) {
        self.flow_limit = flow_limit;
    }

    /// Looks how far the CPUs have come, while anybody asks. The engine calls this before it reads
    /// the clock for the turn, so whatever is seen here happened before `now`.
    pub fn observe(&mut self) {
        let watched = self.watch_turns > 0;
        self.watch_turns = self.watch_turns.saturating_sub(1);
        for target in self.targets.iter_mut().flatten() {
            if watched && target.packets.queued() > 0 {
                target.packets.observe_head();
            }
            target.head_before = target.packets.head_seen();
            target.head_during = None;
        }
    }

    /// Has the CPUs' progress looked at for some turns: flows are about to move. A look takes a
    /// cache line from a CPU that is about to write it, so none is taken without need.
    pub fn watch(&mut self) {
        self.watch_turns = WATCH_TURNS;
    }

    /// Distance of `cpu` from having processed the packet at `tail`, if it takes at most
    /// `batch_max` packets in hand at once.
    pub fn depth(&mut self, cpu: CpuId, tail: Position, batch_max: u32) -> Depth {
        self.watch();
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

    /// Packets that `cpu` had to process when the turn began, up to the one at `tail`.
    #[must_use]
    pub fn pending(&self, cpu: CpuId, tail: Position) -> u32 {
        let target = self.targets.get(cpu.index()).and_then(Option::as_ref);
        target.map_or(0, |target| tail.pending(target.head_before, target.packets.tail()))
    }

    /// Packets that `cpu` has to process now, up to the one at `tail`.
    pub fn pending_now(&mut self, cpu: CpuId, tail: Position) -> u32 {
        let pending = |target: &mut BacklogTarget| {
            tail.pending(target.packets.observe_head(), target.packets.tail())
        };
        self.target(cpu).map_or(0, pending)
    }

    /// The tail counters of all CPUs.
    pub fn tails(&self) -> impl Iterator<Item = (CpuId, Position)> {
        let tail = |target: &BacklogTarget| target.packets.tail();
        (0..)
            .zip(&self.targets)
            .filter_map(move |(cpu, target)| Some((CpuId(cpu), tail(target.as_ref()?))))
    }

    /// True if `cpu` takes another packet.
    pub fn has_room(&mut self, cpu: CpuId) -> bool {
        self.has_room_for(cpu, 1)
    }

    /// Packets that an empty backlog takes: like the kernel, one more than `netdev_max_backlog`.
    #[must_use]
    pub fn limit(&self) -> u32 {
        let capacities = self.targets.iter().flatten().map(|target| target.packets.capacity());
        capacities.fold(self.netdev_max_backlog.saturating_add(1), u32::min)
    }

    /// True if every CPU takes `count` more packets.
    pub fn all_have_room_for(&mut self, count: u32) -> bool {
        let cpus = 0..self.targets.len();
        cpus.filter_map(|cpu| u16::try_from(cpu).ok()).all(|cpu| {
            self.targets[usize::from(cpu)].is_none() || self.has_room_for(CpuId(cpu), count)
        })
    }

    /// Puts a packet on the backlog of `cpu`, not yet visible there. If notes are taken, `note` is
    /// asked for the packet's.
    ///
    /// # Errors
    /// Gives the packet back with the reason if the backlog or the flow limit refuses it; the
    /// ring's tail counter has not moved then.
    pub fn enqueue(
        &mut self,
        cpu: CpuId,
        packet: Packet,
        note: impl FnOnce(Position) -> Note,
    ) -> Result<Position, (Packet, DropReason)> {
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
        if let Some(notes) = &mut target.notes {
            let pushed = notes.push(note(position));
            debug_assert!(pushed.is_ok(), "notes are released before their packets");
        }
        if !target.touched {
            target.touched = true;
            self.touched.push(cpu);
        }
        Ok(position)
    }

    /// Shows the CPUs their new packets and names each of them, for one wake-up per burst.
    pub fn publish(&mut self) -> impl Iterator<Item = CpuId> {
        for cpu in &self.touched {
            if let Some(target) = self.targets[cpu.index()].as_mut() {
                target.touched = false;
                // Notes first: who sees a packet finds its note.
                target.notes.as_mut().map(Producer::publish);
                target.packets.publish();
            }
        }
        self.touched.drain(..)
    }

    /// Packets on the rings or in the CPUs' hands.
    pub fn queued(&mut self) -> u32 {
        self.targets.iter_mut().flatten().map(|target| target.packets.refreshed_queued()).sum()
    }

    /// The same by the CPU that they are for, as this end last saw it: at least as many as there are.
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
