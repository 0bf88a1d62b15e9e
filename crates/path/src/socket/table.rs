//! Which socket a datagram is for: the kernel's rules (`__udp4_lib_lookup`, `__udp6_lib_lookup`, and
//! their `udp4_lib_lookup4` and `compute_score`; `__udp4_lib_mcast_deliver`; `udp_lib_lport_inuse`).
//!
//! 1. Of the sockets that are bound to the datagram's own address, the one connected to its sender;
//!    else one that is not connected.
//! 2. The same of the sockets bound to no address. One that is bound to `[::]` takes IPv4 datagrams,
//!    unless it is IPv6 only, or a socket of IPv4 takes them.
//! 3. Where several share an address and port (`SO_REUSEPORT`), one of them by the flow's hash; or the
//!    one that says that it is on this CPU (`SO_INCOMING_CPU`).
//!
//! A table is one moment's sockets. Another one is made when a socket is bound, connected or closed.

use std::hash::Hasher;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

use siphasher::sip::SipHasher13;

use super::SocketId;
use crate::cpu::CpuId;
use crate::hash::FlowHash;
use crate::packet::Packet;

/// How a socket shares its address and port with others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reuse {
    /// It does not.
    #[default]
    None,
    /// Each flow goes to one of them: `SO_REUSEPORT`.
    Hash,
    /// What comes on its [CPU](Binding::cpu) goes to it: `SO_REUSEPORT` and `SO_INCOMING_CPU`.
    ThisCpu,
}

/// What a socket receives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Binding {
    /// The socket.
    pub id: SocketId,
    /// Its own address, or the unspecified one, and its port. An IPv6 address that stands for an
    /// IPv4 one (`::ffff:a.b.c.d`) is that one.
    pub local: SocketAddr,
    /// Whom it is connected to. It receives from nobody else. The kernel gives a socket an address
    /// of its own as it is connected.
    pub remote: Option<SocketAddr>,
    /// It is bound to `[::]` for IPv6 alone: `IPV6_V6ONLY`.
    pub is_v6_only: bool,
    /// Whether it shares its address and port.
    pub reuse: Reuse,
    /// Where it is read, for [`Reuse::ThisCpu`].
    pub cpu: Option<CpuId>,
    /// Multicast groups that it has joined.
    pub groups: Vec<IpAddr>,
    /// It receives the groups of its family that others on this host have joined, too:
    /// `IP_MULTICAST_ALL`, as the kernel has it unless told otherwise.
    pub is_multicast_all: bool,
}

impl Binding {
    /// A socket that is bound to `local` and nothing else.
    #[must_use]
    pub fn new(id: SocketId, local: SocketAddr) -> Self {
        Self {
            id,
            local,
            remote: None,
            is_v6_only: false,
            reuse: Reuse::None,
            cpu: None,
            groups: Vec::new(),
            is_multicast_all: true,
        }
    }

    /// Whether it is a socket of IPv6 that shares its port: those are looked at last.
    fn is_last(&self) -> bool {
        self.local.is_ipv6() && self.reuse != Reuse::None
    }

    /// Whether both would receive datagrams for some address (`inet_rcv_saddr_equal`).
    fn overlaps(&self, other: &Self) -> bool {
        let meets = |one: IpAddr, two: IpAddr| {
            one == two
                || one.is_ipv4() == two.is_ipv4() && (one.is_unspecified() || two.is_unspecified())
        };
        self.local.port() == other.local.port()
            && self.addresses().any(|one| other.addresses().any(|two| meets(one, two)))
    }

