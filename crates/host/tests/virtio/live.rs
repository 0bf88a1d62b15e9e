//! DPDK's testpmd as the device.

use std::time::{Duration, Instant};

use crate::Test;
use crate::backend::DEADLINE;
use crate::rig::{Rig, Setup};
use crate::testpmd::Testpmd;

pub(crate) const TESTS: &[Test] = &[
    ("dpdks_device_sends_frames_of_every_length", lengths),
    ("dpdks_device_sends_by_packed_rings", packed),
    ("dpdks_device_is_killed_and_comes_again", killed),
    ("dpdks_device_sends_back_what_it_is_sent", echoes),
];

/// Waits until so many were delivered.
fn await_delivered(rig: &Rig, count: usize) {
    let began = Instant::now();
    while rig.delivered() < count {
        assert!(began.elapsed() < DEADLINE, "{} packets: {:?}", rig.delivered(), rig.facts);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Has the device send frames of that length, and judges those that came.
fn receives(setup: &Setup, len: usize, arguments: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dpdk.sock");
    let lens = format!("--txpkts={len}");
    let arguments = [&["--forward-mode=txonly"], arguments, &[lens.as_str()]].concat();
    let device = Testpmd::device(&path, 1, &arguments);
    await_socket(&path);
    let rig = Rig::start(&path, setup);
    await_delivered(&rig, 2000);
    let ended = rig.stop(None);
    drop(device);
    assert!(ended.drops.keys().all(|reason| *reason == "backlog_full"), "{:?}", ended.drops);
    for delivered in &ended.seen {
        assert_eq!(delivered.bytes.len(), len);
        // What testpmd calls a datagram: to port 9, its length as it should be.
        let ip_len = u16::from_be_bytes([delivered.bytes[16], delivered.bytes[17]]);
        assert_eq!((usize::from(ip_len), &delivered.bytes[36..38]), (len - 14, &[0, 9][..]));
    }
}

/// A socket is not there as soon as whoever makes it was started.
fn await_socket(path: &std::path::Path) {
    let began = Instant::now();
    while !path.exists() {
        assert!(began.elapsed() < DEADLINE, "testpmd makes no socket");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn lengths() {
    let large = ["--mbuf-size=65000", "--max-pkt-len=65000", "--total-num-mbufs=2048"];
    receives(&Setup::usual(), 64, &[]);
    receives(&Setup::usual(), 1500, &[]);
    receives(&Setup::usual(), 9000, &["--mbuf-size=9344"]);
    receives(&Setup::usual(), 62_000, &large);
}

fn packed() {
    receives(&Setup::usual().packed(true), 64, &[]);
    receives(&Setup::usual().packed(true), 9000, &["--mbuf-size=9344"]);
}

fn killed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dpdk.sock");
    let rig = Rig::start(&path, &Setup::usual());
    for round in 1..=3 {
        let device = Testpmd::device(&path, 1, &["--forward-mode=txonly", "--txpkts=3000"]);
        let before = rig.delivered();
        await_delivered(&rig, before + 500);
        assert_eq!(rig.sessions(), round);
        drop(device);
    }
    rig.stop(None);
}

/// It begins with one packet of its own: none is there without.
fn echoes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dpdk.sock");
    let arguments = ["--forward-mode=io", "--tx-first=8"];
    let device = Testpmd::device(&path, 1, &arguments);
    await_socket(&path);
    let rig = Rig::start(&path, &Setup::usual().echoing());
    await_delivered(&rig, 1);
    rig.stop(None);
    drop(device);
}
