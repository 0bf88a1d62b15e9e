//! Reasons for which packets go to their CPUs.

use crate::reasons;

reasons! {
    /// Reason for a packet's CPU.
    pub enum SteerReason {
        /// CPU of the flow's application.
        Rfs = "rfs",
        /// CPU by the RPS map.
        Rps = "rps",
        /// CPU that the hash range was assigned to by load, instead of the RPS map's.
        Balance = "balance",
        /// The RPS map says another one, and the load needs fewer CPUs: this is one of them.
        Spread = "spread",
        /// Not steered: no hash, or RPS off. The packet stays on the polling CPU.
        Inline = "inline",
        /// Another CPU is desired, but packets of the flow are still queued here.
        Stay = "stay",
        /// Move of the flow with this packet: the old CPU has processed all of its predecessors.
        Drained = "drained",
        /// Held until the old CPU had processed its predecessors, then forwarded here.
        Held = "held",
    }
}
