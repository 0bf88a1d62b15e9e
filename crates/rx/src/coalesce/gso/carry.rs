//! `virtio_net_hdr` that the kernel or a device puts before a frame: segmentation, and the state of
//! the checksum. No field is trusted unless the frame confirms it.

use std::fmt;

use forebay_buf::Frame;

use super::{
    DATA_VALID, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, VirtioNetHdr,
    gso_type_of,
};
use crate::coalesce::candidate::are_shared;
use crate::coalesce::header::{HeaderBytes, pseudo_sum};
use crate::coalesce::tunnel::Tunnel;
use crate::coalesce::wire::{IPV6_BYTES, UDP_BYTES};
use crate::nonlinear::sum_in;
use crate::packet::Packet;
use crate::parse::Network::{Ipv4, Ipv6};
use crate::parse::Transport::{self, Icmp, Other, Tcp, Udp};
use crate::parse::checksum::{Sum, judge};
use crate::parse::partial::{complete_knowing, csum_offset, holds_pseudo_sum};
use crate::parse::pull::{Reach, parse_pulling, pull_all, pull_to};
use crate::parse::{
    Checksum, Fragment, Headers, NETWORK_BYTES_MIN, Network, Verify, is_plain, parse,
};

const GSO_TCPV4_ECN: u8 = GSO_TCPV4 | GSO_ECN;
const GSO_TCPV6_ECN: u8 = GSO_TCPV6 | GSO_ECN;

/// Offset of the checksum in SCTP (RFC 9260): a CRC of four bytes, not the Internet checksum.
const SCTP_CSUM_OFFSET: u16 = 8;

/// Offset of the header's length in TCP (RFC 9293, "data offset").
const TCP_DATA_OFFSET_AT: usize = 12;

/// Maximum number of segments of a packet: the longest packet by the kernel's smallest `gso_size`
/// (`TCP_MIN_GSO_SIZE`).
pub const GSO_SEGMENTS_MAX: u16 = 8192;

/// Contradiction between a frame and the header that came before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InvalidVnetHeader {
    /// Unknown type of segmentation, or one no longer in use (fragments of UDP).
    Type,
    /// Segments of length 0, or more than [`GSO_SEGMENTS_MAX`] of them.
    Size,
    /// Header length beyond the end of the frame.
    HeaderLen,
    /// Checksum field at an impossible place, or not that of the transport to be segmented.
    Checksum,
    /// Headers of another kind than `gso_type`, or inconsistent ones.
    Headers,
    /// Truncated frame, which cannot be segmented.
    Snapped,
}

impl InvalidVnetHeader {
    /// The contradiction, in a few words.
    #[must_use]
    pub fn what(self) -> &'static str {
        match self {
            Self::Type => "a gso_type that there is not",
            Self::Size => "a gso_size that makes no segments, or too many",
            Self::HeaderLen => "a hdr_len beyond the frame",
            Self::Checksum => "a checksum where the frame has none",
            Self::Headers => "a gso_type that is not that of the headers",
            Self::Snapped => "a gso_type of a frame that was cut short",
        }
    }
}

impl fmt::Display for InvalidVnetHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a virtio_net_hdr with {}", self.what())
    }
}

impl std::error::Error for InvalidVnetHeader {}

