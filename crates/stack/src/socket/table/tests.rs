//! The table compared with the kernel's rules, implemented directly: a walk over all sockets.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::socket::reuseport::reciprocal_scale;

/// Local addresses; the first two are unspecified.
const ADDRESSES: [&str; 8] =
    ["0.0.0.0", "::", "10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "::ffff:10.0.0.1", "224.1.1.1"];
const PEERS: [&str; 4] = ["10.0.0.9:9", "10.0.0.9:10", "[fd00::9]:9", "[::ffff:10.0.0.9]:9"];

fn local(addresses: &'static [&str]) -> impl Strategy<Value = SocketAddr> {
    let address = proptest::sample::select(addresses).prop_map(|text| text.parse().unwrap());
    (address, 53u16..55).prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

fn peer() -> impl Strategy<Value = SocketAddr> {
    proptest::sample::select(&PEERS).prop_map(|text| text.parse().unwrap())
}

fn binding() -> impl Strategy<Value = Binding> {
    let remote = proptest::option::weighted(0.3, peer());
    let reuse = prop_oneof![Just(Reuse::None), Just(Reuse::Hash), Just(Reuse::ThisCpu)];
    let cpu = proptest::option::of((0u16..3).prop_map(CpuId));
    let flags = any::<[bool; 3]>();
    (local(&ADDRESSES), remote, reuse, cpu, groups(), flags).prop_map(
        |(local, remote, reuse, cpu, groups, [is_v6_only, reuses_address, is_multicast_all])| {
            let remote = remote.filter(|remote| {
                let local = local.ip().to_canonical();
                local.is_unspecified() || local.is_ipv4() == remote.ip().to_canonical().is_ipv4()
            });
            Binding {
                remote,
                is_v6_only: is_v6_only && local.ip().to_canonical().is_ipv6(),
                reuse,
                reuses_address,
                cpu,
                groups,
                is_multicast_all,
                ..Binding::new(SocketId(0), local)
            }
        },
    )
}

/// Groups joined: one, or none.
fn groups() -> impl Strategy<Value = Vec<Membership>> {
    let group = "224.1.1.1".parse().unwrap();
    proptest::option::of(Just(Membership { group, device: 0 }))
        .prop_map(|joined| joined.into_iter().collect())
}

/// A change of the bound sockets.
#[derive(Clone, Debug)]
enum Change {
    Bind(Binding),
    Close(proptest::sample::Index),
    /// Another binding for a socket, as when it is connected.
    Rebind(proptest::sample::Index, Binding),
    Reuse(proptest::sample::Index, bool),
    /// Joining and leaving of groups.
    Groups(proptest::sample::Index, Vec<Membership>),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        6 => binding().prop_map(Change::Bind),
        1 => any::<proptest::sample::Index>().prop_map(Change::Close),
        2 => (any::<proptest::sample::Index>(), binding())
            .prop_map(|(which, binding)| Change::Rebind(which, binding)),
        1 => any::<(proptest::sample::Index, bool)>()
            .prop_map(|(which, is_on)| Change::Reuse(which, is_on)),
        1 => (any::<proptest::sample::Index>(), groups())
            .prop_map(|(which, groups)| Change::Groups(which, groups)),
    ];
    proptest::collection::vec(change, 0..20)
}

/// Bindings after the changes, and the list of them in the order in which they were bound. Slots
/// are reused.
fn changed(changes: Vec<Change>, seed: u64) -> (Bindings, Vec<Binding>) {
    let (mut bindings, mut expected) = (Bindings::new(seed), Vec::<Binding>::new());
    let (mut free, mut slots) = (Vec::new(), 0);
    for change in changes {
        match change {
            Change::Bind(binding) => {
                let id = free.pop().unwrap_or_else(|| {
                    slots += 1;
                    SocketId::new(slots - 1, 0)
                });
                let binding = Binding { id, ..binding };
                bindings.insert(binding.clone());
                expected.push(binding);
            }
            Change::Close(which) if !expected.is_empty() => {
                let closed = expected.remove(which.index(expected.len()));
                assert_eq!(bindings.remove(closed.id), Some(closed.clone()));
                assert_eq!(bindings.remove(closed.id), None, "once");
                let slot = u32::try_from(closed.id.index()).unwrap();
                free.push(SocketId::new(slot, closed.id.generation() + 1));
            }
            Change::Rebind(which, binding) if !expected.is_empty() => {
                let Binding { id, .. } = expected.remove(which.index(expected.len()));
                let binding = Binding { id, ..binding };
                bindings.rebind(id, |of| *of = binding.clone());
                expected.push(binding);
            }
            Change::Reuse(which, is_on) if !expected.is_empty() => {
                let at = which.index(expected.len());
                let changed = &mut expected[at];
                changed.reuses_address = is_on;
                bindings.set_reuses_address(changed.id, is_on);
            }
            Change::Groups(which, groups) if !expected.is_empty() => {
                let at = which.index(expected.len());
                let changed = &mut expected[at];
                bindings.set_groups(changed.id, &groups);
                changed.groups = groups;
            }
            Change::Close(_) | Change::Rebind(..) | Change::Reuse(..) | Change::Groups(..) => {}
        }
    }
    (bindings, expected)
}

fn tuple() -> impl Strategy<Value = LookupKey> {
    (peer(), local(&ADDRESSES[2..]), 1u32.., 0u16..4).prop_map(
        |(source, destination, hash, cpu)| LookupKey {
            source: SocketAddr::new(source.ip().to_canonical(), source.port()),
            // The family is the sender's.
            destination: if source.ip().to_canonical().is_ipv4() == destination.is_ipv4() {
                destination
            } else if destination.is_ipv4() {
                SocketAddr::new("fd00::1".parse().unwrap(), destination.port())
            } else {
                SocketAddr::new("10.0.0.1".parse().unwrap(), destination.port())
            },
            hash: FlowHash(hash),
            cpu: CpuId(cpu),
            device: 0,
        },
    )
}

/// Slow reference model: the kernel's lists and scores.
struct Twin<'a> {
    bound: &'a [Binding],
    chain: VecDeque<&'a Binding>,
}

