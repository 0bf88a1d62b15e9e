//! Parse: one walk over a frame's headers, after which no later stage looks at a length again.
//!
//! The walk never fails. It notes what it found ([`Headers`]) and stops where the frame does; a
//! header that lies is noted as a [`Flaw`] for whoever must judge the packet (the network layer
//! drops, a probe wants to see it). Headers that it notes begin within the captured bytes; a payload
//! may begin behind them, where a frame was cut short. [`View`] shows what there is.
// Bytes from outside are taken by patterns and checked slices only.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::panic))]

pub mod checksum;
mod device_sum;
mod ethernet;
pub mod extension;
mod ipv4;
mod ipv6;
pub(crate) mod pull;
pub(crate) mod partial;
mod transport;
mod view;

use std::ops::Range;

pub use device_sum::DeviceSum;
pub(crate) use ethernet::is_plain;
pub use ethernet::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, LinkLayer, MAX_VLAN_TAGS, link_layer};
use forebay_buf::{Frame, Pool};
pub use ipv6::MAX_EXTENSION_HEADERS;
pub(crate) use partial::complete_partial;
pub use partial::{NoSuchField, complete_checksum};
pub use view::View;

use crate::nonlinear::bytes_in;
use crate::packet::Packet;

/// The least that stands before a transport header: IPv4's.
pub(crate) const NETWORK_BYTES_MIN: u16 = 20;

/// Bytes before the network header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Link {
    /// An Ethernet II or 802.3 header, with up to [`MAX_VLAN_TAGS`] tags.
    #[default]
    Ethernet,
    /// Nothing: the first byte is the IP header's.
    Ip,
}

/// Choice whether checksums are worth their cost here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verify {
    /// Sum up every packet that is there as a whole.
    Checksums,
    /// The device has done it, or nobody asks.
    Nothing,
}

/// Offsets and kinds of a frame's headers: sixteen bytes that travel with the packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Headers {
    /// Link that the frame begins with.
    pub link: Link,
    /// The kind of network header, by its first byte: a snapped frame may hold no more of it.
    pub network: Network,
    /// The kind of transport header; its fixed part was captured whole.
    pub transport: Transport,
    /// IPv4 protocol, or IPv6 next header after the last extension header; 0 when cut off.
    pub protocol: u8,
    /// Place in a fragmented datagram.
    pub fragment: Fragment,
    /// The first lie that the walk met, if any.
    pub flaw: Option<Flaw>,
    /// The IPv4 header checksum.
    pub ip_checksum: Checksum,
    /// The TCP or UDP checksum. A source sets it if the device has verified it (the kernel's
    /// `CHECKSUM_UNNECESSARY`); then it is not verified here.
    pub l4_checksum: Checksum,
    /// Offset of the network header, if there is one.
    pub network_offset: u8,
    /// Device that the packet came in on, by its place among those of a host, once its stack has
    /// delivered it (`skb_iif`); 0 until then.
    pub device: u8,
    /// Offset of the transport header; 0 when there is none in this frame, or none of it was
    /// captured.
    pub transport_offset: u16,
    /// Offset of the transport's payload; 0 when unknown.
    pub payload_offset: u16,
    /// Length of the payload on the wire, by the headers: a snapped frame holds less.
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
    /// None, or none that was captured whole.
    #[default]
    Other,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP or ICMPv6.
    Icmp,
}

impl Transport {
    /// Every kind, in the order of its number.
    pub(crate) const ALL: [Self; 4] = [Self::Other, Self::Tcp, Self::Udp, Self::Icmp];
}

/// A packet's place in its datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fragment {
    /// The whole of it.
    #[default]
    Whole,
    /// The whole of it, marked as a fragment nevertheless (an atomic fragment, RFC 6946).
    Atomic,
    /// The first piece: the transport header is here, the payload is not all here.
    First,
    /// A later piece: no transport header.
    Later,
}