impl VirtioNetHdr {
    /// Applies this header to the packet that was received behind it and is not parsed yet.
    ///
    /// For a nonlinear packet, the bytes that this header refers to are pulled into the frame, as
    /// far as there is room. A checksum field beyond that is refused, as are the headers of a
    /// packet to be segmented.
    ///
    /// A partial checksum is completed in the frame. If the frame was summed while it was copied
    /// ([`Packet::fill`]), its payload is not read again. The packet has a
    /// [`DeviceSum`](crate::parse::DeviceSum) afterwards, from which parsing judges the checksum
    /// without reading the payload.
    ///
    /// A packet to be segmented gets its [segment size](Packet::gso_size); its checksum field then
    /// holds the pseudo header's sum, and it counts as verified, because it has no full sum yet. If
    /// `gso_size` leaves one segment, there is nothing to segment, as in the kernel's
    /// `virtio_net_hdr_to_skb`. One to be segmented inside a tunnel has all its checksums completed,
    /// and is marked as [merged in it](Packet::is_merged_tunnel). If this is a tunnel of a kind that
    /// is not merged here, the packet stays one large packet. So does one behind a link header that
    /// is not known, and TCP with headers that could differ by segment, with one checksum.
    ///
    /// # Errors
    /// If the header contradicts the frame. No byte of the frame is changed then, and the packet
    /// must not be used ([`DropReason::VnetHeader`](crate::DropReason::VnetHeader)).
    pub fn carry_into(self, packet: &mut Packet) -> Result<(), InvalidVnetHeader> {
        if u32::from(self.hdr_len) > packet.frame.total_len_bytes() {
            return Err(InvalidVnetHeader::HeaderLen);
        }
        match self.shape(packet)? {
            CarriedShape::Whole(headers) => self.carry_whole(&headers, packet),
            CarriedShape::Tunnel(tunnel, inner) => {
                complete_inner(packet, &inner);
                self.carry_tunnel(&tunnel, &inner, packet);
            }
            CarriedShape::UnknownTunnel(headers) => {
                self.complete(packet)?;
                complete_outer(&headers, packet);
            }
            CarriedShape::Segment if self.flags & NEEDS_CSUM != 0 => self.complete(packet)?,
            // A sum of the frame is stronger evidence than the flag.
            CarriedShape::Segment
                if self.flags & DATA_VALID != 0 && packet.device_sum.is_none() =>
            {
                packet.headers.l4_checksum = Checksum::Good;
            }
            CarriedShape::Segment => {}
        }
        Ok(())
    }

    fn carry_whole(self, headers: &Headers, packet: &mut Packet) {
        packet.set_gso_size(self.gso_size);
        packet.device_sum = None;
        packet.headers.l4_checksum = Checksum::Good;
        let mut bytes = HeaderBytes::new(packet.frame.data_mut(), headers);
        bytes.set_partial_checksum(headers.payload_len.into());
    }

    /// Marks a packet whose inner checksum is complete, and completes those outside.
    fn carry_tunnel(self, tunnel: &Tunnel, inner: &Headers, packet: &mut Packet) {
        packet.set_gso_size(self.gso_size);
        packet.headers.transport = Transport::Tunnel;
        packet.headers.payload_offset = inner.payload_offset;
        packet.device_sum = None;
        tunnel.rewrite(packet.frame.data_mut(), inner, inner.payload_len.into(), None);
        if tunnel.has_udp_checksum() {
            packet.headers.l4_checksum = Checksum::Good;
        }
    }

    /// Completes the checksum of a packet of one segment.
    fn complete(self, packet: &mut Packet) -> Result<(), InvalidVnetHeader> {
        let (start, offset) = (self.csum_start, self.csum_offset);
        let is_snapped = packet.frame.total_len_bytes() < packet.wire_len;
        let end = usize::from(self.csum_start) + usize::from(self.csum_offset) + 2;
        if end > packet.wire_len as usize {
            return Err(InvalidVnetHeader::Checksum);
        }
        if is_snapped || self.csum_offset == SCTP_CSUM_OFFSET {
            return Ok(()); // not computable from a part, or a CRC
        }
        if packet.is_nonlinear() && !pull_to(&mut packet.frame, end) {
            return Err(InvalidVnetHeader::Checksum);
        }
        let link = packet.headers.link;
        let summed = complete_knowing(packet.device_sum, &mut packet.frame, link, start, offset);
        packet.device_sum = summed.map_err(|_| InvalidVnetHeader::Checksum)?;
        Ok(())
    }