    /// The addresses that it is bound to: one, but `[::]` may be both families' unspecified ones.
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let local = self.local.ip().to_canonical();
        let is_dual = local == Ipv6Addr::UNSPECIFIED && !self.is_v6_only;
        std::iter::once(local).chain(is_dual.then_some(Ipv4Addr::UNSPECIFIED.into()))
    }

    /// The group that it is a member of: each may receive what the others may
    /// (`udp_reuseport_add_sock`). Connected ones receive only what is theirs.
    fn group(&self) -> Option<(SocketAddr, bool)> {
        let is_member = self.reuse != Reuse::None && self.remote.is_none();
        is_member.then_some((self.local, self.local.ip().is_unspecified() && self.is_v6_only))
    }

    /// Whether it receives what is for everyone in a group, or on a network
    /// (`__udp_is_mcast_sock`, `__udp_v6_is_mcast_sock`).
    fn receives_many(&self, of: &Flow4Tuple) -> bool {
        let (to, from) = (of.destination.ip(), endpoint(of.source));
        // A socket of IPv6 that takes IPv4 datagrams begins without `IP_MULTICAST_ALL`.
        let takes_all = self.is_multicast_all && self.local.is_ipv4() == to.is_ipv4();
        let wants_group = || takes_all || self.groups.contains(&to);
        self.local.port() == of.destination.port()
            && self.addresses().any(|own| own == to || own == unspecified(to))
            && self.remote.is_none_or(|remote| endpoint(remote) == from)
            && (!to.is_multicast() || wants_group())
    }
}

/// What a datagram says of where it is from and for, and where it came.
#[derive(Clone, Copy, Debug)]
pub struct Flow4Tuple {
    /// Who sent it.
    pub source: SocketAddr,
    /// Whom it is for.
    pub destination: SocketAddr,
    /// Its flow's hash; [`FlowHash::NONE`] has the table compute one where one is needed.
    pub hash: FlowHash,
    /// The CPU that asks.
    pub cpu: CpuId,
}

impl Flow4Tuple {
    /// What a datagram says, on the CPU where it is delivered. `None`: it says nothing.
    #[must_use]
    pub fn of(packet: &Packet, cpu: CpuId) -> Option<Self> {
        let view = packet.view();
        let (from, to) = view.ports()?;
        Some(Self {
            source: SocketAddr::new(view.source()?, from),
            destination: SocketAddr::new(view.destination()?, to),
            hash: packet.hash,
            cpu,
        })
    }
}

/// Whom a datagram is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Found {
    /// No socket.
    None,
    /// This one.
    One(SocketId),
}

/// All sockets, to be found.
#[derive(Debug)]
pub struct SocketTable {
    /// In the order in which they were bound.
    bindings: Vec<Binding>,
    /// Their places there, by port.
    by_port: Vec<usize>,
    /// Where those of a port stand in `by_port`.
    bound_ports: Ports,
    connected: Connected,
    /// Those that are not connected, by port and address.
    listeners: Vec<Listener>,
    /// Where those of a port stand in `listeners`.
    ports: Ports,
    /// Sockets of listeners.
    members: Vec<Member>,
    key: SipHasher13,
}

/// Those that are not connected, at one address and port.
#[derive(Debug)]
struct Listener {
    /// [`addresses`](Binding::addresses) has it.
    address: IpAddr,
    port: u16,
    /// Among the table's.
    members: Range<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    id: SocketId,
    /// If it is to have what comes on this CPU.
    cpu: Option<CpuId>,
}

impl SocketTable {
    /// The table of `bindings`, in the order in which they were bound. `seed` is secret: it keeps
    /// strangers from choosing addresses that are slow to find.
    #[must_use]
    pub fn new(bindings: Vec<Binding>, seed: u64) -> Self {
        let key = SipHasher13::new_with_keys(seed, seed.rotate_left(32) ^ u64::MAX);
        let connected = Connected::new(&bindings, &key);
        let mut firsts: Vec<_> = chain(&bindings)
            .filter(|binding| binding.remote.is_none())
            .flat_map(|binding| binding.addresses().map(move |address| (address, binding)))
            .collect();
        // A stable sort: of those at one place, the one looked at first comes first. A socket of IPv4
        // comes before one that takes IPv4 beside its IPv6.
        firsts.sort_by_key(|(address, of)| (of.local.port(), *address, of.local.is_ipv6()));
        firsts.dedup_by_key(|(address, of)| (of.local.port(), *address));
        let mut grouped: Vec<_> = bindings.iter().filter(|of| of.group().is_some()).collect();
        grouped.sort_by_key(|binding| binding.group());
        let mut members = Vec::new();
        let listeners: Vec<_> = firsts
            .into_iter()
            .map(|(address, first)| {
                let (start, group) = (members.len(), first.group());
                if group.is_none() {
                    members.push(Member::of(first));
                } else {
                    let at = grouped.partition_point(|other| other.group() < group);
                    let all = grouped[at..].iter().take_while(|other| other.group() == group);
                    members.extend(all.map(|other| Member::of(other)));
                }
                Listener { address, port: first.local.port(), members: start..members.len() }
            })
            .collect();
        let ports = Ports::new(listeners.iter().map(|listener| listener.port));
        let port_of = |at: &usize| bindings[*at].local.port();
        let mut by_port: Vec<_> = (0..bindings.len()).collect();
        by_port.sort_by_key(port_of);
        let bound_ports = Ports::new(by_port.iter().map(port_of));
        Self { bindings, by_port, bound_ports, connected, ports, listeners, members, key }
    }

