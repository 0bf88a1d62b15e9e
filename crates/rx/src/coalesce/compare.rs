//! Comparison of two segments' headers, except for fields that may differ between segments of one
//! packet.

use super::CoalesceMode;
use super::refusal::MergeRefusal;
use super::tunnel::{OuterLayers, TUNNEL_HEADER_BYTES_MAX};
use super::wire::{FIN, IPV4_BYTES, IPV6_BYTES, ODD_CHECKSUM, PSH, TCP_BYTES, UDP_BYTES};
use crate::packet::Packet;
use crate::parse::checksum::{self, Sum};
use crate::parse::{Checksum, Headers, Network, Transport};

/// Maximum length of compared plain headers, in bytes: two VLAN tags, IPv6 and the longest TCP header
/// have 122.
pub(super) const HEADER_BYTES_MAX: usize = 128;

/// Length that most headers do not exceed, in bytes: one VLAN tag, IPv6, and TCP with timestamps
/// have 90.
const MOST_HEADERS_BYTES: usize = 96;

const DONT_FRAGMENT: usize = 6;

/// Mask of the header bits that must agree with those of the first segment. Rebuilt for a first
/// segment whose headers have another layout than those before.
#[derive(Clone, Debug)]
pub(super) struct HeaderMask {
    layout: HeaderLayout,
    bytes: [u8; TUNNEL_HEADER_BYTES_MAX],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct HeaderLayout {
    network: Network,
    network_offset: u8,
    transport: Transport,
    transport_offset: u16,
    payload_offset: u16,
    mode: CoalesceMode,
    tunnel: OuterLayers,
}

impl Default for HeaderMask {
    fn default() -> Self {
        let (headers, tunnel) = (Headers::default(), OuterLayers::default());
        Self::new(HeaderLayout::of(&headers, tunnel, CoalesceMode::Gro))
    }
}

impl HeaderMask {
    /// Makes the mask fit a first segment.
    pub(super) fn fit(&mut self, first: &Packet, tunnel: OuterLayers, mode: CoalesceMode) {
        let layout = HeaderLayout::of(&first.headers, tunnel, mode);
        if layout != self.layout {
            *self = Self::new(layout);
        }
    }

    fn new(layout: HeaderLayout) -> Self {
        let mut mask = Self { layout, bytes: [0; _] };
        let headers = mask.bytes.iter_mut().take(layout.payload_offset.into());
        headers.for_each(|byte| *byte = !0);
        let (network, transport) =
            (usize::from(layout.network_offset), usize::from(layout.transport_offset));
        match layout.network {
            // Total length and id, which are compared separately, and the checksum.
            Network::Ipv4 => {
                mask.clear(network + 2, &[0; 4]);
                mask.clear(network + 10, &[0; 2]);
            }
            Network::Ipv6 => mask.clear(network + 4, &[0; 2]),
            Network::Other => {}
        }
        match (layout.transport, layout.mode) {
            // Sequence number, the flags that end a packet, and checksum.
            (Transport::Tcp, CoalesceMode::Gro) => {
                mask.clear(transport + 4, &[0; 4]);
                mask.clear(transport + 13, &[!(PSH | FIN)]);
                mask.clear(transport + 16, &[0; 2]);
            }
            // Acknowledgement, window and timestamps, too; but FIN must agree, because this mode
            // does not merge it.
            (Transport::Tcp, CoalesceMode::Lro) => {
                mask.clear(transport + 4, &[0; 8]);
                mask.clear(transport + 13, &[!PSH, 0, 0, 0, 0]);
                mask.clear(transport + TCP_BYTES, &[0; 40]);
            }
            // Length and checksum.
            _ => mask.clear(transport + 4, &[0; 4]),
        }
        for (at, count) in layout.tunnel.own_bytes() {
            mask.bytes.iter_mut().skip(at).take(count).for_each(|byte| *byte = 0);
        }
        mask
    }