    /// Kind of a packet, by this header and the packet's own.
    fn shape(self, packet: &mut Packet) -> Result<CarriedShape, InvalidVnetHeader> {
        if self.gso_type == GSO_NONE {
            return Ok(CarriedShape::Segment);
        }
        let is_kind: fn(&Headers) -> bool = match self.gso_type {
            GSO_TCPV4 | GSO_TCPV4_ECN => |it| (it.network, it.transport) == (Ipv4, Tcp),
            GSO_TCPV6 | GSO_TCPV6_ECN => |it| (it.network, it.transport) == (Ipv6, Tcp),
            GSO_UDP_L4 => |it| it.transport == Udp,
            _ => return Err(InvalidVnetHeader::Type),
        };
        if self.gso_size == 0 {
            return Err(InvalidVnetHeader::Size);
        }
        if packet.frame.total_len_bytes() < packet.wire_len {
            return Err(InvalidVnetHeader::Snapped);
        }
        let headers = look(packet)?;
        if self.tells_of_inner(&headers) {
            return self.tunnel_shape(packet, headers);
        }
        let is_partial = self.flags & NEEDS_CSUM != 0;
        if !is_partial && let Some(list) = self.list_in_tunnel(packet, &headers) {
            return Ok(list);
        }
        let can_be_cut = can_be_cut(&packet.frame, &headers);
        // Datagrams in one would be another datagram.
        let can_stay = can_be_cut || is_partial && headers.transport == Tcp;
        if !is_kind(&headers) || !is_sound(&packet.frame, &headers) || !can_stay {
            return Err(InvalidVnetHeader::Headers);
        }
        if headers.payload_len.div_ceil(self.gso_size) > GSO_SEGMENTS_MAX {
            return Err(InvalidVnetHeader::Size);
        }
        let is_place = (self.csum_start, self.csum_offset)
            == (headers.transport_offset, csum_offset(headers.transport).unwrap_or(0));
        // TCP is accepted without, as in the kernel: each segment was verified before it was
        // merged. So was each datagram of a list.
        let may_be_complete =
            || headers.transport == Tcp || is_list(packet, &headers, self.gso_size);
        // The value of the field is ignored, as in the kernel: not every sender writes the pseudo
        // header's sum, and the field is set anew in any case.
        if is_partial && !is_place || !is_partial && !may_be_complete() {
            return Err(InvalidVnetHeader::Checksum);
        }
        let is_cut = can_be_cut && headers.payload_len > self.gso_size;
        Ok(if is_cut { CarriedShape::Whole(headers) } else { CarriedShape::Segment })
    }

    /// Kind of a packet in a tunnel, or behind a link header that is not known.
    fn tunnel_shape(
        self,
        packet: &mut Packet,
        headers: Headers,
    ) -> Result<CarriedShape, InvalidVnetHeader> {
        pull_headers(packet);
        let end = self.headers_end(packet.frame.data());
        let found = end.and_then(|end| Tunnel::ending_at(packet, &headers, end));
        let found = found.filter(|(_, inner)| {
            let place = (inner.transport_offset, csum_offset(inner.transport));
            place == (self.csum_start, Some(self.csum_offset)) && self.fits_inner(packet, inner)
        });
        match found {
            Some((_, inner)) if inner.payload_len <= self.gso_size => {
                Ok(CarriedShape::UnknownTunnel(headers))
            }
            Some((_, inner)) if inner.payload_len.div_ceil(self.gso_size) > GSO_SEGMENTS_MAX => {
                Err(InvalidVnetHeader::Size)
            }
            Some((tunnel, inner)) => Ok(CarriedShape::Tunnel(tunnel, inner)),
            // Datagrams in one would be another datagram.
            None if self.gso_type == GSO_UDP_L4 => Err(InvalidVnetHeader::Headers),
            None => Ok(CarriedShape::UnknownTunnel(headers)),
        }
    }

