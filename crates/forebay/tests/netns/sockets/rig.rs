//! A TAP with sockets under test at one end, and the kernel at the other.

use std::net::{SocketAddr, UdpSocket};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay::net::{Addresses, Net, NetConfig, NetEngine, Stack};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::{Config, CpuThread, Outcome, Stopper};
use forebay_testkit::namespaces::{await_local_route, ip};

pub(crate) const OURS: &str = "10.9.0.2";
pub(crate) const OURS_V6: &str = "fd09::2";

/// Creates a TAP that is up, with addresses at the kernel's end, and the net over it.
pub(crate) fn over_tap(config: &NetConfig) -> (Net, NetEngine) {
    over_tap_by(&Config::live(), config)
}

/// As `over_tap`, with a given engine configuration.
pub(crate) fn over_tap_by(engine: &Config, config: &NetConfig) -> (Net, NetEngine) {
    let made = over_strange_tap(engine, config);
    // Without permanent entries, the kernel sends packets that waited for a neighbour out of order.
    for address in [OURS, OURS_V6] {
        ip(&format!("neigh replace {address} lladdr 02:00:00:00:00:02 dev skt nud permanent"));
    }
    made
}

/// As `over_tap_by`, with a kernel that does not know our link-layer address.
pub(crate) fn over_strange_tap(engine: &Config, config: &NetConfig) -> (Net, NetEngine) {
    let mut devices = [Device::open(&DeviceConfig::new("skt", Via::Tap)).unwrap()];
    ip("addr add 10.9.0.1/24 dev skt");
    ip("addr add fd09::1/64 dev skt nodad");
    ip("link set skt up");
    await_local_route("fd09::1");
    let own = [OURS, OURS_V6].map(|address| {
        let bits = if address == OURS { 24 } else { 64 };
        Addresses::parse_prefix(&format!("{address}/{bits}")).unwrap()
    });
    let own = Addresses::Own { mac: Some([2, 0, 0, 0, 0, 2]), addresses: own.to_vec() };
    let net = NetConfig { addresses: vec![own], ..config.clone() };
    Net::over(engine, &net, &mut devices).unwrap()
}

/// A running engine.
pub(crate) struct Running {
    stopper: Stopper,
    thread: JoinHandle<forebay_sys::Result<Outcome<Stack>>>,
}

impl Running {
    pub(crate) fn begin(engine: NetEngine) -> Self {
        Self::begin_with(engine, CpuThread::turn_to_the_end)
    }

    pub(crate) fn begin_with(
        engine: NetEngine,
        application: impl Fn(&mut CpuThread<Stack>) + Send + Sync + 'static,
    ) -> Self {
        let stopper = engine.stopper();
        Self { stopper, thread: thread::spawn(move || engine.run_with(application)) }
    }

    /// Ends the run, and checks that no frame is missing.
    pub(crate) fn end(self) -> Outcome<Stack> {
        self.stopper.stop();
        let outcome = self.thread.join().unwrap().unwrap();
        assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
        outcome
    }
}

/// A kernel socket connected to a socket under test.
pub(crate) fn client(to: SocketAddr) -> UdpSocket {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let client = UdpSocket::bind(any).unwrap();
    client.connect(to).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    client
}
