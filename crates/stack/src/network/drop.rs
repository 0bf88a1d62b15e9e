//! Reasons of the network layer, or of a socket behind it, for dropping a packet. The names are those of the
//! kernel's `enum skb_drop_reason` in lower case, where it has one.

/// The reasons, in packet order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NetworkDrop {
    /// The frame was addressed to another host's MAC, or to a VLAN that nobody here is on.
    Otherhost,
    /// No protocol for its EtherType, its ICMP type, or one of its IPv6 options.
    UnhandledProto,
    /// Its capture was cut short (the kernel has no such frames).
    Snapped,
    /// Shorter than a header says.
    PktTooSmall,
    /// Its IP header, or an option in it, cannot be.
    IpInhdr,
    /// Its IPv4 header checksum is wrong.
    IpCsum,
    /// Nobody can have this source address.
    IpInvalidSource,
    /// Nobody can have this destination address.
    IpInvalidDest,
    /// A loopback address from outside.
    IpLocalnet,
    /// The source address is one of ours.
    IpLocalSource,
    /// Not for an address of ours; we do not forward.
    IpInaddrerrors,
    /// To a group that nobody here has joined.
    NotJoined,
    /// A packet that wants to be source-routed.
    SourceRoute,
    /// No protocol behind its IP header.
    IpNoproto,
    /// IPv6 on a device that has no IPv6 address.
    Ipv6disabled,
    /// An IPv6 extension header that cannot be, or that we do not take.
    Ipv6BadExthdr,
    /// A piece of a datagram that was there already.
    DupFrag,
    /// Pieces of a datagram that overlap (RFC 5722).
    FragOverlap,
    /// A piece whose place or length cannot be.
    FragInvalid,
    /// Too many pieces, or too large a datagram.
    FragTooFar,
    /// No memory for more incomplete datagrams.
    FragNomem,
    /// A datagram that was not complete in time.
    FragReasmTimeout,
    /// A wrong ICMP checksum.
    IcmpCsum,
    /// No frame for an answer, or for a private copy of a packet in shared memory.
    Nomem,
    /// A wrong UDP checksum, or none over IPv6.
    UdpCsum,
    /// No socket has its port.
    NoSocket,
    /// The socket's receive buffer was full.
    SocketRcvbuff,
    /// The socket was closed while it waited.
    SocketClose,
}

impl NetworkDrop {
    /// Every reason, in packet order.
    pub const ALL: [Self; 28] = [
        Self::Otherhost,
        Self::UnhandledProto,
        Self::Snapped,
        Self::PktTooSmall,
        Self::IpInhdr,
        Self::IpCsum,
        Self::IpInvalidSource,
        Self::IpInvalidDest,
        Self::IpLocalnet,
        Self::IpLocalSource,
        Self::IpInaddrerrors,
        Self::NotJoined,
        Self::SourceRoute,
        Self::IpNoproto,
        Self::Ipv6disabled,
        Self::Ipv6BadExthdr,
        Self::DupFrag,
        Self::FragOverlap,
        Self::FragInvalid,
        Self::FragTooFar,
        Self::FragNomem,
        Self::FragReasmTimeout,
        Self::IcmpCsum,
        Self::Nomem,
        Self::UdpCsum,
        Self::NoSocket,
        Self::SocketRcvbuff,
        Self::SocketClose,
    ];

    /// The name in counters and traces.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Otherhost => "otherhost",
            Self::UnhandledProto => "unhandled_proto",
            Self::Snapped => "snapped",
            Self::PktTooSmall => "pkt_too_small",
            Self::IpInhdr => "ip_inhdr",
            Self::IpCsum => "ip_csum",
            Self::IpInvalidSource => "ip_invalid_source",
            Self::IpInvalidDest => "ip_invalid_dest",
            Self::IpLocalnet => "ip_localnet",
            Self::IpLocalSource => "ip_local_source",
            Self::IpInaddrerrors => "ip_inaddrerrors",
            Self::NotJoined => "not_joined",
            Self::SourceRoute => "source_route",
            Self::IpNoproto => "ip_noproto",
            Self::Ipv6disabled => "ipv6disabled",
            Self::Ipv6BadExthdr => "ipv6_bad_exthdr",
            Self::DupFrag => "dup_frag",
            Self::FragOverlap => "frag_overlap",
            Self::FragInvalid => "frag_invalid",
            Self::FragTooFar => "frag_too_far",
            Self::FragNomem => "frag_nomem",
            Self::FragReasmTimeout => "frag_reasm_timeout",
            Self::IcmpCsum => "icmp_csum",
            Self::Nomem => "nomem",
            Self::UdpCsum => "udp_csum",
            Self::NoSocket => "no_socket",
            Self::SocketRcvbuff => "socket_rcvbuff",
            Self::SocketClose => "socket_close",
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
        for (index, reason) in NetworkDrop::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), index);
        }
    }
}
