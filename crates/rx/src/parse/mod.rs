//! Parse: one walk over a frame's headers, after which no later stage checks a length again. Common
//! headers take a fast path.
//!
//! The walk never fails. It records its findings in [`Headers`], and stops where the frame does. An
//! inconsistent header is recorded as a [`Flaw`] for the stage that judges the packet: the network
//! layer drops it, a probe reports it. Recorded headers begin within the captured bytes; the
//! payload of a truncated frame may begin behind them. [`View`] reads the fields.
// Bytes from outside are accessed by patterns and checked slices only.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::panic))]

mod fast_path; //     headers of nearly every packet, without a loop
mod ethernet; //      Ethernet II, 802.3 with SNAP, VLAN tags
mod ipv4; //          IPv4
mod ipv6; //          IPv6 and its extension headers
pub mod extension; // one walk over extension headers, for all users
mod transport; //     TCP, UDP, the start of ICMP
mod view; //          fields of a parsed packet
pub mod checksum; //  the Internet checksum
mod device_sum; //    a sum that a device computed
pub(crate) mod partial; // checksums that a device was to complete
pub(crate) mod pull; // nonlinear packets: headers in the frame itself

use std::ops::Range;

pub use device_sum::DeviceSum;
pub(crate) use ethernet::is_plain;
pub use ethernet::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, LinkLayer, MAX_VLAN_TAGS, link_layer};
use forebay_buf::{Frame, Pool};
pub use ipv6::MAX_EXTENSION_HEADERS;
pub(crate) use partial::complete_partial;
pub use partial::{NoSuchField, complete_checksum};
pub use view::View;

use crate::coalesce::find_inner;
use crate::nonlinear::bytes_in;
use crate::packet::Packet;

/// Minimum length of the headers before a transport header: that of IPv4.
pub(crate) const NETWORK_BYTES_MIN: u16 = 20;

/// Header before the network header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Link {
    /// Ethernet II or 802.3 header, with up to [`MAX_VLAN_TAGS`] tags.
    #[default]
    Ethernet,
    /// None: the first byte is the IP header's.
    Ip,
}

/// Verification of checksums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verify {
    /// Verify every packet that was captured as a whole.
    Checksums,
    /// No verification: the device has done it, or it is not required.
    Nothing,
}

/// Offsets and kinds of a frame's headers: sixteen bytes that travel with the packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Headers {
    /// Link that the frame begins with.
    pub link: Link,
    /// Kind of network header, by its first byte: a truncated frame may contain no more of it.
    pub network: Network,
    /// Kind of transport header, if its fixed part was captured.
    pub transport: Transport,
    /// IPv4 protocol, or IPv6 next header after the last extension header; 0 if truncated.
    pub protocol: u8,
    /// Place in a fragmented datagram.
    pub fragment: Fragment,
    /// First flaw that the walk met, if any.
    pub flaw: Option<Flaw>,
    /// Verdict on the IPv4 header checksum.
    pub ip_checksum: Checksum,
    /// Verdict on the TCP or UDP checksum. A source sets it if the device has verified the checksum
    /// (`CHECKSUM_UNNECESSARY` in the kernel); then parsing does not verify it.
    pub l4_checksum: Checksum,
    /// Offset of the network header, if there is one.
    pub network_offset: u8,
    /// Device that the packet was received from, by its index among those of a host, once the stack
    /// has delivered it (`skb_iif`); 0 until then.
    pub device: u8,
    /// Offset of the transport header; 0 if this frame has none, or none of it was captured.
    pub transport_offset: u16,
    /// Offset of the transport's payload; 0 if unknown.
    pub payload_offset: u16,
    /// Length of the payload on the wire, by the headers; a truncated frame contains less.
    pub payload_len: u16,
}

/// Network headers that the path knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Network {
    /// None.
    #[default]
    Other,
    /// IPv4, twenty bytes or more.
    Ipv4,
    /// IPv6, forty bytes and its extension headers.
    Ipv6,
}

