//! Rewrites lengths, IP IDs and checksums of outer headers: in a merged packet, and in each segment
//! when it is split again.

use super::layers::{LayerKind, OuterLayer, PPPOE_BEFORE_LEN};
use super::open::addresses_sum;
use super::{Tunnel, UDP};
use crate::coalesce::header::{len_field, pseudo_sum, set_ipv4};
use crate::coalesce::resegment::id_step;
use crate::coalesce::wire::IPV4_BYTES;
use crate::parse::checksum::Sum;
use crate::parse::{Headers, Network};

/// Length of an IPv6 header, which is not part of its payload length.
const IPV6_HEADER_BYTES: u32 = 40;

/// IP IDs of the outer IPv4 headers of a merged packet's segments.
#[derive(Clone, Copy, Debug)]
pub(in crate::coalesce) struct OuterIds {
    first: Option<u16>,
    /// Increment from one segment to the next: 0 or 1.
    step: u16,
}

impl OuterIds {
    /// Derives the IDs from the packet's headers, and from those that the second and the third segment arrived with.
    pub(in crate::coalesce) fn of(tunnel: &Tunnel, own: &[u8], others: [Option<&[u8]>; 2]) -> Self {
        let first = tunnel.id(own);
        Self { first, step: id_step(first, others.map(|header| tunnel.id(header?))) }
    }

    /// IP ID of a segment, counted from 0.
    pub(in crate::coalesce) fn nth(&self, number: u32) -> Option<u16> {
        let ahead = self.step * u16::try_from(number).unwrap_or(u16::MAX);
        self.first.map(|first| first.wrapping_add(ahead))
    }
}

impl Tunnel {
    /// IP ID of the outer header, if that is IPv4.
    pub(in crate::coalesce) fn id(&self, bytes: &[u8]) -> Option<u16> {
        let (Network::Ipv4, at) = self.layers.first_network()? else { return None };
        bytes.get(at + 4..)?.first_chunk().copied().map(u16::from_be_bytes)
    }

    /// Sets the checksum of the outer UDP header to the pseudo header's sum, for a receiver that
    /// segments the packet. Returns false if there is no checksum.
    pub(in crate::coalesce) fn set_partial_checksum(
        &self,
        bytes: &mut [u8],
        inner: &Headers,
    ) -> bool {
        let layers = self.layers.as_slice();
        let is_summed = |layer: &OuterLayer| layer.kind == LayerKind::UdpSummed;
        let Some(index) = layers.iter().position(is_summed) else { return false };
        let end = u32::from(inner.payload_offset) + u32::from(inner.payload_len);
        let at = layers.get(index).map_or(0, |layer| layer.offset);
        let sum = pseudo_sum_outside(bytes, layers.get(..index), end.saturating_sub(at.into()));
        set(bytes.get_mut(usize::from(at) + 6..).unwrap_or_default(), sum.fold());
        true
    }

    /// Sets the lengths and checksums of all outer layers, and the IP ID if one is given. The inner
    /// headers must already be correct for `payload_len`.
    pub(in crate::coalesce) fn rewrite(
        &self,
        bytes: &mut [u8],
        inner: &Headers,
        payload_len: u32,
        id: Option<u16>,
    ) {
        let end = u32::from(inner.payload_offset) + payload_len;
        let layers = self.layers.as_slice();
        for (index, layer) in layers.iter().enumerate().rev() {
            let at = usize::from(layer.offset);
            let len = end.saturating_sub(layer.offset.into());
            let len_behind = |header_bytes: u32| len_field(len.saturating_sub(header_bytes));
            let sum = |bytes: &[u8]| inner_sum(bytes, at, inner, payload_len);
            let Some(header) = bytes.get_mut(at..) else { continue };
            match (layer.kind, header) {
                (LayerKind::Pppoe, [_, _, _, _, high, low, ..]) => {
                    [*high, *low] = len_behind(PPPOE_BEFORE_LEN.into());
                }
                (LayerKind::Ipv4, header) => {
                    set_ipv4(header.get_mut(..IPV4_BYTES).unwrap_or_default(), len, id);
                }
                (LayerKind::Ipv6, [_, _, _, _, high, low, ..]) => {
                    [*high, *low] = len_behind(IPV6_HEADER_BYTES);
                }
                (LayerKind::Udp, [_, _, _, _, high, low, ..]) => [*high, *low] = len_field(len),
                (LayerKind::UdpSummed, [_, _, _, _, high, low, checksum @ ..]) => {
                    [*high, *low] = len_field(len);
                    set(checksum, 0);
                    let pseudo = pseudo_sum_outside(bytes, layers.get(..index), len);
                    let field = match !pseudo.plus(sum(bytes)).fold() {
                        0 => u16::MAX, // 0 would mean that there is no checksum (RFC 768)
                        field => field,
                    };
                    set(bytes.get_mut(at + 6..).unwrap_or_default(), field);
                }
                (LayerKind::GreSummed, [_, _, _, _, checksum @ ..]) => {
                    set(checksum, 0);
                    let field = !sum(bytes).fold();
                    set(bytes.get_mut(at + 4..).unwrap_or_default(), field);
                }
                _ => {}
            }
        }
    }
}

fn set(field: &mut [u8], value: u16) {
    if let Some(field) = field.first_chunk_mut() {
        *field = value.to_be_bytes();
    }
}

/// Sum of all bytes from `at` to the end. From the transport header on, a packet with a valid
/// checksum sums to the complement of its pseudo-header, so the payload need not be read (as in
/// local checksum offload).
fn inner_sum(bytes: &[u8], at: usize, inner: &Headers, payload_len: u32) -> Sum {
    let before = bytes.get(at..inner.transport_offset.into()).unwrap_or_default();
    Sum::of(before).plus_word(!pseudo_sum(bytes, inner, payload_len).fold())
}

/// Pseudo-header sum for a UDP header that follows these layers.
fn pseudo_sum_outside(bytes: &[u8], layers: Option<&[OuterLayer]>, len: u32) -> Sum {
    let network = layers.unwrap_or_default().iter().rev().find_map(|layer| match layer.kind {
        LayerKind::Ipv4 => Some((Network::Ipv4, layer.offset)),
        LayerKind::Ipv6 => Some((Network::Ipv6, layer.offset)),
        _ => None,
    });
    let addresses = network.map(|(network, at)| addresses_sum(bytes, at.into(), network));
    addresses.unwrap_or_default().plus_word(UDP.into()).plus_len(len as usize)
}
