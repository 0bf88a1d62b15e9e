//! Names of relays: the end of a pair that the program does not have is bound to an abstract address of the kernel's, from
//! which any process that has the other end learns the addresses of the connection.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{SocketAddrAny, SocketAddrUnix, bind, getpeername, getsockname};

/// First bytes of each name.
const PREFIX: [u8; 8] = *b"forebay/";

/// Bytes of an address: is it IPv4, address, port, scope.
const ADDRESS_BYTES: usize = 1 + 16 + 2 + 4;
const NAME_BYTES: usize = PREFIX.len() + 8 + 8 + 1 + 2 * ADDRESS_BYTES;

/// Number of a connection among those of the process that owns it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct RelayId(pub(crate) u64);

/// Pair of a connection: that of the descriptor, and the one that takes its place once its sides have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PairIndex {
    First,
    Second,
}

/// Name of a relay's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RelayName {
    /// Number of the owner, which no other process has at this time.
    pub(crate) owner: u64,
    pub(crate) id: RelayId,
    pub(crate) pair: PairIndex,
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
}

impl RelayName {
    /// Name of the relay at the other end of a socket.
    pub(crate) fn of_peer(socket: BorrowedFd<'_>) -> Option<Self> {
        Self::of(getpeername(socket).ok()??)
    }

    /// Name of a relay's end itself.
    pub(crate) fn of_end(socket: BorrowedFd<'_>) -> Option<Self> {
        Self::of(getsockname(socket).ok()?)
    }

    fn of(address: SocketAddrAny) -> Option<Self> {
        let address = SocketAddrUnix::try_from(address).ok()?;
        Self::decode(address.abstract_name()?)
    }

    /// Gives a relay's end its name.
    pub(crate) fn bind(&self, end: BorrowedFd<'_>) -> Result<(), Errno> {
        bind(end, &SocketAddrUnix::new_abstract_name(&self.encode())?)
    }

    /// True for names of one connection.
    pub(crate) fn is_of_same(&self, other: &Self) -> bool {
        (self.owner, self.id) == (other.owner, other.id)
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(NAME_BYTES);
        bytes.extend_from_slice(&PREFIX);
        bytes.extend_from_slice(&self.owner.to_ne_bytes());
        bytes.extend_from_slice(&self.id.0.to_ne_bytes());
        bytes.push((self.pair == PairIndex::Second).into());
        for address in [self.local, self.peer] {
            bytes.push(address.is_ipv4().into());
            let ip = match address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            bytes.extend_from_slice(&ip.octets());
            bytes.extend_from_slice(&address.port().to_ne_bytes());
            let scope = if let SocketAddr::V6(address) = address { address.scope_id() } else { 0 };
            bytes.extend_from_slice(&scope.to_ne_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; NAME_BYTES] = bytes.try_into().ok()?;
        let (prefix, rest) = bytes.split_first_chunk::<8>()?;
        let (owner, rest) = rest.split_first_chunk()?;
        let (id, rest) = rest.split_first_chunk()?;
        let (pair, rest) = rest.split_first()?;
        let (local, peer) = rest.split_first_chunk::<ADDRESS_BYTES>()?;
        if *prefix != PREFIX {
            return None;
        }
        Some(Self {
            owner: u64::from_ne_bytes(*owner),
            id: RelayId(u64::from_ne_bytes(*id)),
            pair: if *pair == 0 { PairIndex::First } else { PairIndex::Second },
            local: address(local)?,
            peer: address(peer.first_chunk()?)?,
        })
    }
}

fn address(bytes: &[u8; ADDRESS_BYTES]) -> Option<SocketAddr> {
    let (is_ipv4, rest) = bytes.split_first()?;
    let (ip, rest) = rest.split_first_chunk::<16>()?;
    let (port, scope) = rest.split_first_chunk()?;
    let (ip, port) = (Ipv6Addr::from(*ip), u16::from_ne_bytes(*port));
    if *is_ipv4 != 0 {
        return Some(SocketAddr::new(ip.to_ipv4_mapped()?.into(), port));
    }
    let scope = u32::from_ne_bytes(*scope.first_chunk()?);
    Some(SocketAddrV6::new(ip, port, 0, scope).into())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn names() -> impl Iterator<Item = RelayName> {
        let ends = [
            ("10.9.0.1:7", "10.9.0.2:40000"),
            ("[fe80::1%5]:7", "[fe80::2%5]:1"),
            ("[::ffff:10.9.0.1]:7", "[::ffff:10.9.0.2]:9"),
        ];
        ends.into_iter().zip([1, 2, u64::MAX]).map(|((local, peer), number)| {
            let [local, peer] = [local, peer].map(|text| text.parse().unwrap());
            let pair = if number == 2 { PairIndex::Second } else { PairIndex::First };
            RelayName { owner: number << 7, id: RelayId(number), pair, local, peer }
        })
    }

    #[test]
    fn exe_5_relays_names_are_read_as_written() {
        for name in names() {
            let bytes = name.encode();
            assert_eq!((bytes.len(), RelayName::decode(&bytes)), (NAME_BYTES, Some(name)));
            for cut in 0..bytes.len() {
                assert_eq!(RelayName::decode(&bytes[..cut]), None);
            }
            let mut others = bytes;
            others[0] = b'F';
            assert_eq!(RelayName::decode(&others), None);
        }
    }

    #[test]
    fn exe_5_peers_of_relays_learn_names() {
        for name in names() {
            let pair =
                socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
            let (end, programs) = pair.unwrap();
            assert_eq!(RelayName::of_peer(programs.as_fd()), None);
            name.bind(end.as_fd()).unwrap();
            assert_eq!(RelayName::of_end(end.as_fd()), Some(name));
            assert_eq!(RelayName::of_peer(programs.as_fd()), Some(name));
            assert_eq!(RelayName::of_peer(end.as_fd()), None);
            drop(end);
            assert_eq!(RelayName::of_peer(programs.as_fd()), Some(name), "after the end, too");
        }
    }
}
