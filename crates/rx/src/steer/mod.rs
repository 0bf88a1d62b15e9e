//! Steer: the CPU of each packet, and the reason, such that no flow is ever reordered.
//!
//! A flow has a *desired* CPU: the one that its application runs on, else the one that
//! its hash range is assigned to by load, else the RPS map's. It has a *current* CPU, recorded in
//! its slot of the flow table with the position of the last packet in that CPU's backlog. If both
//! agree, the packet follows. If not, one rule decides (RFS-6), whatever changed the desired CPU: the
//! application, a mask, a CPU that stops, the load, or a collision:
//!
//! 1. **Drained**: the current CPU has processed the slot's last packet. The slot moves.
//! 2. **Near**: the last packet is within the next batch. The slot's packets are held on the
//!    polling CPU until it is processed, then move: a *held move*. Not at once if the last packet
//!    was another flow's, whose desired CPU may be the current one.
//! 3. **Far**: more than a batch is in front of it. The packet stays with its predecessors, but not
//!    for long: after `move_after` a held move begins. From then on the current CPU gets no more of
//!    the slot's packets, so it drains, which bounds the move. The kernel's rule lacks this part: a
//!    flow never leaves a CPU that it saturates.
//!
//! A packet may follow its own flow to a CPU no longer in the map, but not another flow of its
//! slot: its own predecessors may be processed, and nothing would justify that CPU.
//!
//! The flow table can be replaced. A *fence* then stands for the positions that the new slots do
//! not know.

mod ids; //         ids of slots, holds and fences
mod config; //      limits and conditions of a queue
mod sock_flow; //   CPUs of applications (RFS)
mod rps; //         CPUs of the map (RPS)
mod meter; //       work of those CPUs
mod spread; //      number of CPUs that the work needs
mod balance; //     CPUs by load
mod desired_cpu; // a packet's CPU by all of these
mod flow_table; //  CPUs that flows are on
mod tables; //      flow tables that were replaced
mod hold; //        packets that wait for a move
mod fence; //       packets that wait for all before them
mod stay; //        packets that stay on another CPU than the desired one
mod verdict; //     decision on a packet
mod journal; //     counters and events
mod state; //       state shown by `explain`

use std::sync::Arc;

pub use balance::{
    BALANCE_LOAD_MIN_NS, BALANCE_ROUND_MAX, BalanceBoard, BalanceConfig, BalancePolicy,
    BalancePreview, BalanceRound, CpuLoad, QueueTraffic, REST_NS,
};
pub use config::{MoveAfter, SteerConfig};
use desired_cpu::DesiredCpus;
use fence::Fences;
use flow_table::CurrentCpu;
pub use flow_table::{RPS_FLOW_CNT, RPS_FLOW_CNT_MAX};
use forebay_buf::Position;
pub use hold::{HOLD_MAX, HOLD_SHARE_DIVISOR, HOLD_SHARE_LEAST};
use hold::{Holds, Predecessors};
pub use ids::{HoldId, SlotId};
use journal::FlowWatch;
pub(crate) use journal::Journal;
pub use journal::{Drops, MOVES_MAX, Move, SHARERS_MAX, WATCHES_MAX};
pub use rps::RpsMap;
pub use sock_flow::{RPS_SOCK_FLOW_ENTRIES, RPS_SOCK_FLOW_ENTRIES_MAX, SockFlowTable};
pub use spread::{
    FULL_BURSTS_TO_SPREAD, GATHER_AFTER_NS, SPREAD_WINDOW_NS, SpreadConfig, SpreadPolicy,
};
pub use state::{FlowPlace, FlowState, HeldPackets};
use stay::Stay;
use tables::Tables;
pub use tables::{DEEPER_SLOTS_MAX, FlowTables, OLDER_SLOTS_MAX};
pub use verdict::{Release, SteerTally, Target, Verdict};

use crate::arrive::PollStatus;
use crate::backlog::{Backlogs, Depth};
use crate::counters::Histogram;
use crate::cpu::{CpuId, RxQueue};
use crate::hash::FlowHash;
use crate::packet::Packet;
use crate::steer_reason::SteerReason;

/// Steering of one rx queue. One writer: the polling CPU.
#[derive(Debug)]
pub struct Steering {
    desired_cpus: DesiredCpus,
    tables: Tables,
    holds: Holds,
    fences: Fences,
    move_after: MoveAfter,
    batch_max: u32,
    tally: SteerTally,
    held_ns: Arc<Histogram>,
    pub(crate) journal: Journal,
    watches: Vec<FlowWatch>,
}

