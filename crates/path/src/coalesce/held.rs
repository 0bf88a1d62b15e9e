//! A packet that is held for more segments, and what may be added to it.

use super::CoalesceMode;
use super::candidate::{Candidate, FIN, PSH};
use super::compare::{difference, same_headers};
use super::header::{HeaderBytes, ipv4_id};
use super::lro::Newest;
use super::refusal::{FlushReason, Refusal};
use super::segments::tag;
use super::sums::SegmentSums;
use crate::hash::FlowHash;
use crate::packet::Packet;
use crate::parse::{Checksum, Network, Transport};

/// The longest IP packet, headers included: the kernel's `GRO_LEGACY_MAX_SIZE`.
const IP_PACKET_BYTES_MAX: u32 = 65_535;

/// The most segments in a packet of TCP. Bytes are the limit of all but the smallest segments;
/// this one is on the memory that a packet of those can hold.
pub const TCP_SEGMENTS_MAX: u32 = 512;

/// The most datagrams in a packet of UDP: the kernel's `UDP_GRO_CNT_MAX`.
pub const UDP_SEGMENTS_MAX: u32 = 64;

/// Segments recorded further apart did not arrive in one poll, however fast they are replayed.
const GAP_NS: u64 = 10_000_000;

/// What a further segment is held against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) mode: CoalesceMode,
    /// The longest IP packet that the device receives.
    pub(super) mtu: u32,
}

/// A first segment, and those behind it. Its headers stay as they came until it is let go.
#[derive(Debug)]
pub(super) struct Held {
    packet: Packet,
    /// The engine's time when it was first held.
    since_ns: u64,
    /// The order in which packets were first held.
    born: u32,
    /// Of all segments.
    payload_len: u32,
    next_sequence: u32,
    /// PSH and FIN of the latest segment.
    flags: u8,
    ids: Ids,
    newest: Newest,
    sums: SegmentSums,
}

/// How IPv4 ids go on: the second segment decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ids {
    Undecided,
    Fixed,
    Rising,
}

impl Held {
    /// Begins with a candidate that does not end.
    pub(super) fn begin(
        packet: Packet,
        candidate: &Candidate,
        mode: CoalesceMode,
        since_ns: u64,
        born: u32,
    ) -> Self {
        let newest = Newest::of(&packet, mode);
        Self {
            since_ns,
            born,
            payload_len: candidate.payload_len,
            next_sequence: candidate.sequence.wrapping_add(candidate.payload_len),
            flags: 0,
            ids: Ids::Undecided,
            newest,
            sums: SegmentSums::default(),
            packet,
        }
    }

    pub(super) fn hash(&self) -> FlowHash {
        self.packet.hash
    }

    pub(super) fn since_ns(&self) -> u64 {
        self.since_ns
    }

    /// A number that rises with every packet that is first held, modulo 2^32.
    pub(super) fn born(&self) -> u32 {
        self.born
    }

    /// Whether these addresses are the packet's, source and destination.
    pub(super) fn has_addresses(&self, addresses: &[u8]) -> bool {
        self.packet.view().address_bytes() == Some(addresses)
    }

    /// Whether `packet` can be added: as the next segment, with headers that differ only in what
    /// can be told again from the whole.
    pub(super) fn fits(
        &self,
        packet: &Packet,
        candidate: &Candidate,
        rules: Rules,
    ) -> Result<Ids, Refusal> {
        if !same_headers(&self.packet, packet, rules.mode) {
            return Err(difference(&self.packet, packet, rules.mode));
        }
        if candidate.sequence != self.next_sequence && packet.headers.transport == Transport::Tcp {
            return Err(Refusal::Sequence);
        }
        let size = self.first_len();
        if candidate.payload_len > size {
            return Err(Refusal::Larger);
        }
        if self.ip_len(candidate.header_len) + candidate.payload_len > IP_PACKET_BYTES_MAX {
            return Err(Refusal::Size);
        }
        let (first, next) = (self.packet.timestamp_ns, packet.timestamp_ns);
        if first.abs_diff(next) > GAP_NS && first != 0 && next != 0 {
            return Err(Refusal::Gap);
        }
        match rules.mode {
            CoalesceMode::Gro => self.next_ids(packet),
            CoalesceMode::Lro => {
                self.newest.advances_to(&Newest::of(packet, rules.mode)).map(|()| Ids::Undecided)
            }
        }
    }

