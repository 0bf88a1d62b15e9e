//! Messages: what the kernel's sockets at the other end see of what is sent here, and the other way round.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr, UdpSocket as KernelSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use forebay::net::message::{DeviceIndex, Received, Transmit};
use forebay::net::{Net, NetConfig, NetEngine, UdpSocket};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::Config;
use forebay_testkit::namespaces::await_local_route;
use forebay_testkit::namespaces::cable::{Cable, Namespace};
use nix::cmsg_space;
use nix::libc::{in_pktinfo, in6_pktinfo};
use nix::sys::socket::sockopt::{
    IpRecvTos, Ipv4PacketInfo, Ipv4RecvTtl, Ipv6RecvHopLimit, Ipv6RecvPacketInfo, Ipv6RecvTClass,
    RcvBuf,
};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt,
};

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, Running, client, over_tap_by};

pub(crate) const TRIALS: &[Trial] = &[
    ("udp_7_kernel_reads_what_was_asked", kernel_reads),
    ("udp_7_headers_are_read_from_kernel", reads_kernel),
    ("udp_7_send_errors_are_the_kernels", errors_agree),
    ("udp_7_control_data_survives_unknown_neighbour", by_kernel),
    ("udp_7_kernel_serves_this_host", this_host),
    ("udp_10_kernel_reassembles_our_fragments", fragments),
    ("udp_15_gso_is_sent_whole_or_not", all_or_none),
];

const PORT: u16 = 4433;
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// Two hosts, and two cables between them; ours is the near one.
pub(crate) struct TwoCables {
    pub(crate) near: Namespace,
    pub(crate) far: Namespace,
}

impl TwoCables {
    pub(crate) fn new() -> Self {
        let hosts = Self { near: Namespace::new(), far: Namespace::new() };
        for (number, (a, b)) in [("twa", "twb"), ("twc", "twd")].into_iter().enumerate() {
            Cable { near: (&hosts.near, a), far: (&hosts.far, b) }.lay();
            for (host, name, last) in [(&hosts.near, a, 1), (&hosts.far, b, 2)] {
                host.command("sysctl -qw net.ipv6.conf.all.disable_ipv6=0");
                host.command(&format!("sysctl -qw net.ipv6.conf.{name}.disable_ipv6=0"));
                host.command(&format!("ip addr add 10.{number}.0.{last}/24 dev {name}"));
                host.command(&format!("ip addr add 10.{number}.0.{}/24 dev {name}", last + 10));
                host.command(&format!("ip addr add fd0{number}::{last}/64 dev {name} nodad"));
                host.command(&format!("ip addr add fd0{number}::1{last}/64 dev {name} nodad"));
                for address in [format!("fd0{number}::{last}"), format!("fd0{number}::1{last}")] {
                    host.run(|| await_local_route(address));
                }
            }
        }
        for (host, ends, other) in
            [(&hosts.near, ["twa", "twc"], 2), (&hosts.far, ["twb", "twd"], 1)]
        {
            host.command("ip link set lo up");
            for (number, name) in ends.into_iter().enumerate() {
                for last in [other, other + 10] {
                    let mac = format!("lladdr 02:00:00:00:00:0{other} dev {name} nud permanent");
                    host.command(&format!("ip neigh replace 10.{number}.0.{last} {mac}"));
                    host.command(&format!("ip neigh replace fd0{number}::{last} {mac}"));
                }
            }
        }
        hosts
    }

    pub(crate) fn over(&self, via: Via) -> (Net, NetEngine) {
        self.near.run(|| {
            let devices = ["twa", "twc"].map(|name| {
                let mut config = DeviceConfig::new(name, via);
                config.take = format!("udp:{PORT}").parse().unwrap();
                Device::open(&config).unwrap()
            });
            Net::over(&Config::live(), &NetConfig::default(), &mut Vec::from(devices)).unwrap()
        })
    }

