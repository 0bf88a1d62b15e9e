//! UDP socket lookup, by the kernel's rules (`__udp4_lib_lookup`, `__udp6_lib_lookup`, and their
//! `udp4_lib_lookup4` and `compute_score`; `__udp4_lib_mcast_deliver`; `udp_lib_lport_inuse`).
//!
//! 1. Of the sockets bound to the datagram's destination address, the one connected to its sender;
//!    else one that is not connected.
//! 2. The same of the sockets bound to the unspecified address. One bound to `[::]` takes IPv4
//!    datagrams, unless it is IPv6 only, or an IPv4 socket takes them.
//! 3. If several share an address and port (`SO_REUSEPORT`), the one selected by the flow's hash;
//!    or the one that prefers this CPU (`SO_INCOMING_CPU`).
//!
//! A table is an immutable snapshot. When a socket is bound, connected or closed, [`Bindings`]
//! creates a new one that shares all unchanged parts with the previous one.

use std::hash::Hasher;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use siphasher::sip::SipHasher13;

mod bindings; // all bound sockets
mod trie; //     a persistent map

pub use bindings::Bindings;
use bindings::{BoundAs, Placed};
use forebay_rx::cpu::CpuId;
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Packet;
use trie::Trie;

use super::SocketId;
use super::connection_id::{ConnectionIds, SelectById};
use super::reuseport::choose;

/// Sharing of an address and port with other sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reuse {
    /// Not shared.
    #[default]
    None,
    /// Each flow goes to one of the sockets: `SO_REUSEPORT`.
    Hash,
    /// The socket gets datagrams received on its [CPU](Binding::cpu): `SO_REUSEPORT` and
    /// `SO_INCOMING_CPU`.
    ThisCpu,
}

impl Reuse {
    /// True if the address and port are shared.
    #[must_use]
    pub fn is_shared(self) -> bool {
        self != Self::None
    }
}

/// Addresses and options of a socket, which determine the datagrams it receives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Binding {
    /// The socket.
    pub id: SocketId,
    /// Local address, which may be unspecified, and port. An IPv4-mapped IPv6 address
    /// (`::ffff:a.b.c.d`) is treated as the IPv4 address.
    pub local: SocketAddr,
    /// Peer that the socket is connected to; datagrams from other senders are not received. As in
    /// the kernel, a connected socket gets a local address.
    pub remote: Option<SocketAddr>,
    /// True if the socket is bound to `[::]` for IPv6 only: `IPV6_V6ONLY`.
    pub is_v6_only: bool,
    /// Sharing of the address and port.
    pub reuse: Reuse,
    /// True if sockets that also say so may be bound to addresses in common with this one's:
    /// `SO_REUSEADDR`. Of those at one address the last one bound receives.
    pub reuses_address: bool,
    /// CPU that the socket's reader runs on, for [`Reuse::ThisCpu`].
    pub cpu: Option<CpuId>,
    /// Multicast groups joined.
    pub groups: Vec<Membership>,
    /// True if the socket also receives groups of its family that other sockets of this host have
    /// joined: `IP_MULTICAST_ALL`, the kernel's default.
    pub is_multicast_all: bool,
    /// Selection by connection ID among the sockets that share its address and port
    /// (`SO_ATTACH_REUSEPORT_EBPF` of a QUIC server); before that by [`reuse`](Self::reuse).
    pub select: Option<SelectById>,
}

/// A multicast group joined on a device, by its place among those of the host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Membership {
    /// The group.
    pub group: IpAddr,
    /// Device that its datagrams come in on.
    pub device: u8,
}

/// Key of sockets that share an address and port: the address, and true if IPv6 only.
type ReuseportGroup = (SocketAddr, bool);

impl Binding {
    /// Creates the binding of a socket bound to `local`, with default options.
    #[must_use]
    pub fn new(id: SocketId, local: SocketAddr) -> Self {
        Self {
            id,
            local,
            remote: None,
            is_v6_only: false,
            reuse: Reuse::None,
            reuses_address: false,
            cpu: None,
            groups: Vec::new(),
            is_multicast_all: true,
            select: None,
        }
    }

    /// True if the socket is an IPv6 one that shares its port: the lookup tries those last.
    fn is_last(&self) -> bool {
        self.local.is_ipv6() && self.reuse.is_shared()
    }