    /// The socket that a datagram for one host is for.
    pub fn find(&self, of: &Flow4Tuple) -> Found {
        let to = of.destination.ip();
        let listeners = &self.listeners[self.ports.find(of.destination.port())];
        for (address, connected) in
            [(to, self.connected.bound), (unspecified(to), self.connected.unbound)]
        {
            if connected > 0
                && let Some(id) = self.connected.find(&Tuple::of(address, of), &self.key)
            {
                return Found::One(id);
            }
            if let Ok(at) = listeners.binary_search_by_key(&address, |listener| listener.address) {
                return Found::One(self.choose(&listeners[at], of));
            }
        }
        Found::None
    }

    /// The socket that sends from one address and port and is connected to another.
    pub fn find_connected(&self, ours: (IpAddr, u16), theirs: (IpAddr, u16)) -> Found {
        let at = |address| {
            let tuple = Tuple { local: (address, ours.1), remote: theirs };
            self.connected.find(&tuple, &self.key)
        };
        at(ours.0).or_else(|| at(unspecified(ours.0))).map_or(Found::None, Found::One)
    }

    /// All sockets that a datagram for many hosts is for, to the end of `out`: each has a copy. Whether
    /// it is for many, a broadcast or multicast address, is known to who knows our addresses.
    pub fn find_all(&self, of: &Flow4Tuple, out: &mut Vec<SocketId>) {
        let of_port = &self.by_port[self.bound_ports.find(of.destination.port())];
        let bound = of_port.iter().map(|&at| &self.bindings[at]);
        out.extend(bound.filter(|one| one.receives_many(of)).map(|one| one.id));
    }

    /// The socket that keeps `new` from being bound: the kernel's `EADDRINUSE`. As there, of
    /// those that have an address in common with it the one looked at first decides.
    #[must_use]
    pub fn conflict(&self, new: &Binding) -> Option<SocketId> {
        let first = chain(&self.bindings).find(|binding| binding.overlaps(new))?;
        let is_shared = first.reuse != Reuse::None && new.reuse != Reuse::None;
        (!is_shared).then_some(first.id)
    }

    /// What it was made of.
    #[must_use]
    pub fn bindings(&self) -> &[Binding] {
        &self.bindings
    }

    /// The member for a datagram (`reuseport_select_sock_by_hash`): from the hash's on, the first
    /// that is on this CPU, if any is on one; else the hash's.
    fn choose(&self, listener: &Listener, of: &Flow4Tuple) -> SocketId {
        let members = &self.members[listener.members.clone()];
        if let [only] = members {
            return only.id;
        }
        let hash = if of.hash.is_some() {
            of.hash.0
        } else {
            folded(Tuple::of(of.destination.ip(), of).hash(&self.key))
        };
        let (before, from) = members.split_at(reciprocal_scale(hash, members.len()));
        let here = from.iter().chain(before).find(|member| member.cpu == Some(of.cpu));
        here.unwrap_or(&from[0]).id
    }
}

impl Member {
    fn of(binding: &Binding) -> Self {
        let cpu = binding.cpu.filter(|_| binding.reuse == Reuse::ThisCpu);
        Self { id: binding.id, cpu }
    }
}

/// The order in which the kernel looks at sockets (`udp_lib_get_port`): the last one
/// bound first, but those of IPv6 that share a port last, in the order in which they were bound.
fn chain(bindings: &[Binding]) -> impl Iterator<Item = &Binding> {
    let first = bindings.iter().rev().filter(|binding| !binding.is_last());
    first.chain(bindings.iter().filter(|binding| binding.is_last()))
}