    fn bind(&self, net: &Net, at: &str) -> UdpSocket {
        let socket = self.near.run(|| net.bind((at, PORT)).unwrap());
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket
    }

    /// A socket of the kernel's at the far end, which tells all that it can of what it reads.
    pub(crate) fn far_socket(&self, at: &str) -> KernelSocket {
        let socket = self.far.run(|| KernelSocket::bind((at, PORT)).unwrap());
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        if socket.local_addr().unwrap().is_ipv4() {
            setsockopt(&socket, IpRecvTos, &true).unwrap();
            setsockopt(&socket, Ipv4RecvTtl, &true).unwrap();
            setsockopt(&socket, Ipv4PacketInfo, &true).unwrap();
        } else {
            setsockopt(&socket, Ipv6RecvTClass, &true).unwrap();
            setsockopt(&socket, Ipv6RecvHopLimit, &true).unwrap();
            setsockopt(&socket, Ipv6RecvPacketInfo, &true).unwrap();
        }
        setsockopt(&socket, RcvBuf, &(4 << 20)).unwrap();
        socket
    }
}

/// Datagram as the kernel tells it.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    pub(crate) len: usize,
    pub(crate) source: SocketAddr,
    pub(crate) traffic_class: u8,
    pub(crate) ttl: u8,
    /// Device number at the far end.
    pub(crate) device: u32,
}

pub(crate) fn kernel_recv(socket: &KernelSocket, buffer: &mut [u8]) -> Seen {
    let mut control = cmsg_space!(i32, i32, in_pktinfo, in6_pktinfo);
    let mut iov = [std::io::IoSliceMut::new(buffer)];
    let fd = socket.as_raw_fd();
    let read =
        recvmsg::<SockaddrStorage>(fd, &mut iov, Some(&mut control), MsgFlags::empty()).unwrap();
    let from = read.address.unwrap();
    let source = match (from.as_sockaddr_in(), from.as_sockaddr_in6()) {
        (Some(v4), _) => SocketAddr::from((v4.ip(), v4.port())),
        (_, Some(v6)) => SocketAddr::from((v6.ip(), v6.port())),
        _ => panic!("{from:?}"),
    };
    let mut seen = Seen { len: read.bytes, source, traffic_class: 0, ttl: 0, device: 0 };
    for message in read.cmsgs().unwrap() {
        match message {
            ControlMessageOwned::Ipv4Tos(class) => seen.traffic_class = class,
            ControlMessageOwned::Ipv6TClass(class) => {
                seen.traffic_class = class.try_into().unwrap();
            }
            ControlMessageOwned::Ipv4Ttl(ttl) | ControlMessageOwned::Ipv6HopLimit(ttl) => {
                seen.ttl = ttl.try_into().unwrap();
            }
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                seen.device = info.ipi_ifindex.try_into().unwrap();
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => seen.device = info.ipi6_ifindex,
            other => panic!("{other:?}"),
        }
    }
    seen
}

const FAMILIES: [(&str, [&str; 2], &str); 2] = [
    ("0.0.0.0", ["10.0.0.1", "10.0.0.11"], "10.0.0.2"),
    ("::", ["fd00::1", "fd00::11"], "fd00::2"),
];

fn each_via(test: impl Fn(Via)) {
    for via in [Via::AfPacket, Via::AfXdp] {
        test(via);
    }
}

