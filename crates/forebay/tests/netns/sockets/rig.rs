//! A TAP with sockets of ours at its device's end, and the kernel at the other.

use std::net::{SocketAddr, UdpSocket};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay::net::{Addresses, Net, NetConfig, NetEngine, Stack};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::{Config, CpuThread, Outcome, Stopper};
use forebay_testkit::namespaces::ip;

pub(crate) const OURS: &str = "10.9.0.2";
pub(crate) const OURS_V6: &str = "fd09::2";

/// A TAP that is up, the kernel's end of it with addresses, and sockets to be.
pub(crate) fn over_tap(config: &NetConfig) -> (Net, NetEngine) {
    over_tap_by(&Config::live(), config)
}

/// The same by an engine like this.
pub(crate) fn over_tap_by(engine: &Config, config: &NetConfig) -> (Net, NetEngine) {
    let made = over_strange_tap(engine, config);
    // What waits for a neighbour, the kernel sends beside what comes after it.
    for address in [OURS, OURS_V6] {
        ip(&format!("neigh replace {address} lladdr 02:00:00:00:00:02 dev skt nud permanent"));
    }
    made
}

/// The same with a kernel that does not know our link address.
pub(crate) fn over_strange_tap(engine: &Config, config: &NetConfig) -> (Net, NetEngine) {
    let mut devices = [Device::open(&DeviceConfig::new("skt", Via::Tap)).unwrap()];
    ip("addr add 10.9.0.1/24 dev skt");
    ip("addr add fd09::1/64 dev skt nodad");
    ip("link set skt up");
    let own = [OURS, OURS_V6].map(|address| {
        let bits = if address == OURS { 24 } else { 64 };
        Addresses::parse_prefix(&format!("{address}/{bits}")).unwrap()
    });
    let own = Addresses::Own { mac: Some([2, 0, 0, 0, 0, 2]), addresses: own.to_vec() };
    let net = NetConfig { addresses: vec![own], ..config.clone() };
    Net::over(engine, &net, &mut devices).unwrap()
}

/// An engine at work, until it is stopped.
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

    /// Ends it. No frame may be missing.
    pub(crate) fn end(self) -> Outcome<Stack> {
        self.stopper.stop();
        let outcome = self.thread.join().unwrap().unwrap();
        assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
        outcome
    }
}

/// A socket of the kernel's that talks to one of ours.
pub(crate) fn client(to: SocketAddr) -> UdpSocket {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let client = UdpSocket::bind(any).unwrap();
    client.connect(to).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    client
}
