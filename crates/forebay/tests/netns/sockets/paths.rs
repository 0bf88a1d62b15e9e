//! Paths with links that are smaller than the device's, of which routers tell.

use std::net::{IpAddr, SocketAddr, TcpListener as KernelListener, UdpSocket as KernelSocket};
use std::thread::{self, sleep};
use std::time::Duration;

use etherparse::{Icmpv4Header, Icmpv4Type, PacketBuilder, icmpv4::DestUnreachableHeader};
use forebay::net::{NetConfig, TcpStream, UdpSocket};
use forebay_device::Via;
use forebay_testkit::namespaces::await_local_route;
use forebay_testkit::namespaces::cable::{Cable, Namespace};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockProtocol, SockType};

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, Running, over_tap};
use crate::sockets::shared::Hosts;
use crate::tcp::streams::{echo, exchange};

pub(crate) const TRIALS: &[Trial] = &[
    ("udp_30_path_is_learned_beside_the_kernel", || learned(Via::AfPacket, "udp:53")),
    ("udp_30_path_is_learned_from_the_kernel", || learned(Via::AfXdp, "udp:53")),
    ("udp_30_path_is_learned_without_the_kernel", || learned(Via::AfXdp, "all")),
    ("udp_30_mtu_of_route_is_kept", of_route),
    ("udp_30_strangers_narrow_no_path", strangers),
    ("udp_27_unconnected_socket_asks_its_route", source_of_each_route),
    ("tcp_54_route_bounds_new_connections", connections_by_route),
];

/// Sends, one each 10 ms, until one is refused, at most.
const SENDS_MAX: u32 = 6000;

/// Smallest link of the path, in bytes.
const NARROW: usize = 1300;

/// Hosts whose far one is a router to a third, by a narrow link.
struct Path {
    hosts: Hosts,
    beyond: Namespace,
}

impl Path {
    fn new() -> Self {
        let (hosts, beyond) = (Hosts::new(), Namespace::new());
        Cable { near: (&hosts.far, "skc"), far: (&beyond, "skd") }.lay();
        for (host, device, own) in [
            (&hosts.near, "ska", &["fd09::1", "fe80::1"][..]),
            (&hosts.far, "skb", &["fd09::2", "fe80::2"]),
            (&hosts.far, "skc", &["fd07::1", "fe80::1"]),
            (&beyond, "skd", &["fd07::2", "fe80::2"]),
        ] {
            host.command(&format!("ip link set {device} addrgenmode none"));
            let knob = format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6");
            host.run(|| std::fs::write(&knob, "0").unwrap());
            for address in own {
                host.command(&format!("ip addr add {address}/64 dev {device} nodad"));
                host.run(|| await_local_route(format!("{address} dev {device}")));
            }
        }
        hosts.far.command("ip addr add 10.7.0.1/24 dev skc");
        beyond.command("ip addr add 10.7.0.2/24 dev skd");
        for knob in ["ipv4.ip_forward", "ipv6.conf.all.forwarding"] {
            hosts.far.command(&format!("sysctl -qw net.{knob}=1"));
        }
        hosts.far.command(&format!("ip link set skc mtu {NARROW}"));
        hosts.near.command("ip route add 10.7.0.0/24 via 10.9.0.2");
        hosts.near.command("ip route add fd07::/64 via fd09::2");
        beyond.command("ip route add default via 10.7.0.1");
        beyond.command("ip -6 route add default via fd07::1");
        Self { hosts, beyond }
    }
}

fn header_bytes(to: SocketAddr) -> usize {
    if to.is_ipv4() { 28 } else { 48 }
}

fn is_too_long(sent: &std::io::Result<usize>) -> bool {
    sent.as_ref().is_err_and(|error| error.raw_os_error() == Some(nix::libc::EMSGSIZE))
}

/// Sends what is too long for the path until it is refused.
fn await_refusal(socket: &UdpSocket, to: SocketAddr) {
    let refused = (0..SENDS_MAX).any(|_| {
        let sent = socket.send_to(&[7; 1400], to);
        assert!(sent.is_ok() || is_too_long(&sent), "{sent:?}");
        sleep(Duration::from_millis(10));
        is_too_long(&sent)
    });
    assert!(refused, "{to}: no router was heard");
}