/// A batch of datagrams, each with fields of its own, and several in one payload.
fn kernel_reads() {
    each_via(|via| {
        let hosts = TwoCables::new();
        let (net, engine) = hosts.over(via);
        let ours = FAMILIES.map(|(any, ..)| {
            let options = net.socket().v6_only(true);
            hosts.near.run(|| options.bind((any, PORT)).unwrap())
        });
        let running = hosts.near.run(|| Running::begin(engine));
        for (socket, (any, sources, to)) in ours.iter().zip(FAMILIES) {
            let far = hosts.far_socket(any);
            let to = SocketAddr::new(to.parse().unwrap(), PORT);
            let mut messages = Vec::new();
            let payload: Vec<u8> = (0..=255).cycle().take(1000).collect();
            for number in 0..64u8 {
                messages.push(Transmit {
                    source: (number % 3 > 0)
                        .then(|| sources[usize::from(number % 3 - 1)].parse().unwrap()),
                    traffic_class: (number % 2 == 0).then_some(number),
                    ttl: (number % 5 > 0).then_some(number + 1),
                    ..Transmit::new(&payload[..usize::from(number) * 10], to)
                });
            }
            let segmented = Transmit {
                gso_size: 300,
                traffic_class: Some(2),
                source: Some(sources[1].parse().unwrap()),
                ..Transmit::new(&payload, to)
            };
            messages.push(segmented);
            assert_eq!(socket.send_msgs(&messages).unwrap(), 65);
            let mut buffer = [0; 2000];
            for (number, message) in messages[..64].iter().enumerate() {
                let seen = kernel_recv(&far, &mut buffer);
                let source = message.source.unwrap_or(seen.source.ip());
                assert!(sources.contains(&&*source.to_string()), "one of this host's: {source}");
                let expected = Seen {
                    len: message.payload.len(),
                    source: SocketAddr::new(source, PORT),
                    traffic_class: message.traffic_class.unwrap_or(0),
                    ttl: message.ttl.unwrap_or(64),
                    device: seen.device,
                };
                assert_eq!(seen, expected, "{number}");
                assert_eq!(&buffer[..seen.len], message.payload);
            }
            for (at, len) in [(0, 300), (300, 300), (600, 300), (900, 100)] {
                let seen = kernel_recv(&far, &mut buffer);
                let source = SocketAddr::new(sources[1].parse().unwrap(), PORT);
                assert_eq!((seen.len, seen.traffic_class, seen.source), (len, 2, source));
                assert_eq!(buffer[..len], payload[at..at + len]);
            }
        }
        drop(ours);
        let mut outcome = running.end();
        assert_eq!(net.frames_away(&mut outcome), 0);
    });
}

fn kernel_send(socket: &KernelSocket, payload: &[u8], to: SocketAddr, marks: (u8, u8)) {
    let (class, ttl) = (i32::from(marks.0), i32::from(marks.1));
    let control = match to {
        SocketAddr::V4(_) => [ControlMessage::Ipv4Tos(&marks.0), ControlMessage::Ipv4Ttl(&ttl)],
        SocketAddr::V6(_) => {
            [ControlMessage::Ipv6TClass(&class), ControlMessage::Ipv6HopLimit(&ttl)]
        }
    };
    let payload = [IoSlice::new(payload)];
    let to = SockaddrStorage::from(to);
    sendmsg(socket.as_raw_fd(), &payload, &control, MsgFlags::empty(), Some(&to)).unwrap();
}

/// Datagrams of the kernel are read with all that its headers say, on both devices.
fn reads_kernel() {
    each_via(|via| {
        let hosts = TwoCables::new();
        let (net, engine) = hosts.over(via);
        let ours = hosts.bind(&net, "::");
        let running = hosts.near.run(|| Running::begin(engine));
        let (first, second) = (net.device_named("twa").unwrap(), net.device_named("twc").unwrap());
        assert_eq!((first, net.device_named("lo")), (DeviceIndex(0), None));
        let cases =
            [("10.0.0.11", first), ("10.1.0.1", second), ("fd00::11", first), ("fd01::1", second)];
        for (at, device) in cases {
            let to = SocketAddr::new(at.parse().unwrap(), PORT);
            let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
            let far = hosts.far_socket(any);
            for number in 0..40u8 {
                let payload = vec![number; usize::from(number) * 30];
                kernel_send(&far, &payload, to, (number * 4 + number % 4, 100 + number));
                let mut buffer = [0; 500];
                let read = ours.recv_msg(&mut buffer).unwrap();
                let shown = |ip: IpAddr| match ip {
                    IpAddr::V4(ip) => IpAddr::V6(ip.to_ipv6_mapped()),
                    IpAddr::V6(_) => ip,
                };
                let from = hosts.far.run(|| {
                    let probe = KernelSocket::bind((any, 0)).unwrap();
                    probe.connect(to).unwrap();
                    probe.local_addr().unwrap().ip()
                });
                let expected = Received {
                    len: payload.len().min(buffer.len()),
                    is_truncated: payload.len() > buffer.len(),
                    source: SocketAddr::new(shown(from), PORT),
                    destination: SocketAddr::new(shown(to.ip()), PORT),
                    device,
                    traffic_class: number * 4 + number % 4,
                    ttl: 100 + number,
                    gso_size: 0,
                    timestamp_ns: read.timestamp_ns,
                };
                assert_eq!(read, expected);
                assert_eq!(buffer[..read.len], payload[..read.len]);
            }
        }
        drop(ours);
        let mut outcome = running.end();
        assert_eq!(net.frames_away(&mut outcome), 0);
    });
}