impl Steering {
    /// Creates a steering with an empty RPS map and empty slots.
    #[must_use]
    pub fn new(config: &SteerConfig) -> Self {
        Self {
            desired_cpus: DesiredCpus::new(config.polling_cpu, config.spread),
            tables: Tables::new(config.rps_flow_cnt),
            holds: Holds::new(config.hold_max.max(1)),
            fences: Fences::new(),
            move_after: config.move_after,
            batch_max: config.batch_max,
            tally: SteerTally::default(),
            held_ns: Arc::default(),
            journal: Journal::default(),
            watches: Vec::new(),
        }
    }

    /// Prefetches the cache lines that the decision about a flow will read.
    #[inline]
    pub fn prefetch(&self, hash: FlowHash) {
        self.tables.now.slots.prefetch(self.slot_of(hash));
        self.desired_cpus.prefetch(hash);
    }

    /// Decides the CPU of the next packet of a flow whose slot has no hold. If the verdict is
    /// [`Verdict::Forward`] and the backlog takes the packet, [`record`](Self::record) is called
    /// next.
    #[inline]
    pub fn decide(&mut self, hash: FlowHash, now_ns: u64, backlogs: &mut Backlogs) -> Verdict {
        let slot = self.slot_of(hash);
        let at = self.tables.see(slot, &self.fences, backlogs);
        debug_assert!(
            at.hold().is_none(),
            "the slot's packets are held: this one goes behind them"
        );
        let (cpu, desired_by) = self.desired_cpus.of(hash, &self.tables.now.slots, slot);
        let agreed = match at.current_cpu() {
            CurrentCpu::On(at) => at == cpu,
            CurrentCpu::None => true,
            CurrentCpu::BehindFence(fence) => !self.fences.stands(fence),
        };
        if agreed {
            let slot = Some(slot);
            return Verdict::Forward(Target {
                cpu,
                steer_reason: desired_by,
                desired_by,
                slot,
                head_old: None,
            });
        }
        self.decide_move(hash, (cpu, desired_by), now_ns, backlogs)
    }

    /// Records that a packet of `flow` was queued to the target's backlog, at `tail`.
    #[inline]
    pub fn record(&mut self, flow: FlowHash, target: Target, tail: Position, now_ns: u64) {
        let Some(slot) = target.slot else {
            debug_assert!(self.fences.is_any(), "a packet of a line belongs to the front fence");
            if let Some(fence) = self.fences.front_mut() {
                fence.step_behind(target.cpu, tail);
            }
            return;
        };
        let at = self.tables.get(slot);
        debug_assert_eq!(
            target.head_old.is_some(),
            at.cpu().is_some_and(|from| from != target.cpu),
            "a slot moves by a head that proves its old CPU drained, and by nothing else"
        );
        if let Some(from) = at.cpu()
            && from != target.cpu
        {
            self.moved(flow, (slot, from), target, now_ns);
        }
        self.tables.now.slots.get_mut(slot).record(flow, target.cpu, tail);
        if target.steer_reason == SteerReason::Stay {
            self.tables.now.stays[slot.index()].tail = tail;
        }
        if let Some(hold) = at.hold() {
            self.holds.set_waits_for(hold, target.cpu, tail);
        }
        if !self.watches.is_empty() {
            self.see(flow, slot);
        }
    }

    /// Flow of the last packet of a slot.
    #[must_use]
    pub fn last_flow(&self, slot: SlotId) -> FlowHash {
        self.tables.get(slot).last_flow
    }

    /// Hold of a flow's slot, if any.
    #[inline]
    #[must_use]
    pub fn hold_of(&self, hash: FlowHash) -> Option<HoldId> {
        self.tables.get(self.slot_of(hash)).hold()
    }

    fn slot_of(&self, hash: FlowHash) -> SlotId {
        self.tables.now.slots.slot_of(hash)
    }

    /// Appends a packet to its hold.
    ///
    /// # Errors
    /// Returns the packet if the arena or the hold is full.
    pub fn hold(&mut self, hold: HoldId, packet: Packet) -> Result<(), Packet> {
        self.holds.push(hold, packet)
    }

