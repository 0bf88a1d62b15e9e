//! All bound sockets, for the code that binds and closes sockets: incremental updates of the table,
//! and detection of address conflicts.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use forebay_rx::cpu::CpuId;

use super::{
    Binding, ConnectedSocket, Few, GroupMember, Members, Membership, ReuseportGroup, SocketTable,
    UnconnectedSockets, unspecified,
};
use crate::socket::SocketId;
use crate::socket::connection_id::SelectById;

/// All bound sockets.
#[derive(Debug)]
pub struct Bindings {
    /// Sockets by slot.
    placed: Vec<Option<Arc<Placed>>>,
    spots: BTreeMap<(u16, IpAddr), Spot>,
    /// Sequence number for the next socket.
    next: BoundAs,
    table: SocketTable,
}

/// A bound socket.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    pub(super) binding: Binding,
    pub(super) bound_as: BoundAs,
}

/// Sequence number: the number of sockets bound before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct BoundAs(pub(super) u64);

/// Lookup order of the kernel (`udp_lib_get_port`): the last one bound first, but IPv6 sockets that
/// share a port last, in the order in which they were bound.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct LookedAt {
    is_last: bool,
    then: u64,
}

impl LookedAt {
    fn of(placed: &Placed) -> Self {
        let (is_last, BoundAs(number)) = (placed.binding.is_last(), placed.bound_as);
        Self { is_last, then: if is_last { number } else { u64::MAX - number } }
    }
}

/// Sockets at one address and port.
#[derive(Debug, Default)]
struct Spot {
    all: BTreeMap<LookedAt, Arc<Placed>>,
    /// Unconnected sockets.
    open: BTreeMap<LookedAt, Arc<Placed>>,
    /// Number of connected sockets, by group.
    connected: BTreeMap<ReuseportGroup, usize>,
}

