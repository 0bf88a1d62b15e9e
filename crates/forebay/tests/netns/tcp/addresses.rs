//! Addresses to listen on and to connect to: several of them, this host's own, link-local ones.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener as KernelListener, TcpStream as KernelStream};
use std::thread;

use forebay::net::{Net, NetConfig, TcpListener, TcpStream};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::Config;
use forebay_testkit::namespaces::await_local_route;
use forebay_testkit::namespaces::cable::Cable;

use crate::sockets::rig::{OURS, OURS_V6, Running, over_tap};
use crate::sockets::shared::Hosts;
use crate::tcp::Trial;
use crate::tcp::streams::{echo, exchange};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_17_each_address_is_tried", each_address),
    ("tcp_17_own_address_is_refused", own_address),
    ("tcp_17_exhausted_ports_say_so", exhausted),
    ("tcp_17_scope_chooses_the_link", scopes),
];

/// Of several addresses the first that can be had is taken, as by `std`.
fn each_address() {
    let (net, engine) = over_tap(&NetConfig::default());
    let [taken, free] = [7, 8].map(|port| SocketAddr::new(OURS.parse().unwrap(), port));
    let not_ours = SocketAddr::from(([203, 0, 113, 1], 7));
    let listener = TcpListener::bind(&net, taken).unwrap();
    let other = TcpListener::bind(&net, &[not_ours, taken, free][..]).unwrap();
    assert_eq!(other.local_addr(), free);
    let error = TcpListener::bind(&net, &[not_ours, taken][..]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    let udp = net.bind(&[not_ours, free][..]).unwrap();
    assert_eq!(udp.local_addr(), free);
    let running = Running::begin(engine);
    let kernels = KernelListener::bind("10.9.0.1:0").unwrap();
    let to = [SocketAddr::from(([10, 9, 0, 1], 9)), kernels.local_addr().unwrap()];
    let stream = TcpStream::connect(&net, &to[..]).unwrap();
    assert_eq!(stream.peer_addr(), to[1]);
    drop((net, listener, other, udp, stream));
    running.end();
}

/// There is no loopback, which is said at once.
fn own_address() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, "[::]:7").unwrap();
    let running = Running::begin(engine);
    for own in [OURS, OURS_V6, "127.0.0.1", "0.0.0.0"] {
        let error = TcpStream::connect(&net, (own, 7)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{own}: {error}");
    }
    let error = TcpStream::connect(&net, "224.0.0.1:7").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NetworkUnreachable);
    drop((net, listener));
    running.end();
}

/// The kernel has a port for each connection, whoever the peer is.
fn exhausted() {
    const PORTS: usize = 4;
    let hosts = Hosts::new();
    let range = "/proc/sys/net/ipv4/ip_local_port_range";
    hosts.near.run(|| std::fs::write(range, "40000 40003").unwrap());
    let (net, engine) = hosts.taking(Via::AfPacket, "tcp:40000-40003");
    let mut streams = Vec::new();
    hosts.near.run(|| {
        let mut begin = |last: usize| {
            let to = SocketAddr::from(([10, 9, 0, u8::try_from(last + 2).unwrap()], 80));
            TcpStream::begin_connect(&net, to).map(|stream| streams.push(stream))
        };
        (0..PORTS).for_each(|last| begin(last).unwrap());
        let error = begin(PORTS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrNotAvailable, "{error}");
        assert_eq!(error.raw_os_error(), Some(nix::libc::EADDRNOTAVAIL));
    });
    drop((streams, net, engine));
}

/// Two links, at both of which the peer has the same link-local address.
fn scopes() {
    let hosts = Hosts::new();
    Cable { near: (&hosts.near, "skc"), far: (&hosts.far, "skd") }.lay();
    for (near, far, own) in [("ska", "skb", "fe80::1"), ("skc", "skd", "fe80::3")] {
        for (host, device, address) in [(&hosts.near, near, own), (&hosts.far, far, "fe80::2")] {
            host.command(&format!("ip link set {device} addrgenmode none"));
            let knob = format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6");
            host.run(|| std::fs::write(&knob, "0").unwrap());
            host.command(&format!("ip addr add {address}/64 dev {device} nodad"));
        }
        hosts.near.run(|| await_local_route(format!("{own} dev {near}")));
        hosts.far.run(|| await_local_route(format!("fe80::2 dev {far}")));
    }
    let index = |host: &forebay_testkit::namespaces::cable::Namespace, device: &str| {
        host.run(|| nix::net::if_::if_nametoindex(device).unwrap())
    };
    let [ska, skc] = ["ska", "skc"].map(|device| index(&hosts.near, device));
    let [skb, skd] = ["skb", "skd"].map(|device| index(&hosts.far, device));
    let (net, engine) = hosts.near.run(|| {
        let mut devices = ["ska", "skc"].map(|name| {
            let mut config = DeviceConfig::new(name, Via::AfPacket);
            config.take = "tcp:80,tcp:32768-60999".parse().unwrap();
            Device::open(&config).unwrap()
        });
        Net::over(&Config::live(), &NetConfig::default(), &mut devices).unwrap()
    });
    let listener = hosts.near.run(|| TcpListener::bind(&net, "[::]:80").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    for (scope, scope_there) in [(ska, skb), (skc, skd)] {
        let there = format!("[fe80::2%{scope_there}]:80");
        let far = hosts.far.run(|| KernelListener::bind(there).unwrap());
        let to: SocketAddr = format!("[fe80::2%{scope}]:80").parse().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| exchange(&far.accept().unwrap().0, 10_000));
            let stream = hosts.near.run(|| TcpStream::connect(&net, to).unwrap());
            assert_eq!(stream.peer_addr(), to);
            echo(&stream);
        });
        let own = if scope == ska { "fe80::1" } else { "fe80::3" };
        let to: SocketAddr = format!("[{own}%{scope_there}]:80").parse().unwrap();
        thread::scope(|in_scope| {
            in_scope.spawn(|| {
                let (stream, peer) = listener.accept().unwrap();
                let SocketAddr::V6(peer) = peer else { panic!("{peer}") };
                assert_eq!(peer.scope_id(), scope);
                echo(&stream);
            });
            exchange(&hosts.far.run(|| KernelStream::connect(to).unwrap()), 10_000);
        });
    }
    let nowhere: SocketAddr = "[fe80::2%9999]:80".parse().unwrap();
    let error = hosts.near.run(|| TcpStream::connect(&net, nowhere).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::NetworkUnreachable, "{error}");
    drop((net, listener));
    assert_eq!(running.end().frames_away, 0);
}
