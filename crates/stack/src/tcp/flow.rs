//! The two ends of a connection.

use std::net::{IpAddr, SocketAddr};

use forebay_rx::packet::Packet;

use super::config::{DEFAULT_MSS, DEFAULT_MSS_V6};

/// Addresses and ports of a connection, of one family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Flow {
    /// Address and port of this host.
    pub ours: SocketAddr,
    /// Address and port of the peer.
    pub theirs: SocketAddr,
}

impl Flow {
    /// Ends of a segment that arrived; `None` if it is none.
    #[must_use]
    pub fn of(packet: &Packet) -> Option<Self> {
        let view = packet.view();
        let header = packet.frame.data().get(usize::from(packet.headers.transport_offset)..)?;
        let &[p0, p1, q0, q1] = header.first_chunk::<4>()?;
        Some(Self {
            ours: SocketAddr::new(view.destination()?, u16::from_be_bytes([q0, q1])),
            theirs: SocketAddr::new(view.source()?, u16::from_be_bytes([p0, p1])),
        })
    }

    /// True over IPv6.
    #[must_use]
    pub fn is_ipv6(&self) -> bool {
        self.theirs.is_ipv6()
    }

    /// Segment size assumed of a peer that announces none.
    pub(super) fn default_mss(&self) -> u16 {
        if self.is_ipv6() { DEFAULT_MSS_V6 } else { DEFAULT_MSS }
    }

    /// Bytes of the IP and TCP headers without options.
    pub(super) fn header_bytes(&self) -> u32 {
        if self.is_ipv6() { 60 } else { 40 }
    }
}

/// The same in the fewest bytes, for tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct PackedFlow {
    /// Addresses of both ends; those of IPv4 in the first four bytes.
    addresses: [[u8; 16]; 2],
    ports: [u16; 2],
    is_ipv6: bool,
}

impl PackedFlow {
    pub(super) fn of(flow: &Flow) -> Self {
        Self {
            addresses: [flow.ours, flow.theirs].map(|address| octets(address.ip())),
            ports: [flow.ours.port(), flow.theirs.port()],
            is_ipv6: flow.is_ipv6(),
        }
    }

    pub(super) fn unpacked(&self) -> Flow {
        let [ours, theirs] = self.addresses.map(|octets| address(octets, self.is_ipv6));
        let [our_port, their_port] = self.ports;
        Flow { ours: SocketAddr::new(ours, our_port), theirs: SocketAddr::new(theirs, their_port) }
    }
}

fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(address) => address.octets(),
    }
}

fn address(octets: [u8; 16], is_ipv6: bool) -> IpAddr {
    let [a, b, c, d, ..] = octets;
    if is_ipv6 { octets.into() } else { [a, b, c, d].into() }
}