impl Bindings {
    /// Creates an empty set. `seed` is secret, so that an attacker cannot choose addresses that
    /// collide.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let table = SocketTable::empty(seed);
        Self { placed: Vec::new(), spots: BTreeMap::new(), next: BoundAs(0), table }
    }

    /// The table of the sockets bound now.
    #[must_use]
    pub fn table(&self) -> &SocketTable {
        &self.table
    }

    /// Sockets bound now, by slot.
    pub fn iter(&self) -> impl Iterator<Item = &Binding> {
        self.placed.iter().flatten().map(|placed| &placed.binding)
    }

    /// Binds a socket, after all others. The slot's previous socket must have been removed.
    pub fn insert(&mut self, binding: Binding) {
        let bound_as = self.next;
        self.next.0 += 1;
        let placed = Arc::new(Placed { binding, bound_as });
        let index = placed.binding.id.index();
        if self.placed.len() <= index {
            self.placed.resize(index + 1, None);
        }
        debug_assert!(self.placed[index].is_none(), "a slot is one socket's");
        for address in placed.binding.addresses() {
            let spot = self.spots.entry((placed.binding.local.port(), address)).or_default();
            spot.insert(&placed);
        }
        self.publish(&placed, Some(&placed));
        self.placed[index] = Some(placed);
    }

    /// Removes a socket, and returns its binding.
    pub fn remove(&mut self, id: SocketId) -> Option<Binding> {
        let place = self.placed.get_mut(id.index())?;
        let placed = place.take_if(|placed| placed.binding.id == id)?;
        for address in placed.binding.addresses() {
            let at = (placed.binding.local.port(), address);
            if let Some(spot) = self.spots.get_mut(&at) {
                spot.remove(&placed);
                if spot.all.is_empty() {
                    self.spots.remove(&at);
                }
            }
        }
        self.publish(&placed, None);
        Some(Arc::unwrap_or_clone(placed).binding)
    }

    /// Changes a socket's binding. The socket counts as the last one bound from then on: among
    /// sockets connected alike, the kernel selects the last.
    pub fn rebind(&mut self, id: SocketId, change: impl FnOnce(&mut Binding)) {
        if let Some(mut binding) = self.remove(id) {
            change(&mut binding);
            self.insert(binding);
        }
    }

    /// Sets whether a socket [reuses](Binding::reuses_address) its address. It stays at its place among the others.
    pub fn set_reuses_address(&mut self, id: SocketId, is_on: bool) {
        self.amend(id, |binding| binding.reuses_address = is_on);
    }

    /// Sets the [groups](Binding::groups) that a socket has joined. It stays at its place among the others.
    pub fn set_groups(&mut self, id: SocketId, groups: &[Membership]) {
        self.amend(id, |binding| binding.groups = groups.to_vec());
    }

    /// Changes options of a socket that decide neither its addresses nor its place among the others.
    fn amend(&mut self, id: SocketId, change: impl FnOnce(&mut Binding)) {
        let place = self.placed.get_mut(id.index()).and_then(Option::as_mut);
        let Some(placed) = place.filter(|placed| placed.binding.id == id) else { return };
        let mut binding = placed.binding.clone();
        change(&mut binding);
        *placed = Arc::new(Placed { binding, ..**placed });
        for address in placed.binding.addresses() {
            if let Some(spot) = self.spots.get_mut(&(placed.binding.local.port(), address)) {
                spot.replace(placed);
            }
        }
        let port = placed.binding.local.port().into();
        let of_port = self.table.all.get(port).cloned().unwrap_or_default();
        let of_port = of_port.with(id.slot(), Some(Arc::clone(placed)));
        self.table.all = self.table.all.with(port, Some(of_port));
    }

    /// The socket that keeps `new` from being bound: the kernel's `EADDRINUSE`. As in the kernel,
    /// of the sockets that have an address in common with `new` and do not [reuse](Binding::reuses_address)
    /// it with `new`, the first in lookup order decides.
    #[must_use]
    pub fn conflict(&self, new: &Binding) -> Option<SocketId> {
        let port = new.local.port();
        let at = |address: IpAddr| self.spots.get(&(port, address)).into_iter();
        let beside = |own: IpAddr| {
            let all = own.is_unspecified().then(|| self.spots_of(port, own.is_ipv4()));
            at(own).chain(at(unspecified(own))).chain(all.into_iter().flatten())
        };
        let counts = |placed: &Placed| !(placed.binding.reuses_address && new.reuses_address);
        let spots = new.addresses().flat_map(beside);
        let firsts = spots.filter_map(|spot| spot.all.iter().find(|(_, placed)| counts(placed)));
        let (_, first) = firsts.min_by_key(|(looked_at, _)| **looked_at)?;
        let is_shared = first.binding.reuse.is_shared() && new.reuse.is_shared();
        (!is_shared).then_some(first.binding.id)
    }

    /// Spots at a port, of one address family.
    fn spots_of(&self, port: u16, is_ipv4: bool) -> impl Iterator<Item = &Spot> {
        let (low, high): (IpAddr, IpAddr) = if is_ipv4 {
            (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::BROADCAST.into())
        } else {
            (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::from_bits(u128::MAX).into())
        };
        self.spots.range((port, low)..=(port, high)).map(|(_, spot)| spot)
    }

    /// Updates the table for a socket: with its binding `now`, or without it if `None`.
    fn publish(&mut self, of: &Placed, now: Option<&Arc<Placed>>) {
        let Binding { id, local, .. } = of.binding;
        let port = local.port().into();
        let table = &mut self.table;
        let of_port = table.all.get(port).cloned().unwrap_or_default();
        let of_port = of_port.with(id.slot(), now.cloned());
        table.all = table.all.with(port, (!of_port.is_empty()).then_some(of_port));
        if of.binding.remote.is_none() || of.binding.reuse.is_shared() {
            let old = table.unconnected.get(port).map_or(&[][..], Few::as_slice);
            let mut unconnected = old.to_vec();
            for address in of.binding.addresses() {
                let members = self.spots.get(&(local.port(), address)).and_then(Spot::members);
                let new = members.map(|members| UnconnectedSockets { address, members });
                let at = unconnected.partition_point(|other| other.address < address);
                let is_there = unconnected.get(at).is_some_and(|other| other.address == address);
                unconnected.splice(at..at + usize::from(is_there), new);
            }
            table.unconnected = table.unconnected.with(port, Few::of(unconnected));
        }
        for tuple in of.binding.tuples() {
            self.table.connect(ConnectedSocket { tuple, bound_as: of.bound_as, id }, now.is_some());
        }
    }
}

