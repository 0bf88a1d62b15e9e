//! Questions to the queues, answered between their turns.

use std::sync::mpsc::Sender;

use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{Drops, FlowState};
use forebay_rx::{CpuId, RxQueue, SteerReason};

/// Number of equal ranges of hash values whose CPUs a queue reports.
pub const HASH_RANGES: u32 = 256;

/// Request that each queue answers between two turns. Sending an answer never blocks.
#[derive(Debug)]
pub enum Question {
    /// Request to explain a flow.
    Flow {
        /// Hash of the flow.
        flow: FlowHash,
        /// Channel for one answer from each queue.
        answers: Sender<Explained>,
    },
    /// Request for the CPUs of all hash values.
    Ranges {
        /// Channel for one answer from each queue.
        answers: Sender<QueueRanges>,
    },
}

/// CPUs of all hash values on one queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueRanges {
    /// The queue, numbered through all devices.
    pub queue: RxQueue,
    /// Name of the queue: `rx-0`, or `eth1/rx-0` if there are several devices.
    pub name: String,
    /// CPU that polls the queue.
    pub polling_cpu: CpuId,
    /// Time of the answer, in engine time.
    pub at_ns: u64,
    /// Desired CPU, and the reason, of a flow in the middle of each of [`HASH_RANGES`] ranges.
    pub wishes: Vec<(CpuId, SteerReason)>,
}

/// Hash in the middle of each of [`HASH_RANGES`] ranges.
pub(super) fn middles() -> impl Iterator<Item = FlowHash> {
    const RANGE: u32 = u32::MAX / HASH_RANGES + 1;
    (0..HASH_RANGES).map(|index| FlowHash(index * RANGE + RANGE / 2))
}

/// State of a flow on one queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explained {
    /// The queue, numbered through all devices.
    pub queue: RxQueue,
    /// Name of the queue: `rx-0`, or `eth1/rx-0` if there are several devices.
    pub name: String,
    /// CPU that polls the queue.
    pub polling_cpu: CpuId,
    /// Time of the answer, in engine time.
    pub at_ns: u64,
    /// Current CPU of the flow, and the reason.
    pub state: FlowState,
    /// Remembered drops of the flow.
    pub drops: Vec<Drops>,
}
