//! Description of a merged packet, by which a device or the kernel behind a TUN cuts it again.

mod carry;

pub use carry::{GSO_SEGMENTS_MAX, InvalidVnetHeader};

use super::header::HeaderBytes;
use super::wire::CWR;
use crate::packet::Packet;
use crate::parse::partial::csum_offset;
use crate::parse::{Headers, Network, Transport};

/// The `virtio_net_hdr` of a packet (virtio 1.2, section 5.1.6), all that goes before it on a TUN
/// with `IFF_VNET_HDR`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VirtioNetHdr {
    /// Bit 0: the checksum is still to be completed.
    pub flags: u8,
    /// Manner of cutting.
    pub gso_type: u8,
    /// Bytes of headers, which go before every segment.
    pub hdr_len: u16,
    /// Bytes of payload in every segment but the last.
    pub gso_size: u16,
    /// Offset at which summing begins.
    pub csum_start: u16,
    /// Offset of the sum from there.
    pub csum_offset: u16,
}

/// The checksum is the pseudo header's so far.
pub const NEEDS_CSUM: u8 = 1;
/// The checksum has been verified.
pub const DATA_VALID: u8 = 2;
/// Not to be cut.
pub const GSO_NONE: u8 = 0;
/// TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// UDP datagrams of one size.
pub const GSO_UDP_L4: u8 = 5;
/// Added to TCP's: the first segment alone says that congestion was heeded (CWR).
pub const GSO_ECN: u8 = 0x80;

/// Bytes of a header without a buffer count.
pub const VIRTIO_NET_HDR_BYTES: usize = 10;

impl VirtioNetHdr {
    /// Reads what lies before a packet, little-endian.
    #[must_use]
    pub fn from_bytes(bytes: [u8; VIRTIO_NET_HDR_BYTES]) -> Self {
        let [flags, gso_type, fields @ ..] = bytes;
        let [a, b, c, d, e, f, g, h] = fields;
        let [hdr_len, gso_size, csum_start, csum_offset] =
            [[a, b], [c, d], [e, f], [g, h]].map(u16::from_le_bytes);
        Self { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset }
    }

    /// As it lies before a packet, little-endian as virtio 1 and `TUNSETVNETLE` have it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; VIRTIO_NET_HDR_BYTES] {
        let [a, b] = self.hdr_len.to_le_bytes();
        let [c, d] = self.gso_size.to_le_bytes();
        let [e, f] = self.csum_start.to_le_bytes();
        let [g, h] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, a, b, c, d, e, f, g, h]
    }
}

/// Manner in which a receiver cuts a whole packet: the header's `gso_type`.
#[must_use]
pub fn gso_type(packet: &Packet) -> u8 {
    let Headers { transport, network, .. } = packet.headers;
    if packet.gso_size() == 0 {
        return GSO_NONE;
    }
    let is_cwr = packet.view().tcp_flags().is_some_and(|flags| flags & u16::from(CWR) != 0);
    let ecn = if is_cwr { GSO_ECN } else { 0 };
    match (transport, network) {
        (Transport::Tunnel, _) => GSO_NONE, // cut before it is sent
        (Transport::Tcp, Network::Ipv6) => GSO_TCPV6 | ecn,
        (Transport::Tcp, _) => GSO_TCPV4 | ecn,
        _ => GSO_UDP_L4,
    }
}

/// Describes a packet for whoever cuts it, and puts into its checksum field what they expect: of a
/// merged packet, as of one that came whole, the pseudo header's sum. One of a single segment is
/// left as it is, to be sent as it is.
///
/// A receiver that cuts by this description gives every IPv4 segment an id one larger than the one before:
/// there is no word in it for ids that stay. All else comes out as it came in.
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