impl<'a> Twin<'a> {
    fn new(bound: &'a [Binding]) -> Self {
        let mut chain = VecDeque::new();
        for binding in bound {
            if binding.local.is_ipv6() && binding.reuse != Reuse::None {
                chain.push_back(binding);
            } else {
                chain.push_front(binding);
            }
        }
        Self { bound, chain }
    }

    fn find(&self, of: &LookupKey) -> Option<SocketId> {
        let to = of.destination.ip();
        let found = self.find_at(to, of).or_else(|| self.find_at(unspecified(to), of))?;
        Some(if found.remote.is_none() && found.reuse != Reuse::None {
            self.of_group(found, of)
        } else {
            found.id
        })
    }

    fn find_connected(&self, of: &LookupKey) -> Option<SocketId> {
        let to = of.destination.ip();
        let at = |address| {
            let is_for = |one: &&Binding| one.remote.is_some() && score(one, address, of) > -1;
            self.bound.iter().rev().find(is_for)
        };
        at(to).or_else(|| at(unspecified(to))).map(|binding| binding.id)
    }

    fn find_at(&self, address: IpAddr, of: &LookupKey) -> Option<&'a Binding> {
        // `udp4_lib_lookup4`: connected sockets are in a list of their own, the last one bound
        // first.
        let is_for = |one: &&Binding| one.remote.is_some() && score(one, address, of) > -1;
        if let Some(connected) = self.bound.iter().rev().find(is_for) {
            return Some(connected);
        }
        let (mut best, mut found) = (-1, None);
        for &binding in &self.chain {
            if binding.remote.is_some() || score(binding, address, of) <= best {
                continue;
            }
            (best, found) = (score(binding, address, of), Some(binding));
            // `udp4_lib_lookup2` asks the group, and takes its answer if no member is connected.
            let group: Vec<_> = self.bound.iter().filter(|other| shares(binding, other)).collect();
            if !group.is_empty() && group.iter().all(|member| member.remote.is_none()) {
                break;
            }
            let scores = group.iter().filter(|member| member.remote.is_none());
            best = scores.map(|member| score(member, address, of)).max().unwrap_or(best);
        }
        found
    }

    fn of_group(&self, found: &Binding, of: &LookupKey) -> SocketId {
        let is_member = |other: &&Binding| shares(found, other) && other.remote.is_none();
        let group: Vec<_> = self.bound.iter().filter(is_member).collect();
        let start = reciprocal_scale(of.hash.0, group.len());
        for step in 0..group.len() {
            let member = group[(start + step) % group.len()];
            if member.reuse == Reuse::ThisCpu && member.cpu == Some(of.cpu) {
                return member.id;
            }
        }
        group[start].id
    }
}

