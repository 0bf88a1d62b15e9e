//! Packets that wait: in holds for a move of their slot, and in the line before a fence.

use super::hold::Predecessors;
use super::verdict::{Release, Target};
use super::{HoldId, SlotId, Steering};
use crate::backlog::{Backlogs, Depth};
use crate::cpu::CpuId;
use crate::hash::FlowHash;
use crate::packet::Packet;
use crate::steer_reason::SteerReason;

impl Steering {
    /// Begins a hold for a slot; `None` if no further packet can be held.
    pub(super) fn begin_hold(
        &mut self,
        slot: SlotId,
        waits_for: Predecessors,
        now_ns: u64,
    ) -> Option<HoldId> {
        if self.holds.room() == 0 {
            return None;
        }
        debug_assert!(self.tables.get(slot).hold().is_none(), "a slot has one hold at a time");
        let hold = self.holds.begin(slot, waits_for, now_ns)?;
        self.tally.holds += 1;
        self.tables.now.slots.get_mut(slot).set_hold(Some(hold));
        Some(hold)
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

    fn record_held(&mut self, since_ns: u64, now_ns: u64) {
        let held_ns = now_ns.saturating_sub(since_ns);
        self.tally.held_max_ns = self.tally.held_max_ns.max(held_ns);
        self.held_ns.record(held_ns, 1);
    }
}
