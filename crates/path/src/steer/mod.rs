//! Steer: which CPU a packet goes to, and why, so that no flow is ever reordered.
//!
//! A flow *wishes* for a CPU: the RPS map's. It *is* on a CPU: its slot of the flow table says
//! which, and where its last packet lies in that CPU's backlog. When wish and slot agree, the
//! packet follows. When they do not, whatever made the wish change (a mask, the load, a collision),
//! one rule decides (RFS-6):
//!
//! 1. **Drained**: the old CPU has processed the slot's last packet. The slot moves.
//! 2. **Near**: it may be about to. The slot's packets are held on the polling CPU until it has,
//!    then move: a *held move*.
//! 3. **Far**: it has more in front of it than it takes in hand at once. The packet stays with its
//!    predecessors, but not for long: after `move_after` a held move begins. From then on the old
//!    CPU is fed no more, so it drains, and the move takes no longer than that. The kernel's rule
//!    has no third part, and never lets a flow leave a CPU that it saturates.
//!
//! To a CPU that was taken out of the map a packet follows only its own flow: if the slot's last
//! packet was another flow's, its own predecessors may be gone, and nothing would justify it.

mod ids;
mod flow_table;
mod hold;
mod rps;
mod spread;

use mem::Position;

use crate::backlog::{Backlogs, Depth};
use crate::because::Because;
use crate::cpu::CpuId;
use crate::hash::FlowHash;
use crate::packet::Packet;

use flow_table::FlowTable;
pub use flow_table::{RPS_FLOW_CNT, RPS_FLOW_CNT_MAX};
pub use hold::HOLD_MAX;
use hold::Holds;
pub use ids::{HoldId, SlotId};
pub use rps::RpsMap;
use spread::Spread;
pub use spread::{SPREAD_WINDOW_NS, SpreadPolicy, Tick};

/// How long a flow's packets follow their predecessors to a CPU that it should leave, before a
/// held move begins: whichever comes first. Counted since the slot last changed its CPU: one that
/// was to leave before and stayed leaves all the sooner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoveAfter {
    /// Packets of the slot.
    pub packets: u32,
    /// Time since the first of them.
    pub time_ns: u64,
}

impl Default for MoveAfter {
    fn default() -> Self {
        Self { packets: 64, time_ns: 1_000_000 }
    }
}

/// What [`Steering`] begins with.
#[derive(Clone, Debug)]
pub struct SteerConfig {
    /// The CPU that polls the queue.
    pub polling_cpu: CpuId,
    /// Slots of the flow table.
    pub rps_flow_cnt: u32,
    /// When a held move begins.
    pub move_after: MoveAfter,
    /// Packets that may be held at once: at least one may.
    pub hold_max: u32,
    /// When packets leave the polling CPU.
    pub spread: SpreadPolicy,
    /// Packets that a CPU takes in hand at once.
    pub batch_max: u32,
}

/// Where a packet goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// The CPU.
    pub cpu: CpuId,
    /// Why.
    pub because: Because,
    /// The slot to record it in; none if it is not steered.
    pub slot: Option<SlotId>,
    /// If the slot moves with this packet: the head counter of the old backlog that allows it.
    pub head_old: Option<Position>,
}

/// The verdict on one packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Verdict {
    /// It goes there now.
    Forward(Target),
    /// It waits behind the others of its slot.
    Hold(HoldId),
    /// The CPU it would follow its held predecessors to is full.
    Full(CpuId),
}

/// The verdict on a hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Release {
    /// Its packets may go there now, as many as there is room for.
    Forward(Target),
    /// They wait.
    Wait,
}

/// What changed the flow table, for counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SteerTally {
    /// Slots that changed their CPU.
    pub moves: u64,
    /// Packets that stayed where their flow should leave.
    pub stays: u64,
    /// Held moves begun.
    pub holds: u64,
    /// The longest held move that ended.
    pub held_max_ns: u64,
}

/// The steering of one rx queue. Owned by the CPU that polls it.
#[derive(Debug)]
pub struct Steering {
    polling_cpu: CpuId,
    rps_map: RpsMap,
    table: FlowTable,
    /// Beside the flow table, touched only where wish and slot disagree.
    waits: Box<[Wait]>,
    holds: Holds,
    move_after: MoveAfter,
    spread: Spread,
    batch_max: u32,
    tally: SteerTally,
}

