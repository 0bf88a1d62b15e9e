//! On an interface that the kernel has too, with its addresses, neighbours and ports.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener as KernelListener, TcpStream as KernelStream};
use std::thread;
use std::time::Duration;

use forebay::net::{Net, NetConfig, NetEngine, TcpListener, TcpStream};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::Config;
use forebay_testkit::namespaces::cable::{Cable, Namespace};

use crate::sockets::rig::Running;
use crate::tcp::Trial;
use crate::tcp::streams::{LONG, echo, exchange};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_15_streams_over_af_xdp", || beside_the_kernel(Via::AfXdp)),
    ("tcp_15_streams_over_af_packet", || beside_the_kernel(Via::AfPacket)),
    ("tcp_16_port_is_ours_or_the_kernels", ports),
    ("tcp_16_strangers_stay_with_the_kernel", strangers),
];

/// Two hosts connected by a veth; the near one is under test.
struct Hosts {
    near: Namespace,
    far: Namespace,
}

impl Hosts {
    fn new() -> Self {
        let hosts = Self { near: Namespace::new(), far: Namespace::new() };
        Cable { near: (&hosts.near, "ska"), far: (&hosts.far, "skb") }.lay();
        hosts.near.command("ip addr add 10.9.0.1/24 dev ska");
        hosts.far.command("ip addr add 10.9.0.2/24 dev skb");
        hosts
    }

    fn over(&self, via: Via) -> (Net, NetEngine) {
        self.near.run(|| {
            let mut config = DeviceConfig::new("ska", via);
            config.take = "tcp:80,tcp:32768-60999".parse().unwrap();
            let mut devices = [Device::open(&config).unwrap()];
            Net::over(&Config::live(), &NetConfig::default(), &mut devices).unwrap()
        })
    }
}

/// The kernel at the far end opens a connection, and then we open one to it, whose next hop the
/// kernel resolves.
fn beside_the_kernel(via: Via) {
    let hosts = Hosts::new();
    let (net, engine) = hosts.over(via);
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
    let (net, engine) = hosts.over(Via::AfPacket);
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

/// Segments to a port that we do not listen on are answered by the kernel alone.
fn strangers() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.over(Via::AfPacket);
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
