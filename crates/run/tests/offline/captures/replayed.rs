//! Captures through the whole path, damaged ones too, and the captures that are written of them.

use std::fs;
use std::num::NonZeroU16;
use std::path::Path;

use forebay_device::pcap::{Capture, MAX_BLOCK_BYTES, ReplayPlan};
use forebay_device::synthetic::stamped_udp;
use forebay_device::{MAX_RECORD_BYTES, Rate};
use forebay_run::replay::{Input, Mode, Replay, ReplayConfig};
use forebay_rx::CpuId;
use forebay_sys::cpu_list::CpuList;
use proptest::prelude::*;

use super::*;
use crate::captures::bytes::{
    Order, SLL, SLL2, enhanced, gzip, interface, pcap, record, section, simple, tsresol,
};
use crate::replays::{directory, plan, run};

fn replay(file: &Path, rate: Rate, loops: u64) -> ReplayConfig {
    let captures = vec![Capture::File(file.to_owned())];
    let input = Input::Captures(ReplayPlan { captures, loops, rate });
    plan([CpuId(0), CpuId(1)], input, Mode::Stepped { seed: 1 })
}

/// One capture of each format.
fn seeds() -> Vec<Vec<u8>> {
    let classic = |order| {
        let frames: Vec<u8> =
            (1..9).flat_map(|second| record(order, second, 80, &udp(second))).collect();
        pcap(order, 1, &frames)
    };
    let pcapng = |order| {
        let packet = |at: u32| enhanced(order, at % 3, u64::from(at) * 1_000_000, 80, &udp(at));
        let packets: Vec<u8> = (0..9).flat_map(packet).collect();
        [
            section(order),
            interface(order, 1, 0, &[]),
            interface(order, 101, 0, &[tsresol(order, 9)]),
            interface(order, 195, 0, &[order.option(14, &order.u64(5))]),
            packets,
            simple(order, 40, &udp(1)),
        ]
        .concat()
    };
    let mut seeds = vec![];
    for order in [Order::Little, Order::Big] {
        seeds.extend([classic(order), pcapng(order), cooked(order, 113), cooked(order, 276)]);
        seeds.push(behind_families(order));
    }
    seeds
}

/// Captures as `tcpdump -i any` writes them: IP, ARP and frames without a type by turns.
fn cooked(order: Order, link_type: u32) -> Vec<u8> {
    let protocols = [[0x08, 0x00], [0x08, 0x06], [0x86, 0xdd], [0x00, 0x04]];
    let packet = |(second, [high, low]): (u32, [u8; 2])| {
        let (mut header, at) = match link_type {
            113 => (SLL.to_vec(), 14),
            _ => (SLL2.to_vec(), 0),
        };
        header[at..at + 2].copy_from_slice(&[high, low]);
        record(order, second, 96, &[&header, &udp(second)[14..]].concat())
    };
    pcap(order, link_type, &(1..).zip(protocols).flat_map(packet).collect::<Vec<_>>())
}

/// Packets of loop-back devices of several systems.
fn behind_families(order: Order) -> Vec<u8> {
    let families = [2, 10, 24, 28, 30, 7].into_iter().flat_map(|family: u32| {
        let packet = [&family.to_be_bytes(), &udp(family)[14..]].concat();
        let packets = [0, 1].map(|interface| enhanced(order, interface, 0, 60, &packet));
        packets.concat()
    });
    let interfaces = [0, 108].map(|link| interface(order, link, 0, &[]));
    [section(order), interfaces.concat(), families.collect()].concat()
}

fn udp(flow: u32) -> Vec<u8> {
    stamped_udp(flow, 0, 18, false)
}

/// Damage to a file at a random place.
#[derive(Clone, Debug)]
enum Mishap {
    Flip(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
}

fn mishap() -> impl Strategy<Value = Mishap> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        6 => (at(), 0..8u8).prop_map(|(at, bit)| Mishap::Flip(at, 1 << bit)),
        1 => at().prop_map(Mishap::Cut),
        1 => (at(), prop::collection::vec(any::<u8>(), 1..40))
            .prop_map(|(at, bytes)| Mishap::Insert(at, bytes)),
    ]
}

fn suffer(mut file: Vec<u8>, mishaps: &[Mishap]) -> Vec<u8> {
    for mishap in mishaps {
        match mishap {
            _ if file.is_empty() => break,
            Mishap::Flip(at, bits) => *at.get_mut(&mut file) ^= bits,
            Mishap::Cut(at) => file.truncate(at.index(file.len())),
            Mishap::Insert(at, bytes) => {
                let at = at.index(file.len());
                file.splice(at..at, bytes.iter().copied());
            }
        }
    }
    file
}