/// True if `other` was bound into the group of `one`.
fn shares(one: &Binding, other: &Binding) -> bool {
    let group = |of: &Binding| (of.local, of.is_v6_only && of.local.ip().is_unspecified());
    one.reuse != Reuse::None && other.reuse != Reuse::None && group(one) == group(other)
}

/// `compute_score` of either family.
fn score(binding: &Binding, address: IpAddr, of: &LookupKey) -> i32 {
    let own = binding.local.ip();
    let is_at = match address {
        IpAddr::V4(_) => {
            let takes_all = own == Ipv6Addr::UNSPECIFIED && !binding.is_v6_only;
            own.to_canonical() == address || takes_all && address.is_unspecified()
        }
        IpAddr::V6(_) => own.to_canonical() == address,
    };
    if binding.local.port() != of.destination.port() || !is_at {
        return -1;
    }
    let is_here = binding.reuse == Reuse::ThisCpu && binding.cpu == Some(of.cpu);
    let family = if own.is_ipv4() { 2 } else { 1 } + i32::from(is_here);
    match binding.remote {
        None => family,
        Some(remote) if remote.ip().to_canonical() != of.source.ip() => -1,
        Some(remote) if remote.port() != of.source.port() => -1,
        Some(_) => family + 8,
    }
}

/// `ipv6_rcv_saddr_equal` and `ipv4_rcv_saddr_equal`, case by case.
fn has_address_in_common(one: &Binding, two: &Binding) -> bool {
    let (a, b) = (one.local.ip().to_canonical(), two.local.ip().to_canonical());
    match (a, b) {
        (IpAddr::V4(_), IpAddr::V4(_)) | (IpAddr::V6(_), IpAddr::V6(_)) => {
            a == b || a.is_unspecified() || b.is_unspecified()
        }
        (IpAddr::V6(_), IpAddr::V4(_)) => a.is_unspecified() && !one.is_v6_only,
        (IpAddr::V4(_), IpAddr::V6(_)) => b.is_unspecified() && !two.is_v6_only,
    }
}

