//! The reasons for which packets go to their CPUs.

/// Reason for a packet's CPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SteerReason {
    /// The flow's application runs there.
    Rfs,
    /// The RPS map says so.
    Rps,
    /// Not steered: the packet has no hash, RPS is off, or spreading does not pay now. It stays on
    /// the CPU that polls the queue.
    Inline,
    /// The flow should be elsewhere, but packets of it are still queued here.
    Stay,
    /// The old CPU has processed all of its flow: with this packet, the flow moved here.
    Drained,
    /// Held until the old CPU had processed its predecessors, then forwarded here.
    Held,
}

impl SteerReason {
    /// The word in traces.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Rfs => "rfs",
            Self::Rps => "rps",
            Self::Inline => "inline",
            Self::Stay => "stay",
            Self::Drained => "drained",
            Self::Held => "held",
        }
    }
}
