//! What somebody who watches asks the queues, between their turns.

use std::sync::mpsc::Sender;

use path::hash::FlowHash;
use path::steer::{Drops, FlowState};
use path::{CpuId, RxQueue};

/// Where is this flow, and why? Each queue answers when it comes by.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) flow: FlowHash,
    /// Takes one answer from each queue, and never makes one wait.
    pub(crate) answers: Sender<Explained>,
}

/// What a queue knows of a flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explained {
    /// The queue, counted through all devices.
    pub queue: RxQueue,
    /// What it is called: `rx-0`, or `eth1/rx-0` where there are several devices.
    pub name: String,
    /// The CPU that polls it.
    pub polling_cpu: CpuId,
    /// When it said so, in engine time.
    pub at_ns: u64,
    /// Where the flow is, and why.
    pub state: FlowState,
    /// What of it was dropped, as far as that is remembered.
    pub drops: Vec<Drops>,
}
