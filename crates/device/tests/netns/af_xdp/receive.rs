//! Receiving packets from the kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use forebay_buf::pool::ChunkClass;
use forebay_device::{Device, DeviceConfig, XdpMode};
use forebay_rx::arrive::Polled;
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_sys::Error;
use forebay_testkit::namespaces::ip;

use crate::af_xdp::rig::{OURS, PATIENCE, Rig, config, far_socket, make_link, payload};

fn numbered(number: u32, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..len).map(|at| u8::try_from((at + number as usize) % 251).unwrap()).collect();
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes
}

fn number_of(payload: &[u8]) -> u32 {
    u32::from_be_bytes(*payload.first_chunk().unwrap())
}

fn come_as_sent(rig: &mut Rig) {
    let socket = far_socket();
    let mut expected = 0;
    let mut last = None;
    for burst in 0..40 {
        for number in burst * 100..(burst + 1) * 100 {
            socket.send(&numbered(number, 18 + number as usize * 7 % 1400)).unwrap();
        }
        rig.take_count(0, 100, |rig, packet| {
            assert_eq!(payload(&packet), numbered(expected, 18 + expected as usize * 7 % 1400));
            let Arrival(arrival) = packet.arrival;
            assert!(last.is_none_or(|last| arrival > last), "numbers rise");
            assert!(packet.timestamp_ns > 1_700_000_000_000_000_000);
            last = Some(arrival);
            expected += 1;
            rig.pools[0].put(packet.frame);
        });
    }
    assert_eq!((expected, rig.kernel_dropped), (4000, 0));
}

pub(crate) fn as_sent() {
    make_link(1, 1500);
    let mut rig = Rig::open(&config(1));
    come_as_sent(&mut rig);
    let facts = rig.device.facts.all();
    assert_eq!((facts["mode"].as_str(), facts["copy"].as_str()), ("native", "copy"));
}

pub(crate) fn generic() {
    make_link(1, 1500);
    let mut rig = Rig::open(&in_generic_mode());
    come_as_sent(&mut rig);
    assert_eq!(rig.device.facts.all()["mode"], "generic");
}

fn in_generic_mode() -> DeviceConfig {
    let mut config = config(1);
    config.xdp.mode = XdpMode::Generic;
    config
}

pub(crate) fn busy_polled() {
    make_link(1, 1500);
    let mut config = config(1);
    config.xdp.busy_poll = true;
    come_as_sent(&mut Rig::open(&config));
}

pub(crate) fn hashed() {
    make_link(1, 1500);
    let mut config = config(1);
    config.device_hash = true;
    let mut rig = Rig::open(&config);
    assert_eq!(rig.device.facts.all()["device_hash"], "yes");
    come_as_sent(&mut rig);

    // Stale bytes in front of a packet are not taken for its hash, although frames are reused.
    let sockets: Vec<_> = (0..16).map(|_| far_socket()).collect();
    let mut hashes = std::collections::BTreeMap::<_, std::collections::BTreeSet<_>>::new();
    for _ in 0..1000 {
        for socket in &sockets {
            socket.send(&[7; 18]).unwrap();
        }
        rig.take(0, |rig, packet| {
            let from = [packet.frame.data()[34], packet.frame.data()[35]];
            assert_ne!(packet.hash, FlowHash::NONE);
            hashes.entry(from).or_default().insert(packet.hash.0);
            rig.pools[0].put(packet.frame);
        });
    }
    assert_eq!(hashes.len(), 16, "by flow");
    assert!(hashes.values().all(|of_flow| of_flow.len() == 1), "{hashes:?}");
    let all: std::collections::BTreeSet<_> = hashes.values().flatten().collect();
    assert!(all.len() > 12, "flows are told apart: {all:?}");
}

