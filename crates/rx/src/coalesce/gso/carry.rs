//! The header that the kernel or a device puts before a frame: how the packet would be cut, and what of its
//! checksum is still to be done. None of it is believed that the frame does not bear out.

use std::fmt;

use forebay_buf::Frame;

use super::{
    DATA_VALID, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, VirtioNetHdr,
};
use crate::coalesce::candidate::are_options;
use crate::coalesce::header::HeaderBytes;
use crate::coalesce::wire::IPV6_BYTES;
use crate::packet::Packet;
use crate::parse::Network::{Ipv4, Ipv6};
use crate::parse::Transport::{Icmp, Other, Tcp, Tunnel, Udp};
use crate::parse::checksum::{Sum, judge};
use crate::parse::partial::{complete_knowing, csum_offset, holds_pseudo_sum};
use crate::parse::pull::{Reach, parse_pulling, pull_to};
use crate::parse::{Checksum, Fragment, Headers, NETWORK_BYTES_MIN, Verify, is_plain, parse};

const GSO_TCPV4_ECN: u8 = GSO_TCPV4 | GSO_ECN;
const GSO_TCPV6_ECN: u8 = GSO_TCPV6 | GSO_ECN;

/// The checksum of SCTP (RFC 9260) is none of the Internet's: a CRC of four bytes, here.
const SCTP_CSUM_OFFSET: u16 = 8;

/// The most segments that a packet is cut into: the largest one by the kernel's least `gso_size`
/// (`TCP_MIN_GSO_SIZE`).
pub const GSO_SEGMENTS_MAX: u16 = 8192;

/// Contradiction between a frame and the header that came before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InvalidVnetHeader {
    /// A way of cutting that there is not, or not any more (fragments of UDP).
    Type,
    /// Segments of no length, or more than [`GSO_SEGMENTS_MAX`].
    Size,
    /// More bytes of headers than there are bytes.
    HeaderLen,
    /// A checksum where none can be, or not that of the transport that is to be cut.
    Checksum,
    /// Headers that are not of the kind that is to be cut, or lie themselves.
    Headers,
    /// A frame that was cut short, which cannot be cut again.
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
    /// Has a packet that was received behind this header, and is not parsed yet, carry what it says.
    ///
    /// Of a packet in pieces, what this tells of is pulled into the frame itself, as far as there is
    /// room; a checksum field that lies behind that counts as a lie, as do headers of what is to be
    /// cut that do.
    ///
    /// A partial checksum is completed in the frame. If the frame was summed up while it was copied
    /// ([`Packet::fill`]), its payload is not looked at again; in any case the packet has a
    /// [`DeviceSum`](crate::parse::DeviceSum) afterwards, by which parsing judges the checksum
    /// without another look at the payload.
    ///
    /// Of a packet that is to be cut, its [segments' size](Packet::gso_size) is set, its checksum field
    /// holds the pseudo header's sum, and it counts as verified: there is no sum of it yet. Where
    /// `gso_size` leaves one segment, there is nothing to cut, as in the kernel's `virtio_net_hdr_to_skb`. What
    /// is to be cut inside a tunnel is not cut here: it is one large packet, and its checksums, inner
    /// and outer, are completed.
    ///
    /// # Errors
    /// When the header does not go with the frame. Then no byte of it is changed, and it is not to be
    /// used ([`DropReason::VnetHeader`](crate::DropReason::VnetHeader)).
    pub fn carry_into(self, packet: &mut Packet) -> Result<(), InvalidVnetHeader> {
        if u32::from(self.hdr_len) > packet.frame.total_len_bytes() {
            return Err(InvalidVnetHeader::HeaderLen);
        }
        match self.shape(packet)? {
            CarriedShape::Whole(headers) => self.carry_whole(&headers, packet),
            CarriedShape::Tunnel(headers) => {
                self.complete(packet)?;
                complete_outer(&headers, packet);
            }
            CarriedShape::Segment if self.flags & NEEDS_CSUM != 0 => self.complete(packet)?,
            // Who has a sum of the frame knows better than to believe.
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

    /// Completes the checksum of a packet that is one segment.
    fn complete(self, packet: &mut Packet) -> Result<(), InvalidVnetHeader> {
        let (start, offset) = (self.csum_start, self.csum_offset);
        let is_snapped = packet.frame.total_len_bytes() < packet.wire_len;
        let end = usize::from(self.csum_start) + usize::from(self.csum_offset) + 2;
        if end > packet.wire_len as usize {
            return Err(InvalidVnetHeader::Checksum);
        }
        if is_snapped || self.csum_offset == SCTP_CSUM_OFFSET {
            return Ok(()); // it cannot be told, here
        }
        if packet.is_nonlinear() && !pull_to(&mut packet.frame, end) {
            return Err(InvalidVnetHeader::Checksum);
        }
        let link = packet.headers.link;
        let summed = complete_knowing(packet.device_sum, &mut packet.frame, link, start, offset);
        packet.device_sum = summed.map_err(|_| InvalidVnetHeader::Checksum)?;
        Ok(())
    }

    /// Kind of a packet, by this and its headers.
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
            return Ok(CarriedShape::Tunnel(headers));
        }
        if !is_kind(&headers) || !can_be_cut(&packet.frame, &headers) {
            return Err(InvalidVnetHeader::Headers);
        }
        if headers.payload_len.div_ceil(self.gso_size) > GSO_SEGMENTS_MAX {
            return Err(InvalidVnetHeader::Size);
        }
        let is_partial = self.flags & NEEDS_CSUM != 0;
        let is_place = (self.csum_start, self.csum_offset)
            == (headers.transport_offset, csum_offset(headers.transport).unwrap_or(0));
        // The kernel takes TCP without: whoever merged it had verified each segment.
        let may_be_complete = headers.transport == Tcp;
        // What the field holds is not looked at, as in the kernel: not every sender puts the pseudo
        // header's sum there, and it is set anew in any case.
        if is_partial && !is_place || !is_partial && !may_be_complete {
            return Err(InvalidVnetHeader::Checksum);
        }
        let is_cut = headers.payload_len > self.gso_size;
        Ok(if is_cut { CarriedShape::Whole(headers) } else { CarriedShape::Segment })
    }

    /// True if the checksum that it tells of is one behind the headers of a tunnel, which says
    /// nothing of itself: another IP header lies between.
    fn tells_of_inner(self, headers: &Headers) -> bool {
        let outer_end = match headers.transport {
            Tcp | Icmp | Tunnel => return false,
            Udp => headers.payload_offset,
            Other => u16::from(headers.network_offset) + NETWORK_BYTES_MIN,
        };
        self.flags & NEEDS_CSUM != 0
            && matches!(headers.network, Ipv4 | Ipv6)
            && headers.flaw.is_none()
            && headers.fragment == Fragment::Whole
            && self.csum_start >= outer_end + NETWORK_BYTES_MIN
    }
}