    /// CPU whose datagrams the socket is preferred for: `SO_INCOMING_CPU`.
    fn wants_cpu(&self) -> Option<CpuId> {
        self.cpu.filter(|_| self.reuse == Reuse::ThisCpu)
    }

    /// Addresses that the socket is bound to: one, except that `[::]` may stand for the unspecified
    /// address of both families.
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let local = self.local.ip().to_canonical();
        let is_dual = local == Ipv6Addr::UNSPECIFIED && !self.is_v6_only;
        std::iter::once(local).chain(is_dual.then_some(Ipv4Addr::UNSPECIFIED.into()))
    }

    /// Reuseport group that the socket is a member of: each member may receive any datagram of the
    /// group. Connected sockets are not members.
    fn group(&self) -> Option<ReuseportGroup> {
        self.shared().filter(|_| self.remote.is_none())
    }

    /// Reuseport group that the socket was bound into (`udp_reuseport_add_sock`).
    fn shared(&self) -> Option<ReuseportGroup> {
        let is_v6_only = self.local.ip().is_unspecified() && self.is_v6_only;
        self.reuse.is_shared().then_some((self.local, is_v6_only))
    }

    /// Tuples of the datagrams that the socket receives, if connected.
    fn tuples(&self) -> impl Iterator<Item = SocketTuple> {
        let port = self.local.port();
        self.remote.map(endpoint).into_iter().flat_map(move |remote| {
            let local = self.addresses().filter(move |own| own.is_ipv4() == remote.0.is_ipv4());
            local.map(move |address| SocketTuple { local: (address, port), remote })
        })
    }

    /// True if the socket receives a multicast or broadcast datagram (`__udp_is_mcast_sock`,
    /// `__udp_v6_is_mcast_sock`).
    fn receives_many(&self, of: &LookupKey) -> bool {
        let (to, from) = (of.destination.ip(), endpoint(of.source));
        // For IPv4 datagrams, an IPv6 socket starts without `IP_MULTICAST_ALL`.
        let takes_all = self.is_multicast_all && self.local.is_ipv4() == to.is_ipv4();
        let wants_group =
            || takes_all || self.groups.contains(&Membership { group: to, device: of.device });
        self.local.port() == of.destination.port()
            && self.addresses().any(|own| own == to || own == unspecified(to))
            && self.remote.is_none_or(|remote| endpoint(remote) == from)
            && (!to.is_multicast() || wants_group())
    }
}

/// Lookup key of a datagram: addresses, flow hash, and CPU.
#[derive(Clone, Copy, Debug)]
pub struct LookupKey {
    /// Sender.
    pub source: SocketAddr,
    /// Destination.
    pub destination: SocketAddr,
    /// Flow hash; if [`FlowHash::NONE`], the table computes one when needed.
    pub hash: FlowHash,
    /// CPU that performs the lookup.
    pub cpu: CpuId,
    /// Device that it came in on, by its place among those of the host.
    pub device: u8,
}

impl LookupKey {
    /// Lookup key of a datagram, on the CPU that delivers it. `None` if the packet has no addresses
    /// or ports.
    #[must_use]
    pub fn of(packet: &Packet, cpu: CpuId) -> Option<Self> {
        let view = packet.view();
        let (from, to) = view.ports()?;
        Some(Self {
            source: SocketAddr::new(view.source()?, from),
            destination: SocketAddr::new(view.destination()?, to),
            hash: packet.hash,
            cpu,
            device: packet.headers.device,
        })
    }
}

/// Result of a lookup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum FoundSocket {
    /// No socket.
    None,
    /// The socket.
    One(SocketId),
}

/// All sockets, organised for lookup.
#[derive(Clone, Debug)]
pub struct SocketTable {
    /// Unconnected sockets, by port, then by address.
    unconnected: Trie<Few<UnconnectedSockets>>,
    /// Connected sockets by the hash of their tuples, the last one bound first.
    connected: Trie<Few<ConnectedSocket>>,
    /// Number of connected sockets with a local address.
    bound: usize,
    /// Number of connected sockets without a local address.
    unbound: usize,
    /// All sockets by port.
    all: Trie<OfPort>,
    key: SipHasher13,
}

/// All sockets bound to a port, by slot.
type OfPort = Trie<Arc<Placed>>;

/// A list that mostly has one element, which is then stored inline.
#[derive(Clone, Debug)]
enum Few<T> {
    One(T),
    Several(Arc<[T]>),
}

