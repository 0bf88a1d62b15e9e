//! Multicast groups, with the kernel's sockets as members at the far end.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket as KernelSocket};

use forebay::net::{Net, UdpSocket};
use forebay_device::Via;
use rustix::io::Errno;
use rustix::net::sockopt::{set_ip_multicast_ttl, set_ipv6_multicast_hops};

use crate::sockets::Trial;
use crate::sockets::messages::{Seen, TIMEOUT, TwoCables, kernel_recv};
use crate::sockets::rig::Running;

pub(crate) const TRIALS: &[Trial] = &[
    ("udp_9_groups_are_joined_by_device", joined),
    ("udp_9_group_ttl_and_device_chosen", options),
    ("udp_9_loop_reaches_kernel_programs", looped),
    ("udp_9_membership_errors_are_named", refused),
    ("udp_16_ttl_zero_is_as_in_kernel", ttl_zero),
    ("udp_17_looped_above_mtu_is_refused", looped_above_mtu),
];

const PORT: u16 = 4433;
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);
const GROUPS: [(&str, &str); 2] = [("0.0.0.0", "239.1.2.3"), ("::", "ff15::123")];

/// A socket of the kernel's at the far end, whose datagrams to groups leave by this device.
fn sender(hosts: &TwoCables, device: &str, group: IpAddr) -> KernelSocket {
    let index = hosts.far.run(|| index_of(device));
    hosts.far.run(|| {
        let any = if group.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = KernelSocket::bind(any).unwrap();
        match group {
            IpAddr::V4(_) => {
                let own = if device == "twb" { [10, 0, 0, 2] } else { [10, 1, 0, 2] };
                rustix::net::sockopt::set_ip_multicast_if(&socket, &Ipv4Addr::from(own)).unwrap();
                set_ip_multicast_ttl(&socket, 9).unwrap();
            }
            IpAddr::V6(_) => {
                rustix::net::sockopt::set_ipv6_multicast_if(&socket, index).unwrap();
                set_ipv6_multicast_hops(&socket, 9).unwrap();
            }
        }
        socket
    })
}

fn index_of(device: &str) -> u32 {
    forebay_sys::interface::Interface::named(device).unwrap().index.0
}

/// Reads what was sent before `last`, in order.
fn read_until(socket: &UdpSocket, last: u8) -> Vec<u8> {
    let mut read = Vec::new();
    while read.last() != Some(&last) {
        let mut buffer = [0; 10];
        let received = socket.recv_msg(&mut buffer).unwrap();
        assert_eq!((received.len, received.ttl), (1, if buffer[0] == last { 64 } else { 9 }));
        read.push(buffer[0]);
    }
    read
}

/// A group is heard on the device that it was joined on, until it is left; and the kernel knows.
fn joined() {
    for via in [Via::AfPacket, Via::AfXdp] {
        let hosts = TwoCables::new();
        let (net, engine) = hosts.over(via);
        let devices = ["twa", "twc"].map(|name| net.device_named(name).unwrap());
        // A group and an own address are two flows: on one CPU, which no reader draws them away from, they
        // are in order.
        engine.control().set("rps_cpus", "0").unwrap();
        let running = hosts.near.run(|| Running::begin(engine));
        for (any, group) in GROUPS {
            let group: IpAddr = group.parse().unwrap();
            let socket = hosts.near.run(|| net.socket().v6_only(true).bind((any, PORT)).unwrap());
            socket.set_read_timeout(Some(TIMEOUT)).unwrap();
            socket.set_followed(false);
            let (a, c) = (sender(&hosts, "twb", group), sender(&hosts, "twd", group));
            let to = SocketAddr::new(group, PORT);
            let own =
                if group.is_ipv4() { ["10.0.0.1", "10.1.0.1"] } else { ["fd00::1", "fd01::1"] };
            let both = |number: u8| {
                // Each device is in order: its last one tells that the others are through.
                let read_all = |sender: &KernelSocket, at: usize, number: u8, last: u8| {
                    sender.send_to(&[number], to).unwrap();
                    let own = SocketAddr::new(own[at].parse().unwrap(), PORT);
                    sender.send_to(&[last], own).unwrap();
                    read_until(&socket, last)
                };
                let first = read_all(&a, 0, number, 200);
                let second = read_all(&c, 1, number + 1, 201);
                [first.len() > 1, second.len() > 1]
            };
            assert_eq!(both(0), [false, false], "nobody has joined");
            socket.join_multicast_on(group, devices[0]).unwrap();
            assert_eq!(both(2), [true, false], "joined on the first");
            let known = hosts.near.run(|| shown_by_ip("twa"));
            assert!(known.contains(&group.to_string()), "{known}");
            socket.join_multicast_on(group, devices[1]).unwrap();
            assert_eq!(both(4), [true, true]);
            socket.leave_multicast_on(group, devices[0]).unwrap();
            assert_eq!(both(6), [false, true]);
            let known = hosts.near.run(|| shown_by_ip("twa"));
            assert!(!known.contains(&group.to_string()), "{known}");
            socket.leave_multicast(group).unwrap();
            assert_eq!(both(8), [false, false]);
            socket.join_multicast(group).unwrap();
            assert_eq!(both(10), [true, true], "joined on all");
            // Another member keeps the group when this one closes.
            drop(socket);
        }
        let mut outcome = running.end();
        assert_eq!(net.frames_away(&mut outcome), 0);
    }
}