    /// Decides whether the packets of a hold may move.
    pub fn decide_release(&mut self, id: HoldId, backlogs: &mut Backlogs) -> Release {
        let (Some(hold), Some(front)) = (self.holds.get(id), self.holds.front(id)) else {
            return Release::Wait;
        };
        let (cpu, desired_by) = self.desired_cpus.of(front.hash, &self.tables.now.slots, hold.slot);
        debug_assert_eq!(self.tables.get(hold.slot).hold(), Some(id), "the slot has another hold");
        debug_assert!(
            match hold.waits_for {
                Predecessors::Backlog(from, tail) => {
                    let at = self.tables.get(hold.slot);
                    (at.cpu(), at.tail) == (Some(from), tail)
                }
                Predecessors::Fence(_) => self.tables.get(hold.slot).cpu().is_none(),
            },
            "a hold waits for the last packet of its slot"
        );
        let forward = |steer_reason, head_old| {
            Release::Forward(Target {
                cpu,
                steer_reason,
                desired_by,
                slot: Some(hold.slot),
                head_old,
            })
        };
        match hold.waits_for {
            // The desired CPU is the old one again, or a part of the hold has already moved there:
            // the rest follows.
            Predecessors::Backlog(from, _) if from == cpu => forward(desired_by, None),
            Predecessors::Backlog(from, tail) => match backlogs.depth(from, tail, self.batch_max) {
                Depth::Drained(head) => forward(SteerReason::Held, Some(head)),
                Depth::Near(_) | Depth::Far(_) => Release::Wait,
            },
            // The CPU of the predecessors is unknown until the fence is passed.
            Predecessors::Fence(fence) if self.fences.stands(fence) => Release::Wait,
            Predecessors::Fence(_) => forward(SteerReason::Held, None),
        }
    }

    /// Decides the target of a hold's packets when it cannot take another: the CPU of their
    /// predecessors, if other slots fill the arena. The move is given up until there is room.
    pub fn decide_give_up(&self, id: HoldId) -> Release {
        // A slot that has its full share fills the arena itself, and keeps waiting.
        let has_share = self.holds.len_of(id) >= self.holds.share();
        self.stay_of(id).filter(|_| !has_share).map_or(Release::Wait, Release::Forward)
    }

    /// Longest of the first `holds_max` holds whose oldest packet may follow its predecessors, and
    /// the target of that packet.
    pub fn longest_to_yield(
        &self,
        holds_max: usize,
        backlogs: &mut Backlogs,
    ) -> Option<(HoldId, Target)> {
        let holds = self.holds.active().iter().take(holds_max);
        let stays = holds.filter_map(|&id| Some((id, self.stay_of(id)?)));
        stays
            .filter(|(_, target)| backlogs.has_room(target.cpu))
            .max_by_key(|(id, _)| self.holds.len_of(*id))
    }

    /// Target of a hold's oldest packet if it does not move: the CPU of its predecessors. `None` if
    /// that is unknown, as behind a fence, or outside the map and without packets of this flow.
    fn stay_of(&self, id: HoldId) -> Option<Target> {
        let (hold, front) = (self.holds.get(id)?, self.holds.front(id)?);
        let Predecessors::Backlog(cpu, _) = hold.waits_for else { return None };
        if !self.may_stay(front.hash, hold.slot, cpu) {
            return None;
        }
        let (_, desired_by) = self.desired_cpus.of(front.hash, &self.tables.now.slots, hold.slot);
        let (steer_reason, slot, head_old) = (SteerReason::Stay, Some(hold.slot), None);
        Some(Target { cpu, steer_reason, desired_by, slot, head_old })
    }

    /// Takes the oldest packet of a hold whose move is given up, if it may stay on this CPU.
    pub fn pop_held_to_stay(&mut self, id: HoldId, cpu: CpuId) -> Option<Packet> {
        let slot = self.holds.get(id)?.slot;
        if !self.may_stay(self.holds.front(id)?.hash, slot, cpu) {
            return None;
        }
        let packet = self.holds.pop(id)?;
        self.count_unholdable(slot);
        Some(packet)
    }

    /// Counts a packet that follows those of a hold whose move was given up. Returns false if it
    /// may not.
    #[must_use]
    pub fn stay_unholdable(&mut self, flow: FlowHash, target: Target) -> bool {
        let Some(slot) = target.slot else { return false };
        let may_stay = self.may_stay(flow, slot, target.cpu);
        if may_stay {
            self.count_unholdable(slot);
        }
        may_stay
    }

    /// Takes the oldest packet of a hold.
    pub fn pop_held(&mut self, id: HoldId) -> Option<Packet> {
        self.holds.pop(id)
    }

