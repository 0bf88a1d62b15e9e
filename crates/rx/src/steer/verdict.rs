//! Verdicts of steering.

use forebay_buf::Position;

use super::ids::{HoldId, SlotId};
use crate::cpu::CpuId;
use crate::steer_reason::SteerReason;

/// Destination of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// The CPU.
    pub cpu: CpuId,
    /// Reason.
    pub steer_reason: SteerReason,
    /// Origin of the wish for that CPU.
    pub wish: SteerReason,
    /// The slot to record it in; none if the fence answers for it.
    pub slot: Option<SlotId>,
    /// If the slot moves with this packet: the head counter of the old backlog that allows it.
    pub head_old: Option<Position>,
}

impl Target {
    /// Destination of a packet that was held in a line.
    pub(super) fn of_line(cpu: CpuId) -> Self {
        let steer_reason = SteerReason::Held;
        Self { cpu, steer_reason, wish: steer_reason, slot: None, head_old: None }
    }
}

/// The verdict on one packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Verdict {
    /// The packet goes there now.
    Forward(Target),
    /// The packet waits behind the others of its slot.
    Hold(HoldId),
    /// The packet should wait, and as many slots wait as may.
    Refuse,
}

/// The verdict on packets that are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Release {
    /// The packets may go there now, as many as there is room for.
    Forward(Target),
    /// The packets wait.
    Wait,
}

/// Counts since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SteerTally {
    /// Slots that changed their CPU.
    pub moves: u64,
    /// Packets that followed their predecessors to a CPU that they should leave.
    pub stays: u64,
    /// Held moves begun.
    pub holds: u64,
    /// Packets that stayed because no more could be held.
    pub unheld: u64,
    /// The longest that a held move took, in nanoseconds.
    pub held_max_ns: u64,
}
