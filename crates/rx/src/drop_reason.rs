//! Reasons for dropping a packet: every loss has one of these names, a counter and a test.

use crate::reasons;

reasons! {
    /// The reasons, in packet order.
    pub enum DropReason {
        /// The source's link type is one that the path cannot read.
        LinkType = "link_type",
        /// The kernel's or the device's header of it contradicts it
        /// ([`InvalidVnetHeader`](crate::coalesce::gso::InvalidVnetHeader)).
        VnetHeader = "vnet_header",
        /// A length, or a number of buffers, that cannot be: the kernel's `rx_length_errors`.
        LengthError = "length_error",
        /// Larger than the largest chunk of packet memory.
        Oversize = "oversize",
        /// No packet memory was free when the frame arrived, or for its headers, where they were
        /// too long to be parsed beside where it lay.
        NoBuffer = "no_buffer",
        /// The flow was waiting to change its CPU, and as many packets waited as may.
        HoldFull = "hold_full",
        /// The backlog of its CPU was at `netdev_max_backlog`.
        BacklogFull = "backlog_full",
        /// The backlog was half full, and its flow held more than its share of the recent packets.
        FlowLimit = "flow_limit",
        /// The thread of its CPU was lost with the packet in its hands.
        CpuLost = "cpu_lost",
    }
}
