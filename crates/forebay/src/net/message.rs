//! Datagrams with their ancillary data (`cmsg`): per-datagram control data for sending, and the
//! headers' fields for a datagram read into a buffer.

pub use super::datagram::NoRoom;
use std::net::{IpAddr, SocketAddr};

/// Datagram to send, or several of equal length, with control data (`sendmsg`).
///
/// A field that is `None` takes its value from the socket's options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit<'a> {
    /// Payload.
    pub payload: &'a [u8],
    /// Destination.
    pub destination: SocketAddr,
    /// Source address, one of this host's addresses (`ipi_spec_dst` of `IP_PKTINFO`, `ipi6_addr`). The unspecified one of
    /// IPv4 stands for that of the route, also if the socket is bound to another.
    pub source: Option<IpAddr>,
    /// Outgoing device (`ipi_ifindex`).
    pub device: Option<DeviceIndex>,
    /// TOS or traffic class: DSCP in the upper six bits, ECN in the lower two (`IP_TOS`,
    /// `IPV6_TCLASS`).
    pub traffic_class: Option<u8>,
    /// Time to live, or hop limit (`IP_TTL`, `IPV6_HOPLIMIT`).
    pub ttl: Option<u8>,
    /// Segment size: payload bytes of each datagram except the last (`UDP_SEGMENT`); 0 if the
    /// payload is one datagram.
    pub gso_size: u16,
}

impl<'a> Transmit<'a> {
    /// Maximum number of datagrams in one payload (`UDP_MAX_SEGMENTS`).
    pub const SEGMENTS_MAX: usize = 128;

    /// Longest payload of one send to a destination, also if it leaves in several datagrams (`ip_append_data`), in
    /// bytes.
    #[must_use]
    pub fn payload_bytes_max(destination: SocketAddr) -> usize {
        let is_v4 = destination.ip().to_canonical().is_ipv4();
        65_535 - 8 - if is_v4 { 20 } else { 0 }
    }

    /// Datagram without control data.
    #[must_use]
    pub fn new(payload: &'a [u8], destination: SocketAddr) -> Self {
        Self {
            payload,
            destination,
            source: None,
            device: None,
            traffic_class: None,
            ttl: None,
            gso_size: 0,
        }
    }
}

/// Description of a datagram that was read into a buffer (`recvmsg`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// Bytes in the buffer.
    pub len: usize,
    /// True if the datagram was longer than the buffer (`MSG_TRUNC`).
    pub is_truncated: bool,
    /// Sender.
    pub source: SocketAddr,
    /// Destination: one of this host's addresses, a group or a broadcast address (`ipi_addr`).
    pub destination: SocketAddr,
    /// Incoming device (`ipi_ifindex`).
    pub device: DeviceIndex,
    /// TOS or traffic class: DSCP in the upper six bits, ECN in the lower two (`IP_RECVTOS`,
    /// `IPV6_RECVTCLASS`).
    pub traffic_class: u8,
    /// Time to live, or hop limit (`IP_RECVTTL`, `IPV6_RECVHOPLIMIT`).
    pub ttl: u8,
    /// Segment size: payload bytes of each datagram except the last, if several were merged
    /// (`UDP_GRO`); otherwise 0.
    pub gso_size: u16,
    /// Time of arrival, in ns since 1970; 0 if the device has no timestamps.
    pub timestamp_ns: u64,
}

/// Index of a device among those that its [`Net`](super::Net) was created over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceIndex(pub u8);

impl DeviceIndex {
    pub(super) fn index(self) -> usize {
        self.0.into()
    }
}