proptest! {
    /// After any sockets are bound, connected and closed, including combinations that the kernel
    /// would refuse, a datagram goes to the socket that the kernel's walk over all sockets finds.
    #[test]
    fn socket_scores_are_the_kernels(
        changes in changes(),
        tuples in proptest::collection::vec(tuple(), 1..20),
        seed: u64,
    ) {
        let (bindings, expected) = changed(changes, seed);
        let (table, twin) = (bindings.table(), Twin::new(&expected));
        for tuple in tuples {
            let expected = twin.find(&tuple).map_or(FoundSocket::None, FoundSocket::One);
            prop_assert_eq!(table.find(&tuple), expected, "{:?}", tuple);
            let ours = (tuple.destination.ip(), tuple.destination.port());
            let theirs = endpoint(tuple.source);
            let expected = twin.find_connected(&tuple).map_or(FoundSocket::None, FoundSocket::One);
            prop_assert_eq!(table.find_connected(ours, theirs), expected, "{:?}", tuple);
        }
    }

    /// A socket may be bound if the first socket that has an address in common with it shares its
    /// port as well. Those that reuse addresses do not count for one that does.
    #[test]
    fn bind_errors_are_the_kernels(
        changes in changes(),
        new in binding(),
    ) {
        let (bindings, expected) = changed(changes, 0);
        let twin = Twin::new(&expected);
        let in_use = twin.chain.iter().find(|bound| {
            let both_reuse = bound.reuses_address && new.reuses_address;
            bound.local.port() == new.local.port()
                && !both_reuse
                && has_address_in_common(bound, &new)
        });
        let expected = in_use.filter(|bound| {
            bound.reuse == Reuse::None || new.reuse == Reuse::None
        });
        prop_assert_eq!(bindings.conflict(&new), expected.map(|bound| bound.id));
    }

    /// Every flow of a group goes to one member, every member gets some flows, and the table
    /// computes a hash for flows without one.
    #[test]
    fn group_spreads_flows_stably(count in 1u16..9, seed: u64, has_hash: bool) {
        let local = "10.0.0.1:53".parse().unwrap();
        let bindings = (0..count).map(|number| Binding {
            reuse: Reuse::Hash,
            ..Binding::new(SocketId(number.into()), local)
        });
        let table = SocketTable::new(bindings.collect(), seed);
        let mut found = [0; 9];
        for port in 1..=400u32 {
            let of = LookupKey {
                source: SocketAddr::from(([10, 0, 0, 9], u16::try_from(port).unwrap())),
                destination: local,
                hash: FlowHash(if has_hash { port.wrapping_mul(0x9e37_79b1) | 1 } else { 0 }),
                cpu: CpuId(0),
                device: 0,
            };
            let FoundSocket::One(id) = table.find(&of) else { panic!("none") };
            prop_assert_eq!(table.find(&of), FoundSocket::One(id));
            found[id.index()] += 1;
        }
        let fair = 400 / i32::from(count);
        let members = &found[..count.into()];
        prop_assert!(members.iter().all(|flows| (fair / 4..=fair * 2).contains(flows)), "{found:?}");
    }

    /// A multicast or broadcast datagram goes once to every socket that the kernel's rule selects.
    #[test]
    fn multicast_reaches_all_members(changes in changes(), of in tuple()) {
        let to = of.destination.ip();
        let (bindings, expected) = changed(changes, 0);
        let expected: Vec<_> = expected
            .iter()
            .filter(|binding| {
                let at = [to, unspecified(to)].map(|address| score(binding, address, &of));
                let takes_all = binding.is_multicast_all && binding.local.is_ipv4() == to.is_ipv4();
                let wants = takes_all || binding.groups.iter().any(|joined| joined.group == to);
                at.into_iter().max() > Some(-1) && (!to.is_multicast() || wants)
            })
            .map(|binding| binding.id)
            .collect();
        let mut found = Vec::new();
        bindings.table().find_all(&of, &mut found);
        prop_assert_eq!(found, expected);
    }
}

/// The promises of the interface, one by one.
#[test]
fn better_bound_socket_wins() {
    let local = |text: &str| text.parse::<SocketAddr>().unwrap();
    let bound = |number, text| Binding::new(SocketId(number), local(text));
    let of = |source, destination| LookupKey {
        source: local(source),
        destination: local(destination),
        hash: FlowHash(1),
        cpu: CpuId(1),
        device: 0,
    };
    let bindings = vec![
        bound(0, "[::]:53"),
        bound(1, "10.0.0.1:53"),
        Binding { remote: Some(local("10.0.0.9:9")), ..bound(2, "10.0.0.1:53") },
        Binding { is_v6_only: true, ..bound(3, "[::]:54") },
        Binding { reuse: Reuse::ThisCpu, cpu: Some(CpuId(0)), ..bound(4, "0.0.0.0:55") },
        Binding { reuse: Reuse::ThisCpu, cpu: Some(CpuId(1)), ..bound(5, "0.0.0.0:55") },
    ];
    let table = SocketTable::new(bindings, 1);
    for (source, destination, expected) in [
        ("10.0.0.9:9", "10.0.0.1:53", Some(2)),
        ("10.0.0.9:10", "10.0.0.1:53", Some(1)),
        ("10.0.0.9:9", "10.0.0.2:53", Some(0)),
        ("[fd00::9]:9", "[fd00::1]:53", Some(0)),
        ("[fd00::9]:9", "[fd00::1]:54", Some(3)),
        ("10.0.0.9:9", "10.0.0.1:54", None),
        ("10.0.0.9:9", "10.0.0.1:55", Some(5)),
        ("10.0.0.9:9", "10.0.0.1:56", None),
    ] {
        let expected =
            expected.map_or(FoundSocket::None, |number| FoundSocket::One(SocketId(number)));
        assert_eq!(table.find(&of(source, destination)), expected, "{source} to {destination}");
    }
}