/// A socket of the kernel's, for IPv6 alone if it is of IPv6.
fn kernel_v6_only(local: SocketAddr) -> KernelSocket {
    use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let made = socket(family, SocketType::DGRAM, None).unwrap();
    if local.is_ipv6() {
        sockopt::set_ipv6_v6only(&made, true).unwrap();
    }
    bind(&made, &local).unwrap();
    made.into()
}

/// The kernel's socket does what ours is asked for; both say the same of it.
fn errors_agree() {
    use rustix::net::sockopt::{
        Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
    };
    let hosts = TwoCables::new();
    let (net, engine) = hosts.over(Via::AfPacket);
    for (any, sources, to) in FAMILIES {
        let ours = hosts.near.run(|| net.socket().v6_only(true).bind((any, PORT)).unwrap());
        let kernels =
            hosts.near.run(|| kernel_v6_only(SocketAddr::new(any.parse().unwrap(), PORT + 1)));
        match any {
            "::" => set_ipv6_mtu_discover(&kernels, Ipv6PathMtuDiscovery::DO).unwrap(),
            _ => set_ip_mtu_discover(&kernels, Ipv4PathMtuDiscovery::DO).unwrap(),
        }
        let to = SocketAddr::new(to.parse().unwrap(), PORT);
        let other = if to.is_ipv4() { "fd00::1" } else { "10.0.0.1" };
        let headers = if to.is_ipv4() { 28 } else { 48 };
        let payload = vec![7; 70_000];
        let plain = |len: usize| Transmit::new(&payload[..len], to);
        let mtu = 1500 - headers;
        let cases = [
            ("fits", plain(mtu)),
            ("above the MTU", plain(mtu + 1)),
            ("above any datagram", plain(65_508)),
            ("no such device", Transmit { device: Some(DeviceIndex(9)), ..plain(4) }),
            ("no port", Transmit { destination: SocketAddr::new(to.ip(), 0), ..plain(4) }),
            ("own source", Transmit { source: Some(sources[1].parse().unwrap()), ..plain(4) }),
            ("strange source", Transmit { source: Some(to.ip()), ..plain(4) }),
            ("TTL 0", Transmit { ttl: Some(0), ..plain(4) }),
            ("TTL 255", Transmit { ttl: Some(255), ..plain(4) }),
            ("segments", Transmit { gso_size: 1000, ..plain(40_000) }),
            ("segments above the MTU", Transmit { gso_size: 1480, ..plain(4000) }),
            ("segments above any datagram", Transmit { gso_size: 1000, ..plain(65_528) }),
            ("as many segments as can be", Transmit { gso_size: 1000, ..plain(65_507) }),
            ("too many segments", Transmit { gso_size: 10, ..plain(1281) }),
            ("one segment", Transmit { gso_size: 1000, ..plain(10) }),
            ("nothing", plain(0)),
            (
                "no route",
                Transmit { destination: SocketAddr::new(other.parse().unwrap(), 9), ..plain(4) },
            ),
        ];
        for (what, message) in cases {
            let said = ours.send_msg(&message).map_err(|error| error.raw_os_error());
            let kernel = hosts.near.run(|| kernel_try(&kernels, &message));
            assert!(said == kernel, "{any} {what}: ours {said:?}, the kernel {kernel:?}");
        }
    }
    drop(engine);
}

