//! `virtio_net_hdr` of a packet merged inside VXLAN or GENEVE, which the kernel behind a TAP
//! segments (`virtio_net_hdr_tnl_to_skb`, Linux 6.17; virtio 1.4, "UDP tunnel GSO").

use super::{
    GSO_UDP_TUNNEL_IPV4, GSO_UDP_TUNNEL_IPV6, NEEDS_CSUM, UDP_TUNNEL_CSUM, VIRTIO_NET_HDR_BYTES,
    VirtioNetHdr, gso_type_of,
};
use crate::coalesce::header::HeaderBytes;
use crate::coalesce::tunnel::Tunnel;
use crate::packet::Packet;
use crate::parse::Network;
use crate::parse::partial::csum_offset;

/// Length of `struct virtio_net_hdr_v1_hash_tunnel`, in bytes.
pub const VIRTIO_NET_HDR_TUNNEL_BYTES: usize = 24;

/// Offset of the fields that only a tunnel has, behind the buffer count and the hash.
const OFFSETS_AT: usize = 20;

/// Header with the offsets of a tunnel's headers. All offsets are zero for a packet that is not
/// segmented inside a tunnel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VirtioNetHdrTunnel {
    /// Fields of all packets; those of a tunnelled one are about the inner headers.
    pub plain: VirtioNetHdr,
    /// Offset of the outer UDP header.
    pub outer_th_offset: u16,
    /// Offset of the inner IP header.
    pub inner_nh_offset: u16,
}

impl VirtioNetHdrTunnel {
    /// Little-endian header.
    #[must_use]
    pub fn to_bytes(self) -> [u8; VIRTIO_NET_HDR_TUNNEL_BYTES] {
        let mut bytes = [0; VIRTIO_NET_HDR_TUNNEL_BYTES];
        bytes[..VIRTIO_NET_HDR_BYTES].copy_from_slice(&self.plain.to_bytes());
        let [a, b] = self.outer_th_offset.to_le_bytes();
        let [c, d] = self.inner_nh_offset.to_le_bytes();
        bytes[OFFSETS_AT..].copy_from_slice(&[a, b, c, d]);
        bytes
    }
}

impl From<VirtioNetHdr> for VirtioNetHdrTunnel {
    fn from(plain: VirtioNetHdr) -> Self {
        Self { plain, ..Self::default() }
    }
}

/// Describes a [merged tunnel packet](Packet::is_merged_tunnel) for the kernel that segments it,
/// and sets its inner and, if there is one, outer UDP checksum to the pseudo header's sum. `None`,
/// with the packet unchanged, if the header has no place for it: for another tunnel than UDP's,
/// with VLAN tags or PPPoE outside, or without an outer Ethernet header, which the kernel requires.
///
/// As for [`describe`](super::describe), the ids of every IPv4 header rise by one per segment.
pub fn describe_tunnel(packet: &mut Packet) -> Option<VirtioNetHdrTunnel> {
    let size = packet.gso_size();
    let (tunnel, inner) = Tunnel::of_merged(packet).filter(|_| size > 0)?;
    let (network, outer_th_offset) = tunnel.of_udp()?;
    let csum_offset = csum_offset(inner.transport)?;
    let gso_type = gso_type_of(&inner, packet.frame.data())
        | if network == Network::Ipv4 { GSO_UDP_TUNNEL_IPV4 } else { GSO_UDP_TUNNEL_IPV6 };
    let has_checksum = tunnel.set_partial_checksum(packet.frame.data_mut(), &inner);
    let mut bytes = HeaderBytes::new(packet.frame.data_mut(), &inner);
    bytes.set_partial_checksum(inner.payload_len.into());
    Some(VirtioNetHdrTunnel {
        plain: VirtioNetHdr {
            flags: NEEDS_CSUM | if has_checksum { UDP_TUNNEL_CSUM } else { 0 },
            gso_type,
            hdr_len: inner.payload_offset,
            gso_size: size,
            csum_start: inner.transport_offset,
            csum_offset,
        },
        outer_th_offset,
        inner_nh_offset: inner.network_offset.into(),
    })
}