/// Sends that many datagrams, and returns how many were received.
fn flood(rig: &mut Rig, count: u32) -> u64 {
    let socket = far_socket();
    for number in 0..count {
        socket.send(&numbered(number, 18)).unwrap();
    }
    let (mut came, mut last) = (0, None);
    rig.finish(0, |rig, packet| {
        let number = number_of(payload(&packet));
        assert!(last.is_none_or(|last| number > last), "in order");
        last = Some(number);
        came += 1;
        rig.pools[0].put(packet.frame);
    });
    came
}

pub(crate) fn overrun() {
    make_link(1, 1500);
    let mut rig = Rig::open(&config(1));
    let came = flood(&mut rig, 10_000);
    assert_eq!(came, 2048, "as many as the ring holds");
    assert_eq!(came + rig.kernel_dropped, 10_000);
    let counted: u64 = rig.device.counts[0].iter().map(|(_, count)| count).sum();
    assert_eq!(counted, 7952);
}

pub(crate) fn starved() {
    make_link(1, 1500);
    let mut rig = Rig::with_memory(&config(1), 0, &[]);
    let socket = far_socket();
    let (mut held, mut sent) = (Vec::new(), 0);
    // Until all frames are held, and some more.
    while held.len() < 4096 + 1024 + 1024 || sent < 20_000 {
        for _ in 0..64 {
            socket.send(&numbered(sent, 18)).unwrap();
        }
        sent += 64;
        let (packets, _) = rig.turn(0, false).unwrap();
        held.extend(packets);
    }
    let (_, polled) = rig.turn(0, false).unwrap();
    let looks_again = matches!(polled, Polled::BehindUntil { .. });
    assert!(looks_again, "nobody would wake it: {polled:?}");
    let all = held.len() as u64;
    held.drain(..).for_each(|packet| rig.pools[0].put(packet.frame));
    let more = flood(&mut rig, 100);
    assert_eq!(all + more + rig.kernel_dropped, u64::from(sent) + 100);
    assert!(rig.device.counts[0].iter().any(|(name, count)| name == "rx_dropped" && count > 0));
}

/// Sources opened and ended under load, repeatedly. In generic mode, because on removal of a native
/// program the kernel frees packets left in a veth's ring without counting them
/// (`veth_napi_del_range`).
pub(crate) fn ended() {
    make_link(1, 1500);
    let (mut came, mut dropped) = (0, 0);
    let is_over = Arc::new(AtomicBool::new(false));
    let (socket, until) = (far_socket(), Arc::clone(&is_over));
    let sender = std::thread::spawn(move || {
        let mut sent = 0u64;
        while !until.load(Ordering::Relaxed) {
            sent += u64::from(socket.send(&[7; 18]).is_ok());
        }
        sent
    });
    for round in 1..=30 {
        let mut rig = Rig::open(&in_generic_mode());
        while came < round * 1000 {
            let (packets, _) = rig.turn(0, false).unwrap();
            came += packets.len() as u64;
            packets.into_iter().for_each(|packet| rig.pools[0].put(packet.frame));
        }
        // Packets that arrive from now on are left to the kernel.
        rig.finish(0, |rig, packet| {
            came += 1;
            rig.pools[0].put(packet.frame);
        });
        dropped += rig.kernel_dropped;
        rig.sources.clear();
        assert_eq!(rig.pools[0].in_use(), 0);
    }
    is_over.store(true, Ordering::Relaxed);
    let sent = sender.join().unwrap();
    let kernels = kernel_received();
    assert!(kernels > 0);
    assert_eq!(came + dropped + kernels, sent, "{came} + {dropped} + {kernels}");
}

/// Returns the number of IPv4 packets that the kernel has received in this namespace.
fn kernel_received() -> u64 {
    let counted = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let mut lines = counted.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, counts) = (lines.next().unwrap(), lines.next().unwrap());
    let mut counts = names.split(' ').zip(counts.split(' '));
    counts.find(|(name, _)| *name == "InReceives").unwrap().1.parse().unwrap()
}

