//! Addresses and MTUs that change while the sockets are in use.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream as KernelStream, UdpSocket as KernelSocket};
use std::process::Command;
use std::thread::{self, sleep};
use std::time::Duration;

use forebay::net::{Net, NetConfig, TcpListener, TcpStream, UdpSocket};
use forebay_device::Via;
use forebay_testkit::namespaces::{await_local_route, command};

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, Running, over_tap};
use crate::sockets::shared::Hosts;
use crate::tcp::streams::{echo, exchange};

pub(crate) const TRIALS: &[Trial] = &[
    ("udp_28_added_address_is_served", added),
    ("udp_28_added_address_is_reserved", reserved),
    ("udp_28_removed_address_is_not_answered", removed),
    ("udp_28_lost_notifications_hide_no_address", lost),
    ("udp_28_new_route_leads_at_once", routed),
    ("udp_28_new_mac_address_is_told", readdressed),
    ("tcp_54_connection_outlives_its_address", outlives),
    ("tcp_54_connections_follow_the_mtu", resized),
    ("tcp_54_mtu_grows_to_memory_alone", bounded),
    ("udp_29_datagrams_follow_the_mtu", resized_datagrams),
];

/// Looks for a change, one each 10 ms, at most.
const LOOKS_MAX: u32 = 6000;

/// Datagrams sent, one each 100 ms, until one is answered, at most.
const SENDS_MAX: u32 = 300;

/// Waits until it is so.
fn await_change(what: &str, mut is_so: impl FnMut() -> bool) {
    let looked = (0..LOOKS_MAX).any(|_| {
        let is_so = is_so();
        if !is_so {
            sleep(Duration::from_millis(10));
        }
        is_so
    });
    assert!(looked, "{what}");
}

/// Hosts with IPv6 on their cable, whose ends have these addresses.
fn with_ipv6() -> Hosts {
    let hosts = Hosts::new();
    for (host, device, address) in [(&hosts.near, "ska", "fd09::1"), (&hosts.far, "skb", "fd09::2")]
    {
        host.command(&format!("ip link set {device} addrgenmode none"));
        let knob = format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6");
        host.run(|| std::fs::write(&knob, "0").unwrap());
        host.command(&format!("ip addr add {address}/64 dev {device} nodad"));
        host.run(|| await_local_route(address));
    }
    hosts
}

/// Answers all datagrams until the run ends.
fn answer_all(socket: &UdpSocket) {
    let mut buffer = [0; 100];
    while let Ok((len, from)) = socket.recv_from(&mut buffer) {
        socket.send_to(&buffer[..len], from).unwrap();
    }
}

/// Sends to an address until it answers.
fn await_answer(hosts: &Hosts, to: SocketAddr) {
    hosts.far.run(|| {
        let any: IpAddr = if to.is_ipv4() { "0.0.0.0" } else { "::" }.parse().unwrap();
        let client = KernelSocket::bind((any, 0)).unwrap();
        client.connect(to).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let is_answered = |_| {
            client.send(b"is anybody there?").unwrap();
            client.recv(&mut [0; 100]).is_ok()
        };
        assert!((0..SENDS_MAX).any(is_answered), "{to} does not answer");
    });
}

/// Sockets at all addresses are at one that is added; what they send where it leads has it.
fn added() {
    for via in [Via::AfPacket, Via::AfXdp] {
        let hosts = with_ipv6();
        let (net, engine) = hosts.taking(via, "udp:53,tcp:80");
        let socket = hosts.near.run(|| net.bind("[::]:53").unwrap());
        let listener = hosts.near.run(|| TcpListener::bind(&net, "[::]:80").unwrap());
        let running = hosts.near.run(|| Running::begin(engine));
        hosts.near.command("ip addr add 10.8.0.1/24 dev ska");
        hosts.near.command("ip addr add fd08::1/64 dev ska");
        hosts.far.command("ip addr add 10.8.0.2/24 dev skb");
        hosts.far.command("ip addr add fd08::2/64 dev skb nodad");
        hosts.far.run(|| await_local_route("fd08::2"));
        thread::scope(|scope| {
            scope.spawn(|| hosts.near.run(|| answer_all(&socket)));
            for to in ["10.8.0.1:53", "[fd08::1]:53"] {
                await_answer(&hosts, to.parse().unwrap());
            }
            for to in ["10.8.0.1:80", "[fd08::1]:80"] {
                thread::scope(|scope| {
                    scope.spawn(|| hosts.near.run(|| echo(&listener.accept().unwrap().0)));
                    exchange(&hosts.far.run(|| KernelStream::connect(to).unwrap()), 10_000);
                });
            }
            for (at, ours) in [("10.8.0.2", "10.8.0.1"), ("fd08::2", "fd08::1")] {
                let far = hosts.far.run(|| KernelSocket::bind((at, 0)).unwrap());
                far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                hosts.near.run(|| socket.send_to(b"unasked", far.local_addr().unwrap()).unwrap());
                let (_, from) = far.recv_from(&mut [0; 100]).unwrap();
                assert_eq!(from, SocketAddr::new(ours.parse().unwrap(), 53));
            }
            let bound = hosts.near.run(|| net.bind("10.8.0.1:54").unwrap());
            drop((bound, running.end()));
        });
    }
}

