//! Listeners by address, and groups of those that share one (`SO_REUSEPORT`).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use forebay_rx::cpu::CpuId;

use super::super::flow::HashedFlow;
use crate::socket::reuseport::choose;

/// Sharing of an address and port with other listeners that share it, too (`SO_REUSEPORT`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReusePort {
    /// CPU whose connections the listener is preferred for (`SO_INCOMING_CPU`).
    pub cpu: Option<CpuId>,
    /// True of an IPv6 socket at an IPv4 address: it gets no connection if an IPv4 socket listens.
    pub is_mapped: bool,
}

/// All listeners.
#[derive(Debug, Default)]
pub(super) struct Listeners(BTreeMap<SocketAddr, Group>);

/// Listeners at one address: one that does not share it, or several that do.
#[derive(Debug, Default)]
struct Group {
    /// Members in the order in which they began to listen; those of the other family last.
    members: Vec<Member>,
    /// Number of the leading members that are of the address's family.
    own: usize,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    socket: u32,
    reuse_port: Option<ReusePort>,
}

impl Listeners {
    /// Adds a listener, for which there must be [no conflict](Self::has_conflict).
    pub(super) fn insert(&mut self, at: SocketAddr, socket: u32, reuse_port: Option<ReusePort>) {
        let Group { members, own } = self.0.entry(at).or_default();
        let member = Member { socket, reuse_port };
        if reuse_port.is_some_and(|reuse_port| reuse_port.is_mapped) {
            members.push(member);
        } else {
            members.insert(*own, member);
            *own += 1;
        }
    }

    /// Removes a listener. The last one takes its place (`__reuseport_detach_sock`).
    pub(super) fn remove(&mut self, at: SocketAddr, socket: u32) {
        let Some(Group { members, own }) = self.0.get_mut(&at) else { return };
        let Some(place) = members.iter().position(|member| member.socket == socket) else { return };
        let is_own = place < *own;
        let last = if is_own { *own } else { members.len() } - 1;
        members.swap(place, last);
        members.remove(last);
        *own -= usize::from(is_own);
        if members.is_empty() {
            self.0.remove(&at);
        }
    }

    /// True if another listener keeps a socket from this address: one there, at all addresses of the
    /// family, or at any of them if the address means all; unless both share (`inet_csk_bind_conflict`).
    pub(super) fn has_conflict(&self, at: SocketAddr, reuse_port: Option<ReusePort>) -> bool {
        let mut beside = self.0.iter().filter(|(other, _)| {
            let is_alike = other.port() == at.port() && other.is_ipv4() == at.is_ipv4();
            let is_any = other.ip().is_unspecified() || at.ip().is_unspecified();
            is_alike && (is_any || other.ip() == at.ip())
        });
        let is_shared =
            |group: &Group| group.members.iter().all(|other| other.reuse_port.is_some());
        beside.any(|(_, group)| reuse_port.is_none() || !is_shared(group))
    }

    /// True if a listener gets connections to this address.
    pub(super) fn has(&self, address: SocketAddr) -> bool {
        self.group(address).is_some()
    }

    /// Listener for a new connection, on this CPU: of the address itself, or of all
    /// (`__inet_lookup_listener`).
    pub(super) fn find(&self, flow: &HashedFlow, cpu: CpuId) -> Option<u32> {
        let Group { members, own } = self.group(flow.flow().ours)?;
        let group = if *own > 0 { &members[..*own] } else { members };
        let is_here = |member: &Member| member.reuse_port.is_some_and(|it| it.cpu == Some(cpu));
        choose(group, flow.high(), is_here).map(|member| member.socket)
    }

    /// Sockets of all listeners.
    pub(super) fn sockets(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.values().flat_map(|group| group.members.iter().map(|member| member.socket))
    }

    fn group(&self, address: SocketAddr) -> Option<&Group> {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => [0_u8; 4].into(),
            SocketAddr::V6(_) => [0_u8; 16].into(),
        };
        let exact = self.0.get(&address);
        exact.or_else(|| self.0.get(&SocketAddr::new(any, address.port())))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::flow::{Flow, FlowHasher};
    use super::*;

    /// Addresses to listen at, and an IPv4 one that an IPv6 socket may have.
    const LOCALS: [&str; 5] = ["0.0.0.0:7", "[::]:7", "192.0.2.1:7", "192.0.2.2:7", "[fd00::1]:7"];

