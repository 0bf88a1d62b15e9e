//! Socket look-up: the table compared with this kernel's own sockets, on the loopback device of a
//! network namespace of the thread.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use forebay_rx::CpuId;
use forebay_rx::hash::FlowHash;
use forebay_stack::socket::SocketId;
use forebay_stack::socket::table::{Binding, Bindings, FoundSocket, LookupKey, Reuse};
use forebay_testkit::namespaces::{await_local_route, enter_new, ip, missing, trial};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Number of socket sets tried, each with every datagram.
const SETS: u32 = 5000;

/// Addresses that sockets are bound to. The senders' addresses are among them: the kernel gives a
/// socket connected to one of them the same address.
const LOCALS: [&str; 10] = [
    "0.0.0.0",
    "10.0.0.1",
    "10.0.0.2",
    "10.0.0.9",
    "::",
    "fd00::1",
    "fd00::2",
    "fd00::9",
    "::ffff:10.0.0.1",
    "224.1.1.1",
];
const PORTS: [u16; 2] = [5053, 5054];
const SENDERS: [&str; 4] = ["10.0.0.9:9", "10.0.0.9:10", "[fd00::9]:9", "[fd00::9]:10"];
const GROUP: Ipv4Addr = Ipv4Addr::new(224, 1, 1, 1);
const BROADCAST: Ipv4Addr = Ipv4Addr::new(127, 255, 255, 255);
/// The CPU of the test. Datagrams over the loopback device then arrive in order.
const CPU: CpuId = CpuId(0);
/// Address of the last datagram, whose arrival shows that the one before has arrived.
const END: &str = "10.0.0.9:5099";

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing(&["ip"]);
    let inside = || {
        enter_new();
        set_up();
        a_datagram_comes_to_the_socket_that_the_table_names();
    };
    let name = "promise_8_socket_choice_is_the_kernels";
    vec![trial(name, missing.as_ref(), inside)]
}

fn set_up() {
    let mut cpus = CpuSet::new();
    cpus.set(CPU.index());
    sched_setaffinity(None, &cpus).unwrap();
    ip("link set lo up multicast on");
    for address in ["10.0.0.1/32", "10.0.0.2/32", "10.0.0.9/32"] {
        ip(&format!("address add {address} dev lo"));
    }
    for address in ["fd00::1/128", "fd00::2/128", "fd00::9/128"] {
        ip(&format!("-6 address add {address} dev lo nodad"));
    }
    ip("route add 224.0.0.0/4 dev lo");
    ["fd00::1", "fd00::2", "fd00::9"].iter().for_each(await_local_route);
}

/// Plan of a socket: bound, and perhaps connected.
#[derive(Clone, Debug)]
struct Plan {
    local: SocketAddr,
    remote: Option<SocketAddr>,
    is_v6_only: bool,
    reuse: Reuse,
    reuses_address: bool,
    cpu: Option<CpuId>,
}

fn plan() -> impl Strategy<Value = Plan> {
    let local = (proptest::sample::select(&LOCALS), proptest::sample::select(&PORTS))
        .prop_map(|(address, port)| SocketAddr::new(address.parse().unwrap(), port));
    let remote = proptest::option::weighted(0.3, proptest::sample::select(&SENDERS));
    let reuse =
        prop_oneof![3 => Just(Reuse::None), 4 => Just(Reuse::Hash), 2 => Just(Reuse::ThisCpu)];
    let cpu = prop_oneof![Just(CPU), Just(CpuId(CPU.0 + 1))];
    (local, remote, any::<[bool; 2]>(), reuse, cpu).prop_map(
        |(local, remote, [is_v6_only, reuses_address], reuse, cpu)| {
            let is_v4 = local.ip().to_canonical().is_ipv4();
            let remote = remote.map(|remote| remote.parse::<SocketAddr>().unwrap());
            let remote = remote.filter(|remote| remote.is_ipv4() == is_v4);
            Plan {
                local,
                remote,
                // A connected dual-stack socket blocks an IPv4 address for others without receiving
                // on it. The table does not model that, so such sockets are IPv6 only.
                is_v6_only: !is_v4 && (is_v6_only || remote.is_some()),
                reuse,
                reuses_address,
                cpu: (reuse == Reuse::ThisCpu).then_some(cpu),
            }
        },
    )
}

/// Creates the kernel's socket for a plan.
fn bound(plan: &Plan) -> io::Result<UdpSocket> {
    let family = if plan.local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket =
        socket_with(family, SocketType::DGRAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    if plan.local.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, plan.is_v6_only)?;
    }
    sockopt::set_socket_reuseport(&socket, plan.reuse != Reuse::None)?;
    sockopt::set_socket_reuseaddr(&socket, plan.reuses_address)?;
    if let Some(cpu) = plan.cpu {
        sockopt::set_socket_incoming_cpu(&socket, cpu.0.into())?;
    }
    bind(&socket, &plan.local)?;
    Ok(socket.into())
}

/// Sockets of the kernel, and the same sockets in the table.
#[derive(Default)]
struct Sockets {
    own: Vec<UdpSocket>,
    bindings: Vec<Binding>,
}