/// More datagrams than there is memory for: the error comes before the first one is sent.
fn all_or_none() {
    let engine = Config { spare_frames: 16, ..Config::live() };
    let (net, engine) =
        over_tap_by(&engine, &NetConfig { send_frames: 16, ..NetConfig::default() });
    let socket = net.bind((OURS, PORT)).unwrap();
    socket.set_nonblocking(true);
    let running = Running::begin(engine);
    let far = client(socket.local_addr());
    let to = SocketAddr::new("10.9.0.1".parse().unwrap(), far.local_addr().unwrap().port());
    socket.send_to(b"first", to).unwrap(); // the neighbour is known from now on
    let mut buffer = [0; 2000];
    assert_eq!(far.recv(&mut buffer).unwrap(), 5);
    let refused = socket.send_gso(&[1; 40_000], 1000, to).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(nix::libc::ENOBUFS));
    socket.send_to(b"next", to).unwrap();
    assert_eq!(far.recv(&mut buffer).unwrap(), 4, "nothing of what was refused");
    drop(socket);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

fn kernel_try(socket: &KernelSocket, of: &Transmit<'_>) -> Result<usize, Option<i32>> {
    let any = nix::libc::in_addr { s_addr: 0 };
    let (mut v4, mut v6) = (
        in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: any, ipi_addr: any },
        in6_pktinfo { ipi6_addr: nix::libc::in6_addr { s6_addr: [0; 16] }, ipi6_ifindex: 0 },
    );
    let ttl = of.ttl.map(i32::from);
    let mut control = Vec::new();
    let index = of.device.map_or(0, |DeviceIndex(device)| u32::from(device) + 1000);
    match of.source {
        Some(IpAddr::V4(source)) => {
            v4.ipi_spec_dst.s_addr = u32::from_ne_bytes(source.octets());
            control.push(ControlMessage::Ipv4PacketInfo(&v4));
        }
        Some(IpAddr::V6(source)) => {
            v6.ipi6_addr.s6_addr = source.octets();
            control.push(ControlMessage::Ipv6PacketInfo(&v6));
        }
        None if index == 0 => {}
        None if of.destination.is_ipv4() => {
            v4.ipi_ifindex = index.try_into().unwrap();
            control.push(ControlMessage::Ipv4PacketInfo(&v4));
        }
        None => {
            v6.ipi6_ifindex = index;
            control.push(ControlMessage::Ipv6PacketInfo(&v6));
        }
    }
    if let Some(ttl) = &ttl {
        control.push(match of.destination {
            SocketAddr::V4(_) => ControlMessage::Ipv4Ttl(ttl),
            SocketAddr::V6(_) => ControlMessage::Ipv6HopLimit(ttl),
        });
    }
    if of.gso_size > 0 {
        control.push(ControlMessage::UdpGsoSegments(&of.gso_size));
    }
    let payload = [IoSlice::new(of.payload)];
    let to = SockaddrStorage::from(of.destination);
    sendmsg(socket.as_raw_fd(), &payload, &control, MsgFlags::empty(), Some(&to))
        .map_err(|errno| Some(errno as i32))
}

