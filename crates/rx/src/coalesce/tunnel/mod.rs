//! Tunnels: merges segments that share their outer headers into one tunnelled packet.
//!
//! | outer header | condition for merging |
//! |---|---|
//! | IPv4, IPv6, in either | IPv4 ID constant or incremented by one; all other fields equal |
//! | GRE | version 0; no routing, no sequence number; checksum, if present, valid |
//! | VXLAN, VXLAN-GPE, GENEVE | UDP ports, VNI and options equal; checksum valid or 0 |
//! | PPPoE | session ID and protocol equal; outermost, or inside the tunnel |
//!
//! As in the kernel (`encap_mark` in `include/net/gro.h`), at most one tunnel is looked into, with
//! PPPoE and VLAN tags outside and inside: at most [`OUTER_LAYERS_MAX`](layers::OUTER_LAYERS_MAX) headers with
//! fields that may differ between segments. A packet with a second tunnel inside is refused, with a
//! reason of its own. Every length field must extend exactly to the end of the frame.
//!
//! While a packet is held, its [`Headers`] are the inner ones, so segments are compared, appended
//! and checksummed like plain TCP or UDP. A flushed packet has its outer headers again, with
//! [`Transport::Tunnel`], so that no code mistakes it for plain TCP; only
//! [`resegment()`](super::resegment()) splits it.

mod walk; //    from the first header to the innermost IP header
mod open; //    detection, and checksums that nobody verified
mod layers; //  outer headers, and the fields that may differ
mod rewrite; // lengths, IP IDs and checksums of a merged packet

use layers::LayerKind;
pub(super) use layers::{OuterLayers, TUNNEL_HEADER_BYTES_MAX};
pub(super) use open::{Opened, open};
pub(super) use rewrite::OuterIds;
use walk::{walk, walk_merged, walk_to};

use super::refusal::MergeRefusal;
use super::resegment::second_header;
use crate::packet::Packet;
use crate::parse::{Checksum, Headers, Network, Transport};

const UDP: u8 = 17;
const UDP_HEADER_BYTES: u16 = 8;
/// Length of an Ethernet header without tags.
const ETHERNET_BYTES: u8 = 14;

/// Outer headers of a packet that is merged by its inner ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tunnel {
    /// Headers as parsed, starting at the outermost IP header.
    pub(super) outer: Headers,
    pub(super) layers: OuterLayers,
}

/// True if a packet may be a tunnel. Plain TCP cannot be, and costs one comparison.
#[inline(always)]
pub(super) fn may_be_tunnel(packet: &Packet) -> bool {
    packet.headers.transport != Transport::Tcp && is_tunnel(packet)
}

#[inline(never)] // keeps register pressure out of the caller's fast path
fn is_tunnel(packet: &Packet) -> bool {
    match packet.headers.transport {
        Transport::Tcp | Transport::Icmp => false,
        Transport::Udp => is_port_of_tunnel(packet),
        Transport::Other | Transport::Tunnel => true,
    }
}

fn is_port_of_tunnel(packet: &Packet) -> bool {
    let header = packet.frame.data().get(packet.headers.transport_offset.into()..);
    let port = header.and_then(|header| header.first_chunk::<4>());
    port.is_some_and(|&[_, _, high, low]| walk::is_tunnel(u16::from_be_bytes([high, low])))
}

/// Inner TCP or UDP headers by which a packet is merged. For a merged packet, their payload is that
/// of all segments. `None` if the packet is not a tunnel, or is one that is not looked into.
#[must_use]
pub fn innermost(bytes: &[u8], wire_len: u32, headers: &Headers) -> Option<Headers> {
    let (_, inner) = walk(bytes, wire_len, headers).ok()??;
    matches!(inner.transport, Transport::Tcp | Transport::Udp).then_some(inner)
}

/// Inner TCP or UDP headers of a packet, merged or not, as of [`innermost`]. A packet known to be
/// [merged in a tunnel](Packet::is_merged_tunnel) may have any port.
#[must_use]
pub fn inner_headers(packet: &Packet) -> Option<Headers> {
    if packet.is_merged_tunnel() {
        return Tunnel::of_merged(packet).map(|(_, inner)| inner);
    }
    innermost(packet.frame.data(), packet.wire_len, &packet.headers)
}

/// Source and destination address, by which held segments are found for a packet that has no flow
/// hash of its own: a fragment.
pub(super) fn addresses(packet: &Packet) -> Option<&[u8]> {
    let bytes = packet.frame.data();
    let Headers { network, network_offset, .. } = match packet.headers.network {
        Network::Other => walk::behind_pppoe(bytes, &packet.headers)?,
        _ => packet.headers,
    };
    addresses_at(bytes, network, network_offset.into())
}

/// Source and destination in an IP header.
fn addresses_at(bytes: &[u8], network: Network, at: usize) -> Option<&[u8]> {
    match network {
        Network::Ipv4 => bytes.get(at + 12..at + 20),
        Network::Ipv6 => bytes.get(at + 8..at + 40),
        Network::Other => None,
    }
}