    fn clear(&mut self, at: usize, bits: &[u8]) {
        for (byte, bits) in self.bytes.iter_mut().skip(at).zip(bits) {
            *byte &= bits;
        }
    }

    /// True if the headers of two frames agree under the mask.
    #[inline(always)]
    fn agrees(&self, a: &[u8], b: &[u8]) -> bool {
        let end = usize::from(self.layout.payload_offset);
        match (a.first_chunk::<MOST_HEADERS_BYTES>(), b.first_chunk::<MOST_HEADERS_BYTES>()) {
            // Compared in one go, with some payload, for which the mask is 0.
            (Some(a), Some(b)) if end <= MOST_HEADERS_BYTES => self.differ(a, b) == 0,
            _ => self.short_agrees(a, b),
        }
    }

    /// True if the headers of short frames, or long headers, agree under the mask.
    #[cold]
    fn short_agrees(&self, a: &[u8], b: &[u8]) -> bool {
        let end = usize::from(self.layout.payload_offset);
        match (a.get(..end), b.get(..end)) {
            (Some(a), Some(b)) => self.differ(a, b) == 0,
            _ => false,
        }
    }

    /// Bits that differ between two slices of the same length, ORed together.
    #[inline(always)]
    fn differ(&self, a: &[u8], b: &[u8]) -> u64 {
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
        let (mask, _) = self.bytes.as_chunks::<8>();
        let words = a.iter().zip(b).zip(mask);
        let whole = words.fold(0, |differ, ((a, b), mask)| {
            let [a, b, mask] = [a, b, mask].map(|word| u64::from_ne_bytes(*word));
            differ | (a ^ b) & mask
        });
        let rest = a_rest.iter().zip(b_rest).zip(self.bytes.iter().skip(a.len() * 8));
        rest.fold(whole, |differ, ((a, b), mask)| differ | u64::from((a ^ b) & mask))
    }
}

impl HeaderLayout {
    fn of(headers: &Headers, tunnel: OuterLayers, mode: CoalesceMode) -> Self {
        let Headers { network, network_offset, transport, .. } = *headers;
        let Headers { transport_offset, payload_offset, .. } = *headers;
        Self { network, network_offset, transport, transport_offset, payload_offset, mode, tunnel }
    }
}

/// Header fields that differ between segments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    /// Difference of the IPv4 id from the first segment's; 0 without an id.
    pub(super) id_ahead: u16,
    /// TCP sequence number.
    pub(super) sequence: u32,
    /// Checksum of the transport.
    pub(super) checksum: u16,
    /// Lower eight TCP flags.
    pub(super) flags: u8,
}

/// Compares the headers of a packet with those of an examined first segment. `None` if they differ
/// in more than the segments of a packet may, or in a way that could not be restored;
/// [`difference`] names the field.
#[inline(always)]
pub(super) fn own_fields(first: &Packet, next: &Packet, mask: &HeaderMask) -> Option<Own> {
    let headers = &first.headers;
    if next.headers.payload_offset != headers.payload_offset || next.headers.link != headers.link {
        return None;
    }
    let (a, b) = (first.frame.data(), next.frame.data());
    if !mask.agrees(a, b) {
        return None;
    }
    // Equal link headers imply the same offset of the network header, and equal network headers
    // that of the transport: these offsets apply to both packets.
    let id_ahead = match headers.network {
        Network::Ipv4 => {
            let at = usize::from(headers.network_offset);
            let (a, b) = (a.get(at..)?.first_chunk()?, b.get(at..)?.first_chunk()?);
            id_ahead(a, b, next.headers.ip_checksum)?
        }
        // A jumbogram has its length in an option (RFC 2675), and the 0 here would not be restored.
        Network::Ipv6 if next.view().network_len_field() == Some(0) => return None,
        Network::Ipv6 | Network::Other => 0,
    };
    let transport = b.get(headers.transport_offset.into()..)?;
    if headers.transport == Transport::Tcp {
        let header = transport.first_chunk::<TCP_BYTES>()?;
        let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let checksum = u16::from_be_bytes([header[16], header[17]]);
        let is_odd = checksum == u16::from_be_bytes(ODD_CHECKSUM);
        (!is_odd).then_some(Own { id_ahead, sequence, checksum, flags: header[13] })
    } else {
        let header = transport.first_chunk::<UDP_BYTES>()?;
        let checksum = u16::from_be_bytes([header[6], header[7]]);
        // 0 means no checksum, even if the sum happens to be 0, and could not be restored.
        (checksum != 0).then_some(Own { id_ahead, sequence: 0, checksum, flags: 0 })
    }
}

