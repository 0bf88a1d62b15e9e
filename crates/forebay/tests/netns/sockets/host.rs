//! Addresses of this host on other interfaces.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream as KernelStream, UdpSocket as KernelSocket};
use std::thread;
use std::time::Duration;

use forebay::net::{Datagrams, Net, TcpListener, TcpStream};
use forebay_device::Via;
use forebay_testkit::namespaces::await_local_route;

use crate::sockets::Trial;
use crate::sockets::rig::{Running, client};
use crate::sockets::shared::Hosts;
use crate::tcp::streams::{echo, exchange};

pub(crate) const TRIALS: &[Trial] = &[
    ("promise_13_address_elsewhere_served_over_af_packet", || elsewhere(Via::AfPacket)),
    ("promise_13_address_elsewhere_served_over_af_xdp", || elsewhere(Via::AfXdp)),
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