pub(crate) fn two_queues() {
    make_link(2, 1500);
    let mut rig = Rig::open(&config(2));
    let mut came = [0, 0];
    let mut numbers = std::collections::BTreeSet::new();
    for round in 1..=16 {
        // Each socket has another port, and so its packets another queue.
        let (socket, begun) = (far_socket(), Instant::now());
        for number in 0..50 {
            socket.send(&numbered(number, 100)).unwrap();
        }
        while came[0] + came[1] < 50 * round {
            assert!(begun.elapsed() < PATIENCE, "{came:?} have come");
            for (queue, came) in came.iter_mut().enumerate() {
                rig.take(queue, |rig, packet| {
                    assert_eq!(payload(&packet).len(), 100);
                    assert!(numbers.insert(packet.arrival.0), "no two have one number");
                    *came += 1;
                    // Each pool takes back frames of the other queue.
                    rig.pools[1 - queue].put(packet.frame);
                });
            }
        }
    }
    assert_eq!(came[0] + came[1], 800);
    assert!(came[0] > 0 && came[1] > 0, "{came:?}");
}

pub(crate) fn jumbo() {
    make_link(1, 9000);
    let larger = [ChunkClass { chunk_bytes: 12 << 10, chunks: 512 }];
    let mut rig = Rig::with_memory(&config(1), 4096, &larger);
    let socket = far_socket();
    let mut expected = 0;
    for burst in 0..20 {
        for number in burst * 20..(burst + 1) * 20 {
            socket.send(&numbered(number, 1000 + number as usize * 97 % 7900)).unwrap();
        }
        rig.take_count(0, 20, |rig, packet| {
            assert_eq!(payload(&packet), numbered(expected, 1000 + expected as usize * 97 % 7900));
            expected += 1;
            rig.pools[0].put(packet.frame);
        });
    }
    assert_eq!((expected, rig.kernel_dropped), (400, 0));
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

pub(crate) fn reopened() {
    make_link(1, 1500);
    let mut before = None;
    for _ in 0..20 {
        let mut rig = Rig::open(&config(1));
        let socket = far_socket();
        socket.send(&numbered(1, 30)).unwrap();
        let mut came = 0;
        rig.take_count(0, 1, |_, _| came += 1);
        assert_eq!(came, 1);
        // Dropped without a last poll, as if the run had failed.
        let Rig { device, sources, mut pools, .. } = rig;
        drop((device, sources));
        assert_eq!(pools[0].in_use(), 0);
        drop(socket);
        let _ = before.get_or_insert_with(open_files);
    }
    // Other tests open and close files meanwhile.
    assert!(open_files() <= before.unwrap() + 40, "{} files", open_files());
}

pub(crate) fn link_down() {
    make_link(1, 1500);
    let mut rig = Rig::open(&config(1));
    let socket = far_socket();
    let mut came = 0;
    for round in 1..=3 {
        // The far end notices the link only some time after it is up again.
        while came != round {
            socket.send(&numbered(round, 30)).unwrap();
            rig.take(0, |_, packet| came = number_of(payload(&packet)));
        }
        ip("link set xka down");
        std::thread::sleep(std::time::Duration::from_millis(20));
        rig.take(0, |_, _| panic!("nothing comes"));
        ip("link set xka up");
    }
}

pub(crate) fn deleted() {
    make_link(1, 1500);
    let mut rig = Rig::open(&config(1));
    far_socket().send(&numbered(1, 30)).unwrap();
    ip("link del xka");
    let ended = loop {
        match rig.turn(0, false) {
            Ok((_, polled)) => assert_ne!(polled, Polled::Exhausted),
            Err(error) => break error,
        }
    };
    let error = ended.downcast::<Error>().unwrap();
    assert!(matches!(*error, Error::DeviceGone { ref name } if name == OURS), "{error}");
    rig.sources.clear();
    assert_eq!(rig.pools[0].in_use(), 0);
}

pub(crate) fn refused() {
    assert!(matches!(Device::open(&config(1)), Err(Error::NoInterface { .. })));
    make_link(1, 1500);
    let _first = Rig::open(&config(1));
    let second = Device::open(&config(1)).unwrap_err();
    assert!(second.is_refusal(), "{second}");
}