/// The headers of a packet that is to be cut. Of one in pieces they must be in the frame itself.
fn look(packet: &mut Packet) -> Result<Headers, InvalidVnetHeader> {
    let Packet { frame, wire_len, headers: Headers { link, .. }, .. } = packet;
    if frame.frag_count() == 0 {
        return Ok(parse(frame.data(), *wire_len, *link, Verify::Nothing));
    }
    let told = Headers { link: *link, ..Headers::default() };
    match parse_pulling(frame, told, (*wire_len, None), Verify::Nothing) {
        (headers, Reach::Held) => Ok(headers),
        // Nothing that is to be cut has headers so long.
        (_, Reach::Beyond) => Err(InvalidVnetHeader::Headers),
    }
}

/// Treatment of a packet.
enum CarriedShape {
    /// Several segments, behind these headers.
    Whole(Headers),
    /// Several segments, behind a tunnel's headers.
    Tunnel(Headers),
    /// One packet, as it is to be sent.
    Segment,
}

/// Completes the checksum of a tunnel over UDP, if it was left to the device, too.
fn complete_outer(headers: &Headers, packet: &mut Packet) {
    let (frame, start) = (&mut packet.frame, headers.transport_offset);
    if let Some(offset) = csum_offset(headers.transport)
        && holds_pseudo_sum(frame.data(), headers)
        && let Ok(sum) = complete_knowing(packet.device_sum, frame, headers.link, start, offset)
    {
        packet.device_sum = sum;
    }
}

/// True if the headers go before segments of any length, and the last one's packet ends where the
/// frame does: the kinds that are [merged](crate::coalesce) here, and IPv4 options.
fn can_be_cut(frame: &Frame, headers: &Headers) -> bool {
    let bytes = frame.data();
    let (network, transport) =
        (usize::from(headers.network_offset), usize::from(headers.transport_offset));
    let (Some(link_header), Some(header)) = (bytes.get(..network), bytes.get(network..transport))
    else {
        return false;
    };
    let is_plain_network = match (headers.network, header) {
        (Ipv4, &[_, _, _, _, _, _, _, _, _, protocol, ..]) => {
            protocol == headers.protocol && judge(Sum::of(header)) == Checksum::Good
        }
        (Ipv6, &[_, _, _, _, _, _, next, ..]) => {
            header.get(IPV6_BYTES..).is_some_and(|options| are_options(next, options))
        }
        _ => false,
    };
    let end = usize::from(headers.payload_offset) + usize::from(headers.payload_len);
    is_plain(link_header)
        && is_plain_network
        && headers.flaw.is_none()
        && headers.fragment == Fragment::Whole
        && end == frame.total_len_bytes() as usize
}