impl Fragment {
    /// True if all of the datagram is here.
    #[must_use]
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Whole | Self::Atomic)
    }
}

/// Outcome of summing up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Checksum {
    /// There is none, or it cannot be judged: a fragment, a snapped frame, or nobody looked.
    #[default]
    Unknown,
    /// The checksum is right.
    Good,
    /// The checksum is wrong.
    Bad,
}

/// Flaw of a frame's headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// Shorter than its link header.
    Runt,
    /// An IP version or header length that cannot be.
    IpHeader,
    /// More bytes announced by the IP header than were on the wire, or fewer than the header.
    IpLength,
    /// IPv6 extension headers that do not end, or end outside the packet.
    Extension,
    /// A TCP header length that cannot be, or a packet too short for its transport header.
    TransportHeader,
    /// A UDP length shorter than its header or longer than the IP packet.
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

/// The same, for headers that lie where they will stay and know no more yet than what the device
/// said: their link, and perhaps of their checksum. A checksum is told from the device's sum if
/// there is one, whether or not others are verified.
pub fn parse_into(
    headers: &mut Headers,
    bytes: &[u8],
    wire_len: u32,
    device_sum: Option<DeviceSum>,
    verify: Verify,
) {
    let seen = Seen { device_sum, ..Seen::new(bytes, wire_len, headers.link) };
    let _ = walk_noting(&seen, verify, headers);
}

/// The same for a packet, wherever it lies. Of one [in pieces](Packet::is_nonlinear) the headers
/// are in its own frame afterwards, or all of it is: it is copied together into one of `pool` if its
/// headers are too long for that.
///
/// # Errors
/// When it is to be copied, and there is no memory for it. Then its headers are known in part.
#[inline]
pub fn parse_packet(packet: &mut Packet, verify: Verify, pool: &mut Pool) -> Result<(), NoMemory> {
    if packet.is_nonlinear() {
        return pull::parse_packet(packet, verify, pool);
    }
    let Packet { frame, headers, wire_len, device_sum, .. } = packet;
    parse_into(headers, frame.data(), *wire_len, *device_sum, verify);
    Ok(())
}

/// There is no frame to copy a packet to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoMemory;

/// Walks, and notes a flaw.
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

/// The frame under the walk.
struct Seen<'a> {
    /// Captured bytes; of a frame in pieces, those in the frame itself.
    bytes: &'a [u8],
    /// The frame, if more of what was captured lies behind it.
    in_pieces: Option<&'a Frame>,
    /// Length on the wire; never less than what was captured.
    wire_len: usize,
    /// Link that the bytes begin with.
    link: Link,
    /// Sum that the device has made.
    device_sum: Option<DeviceSum>,
}

/// Reason for the walk to end before the last header.
enum Stop {
    /// The capture ends here, the frame did not.
    Snapped,
    /// The frame ends inside the header, or the header cannot be.
    Flaw(Flaw),
}

impl<'a> Seen<'a> {
    fn new(bytes: &'a [u8], wire_len: u32, link: Link) -> Self {
        let wire_len = (wire_len as usize).max(bytes.len());
        Self { bytes, in_pieces: None, wire_len, link, device_sum: None }
    }

    /// True if all that was on the wire was captured.
    #[inline]
    fn is_whole(&self) -> bool {
        let is_whole = |frame: &Frame| frame.total_len_bytes() as usize == self.wire_len;
        self.bytes.len() == self.wire_len || self.in_pieces.is_some_and(is_whole)
    }

    /// The sum of the bytes at this place, if they were captured.
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

    /// The `N` bytes at `at`; if they are not there, `flaw` says what that makes of the frame.
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
    /// End of the packet: by the IP header's account, padding follows; but not beyond the
    /// frame.
    end: usize,
    /// Partial sum of the pseudo header: addresses and protocol, without the length. None when
    /// the address that the sender summed up cannot be told.
    pseudo_sum: Option<checksum::Sum>,
}