    /// Ends a hold if it is empty. Returns true if so.
    pub fn end_hold(&mut self, id: HoldId, now_ns: u64) -> bool {
        let Some(&hold) = self.holds.get(id) else { return true };
        if self.holds.front(id).is_some() {
            return false;
        }
        self.record_held(hold.since_ns, now_ns);
        debug_assert_eq!(self.tables.get(hold.slot).hold(), Some(id), "the slot has another hold");
        self.tables.now.slots.get_mut(hold.slot).set_hold(None);
        self.holds.end(id);
        true
    }

    /// Decides whether the line before the front fence may advance, and lifts passed fences.
    pub fn decide_line(&mut self, now_ns: u64, backlogs: &mut Backlogs) -> Release {
        while let Some(fence) = self.fences.front_mut() {
            let is_passed = fence.is_passed(backlogs);
            if let Some(front) = self.holds.line_front(fence.line) {
                if is_passed {
                    let slots = &self.tables.now.slots;
                    let slot = slots.slot_of(front.hash);
                    fence.line_to = Some(self.desired_cpus.of(front.hash, slots, slot).0);
                }
                let hash = front.hash;
                let goes_on = !self.holds.is_line_at_seam(fence.line);
                return match fence.line_to {
                    Some(cpu) if is_passed || goes_on && self.desired_cpus.may_go_to(hash, cpu) => {
                        Release::Forward(Target::of_line(cpu))
                    }
                    // The backlogs must drain first, or a seam is next, or the line's CPU is no
                    // longer allowed.
                    _ => Release::Wait,
                };
            }
            if !is_passed {
                return Release::Wait;
            }
            let held_since_ns = fence.held_since_ns;
            self.fences.lift();
            self.tables.passed(&self.fences);
            held_since_ns.into_iter().for_each(|since_ns| self.record_held(since_ns, now_ns));
        }
        Release::Wait
    }

    /// Takes the oldest packet of the line before the front fence.
    pub fn leave_line(&mut self) -> Option<Packet> {
        self.holds.line_pop(&mut self.fences.front_mut()?.line)
    }

    /// Active hold at this index; the order is arbitrary.
    #[must_use]
    pub fn active_hold(&self, index: usize) -> Option<HoldId> {
        self.holds.active().get(index).copied()
    }

    /// Number of active holds.
    #[must_use]
    pub fn active_holds(&self) -> usize {
        self.holds.active().len()
    }