/// A datagram goes to the endpoint that issued its connection ID, on whatever CPU it is; any other one
/// goes as the group's rule says, by its addresses alone, and so does an ID of an endpoint that has closed.
#[test]
fn udp_12_group_selects_by_id() {
    use crate::socket::connection_id::{ConnectionIds, EndpointIndex, SelectById};
    const ENDPOINTS: u16 = 5;
    let ids = Arc::new(ConnectionIds::new([9; 16], 12).unwrap());
    let local = SocketAddr::from(([10, 0, 0, 1], 443));
    let by_tuple = |of: LookupKey| LookupKey { hash: FlowHash::NONE, ..of };
    for reuse in [Reuse::Hash, Reuse::ThisCpu] {
        let bind = |place: u16| Binding {
            reuse,
            cpu: (reuse == Reuse::ThisCpu).then_some(CpuId(place)),
            // Bound in another order than that of their places.
            select: Some(SelectById {
                ids: Arc::clone(&ids),
                place: EndpointIndex(ENDPOINTS - 1 - place),
            }),
            ..Binding::new(SocketId(place.into()), local)
        };
        let mut bindings = Bindings::new(1);
        (0..ENDPOINTS).for_each(|place| bindings.insert(bind(place)));
        assert_eq!([443, 444].map(|port| bindings.table().id_bytes_at(port)), [12, 0]);
        for number in 0..1000u16 {
            let of = LookupKey {
                source: SocketAddr::from(([10, 0, 0, 9], number + 1)),
                destination: local,
                hash: FlowHash(u32::from(number).wrapping_mul(0x9e37_79b1) | 1),
                cpu: CpuId(number % 7),
                device: 0,
            };
            let place = number % ENDPOINTS;
            let id =
                ids.issue(EndpointIndex(place), u128::from(number).to_be_bytes().map(|b| b ^ 5));
            let short = [&[0x43], id.as_bytes(), b"payload"].concat();
            let long = [&[0xe3, 0, 0, 0, 1, 12][..], id.as_bytes(), b"payload"].concat();
            let issuer = FoundSocket::One(SocketId((ENDPOINTS - 1 - place).into()));
            for datagram in [short, long] {
                assert_eq!(bindings.table().find_holding(&of, || &datagram), issuer);
            }
            // The hash of a short header is that of what may be an ID: a reset (RFC 9000, section 10.3) has random bytes there.
            let initial = [&[0xc3, 0, 0, 0, 1, 12][..], &[7; 12], b"client"].concat();
            let reset = [&[0x43], &of.hash.0.to_be_bytes()[..], &[7; 30]].concat();
            let usual = bindings.table().find(&by_tuple(of));
            for hash in [of.hash, FlowHash(of.hash.0.rotate_left(16) | 1)] {
                for datagram in [&initial, &reset] {
                    let of = LookupKey { hash, ..of };
                    assert_eq!(bindings.table().find_holding(&of, || datagram), usual);
                }
            }
        }
        bindings.remove(SocketId(0));
        let id = ids.issue(EndpointIndex(ENDPOINTS - 1), [1; 16]);
        let short = [&[0x43], id.as_bytes()].concat();
        let of = LookupKey {
            source: SocketAddr::from(([10, 0, 0, 9], 1)),
            destination: local,
            hash: FlowHash(3),
            cpu: CpuId(0),
            device: 0,
        };
        let usual = bindings.table().find(&by_tuple(of));
        assert_eq!(bindings.table().find_holding(&of, || &short), usual);
    }
}
