//! On an interface that the kernel has too, with its addresses, neighbours and ports.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener as KernelListener, TcpStream as KernelStream};
use std::thread;
use std::time::Duration;

use forebay::net::{Addresses, Net, NetConfig, TcpListener, TcpStream};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::Config;

use crate::sockets::rig::Running;
use crate::sockets::shared::Hosts;
use crate::tcp::streams::{LONG, echo, exchange};
use crate::tcp::{Trial, tcp_counter};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_15_streams_over_af_xdp", || beside_the_kernel(Via::AfXdp, 1500)),
    ("tcp_15_streams_over_af_packet", || beside_the_kernel(Via::AfPacket, 1500)),
    ("tcp_15_jumbo_frames_over_af_xdp", || beside_the_kernel(Via::AfXdp, 9000)),
    ("tcp_15_jumbo_frames_over_af_packet", || beside_the_kernel(Via::AfPacket, 9000)),
    ("tcp_16_port_is_ours_or_the_kernels", ports),
    ("tcp_16_closed_listener_leaves_its_port", closed_listener),
    ("tcp_16_strangers_stay_with_the_kernel", strangers),
    ("tcp_16_own_addresses_need_no_kernel", own_addresses),
    ("tcp_15_unknown_neighbours_cost_no_timeout", unknown_neighbours),
    ("tcp_17_no_route_says_so", no_route),
    ("tcp_18_unresolved_segments_leave_nothing", unresolved),
];

/// Destinations that are taken from the kernel: a server's port, and those of clients.
const TAKEN: &str = "tcp:80,tcp:32768-60999";

/// The kernel at the far end opens a connection, and then we open one to it, whose next hop the
/// kernel resolves.
fn beside_the_kernel(via: Via, mtu: u32) {
    let hosts = Hosts::new();
    hosts.near.command(&format!("ip link set ska mtu {mtu}"));
    hosts.far.command(&format!("ip link set skb mtu {mtu}"));
    let (net, engine) = hosts.taking(via, TAKEN);
    let listener = hosts.near.run(|| TcpListener::bind(&net, "10.9.0.1:80").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let far = hosts.far.run(|| KernelListener::bind("10.9.0.2:80").unwrap());
    thread::scope(|scope| {
        scope.spawn(|| exchange(&far.accept().unwrap().0, 500_000));
        hosts.near.run(|| {
            let stream = TcpStream::connect(&net, "10.9.0.2:80").unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            echo(&stream);
        });
    });
    thread::scope(|scope| {
        scope.spawn(|| hosts.near.run(|| echo(&listener.accept().unwrap().0)));
        let stream = hosts.far.run(|| KernelStream::connect("10.9.0.1:80").unwrap());
        exchange(&stream, 2_000_000);
    });
    drop((net, listener));
    assert_eq!(running.end().frames_away, 0);
}

/// A port cannot be listened on twice, neither by us nor by the kernel.
fn ports() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, TAKEN);
    hosts.near.run(|| {
        let kernels = KernelListener::bind("10.9.0.1:81").unwrap();
        let error = TcpListener::bind(&net, "10.9.0.1:81").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        drop(kernels);
        let ours = TcpListener::bind(&net, "0.0.0.0:80").unwrap();
        let error = KernelListener::bind("10.9.0.1:80").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        assert_eq!(TcpListener::bind(&net, "0.0.0.0:80").unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(ours);
        TcpListener::bind(&net, "0.0.0.0:80").unwrap();
        let error = TcpListener::bind(&net, "10.77.0.1:80").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrNotAvailable);
    });
    drop(engine);
}

