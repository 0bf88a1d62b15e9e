//! Reasons not to merge packets, and to flush merged ones: each has a name and a counter.

use crate::reasons;

reasons! {
    /// Reason why a packet was not merged. Those up to [`TableFull`](Self::TableFull) pass alone; those after
    /// it did not fit to what is held of their flow, which is let go, and begin anew.
    pub enum MergeRefusal {
        /// Merged before: on arrival, and then again on delivery.
        Merged = "merged",
        /// Come whole from the kernel, yet to be cut or merged by it already.
        WholeGso = "whole_gso",
        /// Without a flow hash: nobody could find what is held of its flow.
        NoHash = "no_hash",
        /// Neither TCP nor UDP over IPv4 or IPv6, perhaps in a tunnel, or behind SNAP; in `lro` mode, not TCP, or in a
        /// tunnel.
        Protocol = "protocol",
        /// Headers that lie.
        Flaw = "flaw",
        /// A capture cut it short.
        Snapped = "snapped",
        /// A piece of a datagram, or marked as one.
        Fragment = "fragment",
        /// IPv4 options, or the reserved bit.
        IpOptions = "ip_options",
        /// An IPv6 extension header other than hop-by-hop and destination options, headers of more than
        /// 128 bytes with those (256 with a tunnel's), or a jumbogram.
        Extension = "extension",
        /// A wrong IPv4 header checksum.
        IpChecksum = "ip_checksum",
        /// A wrong TCP or UDP checksum.
        L4Checksum = "l4_checksum",
        /// A checksum that nobody has verified.
        Unverified = "unverified",
        /// UDP without a checksum.
        NoChecksum = "no_checksum",
        /// A checksum that is right but not as anybody computes it: 0xffff where 0 is meant. It could
        /// not be given back.
        OddChecksum = "odd_checksum",
        /// SYN, RST, URG or CWR; in `lro` mode, all but ACK and PSH, and ACK must be there.
        TcpFlags = "tcp_flags",
        /// No payload: a pure acknowledgement, say. None may be lost, and there is nothing to merge.
        NoPayload = "no_payload",
        /// PSH or FIN on what would be a first segment: nothing may follow.
        Push = "push",
        /// In `lro` mode: the network has marked congestion, which is not to be lost among others.
        CongestionMark = "congestion_mark",
        /// In `lro` mode: TCP options other than timestamps.
        TcpOptions = "tcp_options",
        /// UDP whose length is not the IP packet's.
        UdpLength = "udp_length",
        /// UDP or a tunnel with padding behind it.
        Padded = "padded",
        /// A tunnel in a tunnel: as in the kernel, one is looked into.
        TunnelDepth = "tunnel_depth",
        /// A tunnel's header that says more than what is inside: GRE with a sequence number, routing or another
        /// version, GENEVE's control messages, VXLAN without a network, PPPoE's discovery.
        TunnelKind = "tunnel_kind",
        /// Headers of a tunnel, or those inside, that do not end where the frame does.
        TunnelLength = "tunnel_length",
        /// A wrong checksum of the UDP or GRE header outside.
        TunnelChecksum = "tunnel_checksum",
        /// No descriptor is free, and none has been idle for long enough.
        TableFull = "table_full",
        /// Another flow with the same hash.
        OtherFlow = "other_flow",
        /// Another link header: MAC addresses or VLAN tags.
        LinkHeader = "link_header",
        /// Another time to live, or hop limit.
        Ttl = "ttl",
        /// Another type of service, or traffic class.
        Tos = "tos",
        /// Another don't-fragment bit, flow label or extension header.
        IpHeader = "ip_header",
        /// Another tunnel: addresses, ports, network, key, session, options or flags outside.
        OtherTunnel = "other_tunnel",
        /// Another time to live, or hop limit, outside.
        OuterTtl = "outer_ttl",
        /// Another type of service, or traffic class, outside.
        OuterTos = "outer_tos",
        /// Another don't-fragment bit or flow label outside.
        OuterIpHeader = "outer_ip_header",
        /// An IPv4 id outside that neither stays nor goes up by one as those before.
        OuterIpId = "outer_ip_id",
        /// An IPv4 id that neither stays nor goes up by one as those before.
        IpId = "ip_id",
        /// Not the next sequence number.
        Sequence = "sequence",
        /// Another acknowledgement; in `lro` mode, an older one.
        Acknowledgement = "acknowledgement",
        /// Another window.
        Window = "window",
        /// Other TCP flags, PSH and FIN aside, or another urgent pointer.
        OtherFlags = "other_flags",
        /// Other TCP options; in `lro` mode, an older timestamp.
        OtherOptions = "other_options",
        /// More payload than the first segment.
        Larger = "larger",
        /// The packet would be longer than an IP packet can be.
        Size = "size",
        /// Recorded long after the segment before it.
        Gap = "gap",
        /// In pieces, where the first segment is in one frame: so that who looks at a merged packet's first
        /// frame knows whether any of it is. Or the headers in a tunnel are, and there is no room for them.
        InPieces = "in_pieces",
    }
}

reasons! {
    /// Reason why a packet that was held for more segments was flushed.
    pub enum FlushReason {
        /// The queue ran empty, or could not go on before this made room.
        PollEnd = "poll_end",
        /// Held for as long as may be.
        Timeout = "timeout",
        /// A packet of its flow came that could not be merged with it.
        Mismatch = "mismatch",
        /// The last segment had PSH or FIN set.
        Push = "push",
        /// The last segment was shorter than the others.
        Short = "short",
        /// No room for another segment.
        Size = "size",
        /// As many segments as may be.
        Count = "count",
        /// Idle, and another flow needed the descriptor.
        Evicted = "evicted",
        /// The settings changed.
        Switch = "switch",
        /// A flow is held to change its CPU.
        HeldMove = "held_move",
    }
}