/// Transport headers that the path knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Transport {
    /// None, or none whose fixed part was captured.
    #[default]
    Other,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP or ICMPv6.
    Icmp,
    /// TCP or UDP inside a tunnel, of a [merged](crate::coalesce) packet: its payload offset and length are those
    /// of the innermost transport, all else is of the outermost IP header.
    Tunnel,
}

impl Transport {
    /// Every kind, in the order of its number.
    pub(crate) const ALL: [Self; 5] = [Self::Other, Self::Tcp, Self::Udp, Self::Icmp, Self::Tunnel];
}

/// Place of a packet in its datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fragment {
    /// Whole datagram.
    #[default]
    Whole,
    /// Whole datagram, marked as a fragment nevertheless (an atomic fragment, RFC 6946), or joined from fragments.
    Atomic,
    /// First fragment, with the transport header and a part of the payload.
    First,
    /// Later fragment, without transport header.
    Later,
}

impl Fragment {
    /// True if this is a whole datagram.
    #[must_use]
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Whole | Self::Atomic)
    }
}

/// Verdict on a checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Checksum {
    /// No checksum, or one that was not judged: of a fragment, of a truncated frame, or without
    /// verification.
    #[default]
    Unknown,
    /// Correct checksum.
    Good,
    /// Wrong checksum.
    Bad,
}

/// Inconsistency of a frame's headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// Shorter than its link header.
    Runt,
    /// Impossible IP version or header length.
    IpHeader,
    /// IP length beyond the end of the frame on the wire, or below the header's length.
    IpLength,
    /// Too many IPv6 extension headers, or one that ends outside the packet.
    Extension,
    /// Impossible TCP header length, or a packet too short for its transport header.
    TransportHeader,
    /// UDP length below the header's, or beyond the IP packet.
    UdpLength,
}

/// Walks over the headers of a frame that was `wire_len` bytes long on the wire, of which `bytes`
/// were captured.
#[must_use]
pub fn parse(bytes: &[u8], wire_len: u32, link: Link, verify: Verify) -> Headers {
    let mut headers = Headers { link, ..Headers::default() };
    parse_into(&mut headers, bytes, wire_len, None, verify);
    headers
}

/// Walks over the headers of a frame, and completes `headers`, which so far contain only the link and
/// perhaps the device's verdict on the checksum. With the device's sum, a checksum is judged from
/// that, even if others are not verified.
#[inline]
pub fn parse_into(
    headers: &mut Headers,
    bytes: &[u8],
    wire_len: u32,
    device_sum: Option<DeviceSum>,
    verify: Verify,
) {
    if !fast_path::find(headers, bytes, wire_len) {
        return parse_by_walk(headers, bytes, wire_len, device_sum, verify);
    }
    if verify == Verify::Checksums || device_sum.is_some() {
        fast_path::judge(headers, bytes, wire_len, device_sum, verify);
    }
}

/// Completes `headers` by the general walk alone: the slow twin of [`parse_into`] with its fast path.
#[inline(never)]
pub fn parse_by_walk(
    headers: &mut Headers,
    bytes: &[u8],
    wire_len: u32,
    device_sum: Option<DeviceSum>,
    verify: Verify,
) {
    let seen = Seen { device_sum, ..Seen::new(bytes, wire_len, headers.link) };
    let _ = walk_noting(&seen, verify, headers);
}

/// Walks over the headers of a packet. Afterwards those of a [nonlinear](Packet::is_nonlinear) packet
/// are in its own frame; if they are too long for that, the packet is copied into one frame of
/// `pool`. A packet that the source has marked as merged in a tunnel has the headers of one that was
/// merged here.
///
/// # Errors
/// If the packet must be copied and there is no memory. Its headers are then known in part.
#[inline]
pub fn parse_packet(packet: &mut Packet, verify: Verify, pool: &mut Pool) -> Result<(), NoMemory> {
    let inner_end = packet.is_merged_tunnel().then_some(packet.headers.payload_offset);
    if packet.is_nonlinear() {
        pull::parse_packet(packet, verify, pool)?;
    } else {
        let Packet { frame, headers, wire_len, device_sum, .. } = packet;
        parse_into(headers, frame.data(), *wire_len, *device_sum, verify);
    }
    if let Some(headers_end) = inner_end {
        find_inner(packet, headers_end);
    }
    Ok(())
}