/// How long a slot's packets have stayed on a CPU against their wishes: flows of one slot may wish
/// for different CPUs, and the masks may change faster than a saturated CPU drains.
#[derive(Clone, Copy, Debug, Default)]
struct Wait {
    since_ns: u64,
    packets: u32,
}

impl Steering {
    /// Steers nothing yet: the RPS map and every slot are empty.
    #[must_use]
    pub fn new(config: &SteerConfig) -> Self {
        let table = FlowTable::new(config.rps_flow_cnt);
        Self {
            polling_cpu: config.polling_cpu,
            rps_map: RpsMap::default(),
            waits: vec![Wait::default(); table.len()].into(),
            table,
            holds: Holds::new(config.hold_max.max(1)),
            move_after: config.move_after,
            spread: Spread::new(config.spread),
            batch_max: config.batch_max,
            tally: SteerTally::default(),
        }
    }

    /// Replaces the RPS map; flows move as their next packets come (RPS-11).
    pub fn set_rps_map(&mut self, rps_map: RpsMap) {
        self.rps_map = rps_map;
    }

    /// Looks at the load, once a turn. Returns whether flows are to move because of it.
    pub fn update_spread(&mut self, tick: Tick, full_burst: bool) -> bool {
        self.spread.update(tick, full_burst)
    }

    /// Decides about the next packet of a flow. If the verdict is [`Verdict::Forward`] and the
    /// backlog takes the packet, [`record`](Self::record) is called next.
    pub fn decide(&mut self, hash: FlowHash, now_ns: u64, backlogs: &mut Backlogs) -> Verdict {
        if !hash.is_some() {
            let because = Because::Inline;
            let cpu = self.polling_cpu;
            return Verdict::Forward(Target { cpu, because, slot: None, head_old: None });
        }
        let slot = self.table.slot_of(hash);
        let at = self.table.get(slot);
        let (wish, because) = self.wish(hash, slot);
        if let Some(hold) = at.hold() {
            return self.decide_held(hold, wish);
        }
        let forward = |cpu, because, head_old| {
            Verdict::Forward(Target { cpu, because, slot: Some(slot), head_old })
        };
        let Some(cpu) = at.cpu() else { return forward(wish, because, None) };
        if cpu == wish {
            return forward(cpu, because, None);
        }
        match backlogs.depth(cpu, at.tail, self.batch_max) {
            Depth::Drained(head) => forward(wish, Because::Drained, Some(head)),
            Depth::Far if self.may_stay(hash, slot, cpu) && !self.is_overdue(slot, now_ns) => {
                self.tally.stays += 1;
                forward(cpu, Because::Stay, None)
            }
            Depth::Near | Depth::Far => match self.holds.begin(slot, cpu, at.tail, now_ns) {
                Some(hold) => {
                    self.tally.holds += 1;
                    self.table.get_mut(slot).set_hold(Some(hold));
                    Verdict::Hold(hold)
                }
                None => forward(cpu, Because::Stay, None),
            },
        }
    }

    /// Notes that the backlog of the target took a packet of `flow`, at `tail`.
    pub fn record(&mut self, flow: FlowHash, target: Target, tail: Position) {
        let Some(slot) = target.slot else { return };
        let at = self.table.get_mut(slot);
        if at.cpu().is_some_and(|cpu| cpu != target.cpu) {
            self.tally.moves += 1;
            self.waits[slot.index()].packets = 0;
        }
        at.record(flow, target.cpu, tail);
        if let Some(hold) = at.hold() {
            self.holds.set_behind(hold, target.cpu, tail);
        }
    }

    /// The flow of the last packet that went through a slot.
    #[must_use]
    pub fn last_flow(&self, slot: SlotId) -> FlowHash {
        self.table.get(slot).last_flow
    }

    /// Puts a packet behind the others of its hold.
    ///
    /// # Errors
    /// Gives the packet back when as many wait as may.
    pub fn hold(&mut self, hold: HoldId, packet: Packet) -> Result<(), Packet> {
        self.holds.push(hold, packet)
    }

    /// The `index`-th of the holds that last, in no order.
    #[must_use]
    pub fn active_hold(&self, index: usize) -> Option<HoldId> {
        self.holds.active().get(index).copied()
    }

    /// How many holds last.
    #[must_use]
    pub fn active_holds(&self) -> usize {
        self.holds.active().len()
    }