    /// True if packets are held or lined up.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.fences.is_any() || self.active_holds() > 0
    }

    /// True if the next packet of a flow would be held behind others, or wait for a fence.
    #[must_use]
    pub fn is_flow_waiting(&self, hash: FlowHash) -> bool {
        self.fences.is_any() || self.hold_of(hash).is_some()
    }

    /// Number of held packets.
    #[must_use]
    pub fn held(&self) -> usize {
        self.holds.len()
    }

    /// Maximum number of held packets of one slot.
    #[must_use]
    pub fn hold_share(&self) -> usize {
        self.holds.most_of_one()
    }

    /// Number of further packets that can be held for any slot.
    #[must_use]
    pub fn hold_room(&self) -> usize {
        self.holds.room_for_any()
    }

    /// Counters since the start.
    #[must_use]
    pub fn tally(&self) -> SteerTally {
        self.tally
    }

    /// Durations of held moves, in ns.
    #[must_use]
    pub fn held_ns(&self) -> &Arc<Histogram> {
        &self.held_ns
    }

    fn decide_move(
        &mut self,
        hash: FlowHash,
        (desired_cpu, desired_by): (CpuId, SteerReason),
        now_ns: u64,
        backlogs: &mut Backlogs,
    ) -> Verdict {
        let slot = self.slot_of(hash);
        let at = self.tables.get(slot);
        debug_assert_ne!(
            at.cpu(),
            Some(desired_cpu),
            "a slot on its desired CPU has no move to decide"
        );
        let forward = |cpu, steer_reason, head_old| {
            Verdict::Forward(Target { cpu, steer_reason, desired_by, slot: Some(slot), head_old })
        };
        let cpu = match at.current_cpu() {
            CurrentCpu::On(cpu) => cpu,
            CurrentCpu::None => return forward(desired_cpu, desired_by, None),
            CurrentCpu::BehindFence(fence) => {
                let hold = self.begin_hold(slot, Predecessors::Fence(fence), now_ns);
                return hold.map_or(Verdict::Refuse, Verdict::Hold);
            }
        };
        let depth = backlogs.depth(cpu, at.tail, self.batch_max);
        match depth {
            Depth::Drained(head) => return forward(desired_cpu, SteerReason::Drained, Some(head)),
            Depth::Near(ahead) | Depth::Far(ahead) => {
                let stay = self.stay_at(slot, at, hash);
                self.tables.now.stays[slot.index()] = stay.begun(now_ns, ahead, at.tail);
            }
        }
        // Flows of one slot with different desired CPUs would begin a held move at every packet.
        let is_shared = at.last_flow != hash;
        let is_patient = matches!(depth, Depth::Far(_)) || is_shared;
        if is_patient
            && self.may_stay(hash, slot, cpu)
            && !self.is_overdue(slot, now_ns)
            && backlogs.has_room(cpu)
        {
            self.count_stay(slot);
            return forward(cpu, SteerReason::Stay, None);
        }
        if let Some(hold) = self.begin_hold(slot, Predecessors::Backlog(cpu, at.tail), now_ns) {
            return Verdict::Hold(hold);
        }
        // No more packets can be held. The packet stays in order behind its predecessors, and its
        // flow moves later. On a CPU outside the map, only a flow that is already there may stay.
        if !self.may_stay(hash, slot, cpu) {
            return Verdict::Refuse;
        }
        self.count_unholdable(slot);
        forward(cpu, SteerReason::Stay, None)
    }

    /// Begins a hold for a slot; `None` if no further packet can be held.
    fn begin_hold(&mut self, slot: SlotId, waits_for: Predecessors, now_ns: u64) -> Option<HoldId> {
        if self.holds.room() == 0 {
            return None;
        }
        debug_assert!(self.tables.get(slot).hold().is_none(), "a slot has one hold at a time");
        let hold = self.holds.begin(slot, waits_for, now_ns)?;
        self.tally.holds += 1;
        self.tables.now.slots.get_mut(slot).set_hold(Some(hold));
        Some(hold)
    }

    /// True if a packet may follow the slot's last one to a CPU that is not desired.
    fn may_stay(&self, flow: FlowHash, slot: SlotId, cpu: CpuId) -> bool {
        self.desired_cpus.allows(cpu) || self.tables.get(slot).last_flow == flow
    }

    #[cold]
    fn moved(&mut self, flow: FlowHash, (slot, from): (SlotId, CpuId), to: Target, now_ns: u64) {
        self.tally.moves += 1;
        let at = self.tables.get(slot);
        let stay = self.stay_at(slot, at, flow);
        self.tables.now.stays[slot.index()] = Stay::default();
        let hold = at.hold().and_then(|hold| self.holds.get(hold));
        debug_assert_ne!(from, to.cpu, "a slot that moves changes its CPU");
        debug_assert_eq!(
            hold.is_some(),
            to.steer_reason == SteerReason::Held,
            "packets that were held give their reason, and only those"
        );
        let since = |since_ns| now_ns.saturating_sub(since_ns);
        let held_ns = hold.map_or(0, |hold| since(hold.since_ns));
        let was_refused_before = stay.ahead > 0 || stay.packets > 0;
        self.journal.moved(Move {
            at_ns: now_ns,
            flow,
            slot,
            from,
            to: to.cpu,
            desired_by: to.desired_by,
            steer_reason: to.steer_reason,
            ahead: stay.ahead,
            stayed: stay.packets,
            waited_ns: if was_refused_before { since(stay.since_ns) } else { held_ns },
            held_ns,
        });
    }

    fn record_held(&mut self, since_ns: u64, now_ns: u64) {
        let held_ns = now_ns.saturating_sub(since_ns);
        self.tally.held_max_ns = self.tally.held_max_ns.max(held_ns);
        self.held_ns.record(held_ns, 1);
    }
}

/// Changes while packets flow.
impl Steering {
    /// Replaces the RPS map; flows move as their next packets arrive (RPS-11).
    pub fn set_rps_map(&mut self, rps_map: RpsMap) {
        self.desired_cpus.set_asked(rps_map);
    }

    /// Notes where the backlog of a new CPU begins.
    pub fn connect(&mut self, cpu: CpuId, start: Position) {
        self.desired_cpus.connect(cpu, start);
    }

    /// Sets the running CPUs: the others get no new flows (RPS-9), and their flows leave.
    pub fn set_running(&mut self, running: RpsMap) {
        self.desired_cpus.set_running(running);
    }

