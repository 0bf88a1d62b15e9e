//! Many sockets, one after the other and at once, in a process that has few descriptors.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

#[path = "sockets/rig.rs"]
mod rig;

mod namespaces;

use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use forebay::net::{Net, NetConfig};
use libtest_mimic::Arguments;
use namespaces::trial_inside;
use nix::sys::resource::{Resource, setrlimit};
use rig::{OURS, Running, client, over_tap};

/// More than the engine needs.
const DESCRIPTORS: u64 = 256;
/// More than there are descriptors, and than fits in `GROWTH_KIB` if each leaves some of itself behind.
const SOCKETS: u32 = 20_000;
/// What a process may grow by for other reasons.
const GROWTH_KIB: u64 = 16 << 10;

fn main() {
    let arguments = Arguments::from_args();
    setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS, DESCRIPTORS).unwrap();
    let missing = namespaces::missing(&["ip"]).or_else(namespaces::tun_missing);
    let name = "promise_4_sockets_that_were_closed_leave_nothing_on_idle_cpus";
    let trials = vec![trial_inside(name, missing.as_ref(), closed)];
    libtest_mimic::run(&arguments, trials).exit();
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