/// The first datagram to a neighbour that nobody knows goes by the kernel, as it was asked for.
fn by_kernel() {
    let hosts = TwoCables::new();
    let (net, engine) = hosts.over(Via::AfXdp);
    let ours = FAMILIES.map(|(any, ..)| {
        let options = net.socket().v6_only(true);
        hosts.near.run(|| options.bind((any, PORT)).unwrap())
    });
    let running = hosts.near.run(|| Running::begin(engine));
    for (socket, (any, sources, to)) in ours.iter().zip(FAMILIES) {
        hosts.near.command(&format!("ip neigh del {to} dev twa"));
        let far = hosts.far_socket(any);
        let source = sources[1].parse().unwrap();
        let message = Transmit {
            source: Some(source),
            traffic_class: Some(0xb9),
            ttl: Some(77),
            ..Transmit::new(b"first", SocketAddr::new(to.parse().unwrap(), PORT))
        };
        hosts.near.run(|| socket.send_msg(&message).unwrap());
        let seen = kernel_recv(&far, &mut [0; 10]);
        let from = SocketAddr::new(source, PORT);
        assert_eq!((seen.len, seen.source, seen.traffic_class, seen.ttl), (5, from, 0xb9, 77));
    }
    drop(ours);
    running.end();
}

/// The kernel has the loopback that is missing here: its programs on this host hear what is sent to its addresses.
fn this_host() {
    each_via(|via| {
        let hosts = TwoCables::new();
        let (net, engine) = hosts.over(via);
        let ours = hosts.bind(&net, "::");
        let running = hosts.near.run(|| Running::begin(engine));
        for (any, own) in [
            ("0.0.0.0", ["10.0.0.1", "10.1.0.1", "127.0.0.1", "0.0.0.0"]),
            ("::", ["fd00::1", "fd01::1", "::1", "::"]),
        ] {
            let heard = hosts.near.run(|| KernelSocket::bind((any, PORT + 1)).unwrap());
            heard.set_read_timeout(Some(TIMEOUT)).unwrap();
            for to in own.map(|own| SocketAddr::new(own.parse().unwrap(), PORT + 1)) {
                assert_eq!(hosts.near.run(|| ours.send_to(b"here", to)).unwrap(), 4, "{to}");
                assert_eq!(heard.recv(&mut [0; 10]).unwrap(), 4, "{to}");
            }
        }
        drop(ours);
        let mut outcome = running.end();
        assert_eq!(net.frames_away(&mut outcome), 0);
    });
}

/// Datagrams above the MTU, up to the largest that there is, and back: those that the kernel cuts.
fn fragments() {
    each_via(|via| {
        let hosts = TwoCables::new();
        let (net, engine) = hosts.over(via);
        let ours = FAMILIES.map(|(any, ..)| {
            let options = net.socket().v6_only(true).recv_buffer_size(8 << 20);
            hosts.near.run(|| options.bind((any, PORT)).unwrap())
        });
        let running = hosts.near.run(|| Running::begin(engine));
        for (socket, (any, _, to)) in ours.iter().zip(FAMILIES) {
            let far = hosts.far_socket(any);
            let to = SocketAddr::new(to.parse().unwrap(), PORT);
            let headers = if to.is_ipv4() { 28 } else { 48 };
            let mut buffer = vec![0; 70_000];
            for len in [1500 - headers, 1501 - headers, 2952, 4000, 9001, 65_535 - headers.max(28)]
            {
                let payload: Vec<u8> =
                    (0..len).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
                socket.set_fragment(false);
                let refused = socket.send_to(&payload, to);
                assert_eq!(refused.is_ok(), len + headers <= 1500, "{len}");
                if refused.is_ok() {
                    kernel_recv(&far, &mut buffer);
                }
                socket.set_fragment(true);
                let message = Transmit { traffic_class: Some(0x28), ..Transmit::new(&payload, to) };
                assert_eq!(socket.send_msg(&message).unwrap(), len);
                let seen = kernel_recv(&far, &mut buffer);
                assert_eq!((seen.len, seen.traffic_class), (len, 0x28));
                assert!(buffer[..len] == payload[..], "{len} bytes differ");
            }
        }
        drop(ours);
        let mut outcome = running.end();
        assert_eq!(net.frames_away(&mut outcome), 0);
    });
}
