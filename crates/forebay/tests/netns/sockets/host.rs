//! Addresses of this host on other interfaces, and its answers to the kernel.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream as KernelStream, UdpSocket as KernelSocket};
use std::thread;
use std::time::Duration;

use etherparse::{IcmpEchoHeader, Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type};
use forebay::net::{Datagrams, Net, NetConfig, TcpListener, TcpStream};
use forebay_device::Via;
use forebay_testkit::namespaces::await_local_route;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, OURS_V6, Running, client, over_tap};
use crate::sockets::shared::Hosts;
use crate::tcp::streams::{echo, exchange};

pub(crate) const TRIALS: &[Trial] = &[
    ("promise_13_address_elsewhere_served_over_af_packet", || elsewhere(Via::AfPacket)),
    ("promise_13_address_elsewhere_served_over_af_xdp", || elsewhere(Via::AfXdp)),
    ("promise_13_long_echo_requests_are_answered", long_echoes),
];

/// Addresses on the loop-back interface of the near host, as of a service.
const SERVICE: &str = "192.0.2.53";
const SERVICE_V6: &str = "fd53::53";

fn hosts() -> Hosts {
    let hosts = Hosts::new();
    hosts.near.command("ip link set lo up");
    for (host, device) in [(&hosts.near, "lo"), (&hosts.near, "ska"), (&hosts.far, "skb")] {
        host.command(&format!("ip link set {device} addrgenmode none"));
        let knob = format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6");
        host.run(|| std::fs::write(&knob, "0").unwrap());
    }
    for address in ["192.0.2.53/32 dev lo", "fd53::53/128 dev lo nodad", "fd09::1/64 dev ska nodad"]
    {
        hosts.near.command(&format!("ip addr add {address}"));
    }
    hosts.near.run(|| await_local_route("fd09::1"));
    hosts.far.command("ip addr add fd09::2/64 dev skb nodad");
    hosts.far.run(|| await_local_route("fd09::2"));
    hosts.far.command(&format!("ip route add {SERVICE} via 10.9.0.1"));
    hosts.far.command(&format!("ip route add {SERVICE_V6} via fd09::1"));
    hosts
}

/// The kernel, too, delivers packets to an address of the host by whichever interface they come.
fn elsewhere(via: Via) {
    let hosts = hosts();
    let (net, engine) = hosts.taking(via, "udp:53,tcp:80");
    for loopback in ["127.0.0.1:53", "[::1]:53"] {
        let refused = hosts.near.run(|| net.bind(loopback).unwrap_err());
        assert_eq!(refused.kind(), ErrorKind::AddrNotAvailable);
    }
    let running = hosts.near.run(|| Running::begin(engine));
    for (service, any) in [(SERVICE, "0.0.0.0"), (SERVICE_V6, "::")] {
        let service: IpAddr = service.parse().unwrap();
        for bound in [any.parse().unwrap(), service] {
            answered(&hosts, &net, service, bound);
            accepted(&hosts, &net, service, bound);
        }
        let itself = hosts.near.run(|| TcpStream::connect(&net, (service, 80)).unwrap_err());
        assert_eq!(itself.kind(), ErrorKind::Unsupported, "{itself}");
    }
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}

/// Datagrams to the service's address are answered from it; others are sent from the device's.
fn answered(hosts: &Hosts, net: &Net, service: IpAddr, bound: IpAddr) {
    let socket = hosts.near.run(|| net.bind((bound, 53)).unwrap());
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let far = hosts.far.run(|| client((service, 53).into()));
    let (mut batch, mut buffer) = (Datagrams::new(), [0; 100]);
    for number in 0..20u8 {
        far.send(&[number]).unwrap();
        assert_eq!(socket.recv_batch(&mut batch, 9).unwrap(), 1);
        for datagram in &mut batch {
            assert_eq!(datagram.payload(), [number]);
            datagram.reply(&[number, 1]).unwrap();
        }
        hosts.near.run(|| socket.send_replies(&mut batch).unwrap());
        assert_eq!((far.recv(&mut buffer).unwrap(), buffer[0]), (2, number));
    }
    let any: IpAddr = if service.is_ipv4() { "0.0.0.0" } else { "::" }.parse().unwrap();
    let far = hosts.far.run(|| KernelSocket::bind((any, 0)).unwrap());
    far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let (theirs, ours) =
        if service.is_ipv4() { ("10.9.0.2", "10.9.0.1") } else { ("fd09::2", "fd09::1") };
    let to = SocketAddr::new(theirs.parse().unwrap(), far.local_addr().unwrap().port());
    hosts.near.run(|| socket.send_to(b"unasked", to).unwrap());
    let (_, from) = far.recv_from(&mut buffer).unwrap();
    let expected = if bound == service { service } else { ours.parse().unwrap() };
    assert_eq!(from, SocketAddr::new(expected, 53));
}

fn accepted(hosts: &Hosts, net: &Net, service: IpAddr, bound: IpAddr) {
    let listener = hosts.near.run(|| TcpListener::bind(net, (bound, 80)).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| hosts.near.run(|| echo(&listener.accept().unwrap().0)));
        let stream = hosts.far.run(|| KernelStream::connect((service, 80)).unwrap());
        exchange(&stream, 100_000);
    });
}

/// The kernel sends requests in fragments, and reassembles the answers.
fn long_echoes() {
    let (net, engine) = over_tap(&NetConfig::default());
    let running = Running::begin(engine);
    for (to, len) in
        [1472, 1473, 5000, 30_001].into_iter().flat_map(|len| [(OURS, len), (OURS_V6, len)])
    {
        let to: IpAddr = to.parse().unwrap();
        let payload: Vec<_> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let echo = IcmpEchoHeader { id: 7, seq: 9 };
        let (family, protocol, request, reply) = match to {
            IpAddr::V4(_) => {
                let header = Icmpv4Header::with_checksum(Icmpv4Type::EchoRequest(echo), &payload);
                (AddressFamily::Inet, SockProtocol::Icmp, header.to_bytes().to_vec(), 0)
            }
            IpAddr::V6(_) => {
                // The kernel writes the checksum.
                let header = Icmpv6Header::new(Icmpv6Type::EchoRequest(echo));
                (AddressFamily::Inet6, SockProtocol::IcmpV6, header.to_bytes().to_vec(), 129)
            }
        };
        let raw = socket(family, SockType::Raw, SockFlag::empty(), protocol).unwrap();
        let raw = KernelSocket::from(raw);
        raw.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        raw.connect((to, 0)).unwrap();
        raw.send(&[request.as_slice(), &payload].concat()).unwrap();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let len = raw.recv(&mut buffer).unwrap();
            let header_bytes = if to.is_ipv4() { 20 } else { 0 };
            let message = &buffer[header_bytes..len];
            if message[0] == reply {
                assert!(message[8..] == payload, "{to}: {} bytes", message.len());
                break;
            }
        }
    }
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}
