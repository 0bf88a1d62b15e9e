//! `virtio_net_hdr` of a merged packet, by which a device, or the kernel behind a TUN, segments it.

mod carry; //  the header that the kernel or a device puts before a frame
mod tunnel; // that of a packet merged inside VXLAN or GENEVE

pub use carry::{GSO_SEGMENTS_MAX, InvalidVnetHeader};
pub use tunnel::{VIRTIO_NET_HDR_TUNNEL_BYTES, VirtioNetHdrTunnel, describe_tunnel};

use super::header::HeaderBytes;
use super::wire::CWR;
use crate::packet::Packet;
use crate::parse::partial::csum_offset;
use crate::parse::{Headers, Network, Transport, View};

/// `virtio_net_hdr` of a packet (virtio 1.2, section 5.1.6), which precedes it on a TUN with
/// `IFF_VNET_HDR`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VirtioNetHdr {
    /// Flags: [`NEEDS_CSUM`], [`DATA_VALID`].
    pub flags: u8,
    /// Type of segmentation: [`GSO_NONE`] and others.
    pub gso_type: u8,
    /// Length of the headers of every segment, in bytes.
    pub hdr_len: u16,
    /// Payload length of every segment but the last, in bytes.
    pub gso_size: u16,
    /// Offset of the first byte that is summed.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
}

/// Partial checksum: the field holds the pseudo header's sum.
pub const NEEDS_CSUM: u8 = 1;
/// Verified checksum.
pub const DATA_VALID: u8 = 2;
/// Outer UDP checksum, partial too, of a packet that is segmented inside a tunnel.
pub const UDP_TUNNEL_CSUM: u8 = 8;
/// No segmentation.
pub const GSO_NONE: u8 = 0;
/// TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// UDP datagrams of one size.
pub const GSO_UDP_L4: u8 = 5;
/// Flag beside the types: segmented inside a UDP tunnel over IPv4.
pub const GSO_UDP_TUNNEL_IPV4: u8 = 0x20;
/// Flag beside the types: segmented inside a UDP tunnel over IPv6.
pub const GSO_UDP_TUNNEL_IPV6: u8 = 0x40;
/// Flag beside the TCP types: CWR is set on the first segment only.
pub const GSO_ECN: u8 = 0x80;

/// Length of a header without buffer count, in bytes.
pub const VIRTIO_NET_HDR_BYTES: usize = 10;

impl VirtioNetHdr {
    /// Reads a little-endian header.
    #[must_use]
    pub fn from_bytes(bytes: [u8; VIRTIO_NET_HDR_BYTES]) -> Self {
        let [flags, gso_type, fields @ ..] = bytes;
        let [a, b, c, d, e, f, g, h] = fields;
        let [hdr_len, gso_size, csum_start, csum_offset] =
            [[a, b], [c, d], [e, f], [g, h]].map(u16::from_le_bytes);
        Self { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset }
    }

    /// Little-endian header, as in virtio 1 and after `TUNSETVNETLE`.
    #[must_use]
    pub fn to_bytes(self) -> [u8; VIRTIO_NET_HDR_BYTES] {
        let [a, b] = self.hdr_len.to_le_bytes();
        let [c, d] = self.gso_size.to_le_bytes();
        let [e, f] = self.csum_start.to_le_bytes();
        let [g, h] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, a, b, c, d, e, f, g, h]
    }
}

/// Type of segmentation of a merged or GSO packet: the header's `gso_type`.
#[must_use]
pub fn gso_type(packet: &Packet) -> u8 {
    // A tunnel is described by its inner headers, or cut before it is sent.
    if packet.gso_size() == 0 || packet.is_merged_tunnel() {
        return GSO_NONE;
    }
    gso_type_of(&packet.headers, packet.frame.data())
}

/// Type of segmentation of the packet with these headers.
fn gso_type_of(headers: &Headers, bytes: &[u8]) -> u8 {
    let flags = View::new(bytes, headers).tcp_flags();
    let is_cwr = flags.is_some_and(|flags| flags & u16::from(CWR) != 0);
    let ecn = if is_cwr { GSO_ECN } else { 0 };
    match (headers.transport, headers.network) {
        (Transport::Tcp, Network::Ipv6) => GSO_TCPV6 | ecn,
        (Transport::Tcp, _) => GSO_TCPV4 | ecn,
        _ => GSO_UDP_L4,
    }
}

/// Describes a merged or GSO packet for the receiver that segments it, and sets its checksum field
/// to the pseudo header's sum. A packet of a single segment is unchanged.
///
/// A receiver that segments by this header increments the id of every IPv4 segment, because the
/// header has no field for constant ids. All other fields are restored.
pub fn describe(packet: &mut Packet) -> VirtioNetHdr {
    let headers = packet.headers;
    let (1.., Some(csum_offset)) = (packet.gso_size(), csum_offset(headers.transport)) else {
        return VirtioNetHdr::default();
    };
    let gso_type = gso_type(packet);
    let mut bytes = HeaderBytes::new(packet.frame.data_mut(), &headers);
    bytes.set_partial_checksum(headers.payload_len.into());
    VirtioNetHdr {
        flags: NEEDS_CSUM,
        gso_type,
        hdr_len: headers.payload_offset,
        gso_size: packet.gso_size(),
        csum_start: headers.transport_offset,
        csum_offset,
    }
}
