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
mod held; //        decisions on packets that wait
mod changes; //     changes while packets flow
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

use crate::backlog::{Backlogs, Depth};
use crate::counters::Histogram;
use crate::cpu::CpuId;
use crate::hash::FlowHash;
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
}