    /// End of the headers whose checksum this header is about.
    fn headers_end(self, bytes: &[u8]) -> Option<u16> {
        let start = usize::from(self.csum_start);
        let len_bytes = match self.gso_type {
            GSO_UDP_L4 => UDP_BYTES,
            _ => usize::from(bytes.get(start + TCP_DATA_OFFSET_AT)? >> 4) * 4,
        };
        u16::try_from(start + len_bytes).ok()
    }

    /// Packet that the kernel has merged as a list inside IP or GRE: the inner checksum is still that of the first segment.
    fn list_in_tunnel(self, packet: &mut Packet, headers: &Headers) -> Option<CarriedShape> {
        if headers.transport != Other {
            return None;
        }
        pull_headers(packet);
        let (tunnel, inner) = Tunnel::of_parsed(packet, headers)?;
        let is_list = self.fits_inner(packet, &inner)
            && inner.payload_len > self.gso_size
            && inner.payload_len.div_ceil(self.gso_size) <= GSO_SEGMENTS_MAX
            && (inner.transport == Tcp || is_list(packet, &inner, self.gso_size));
        is_list.then_some(CarriedShape::Tunnel(tunnel, inner))
    }

    /// True if this header is about a packet with these inner headers, and suits segments of it.
    fn fits_inner(self, packet: &Packet, inner: &Headers) -> bool {
        let bytes = packet.frame.data();
        let network = inner.network_offset.into()..inner.transport_offset.into();
        let is_kind = gso_type_of(inner, bytes) & !GSO_ECN == self.gso_type & !GSO_ECN;
        is_kind
            && usize::from(inner.payload_offset) <= bytes.len()
            && is_sound(&packet.frame, inner)
            && bytes.get(network).is_some_and(|header| is_plain_network(inner.network, header))
    }

    /// True if the checksum is behind the headers of a tunnel, or behind a link header that is not
    /// known: another IP header is in between. The header itself has no field that marks tunnels.
    fn tells_of_inner(self, headers: &Headers) -> bool {
        let outer_end = match (headers.network, headers.transport) {
            (_, Tcp | Icmp | Transport::Tunnel) => return false,
            (Network::Other, _) => u16::from(headers.network_offset),
            (_, Udp) => headers.payload_offset,
            (_, Other) => u16::from(headers.network_offset) + NETWORK_BYTES_MIN,
        };
        self.flags & NEEDS_CSUM != 0
            && headers.flaw.is_none()
            && headers.fragment == Fragment::Whole
            && self.csum_start >= outer_end + NETWORK_BYTES_MIN
    }
}

/// Headers of a packet to be segmented. In a nonlinear packet they must be in the frame itself.
fn look(packet: &mut Packet) -> Result<Headers, InvalidVnetHeader> {
    let Packet { frame, wire_len, headers: Headers { link, .. }, .. } = packet;
    if frame.frag_count() == 0 {
        return Ok(parse(frame.data(), *wire_len, *link, Verify::Nothing));
    }
    let told = Headers { link: *link, ..Headers::default() };
    match parse_pulling(frame, told, (*wire_len, None), Verify::Nothing) {
        (headers, Reach::Held) => Ok(headers),
        // No packet to be segmented has headers so long.
        (_, Reach::Beyond) => Err(InvalidVnetHeader::Headers),
    }
}

/// Pulls headers that continue in pieces into the frame, as far as there is room.
fn pull_headers(packet: &mut Packet) {
    if packet.is_nonlinear() {
        let _ = pull_all(&mut packet.frame);
    }
}