impl<T: Clone> Few<T> {
    fn of(all: Vec<T>) -> Option<Self> {
        match &*all {
            [] => None,
            [one] => Some(Self::One(one.clone())),
            _ => Some(Self::Several(all.into())),
        }
    }

    fn as_slice(&self) -> &[T] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Several(all) => all,
        }
    }
}

/// Unconnected sockets at one address and port.
#[derive(Clone, Debug)]
struct UnconnectedSockets {
    /// One of the sockets' [`addresses`](Binding::addresses).
    address: IpAddr,
    members: Members,
}

#[derive(Clone, Debug)]
enum Members {
    One(SocketId),
    /// Members of a group, in the order in which they were bound.
    Group(Arc<[GroupMember]>),
    /// Members for most CPUs, and exceptions for the CPUs listed.
    ByCpu(Arc<Members>, Arc<[(CpuId, Members)]>),
    /// Members by the place that connection IDs say, and those for datagrams without such an ID.
    ById(Arc<ConnectionIds>, Arc<[Option<SocketId>]>, Arc<Members>),
}

#[derive(Clone, Copy, Debug)]
struct GroupMember {
    id: SocketId,
    /// CPU whose datagrams the member is preferred for.
    cpu: Option<CpuId>,
}

/// A connected socket.
#[derive(Clone, Copy, Debug)]
struct ConnectedSocket {
    tuple: SocketTuple,
    bound_as: BoundAs,
    id: SocketId,
}

impl SocketTable {
    /// Creates the table of `bindings`, in the order in which they were bound. `seed` is secret, so
    /// that an attacker cannot choose addresses that collide.
    #[must_use]
    pub fn new(bindings: Vec<Binding>, seed: u64) -> Self {
        let mut all = Bindings::new(seed);
        bindings.into_iter().for_each(|binding| all.insert(binding));
        all.table().clone()
    }

    fn empty(seed: u64) -> Self {
        let key = SipHasher13::new_with_keys(seed, seed.rotate_left(32) ^ u64::MAX);
        let (unconnected, connected, all) = (Trie::default(), Trie::default(), Trie::default());
        Self { unconnected, connected, bound: 0, unbound: 0, all, key }
    }

    /// Adds a connected socket, or removes it.
    fn connect(&mut self, one: ConnectedSocket, is_there: bool) {
        let hash = folded(one.tuple.hash(&self.key));
        let mut alike =
            self.connected.get(hash).map_or_else(Vec::new, |all| all.as_slice().to_vec());
        let is_unbound = one.tuple.local.0.is_unspecified();
        let count = if is_unbound { &mut self.unbound } else { &mut self.bound };
        if is_there {
            *count += 1;
            alike.insert(alike.partition_point(|other| other.bound_as > one.bound_as), one);
        } else {
            *count -= 1;
            alike.retain(|other| (other.id, other.tuple) != (one.id, one.tuple));
        }
        self.connected = self.connected.with(hash, Few::of(alike));
    }

    /// Length of the longest connection ID that the sockets of a port are selected by; 0 if none
    /// are.
    #[must_use]
    pub fn id_bytes_at(&self, port: u16) -> usize {
        let unconnected = self.unconnected.get(port.into()).map_or(&[][..], Few::as_slice);
        unconnected.iter().map(|sockets| sockets.members.id_bytes()).max().unwrap_or(0)
    }

    /// Finds the socket for a unicast datagram, whatever its payload.
    pub fn find(&self, of: &LookupKey) -> FoundSocket {
        self.find_holding(of, || &[])
    }