    /// Adds a packet that fits. Returns why nothing more can be added, if so.
    pub(super) fn add(
        &mut self,
        mut packet: Packet,
        candidate: &Candidate,
        ids: Ids,
        rules: Rules,
    ) -> Option<FlushReason> {
        let transport = packet.headers.transport;
        self.ids = ids;
        self.newest = Newest::of(&packet, rules.mode);
        self.sums.add(&packet, candidate, self.payload_len, rules.mode);
        tag(&mut packet, candidate.header_len);
        self.packet.frame.append(packet.frame);
        self.payload_len += candidate.payload_len;
        self.next_sequence = self.next_sequence.wrapping_add(candidate.payload_len);
        self.flags = candidate.flags & (PSH | FIN);
        let segments = self.packet.segment_count();
        if candidate.ends() {
            Some(FlushReason::Push)
        } else if candidate.payload_len < self.first_len() {
            Some(FlushReason::Short)
        } else if transport == Transport::Udp && segments >= UDP_SEGMENTS_MAX
            || segments >= TCP_SEGMENTS_MAX
        {
            Some(FlushReason::Count)
        } else {
            self.is_full(candidate.header_len, rules).then_some(FlushReason::Size)
        }
    }

    /// Ends here: a packet of one segment is as it came; one of several gets the headers of a
    /// whole, with right checksums.
    pub(super) fn finish(self, mode: CoalesceMode) -> Packet {
        let Self { mut packet, payload_len, flags, newest, sums, .. } = self;
        if packet.frame.follower_count() == 0 {
            return packet;
        }
        let headers = packet.headers;
        packet.gso_size = headers.payload_len;
        let payload_sum = sums.payloads(&packet, mode);
        let mut header = HeaderBytes::new(packet.frame.data_mut(), &headers);
        header.set_lengths(payload_len, None);
        if headers.transport == Transport::Tcp {
            header.set_flags(PSH | FIN, flags);
            if mode == CoalesceMode::Lro {
                header.set_newest(&newest);
            }
        }
        header.set_checksum(payload_len, payload_sum);
        // What the device said of the first segment is stale now (LRO-1).
        packet.device_sum = None;
        packet.headers.ip_checksum = match headers.network {
            Network::Ipv4 => Checksum::Good,
            _ => headers.ip_checksum,
        };
        packet.headers.payload_len = u16::try_from(payload_len).unwrap_or(u16::MAX);
        packet.wire_len = u32::from(headers.payload_offset) + payload_len;
        packet
    }

    /// The payload of the first segment, which no other exceeds.
    fn first_len(&self) -> u32 {
        self.packet.headers.payload_len.into()
    }

    /// How long the IP packet is so far.
    fn ip_len(&self, header_len: usize) -> u32 {
        let before = usize::from(self.packet.headers.network_offset);
        u32::try_from(header_len - before).unwrap_or(u32::MAX) + self.payload_len
    }

    /// Whether there is no room for another segment. In `lro` mode that is for one as large as any
    /// before, or as the device's MTU allows (LRO-7); not for the largest that a device with a
    /// larger MTU than the sender's could get (LRO-6). In `gro` mode the last one may be shorter
    /// and still fit, so the next one itself is asked.
    fn is_full(&self, header_len: usize, rules: Rules) -> bool {
        let so_far = self.ip_len(header_len);
        match rules.mode {
            CoalesceMode::Gro => so_far >= IP_PACKET_BYTES_MAX,
            CoalesceMode::Lro => {
                let next = (so_far - self.payload_len + self.first_len()).min(rules.mtu);
                so_far + next > IP_PACKET_BYTES_MAX
            }
        }
    }

    fn next_ids(&self, packet: &Packet) -> Result<Ids, Refusal> {
        let headers = &packet.headers;
        let (Some(first), Some(id)) =
            (ipv4_id(self.packet.frame.data(), headers), ipv4_id(packet.frame.data(), headers))
        else {
            return Ok(Ids::Fixed); // IPv6 has none
        };
        let ahead = id.wrapping_sub(first);
        let is_rising = u32::from(ahead) == self.packet.segment_count();
        match self.ids {
            Ids::Undecided | Ids::Fixed if ahead == 0 => Ok(Ids::Fixed),
            Ids::Undecided | Ids::Rising if is_rising => Ok(Ids::Rising),
            _ => Err(Refusal::IpId),
        }
    }
}