/// A port is listened on again, while connections of the listener before live or end. The kernel has it once none is left.
fn closed_listener() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, TAKEN);
    let running = hosts.near.run(|| Running::begin(engine));
    let listen = || hosts.near.run(|| TcpListener::bind(&net, "10.9.0.1:80"));
    let accept = |listener: &TcpListener| {
        let far = hosts.far.run(|| KernelStream::connect("10.9.0.1:80").unwrap());
        (far, listener.accept().unwrap().0)
    };
    for _ in 0..100 {
        let (far, near) = accept(&listen().unwrap());
        let ends = [thread::spawn(|| drop(near)), thread::spawn(|| drop(far))];
        listen().unwrap();
        ends.into_iter().for_each(|end| end.join().unwrap());
    }
    let first = listen().unwrap();
    let (far, near) = accept(&first);
    assert_eq!(listen().unwrap_err().kind(), ErrorKind::AddrInUse);
    drop(first);
    let again = listen().unwrap();
    assert_eq!(listen().unwrap_err().kind(), ErrorKind::AddrInUse, "it lives");
    accept(&again);
    drop(again);
    let kernels = || hosts.near.run(|| KernelListener::bind("10.9.0.1:80"));
    assert_eq!(kernels().unwrap_err().kind(), ErrorKind::AddrInUse);
    thread::scope(|scope| {
        scope.spawn(|| echo(&near));
        exchange(&far, 500_000);
    });
    drop((near, far));
    while kernels().is_err() {
        thread::sleep(Duration::from_millis(1));
    }
    drop(net);
    running.end();
}

/// Segments to a port that we do not listen on are answered by the kernel alone.
fn strangers() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, TAKEN);
    let kernels = hosts.near.run(|| KernelListener::bind("10.9.0.1:40000").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let mut far = hosts.far.run(|| KernelStream::connect("10.9.0.1:40000").unwrap());
    let (mut near, _) = kernels.accept().unwrap();
    far.write_all(b"to the kernel").unwrap();
    let mut came = [0; 13];
    near.read_exact(&mut came).unwrap();
    assert_eq!(&came, b"to the kernel");
    // They reach us, too, at the latest when their block is retired; and get no answer.
    while net.snmp().contains("\nTcp: 0 0 0 0 0 ") {
        thread::sleep(Duration::from_millis(1));
    }
    assert!(net.snmp().contains(" 0 0 0 0\nUdp"), "nothing was sent: {}", net.snmp());
    drop(net);
    running.end();
}

/// Beside an interface of the kernel, a TAP has addresses that only we have.
fn own_addresses() {
    let hosts = Hosts::new();
    hosts.near.run(|| {
        let mut config = DeviceConfig::new("ska", Via::AfPacket);
        config.take = "tcp:80".parse().unwrap();
        let tap = DeviceConfig::new("skt", Via::Tap);
        let mut devices = [config, tap].map(|config| Device::open(&config).unwrap());
        let addresses = vec![Addresses::parse_prefix("10.8.0.2/24").unwrap()];
        let own = Addresses::Own { mac: None, addresses };
        let config = NetConfig { addresses: vec![Addresses::Kernels, own], ..NetConfig::default() };
        let (net, _engine) = Net::over(&Config::live(), &config, &mut devices).unwrap();
        TcpListener::bind(&net, "10.8.0.2:80").unwrap();
    });
}

/// The first segment to a neighbour leaves when the kernel has resolved it, whichever CPU sleeps.
fn unknown_neighbours() {
    let hosts = Hosts::new();
    let peers = || (20..40).map(|number| format!("10.9.0.{number}"));
    peers().for_each(|peer| hosts.far.command(&format!("ip addr add {peer}/24 dev skb")));
    let (net, engine) = hosts.taking(Via::AfPacket, TAKEN);
    let running = hosts.near.run(|| Running::begin(engine));
    let far = hosts.far.run(|| KernelListener::bind("0.0.0.0:80").unwrap());
    for peer in peers() {
        // CPUs go to sleep meanwhile.
        thread::sleep(Duration::from_millis(5));
        hosts.near.run(|| TcpStream::connect(&net, (peer.as_str(), 80)).unwrap());
        far.accept().unwrap();
    }
    assert_eq!(tcp_counter(&net, "RetransSegs"), 0);
    drop(net);
    running.end();
}

fn no_route() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, TAKEN);
    let running = hosts.near.run(|| Running::begin(engine));
    let to = "203.0.113.1:80".parse().unwrap();
    let error = hosts.near.run(|| TcpStream::begin_connect(&net, to)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NetworkUnreachable, "{error}");
    drop(net);
    running.end();
}

/// The run ends while a segment waits for a neighbour that does not answer.
fn unresolved() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.taking(Via::AfPacket, TAKEN);
    let running = hosts.near.run(|| Running::begin(engine));
    let to = "10.9.0.77:80".parse().unwrap();
    let stream = hosts.near.run(|| TcpStream::begin_connect(&net, to).unwrap());
    let mut outcome = running.end();
    drop(stream);
    assert_eq!(net.frames_away(&mut outcome), 0);
}
