//! Held packets, and the conditions for adding a segment.

use super::CoalesceMode;
use super::candidate::{Candidate, ends_with_ip};
use super::compare::{HeaderMask, Own, difference, own_fields};
use super::header::HeaderBytes;
use super::lro::Newest;
use super::refusal::{FlushReason, MergeRefusal};
use super::segments::tag;
use super::sums::SegmentSums;
use super::tunnel::{self, OuterLayers, Tunnel};
use super::wire::{FIN, PSH};
use crate::hash::FlowHash;
use crate::packet::Packet;
use crate::parse::{Checksum, Network, Transport};

/// Maximum length of an IP packet in bytes, headers included: the kernel's `GRO_LEGACY_MAX_SIZE`.
const IP_PACKET_BYTES_MAX: u32 = 65_535;

/// Maximum number of segments in a TCP packet. The length is the limit for all but the smallest
/// segments; for those, this number bounds the memory that a packet can hold.
pub const TCP_SEGMENTS_MAX: u32 = 512;

/// Maximum number of datagrams in a UDP packet: the kernel's `UDP_GRO_CNT_MAX`.
pub const UDP_SEGMENTS_MAX: u32 = 64;

/// Maximum time between the timestamps of segments, in ns. Segments recorded further apart did not
/// arrive in one poll, however fast they are replayed. Longer than the pauses that scripts leave
/// between the packets of a capture.
const GAP_NS: u64 = 50_000_000;

const _: () = assert!(TCP_SEGMENTS_MAX <= u16::MAX as u32, "frames are counted in 16 bits");
const _: () = assert!(UDP_SEGMENTS_MAX <= TCP_SEGMENTS_MAX, "frames are counted in 16 bits");
const _: () = assert!(IP_PACKET_BYTES_MAX <= u16::MAX as u32, "an IP length field has 16 bits");

/// Rules for adding a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergeRules {
    pub(super) mode: CoalesceMode,
    /// Longest IP packet that the device receives, in bytes.
    pub(super) mtu: u32,
}

/// First segment, with the others chained behind it. Its headers stay as received until the packet
/// is flushed.
#[derive(Debug)]
pub(super) struct HeldPacket {
    packet: Packet,
    /// Timestamp of the latest segment, in ns.
    latest_ns: u64,
    /// Engine time at which the packet was first held, in ns.
    since_ns: u64,
    /// Number of the packet in the order in which packets were first held.
    born: u32,
    /// Payload length of all segments together.
    payload_len: u32,
    /// Number of bytes by which the IP packet may still grow.
    room: u32,
    /// Number of segments that may still be added.
    segments_left: u32,
    next_sequence: u32,
    /// PSH and FIN of the latest segment.
    flags: u8,
    ids: Ids,
    newest: Newest,
    sums: SegmentSums,
    /// Headers outside those of the packet, and the progress of their ids.
    tunnel: Option<(Tunnel, Ids)>,
}

/// Progress of IPv4 ids, decided by the second segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ids {
    Undecided,
    Fixed,
    Rising,
}

impl HeldPacket {
    /// Begins with a candidate that segments may follow.
    pub(super) fn begin(
        packet: Packet,
        tunnel: Option<Tunnel>,
        candidate: &Candidate,
        mode: CoalesceMode,
        since_ns: u64,
        born: u32,
    ) -> Self {
        debug_assert!(!candidate.ends(), "no segment may follow PSH or FIN");
        debug_assert!(candidate.payload_len > 0, "no segment continues one without payload");
        debug_assert_eq!(packet.frame.follower_count(), 0, "a merged packet is not merged again");
        let headers = &packet.headers;
        let counted_from = tunnel.and_then(|tunnel| tunnel.layers.counted_from());
        let counted_from = counted_from.unwrap_or(headers.network_offset.into());
        let ip_len = u32::from(headers.payload_offset) + candidate.payload_len
            - u32::try_from(counted_from).unwrap_or(0);
        let is_tcp = headers.transport == Transport::Tcp;
        let segments_max = if is_tcp { TCP_SEGMENTS_MAX } else { UDP_SEGMENTS_MAX };
        let newest = Newest::of(&packet, mode);
        Self {
            latest_ns: packet.timestamp_ns,
            since_ns,
            born,
            payload_len: candidate.payload_len,
            room: IP_PACKET_BYTES_MAX.saturating_sub(ip_len),
            segments_left: segments_max - 1,
            next_sequence: candidate.own.sequence.wrapping_add(candidate.payload_len),
            flags: 0,
            ids: Ids::Undecided,
            newest,
            sums: SegmentSums::begin(&packet, &candidate.own, mode),
            tunnel: tunnel.map(|tunnel| (tunnel, Ids::Undecided)),
            packet,
        }
    }

