//! Drop reasons of the network layer and of the sockets behind it. A name is that of the kernel's
//! `enum skb_drop_reason` in lower case, if the kernel has the reason.

use forebay_rx::reasons;

reasons! {
    /// The reasons, in packet order.
    pub enum NetworkDrop {
        /// Sent to the MAC address of another host, or to a VLAN that this host is not on.
        Otherhost = "otherhost",
        /// No protocol for the EtherType, the ICMP type, or an IPv6 option.
        UnhandledProto = "unhandled_proto",
        /// The capture was cut short (the kernel has no such frames).
        Snapped = "snapped",
        /// Shorter than a header says.
        PktTooSmall = "pkt_too_small",
        /// An invalid IP header or option.
        IpInhdr = "ip_inhdr",
        /// A wrong IPv4 header checksum.
        IpCsum = "ip_csum",
        /// An invalid source address.
        IpInvalidSource = "ip_invalid_source",
        /// An invalid destination address.
        IpInvalidDest = "ip_invalid_dest",
        /// A loopback address from outside.
        IpLocalnet = "ip_localnet",
        /// The source address is one of ours.
        IpLocalSource = "ip_local_source",
        /// A TCP segment to our address, but to the link-layer address of a group or of all hosts.
        UnicastInL2Multicast = "unicast_in_l2_multicast",
        /// Sent to an address that is not ours; packets are not forwarded.
        IpInaddrerrors = "ip_inaddrerrors",
        /// Sent to a group that this host has not joined.
        NotJoined = "not_joined",
        /// An IPv4 packet with a source route option.
        SourceRoute = "source_route",
        /// No protocol for the IP header's protocol number.
        IpNoproto = "ip_noproto",
        /// IPv6 on a device that has no IPv6 address.
        Ipv6disabled = "ipv6disabled",
        /// An IPv6 extension header that is invalid or not accepted.
        Ipv6BadExthdr = "ipv6_bad_exthdr",
        /// A neighbour message that came in fragments, or with the header of one (RFC 6980).
        Ipv6NdiscFrag = "ipv6_ndisc_frag",
        /// A fragment of data that was already present.
        DupFrag = "dup_frag",
        /// Fragments of a datagram that overlap (RFC 5722).
        FragOverlap = "frag_overlap",
        /// A fragment with an invalid offset or length.
        FragInvalid = "frag_invalid",
        /// Too many fragments, or too large a datagram.
        FragTooFar = "frag_too_far",
        /// No memory for more incomplete datagrams.
        FragNomem = "frag_nomem",
        /// A datagram that was not complete in time.
        FragReasmTimeout = "frag_reasm_timeout",
        /// A wrong ICMP checksum.
        IcmpCsum = "icmp_csum",
        /// No frame for an answer, or for a private copy of a packet in shared memory.
        Nomem = "nomem",
        /// A wrong TCP checksum.
        TcpCsum = "tcp_csum",
        /// A wrong UDP checksum, or none over IPv6.
        UdpCsum = "udp_csum",
        /// Of another process, which has sockets at the same port, or of the kernel, whose sockets have the ports that are not
        /// taken.
        OtherProcess = "other_process",
        /// No socket is bound to the destination port.
        NoSocket = "no_socket",
        /// The socket's receive buffer was full.
        SocketRcvbuff = "socket_rcvbuff",
        /// The socket was closed while the datagram waited.
        SocketClose = "socket_close",
    }
}
