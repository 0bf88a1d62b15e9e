//! Reasons not to merge packets, and to flush merged ones: each has a name and a counter.

/// Reason why a packet was not merged. Those up to [`TableFull`](Self::TableFull) pass alone; those after
/// it did not fit to what is held of their flow, which is let go, and begin anew.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MergeRefusal {
    /// Merged before: on arrival, and then again on delivery.
    Merged,
    /// Come whole from the kernel, yet to be cut or merged by it already.
    WholeGso,
    /// Without a flow hash: nobody could find what is held of its flow.
    NoHash,
    /// Neither TCP nor UDP over IPv4 or IPv6, or behind SNAP; in `lro` mode, not TCP.
    Protocol,
    /// Headers that lie.
    Flaw,
    /// A capture cut it short.
    Snapped,
    /// A piece of a datagram, or marked as one.
    Fragment,
    /// IPv4 options, or the reserved bit.
    IpOptions,
    /// An IPv6 extension header other than hop-by-hop and destination options, headers of more than
    /// 128 bytes with those, or a jumbogram.
    Extension,
    /// A wrong IPv4 header checksum.
    IpChecksum,
    /// A wrong TCP or UDP checksum.
    L4Checksum,
    /// A checksum that nobody has verified.
    Unverified,
    /// UDP without a checksum.
    NoChecksum,
    /// A checksum that is right but not as anybody computes it: 0xffff where 0 is meant. It could
    /// not be given back.
    OddChecksum,
    /// SYN, RST, URG or CWR; in `lro` mode, all but ACK and PSH, and ACK must be there.
    TcpFlags,
    /// No payload: a pure acknowledgement, say. None may be lost, and there is nothing to merge.
    NoPayload,
    /// PSH or FIN on what would be a first segment: nothing may follow.
    Push,
    /// In `lro` mode: the network has marked congestion, which is not to be lost among others.
    CongestionMark,
    /// In `lro` mode: TCP options other than timestamps.
    TcpOptions,
    /// UDP whose length is not the IP packet's.
    UdpLength,
    /// UDP with padding behind it.
    Padded,
    /// No descriptor is free, and none has been idle for long enough.
    TableFull,
    /// Another flow with the same hash.
    OtherFlow,
    /// Another link header: MAC addresses or VLAN tags.
    LinkHeader,
    /// Another time to live, or hop limit.
    Ttl,
    /// Another type of service, or traffic class.
    Tos,
    /// Another don't-fragment bit, flow label or extension header.
    IpHeader,
    /// An IPv4 id that neither stays nor goes up by one as those before.
    IpId,
    /// Not the next sequence number.
    Sequence,
    /// Another acknowledgement; in `lro` mode, an older one.
    Acknowledgement,
    /// Another window.
    Window,
    /// Other TCP flags, PSH and FIN aside, or another urgent pointer.
    OtherFlags,
    /// Other TCP options; in `lro` mode, an older timestamp.
    OtherOptions,
    /// More payload than the first segment.
    Larger,
    /// The packet would be longer than an IP packet can be.
    Size,
    /// Recorded long after the segment before it.
    Gap,
    /// In pieces, where the first segment is in one frame: so that who looks at a merged packet's first
    /// frame knows whether any of it is.
    InPieces,
}

impl MergeRefusal {
    /// Every refusal, at its index.
    pub const ALL: [Self; 37] = [
        Self::Merged,
        Self::WholeGso,
        Self::NoHash,
        Self::Protocol,
        Self::Flaw,
        Self::Snapped,
        Self::Fragment,
        Self::IpOptions,
        Self::Extension,
        Self::IpChecksum,
        Self::L4Checksum,
        Self::Unverified,
        Self::NoChecksum,
        Self::OddChecksum,
        Self::TcpFlags,
        Self::NoPayload,
        Self::Push,
        Self::CongestionMark,
        Self::TcpOptions,
        Self::UdpLength,
        Self::Padded,
        Self::TableFull,
        Self::OtherFlow,
        Self::LinkHeader,
        Self::Ttl,
        Self::Tos,
        Self::IpHeader,
        Self::IpId,
        Self::Sequence,
        Self::Acknowledgement,
        Self::Window,
        Self::OtherFlags,
        Self::OtherOptions,
        Self::Larger,
        Self::Size,
        Self::Gap,
        Self::InPieces,
    ];

