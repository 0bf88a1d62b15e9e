//! Configuration of a queue's steering.

use super::spread::SpreadPolicy;
use crate::cpu::CpuId;

/// Limit on packets that stay with their predecessors on a CPU that the flow should leave, by
/// number or by time, whichever is reached first; then a held move begins. Counted since the slot
/// last changed its CPU.
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

/// Configuration of a [`Steering`](super::Steering).
#[derive(Clone, Debug)]
pub struct SteerConfig {
    /// CPU that polls the queue.
    pub polling_cpu: CpuId,
    /// Number of slots of the flow table.
    pub rps_flow_cnt: u32,
    /// Condition on which a held move begins.
    pub move_after: MoveAfter,
    /// Maximum number of held packets; at least 1.
    pub hold_max: u32,
    /// Condition on which packets leave the polling CPU.
    pub spread: SpreadPolicy,
    /// Maximum number of packets per delivered batch.
    pub batch_max: u32,
}