/// Programs on the kernel's stack cannot have the port, from the first socket on.
fn reserved() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, "udp:53,tcp:80");
    hosts.near.run(|| {
        command("ip addr add 10.8.0.1/24 dev ska");
        let socket = net.bind("10.8.0.1:53").unwrap();
        command("ip addr add 10.8.0.3/24 dev ska");
        let listener = TcpListener::bind(&net, "10.8.0.3:80").unwrap();
        for refused in [
            KernelSocket::bind("10.8.0.1:53").map(drop),
            std::net::TcpListener::bind("10.8.0.3:80").map(drop),
        ] {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::AddrInUse);
        }
        drop((socket, listener));
        let error = net.bind("10.8.0.7:53").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrNotAvailable);
    });
    drop(engine);
}

/// The kernel does not answer ARP here.
fn readdressed() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfXdp, "all");
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    await_answer_of(&hosts, &socket);
    hosts.near.command("ip link set ska address 02:00:00:00:00:77");
    await_change("the MAC address stays", || {
        hosts.far.command("ip neigh flush dev skb");
        await_answer_of(&hosts, &socket);
        let show = ["neigh", "show", "10.9.0.1", "dev", "skb"];
        let shown = hosts.far.run(|| Command::new("ip").args(show).output().unwrap());
        String::from_utf8_lossy(&shown.stdout).contains("02:00:00:00:00:77")
    });
    drop((net, socket));
    running.end();
}

/// Sends until a datagram is received.
fn await_answer_of(hosts: &Hosts, socket: &UdpSocket) {
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let far = hosts.far.run(|| KernelSocket::bind("10.9.0.2:0").unwrap());
    let arrives = |_| {
        far.send_to(b"who is it?", "10.9.0.1:53").unwrap();
        socket.recv(&mut [0; 100]).is_ok()
    };
    assert!((0..SENDS_MAX).any(arrives), "none has arrived");
}

/// Waits until an address is no longer this host's.
fn await_removal(net: &Net, address: &str) {
    let (address, device) = (address.parse().unwrap(), net.device_named("ska").unwrap());
    let answering = || net.answering_address(address, "10.9.0.2".parse().unwrap(), device);
    await_change("the address stays", || answering() != Some(address));
}

fn removed() {
    for via in [Via::AfPacket, Via::AfXdp] {
        let hosts = Hosts::new();
        hosts.near.command("ip addr add 10.9.0.7/24 dev ska");
        // It is not asked for.
        hosts
            .far
            .command("ip neigh replace 10.9.0.7 lladdr 02:00:00:00:00:01 dev skb nud permanent");
        let (net, engine) = hosts.taking(via, "udp:53");
        let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let running = hosts.near.run(|| Running::begin(engine));
        let far = hosts.far.run(|| KernelSocket::bind("10.9.0.2:0").unwrap());
        let mut buffer = [0; 100];
        far.send_to(b"before", "10.9.0.7:53").unwrap();
        assert_eq!(socket.recv(&mut buffer).unwrap(), 6);
        hosts.near.command("ip addr del 10.9.0.7/24 dev ska");
        await_removal(&net, "10.9.0.7");
        far.send_to(b"too late", "10.9.0.7:53").unwrap();
        far.send_to(b"elsewhere", "10.9.0.1:53").unwrap();
        let len = socket.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], b"elsewhere");
        drop((net, socket));
        running.end();
    }
}

/// The kernel drops notifications that its socket has no room for, the last ones first.
fn lost() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, "udp:53");
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let batch = std::env::temp_dir().join(format!("forebay-lost-{}", std::process::id()));
    let lines = (0..4000).map(|number| {
        format!("route add 10.{}.{}.0/24 dev ska\n", 100 + number / 250, number % 250)
    });
    std::fs::write(&batch, lines.collect::<String>()).unwrap();
    hosts.near.command(&format!("ip -batch {}", batch.display()));
    std::fs::remove_file(&batch).unwrap();
    hosts.near.command("ip addr add 10.8.0.1/24 dev ska");
    hosts.far.command("ip addr add 10.8.0.2/24 dev skb");
    let running = hosts.near.run(|| Running::begin(engine));
    thread::scope(|scope| {
        scope.spawn(|| hosts.near.run(|| answer_all(&socket)));
        await_answer(&hosts, "10.8.0.1:53".parse().unwrap());
        running.end();
    });
}

