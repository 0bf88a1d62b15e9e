//! Many sockets, one after the other and at once, in a process that has few descriptors.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

#[path = "sockets/rig.rs"]
mod rig;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, thread};

use forebay::net::{Net, NetConfig};
use forebay_testkit::namespaces;
use forebay_testkit::namespaces::trial_inside;
use libtest_mimic::Arguments;
use nix::sys::resource::{Resource, setrlimit};
use rig::{OURS, OURS_V6, Running, client, over_tap};

/// More than the engine needs.
const DESCRIPTORS: u64 = 256;
/// More than there are descriptors, and than fits in `GROWTH_KIB` if each leaves some of itself behind.
const SOCKETS: u32 = 20_000;
/// Growth of a process for other reasons.
const GROWTH_KIB: u64 = 16 << 10;

/// Memory that a socket that has nothing to do may take.
const SOCKET_BYTES: u64 = 8 << 10;

fn main() {
    let arguments = Arguments::from_args();
    setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS, DESCRIPTORS).unwrap();
    let missing = namespaces::missing(&["ip"]).or_else(namespaces::tun_missing);
    // One after the other: they look at how large the process is.
    let arguments = Arguments { test_threads: Some(1), ..arguments };
    let trials = [
        ("promise_4_closed_sockets_leave_idle_cpus", closed as fn()),
        ("promise_3_maximum_sockets_small_and_found", all),
    ];
    let trials = trials.map(|(name, test)| trial_inside(name, missing.as_ref(), test));
    libtest_mimic::run(&arguments, trials.into()).exit();
}

/// CPUs that have nothing to do, or have not even begun, learn nothing of sockets that come and go; one
/// that is busy with another socket neither.
fn closed() {
    let (net, engine) = over_tap(&NetConfig::default());
    come_and_go(&net, "before the engine runs");
    let running = Running::begin(engine);
    come_and_go(&net, "while no packet comes");
    let socket = net.bind(format!("{OURS}:7")).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let sender = {
        let (is_over, client) = (Arc::clone(&is_over), client(socket.local_addr()));
        // One flow: all other CPUs have nothing to do.
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                client.send(b"something").unwrap();
                thread::yield_now();
            }
        })
    };
    let reader = thread::spawn(move || while socket.recv(&mut [0; 16]).is_ok() {});
    come_and_go(&net, "while one CPU is busy");
    is_over.store(true, Ordering::Relaxed);
    sender.join().unwrap();
    let mut outcome = running.end();
    reader.join().unwrap();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// Every port of two addresses, as far as there are sockets.
fn all() {
    let (net, engine) = over_tap(&NetConfig::default());
    let running = Running::begin(engine);
    let before = resident_kib();
    let places =
        || [OURS_V6, OURS].into_iter().flat_map(|own| (1..=u16::MAX).map(move |port| (own, port)));
    let mut sockets: Vec<_> = places().map(|place| net.bind(place).unwrap()).collect();
    let group = || net.socket().reuse_port().bind("239.0.0.1:7");
    sockets.extend((sockets.len()..Net::SOCKETS_MAX).map(|_| group().unwrap()));
    let refused = group().unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(nix::libc::EMFILE));
    let each = (resident_kib() - before) * 1024 / Net::SOCKETS_MAX as u64;
    assert!(each <= SOCKET_BYTES, "{each} bytes each");
    for socket in sockets.iter().take(2 * usize::from(u16::MAX)).step_by(997) {
        let client = client(socket.local_addr());
        client.send(&socket.local_addr().port().to_be_bytes()).unwrap();
        let mut buffer = [0; 4];
        assert_eq!(socket.recv(&mut buffer).unwrap(), 2);
        assert_eq!(buffer[..2], socket.local_addr().port().to_be_bytes());
    }
    drop(sockets);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

fn come_and_go(net: &Net, when: &str) {
    let round = |sockets| {
        for number in 0..sockets {
            let socket = net.bind("0.0.0.0:0").unwrap_or_else(|error| panic!("{when}: {error}"));
            if number % 4 == 0 {
                socket.as_fd();
            }
        }
    };
    round(1000);
    let before = resident_kib();
    round(SOCKETS);
    let after = resident_kib();
    assert!(after <= before + GROWTH_KIB, "{when}: from {before} to {after} KiB");
}

fn resident_kib() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4
}