/// Completes the headers of a packet that [came from the kernel](crate::Packet::is_gso) merged in a tunnel, after they
/// have been parsed from the outermost one on. All of them end at `headers_end`.
#[cold]
pub(crate) fn find_inner(packet: &mut Packet, headers_end: u16) {
    let mut outer = packet.headers;
    if outer.transport == Transport::Tunnel {
        // The source's marks, which parsing left.
        (outer.transport, outer.payload_offset) = (Transport::Other, 0);
    }
    packet.headers = match Tunnel::ending_at(packet, &outer, headers_end) {
        Some((tunnel, inner)) => tunnel.headers_of_whole(&inner),
        None => {
            packet.set_gso_size(0);
            outer
        }
    };
}

impl Tunnel {
    /// Tunnel of a packet by its bytes, with its inner headers; `None` if it is none, or one that is not merged.
    pub(super) fn of_parsed(packet: &Packet, outer: &Headers) -> Option<(Self, Headers)> {
        let (layers, inner) = walk(packet.frame.data(), packet.wire_len, outer).ok()??;
        Some((Self { outer: *outer, layers }, inner))
    }

    /// Tunnel of a packet, at any port, if all headers up to the innermost end there.
    pub(super) fn ending_at(
        packet: &Packet,
        outer: &Headers,
        headers_end: u16,
    ) -> Option<(Self, Headers)> {
        let whole = (packet.frame.data(), packet.wire_len);
        let (layers, inner) = walk_to(whole, outer, headers_end.into())?;
        Some((Self { outer: *outer, layers }, inner))
    }

    /// True if an outer UDP header has a checksum.
    pub(super) fn has_udp_checksum(&self) -> bool {
        self.layers.has_udp_checksum()
    }

    /// Tunnel of a merged packet, with its inner headers.
    ///
    /// Handlers may have edited the outer headers, including the ports by which tunnels over UDP are
    /// recognized. The layers are therefore those of the headers that the second segment was received
    /// with. All contents are the packet's own.
    pub(super) fn of_merged(packet: &Packet) -> Option<(Self, Headers)> {
        let bytes = packet.frame.data();
        // A copy has no second segment, only headers of its own.
        let own = || Some((bytes.get(..packet.headers.payload_offset.into())?, packet.wire_len));
        let second = second_header(packet).or_else(own)?;
        let (layers, inner) = walk_merged((bytes, packet.wire_len), &packet.headers, second)?;
        let layers = layers.with_checksums_of(bytes);
        Some((Self { outer: Self::outer_of_segment(&packet.headers), layers }, inner))
    }

    /// Outer IP version and offset of the UDP header of a tunnel that is nothing but UDP over IP,
    /// in an Ethernet frame without tags.
    pub(super) fn of_udp(&self) -> Option<(Network, u16)> {
        let [ip, udp] = self.layers.as_slice() else { return None };
        let network = match (ip.kind, udp.kind) {
            (LayerKind::Ipv4, LayerKind::Udp | LayerKind::UdpSummed) => Network::Ipv4,
            (LayerKind::Ipv6, LayerKind::Udp | LayerKind::UdpSummed) => Network::Ipv6,
            _ => return None,
        };
        (ip.offset == ETHERNET_BYTES).then_some((network, udp.offset.into()))
    }

    /// Headers of the merged packet, given its inner headers.
    pub(super) fn headers_of_whole(&self, inner: &Headers) -> Headers {
        let Headers { payload_offset, payload_len, .. } = *inner;
        let verified = self.verified();
        Headers { transport: Transport::Tunnel, payload_offset, payload_len, ..verified }
    }

    /// Headers that parsing would find for a segment with these inner headers.
    pub(super) fn headers_of_segment(&self, inner: &Headers) -> Headers {
        let outer = self.verified();
        let end = inner.payload_offset.saturating_add(inner.payload_len);
        let payload_len = match outer.payload_offset {
            0 => 0,
            begin => end.saturating_sub(begin),
        };
        Headers { payload_len, ..outer }
    }

    /// Source and destination address in the outermost IP header.
    pub(super) fn addresses<'a>(&self, bytes: &'a [u8], inner: &Headers) -> Option<&'a [u8]> {
        let inner = (inner.network, inner.network_offset.into());
        let (network, at) = self.layers.first_network().unwrap_or(inner);
        addresses_at(bytes, network, at)
    }

    /// Outer headers with their checksums marked valid, as only such packets are merged.
    fn verified(&self) -> Headers {
        let mut outer = self.outer;
        if outer.network == Network::Ipv4 {
            outer.ip_checksum = Checksum::Good;
        }
        if outer.transport == Transport::Udp && self.layers.has_udp_checksum() {
            outer.l4_checksum = Checksum::Good;
        }
        outer
    }

    fn outer_of_segment(whole: &Headers) -> Headers {
        let is_udp = whole.protocol == UDP && whole.transport_offset > 0;
        let (transport, payload_offset) = match whole.transport_offset {
            start if is_udp => (Transport::Udp, start.saturating_add(UDP_HEADER_BYTES)),
            _ => (Transport::Other, 0),
        };
        Headers { transport, payload_offset, payload_len: 0, ..*whole }
    }
}

/// Reason for the first difference between the outer headers of two packets, if any.
#[cold]
pub(super) fn difference(
    (first, layers): (&Packet, &OuterLayers),
    (next, next_layers): (&Packet, &OuterLayers),
) -> Option<MergeRefusal> {
    layers::difference(
        (first.frame.data(), layers),
        (next.frame.data(), next_layers),
        &first.headers,
    )
}
