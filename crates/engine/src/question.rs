//! Questions to the queues, answered between their turns.

use std::sync::mpsc::Sender;

use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{Drops, FlowState};
use forebay_rx::{CpuId, RxQueue};

/// Request to explain a flow. Each queue answers between two turns.
#[derive(Debug)]
pub struct Question {
    /// Hash of the flow.
    pub flow: FlowHash,
    /// Channel for one answer from each queue; sending never blocks.
    pub answers: Sender<Explained>,
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