    /// First segment.
    pub(super) fn first(&self) -> &Packet {
        &self.packet
    }

    /// Layers outside its headers.
    pub(super) fn layers(&self) -> OuterLayers {
        self.tunnel.map_or(OuterLayers::default(), |(tunnel, _)| tunnel.layers)
    }

    /// Addresses of the outermost IP header.
    pub(super) fn addresses(&self) -> Option<&[u8]> {
        match &self.tunnel {
            None => self.packet.view().address_bytes(),
            Some((tunnel, _)) => tunnel.addresses(self.packet.frame.data(), &self.packet.headers),
        }
    }

    pub(super) fn hash(&self) -> FlowHash {
        self.packet.hash
    }

    pub(super) fn since_ns(&self) -> u64 {
        self.since_ns
    }

    /// Number in the order in which packets were first held, modulo 2^32.
    pub(super) fn born(&self) -> u32 {
        self.born
    }

    /// Contribution of `packet` if it is the next segment, and if its headers differ only in fields
    /// that can be restored from the merged packet. One comparison replaces the
    /// [examination](super::candidate) of the packet: all that its headers share with the first
    /// segment's has been examined there.
    #[inline(always)]
    pub(super) fn next(
        &self,
        packet: &Packet,
        mask: &HeaderMask,
        rules: MergeRules,
    ) -> Option<NextSegment> {
        let headers = &packet.headers;
        let payload_len = u32::from(headers.payload_len);
        let is_whole = headers.flaw.is_none()
            && headers.l4_checksum == Checksum::Good
            && packet.gso_size() == 0
            && (packet.wire_len == packet.frame.len_bytes()
                || self.packet.is_nonlinear() && packet.wire_len == packet.frame.total_len_bytes());
        // Truncated, unverified, GSO and empty packets pass alone; only the last segment may be
        // shorter, and none longer, so that one `gso_size` describes all.
        if !is_whole || payload_len == 0 || payload_len > self.first_len() {
            return None;
        }
        let own = own_fields(&self.packet, packet, mask)?;
        let ids = match rules.mode {
            CoalesceMode::Gro => self.ids.after(own.id_ahead, self.segments())?,
            CoalesceMode::Lro => self.lro_difference(packet).is_none().then_some(Ids::Undecided)?,
        };
        let is_next = match self.packet.headers.transport {
            Transport::Tcp => own.sequence == self.next_sequence,
            _ => ends_with_ip(packet).is_ok(),
        };
        let fits = payload_len <= self.room && !self.is_gap(packet);
        (is_next && fits).then_some(NextSegment { payload_len, own, ids })
    }

    /// Progress of the ids outside with a packet in a tunnel, which is the [next](Self::next) segment by the
    /// headers inside; `None` if it is in another tunnel.
    fn next_outside(&self, packet: &Packet, other: &Tunnel) -> Option<Ids> {
        let (tunnel, ids) = self.tunnel?;
        if tunnel.layers != other.layers {
            return None;
        }
        let (first, next) = (tunnel.id(self.packet.frame.data()), tunnel.id(packet.frame.data()));
        match (first, next) {
            (Some(first), Some(next)) => ids.after(next.wrapping_sub(first), self.segments()),
            _ => Some(ids),
        }
    }