    /// Sets the polling CPU.
    pub fn set_polling_cpu(&mut self, cpu: CpuId) {
        self.desired_cpus.set_polling_cpu(cpu);
    }

    /// Replaces the socket-flow table.
    pub fn set_sock_flows(&mut self, sock_flows: Option<Arc<SockFlowTable>>) {
        self.desired_cpus.set_sock_flows(sock_flows);
    }

    /// Replaces the flow table. The old one is read until all packets that it knows are processed.
    pub fn set_flow_tables(&mut self, tables: FlowTables, now_ns: u64, backlogs: &Backlogs) {
        self.desired_cpus.set_rfs(tables.has_rfs);
        self.desired_cpus.set_table(&tables.slots);
        self.tables.replace(tables, self.fences.to_raise());
        self.raise_fence(now_ns, backlogs);
    }

    /// Replaces the flow table after a change of the hash key, which makes recorded slots void.
    pub fn rehash(&mut self, tables: FlowTables, now_ns: u64, backlogs: &Backlogs) {
        self.desired_cpus.set_rfs(tables.has_rfs);
        self.desired_cpus.rehash(&tables.slots);
        self.tables.replace_by_fence(tables, self.fences.to_raise());
        self.journal.forget_moves();
        self.raise_fence(now_ns, backlogs);
    }

    /// Keeps a retired flow table until it is [taken](Self::take_retired).
    pub fn retire(&mut self, tables: FlowTables) {
        self.tables.retire(tables);
    }

    /// Takes a retired flow table, to be freed off the path.
    pub fn take_retired(&mut self) -> Option<FlowTables> {
        self.tables.take_retired()
    }

    /// Creates empty tables of the current size.
    #[must_use]
    pub fn tables_alike(&self) -> FlowTables {
        self.tables.now.alike()
    }

    /// Takes note of a poll, and of the state of its source afterwards.
    pub fn note_poll(&mut self, status: PollStatus) {
        self.desired_cpus.note_poll(status);
    }

    /// Evaluates the bursts, once a turn. Returns true if desired CPUs have changed.
    pub fn update_spread(&mut self, now_ns: u64, full_burst: bool, backlogs: &Backlogs) -> bool {
        self.desired_cpus.update_spread(now_ns, full_burst, backlogs.tails())
    }

    /// Replaces the configuration of the spread.
    pub fn set_spread(&mut self, config: SpreadConfig) {
        self.desired_cpus.set_spread(config);
    }

    /// Number of CPUs that the load needs now.
    #[must_use]
    pub fn active_cpus(&self) -> usize {
        self.desired_cpus.active_cpus()
    }

    /// Decides how many CPUs the load needs, from the loads of all CPUs and the frames that the queue has taken in. Returns
    /// true if desired CPUs have changed.
    pub fn resize(
        &mut self,
        now_ns: u64,
        loads: (&[CpuLoad], u64),
        backlogs: &mut Backlogs,
    ) -> bool {
        self.desired_cpus.resize(now_ns, loads, backlogs.ends())
    }

    /// Replaces the configuration of the balance.
    pub fn set_balance(&mut self, config: BalanceConfig) {
        self.desired_cpus.set_balance(config, &self.tables.now.slots);
    }

    /// Weighs packets for the balance, if it is on.
    pub fn weigh(&mut self, packets: &[Packet]) {
        self.desired_cpus.weigh(packets);
    }

    /// True if the loads of all CPUs are due to be read.
    #[must_use]
    pub fn is_load_due(&self, now_ns: u64) -> bool {
        self.desired_cpus.is_load_due(now_ns)
    }

    /// Lets the queue balance together with all others on the board, under this number.
    pub fn set_board(&mut self, board: Arc<BalanceBoard>, queue: RxQueue) {
        self.desired_cpus.set_board(board, queue.0.into());
    }

    /// Balances the loads of all CPUs, by [`CpuId::index`]; `None` if there is nothing to compare
    /// with.
    pub fn balance(&mut self, now_ns: u64, loads: &[CpuLoad]) -> Option<BalanceRound> {
        self.desired_cpus.balance(now_ns, loads)
    }

    fn raise_fence(&mut self, now_ns: u64, backlogs: &Backlogs) {
        self.fences.raise(&mut self.holds, backlogs);
        debug_assert!(self.fences.is_any(), "a replaced table has a fence behind its packets");
        self.watch_anew(now_ns);
    }
}
