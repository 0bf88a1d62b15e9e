//! A received segment: header fields and options, checked.

use forebay_rx::packet::Packet;

use super::super::fast_open::CookieOption;
use super::super::seq::{Seq, len_u32};
use super::options::{self, Options};

/// Header without options, in bytes.
pub(in crate::tcp) const HEADER_BYTES: usize = 20;
/// ECN field of an IP header: congestion experienced.
const CE: u8 = 3;

/// Bits between the header's length and the flags.
const RESERVED: u8 = 0x0f;

/// Control bits of a header.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::tcp) struct Flags(pub(in crate::tcp) u8);

impl Flags {
    pub(in crate::tcp) const FIN: Self = Self(0x01);
    pub(in crate::tcp) const SYN: Self = Self(0x02);
    pub(in crate::tcp) const RST: Self = Self(0x04);
    pub(in crate::tcp) const PSH: Self = Self(0x08);
    pub(in crate::tcp) const ACK: Self = Self(0x10);
    pub(in crate::tcp) const URG: Self = Self(0x20);
    pub(in crate::tcp) const ECE: Self = Self(0x40);
    pub(in crate::tcp) const CWR: Self = Self(0x80);

    /// True if all bits of `other` are set.
    pub(in crate::tcp) fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Union with `other`.
    pub(in crate::tcp) fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A received segment without its payload. One of a merged packet stands for all that were merged.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct Segment {
    pub(in crate::tcp) seq: Seq,
    pub(in crate::tcp) ack: Seq,
    pub(in crate::tcp) flags: Flags,
    /// True if one of the other bits beside the flags is set (AE of RFC 9768, or a reserved one).
    pub(in crate::tcp) has_reserved: bool,
    /// Window as it was sent, not scaled.
    pub(in crate::tcp) window: u16,
    pub(in crate::tcp) urgent: u16,
    pub(in crate::tcp) payload_len: u32,
    pub(in crate::tcp) options: Options,
    /// Length of the options, in bytes.
    pub(in crate::tcp) options_len: u32,
    /// True if the options are timestamps alone, padded as Linux does.
    pub(in crate::tcp) has_aligned_timestamps: bool,
    /// DSCP and ECN field of the IP header.
    pub(in crate::tcp) tos: u8,
    /// Payload length of the largest of the segments that were merged; else that of this one.
    pub(in crate::tcp) segment_len: u32,
}

impl Segment {
    /// Reads the header of a packet whose offsets and lengths were checked by the network layer;
    /// `None` if it is impossible.
    pub(in crate::tcp) fn of(packet: &Packet) -> Option<Self> {
        let headers = &packet.headers;
        let bytes = packet.frame.data();
        let header = bytes.get(usize::from(headers.transport_offset)..)?;
        let &[_, _, _, _, s0, s1, s2, s3, a0, a1, a2, a3, offset, flags, w0, w1, _, _, u0, u1] =
            header.first_chunk::<HEADER_BYTES>()?;
        let header_len = usize::from(offset >> 4) * 4;
        let options = header.get(HEADER_BYTES..header_len)?;
        let before = usize::from(headers.transport_offset).checked_add(header_len)?;
        let len = packet.fragments().map(<[u8]>::len).sum::<usize>();
        let payload_len = len_u32(len.checked_sub(before)?);
        let flags = Flags(flags);
        let gso_size = u32::from(packet.gso_size());
        Some(Self {
            seq: Seq(u32::from_be_bytes([s0, s1, s2, s3])),
            ack: Seq(u32::from_be_bytes([a0, a1, a2, a3])),
            flags,
            has_reserved: offset & RESERVED != 0,
            window: u16::from_be_bytes([w0, w1]),
            urgent: u16::from_be_bytes([u0, u1]),
            payload_len,
            options: options::parse(options, flags.has(Flags::SYN)),
            options_len: len_u32(options.len()),
            has_aligned_timestamps: options::are_aligned_timestamps(options),
            tos: packet.view().traffic_class().unwrap_or(0),
            segment_len: if gso_size > 0 { gso_size.min(payload_len) } else { payload_len },
        })
    }

    /// Fast Open option of the header, which only a SYN has.
    pub(in crate::tcp) fn fast_open_of(packet: &Packet) -> Option<CookieOption> {
        let header = packet.frame.data().get(usize::from(packet.headers.transport_offset)..)?;
        let header_len = usize::from(header.get(12)? >> 4) * 4;
        options::parse_fast_open(header.get(HEADER_BYTES..header_len)?)
    }

    /// ECN field of the IP header.
    pub(in crate::tcp) fn ecn(&self) -> u8 {
        self.tos & CE
    }

    /// DSCP of the IP header, in its place.
    pub(in crate::tcp) fn dscp(&self) -> u8 {
        self.tos & !CE
    }

    /// True if the packet is capable of ECN.
    pub(in crate::tcp) fn is_capable(&self) -> bool {
        self.ecn() != 0
    }

    /// True if a router marked the packet.
    pub(in crate::tcp) fn is_marked(&self) -> bool {
        self.ecn() == CE
    }

    pub(in crate::tcp) fn has(&self, flags: Flags) -> bool {
        self.flags.has(flags)
    }

    /// Sequence numbers that the segment takes: those of its payload, of SYN and of FIN.
    pub(in crate::tcp) fn len(&self) -> u32 {
        self.payload_len + u32::from(self.has(Flags::SYN)) + u32::from(self.has(Flags::FIN))
    }

    /// True of data or a FIN without a SYN: such a segment is not part of a loop of ACKs, and its answer has no
    /// limit (`tcp_oow_rate_limited`).
    pub(in crate::tcp) fn carries_data(&self) -> bool {
        self.len() > 0 && !self.has(Flags::SYN)
    }

    /// First sequence number after the segment.
    pub(in crate::tcp) fn end(&self) -> Seq {
        self.seq + self.len()
    }
}