    /// A socket of the kernel's.
    #[derive(Clone, Copy, Debug)]
    struct Socket {
        number: u32,
        at: SocketAddr,
        reuse_port: Option<ReusePort>,
    }

    impl Socket {
        fn is_of_group(&self, other: &Self) -> bool {
            let kind = |of: &Self| of.reuse_port.map(|reuse_port| reuse_port.is_mapped);
            self.at == other.at && kind(self) == kind(other)
        }
    }

    /// `inet_csk_bind_conflict` for sockets that all listen.
    fn has_conflict(all: &[Socket], new: &Socket) -> bool {
        all.iter().any(|old| {
            let (one, other) = (old.at.ip(), new.at.ip());
            let overlaps = one == other || one.is_unspecified() || other.is_unspecified();
            let is_alike = old.at.port() == new.at.port() && one.is_ipv4() == other.is_ipv4();
            is_alike && overlaps && !(old.reuse_port.is_some() && new.reuse_port.is_some())
        })
    }

    /// `__inet_lookup_listener`, and `reuseport_select_sock_by_hash` step by step.
    fn lookup(groups: &[Vec<Socket>], flow: &HashedFlow, cpu: CpuId) -> Option<u32> {
        let to = flow.flow().ours;
        let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
        let any = SocketAddr::new(any.parse().unwrap(), to.port());
        for (at, is_mapped) in [(to, false), (to, true), (any, false), (any, true)] {
            let is_it = |socket: &Socket| {
                let mapped = socket.reuse_port.is_some_and(|reuse_port| reuse_port.is_mapped);
                socket.at == at && mapped == is_mapped
            };
            let Some(group) = groups.iter().find(|group| group.iter().any(is_it)) else { continue };
            let start =
                usize::try_from((u64::from(flow.high()) * group.len() as u64) >> 32).unwrap();
            for step in 0..group.len() {
                let socket = &group[(start + step) % group.len()];
                if socket.reuse_port.is_some_and(|reuse_port| reuse_port.cpu == Some(cpu)) {
                    return Some(socket.number);
                }
            }
            return Some(group[start].number);
        }
        None
    }

    proptest! {
        #[test]
        fn tcp_31_listeners_chosen_by_kernels_rule(
            steps in prop::collection::vec(
                (any::<bool>(), 0..LOCALS.len(), 0_u16..4, any::<bool>(), any::<prop::sample::Index>()),
                0..60,
            ),
        ) {
            let hasher = FlowHasher::new([9; 16]);
            let (mut listeners, mut number) = (Listeners::default(), 0);
            let mut groups: Vec<Vec<Socket>> = Vec::new();
            for (step, (opens, local, cpu, may_map, which)) in steps.into_iter().enumerate() {
                let all: Vec<Socket> = groups.iter().flatten().copied().collect();
                if opens || all.is_empty() {
                    number += 1;
                    let at: SocketAddr = LOCALS[local].parse().unwrap();
                    let reuse_port = (cpu > 0 || may_map).then(|| ReusePort {
                        cpu: (cpu > 1).then_some(CpuId(cpu)),
                        is_mapped: may_map && at.is_ipv4(),
                    });
                    let new = Socket { number, at, reuse_port };
                    let is_refused = has_conflict(&all, &new);
                    prop_assert_eq!(listeners.has_conflict(at, reuse_port), is_refused);
                    if is_refused {
                        continue;
                    }
                    listeners.insert(at, number, reuse_port);
                    match groups.iter_mut().find(|group| group[0].is_of_group(&new)) {
                        Some(group) => group.push(new),
                        None => groups.push(vec![new]),
                    }
                } else {
                    let old = all[which.index(all.len())];
                    listeners.remove(old.at, old.number);
                    let group = groups.iter_mut().find(|group| group[0].is_of_group(&old)).unwrap();
                    let place = group.iter().position(|one| one.number == old.number).unwrap();
                    group.swap_remove(place);
                    groups.retain(|group| !group.is_empty());
                }
                for to in ["192.0.2.1:7", "192.0.2.3:7", "[fd00::1]:7", "[fd00::2]:7", "192.0.2.1:8"] {
                    for port in 0..8 {
                        let theirs = ([192, 0, 2, 9], 1000 * u16::try_from(step).unwrap() + port).into();
                        let flow = hasher.hashed(&Flow { ours: to.parse().unwrap(), theirs });
                        let cpu = CpuId(port % 5);
                        prop_assert_eq!(listeners.find(&flow, cpu), lookup(&groups, &flow, cpu));
                    }
                }
            }
        }
    }
}