    /// The name in counters.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Merged => "merged",
            Self::WholeGso => "whole_gso",
            Self::NoHash => "no_hash",
            Self::Protocol => "protocol",
            Self::Flaw => "flaw",
            Self::Snapped => "snapped",
            Self::Fragment => "fragment",
            Self::IpOptions => "ip_options",
            Self::Extension => "extension",
            Self::IpChecksum => "ip_checksum",
            Self::L4Checksum => "l4_checksum",
            Self::Unverified => "unverified",
            Self::NoChecksum => "no_checksum",
            Self::OddChecksum => "odd_checksum",
            Self::TcpFlags => "tcp_flags",
            Self::NoPayload => "no_payload",
            Self::Push => "push",
            Self::CongestionMark => "congestion_mark",
            Self::TcpOptions => "tcp_options",
            Self::UdpLength => "udp_length",
            Self::Padded => "padded",
            Self::TableFull => "table_full",
            Self::OtherFlow => "other_flow",
            Self::LinkHeader => "link_header",
            Self::Ttl => "ttl",
            Self::Tos => "tos",
            Self::IpHeader => "ip_header",
            Self::IpId => "ip_id",
            Self::Sequence => "sequence",
            Self::Acknowledgement => "acknowledgement",
            Self::Window => "window",
            Self::OtherFlags => "other_flags",
            Self::OtherOptions => "other_options",
            Self::Larger => "larger",
            Self::Size => "size",
            Self::Gap => "gap",
            Self::InPieces => "in_pieces",
        }
    }

    /// The place in [`ALL`](Self::ALL).
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// Reason why a packet that was held for more segments was flushed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FlushReason {
    /// The queue ran empty, or could not go on before this made room.
    PollEnd,
    /// Held for as long as may be.
    Timeout,
    /// A packet of its flow came that could not be merged with it.
    Mismatch,
    /// The last segment had PSH or FIN set.
    Push,
    /// The last segment was shorter than the others.
    Short,
    /// No room for another segment.
    Size,
    /// As many segments as may be.
    Count,
    /// Idle, and another flow needed the descriptor.
    Evicted,
    /// The settings changed.
    Switch,
    /// A flow is held to change its CPU.
    HeldMove,
}

impl FlushReason {
    /// Every reason, at its index.
    pub const ALL: [Self; 10] = [
        Self::PollEnd,
        Self::Timeout,
        Self::Mismatch,
        Self::Push,
        Self::Short,
        Self::Size,
        Self::Count,
        Self::Evicted,
        Self::Switch,
        Self::HeldMove,
    ];

    /// The name in counters.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PollEnd => "poll_end",
            Self::Timeout => "timeout",
            Self::Mismatch => "mismatch",
            Self::Push => "push",
            Self::Short => "short",
            Self::Size => "size",
            Self::Count => "count",
            Self::Evicted => "evicted",
            Self::Switch => "switch",
            Self::HeldMove => "held_move",
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
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_verdict_stands_at_its_index_with_a_name_of_its_own() {
        for (index, refusal) in MergeRefusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal.index(), index);
        }
        for (index, reason) in FlushReason::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), index);
        }
        let names: BTreeSet<_> = MergeRefusal::ALL.map(MergeRefusal::name).into();
        assert_eq!(names.len(), MergeRefusal::ALL.len());
        let names: BTreeSet<_> = FlushReason::ALL.map(FlushReason::name).into();
        assert_eq!(names.len(), FlushReason::ALL.len());
    }
}