    /// The hold of a flow's slot, if there is one.
    #[must_use]
    pub fn hold_of(&self, hash: FlowHash) -> Option<HoldId> {
        if hash.is_some() { self.table.get(self.table.slot_of(hash)).hold() } else { None }
    }

    /// Decides whether the packets of a hold may go.
    pub fn decide_release(&mut self, id: HoldId, backlogs: &mut Backlogs) -> Release {
        let (Some(hold), Some(front)) = (self.holds.get(id), self.holds.front(id)) else {
            return Release::Wait;
        };
        let (wish, because) = self.wish(front.hash, hold.slot);
        let slot = Some(hold.slot);
        if wish == hold.from {
            // Wanted back before it had left, or some have gone there already: behind those.
            return Release::Forward(Target { cpu: wish, because, slot, head_old: None });
        }
        match backlogs.depth(hold.from, hold.behind, self.batch_max) {
            Depth::Drained(head) => {
                let because = Because::Held;
                Release::Forward(Target { cpu: wish, because, slot, head_old: Some(head) })
            }
            Depth::Near | Depth::Far => Release::Wait,
        }
    }

    /// Takes the oldest packet of a hold.
    pub fn unhold(&mut self, id: HoldId) -> Option<Packet> {
        self.holds.pop(id)
    }

    /// Ends a hold if its packets have all gone.
    pub fn end_hold(&mut self, id: HoldId, now_ns: u64) {
        let Some(hold) = self.holds.get(id) else { return };
        if self.holds.front(id).is_some() {
            return;
        }
        let held_ns = now_ns.saturating_sub(hold.since_ns);
        self.tally.held_max_ns = self.tally.held_max_ns.max(held_ns);
        self.table.get_mut(hold.slot).set_hold(None);
        self.holds.end(id);
    }

    /// Packets that are held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.holds.len()
    }

    /// How many packets can be held at once.
    #[must_use]
    pub fn hold_max(&self) -> usize {
        self.holds.capacity()
    }

    /// How many more packets can be held.
    #[must_use]
    pub fn hold_room(&self) -> usize {
        self.holds.room()
    }

    /// What has happened so far.
    #[must_use]
    pub fn tally(&self) -> SteerTally {
        self.tally
    }

    /// The CPU that a packet should go to.
    fn wish(&self, hash: FlowHash, slot: SlotId) -> (CpuId, Because) {
        let inline = (self.polling_cpu, Because::Inline);
        if !self.spread.is_spreading() && self.rps_map.contains(self.polling_cpu) {
            return inline;
        }
        let Some(cpu) = self.rps_map.select(hash) else { return inline };
        match self.table.get(slot).cpu() {
            // A boundary of the map inside the slot: either side will do, rather than moving the
            // slot to and fro with every other packet.
            Some(at) if at != cpu && self.straddles(slot, at) => (at, Because::Rps),
            _ => (cpu, Because::Rps),
        }
    }

    /// Whether the map wants `cpu` for some flow of the slot: its CPUs ascend with the hash.
    fn straddles(&self, slot: SlotId, cpu: CpuId) -> bool {
        let [first, last] = self.table.range(slot).map(|hash| self.rps_map.select(hash));
        self.rps_map.contains(cpu) && first <= Some(cpu) && Some(cpu) <= last
    }

    fn decide_held(&self, id: HoldId, wish: CpuId) -> Verdict {
        match self.holds.get(id) {
            // Its predecessors wait for room on that CPU, not for it to drain: a full backlog.
            Some(hold) if hold.from == wish => Verdict::Full(wish),
            _ => Verdict::Hold(id),
        }
    }

    /// Whether a packet may follow the slot's last one to a CPU that it should not go to.
    fn may_stay(&self, flow: FlowHash, slot: SlotId, cpu: CpuId) -> bool {
        self.rps_map.contains(cpu) || self.table.get(slot).last_flow == flow
    }

    /// Counts a packet that stays against its wish, and says whether a held move is due.
    fn is_overdue(&mut self, slot: SlotId, now_ns: u64) -> bool {
        let wait = &mut self.waits[slot.index()];
        if wait.packets == 0 {
            wait.since_ns = now_ns;
        }
        wait.packets = wait.packets.saturating_add(1);
        wait.packets > self.move_after.packets
            || now_ns.saturating_sub(wait.since_ns) >= self.move_after.time_ns
    }
}