/// Error: no frame to copy a packet to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoMemory;

/// Walks, and records a flaw.
fn walk_noting(seen: &Seen<'_>, verify: Verify, headers: &mut Headers) -> Result<(), Stop> {
    let walked = walk(seen, verify, headers);
    if let Err(Stop::Flaw(flaw)) = walked {
        headers.flaw.get_or_insert(flaw);
    }
    walked
}

fn walk(seen: &Seen<'_>, verify: Verify, headers: &mut Headers) -> Result<(), Stop> {
    let link_layer = ethernet::walk(seen, headers.link)?;
    headers.network_offset = link_layer.network_offset;
    let datagram = match link_layer.ethertype {
        Some(ETHERTYPE_IPV4) => ipv4::walk(seen, verify, headers)?,
        Some(ETHERTYPE_IPV6) => ipv6::walk(seen, headers)?,
        _ => return Ok(()),
    };
    match headers.fragment {
        Fragment::Later => Ok(()),
        Fragment::Whole | Fragment::Atomic | Fragment::First => {
            transport::walk(seen, &datagram, verify, headers)
        }
    }
}

/// Frame under the walk.
struct Seen<'a> {
    /// Captured bytes; of a nonlinear frame, those in the frame itself.
    bytes: &'a [u8],
    /// Frame, if some of the captured bytes are in its pieces.
    in_pieces: Option<&'a Frame>,
    /// Length on the wire, at least that of the captured bytes.
    wire_len: usize,
    /// Link that the bytes begin with.
    link: Link,
    /// Sum computed by the device.
    device_sum: Option<DeviceSum>,
}

/// Reason for the walk to end before the last header.
enum Stop {
    /// End of the capture, though not of the frame.
    Snapped,
    /// End of the frame inside the header, or an impossible header.
    Flaw(Flaw),
}

impl<'a> Seen<'a> {
    fn new(bytes: &'a [u8], wire_len: u32, link: Link) -> Self {
        let wire_len = (wire_len as usize).max(bytes.len());
        Self { bytes, in_pieces: None, wire_len, link, device_sum: None }
    }

    /// True if all bytes on the wire were captured.
    #[inline]
    fn is_whole(&self) -> bool {
        let is_whole = |frame: &Frame| frame.total_len_bytes() as usize == self.wire_len;
        self.bytes.len() == self.wire_len || self.in_pieces.is_some_and(is_whole)
    }

    /// Sum of the bytes of a range, if they were captured.
    #[inline]
    fn sum(&self, place: Range<usize>) -> Option<checksum::Sum> {
        match self.bytes.get(place.clone()) {
            Some(bytes) => Some(checksum::Sum::of(bytes)),
            None => self.sum_of_pieces(place),
        }
    }

    #[cold]
    fn sum_of_pieces(&self, place: Range<usize>) -> Option<checksum::Sum> {
        let is_there = |frame: &&Frame| {
            place.start <= place.end && place.end <= frame.total_len_bytes() as usize
        };
        let frame = self.in_pieces.filter(is_there)?;
        Some(checksum::Sum::of_pieces(bytes_in(frame, place)))
    }

    /// Returns the `N` bytes at `at`. If they are missing from the capture only, the walk stops; if
    /// they were not on the wire, either, the frame has this flaw.
    fn header<const N: usize>(&self, at: usize, flaw: Flaw) -> Result<&'a [u8; N], Stop> {
        match self.bytes.get(at..).and_then(<[u8]>::first_chunk) {
            Some(header) => Ok(header),
            None if at + N <= self.wire_len => Err(Stop::Snapped),
            None => Err(Stop::Flaw(flaw)),
        }
    }
}

/// Payload of an IP packet, by its header.
struct DatagramFields {
    /// Offset of the transport header.
    transport_offset: usize,
    /// End of the packet by the IP header, at most that of the frame; padding follows.
    end: usize,
    /// Partial sum of the pseudo header: addresses and protocol, without the length. `None` if the
    /// destination that the sender summed is unknown.
    pseudo_sum: Option<checksum::Sum>,
}