impl Sockets {
    /// Binds and connects a socket, if the kernel permits. The table must agree.
    fn add(&mut self, plan: &Plan) {
        let id = SocketId(self.own.len() as u64);
        let mut binding = Binding {
            is_v6_only: plan.is_v6_only,
            reuse: plan.reuse,
            reuses_address: plan.reuses_address,
            cpu: plan.cpu,
            ..Binding::new(id, plan.local)
        };
        let conflict = self.bound().conflict(&binding);
        let socket = match bound(plan) {
            Ok(socket) => socket,
            Err(error) => {
                assert_eq!(Errno::from_io_error(&error), Some(Errno::ADDRINUSE), "{plan:?}");
                assert_ne!(conflict, None, "the kernel refuses {plan:?}");
                return;
            }
        };
        assert_eq!(conflict, None, "the kernel admits {plan:?}");
        if let Some(remote) = plan.remote {
            let is_mapped = plan.local.is_ipv6() && remote.is_ipv4();
            socket.connect(if is_mapped { mapped(remote) } else { remote }).unwrap();
            binding.remote = Some(remote);
            // Connecting has given the socket a local address.
            binding.local = socket.local_addr().unwrap();
        }
        self.own.push(socket);
        self.bindings.push(binding);
    }

    fn bound(&self) -> Bindings {
        let mut bound = Bindings::new(1);
        self.bindings.iter().for_each(|binding| bound.insert(binding.clone()));
        bound
    }

    /// Sockets that have received a datagram, which is read.
    fn receivers(&self) -> BTreeSet<SocketId> {
        let mut room = [0; 8];
        let has_read = |socket: &UdpSocket| socket.recv(&mut room).is_ok();
        let read: Vec<_> = self.own.iter().map(has_read).collect();
        (0..).map(SocketId).zip(read).filter_map(|(id, has)| has.then_some(id)).collect()
    }

    /// True if the kernel may deliver a datagram to either socket: they share an address, and the
    /// hash that selects one is secret.
    fn are_alike(&self, one: SocketId, other: SocketId) -> bool {
        let [one, other] = [one, other].map(|id| &self.bindings[id.index()]);
        let group = |of: &Binding| {
            let is_v6_only = of.is_v6_only && of.local.ip().is_unspecified();
            let is_member = of.reuse != Reuse::None && of.remote.is_none();
            is_member.then_some((of.local, is_v6_only))
        };
        group(one).is_some() && group(one) == group(other)
    }
}

fn mapped(of: SocketAddr) -> SocketAddr {
    let IpAddr::V4(address) = of.ip() else { return of };
    SocketAddr::new(address.to_ipv6_mapped().into(), of.port())
}

fn a_datagram_comes_to_the_socket_that_the_table_names() {
    let senders = SENDERS.map(|sender| {
        let sender = UdpSocket::bind(sender).unwrap();
        sender.set_broadcast(true).unwrap();
        sender
    });
    let end = UdpSocket::bind(END).unwrap();
    // Join every group on this host, so that the kernel accepts datagrams to it.
    end.join_multicast_v4(&GROUP, &"10.0.0.9".parse().unwrap()).unwrap();
    let mut runner =
        TestRunner::new(Config { cases: SETS, failure_persistence: None, ..Config::default() });
    let plans = proptest::collection::vec(plan(), 1..8);
    let result = runner.run(&plans, |plans| {
        let mut sockets = Sockets::default();
        plans.iter().for_each(|plan| sockets.add(plan));
        for sender in &senders {
            try_all(&sockets, sender, &end);
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Sends a datagram to every address and port of the sender's family.
fn try_all(sockets: &Sockets, sender: &UdpSocket, end: &UdpSocket) {
    let (source, bound) = (sender.local_addr().unwrap(), sockets.bound());
    let table = bound.table();
    let of = |address: IpAddr, port| LookupKey {
        source,
        destination: SocketAddr::new(address, port),
        hash: FlowHash::NONE,
        cpu: CPU,
        device: 0,
    };
    let addresses = LOCALS.map(|address| address.parse::<IpAddr>().unwrap());
    let own = addresses.into_iter().filter(|address| {
        address.is_ipv4() == source.is_ipv4()
            && *address == address.to_canonical()
            && !address.is_unspecified()
            && !address.is_multicast()
    });
    let many = [GROUP, BROADCAST].map(IpAddr::from).into_iter().filter(|_| source.is_ipv4());
    for port in PORTS {
        for of in own.clone().map(|address| of(address, port)) {
            let received = sent(sockets, sender, of.destination, end);
            match table.find(&of) {
                FoundSocket::None => assert!(received.is_empty(), "{of:?}: {received:?}"),
                FoundSocket::One(expected) => {
                    let first = received.first().copied();
                    let alike = first.is_some_and(|first| sockets.are_alike(first, expected));
                    assert!(
                        received.len() == 1 && (first == Some(expected) || alike),
                        "{of:?}: {received:?}, not {expected}"
                    );
                }
            }
        }
        for of in many.clone().map(|address| of(address, port)) {
            let mut expected = Vec::new();
            table.find_all(&of, &mut expected);
            let received = sent(sockets, sender, of.destination, end);
            assert_eq!(received, expected.into_iter().collect(), "{of:?}");
        }
    }
}

/// Sends a datagram. Returns the sockets that have received it.
fn sent(
    sockets: &Sockets,
    sender: &UdpSocket,
    to: SocketAddr,
    end: &UdpSocket,
) -> BTreeSet<SocketId> {
    sender.send_to(&[1], to).unwrap();
    end.send_to(&[2], END).unwrap();
    while end.recv(&mut [0; 8]).unwrap() != 1 {}
    sockets.receivers()
}
