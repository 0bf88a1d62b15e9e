//! Many sockets, one after another and at once, in a process with few descriptors.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use forebay::net::{Net, NetConfig};
use forebay_testkit::namespaces;
use forebay_testkit::namespaces::{enter_new, trial};
use libtest_mimic::Trial;

use crate::parts::{self, Part, resident_kib};
use crate::sockets::rig::{OURS, OURS_V6, Running, client, over_tap};

/// Limit on descriptors, a little more than the engine needs.
const DESCRIPTORS: u64 = 256;
/// More than the descriptors, and more than fit in `GROWTH_KIB` if each leaked part of itself.
const SOCKETS: u32 = 20_000;
/// Allowance for growth of the process for other reasons.
const GROWTH_KIB: u64 = 16 << 10;

/// Memory that an idle socket may take.
const SOCKET_BYTES: u64 = 8 << 10;

const CLOSED: &str = "closed sockets";
const ALL: &str = "all sockets";

pub(crate) const PARTS: &[Part] = &[
    Part { name: CLOSED, descriptors: DESCRIPTORS, play: closed },
    Part { name: ALL, descriptors: DESCRIPTORS, play: all },
];

/// Trials, each in its own process: they measure the size of the process, and limit its
/// descriptors.
pub(crate) fn trials() -> Vec<Trial> {
    let missing = namespaces::missing(&["ip"]).or_else(namespaces::tun_missing);
    let trials = [
        ("promise_4_closed_sockets_leave_idle_cpus", CLOSED),
        ("promise_3_maximum_sockets_small_and_found", ALL),
    ];
    trials.map(|(name, part)| trial(name, missing.as_ref(), move || parts::run(part))).into()
}

/// Opens and closes sockets. CPUs that are idle, or have not started, keep nothing of closed
/// sockets; nor does a CPU that is busy with another socket.
fn closed() {
    enter_new();
    let (net, engine) = over_tap(&NetConfig::default());
    come_and_go(&net, "before the engine runs");
    let running = Running::begin(engine);
    come_and_go(&net, "while no packet comes");
    let socket = net.bind(format!("{OURS}:7")).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let sender = {
        let (is_over, client) = (Arc::clone(&is_over), client(socket.local_addr()));
        // A single flow: all other CPUs stay idle.
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

/// Binds every port of two addresses, up to the limit on sockets.
fn all() {
    enter_new();
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