/// No address in particular, of the same family.
fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// What of a peer's address counts.
fn endpoint(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

/// `hash` as an index below `count`: the kernel's `reciprocal_scale`.
fn reciprocal_scale(hash: u32, count: usize) -> usize {
    let scaled = (u64::from(hash) * count as u64) >> 32;
    usize::try_from(scaled).unwrap_or(0)
}

/// Both halves of a 64-bit hash in one.
fn folded(hash: u64) -> u32 {
    let (high, low) = (hash >> 32, hash & u64::from(u32::MAX));
    u32::try_from(high ^ low).unwrap_or(0)
}

/// A socket's address and its peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Tuple {
    local: (IpAddr, u16),
    remote: (IpAddr, u16),
}

impl Tuple {
    /// Of a socket at `address` that this datagram could be for.
    fn of(address: IpAddr, datagram: &Flow4Tuple) -> Self {
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

/// Connected sockets, by both addresses and ports. Open addressing, at most half full.
#[derive(Debug)]
struct Connected {
    slots: Vec<Option<(Tuple, SocketId)>>,
    /// How many have an address of their own.
    bound: usize,
    /// How many have not.
    unbound: usize,
}

impl Connected {
    fn new(bindings: &[Binding], key: &SipHasher13) -> Self {
        let tuples = |binding: &Binding| -> Vec<_> {
            let Some(remote) = binding.remote.map(endpoint) else { return Vec::new() };
            let port = binding.local.port();
            let local = binding.addresses().filter(|own| own.is_ipv4() == remote.0.is_ipv4());
            local.map(|address| Tuple { local: (address, port), remote }).collect()
        };
        // Of several that are connected alike, the last one receives (`udp_hash4`).
        let with_id = |of: &Binding| tuples(of).into_iter().map(|tuple| (tuple, of.id)).collect();
        let all: Vec<_> = bindings.iter().rev().flat_map::<Vec<_>, _>(with_id).collect();
        let unbound = all.iter().filter(|(tuple, _)| tuple.local.0.is_unspecified()).count();
        let slots = vec![None; (all.len() * 2).next_power_of_two()];
        let mut connected = Self { slots, bound: all.len() - unbound, unbound };
        for (tuple, id) in all {
            let at = connected.place(&tuple, key);
            connected.slots[at].get_or_insert((tuple, id));
        }
        connected
    }

    fn find(&self, tuple: &Tuple, key: &SipHasher13) -> Option<SocketId> {
        self.slots[self.place(tuple, key)].map(|(_, id)| id)
    }

    /// Where `tuple` is, or would be. There is always an empty slot.
    fn place(&self, tuple: &Tuple, key: &SipHasher13) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = folded(tuple.hash(key)) as usize & mask;
        while self.slots[at].is_some_and(|(there, _)| there != *tuple) {
            at = (at + 1) & mask;
        }
        at
    }
}

/// Where those of a port stand in a list. Open addressing, at most half full; ports are our own
/// choice.
#[derive(Debug)]
struct Ports {
    slots: Vec<Option<(u16, Range<usize>)>>,
}

impl Ports {
    /// Of a list in the order of its ports.
    fn new(list: impl Iterator<Item = u16>) -> Self {
        let list: Vec<_> = list.collect();
        let by_port = || list.chunk_by(u16::eq);
        let mut ports = Self { slots: vec![None; (by_port().count() * 2).next_power_of_two()] };
        let mut start = 0;
        for of_port in by_port() {
            let (at, end) = (ports.place(of_port[0]), start + of_port.len());
            ports.slots[at] = Some((of_port[0], start..end));
            start = end;
        }
        ports
    }

    fn find(&self, port: u16) -> Range<usize> {
        let found = self.slots[self.place(port)].as_ref();
        found.map_or(0..0, |(_, places)| places.clone())
    }

    /// Where `port` is, or would be. There is always an empty slot.
    fn place(&self, port: u16) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = usize::from(port) & mask;
        while self.slots[at].as_ref().is_some_and(|(there, _)| *there != port) {
            at = (at + 1) & mask;
        }
        at
    }
}

#[cfg(test)]
mod tests;