    /// Goes on with the ids outside by a [next](Self::next_outside) packet; false if it is in another tunnel. A
    /// plain packet, whose headers agree, is in none.
    #[inline(always)]
    pub(super) fn goes_on_outside(&mut self, packet: &Packet, other: Option<&Tunnel>) -> bool {
        let Some(other) = other else { return true };
        let next = self.next_outside(packet, other);
        if let (Some((_, ids)), Some(next)) = (&mut self.tunnel, next) {
            *ids = next;
        }
        next.is_some()
    }

    /// First condition that keeps a mergeable packet from being the next segment: the slow twin of
    /// [`next`](Self::next).
    #[cold]
    pub(super) fn refusal(
        &self,
        packet: &Packet,
        tunnel: Option<&Tunnel>,
        candidate: &Candidate,
        mask: &HeaderMask,
        rules: MergeRules,
    ) -> MergeRefusal {
        let layers = tunnel.map_or(OuterLayers::default(), |tunnel| tunnel.layers);
        if let Some(refusal) = self.difference_outside(packet, &layers) {
            return refusal;
        }
        if own_fields(&self.packet, packet, mask).is_none() {
            return difference(&self.packet, packet, tunnel.is_some(), rules.mode);
        }
        if packet.is_nonlinear() && !self.packet.is_nonlinear() {
            return MergeRefusal::InPieces;
        }
        let is_tcp = packet.headers.transport == Transport::Tcp;
        if is_tcp && candidate.own.sequence != self.next_sequence {
            MergeRefusal::Sequence
        } else if candidate.payload_len > self.first_len() {
            MergeRefusal::Larger
        } else if candidate.payload_len > self.room {
            MergeRefusal::Size
        } else if self.is_gap(packet) {
            MergeRefusal::Gap
        } else {
            let advanced = (rules.mode == CoalesceMode::Lro).then(|| self.lro_difference(packet));
            let is_outside =
                tunnel.is_some_and(|tunnel| self.next_outside(packet, tunnel).is_none());
            let id = if is_outside { MergeRefusal::OuterIpId } else { MergeRefusal::IpId };
            advanced.flatten().unwrap_or(id)
        }
    }

    /// The first difference outside the headers that a packet is merged by.
    fn difference_outside(&self, packet: &Packet, layers: &OuterLayers) -> Option<MergeRefusal> {
        let own = self.layers();
        if own == OuterLayers::default() && *layers == own {
            return None;
        }
        tunnel::difference((&self.packet, &own), (packet, layers))
    }

    /// Adds the next segment. Returns the reason to flush if nothing more can be added.
    #[inline(always)]
    pub(super) fn add(
        &mut self,
        mut packet: Packet,
        next: NextSegment,
        rules: MergeRules,
    ) -> Option<FlushReason> {
        let NextSegment { payload_len, own, ids } = next;
        debug_assert!(self.flags == 0, "nothing is added behind PSH or FIN");
        debug_assert!(payload_len <= self.first_len(), "a segment longer than the first");
        debug_assert!(
            payload_len <= self.room && self.segments_left > 0,
            "a packet beyond its limits"
        );
        self.ids = ids;
        self.latest_ns = packet.timestamp_ns;
        if rules.mode == CoalesceMode::Lro {
            self.newest = Newest::of(&packet, rules.mode);
        }
        self.sums.add(&packet, &own, self.payload_len, rules.mode);
        tag(&mut packet);
        self.packet.frame.append(packet.frame);
        self.payload_len += payload_len;
        self.next_sequence = self.next_sequence.wrapping_add(payload_len);
        self.flags = own.flags & (PSH | FIN);
        self.room -= payload_len;
        self.segments_left -= 1;
        if self.flags != 0 {
            Some(FlushReason::Push)
        } else if payload_len < self.first_len() {
            Some(FlushReason::Short)
        } else if self.segments_left == 0 {
            Some(FlushReason::Count)
        } else {
            self.is_full(rules).then_some(FlushReason::Size)
        }
    }

