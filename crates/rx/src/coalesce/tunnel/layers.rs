//! Layout of a tunnel's outer headers, and the fields in them that legitimately differ between
//! segments of one packet: lengths, IP IDs and checksums. All other bytes before the innermost IP
//! header must be equal.

use crate::coalesce::refusal::MergeRefusal;
use crate::coalesce::wire::IPV6_BYTES;
use crate::parse::{Headers, Network};

/// Maximum number of recorded outer layers: PPPoE, an IP header, UDP or GRE, and PPPoE again.
pub(in crate::coalesce) const OUTER_LAYERS_MAX: usize = 4;

/// Maximum length of all headers of a tunnelled packet, inner ones included.
pub(in crate::coalesce) const TUNNEL_HEADER_BYTES_MAX: usize = 256;

/// Kind of an outer header; each variant names the fields that may differ between segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum LayerKind {
    /// Length.
    #[default]
    Pppoe,
    /// Length, IP ID and header checksum.
    Ipv4,
    /// Length.
    Ipv6,
    /// Length. Without a checksum (the field is 0).
    Udp,
    /// Length and checksum.
    UdpSummed,
    /// Checksum (GRE with the C bit).
    GreSummed,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct OuterLayer {
    pub(super) kind: LayerKind,
    /// Offset in the frame.
    pub(super) offset: u8,
}

/// Outer layers of a packet, outermost first; empty if the packet is not tunnelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::coalesce) struct OuterLayers {
    layers: [OuterLayer; OUTER_LAYERS_MAX],
    count: u8,
}

impl OuterLayers {
    /// Appends the next inner layer; `None` if [`OUTER_LAYERS_MAX`] are recorded already.
    pub(super) fn push(&mut self, kind: LayerKind, offset: u8) -> Option<()> {
        *self.layers.get_mut(usize::from(self.count))? = OuterLayer { kind, offset };
        self.count += 1;
        Some(())
    }

    /// Marks the layers of UDP as with or without a checksum, as in `bytes`.
    pub(super) fn with_checksums_of(mut self, bytes: &[u8]) -> Self {
        for layer in &mut self.layers {
            if matches!(layer.kind, LayerKind::Udp | LayerKind::UdpSummed) {
                let checksum =
                    bytes.get(usize::from(layer.offset) + 6..).and_then(<[u8]>::first_chunk);
                let is_summed = checksum.is_some_and(|checksum| checksum != &[0; 2]);
                layer.kind = if is_summed { LayerKind::UdpSummed } else { LayerKind::Udp };
            }
        }
        self
    }

    pub(super) fn as_slice(&self) -> &[OuterLayer] {
        self.layers.get(..self.count.into()).unwrap_or_default()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Outermost IP header among the layers, with its offset.
    pub(super) fn first_network(&self) -> Option<(Network, usize)> {
        self.as_slice().iter().find_map(|layer| match layer.kind {
            LayerKind::Ipv4 => Some((Network::Ipv4, layer.offset.into())),
            LayerKind::Ipv6 => Some((Network::Ipv6, layer.offset.into())),
            _ => None,
        })
    }

    pub(super) fn has_udp_checksum(&self) -> bool {
        self.as_slice().iter().any(|layer| layer.kind == LayerKind::UdpSummed)
    }

    /// Offset of the first byte covered by the outermost length field; `None` without a tunnel.
    pub(in crate::coalesce) fn counted_from(&self) -> Option<usize> {
        let first = self.as_slice().first()?;
        let before = if first.kind == LayerKind::Pppoe { PPPOE_BEFORE_LEN } else { 0 };
        Some(usize::from(first.offset) + usize::from(before))
    }

    /// Ranges, as (offset, length), of the bytes that may differ between segments.
    pub(in crate::coalesce) fn own_bytes(&self) -> impl Iterator<Item = (usize, usize)> {
        self.as_slice().iter().flat_map(|layer| {
            let at = usize::from(layer.offset);
            let places: [(usize, usize); 2] = match layer.kind {
                LayerKind::Ipv4 => [(2, 4), (10, 2)],
                LayerKind::UdpSummed => [(4, 4), (0, 0)],
                LayerKind::Pppoe | LayerKind::Ipv6 | LayerKind::Udp | LayerKind::GreSummed => {
                    [(4, 2), (0, 0)]
                }
            };
            places.map(|(place, count)| (at + place, count))
        })
    }
}

/// Leading bytes of a PPPoE header that its length field does not cover.
pub(super) const PPPOE_BEFORE_LEN: u8 = 6;

/// Implements [`difference`](super::difference()); `inner` are the first packet's inner headers.
pub(super) fn difference(
    (a, layers): (&[u8], &OuterLayers),
    (b, next_layers): (&[u8], &OuterLayers),
    inner: &Headers,
) -> Option<MergeRefusal> {
    if layers != next_layers {
        return Some(MergeRefusal::OtherTunnel);
    }
    let header = |bytes: &[u8], layer: &OuterLayer| -> Option<[u8; IPV6_BYTES]> {
        bytes.get(layer.offset.into()..)?.first_chunk().copied()
    };
    for layer in layers.as_slice() {
        let (Some(a), Some(b)) = (header(a, layer), header(b, layer)) else { continue };
        let named = match layer.kind {
            LayerKind::Ipv4 if a[12..20] != b[12..20] => Some(MergeRefusal::OtherTunnel),
            LayerKind::Ipv4 if a[8] != b[8] => Some(MergeRefusal::OuterTtl),
            LayerKind::Ipv4 if a[1] != b[1] => Some(MergeRefusal::OuterTos),
            LayerKind::Ipv4 if a[6..8] != b[6..8] => Some(MergeRefusal::OuterIpHeader),
            LayerKind::Ipv6 if a[8..] != b[8..] => Some(MergeRefusal::OtherTunnel),
            LayerKind::Ipv6 if a[7] != b[7] => Some(MergeRefusal::OuterTtl),
            LayerKind::Ipv6 if (a[0], a[1] & 0xf0) != (b[0], b[1] & 0xf0) => {
                Some(MergeRefusal::OuterTos)
            }
            LayerKind::Ipv6 if a[1..4] != b[1..4] => Some(MergeRefusal::OuterIpHeader),
            _ => None,
        };
        if named.is_some() {
            return named;
        }
    }
    let is_own =
        |at: usize| layers.own_bytes().any(|(own, count)| (own..own + count).contains(&at));
    let first = layers.as_slice().first().map_or(0, |layer| layer.offset.into());
    let differs = |at: usize| a.get(at) != b.get(at) && !is_own(at);
    if (0..first).any(differs) {
        return Some(MergeRefusal::LinkHeader);
    }
    (first..inner.network_offset.into()).any(differs).then_some(MergeRefusal::OtherTunnel)
}
