//! The two ends of a connection.

use std::fmt;
use std::hash::Hasher;
use std::net::{IpAddr, SocketAddr};

use forebay_rx::packet::Packet;
use siphasher::sip::SipHasher13;

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

/// Keyed hash of flows, so that nobody can aim at one shard, bucket or listener.
#[derive(Clone, Copy)]
pub struct FlowHasher(SipHasher13);

/// A flow and its keyed hash.
#[derive(Clone, Copy, Debug)]
pub struct HashedFlow {
    flow: Flow,
    hash: u64,
}

/// First byte of what is hashed, so that no hash reveals another value of the same secret.
const PURPOSE: u64 = 0xff;

impl FlowHasher {
    /// Creates the hash with a secret, which may be that of a [`Tcp`](super::Tcp).
    #[must_use]
    pub fn new(secret: [u8; 16]) -> Self {
        Self(SipHasher13::new_with_key(&secret))
    }

    /// Flow of a segment that arrived; `None` if it is none.
    #[must_use]
    pub fn flow_of(&self, packet: &Packet) -> Option<HashedFlow> {
        Flow::of(packet).map(|flow| self.hashed(&flow))
    }

    /// A flow with its hash.
    #[must_use]
    pub fn hashed(&self, flow: &Flow) -> HashedFlow {
        let Flow { ours, theirs } = flow;
        let mut hasher = self.0;
        let ports = u64::from(ours.port()) << 16 | u64::from(theirs.port());
        hasher.write_u64(ports << 8 | PURPOSE);
        for end in [ours, theirs] {
            match end.ip() {
                IpAddr::V4(address) => hasher.write_u32(address.to_bits()),
                IpAddr::V6(address) => hasher.write(&address.octets()),
            }
        }
        HashedFlow { flow: *flow, hash: hasher.finish() }
    }
}

impl fmt::Debug for FlowHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowHasher")
    }
}

impl HashedFlow {
    /// The flow.
    #[must_use]
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// Keyed hash of the flow.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Half of the hash, which tells nothing about the remainder that names a shard.
    pub(super) fn high(&self) -> u32 {
        u32::try_from(self.hash >> 32).unwrap_or(0)
    }
}

/// Ends of a connection in the fewest bytes, for tables and handles.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PackedFlow {
    /// Addresses of both ends; those of IPv4 in the first four bytes.
    addresses: [[u8; 16]; 2],
    ports: [u16; 2],
    is_ipv6: bool,
}

impl PackedFlow {
    /// Packs the ends of a connection. Scopes of link-local addresses are not kept.
    #[must_use]
    pub fn of(flow: &Flow) -> Self {
        Self {
            addresses: [flow.ours, flow.theirs].map(|address| octets(address.ip())),
            ports: [flow.ours.port(), flow.theirs.port()],
            is_ipv6: flow.is_ipv6(),
        }
    }

    /// The two ends.
    #[must_use]
    pub fn unpacked(&self) -> Flow {
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