/// The next datagrams are refused, or cut so that they arrive; those elsewhere are not.
fn learned(via: Via, take: &str) {
    let Path { hosts, beyond } = Path::new();
    let (net, engine) = hosts.taking(via, take);
    let socket = hosts.near.run(|| net.bind("[::]:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    for (to, at_router) in [("10.7.0.2", "10.9.0.2"), ("fd07::2", "fd09::2")] {
        let far = beyond.run(|| KernelSocket::bind((to, 0)).unwrap());
        far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let to = far.local_addr().unwrap();
        hosts.near.run(|| await_refusal(&socket, to));
        let mut buffer = vec![0; 2000];
        let largest = NARROW - header_bytes(to);
        hosts.near.run(|| {
            assert!(is_too_long(&socket.send_to(&vec![7; largest + 1], to)));
            assert_eq!(socket.send_to(&vec![7; largest], to).unwrap(), largest);
        });
        assert_eq!(far.recv(&mut buffer).unwrap(), largest);
        socket.set_fragment(true);
        hosts.near.run(|| socket.send_to(&[9; 1400], to).unwrap());
        assert_eq!((far.recv(&mut buffer).unwrap(), buffer[1399]), (1400, 9));
        socket.set_fragment(false);
        let other = SocketAddr::new(at_router.parse().unwrap(), 9);
        let whole = 1500 - header_bytes(other);
        hosts.near.run(|| assert_eq!(socket.send_to(&vec![7; whole], other).unwrap(), whole));
        socket.set_path_ignored_v4(to.is_ipv6());
        socket.set_path_ignored_v6(to.is_ipv4());
        hosts
            .near
            .run(|| assert!(is_too_long(&socket.send_to(&[7; 1400], to)), "the other family's"));
        socket.set_path_ignored(true);
        hosts.near.run(|| assert_eq!(socket.send_to(&[7; 1400], to).unwrap(), 1400));
        socket.set_path_ignored(false);
    }
    drop(socket);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// The kernel's route has an MTU of its own.
fn of_route() {
    let hosts = Hosts::new();
    hosts.near.command("ip route add 192.0.2.0/24 via 10.9.0.2 mtu 1200");
    hosts.near.command("ip neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev ska nud permanent");
    let (net, engine) = hosts.taking(Via::AfXdp, "udp:53");
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    hosts.near.run(|| {
        let to = SocketAddr::from(([192, 0, 2, 1], 9));
        assert_eq!(socket.send_to(&[7; 1172], to).unwrap(), 1172);
        assert!(is_too_long(&socket.send_to(&[7; 1173], to)));
        assert_eq!(socket.send_to(&[7; 1472], "10.9.0.2:9").unwrap(), 1472);
    });
    drop((net, socket));
    running.end();
}

/// Errors are believed about datagrams that a socket may have sent, and that were too large.
fn strangers() {
    let (net, engine) = over_tap(&NetConfig::default());
    let socket = net.bind("0.0.0.0:53").unwrap();
    let running = Running::begin(engine);
    let (kind, flags) = (SockType::Raw, SockFlag::empty());
    let raw = socket::socket(AddressFamily::Inet, kind, flags, SockProtocol::Icmp).unwrap();
    let raw = KernelSocket::from(raw);
    let tell = |from: u16, to: [u8; 4], len: usize, next_hop_mtu: u16| {
        let ours: std::net::Ipv4Addr = OURS.parse().unwrap();
        let mut quoted = Vec::new();
        let builder = PacketBuilder::ipv4(ours.octets(), to, 60).udp(from, 9);
        builder.write(&mut quoted, &vec![7; len]).unwrap();
        let kind = DestUnreachableHeader::FragmentationNeeded { next_hop_mtu };
        let header = Icmpv4Header::with_checksum(Icmpv4Type::DestinationUnreachable(kind), &quoted);
        raw.send_to(&[&header.to_bytes()[..], &quoted].concat(), (OURS, 0)).unwrap();
    };
    tell(54, [10, 9, 0, 1], 1400, 1000); // nobody's port
    tell(53, [10, 9, 0, 1], 900, 1000); // it would fit
    tell(53, [10, 9, 0, 3], 1400, 1000); // elsewhere
    tell(53, [10, 9, 0, 4], 1400, 1000);
    await_refusal(&socket, "10.9.0.4:9".parse().unwrap());
    let to: IpAddr = "10.9.0.1".parse().unwrap();
    assert_eq!(socket.send_to(&[7; 1472], (to, 9)).unwrap(), 1472);
    tell(53, [10, 9, 0, 1], 1400, 1000);
    await_refusal(&socket, (to, 9).into());
    drop((net, socket));
    running.end();
}

/// A socket that is bound to no address has that of each destination's route.
fn source_of_each_route() {
    let hosts = Hosts::new();
    hosts.near.command("ip addr add 10.9.0.7/24 dev ska");
    hosts.near.command("ip addr add 10.9.0.8/24 dev ska");
    hosts.near.command("ip route add default via 10.9.0.2 src 10.9.0.7");
    hosts.near.command("ip route add 198.51.100.0/24 via 10.9.0.2 src 10.9.0.8");
    for own in ["192.0.2.1", "198.51.100.1"] {
        hosts.far.command(&format!("ip addr add {own}/32 dev skb"));
    }
    let (net, engine) = hosts.taking(Via::AfXdp, "udp:53");
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let expected =
        [("192.0.2.1", "10.9.0.7"), ("198.51.100.1", "10.9.0.8"), ("10.9.0.2", "10.9.0.1")];
    for (to, source) in expected.into_iter().cycle().take(30) {
        let far = hosts.far.run(|| KernelSocket::bind((to, 0)).unwrap());
        far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        hosts.near.run(|| socket.send_to(b"unasked", far.local_addr().unwrap()).unwrap());
        let (_, from) = far.recv_from(&mut [0; 100]).unwrap();
        assert_eq!(from, SocketAddr::new(source.parse().unwrap(), 53), "{to}");
    }
    drop((net, socket));
    running.end();
}

/// The kernel's route has an MTU of its own, as for a tunnel.
fn connections_by_route() {
    let hosts = Hosts::new();
    hosts.near.command("ip route add 10.9.0.2/32 dev ska mtu 1200");
    let (net, engine) = hosts.taking(Via::AfPacket, "tcp:32768-60999");
    let running = hosts.near.run(|| Running::begin(engine));
    let far = hosts.far.run(|| KernelListener::bind("10.9.0.2:80").unwrap());
    let near = hosts.near.run(|| TcpStream::connect(&net, "10.9.0.2:80").unwrap());
    assert_eq!(near.info().unwrap().path_mtu_bytes, 1200);
    thread::scope(|scope| {
        scope.spawn(|| echo(&near));
        exchange(&far.accept().unwrap().0, 100_000);
    });
    drop((net, near));
    running.end();
}
