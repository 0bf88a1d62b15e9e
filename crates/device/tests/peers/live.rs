//! The driver against DPDK's testpmd as the device.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;
use std::time::{Duration, Instant};

use pcap_file::pcap::{PcapPacket, PcapReader, PcapWriter};

use crate::Test;
use crate::back_end::frames::datagram;
use crate::back_end::rig::{Pauses, Rig, Setup};
use crate::back_end::session::DEADLINE;
use crate::testpmd::Testpmd;

pub(crate) const TESTS: &[Test] = &[
    ("dpdk_device_sends_every_length", lengths),
    ("dpdks_device_sends_by_packed_rings", packed),
    ("dpdk_device_queue_pairs_without_commands", queue_pairs),
    ("dpdk_device_killed_comes_again", killed),
    ("dpdk_device_echoes", echoes),
];

/// Interval of polling.
const PAUSE: Duration = Duration::from_millis(1);

/// Waits until that many packets were delivered.
fn await_delivered(rig: &Rig, count: usize) {
    let began = Instant::now();
    while rig.delivered() < count {
        assert!(began.elapsed() < DEADLINE, "{} packets: {:?}", rig.delivered(), rig.facts);
        std::thread::sleep(PAUSE);
    }
}

/// Makes the device send frames of that length, and checks those received.
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
        // testpmd's datagrams go to port 9, with valid IP lengths.
        let ip_len = u16::from_be_bytes([delivered.bytes[16], delivered.bytes[17]]);
        assert_eq!((usize::from(ip_len), &delivered.bytes[36..38]), (len - 14, &[0, 9][..]));
    }
}

/// Waits until a started process has created its socket.
fn await_socket(path: &std::path::Path) {
    let began = Instant::now();
    while !path.exists() {
        assert!(began.elapsed() < DEADLINE, "testpmd makes no socket");
        std::thread::sleep(PAUSE);
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

/// The device offers `CTRL_VQ` but ignores commands: its queue pairs are used because they are
/// enabled.
fn queue_pairs() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dpdk.sock");
    let device = Testpmd::device(&path, 2, &["--forward-mode=txonly"]);
    await_socket(&path);
    let rig = Rig::start(&path, &Setup { queues: 2, ..Setup::usual() });
    let began = Instant::now();
    while rig.queues().len() < 2 {
        assert!(began.elapsed() < DEADLINE, "packets of {:?}: {:?}", rig.queues(), rig.facts);
        std::thread::sleep(Duration::from_millis(5));
    }
    let features = rig.fact("features");
    assert!(features.contains("ctrl_vq mq"), "{features}");
    assert_eq!((rig.fact("queues"), rig.sessions()), ("2".to_owned(), 1));
    rig.stop(None);
    drop(device);
}

fn killed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dpdk.sock");
    let rig = Rig::start(&path, &Setup::usual());
    let mut pauses = Pauses::default();
    for round in 1..=3 {
        let device = Testpmd::device(&path, 1, &["--forward-mode=txonly", "--txpkts=3000"]);
        let before = rig.delivered();
        await_socket(&path);
        let listening = Instant::now();
        await_delivered(&rig, before + 1);
        pauses.add(listening);
        await_delivered(&rig, before + 500);
        assert_eq!(rig.sessions(), round);
        drop(device);
        // A killed testpmd leaves its socket's file, and would not listen at an existing one.
        std::fs::remove_file(&path).unwrap();
    }
    pauses.print("starts of DPDK's device");
    rig.stop(None);
}

/// Packets go from a capture to the driver, back again, and into another capture.
fn echoes() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (path, from, to) = (at("dpdk.sock"), at("from.pcap"), at("to.pcap"));
    let frames = (0..).zip([60, 64, 300, 1000, 1514]).map(|(at, len)| datagram(at, len));
    let frames: Vec<_> = frames.collect();
    let mut writer = PcapWriter::new(File::create(&from).unwrap()).unwrap();
    for frame in &frames {
        let len = u32::try_from(frame.len()).unwrap();
        writer.write_packet(&PcapPacket::new(Duration::ZERO, len, frame)).unwrap();
    }
    drop(writer);
    let [from, to_name] = [&from, &to].map(|path| path.display());
    let capture = format!("net_pcap0,rx_pcap={from},tx_pcap={to_name},infinite_rx=1");
    let vdevs = [format!("net_vhost0,iface={},queues=1", path.display()), capture];
    let device = Testpmd::start(&vdevs, &["--forward-mode=io"]);
    await_socket(&path);
    let rig = Rig::start(&path, &Setup::usual().echoing());
    await_delivered(&rig, 5000);
    // A killed testpmd loses packets that it has not written.
    let began = Instant::now();
    while std::fs::metadata(&to).map_or(0, |file| file.len()) < 1 << 16 {
        assert!(began.elapsed() < DEADLINE, "nothing came back");
        std::thread::sleep(PAUSE);
    }
    rig.stop(None);
    drop(device);
    let mut reader = PcapReader::new(BufReader::new(File::open(&to).unwrap())).unwrap();
    let mut came = BTreeSet::new();
    // The last record may be truncated.
    while let Some(Ok(packet)) = reader.next_packet() {
        assert!(frames.iter().any(|frame| *frame == *packet.data), "{} bytes", packet.data.len());
        came.insert(packet.data.len());
    }
    assert_eq!(came.len(), frames.len(), "{came:?}");
}