    /// Returns the packet. A single segment is unchanged; a merged packet gets headers for the
    /// whole, with correct checksums.
    pub(super) fn finish(self, mode: CoalesceMode) -> Packet {
        let Self { mut packet, payload_len, flags, newest, sums, tunnel, .. } = self;
        if packet.frame.follower_count() == 0 {
            if let Some((tunnel, _)) = tunnel {
                packet.headers = tunnel.outer;
            }
            return packet;
        }
        let headers = packet.headers;
        debug_assert!(
            u32::from(headers.payload_len) < payload_len && payload_len < IP_PACKET_BYTES_MAX,
            "a merged packet has the payload of several segments, and fits an IP packet"
        );
        packet.set_gso_size(headers.payload_len);
        let payload_sum = sums.payloads(&packet, payload_len, flags, mode);
        let mut header = HeaderBytes::new(packet.frame.data_mut(), &headers);
        header.set_lengths(payload_len, None);
        if headers.transport == Transport::Tcp {
            header.set_flags(PSH | FIN, flags);
            if mode == CoalesceMode::Lro {
                header.set_newest(&newest);
            }
        }
        header.set_checksum(payload_len, payload_sum);
        // The device's sum is of the first segment only (LRO-1).
        packet.device_sum = None;
        packet.headers.ip_checksum = match headers.network {
            Network::Ipv4 => Checksum::Good,
            _ => headers.ip_checksum,
        };
        packet.headers.payload_len = u16::try_from(payload_len).unwrap_or(u16::MAX);
        packet.wire_len = u32::from(headers.payload_offset) + payload_len;
        if let Some((tunnel, _)) = tunnel {
            tunnel.rewrite(packet.frame.data_mut(), &packet.headers, payload_len, None);
            packet.headers = tunnel.headers_of_whole(&packet.headers);
        }
        packet
    }

    /// Number of segments; a finished packet has [`Packet::segment_count`].
    #[inline]
    fn segments(&self) -> u32 {
        u32::from(self.packet.frame.follower_count()) + 1
    }

    /// Payload length of the first segment, which no other exceeds.
    fn first_len(&self) -> u32 {
        self.packet.headers.payload_len.into()
    }

    /// True if the timestamps of the packet and the latest segment are more than [`GAP_NS`] apart.
    /// A timestamp of 0 is none.
    fn is_gap(&self, packet: &Packet) -> bool {
        let (latest, next) = (self.latest_ns, packet.timestamp_ns);
        latest.abs_diff(next) > GAP_NS && latest != 0 && next != 0
    }

    /// The field that does not advance in `lro` mode, if any.
    fn lro_difference(&self, packet: &Packet) -> Option<MergeRefusal> {
        self.newest.advances_to(&Newest::of(packet, CoalesceMode::Lro)).err()
    }

    /// True if there is no room for another segment. In `lro` mode, that is a segment as long as
    /// the first one, or as the device's MTU if that is shorter (LRO-7), and not the longest
    /// segment that a device with a larger MTU than the sender's could get (LRO-6). In `gro` mode
    /// the last segment may be shorter and still fit, so the next segment's own length decides.
    fn is_full(&self, rules: MergeRules) -> bool {
        match rules.mode {
            CoalesceMode::Gro => self.room == 0,
            CoalesceMode::Lro => {
                let headers = &self.packet.headers;
                let frame = u32::from(headers.payload_offset) - u32::from(headers.network_offset)
                    + self.first_len();
                self.room < frame.min(rules.mtu)
            }
        }
    }
}

impl Ids {
    /// Progress of ids after one that is `ahead` of the id of the first of `segments` segments;
    /// `None` if it breaks the pattern.
    #[inline]
    fn after(self, ahead: u16, segments: u32) -> Option<Self> {
        match self {
            Self::Undecided | Self::Fixed if ahead == 0 => Some(Self::Fixed),
            Self::Undecided | Self::Rising if u32::from(ahead) == segments => Some(Self::Rising),
            _ => None,
        }
    }
}

/// Contribution of a further segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct NextSegment {
    payload_len: u32,
    own: Own,
    ids: Ids,
}