impl Spot {
    fn insert(&mut self, placed: &Arc<Placed>) {
        let looked_at = LookedAt::of(placed);
        self.all.insert(looked_at, Arc::clone(placed));
        if placed.binding.remote.is_none() {
            self.open.insert(looked_at, Arc::clone(placed));
        } else if let Some(group) = placed.binding.shared() {
            *self.connected.entry(group).or_default() += 1;
        }
    }

    /// Replaces a socket by one with the same addresses, which is at the same place.
    fn replace(&mut self, placed: &Arc<Placed>) {
        let looked_at = LookedAt::of(placed);
        for sockets in [&mut self.all, &mut self.open] {
            sockets.entry(looked_at).and_modify(|before| *before = Arc::clone(placed));
        }
    }

    fn remove(&mut self, placed: &Placed) {
        let looked_at = LookedAt::of(placed);
        self.all.remove(&looked_at);
        if self.open.remove(&looked_at).is_some() {
            return;
        }
        let group = placed.binding.shared();
        if let Some(Entry::Occupied(mut count)) = group.map(|group| self.connected.entry(group)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Members that receive at this spot without being connected.
    fn members(&self) -> Option<Members> {
        let usual = self.first(None)?;
        let cpus: BTreeSet<_> =
            self.open.values().filter_map(|open| open.binding.wants_cpu()).collect();
        let here: Vec<_> = cpus
            .into_iter()
            .filter_map(|cpu| Some((cpu, self.first(Some(cpu))?)))
            .filter(|(_, first)| !are_alike(first, usual))
            .map(|(cpu, first)| (cpu, self.members_with(first)))
            .collect();
        let usual = self.members_with(usual);
        let is_one = here.is_empty();
        Some(if is_one { usual } else { Members::ByCpu(Arc::new(usual), here.into()) })
    }

    /// The socket that a datagram on `cpu` is for, or any member of its group (`udp4_lib_lookup2`):
    /// the kernel does not look beyond a group, unless one of the group's sockets is connected.
    fn first(&self, cpu: Option<CpuId>) -> Option<&Arc<Placed>> {
        let mut best = None;
        for placed in self.open.values() {
            let mut score = score(placed, cpu);
            if best.is_some_and(|(best, _)| score <= best) {
                continue;
            }
            if let Some(group) = placed.binding.group() {
                if !self.connected.contains_key(&group) {
                    return Some(placed);
                }
                let of_group = |other: &&Arc<Placed>| other.binding.group() == Some(group);
                let scores =
                    self.open.values().filter(of_group).map(|other| self::score(other, cpu));
                score = scores.max().unwrap_or(score);
            }
            best = Some((score, placed));
        }
        best.map(|(_, placed)| placed)
    }

    /// The single socket `first`, or its group in the order in which the members were bound.
    fn members_with(&self, first: &Placed) -> Members {
        let Some(group) = first.binding.group() else { return Members::One(first.binding.id) };
        let of_group = |placed: &&Arc<Placed>| placed.binding.group() == Some(group);
        let mut all: Vec<_> = self.open.values().filter(of_group).collect();
        all.sort_by_key(|placed| placed.bound_as);
        let usual =
            Members::Group(all.iter().map(|placed| GroupMember::of(&placed.binding)).collect());
        let Some(SelectById { ids, .. }) = &first.binding.select else { return usual };
        let mut by_place = Vec::new();
        for placed in all {
            let Some(select) = placed.binding.select.as_ref().filter(|select| select.ids == *ids)
            else {
                continue;
            };
            let place = usize::from(select.place.0);
            if by_place.len() <= place {
                by_place.resize(place + 1, None);
            }
            by_place[place] = Some(placed.binding.id);
        }
        Members::ById(Arc::clone(ids), by_place.into(), Arc::new(usual))
    }
}

/// The kernel's `compute_score`: an IPv4 socket scores higher when both families match, and a
/// socket read on `cpu` scores higher.
fn score(of: &Placed, cpu: Option<CpuId>) -> u8 {
    let is_here = cpu.is_some() && of.binding.wants_cpu() == cpu;
    u8::from(of.binding.local.is_ipv4()) + u8::from(is_here)
}

/// True if the two sockets are the same, or in the same group.
fn are_alike(one: &Placed, other: &Placed) -> bool {
    let group = one.binding.group();
    one.binding.id == other.binding.id || group.is_some() && group == other.binding.group()
}
