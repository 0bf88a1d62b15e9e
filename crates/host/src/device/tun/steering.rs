//! Which queue a packet comes out of.

use crate::sys::tun::TunQueue;

/// How the kernel chooses a packet's queue.
#[derive(Debug)]
pub(super) enum Steering {
    /// There is one.
    OneQueue,
    /// By the queue that the flow was last sent from, and else by a hash. Where packets are sent
    /// to the device too, a flow may change its queue, and then its order is not kept.
    ByKernel,
}

impl Steering {
    /// Pins flows to queues.
    pub(super) fn pin(_queue: &TunQueue) -> Self {
        Self::ByKernel
    }

    /// Has the kernel drop what it has for the device.
    pub(super) fn close(&self, _queue: &TunQueue) {}

    /// Leaves the choice to the kernel again.
    pub(super) fn give_back(&self, _queue: &TunQueue) {}

    /// What a report says of it.
    pub(super) fn fact(&self) -> Option<String> {
        match self {
            Self::OneQueue => None,
            Self::ByKernel => Some(
                "the kernel's: a flow that is also sent to the device may change its queue"
                    .to_owned(),
            ),
        }
    }
}