/// True if the packet is a list of datagrams that the kernel has merged (`NETIF_F_GRO_FRAGLIST`): the checksum is still
/// that of the first one. A tunnel has one of the whole packet, or none.
fn is_list(packet: &Packet, headers: &Headers, gso_size: u16) -> bool {
    let transport = usize::from(headers.transport_offset);
    let header = packet.frame.data().get(transport..).and_then(<[u8]>::first_chunk);
    let Some(&[source_high, source_low, port_high, port_low, _, _, high, low]) = header else {
        return false;
    };
    if headers.transport != Udp || [high, low] == [0; 2] {
        return false;
    }
    let len = gso_size.min(headers.payload_len);
    let (mut skipped_bytes, mut left_bytes) =
        (usize::from(headers.payload_offset), usize::from(len));
    let payload = packet.fragments().map(|piece| {
        let (skipped, piece) = piece.split_at(skipped_bytes.min(piece.len()));
        let piece = &piece[..left_bytes.min(piece.len())];
        skipped_bytes -= skipped.len();
        left_bytes -= piece.len();
        piece
    });
    let sum = pseudo_sum(packet.frame.data(), headers, len.into())
        .plus(Sum::of_pieces(payload))
        .plus(Sum::of(&[source_high, source_low, port_high, port_low]))
        .plus_len(UDP_BYTES + usize::from(len))
        .plus_word(u16::from_be_bytes([high, low]));
    judge(sum) == Checksum::Good
}

/// Completes the inner checksum of a packet merged in a tunnel. The value of the field is ignored, as of a packet without
/// tunnel; in a list it is that of the first segment.
fn complete_inner(packet: &mut Packet, inner: &Headers) {
    let start = usize::from(inner.payload_offset);
    let payload = sum_in(&packet.frame, start..start + usize::from(inner.payload_len));
    let mut bytes = HeaderBytes::new(packet.frame.data_mut(), inner);
    bytes.set_checksum(inner.payload_len.into(), payload);
}

/// Treatment of a packet.
enum CarriedShape {
    /// Several segments, behind these headers.
    Whole(Headers),
    /// Several segments in a tunnel, with these inner headers.
    Tunnel(Tunnel, Headers),
    /// Several segments behind these headers, and others that are not known: one packet here.
    UnknownTunnel(Headers),
    /// One wire packet.
    Segment,
}

/// Completes the outer UDP checksum of a tunnel, if it is partial, too.
fn complete_outer(headers: &Headers, packet: &mut Packet) {
    let (frame, start) = (&mut packet.frame, headers.transport_offset);
    if let Some(offset) = csum_offset(headers.transport)
        && holds_pseudo_sum(frame.data(), headers)
        && let Ok(sum) = complete_knowing(packet.device_sum, frame, headers.link, start, offset)
    {
        packet.device_sum = sum;
    }
}

/// True if the headers do not contradict each other, and the packet ends where the frame does.
fn is_sound(frame: &Frame, headers: &Headers) -> bool {
    let place = headers.network_offset.into()..headers.transport_offset.into();
    let is_sound_network = match (headers.network, frame.data().get(place)) {
        (Ipv4, Some(header @ &[_, _, _, _, _, _, _, _, _, protocol, ..])) => {
            protocol == headers.protocol && judge(Sum::of(header)) == Checksum::Good
        }
        (Ipv6, Some(_)) => true,
        _ => false,
    };
    let end = usize::from(headers.payload_offset) + usize::from(headers.payload_len);
    is_sound_network
        && headers.flaw.is_none()
        && headers.fragment == Fragment::Whole
        && end == frame.total_len_bytes() as usize
}

/// True if the headers suit segments of any length: those of the kinds that are
/// [merged](crate::coalesce) here, and IPv4 options.
fn can_be_cut(frame: &Frame, headers: &Headers) -> bool {
    let bytes = frame.data();
    let network = usize::from(headers.network_offset);
    let (Some(link_header), Some(header)) =
        (bytes.get(..network), bytes.get(network..headers.transport_offset.into()))
    else {
        return false;
    };
    is_plain(link_header) && is_plain_network(headers.network, header)
}

/// True if segments of any length can share the IP header and its extensions.
fn is_plain_network(network: Network, header: &[u8]) -> bool {
    match (network, header) {
        (Ipv6, &[_, _, _, _, _, _, next, ..]) => {
            header.get(IPV6_BYTES..).is_some_and(|extensions| are_shared(next, extensions))
        }
        _ => true,
    }
}
