//! Verdicts of steering.

use forebay_buf::Position;

use super::ids::{HoldId, SlotId};
use crate::cpu::CpuId;
use crate::steer_reason::SteerReason;

/// Destination of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// Target CPU.
    pub cpu: CpuId,
    /// Reason.
    pub steer_reason: SteerReason,
    /// Reason of the desired CPU.
    pub desired_by: SteerReason,
    /// Slot to record the packet in; `None` if a fence stands for it.
    pub slot: Option<SlotId>,
    /// If the slot moves with this packet: the head counter of the old backlog that allows the
    /// move.
    pub head_old: Option<Position>,
}

impl Target {
    /// Target of a packet from a line.
    pub(super) fn of_line(cpu: CpuId) -> Self {
        let steer_reason = SteerReason::Held;
        Self { cpu, steer_reason, desired_by: steer_reason, slot: None, head_old: None }
    }
}

/// Verdict on a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Verdict {
    /// Forward the packet to the target now.
    Forward(Target),
    /// Hold the packet behind the others of its slot.
    Hold(HoldId),
    /// Neither: no more packets can be held, and it may not follow its predecessors.
    Refuse,
}

/// Verdict on held packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Release {
    /// Forward the packets to the target now, as many as there is room for.
    Forward(Target),
    /// Keep holding the packets.
    Wait,
}

/// Counters since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SteerTally {
    /// Number of slots that changed their CPU.
    pub moves: u64,
    /// Number of packets that followed their predecessors to a CPU that is not desired.
    pub stays: u64,
    /// Number of held moves begun.
    pub holds: u64,
    /// Number of packets that stayed because no more could be held.
    pub unheld: u64,
    /// Longest held move, in ns.
    pub held_max_ns: u64,
}