    /// Finds the socket for a unicast datagram. `payload` is called only if sockets are
    /// [selected](Binding::select) by it.
    pub fn find_holding<'a>(&self, of: &LookupKey, payload: impl Fn() -> &'a [u8]) -> FoundSocket {
        let to = of.destination.ip();
        let unconnected = self.unconnected.get(of.destination.port().into());
        let unconnected = unconnected.map_or(&[][..], Few::as_slice);
        for (address, connected) in [(to, self.bound), (unspecified(to), self.unbound)] {
            if connected > 0
                && let Some(id) = self.connection(&SocketTuple::of(address, of))
            {
                return FoundSocket::One(id);
            }
            if let Ok(at) = unconnected.binary_search_by_key(&address, |sockets| sockets.address) {
                return FoundSocket::One(self.choose(&unconnected[at].members, of, &payload));
            }
        }
        FoundSocket::None
    }

    /// Finds the socket that sends from address `ours` and is connected to `theirs`.
    pub fn find_connected(&self, ours: (IpAddr, u16), theirs: (IpAddr, u16)) -> FoundSocket {
        let at =
            |address| self.connection(&SocketTuple { local: (address, ours.1), remote: theirs });
        at(ours.0).or_else(|| at(unspecified(ours.0))).map_or(FoundSocket::None, FoundSocket::One)
    }

    /// The connection of a tuple. If several sockets have the same tuple, the last one bound
    /// receives (`udp_hash4`).
    fn connection(&self, tuple: &SocketTuple) -> Option<SocketId> {
        let alike = self.connected.get(folded(tuple.hash(&self.key)))?;
        alike.as_slice().iter().find(|one| one.tuple == *tuple).map(|one| one.id)
    }

    /// Appends all sockets for a multicast or broadcast datagram to `out`, in the order in which
    /// they were bound: each gets a copy. The caller, who knows this host's addresses, decides if
    /// the datagram is multicast or broadcast.
    pub fn find_all(&self, of: &LookupKey, out: &mut Vec<SocketId>) {
        let Some(of_port) = self.all.get(of.destination.port().into()) else { return };
        let before = out.len();
        of_port.for_each(|placed| {
            out.extend(placed.binding.receives_many(of).then_some(placed.binding.id));
        });
        let bound_as = |id: &SocketId| of_port.get(id.slot()).map(|placed| placed.bound_as);
        out[before..].sort_unstable_by_key(bound_as);
    }

    /// Selects the member for a datagram: by its connection ID, or as [`choose`] does.
    fn choose<'a>(
        &self,
        members: &Members,
        of: &LookupKey,
        payload: &impl Fn() -> &'a [u8],
    ) -> SocketId {
        let members = match members {
            Members::One(only) => return *only,
            Members::Group(members) => members,
            Members::ByCpu(usual, here) => {
                let here = here.iter().find(|(cpu, _)| *cpu == of.cpu);
                return self.choose(here.map_or(usual, |(_, members)| members), of, payload);
            }
            Members::ById(ids, by_place, usual) => {
                let place = ids.place_of_datagram(payload());
                let chosen = place.and_then(|place| *by_place.get(usize::from(place.0))?);
                // The flow's hash may be that of random bytes in the place of an ID, as in a stateless reset.
                let by_tuple = LookupKey { hash: FlowHash::NONE, ..*of };
                return chosen.unwrap_or_else(|| self.choose(usual, &by_tuple, payload));
            }
        };
        if let [only] = &**members {
            return only.id;
        }
        let hash = if of.hash.is_some() {
            of.hash.0
        } else {
            folded(SocketTuple::of(of.destination.ip(), of).hash(&self.key))
        };
        let chosen = choose(members, hash, |member| member.cpu == Some(of.cpu));
        chosen.unwrap_or(&members[0]).id
    }
}

impl Members {
    /// Length of the connection IDs that members are selected by; 0 if they are not.
    fn id_bytes(&self) -> usize {
        match self {
            Self::ById(ids, ..) => ids.id_bytes(),
            _ => 0,
        }
    }
}

impl GroupMember {
    fn of(binding: &Binding) -> Self {
        Self { id: binding.id, cpu: binding.wants_cpu() }
    }
}

/// The unspecified address of the same family.
fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Address, IPv4-mapped addresses as IPv4, and port.
fn endpoint(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

/// XOR of the halves of a 64-bit hash.
fn folded(hash: u64) -> u32 {
    let (high, low) = (hash >> 32, hash & u64::from(u32::MAX));
    u32::try_from(high ^ low).unwrap_or(0)
}

/// Local and peer address of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SocketTuple {
    local: (IpAddr, u16),
    remote: (IpAddr, u16),
}

impl SocketTuple {
    /// Tuple of a socket at `address` that would match this datagram.
    fn of(address: IpAddr, datagram: &LookupKey) -> Self {
        Self { local: (address, datagram.destination.port()), remote: endpoint(datagram.source) }
    }

    fn hash(&self, key: &SipHasher13) -> u64 {
        let mut hasher = *key;
        for (address, port) in [self.local, self.remote] {
            match address {
                IpAddr::V4(address) => hasher.write_u32(address.to_bits()),
                IpAddr::V6(address) => hasher.write(&address.octets()),
            }
            hasher.write_u16(port);
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests;