fn damaged() -> impl Strategy<Value = Vec<u8>> {
    let mishaps = prop::collection::vec(mishap(), 0..6);
    (prop::sample::select(seeds()), mishaps).prop_map(|(file, mishaps)| suffer(file, &mishaps))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn promise_5_damaged_capture_ends(file in damaged()) {
        let reading = read(&file);
        let captured: usize = reading.records.iter().map(|record| record.bytes.len()).sum();
        prop_assert!(reading.records.len() * 16 + captured <= file.len());
        prop_assert!(reading.asked_bytes <= MAX_BLOCK_BYTES as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn packed_capture_reads_as_plain(file in damaged(), at in any::<prop::sample::Index>()) {
        let plain = read(&file);
        let (first, second) = file.split_at(at.index(file.len() + 1));
        for packed in [gzip(&file), [gzip(first), gzip(second)].concat()] {
            let unpacked = read(&packed);
            prop_assert_eq!(&unpacked.records, &plain.records);
            prop_assert_eq!(unpacked.damage.records, plain.damage.records);
            prop_assert_eq!(&unpacked.unread, &plain.unread);
            prop_assert_eq!(unpacked.error.is_some(), plain.error.is_some());
        }
    }

    #[test]
    fn promise_5_damaged_packed_capture_ends(
        file in damaged(),
        mishaps in prop::collection::vec(mishap(), 1..4),
    ) {
        let packed = suffer(gzip(&file), &mishaps);
        // The number of records before the damage depends on how much is unpacked at once.
        let (whole, trickled) = (read_by(usize::MAX, &packed), read_by(5, &packed));
        let both = whole.records.len().min(trickled.records.len());
        prop_assert_eq!(&whole.records[..both], &trickled.records[..both]);
        prop_assert!(whole.asked_bytes <= MAX_BLOCK_BYTES as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn promise_2_and_5_hold_in_replay_of_damaged_capture(file in damaged()) {
        let reading = read(&file);
        let read = reading.records.len() as u64;
        let is_read = reading.records.iter().any(|record| record.link.is_some());
        let directory = directory("damaged");
        let path = directory.join("damaged.pcap");
        fs::write(&path, &file).unwrap();
        let mut plan = replay(&path, Rate::Capture, 2);
        plan.write_pcap = Some(directory);
        if !is_read && reading.error.is_some() {
            prop_assert!(Replay::open(plan).is_err(), "nothing of it is replayed");
            return Ok(());
        }
        let report = run(plan);
        let link_types: u64 = report.unread_link_types.values().sum();
        prop_assert_eq!(link_types, report.path.dropped["link_type"]);
        let passes = if reading.error.is_some() { 1 } else { 2 };
        prop_assert_eq!(report.path.packets_in, passes * read);
        prop_assert_eq!(report.damaged_records, passes * reading.damage.records);
        prop_assert_eq!(report.error.is_some(), reading.error.is_some());
    }
}

/// Two captures with 60 unread link types each, and one packet.
#[test]
fn promise_3_unread_types_of_source_limited() {
    let (order, directory) = (Order::Little, directory("types"));
    let captures = [300_u16, 360].map(|first| {
        let lost = |number: u16| {
            let described = interface(order, first + number, 0, &[]);
            [described, enhanced(order, number.into(), 0, 4, b"lost")].concat()
        };
        let read = [interface(order, 1, 0, &[]), enhanced(order, 60, 0, 80, &udp(1))].concat();
        let path = directory.join(format!("{first}.pcapng"));
        let file = [section(order), (0..60).flat_map(lost).collect(), read].concat();
        fs::write(&path, file).unwrap();
        Capture::File(path)
    });
    let captures = ReplayPlan { captures: captures.to_vec(), loops: 2, rate: Rate::Max };
    let report = run(plan([CpuId(0)], Input::Captures(captures), Mode::Stepped { seed: 1 }));
    let counts = report.unread_link_types;
    assert_eq!((counts.len(), counts.values().sum::<u64>()), (65, 240), "{counts:?}");
    assert_eq!((counts["300"], counts["363"], counts["others"]), (2, 2, 112));
}

#[test]
fn packed_captures_fit_memory_limit() {
    let path = directory("packed").join("packed.gz");
    let order = Order::Little;
    let frames: Vec<u8> = (1..2000).flat_map(|second| record(order, second, 60, &udp(1))).collect();
    let plain = pcap(order, 1, &frames);
    fs::write(&path, gzip(&plain)).unwrap();
    let len_bytes = plain.len() as u64;
    for (room_bytes, fits) in [(len_bytes, true), (len_bytes - 1, false), (u64::MAX, true)] {
        let mut left_bytes = room_bytes;
        let capture = Capture::File(path.clone()).kept(&mut left_bytes);
        assert_eq!(matches!(capture, Capture::Kept(..)), fits, "{room_bytes}");
        assert_eq!(room_bytes - left_bytes, if fits { len_bytes } else { 0 });
        assert_eq!(capture.len_bytes(), fits.then_some(len_bytes));
        let mut records = Vec::new();
        read_records(&mut capture.open().unwrap(), &mut records).unwrap();
        assert_eq!(records.len(), 1999);
    }
    let report = run(replay(&path, Rate::Max, 3));
    assert_eq!(report.path.delivered, 3 * 1999);
}

#[test]
fn promise_5_any_timestamps_replay() {
    let path = directory("times").join("times.pcapng");
    let order = Order::Little;
    let interface = interface(order, 1, 0, &[tsresol(order, 9)]);
    let times =
        [0, u64::MAX, 5, u64::MAX - 1, 1 << 63].map(|at| enhanced(order, 0, at, 60, &udp(1)));
    fs::write(&path, [section(order), interface, times.concat()].concat()).unwrap();
    let mut plan = replay(&path, Rate::Capture, 3);
    plan.work_ns = 1000;
    plan.queues = NonZeroU16::new(2).unwrap();
    let report = run(plan);
    assert_eq!((report.path.packets_in, report.path.delivered), (15, 15));
}

#[test]
fn promise_2_impossible_frames_drop_by_name() {
    let path = directory("refused").join("refused.pcapng");
    let order = Order::Little;
    let fits = vec![0xaa; MAX_RECORD_BYTES as usize];
    // Chunks are whole pages.
    let oversize = vec![0xaa; MAX_RECORD_BYTES as usize + 4096];
    for (bytes, link, reason) in
        [(&fits, 1, None), (&oversize, 1, Some("oversize")), (&fits, 195, Some("link_type"))]
    {
        let packets = [
            enhanced(order, 0, 1, 60, &udp(1)),
            enhanced(order, 1, 2, 400_000, bytes),
            enhanced(order, 0, 3, 60, &udp(1)),
        ];
        let interfaces = [interface(order, 1, 0, &[]), interface(order, link, 0, &[])];
        let file = [section(order), interfaces.concat(), packets.concat()].concat();
        fs::write(&path, file).unwrap();
        let report = run(replay(&path, Rate::Max, 1));
        let refused = u64::from(reason.is_some());
        assert_eq!((report.path.packets_in, report.path.bytes_in), (3, 400_120), "{reason:?}");
        assert_eq!((report.path.delivered, report.path.dropped_in_all()), (3 - refused, refused));
        assert!(
            reason.is_none_or(|reason| report.path.dropped[reason] == 1),
            "{:?}",
            report.path.dropped
        );
    }
}

#[test]
fn capture_round_trips() {
    let directory = directory("written");
    let path = directory.join("mixed.pcapng");
    let order = Order::Little;
    let jumbo = vec![0xaa; MAX_RECORD_BYTES as usize];
    let file = [
        section(order),
        interface(order, 1, 0, &[tsresol(order, 9)]),
        interface(order, 229, 0, &[tsresol(order, 9)]),
        enhanced(order, 0, 7, 60, &udp(1)),
        enhanced(order, 1, 8, 41, &udp(2)[14..]),
        enhanced(order, 0, 1_700_000_000_123_456_789, 9000, &udp(3)[..50]),
        enhanced(order, 0, (1 << 32) * SECOND_NS - 1, MAX_RECORD_BYTES, &jumbo),
        enhanced(order, 0, 9, 0, b""),
    ];
    fs::write(&path, file.concat()).unwrap();
    let mut plan = replay(&path, Rate::Max, 1);
    plan.engine.rps_cpus = Some(CpuList::default());
    plan.write_pcap = Some(directory.clone());
    run(plan);
    let (ip, ethernet): (Vec<_>, Vec<_>) =
        read_whole(&file.concat()).into_iter().partition(|kept| kept.link == Some(Link::Ip));
    for (name, expected) in [("cpu0.pcap", ethernet), ("cpu0-ip.pcap", ip)] {
        assert_eq!(read_whole(&fs::read(directory.join(name)).unwrap()), expected);
    }
    assert!(!directory.join("cpu1.pcap").exists());
}

#[test]
fn late_time_is_clamped() {
    let directory = directory("beyond");
    let path = directory.join("beyond.pcapng");
    let order = Order::Big;
    let interface = interface(order, 1, 0, &[tsresol(order, 9)]);
    let beyond = enhanced(order, 0, u64::MAX, 60, &udp(1));
    fs::write(&path, [section(order), interface, beyond].concat()).unwrap();
    let mut plan = replay(&path, Rate::Max, 1);
    plan.engine.rps_cpus = Some(CpuList::default());
    plan.write_pcap = Some(directory.clone());
    run(plan);
    let written = read_whole(&fs::read(directory.join("cpu0.pcap")).unwrap());
    let last_ns = (1 << 32) * SECOND_NS - 1;
    assert_eq!(written, [kept(&udp(1), 60, last_ns, Link::Ethernet)]);
}
