//! Headers outside, made right for what is inside: of a whole, and of each segment again.

use super::layers::{Layer, LayerKind, PPPOE_BEFORE_LEN};
use super::open::addresses_sum;
use super::{Tunnel, UDP};
use crate::coalesce::header::{len_field, pseudo_sum, set_ipv4};
use crate::coalesce::wire::IPV4_BYTES;
use crate::parse::checksum::Sum;
use crate::parse::{Headers, Network};

/// Bytes of an IPv6 header, which its length does not count.
const IPV6_HEADER_BYTES: u32 = 40;

/// Ids of the IPv4 header outside.
#[derive(Clone, Copy, Debug)]
pub(in crate::coalesce) struct OuterIds {
    first: Option<u16>,
    /// Difference of each id from the one before: 0 or 1.
    step: u16,
}

impl OuterIds {
    /// Ids of a merged packet, from the headers of its first segment and its second.
    pub(in crate::coalesce) fn of(tunnel: &Tunnel, first: &[u8], second: Option<&[u8]>) -> Self {
        let id = |bytes| tunnel.id(bytes);
        let (first, second) = (id(first), second.and_then(id));
        Self { first, step: u16::from(second != first) }
    }

    /// The id of a segment.
    pub(in crate::coalesce) fn nth(&self, number: u32) -> Option<u16> {
        let ahead = self.step * u16::try_from(number).unwrap_or(u16::MAX);
        self.first.map(|first| first.wrapping_add(ahead))
    }
}

impl Tunnel {
    /// The id of the IPv4 header outside, if there is one.
    pub(in crate::coalesce) fn id(&self, bytes: &[u8]) -> Option<u16> {
        let (Network::Ipv4, at) = self.layers.first_network()? else { return None };
        bytes.get(at + 4..)?.first_chunk().copied().map(u16::from_be_bytes)
    }

    /// Sets lengths, the id if one is given, and checksums of all layers. The headers inside are right already,
    /// before a payload of this length.
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
                        0 => u16::MAX, // a 0 would say that there is none
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

/// The sum of all bytes from `at` on. A right checksum makes what is inside sum up to the opposite of its
/// pseudo header, so no payload is looked at.
fn inner_sum(bytes: &[u8], at: usize, inner: &Headers, payload_len: u32) -> Sum {
    let before = bytes.get(at..inner.transport_offset.into()).unwrap_or_default();
    Sum::of(before).plus_word(!pseudo_sum(bytes, inner, payload_len).fold())
}

/// The pseudo header of a UDP packet behind these layers.
fn pseudo_sum_outside(bytes: &[u8], layers: Option<&[Layer]>, len: u32) -> Sum {
    let network = layers.unwrap_or_default().iter().rev().find_map(|layer| match layer.kind {
        LayerKind::Ipv4 => Some((Network::Ipv4, layer.offset)),
        LayerKind::Ipv6 => Some((Network::Ipv6, layer.offset)),
        _ => None,
    });
    let addresses = network.map(|(network, at)| addresses_sum(bytes, at.into(), network));
    addresses.unwrap_or_default().plus_word(UDP.into()).plus_len(len as usize)
}
