//! Drop reasons of the network layer and of the sockets behind it. The names are those of the
//! kernel's `enum skb_drop_reason` in lower case, if it has one.

/// The reasons, in packet order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NetworkDrop {
    /// To the MAC address of another host, or to a VLAN that this host is not on.
    Otherhost,
    /// No protocol for its EtherType, its ICMP type, or one of its IPv6 options.
    UnhandledProto,
    /// The capture was cut short (the kernel has no such frames).
    Snapped,
    /// Shorter than a header says.
    PktTooSmall,
    /// An invalid IP header or option.
    IpInhdr,
    /// A wrong IPv4 header checksum.
    IpCsum,
    /// An invalid source address.
    IpInvalidSource,
    /// An invalid destination address.
    IpInvalidDest,
    /// A loopback address from outside.
    IpLocalnet,
    /// The source address is one of ours.
    IpLocalSource,
    /// To an address that is not ours; packets are not forwarded.
    IpInaddrerrors,
    /// To a group that was not joined.
    NotJoined,
    /// An IPv4 packet with a source route option.
    SourceRoute,
    /// No protocol for its IP header's protocol number.
    IpNoproto,
    /// IPv6 on a device that has no IPv6 address.
    Ipv6disabled,
    /// An IPv6 extension header that is invalid or not accepted.
    Ipv6BadExthdr,
    /// A fragment of data that was already present.
    DupFrag,
    /// Fragments of a datagram that overlap (RFC 5722).
    FragOverlap,
    /// A fragment with an invalid offset or length.
    FragInvalid,
    /// Too many fragments, or too large a datagram.
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
    /// No socket is bound to the destination port.
    NoSocket,
    /// The socket's receive buffer was full.
    SocketRcvbuff,
    /// The socket was closed while the datagram waited.
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

    /// Index in [`ALL`](Self::ALL).
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
