//! Tunnels: segments inside other headers become one packet inside those headers.
//!
//! | outside | merged if |
//! |---|---|
//! | IPv4 and IPv6 in either | ids stay or rise by one; all else of the header is the same |
//! | GRE | version 0, neither routing nor sequence numbers; its checksum, if it has one, is right |
//! | VXLAN, VXLAN-GPE, GENEVE | UDP to their port; ports, network and options are the same; its checksum is right, or 0 |
//! | PPPoE | session and protocol are the same; around all of it, or inside |
//!
//! As in the kernel (`encap_mark` in `include/net/gro.h`), one tunnel at most, with PPPoE and VLAN tags
//! around it and inside it: [`LAYERS_MAX`](layers::LAYERS_MAX) headers whose fields are those of each packet. Another tunnel
//! inside is refused by name, whatever it holds. Every length must end where the frame does.
//!
//! While a packet is held, its [`Headers`] are those inside, so that segments are compared, added and
//! summed up as those of plain TCP and UDP. A merged packet has those outside again, with
//! [`Transport::Tunnel`], so that nobody takes it for plain TCP; nobody but [`resegment()`](super::resegment())
//! takes it apart.

mod layers;
mod open;
mod rewrite;
mod walk;

pub(super) use layers::{Layers, TUNNEL_HEADER_BYTES_MAX};
pub(super) use open::{Opened, open};
pub(super) use rewrite::OuterIds;
use walk::walk;

use super::refusal::MergeRefusal;
use crate::packet::Packet;
use crate::parse::{Checksum, Headers, Network, Transport};

const UDP: u8 = 17;
const UDP_HEADER_BYTES: u16 = 8;

/// Headers outside those that a packet is merged by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tunnel {
    /// Result of parsing: of the outermost IP header.
    pub(super) outer: Headers,
    pub(super) layers: Layers,
}

/// True for a packet that can hold another: plain TCP never does, and takes one look.
#[inline(always)]
pub(super) fn may_be_tunnel(packet: &Packet) -> bool {
    packet.headers.transport != Transport::Tcp && is_tunnel(packet)
}

#[inline(never)] // so that the look takes no more registers than it must
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

/// Headers of TCP or UDP inside a tunnel, by which a packet with these bytes and headers is merged; of a merged
/// one, with the payload of all segments. `None` for what is no tunnel, or one that is not looked into.
#[must_use]
pub fn innermost(bytes: &[u8], wire_len: u32, headers: &Headers) -> Option<Headers> {
    let (_, inner) = walk(bytes, wire_len, headers).ok()??;
    matches!(inner.transport, Transport::Tcp | Transport::Udp).then_some(inner)
}

/// Addresses between which a packet is sent that is found by no flow hash of its own: a fragment's.
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

impl Tunnel {
    /// The tunnel around the segments of a merged packet, and the headers inside.
    pub(super) fn of_merged(packet: &Packet) -> Option<(Self, Headers)> {
        let (layers, inner) =
            walk(packet.frame.data(), packet.wire_len, &packet.headers).ok()??;
        Some((Self { outer: Self::outer_of_segment(&packet.headers), layers }, inner))
    }

    /// Headers of a merged packet, whose headers inside are `inner`.
    pub(super) fn headers_of_whole(&self, inner: &Headers) -> Headers {
        let Headers { payload_offset, payload_len, .. } = *inner;
        let verified = self.verified();
        Headers { transport: Transport::Tunnel, payload_offset, payload_len, ..verified }
    }

    /// Headers of a segment as long as `inner` says, as parsing finds them.
    pub(super) fn headers_of_segment(&self, inner: &Headers) -> Headers {
        let outer = self.verified();
        let end = inner.payload_offset.saturating_add(inner.payload_len);
        let payload_len = match outer.payload_offset {
            0 => 0,
            begin => end.saturating_sub(begin),
        };
        Headers { payload_len, ..outer }
    }

    /// Addresses of the outermost IP header.
    pub(super) fn addresses<'a>(&self, bytes: &'a [u8], inner: &Headers) -> Option<&'a [u8]> {
        let inner = (inner.network, inner.network_offset.into());
        let (network, at) = self.layers.first_network().unwrap_or(inner);
        addresses_at(bytes, network, at)
    }

    /// The outermost headers, whose checksums are right: nothing else is merged.
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

/// Name of the first difference between the headers outside those of two packets, if there is any.
#[cold]
pub(super) fn difference(
    (first, layers): (&Packet, &Layers),
    (next, next_layers): (&Packet, &Layers),
) -> Option<MergeRefusal> {
    layers::difference(
        (first.frame.data(), layers),
        (next.frame.data(), next_layers),
        &first.headers,
    )
}