fn shown_by_ip(device: &str) -> String {
    let shown = std::process::Command::new("ip").args(["maddr", "show", "dev", device]).output();
    String::from_utf8(shown.unwrap().stdout).unwrap()
}

/// Datagrams to a group leave by the chosen device, with the TTL of groups.
fn options() {
    let hosts = TwoCables::new();
    let (net, engine) = hosts.over(Via::AfXdp);
    let running = hosts.near.run(|| Running::begin(engine));
    for (any, group) in GROUPS {
        let group: IpAddr = group.parse().unwrap();
        let socket = hosts.near.run(|| net.socket().v6_only(true).bind((any, PORT)).unwrap());
        let far = hosts.far_socket(any);
        hosts.far.run(|| {
            for (name, own) in [("twb", [10, 0, 0, 2]), ("twd", [10, 1, 0, 2])] {
                match group {
                    IpAddr::V4(group) => far.join_multicast_v4(&group, &own.into()).unwrap(),
                    IpAddr::V6(group) => far.join_multicast_v6(&group, index_of(name)).unwrap(),
                }
            }
        });
        for (name, far_name, own) in [("twa", "twb", 0), ("twc", "twd", 1)] {
            socket.set_multicast_device(net.device_named(name));
            let network = if group.is_ipv4() { format!("10.{own}.") } else { format!("fd0{own}:") };
            for ttl in [1, 33] {
                socket.set_multicast_ttl(ttl).unwrap();
                socket.send_to(b"group", (group, PORT)).unwrap();
                let seen = kernel_recv(&far, &mut [0; 10]);
                let device = hosts.far.run(|| index_of(far_name));
                assert!(seen.source.ip().to_string().starts_with(&network), "{seen:?}");
                let expected = Seen { len: 5, source: seen.source, traffic_class: 0, ttl, device };
                assert_eq!(seen, expected);
            }
        }
    }
    running.end();
}

/// Members of `GROUP` of the kernel's on both hosts, and a socket that sends to it by `twa`.
struct Members {
    hosts: TwoCables,
    net: Net,
    running: Running,
    near: KernelSocket,
    far: KernelSocket,
    socket: UdpSocket,
}

impl Members {
    fn new() -> Self {
        let hosts = TwoCables::new();
        let (net, engine) = hosts.over(Via::AfXdp);
        let running = hosts.near.run(|| Running::begin(engine));
        let [near, far] = [(&hosts.near, 1), (&hosts.far, 2)].map(|(host, last)| {
            let socket = host.run(|| KernelSocket::bind((GROUP, PORT + 1)).unwrap());
            host.run(|| socket.join_multicast_v4(&GROUP, &[10, 0, 0, last].into()).unwrap());
            socket.set_read_timeout(Some(TIMEOUT)).unwrap();
            socket
        });
        let socket = hosts.near.run(|| net.bind(("0.0.0.0", PORT)).unwrap());
        socket.set_multicast_device(net.device_named("twa"));
        Self { hosts, net, running, near, far, socket }
    }

    fn send(&self, payload: &[u8]) -> std::io::Result<usize> {
        self.hosts.near.run(|| self.socket.send_to(payload, (GROUP, PORT + 1)))
    }

    fn end(self) {
        drop(self.socket);
        self.running.end();
    }
}

