//! Reasons for dropping a packet: every loss has one of these names, a counter and a test.

/// The reasons, in packet order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DropReason {
    /// The source's link type is one that the path cannot read.
    LinkType,
    /// The kernel's or the device's header of it contradicts it
    /// ([`InvalidVnetHeader`](crate::coalesce::gso::InvalidVnetHeader)).
    VnetHeader,
    /// A length, or a number of buffers, that cannot be: the kernel's `rx_length_errors`.
    LengthError,
    /// Larger than the largest chunk of packet memory.
    Oversize,
    /// No packet memory was free when the frame arrived, or for its headers, where they were too
    /// long to be parsed beside where it lay.
    NoBuffer,
    /// The flow was waiting to change its CPU, and as many packets waited as may.
    HoldFull,
    /// The backlog of its CPU was at `netdev_max_backlog`.
    BacklogFull,
    /// The backlog was half full, and its flow held more than its share of the recent packets.
    FlowLimit,
    /// The thread of its CPU was lost with the packet in its hands.
    CpuLost,
}

impl DropReason {
    /// Every reason, in packet order.
    pub const ALL: [Self; 9] = [
        Self::LinkType,
        Self::VnetHeader,
        Self::LengthError,
        Self::Oversize,
        Self::NoBuffer,
        Self::HoldFull,
        Self::BacklogFull,
        Self::FlowLimit,
        Self::CpuLost,
    ];

    /// The name in counters and traces.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LinkType => "link_type",
            Self::VnetHeader => "vnet_header",
            Self::LengthError => "length_error",
            Self::Oversize => "oversize",
            Self::NoBuffer => "no_buffer",
            Self::HoldFull => "hold_full",
            Self::BacklogFull => "backlog_full",
            Self::FlowLimit => "flow_limit",
            Self::CpuLost => "cpu_lost",
        }
    }

    /// The place in [`ALL`](Self::ALL).
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_stands_at_its_index() {
        for (index, reason) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), index);
        }
    }
}
