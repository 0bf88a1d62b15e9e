//! Reasons for dropping a packet between source and handler; each has a counter and a test. The
//! network layer's are `NetworkDrop`, a sink's [`SendDrop`](crate::sink::SendDrop).

use crate::reasons;

reasons! {
    /// Reasons, in the order of the path.
    pub enum DropReason {
        /// Link type of the source that the path cannot parse.
        LinkType = "link_type",
        /// Contradiction between the frame and the header that the kernel or device put before it
        /// ([`InvalidVnetHeader`](crate::coalesce::gso::InvalidVnetHeader)).
        VnetHeader = "vnet_header",
        /// Impossible length or number of buffers: the kernel's `rx_length_errors`.
        LengthError = "length_error",
        /// Larger than the largest chunk of packet memory.
        Oversize = "oversize",
        /// No packet memory free: for the frame, or to linearize headers that are too long to be
        /// parsed in place.
        NoBuffer = "no_buffer",
        /// Maximum number of packets held, while the flow waited to change its CPU.
        HoldFull = "hold_full",
        /// Backlog of the CPU at `netdev_max_backlog`.
        BacklogFull = "backlog_full",
        /// Backlog at least half full, and more than its share of the recent packets from this
        /// flow.
        FlowLimit = "flow_limit",
        /// Death of the CPU's thread while the packet was in its current batch.
        CpuLost = "cpu_lost",
    }
}
