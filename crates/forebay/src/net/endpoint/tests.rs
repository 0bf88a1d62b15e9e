//! Families and destinations that sockets refuse, and what connecting and joining choose.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use forebay_rx::CpuId;
use forebay_rx::hash::FlowHash;
use forebay_stack::network::{Identity, Prefix};
use forebay_stack::socket::table::{FoundSocket, LookupKey};
use rustix::io::Errno;

use super::super::message::DeviceIndex;
use super::super::neighbours::DeviceNeighbours;
use super::super::rig::{Recording, device, engine_of, host, host_on, own_address};
use super::super::shared::NetDevice;
use super::super::{Net, NetConfig, TcpListener, TcpStream, UdpSocket};

/// A host with two devices that only this process has, 10.9.0.1/24 and fd00::1/64, 10.9.1.1/24 and fd01::1/64.
fn two_families() -> Net {
    let both = |(number, v6): (usize, &str)| -> NetDevice {
        let of_v4 = device(number);
        let address: IpAddr = v6.parse().unwrap();
        let addresses = [(own_address(number), 24), (address, 64)];
        let addresses = addresses.map(|(address, bits)| Prefix { address, bits }).into();
        let identity = Identity { addresses, ..Identity::clone(&of_v4.identity.load()) };
        of_v4.identity.store(Arc::new(identity));
        of_v4
    };
    let devices = ["fd00::1", "fd01::1"].into_iter().enumerate().map(both).collect();
    let sinks = [(); 2].map(|()| Box::<Recording>::default() as _);
    Net(host_on(devices, vec![sinks.into()], NetConfig::TCP, |_| DeviceNeighbours::NoLink))
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn errno<T: fmt::Debug>(result: io::Result<T>) -> Option<Errno> {
    Errno::from_io_error(&result.unwrap_err())
}

/// Socket that gets a datagram.
fn receiver(net: &Net, source: &str, destination: &str) -> FoundSocket {
    let (source, destination) = (address(source), address(destination));
    let (hash, cpu) = (FlowHash(1), CpuId(0));
    net.0.table.load().find(&LookupKey { source, destination, hash, cpu, device: 0 })
}

fn found(socket: &UdpSocket) -> FoundSocket {
    FoundSocket::One(socket.0.id)
}

#[test]
fn udp_7_v6_only_socket_has_no_ipv4() {
    let net = two_families();
    for (local, is_v6_only) in [("[::]:53", true), ("[fd00::1]:54", false)] {
        let socket = net.socket().v6_only(is_v6_only).bind(local).unwrap();
        for to in ["[::ffff:10.9.0.2]:9", "[::ffff:10.9.0.2]:0", "10.9.0.2:9"] {
            assert_eq!(errno(socket.send_to(&[7], to)), Some(Errno::NETUNREACH), "{local} {to}");
        }
        let refused = socket.connect("[::ffff:10.9.0.2]:9");
        assert_eq!(errno(refused), Some(Errno::NETUNREACH), "{local}");
        assert_eq!(socket.peer_addr(), None);
        assert_eq!(socket.send_to(&[7], "[fd00::2]:9").unwrap(), 1);
    }
    let mapped = net.socket().v6_only(true).bind("[::ffff:10.9.0.1]:55");
    assert_eq!(errno(mapped), Some(Errno::INVAL));
}

#[test]
fn udp_7_connect_follows_the_family() {
    let net = two_families();
    let socket = net.bind("[::]:53").unwrap();
    socket.connect("[fd00::2]:9").unwrap();
    assert_eq!(socket.local_addr(), address("[fd00::1]:53"));
    socket.connect("[::ffff:10.9.0.2]:9").unwrap();
    assert_eq!(socket.local_addr(), address("[::ffff:10.9.0.1]:53"));
    assert_eq!(receiver(&net, "10.9.0.2:9", "10.9.0.1:53"), found(&socket));
    assert_eq!(receiver(&net, "[fd00::2]:9", "[fd00::1]:53"), FoundSocket::None);
    assert_eq!(errno(socket.connect("[fd00::2]:9")), Some(Errno::AFNOSUPPORT));
    assert_eq!(socket.peer_addr(), Some(address("[::ffff:10.9.0.2]:9")));
    assert_eq!(socket.send(&[7]).unwrap(), 1);
    socket.disconnect();
    socket.connect("[fd00::2]:9").unwrap();
    let mapped = net.bind("[::ffff:10.9.0.1]:54").unwrap();
    assert_eq!(errno(mapped.connect("[fd00::2]:9")), Some(Errno::AFNOSUPPORT));
}

/// There is no loopback, which is said at once.
#[test]
fn udp_7_this_host_is_refused() {
    let net = two_families();
    let socket = net.bind("[::]:53").unwrap();
    for own in ["10.9.0.1", "10.9.1.1", "127.0.0.1", "0.0.0.0", "fd00::1", "fd01::1", "::1", "::"] {
        let own: IpAddr = own.parse().unwrap();
        let mapped = match own {
            IpAddr::V4(own) => own.to_ipv6_mapped().into(),
            IpAddr::V6(_) => own,
        };
        let sent = socket.send_to(&[7], (own, 54)).unwrap_err();
        assert_eq!(sent.kind(), io::ErrorKind::Unsupported, "{own}: {sent}");
        let connected = socket.connect(SocketAddr::new(mapped, 54)).unwrap_err();
        assert_eq!(connected.kind(), io::ErrorKind::Unsupported, "{own}: {connected}");
    }
    assert_eq!(socket.peer_addr(), None);
}

#[test]
fn udp_9_connect_follows_chosen_device() {
    let net = two_families();
    for (local, group, own) in
        [("0.0.0.0:53", "239.1.2.3:9", "10.9.1.1:53"), ("[::]:54", "[ff15::1]:9", "[fd01::1]:54")]
    {
        let socket = net.socket().v6_only(local.starts_with('[')).bind(local).unwrap();
        socket.set_multicast_device(Some(DeviceIndex(1)));
        socket.connect(group).unwrap();
        assert_eq!(socket.local_addr(), address(own));
        socket.disconnect();
        socket.set_multicast_device(Some(DeviceIndex(2)));
        assert_eq!(errno(socket.connect(group)), Some(Errno::NODEV));
    }
}

#[test]
fn udp_9_group_options_are_a_familys() {
    let net = two_families();
    let socket = net.bind("[::]:53").unwrap();
    let chosen = |group| {
        socket.connect(group).unwrap();
        let local = socket.local_addr();
        socket.disconnect();
        local
    };
    let (v4, v6) = ("[::ffff:239.1.2.3]:9", "[ff15::1]:9");
    socket.set_multicast_device_v4(Some(DeviceIndex(1)));
    assert_eq!(chosen(v6), address("[fd00::1]:53"));
    assert_eq!(chosen(v4), address("[::ffff:10.9.1.1]:53"));
    socket.set_multicast_device_v6(Some(DeviceIndex(1)));
    socket.set_multicast_device_v4(None);
    assert_eq!(chosen(v6), address("[fd01::1]:53"));
    assert_eq!(chosen(v4), address("[::ffff:10.9.0.1]:53"));
}

/// An address of the host may be chosen, on whichever device; a bound socket has its own.
#[test]
fn udp_9_group_source_is_chosen() {
    let net = two_families();
    let (any, bound) = (net.bind("0.0.0.0:53").unwrap(), net.bind("10.9.0.1:54").unwrap());
    for (source, own) in [("10.9.1.1", "10.9.1.1:53"), ("10.77.0.1", "10.9.0.1:53")] {
        for (socket, own) in [(&any, own), (&bound, "10.9.0.1:54")] {
            socket.set_multicast_source_v4(Some(source.parse().unwrap()));
            socket.connect("239.1.2.3:9").unwrap();
            assert_eq!(socket.local_addr(), address(own), "{source}");
            socket.disconnect();
        }
    }
    any.set_multicast_source_v4(Some("10.9.1.1".parse().unwrap()));
    any.connect("10.9.0.2:9").unwrap();
    assert_eq!(any.local_addr(), address("10.9.0.1:53"), "no group");
}

/// Of sockets at one address the last one bound receives, whatever groups the others join and leave later.
#[test]
fn udp_9_join_keeps_unicast_receiver() {
    let net = two_families();
    let bind = || net.socket().reuse_address().bind("10.9.0.1:53").unwrap();
    let (first, last) = (bind(), bind());
    let group: IpAddr = "239.1.2.3".parse().unwrap();
    let unicast = || receiver(&net, "10.9.0.2:9", "10.9.0.1:53");
    first.join_multicast(group).unwrap();
    assert_eq!(unicast(), found(&last));
    first.leave_multicast(group).unwrap();
    assert_eq!(unicast(), found(&last));
    drop(last);
    assert_eq!(unicast(), found(&first));
}

/// An engine that is dropped before it runs has ended, too.
#[test]
fn udp_11_dropped_engine_ends_calls() {
    let state = host(vec![vec![Box::<Recording>::default() as _]], NetConfig::TCP);
    let net = Net(Arc::clone(&state));
    let local = SocketAddr::new(own_address(0), 53);
    let (socket, listener) = (net.bind(local).unwrap(), TcpListener::bind(&net, local).unwrap());
    // Without the end, the calls would wait for ever.
    let timeout = Some(Duration::from_millis(1));
    socket.set_read_timeout(timeout).unwrap();
    listener.set_accept_timeout(timeout).unwrap();
    drop(engine_of(&state));
    assert_eq!(socket.recv(&mut [0]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    let begun = TcpStream::begin_connect(&net, "10.9.0.2:80".parse().unwrap());
    assert_eq!(begun.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}
