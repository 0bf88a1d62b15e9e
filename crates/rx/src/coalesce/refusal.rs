//! Reasons not to merge packets, and to flush merged ones: each has a name and a counter.

use crate::reasons;

reasons! {
    /// Reason why a packet was not merged. Up to [`TableFull`](Self::TableFull), the packet passes
    /// alone; after it, the packet did not fit the held packet of its flow, which is flushed, and
    /// begins a new one.
    pub enum MergeRefusal {
        /// Already merged: on arrival, before coalescing on delivery.
        Merged = "merged",
        /// GSO packet from the kernel, not cut yet, or merged by the kernel.
        WholeGso = "whole_gso",
        /// No flow hash, by which the held packet of the flow would be found.
        NoHash = "no_hash",
        /// Neither TCP nor UDP over IPv4 or IPv6, perhaps in a tunnel, or behind SNAP; in `lro` mode, not TCP, or in a
        /// tunnel.
        Protocol = "protocol",
        /// Inconsistent headers ([`Flaw`](crate::parse::Flaw)).
        Flaw = "flaw",
        /// Truncated by a capture.
        Snapped = "snapped",
        /// Fragment of a datagram, or marked as one.
        Fragment = "fragment",
        /// IPv4 options, or the reserved bit.
        IpOptions = "ip_options",
        /// An IPv6 extension header other than options and a routing header without segments left,
        /// headers of more than 128 bytes with those (256 with a tunnel's), or a jumbogram.
        Extension = "extension",
        /// A wrong IPv4 header checksum.
        IpChecksum = "ip_checksum",
        /// A wrong TCP or UDP checksum.
        L4Checksum = "l4_checksum",
        /// Checksum that has not been verified.
        Unverified = "unverified",
        /// UDP without a checksum.
        NoChecksum = "no_checksum",
        /// Valid but non-canonical checksum: 0xffff, where 0 is computed, so that it could not be
        /// restored.
        OddChecksum = "odd_checksum",
        /// SYN, RST, URG or CWR; in `lro` mode, all but ACK and PSH, and ACK must be there.
        TcpFlags = "tcp_flags",
        /// No payload, as in a pure acknowledgement: none may be lost, and there is nothing to
        /// merge.
        NoPayload = "no_payload",
        /// PSH or FIN on a possible first segment, which nothing may follow.
        Push = "push",
        /// In `lro` mode: congestion mark (CE), which merging would hide.
        CongestionMark = "congestion_mark",
        /// In `lro` mode: TCP options other than timestamps.
        TcpOptions = "tcp_options",
        /// UDP length that does not match the IP packet's.
        UdpLength = "udp_length",
        /// UDP datagram or tunnel followed by padding.
        Padded = "padded",
        /// Tunnel in a tunnel: as in the kernel, one is looked into.
        TunnelDepth = "tunnel_depth",
        /// Tunnel header with more than a payload: GRE with a sequence number, routing or another version,
        /// control messages of GENEVE, VXLAN without a network identifier, discovery of PPPoE.
        TunnelKind = "tunnel_kind",
        /// Outer or inner headers whose lengths do not end where the frame does.
        TunnelLength = "tunnel_length",
        /// Wrong checksum of the outer UDP or GRE header.
        TunnelChecksum = "tunnel_checksum",
        /// No descriptor that is free or has been idle for long enough.
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
        /// Other outer addresses, ports, network, key, session, options or flags.
        OtherTunnel = "other_tunnel",
        /// Other outer time to live, or hop limit.
        OuterTtl = "outer_ttl",
        /// Other outer type of service, or traffic class.
        OuterTos = "outer_tos",
        /// Other outer don't-fragment bit or flow label.
        OuterIpHeader = "outer_ip_header",
        /// Outer IPv4 id that does not continue the pattern of those before.
        OuterIpId = "outer_ip_id",
        /// IPv4 id that does not continue the pattern of those before: all equal, or increasing by
        /// one.
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
        /// More payload than fits into an IP packet of maximum length.
        Size = "size",
        /// Timestamp more than 50 ms from the previous segment's.
        Gap = "gap",
        /// Nonlinear, while the first segment is linear: the first frame of a merged packet must
        /// tell if any of it is nonlinear. Or the inner headers are
        /// nonlinear, and there is no room to pull them in.
        InPieces = "in_pieces",
    }
}

reasons! {
    /// Reason why a packet that was held for more segments was flushed.
    pub enum FlushReason {
        /// Queue empty, or unable to continue until frames are freed.
        PollEnd = "poll_end",
        /// Held for the maximum time.
        Timeout = "timeout",
        /// Arrival of a packet of the flow that could not be merged.
        Mismatch = "mismatch",
        /// PSH or FIN on the last segment.
        Push = "push",
        /// Last segment shorter than the others.
        Short = "short",
        /// No room for another segment.
        Size = "size",
        /// Maximum number of segments.
        Count = "count",
        /// Idle, while another flow needed the descriptor.
        Evicted = "evicted",
        /// Change of the settings.
        Switch = "switch",
        /// Flow held to change its CPU.
        HeldMove = "held_move",
    }
}
