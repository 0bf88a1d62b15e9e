//! The reasons for which packets go to their CPUs.

use crate::reasons;

reasons! {
    /// Reason for a packet's CPU.
    pub enum SteerReason {
        /// The flow's application runs there.
        Rfs = "rfs",
        /// The RPS map says so.
        Rps = "rps",
        /// The RPS map says another one, and the load this one: its hash range was assigned to it.
        Balance = "balance",
        /// Not steered: the packet has no hash, RPS is off, or spreading does not pay now. It stays
        /// on the CPU that polls the queue.
        Inline = "inline",
        /// The flow should be elsewhere, but packets of it are still queued here.
        Stay = "stay",
        /// The old CPU has processed all of its flow: with this packet, the flow moved here.
        Drained = "drained",
        /// Held until the old CPU had processed its predecessors, then forwarded here.
        Held = "held",
    }
}