/// Difference of the ids of two IPv4 headers, if the second one has a correct checksum in canonical
/// form.
#[inline(always)]
fn id_ahead(a: &[u8; IPV4_BYTES], b: &[u8; IPV4_BYTES], verdict: Checksum) -> Option<u16> {
    let verdict = match verdict {
        Checksum::Unknown => checksum::judge(Sum::of_words(b.as_chunks().0)),
        known => known,
    };
    let is_right = verdict == Checksum::Good && [b[10], b[11]] != ODD_CHECKSUM;
    let id = |header: &[u8; IPV4_BYTES]| u16::from_be_bytes([header[4], header[5]]);
    is_right.then(|| id(b).wrapping_sub(id(a)))
}

/// First difference between headers that differ; in a tunnel, between the inner ones.
#[cold]
pub(super) fn difference(
    first: &Packet,
    next: &Packet,
    is_inside: bool,
    mode: CoalesceMode,
) -> MergeRefusal {
    let (a, b) = (first.view(), next.view());
    let is_flow = a.address_bytes() == b.address_bytes()
        && a.port_bytes() == b.port_bytes()
        && first.headers.transport == next.headers.transport;
    let link = |packet: &Packet| packet.headers.network_offset.into();
    if !is_flow {
        MergeRefusal::OtherFlow
    } else if !is_inside && a.bytes().get(..link(first)) != b.bytes().get(..link(next)) {
        MergeRefusal::LinkHeader
    } else if a.ttl() != b.ttl() {
        MergeRefusal::Ttl
    } else if a.traffic_class() != b.traffic_class() {
        MergeRefusal::Tos
    } else if network_rest(first) != network_rest(next) {
        MergeRefusal::IpHeader
    } else {
        tcp_difference(first, next, mode)
    }
}

fn tcp_difference(first: &Packet, next: &Packet, mode: CoalesceMode) -> MergeRefusal {
    let header = |packet: &Packet| -> Option<[u8; TCP_BYTES]> {
        packet.frame.data().get(packet.headers.transport_offset.into()..)?.first_chunk().copied()
    };
    let (Some(a), Some(b)) = (header(first), header(next)) else { return MergeRefusal::OtherFlow };
    if mode == CoalesceMode::Gro && a[8..12] != b[8..12] {
        MergeRefusal::Acknowledgement
    } else if mode == CoalesceMode::Gro && a[14..16] != b[14..16] {
        MergeRefusal::Window
    } else if a[12] & 0xf0 != b[12] & 0xf0 {
        MergeRefusal::OtherOptions
    } else if (a[13] ^ b[13]) & !(PSH | FIN) != 0 || a[12] != b[12] || a[18..] != b[18..] {
        MergeRefusal::OtherFlags
    } else {
        MergeRefusal::OtherOptions
    }
}

/// Further fields of the network header that must agree: don't-fragment; flow label and extension
/// headers.
fn network_rest(packet: &Packet) -> Option<(&[u8], &[u8])> {
    let Headers { network, network_offset, transport_offset, .. } = packet.headers;
    let header = packet.frame.data().get(network_offset.into()..transport_offset.into())?;
    match network {
        Network::Ipv4 => Some((header.get(DONT_FRAGMENT..DONT_FRAGMENT + 2)?, &[])),
        _ => Some((header.get(1..4)?, header.get(IPV6_BYTES..)?)),
    }
}
