//! Questions to the queues, answered between their turns.

use std::sync::mpsc::Sender;

use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{Drops, FlowState};
use forebay_rx::{CpuId, RxQueue};

/// Explain this flow. Each queue answers when it comes by.
#[derive(Debug)]
pub struct Question {
    /// Hash of the flow.
    pub flow: FlowHash,
    /// Takes one answer from each queue, and never makes one wait.
    pub answers: Sender<Explained>,
}

/// Knowledge of a queue about a flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explained {
    /// The queue, counted through all devices.
    pub queue: RxQueue,
    /// Name of the queue: `rx-0`, or `eth1/rx-0` where there are several devices.
    pub name: String,
    /// The CPU that polls it.
    pub polling_cpu: CpuId,
    /// Time of the answer, in engine time.
    pub at_ns: u64,
    /// Current CPU of the flow, and the reason.
    pub state: FlowState,
    /// Drops of it, as far as they are remembered.
    pub drops: Vec<Drops>,
}
