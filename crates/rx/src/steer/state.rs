//! Explanation of a flow's CPU.

use super::Steering;
use super::flow_table::CurrentCpu;
use super::ids::{HoldId, SlotId};
use super::journal::{FlowWatch, Move, WATCHES_MAX};
use crate::backlog::Backlogs;
use crate::cpu::CpuId;
use crate::flow_key::KeyRule;
use crate::hash::FlowHash;
use crate::steer_reason::SteerReason;

/// Current CPU of a flow, and the reason: the answer of [`Steering::state_of`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FlowState {
    /// Slot of the flow table; `None` without a hash: all such packets share a slot.
    pub slot: Option<u32>,
    /// Number of slots of the table.
    pub slots: usize,
    /// CPU of the slot's last packet; `None` if there was none, or if only a fence is known.
    pub cpu: Option<CpuId>,
    /// True if the slot waits for the fence of a table that was replaced.
    pub is_fenced: bool,
    /// Desired CPU of the flow's next packet, and the reason.
    pub desired: (CpuId, SteerReason),
    /// Number of packets that the CPU must still process up to the slot's last one.
    pub ahead: u32,
    /// Number of packets that stayed on a CPU that is not desired, and the time of the first;
    /// `None` if the current CPU is the desired one.
    pub stayed: Option<(u32, u64)>,
    /// Held packets of the slot, if any.
    pub held: Option<HeldPackets>,
    /// Flow of the slot's last packet.
    pub last_flow: FlowHash,
    /// Time since which the flows of the slot are recorded, if they are.
    pub watched_since_ns: Option<u64>,
    /// Flows that used the slot since then, this one included; at most [`SHARERS_MAX`].
    ///
    /// [`SHARERS_MAX`]: super::SHARERS_MAX
    pub sharers: Vec<FlowHash>,
    /// Rule that made the key of the flow's last packet since then, other than an ICMP error, and the packet's time: the
    /// same addresses and ports may be those of an inner header.
    pub rule: Option<(KeyRule, u64)>,
    /// Remembered moves of the slot, oldest first, as far as the flow that began the move still
    /// belongs to the slot.
    pub moves: Vec<Move>,
}

/// Held packets of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldPackets {
    /// Number of packets.
    pub packets: usize,
    /// Time at which the hold began.
    pub since_ns: u64,
    /// CPU that they go to: the desired one of the oldest, which may be of another flow than later ones.
    pub to: CpuId,
}

/// Current and desired CPU of a flow: the cheap part of a [`FlowState`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowPlace {
    /// Slot of the flow table; `None` without a hash: all such packets share a slot.
    pub slot: Option<u32>,
    /// CPU of the slot's last packet; `None` if there was none, or if only a fence is known.
    pub cpu: Option<CpuId>,
    /// True if that CPU is in the map, so that any flow of the slot may follow.
    pub is_allowed: bool,
    /// Desired CPU of the flow's next packet.
    pub desired_cpu: CpuId,
    /// True if packets of the slot are held until it may move.
    pub is_held: bool,
    /// True if a fence has not been passed.
    pub has_fence: bool,
}

impl Steering {
    /// Current and desired CPU of a flow.
    #[must_use]
    pub fn place_of(&self, flow: FlowHash) -> FlowPlace {
        let slot = self.slot_of(flow);
        let at = self.tables.get(slot);
        FlowPlace {
            slot: flow.is_some().then_some(slot.0),
            cpu: at.cpu(),
            is_allowed: at.cpu().is_some_and(|cpu| self.desired_cpus.allows(cpu)),
            desired_cpu: self.desired_cpus.of(flow, &self.tables.now.slots, slot).0,
            is_held: at.hold().is_some(),
            has_fence: self.fences.is_any(),
        }
    }

    /// Desired CPU of a flow's next packet, and the reason.
    #[must_use]
    pub fn desired_of(&self, flow: FlowHash) -> (CpuId, SteerReason) {
        self.desired_cpus.of(flow, &self.tables.now.slots, self.slot_of(flow))
    }