/// With the loop on, the kernel's member on this host receives the datagram, and so does the one at
/// the far end.
fn looped() {
    let members = Members::new();
    assert_eq!(members.send(b"out").unwrap(), 3);
    members.socket.set_multicast_loop(true);
    assert_eq!(members.send(b"both").unwrap(), 4);
    let mut buffer = [0; 10];
    let from = SocketAddr::from(([10, 0, 0, 1], PORT));
    let received = members.near.recv_from(&mut buffer).unwrap();
    assert_eq!(received, (4, from), "without the loop, nothing arrives here");
    // Looped datagrams leave through the kernel, and may overtake the others.
    let mut received = [(); 2].map(|()| members.far.recv_from(&mut buffer).unwrap());
    received.sort_unstable();
    assert_eq!(received, [(3, from), (4, from)]);
    members.end();
}

/// A TTL of 0 is refused where the kernel refuses it. With it, datagrams to groups stay on the host.
fn ttl_zero() {
    let members = Members::new();
    let Members { hosts, net, socket, near, far, .. } = &members;
    for any in ["0.0.0.0", "::"] {
        let ours = hosts.near.run(|| net.socket().v6_only(true).bind((any, PORT + 3)).unwrap());
        let kernels = hosts.near.run(|| KernelSocket::bind((any, PORT + 2)).unwrap());
        let expected = match any {
            "::" => rustix::net::sockopt::set_ipv6_unicast_hops(&kernels, Some(0)),
            _ => rustix::net::sockopt::set_ip_ttl(&kernels, 0),
        };
        let found = ours.set_ttl(0).map_err(|error| Errno::from_io_error(&error).unwrap());
        assert_eq!(found, expected, "{any}");
        kernels.set_multicast_ttl_v4(0).unwrap();
        ours.set_multicast_ttl(0).unwrap();
    }
    socket.set_multicast_ttl(0).unwrap();
    assert_eq!(members.send(b"nowhere").unwrap(), 7);
    socket.set_multicast_loop(true);
    assert_eq!(members.send(b"here").unwrap(), 4);
    socket.set_multicast_ttl(1).unwrap();
    assert_eq!(members.send(b"everywhere").unwrap(), 10);
    let received = |socket: &KernelSocket| socket.recv(&mut [0; 20]).unwrap();
    assert_eq!((received(near), received(near), received(far)), (4, 10, 10));
    members.end();
}

/// With the loop on, datagrams above the MTU are refused, unless they may leave in fragments.
fn looped_above_mtu() {
    let members = Members::new();
    members.socket.set_multicast_loop(true);
    let send = |len| members.send(&vec![7; len]);
    let errno = send(1473).map_err(|error| Errno::from_io_error(&error));
    assert_eq!(errno, Err(Some(Errno::MSGSIZE)));
    assert_eq!(send(1472).unwrap(), 1472);
    members.socket.set_fragment(true);
    assert_eq!(send(1473).unwrap(), 1473);
    for member in [&members.near, &members.far] {
        for len in [1472, 1473] {
            assert_eq!(member.recv(&mut [0; 2000]).unwrap(), len);
        }
    }
    members.end();
}

fn refused() {
    let hosts = TwoCables::new();
    let (net, engine) = hosts.over(Via::AfPacket);
    let socket = hosts.near.run(|| net.bind(("0.0.0.0", PORT)).unwrap());
    let device = net.device_named("twc").unwrap();
    let errno = |result: std::io::Result<()>| Errno::from_io_error(&result.unwrap_err()).unwrap();
    let group = |last| IpAddr::from([239, 1, 2, last]);
    assert_eq!(errno(socket.join_multicast("10.0.0.1".parse().unwrap())), Errno::INVAL);
    assert_eq!(errno(socket.join_multicast("ff15::1".parse().unwrap())), Errno::INVAL);
    assert_eq!(errno(socket.leave_multicast(group(1))), Errno::ADDRNOTAVAIL);
    let nowhere = forebay::net::message::DeviceIndex(7);
    assert_eq!(errno(socket.join_multicast_on(group(1), nowhere)), Errno::NODEV);
    for last in 1..=20 {
        socket.join_multicast_on(group(last), device).unwrap();
    }
    assert_eq!(errno(socket.join_multicast_on(group(20), device)), Errno::ADDRINUSE);
    assert_eq!(errno(socket.join_multicast_on(group(21), device)), Errno::NOBUFS);
    socket.leave_multicast(group(20)).unwrap();
    socket.join_multicast_on(group(21), device).unwrap();
    socket.set_nonblocking(true);
    assert_eq!(socket.recv(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    drop((socket, engine));
}
