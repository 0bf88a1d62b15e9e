//! Two hosts at a cable: ours with an engine, the kernel's at the far end.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::thread::{self, JoinHandle};

use forebay::net::{Net, NetConfig, NetEngine, Stack};
use forebay::{Config, Control, Device, DeviceConfig, Outcome, Stopper, Via};
use forebay_testkit::namespaces::await_local_route;
use forebay_testkit::namespaces::cable::{Cable, Namespace};
use tokio::runtime::{Builder, Runtime};

pub(crate) const PORT: u16 = 4433;

pub(crate) struct Hosts {
    pub(crate) near: Namespace,
    pub(crate) far: Namespace,
    pub(crate) net: Net,
    pub(crate) control: Control,
    stopper: Stopper,
    engine: JoinHandle<forebay::Result<Outcome<Stack>>>,
}

impl Hosts {
    /// Hosts whose near one has an engine at work, prepared by `prepare`.
    pub(crate) fn new(via: Via, prepare: impl FnOnce(&Net, &NetEngine) + Send) -> Self {
        Self::with_mtu(via, 1500, prepare)
    }

    /// As [`new`](Self::new), at a cable of this MTU.
    pub(crate) fn with_mtu(
        via: Via,
        mtu: u16,
        prepare: impl FnOnce(&Net, &NetEngine) + Send,
    ) -> Self {
        let (near, far) = (Namespace::new(), Namespace::new());
        Cable { near: (&near, "qua"), far: (&far, "qub") }.lay();
        for (host, name, own, other) in [(&near, "qua", 1, 2), (&far, "qub", 2, 1)] {
            host.command("ip link set lo up");
            host.command(&format!("ip link set {name} mtu {mtu}"));
            host.command("sysctl -qw net.ipv6.conf.all.disable_ipv6=0");
            host.command(&format!("sysctl -qw net.ipv6.conf.{name}.disable_ipv6=0"));
            host.command(&format!("ip addr add 10.9.0.{own}/24 dev {name}"));
            host.command(&format!("ip addr add fd09::{own}/64 dev {name} nodad"));
            host.command(&format!("ip addr add fe80::{own}/64 dev {name} nodad"));
            host.run(|| await_local_route(format!("fd09::{own}")));
            host.run(|| await_local_route(format!("fe80::{own} dev {name}")));
            let mac = format!("lladdr 02:00:00:00:00:0{other} dev {name} nud permanent");
            for to in ["10.9.0.", "fd09::", "fe80::"] {
                host.command(&format!("ip neigh replace {to}{other} {mac}"));
            }
        }
        let (net, control, stopper, engine) = near.run(|| {
            let mut device = DeviceConfig::new("qua", via);
            device.take = format!("udp:{PORT}").parse().unwrap();
            let mut devices = [Device::open(&device).unwrap()];
            let net = NetConfig { send_frames: 4096, ..NetConfig::default() };
            let (net, engine) = Net::over(&Config::live(), &net, &mut devices).unwrap();
            prepare(&net, &engine);
            let (control, stopper) = (engine.control(), engine.stopper());
            (net, control, stopper, thread::spawn(move || engine.run()))
        });
        Self { near, far, net, control, stopper, engine }
    }

    /// A runtime whose threads are in a namespace.
    pub(crate) fn runtime(of: &Namespace) -> Runtime {
        of.run(|| Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap())
    }

    pub(crate) fn near_address(is_v6: bool) -> SocketAddr {
        let ip: IpAddr = if is_v6 { "fd09::1" } else { "10.9.0.1" }.parse().unwrap();
        SocketAddr::new(ip, PORT)
    }

    pub(crate) fn far_address(is_v6: bool) -> SocketAddr {
        let ip: IpAddr = if is_v6 { "fd09::2" } else { "10.9.0.2" }.parse().unwrap();
        SocketAddr::new(ip, PORT + 1)
    }

    /// Address of the near host as the far one names it, and the other way round, with the scope of its own device.
    pub(crate) fn link_local_addresses(&self) -> [SocketAddr; 2] {
        let hosts = [(&self.far, "qub", 1, PORT), (&self.near, "qua", 2, PORT + 1)];
        hosts.map(|(from, by, last, port)| {
            let scope = from.run(|| {
                let socket = std::net::UdpSocket::bind("[::]:0").unwrap();
                rustix::net::netdevice::name_to_index(socket, by).unwrap()
            });
            let ip = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last);
            SocketAddrV6::new(ip, port, 0, scope).into()
        })
    }

    pub(crate) fn stop(&self) {
        self.stopper.stop();
    }

    /// Ends it. No frame may be missing.
    pub(crate) fn end(self) {
        self.stop();
        let mut outcome = self.engine.join().unwrap().unwrap();
        assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
        assert_eq!(self.net.frames_away(&mut outcome), 0);
    }
}