    /// Starts to record the flows that share this flow's slot, unless they are recorded already. If
    /// [`WATCHES_MAX`] flows are watched, the oldest watch ends.
    pub fn watch(&mut self, flow: FlowHash, now_ns: u64) {
        if self.watches.iter().any(|watch| watch.flow == flow) {
            return;
        }
        if self.watches.len() == WATCHES_MAX {
            self.watches.remove(0);
        }
        self.watches.push(FlowWatch::new(flow, self.slot_of(flow), now_ns));
    }

    #[cold]
    pub(super) fn see(&mut self, flow: FlowHash, slot: SlotId) {
        let watches = self.watches.iter_mut().filter(|watch| watch.slot == slot);
        watches.for_each(|watch| watch.see(flow));
    }

    /// True if any flow is watched.
    pub(crate) fn has_watches(&self) -> bool {
        !self.watches.is_empty()
    }

    /// Records the rule that made the key of a packet, if its flow is watched. An ICMP error has the key of the flow that it
    /// quotes, and is passed over.
    pub(crate) fn note_rule(
        &mut self,
        flow: FlowHash,
        now_ns: u64,
        rule: impl FnOnce() -> KeyRule,
    ) {
        if let Some(watch) = self.watches.iter_mut().find(|watch| watch.flow == flow) {
            let rule = Some(rule()).filter(|rule| *rule != KeyRule::Icmp);
            watch.rule = rule.map(|rule| (rule, now_ns)).or(watch.rule);
        }
    }

    /// Restarts all watches, because the slots of their flows have changed.
    pub(super) fn watch_anew(&mut self, now_ns: u64) {
        for watch in &mut self.watches {
            *watch = FlowWatch::new(watch.flow, self.tables.now.slots.slot_of(watch.flow), now_ns);
        }
    }

    /// Current CPU of a flow, and the reason.
    #[must_use]
    pub fn state_of(&self, flow: FlowHash, backlogs: &mut Backlogs) -> FlowState {
        let slot = self.slot_of(flow);
        let at = self.tables.seen(slot, &self.fences, backlogs);
        let moves = self.journal.moves();
        let moves = moves.filter(|moved| self.slot_of(moved.flow) == slot);
        let watch = self.watches.iter().find(|watch| watch.flow == flow);
        // Of the slot as its next packet will find it: it may not have been taken over from an older table.
        let slots = &self.tables.now.slots;
        let desired = self.desired_cpus.of_slot(flow, slots, slot, || at.current_cpu());
        let stay = self.stay_at(slot, at, flow);
        let stays = stay.packets > 0 && at.cpu().is_some_and(|cpu| cpu != desired.0);
        FlowState {
            slot: flow.is_some().then_some(slot.0),
            slots: self.tables.now.slots.len(),
            cpu: at.cpu(),
            is_fenced: match at.current_cpu() {
                CurrentCpu::BehindFence(fence) => self.fences.stands(fence),
                CurrentCpu::None | CurrentCpu::On(_) => false,
            },
            desired,
            ahead: at.cpu().map_or(0, |cpu| backlogs.pending_now(cpu, at.tail)),
            stayed: stays.then_some((stay.packets, stay.since_ns)),
            held: at.hold().and_then(|id| self.held_by(id)),
            last_flow: at.last_flow,
            watched_since_ns: watch.map(|watch| watch.since_ns),
            sharers: watch.map_or_else(Vec::new, |watch| watch.flows().to_vec()),
            rule: watch.and_then(|watch| watch.rule),
            moves: moves.copied().collect(),
        }
    }

    fn held_by(&self, id: HoldId) -> Option<HeldPackets> {
        let (hold, front) = (self.holds.get(id)?, self.holds.front(id)?);
        let (to, _) = self.desired_cpus.of(front.hash, &self.tables.now.slots, hold.slot);
        Some(HeldPackets { packets: self.holds.len_of(id), since_ns: hold.since_ns, to })
    }
}