/// The source is that of the new default route, and an address may follow its route.
fn routed() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, "udp:53");
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    hosts.far.command("ip addr add 192.0.2.9/32 dev skb");
    let far = hosts.far.run(|| KernelSocket::bind("192.0.2.9:0").unwrap());
    far.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    hosts.near.command("ip addr add 10.9.0.7/24 dev ska");
    hosts.near.command("ip route add default via 10.9.0.2 src 10.9.0.7");
    let to = far.local_addr().unwrap();
    await_change("the source stays", || {
        hosts.near.run(|| socket.send_to(b"unasked", to).unwrap());
        let from = far.recv_from(&mut [0; 100]);
        from.is_ok_and(|(_, from)| from == SocketAddr::from(([10, 9, 0, 7], 53)))
    });
    drop((net, socket));
    running.end();
}

/// Data that are sent meanwhile are sent again.
fn outlives() {
    let hosts = Hosts::new();
    hosts.near.command("ip addr add 10.9.0.7/32 dev ska");
    hosts.far.command("ip neigh replace 10.9.0.7 lladdr 02:00:00:00:00:01 dev skb nud permanent");
    let (net, engine) = hosts.taking(Via::AfPacket, "tcp:80");
    let listener = hosts.near.run(|| TcpListener::bind(&net, "0.0.0.0:80").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let far = hosts.far.run(|| KernelStream::connect("10.9.0.7:80").unwrap());
    let (near, _) = listener.accept().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| echo(&near));
        hosts.near.command("ip addr del 10.9.0.7/32 dev ska");
        await_removal(&net, "10.9.0.7");
        scope.spawn(|| exchange(&far, 10_000));
        hosts.near.command("ip addr add 10.9.0.7/32 dev ska");
    });
    drop((net, listener, near));
    running.end();
}

/// Connections that are open, and those that are opened then, as the devices get other MTUs.
fn follow_mtus(via: Via, changes: &[(u32, u32)]) {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(via, "tcp:80");
    let listener = hosts.near.run(|| TcpListener::bind(&net, "0.0.0.0:80").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let connect = || {
        let far = hosts.far.run(|| KernelStream::connect("10.9.0.1:80").unwrap());
        (far, listener.accept().unwrap().0)
    };
    let mtu = |near: &TcpStream| near.info().unwrap().path_mtu_bytes;
    let (far, near) = connect();
    assert_eq!(mtu(&near), 1500);
    for &(mtu_bytes, expected) in changes {
        for (host, device) in [(&hosts.near, "ska"), (&hosts.far, "skb")] {
            host.command(&format!("ip link set {device} mtu {mtu_bytes}"));
        }
        await_change("the connection's MTU is another", || mtu(&near) == expected);
        let (other, accepted) = connect();
        assert_eq!(mtu(&accepted), expected);
        thread::scope(|scope| {
            scope.spawn(|| echo(&accepted));
            exchange(&other, 100_000);
        });
    }
    thread::scope(|scope| {
        scope.spawn(|| echo(&near));
        exchange(&far, 100_000);
    });
    drop((net, listener, near));
    running.end();
}

fn resized() {
    follow_mtus(Via::AfPacket, &[(1300, 1300), (3000, 3000), (1500, 1500)]);
}

/// The memory of AF_XDP is for frames of the MTU at which it was opened: the peer of a connection sends no larger ones.
fn bounded() {
    follow_mtus(Via::AfXdp, &[(1300, 1300), (3000, 1500), (1400, 1400), (2000, 1500)]);
}

/// The device is only this process's, or the kernel's, too.
fn resized_datagrams() {
    fn follows(socket: &UdpSocket, to: SocketAddr, mut set: impl FnMut(u32)) {
        for mtu_bytes in [1300, 1500] {
            set(mtu_bytes);
            let largest = usize::try_from(mtu_bytes).unwrap() - 28;
            await_change("the MTU stays", || {
                let sends = |len| socket.send_to(&vec![7; len], to);
                sends(largest).is_ok()
                    && sends(largest + 1)
                        .is_err_and(|error| error.raw_os_error() == Some(nix::libc::EMSGSIZE))
            });
        }
    }
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfXdp, "udp:53");
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let far = hosts.far.run(|| KernelSocket::bind("10.9.0.2:0").unwrap());
    let to = far.local_addr().unwrap();
    let set = |mtu| hosts.near.command(&format!("ip link set ska mtu {mtu}"));
    hosts.near.run(|| follows(&socket, to, set));
    drop((net, socket));
    running.end();

    let (net, engine) = over_tap(&NetConfig::default());
    let socket = net.bind((OURS, 53)).unwrap();
    let running = Running::begin(engine);
    let set = |mtu| forebay_testkit::namespaces::ip(&format!("link set skt mtu {mtu}"));
    follows(&socket, "10.9.0.1:9".parse().unwrap(), set);
    drop((net, socket));
    running.end();
}
