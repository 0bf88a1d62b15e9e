//! Tests of the transmit side against a device that reassembles what it reads.

mod rig;
mod wire;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use forebay_rx::coalesce::cut;
use forebay_rx::coalesce::gso::{GSO_NONE, VirtioNetHdr};
use forebay_rx::parse::Link;
use forebay_rx::sink::Sink;
use forebay_sys::virtio::reference::ReferenceDevice;
use proptest::prelude::*;
use proptest::sample::select;
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT,
};

use self::rig::Rig;
use self::wire::{FLOWS, Flow, cut_by_header, frame, segments};
use super::*;

/// All transmit offloads that a device can offer.
const ALL: [u32; 5] = [
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
    VIRTIO_NET_F_HOST_USO,
];

#[test]
fn plain_packet_gets_empty_vnet_header() {
    let slot = SLOT_BYTES as usize;
    let lens = [14, 60, 1514, slot - 21, slot - 20, slot - 12, slot - 11, 9018, 65_535 + 14];
    for layout in [&[][..], &[VIRTIO_F_RING_PACKED]] {
        for header in [&[][..], &[VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT]] {
            let mut rig = Rig::new(64);
            rig.begin(&[layout, header].concat(), None);
            for len in lens {
                let packet = rig.packet(&frame(len));
                rig.hand(0, [packet]);
                assert_eq!(rig.sent(), [(VirtioNetHdr::default(), frame(len))], "{len}");
            }
            let counters = rig.counters(0);
            let bytes = lens.iter().sum::<usize>() as u64;
            let expected = (lens.len() as u64, lens.len() as u64, bytes);
            assert_eq!((counters.packets(), counters.frames(), counters.bytes()), expected);
            for len in lens.into_iter().filter(|&len| len > 100) {
                let packet = rig.packet(&frame(len));
                let packet = rig.in_pieces(packet);
                rig.hand(0, [packet]);
                assert_eq!(rig.sent(), [(VirtioNetHdr::default(), frame(len))], "{len}");
            }
            rig.pool.flush();
            assert_eq!(rig.buffers.away_blocks(), 0);
            assert_eq!(rig.pool.in_use(), 0);
        }
    }
}

#[test]
fn device_cuts_merged_packet_as_merged() {
    for flow in FLOWS {
        for (count, size) in [(3, 100), (2, 1448), (7, 1399), (44, 1448)] {
            let frames = segments(flow, count, size);
            let mut rig = Rig::new(64);
            rig.begin(&ALL, Some(1520));
            let whole = rig.whole(&frames);
            let packets = [rig.merged(&frames), rig.in_pieces(whole), rig.whole(&frames)];
            rig.hand(0, packets);
            let sent = rig.sent();
            assert_eq!(sent.len(), 3);
            for (header, bytes) in sent {
                assert_ne!(header.gso_type, GSO_NONE, "{flow:?}");
                assert_eq!(cut_by_header(header, &bytes), frames, "{flow:?} {count} of {size}");
            }
            let counters = rig.counters(0);
            assert_eq!((counters.packets(), counters.frames()), (3, 3 * u64::from(count)));
            // The software that cuts for other devices produces the same segments.
            let (whole, mut segments) = (rig.whole(&frames), Vec::new());
            cut(whole, &mut rig.pool, &mut segments).unwrap();
            let bytes: Vec<_> = segments.iter().map(|segment| segment.frame.data()).collect();
            assert_eq!(bytes, frames);
        }
    }
}

#[test]
fn uncut_by_device_is_cut_before() {
    let without = |left_out: u32| ALL.into_iter().filter(move |&bit| bit != left_out);
    for flow in FLOWS {
        let needed = match flow {
            Flow::Tcp4 => VIRTIO_NET_F_HOST_TSO4,
            Flow::Tcp6 => VIRTIO_NET_F_HOST_TSO6,
            Flow::Tcp4Cwr => VIRTIO_NET_F_HOST_ECN,
            Flow::Udp4 | Flow::Udp6 => VIRTIO_NET_F_HOST_USO,
        };
        let frames = segments(flow, 5, 700);
        for left_out in [needed, VIRTIO_NET_F_CSUM] {
            let mut rig = Rig::new(64);
            rig.begin(&without(left_out).collect::<Vec<_>>(), None);
            let whole = rig.whole(&frames);
            let packets = [rig.merged(&frames), rig.in_pieces(whole)];
            rig.hand(0, packets);
            let (headers, bytes): (Vec<_>, Vec<_>) = rig.sent().into_iter().unzip();
            assert!(headers.iter().all(|header| *header == VirtioNetHdr::default()));
            assert_eq!(bytes, [&frames[..], &frames[..]].concat(), "{flow:?}");
            let counters = rig.counters(0);
            assert_eq!((counters.packets(), counters.frames()), (2, 10));
            assert_eq!(rig.pool.in_use(), 0);
        }
    }
    // The ring has too few descriptors for the whole packet.
    let frames = segments(Flow::Tcp4, 40, 1448);
    let mut rig = Rig::new(16);
    rig.begin(&ALL, None);
    let merged = rig.merged(&frames);
    rig.hand(0, [merged]);
    assert_eq!(rig.sent().into_iter().map(|sent| sent.1).collect::<Vec<_>>(), frames);
    assert_eq!((rig.counters(0).packets(), rig.counters(0).frames()), (1, 40));
}

/// No header of virtio's tells of it, so no device may get it as one.
#[test]
fn lro_t5_merged_tunnel_is_cut_before() {
    let mut rig = Rig::new(64);
    rig.begin(&ALL, None);
    let payloads = forebay_testkit::packets::vxlan_payloads(5);
    let (frames, merged) = forebay_testkit::packets::merged_vxlan(&payloads, Link::Ethernet);
    rig.hand(0, [merged]);
    let (headers, bytes): (Vec<_>, Vec<_>) = rig.sent().into_iter().unzip();
    assert_eq!(headers, [VirtioNetHdr::default(); 5]);
    assert_eq!(bytes, frames);
    assert_eq!((rig.counters(0).packets(), rig.counters(0).frames()), (1, 5));
}

#[test]
fn promise_2_unsendable_packets_drop_by_name() {
    let mut rig = Rig::new(16);
    rig.begin(&ALL, Some(1500));
    let mut no_link = rig.packet(&frame(100));
    no_link.headers.link = Link::Ip;
    let mut tagged = frame(1518);
    tagged[12..14].copy_from_slice(&[0x81, 0]);
    let jumbo_segments = segments(Flow::Tcp4, 3, 1461);
    let packets = [
        no_link,
        rig.packet(&frame(1515)),
        rig.packet(&frame(1514)),
        rig.packet(&tagged),
        rig.merged(&jumbo_segments),
        rig.packet(&frame(40_000)),
    ];
    rig.hand(0, packets);
    let sent: Vec<_> = rig.sent().into_iter().map(|sent| sent.1).collect();
    assert_eq!(sent, [frame(1514), tagged]);
    let dropped = |reason| rig.counters(0).dropped(reason);
    assert_eq!((dropped(SendDrop::LinkHeader), dropped(SendDrop::TooLong)), (1, 3));
    // Without an MTU of the device, only the ring limits the length.
    rig.begin(&ALL, None);
    let packets = [rig.packet(&frame(16 * 2048 - 11)), rig.packet(&frame(16 * 2048 - 12))];
    rig.hand(0, packets);
    assert_eq!(rig.sent().len(), 1);
    assert_eq!(rig.counters(0).dropped(SendDrop::TooLong), 4);
    assert_eq!(rig.pool.in_use(), 0);
}

/// A session begins while packets are dropped for want of one, and a CPU that has seen it sends at once.
#[test]
fn promise_2_beginning_session_loses_no_packet() {
    for old in 0..3 {
        let mut rig = Rig::new(64);
        let mut packets: Vec<_> = (0..=old).map(|_| rig.packet(&frame(60))).collect();
        let new = packets.drain(old..).collect::<Vec<_>>();
        rig.hand(0, packets);
        let (sender, has_begun) = (RefCell::new((&mut rig.sinks[1], new)), Cell::new(false));
        let is_down = || {
            let is_down = !has_begun.replace(true);
            if is_down {
                let (sink, new) = &mut *sender.borrow_mut();
                sink.send(new).unwrap();
            }
            is_down
        };
        let dropped = rig.transmit.step(&mut rig.pool, is_down).count;
        assert_eq!(dropped, old.min(1), "those taken before it began");
        let _ = is_down();
        rig.begin(&[], None);
        assert_eq!(rig.sent().len(), old + 1 - dropped);
    }
}

#[test]
fn promise_3_stalled_device_backs_up_to_senders() {
    let mut rig = Rig::new(16);
    rig.begin(&[virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX], None);
    let mut left = 0;
    for _ in 0..30 {
        let packets: Vec<_> = (0..60).map(|_| rig.packet(&frame(60))).collect();
        left += rig.hand(0, packets) as u64;
        rig.step();
    }
    let waiting = rig.handed[0] - left - 16;
    // In the lane, taken out of the lane at once, and next in line.
    assert!(waiting <= 1024 + 64 + 1, "{waiting}");
    assert_eq!(rig.counters(0).dropped(SendDrop::Full), left);
    assert!(!rig.transmit.has_work(), "nothing can be done");
    assert!(rig.transmit.is_sending());
    let first = rig.got().unwrap();
    rig.give(first.id);
    assert!(rig.device.as_mut().unwrap().calls(), "the driver waits for that");
    assert!(rig.transmit.has_work());
    assert_eq!(rig.step().count, 1);
    let second = rig.got().unwrap();
    rig.give(second.id);
    assert!(!rig.device.as_mut().unwrap().calls(), "the driver is awake");
    assert_eq!(rig.sent().len() as u64, waiting + 14);
    assert!(!rig.transmit.has_work() && !rig.transmit.is_sending());
    assert_eq!(rig.counters(0).packets() + left, rig.handed[0]);
}

/// The device has the ring until it has stopped, and takes what was posted.
#[test]
fn vq_11_dropped_source_leaves_the_ring() {
    for layout in [&[][..], &[VIRTIO_F_RING_PACKED]] {
        let mut rig = Rig::new(16);
        rig.begin(layout, None);
        let packets: Vec<_> = (0..3).map(|_| rig.packet(&frame(60))).collect();
        rig.hand(0, packets);
        assert_eq!(rig.step().count, 3);
        assert!(rig.got().is_some());
        let Rig { transmit, sinks, device, _memory, .. } = rig;
        drop(transmit);
        assert_eq!(sinks[0].counters().dropped(SendDrop::Down), 3);
        let mut device = device.unwrap();
        assert_eq!(std::iter::from_fn(|| device.take()).count(), 2);
    }
}

/// The device uses all buffers of a large ring at once.
#[test]
fn promise_3_turn_checks_bounded_sent() {
    for layout in [&[][..], &[VIRTIO_F_RING_PACKED]] {
        let mut rig = Rig::new(4096);
        rig.begin(layout, None);
        let count = 2048;
        for _ in 0..8 {
            let packets: Vec<_> = (0..256).map(|_| rig.packet(&frame(60))).collect();
            assert_eq!((rig.hand(0, packets), rig.step().count), (0, 256));
        }
        let got: Vec<_> = std::iter::from_fn(|| rig.got()).collect();
        assert_eq!(got.len(), count);
        got.iter().for_each(|got| rig.give(got.id));
        for turn in 1..=count / COMPLETIONS_MAX {
            assert_eq!(rig.step(), TransmitStep::default());
            assert_eq!(rig.counters(0).packets(), (turn * COMPLETIONS_MAX) as u64);
            assert!(rig.transmit.has_work(), "that it has looked at all is not known yet");
        }
        assert_eq!(rig.step(), TransmitStep::default());
        assert!(!rig.transmit.has_work() && !rig.transmit.is_sending());
        // The end of a session processes all entries.
        let packets: Vec<_> = (0..256).map(|_| rig.packet(&frame(60))).collect();
        rig.hand(0, packets);
        rig.step();
        let got: Vec<_> = std::iter::from_fn(|| rig.got()).collect();
        got.iter().for_each(|got| rig.give(got.id));
        rig.begin(layout, None);
        assert_eq!(rig.counters(0).packets(), count as u64 + 256);
    }
}

#[test]
fn promise_5_violation_shuts_queue_until_session() {
    for layout in [&[][..], &[VIRTIO_F_RING_PACKED]] {
        let lies: [fn(&mut Rig, u16); 3] = [
            |rig, _| rig.device.as_mut().unwrap().give_bad(63),
            |rig, first| {
                rig.give(first);
                rig.device.as_mut().unwrap().give_bad(first);
            },
            |rig, _| rig.device.as_mut().unwrap().give_bad(u16::MAX),
        ];
        for lie in lies {
            let mut rig = Rig::new(64);
            rig.begin(layout, None);
            let packets = [rig.packet(&frame(3000)), rig.packet(&frame(60))];
            rig.hand(0, packets);
            assert_eq!(rig.step().count, 2);
            let first = rig.got().unwrap();
            rig.got().expect("the second one");
            lie(&mut rig, first.id);
            let why = rig.step().lie.expect("it was found out");
            assert!(!why.why.is_empty());
            let packet = rig.packet(&frame(60));
            rig.hand(0, [packet]);
            assert_eq!(
                rig.step(),
                TransmitStep { count: 1, ..TransmitStep::default() },
                "nothing is sent"
            );
            assert_eq!(rig.got(), None);
            rig.begin(layout, None);
            let packet = rig.packet(&frame(61));
            rig.hand(0, [packet]);
            assert_eq!(rig.sent().len(), 1, "and now it is");
            let counters = rig.counters(0);
            assert_eq!(counters.packets() + counters.dropped(SendDrop::Down), 4);
            assert_eq!(rig.transmit.slots.free.len(), 64);
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    /// A CPU hands in packets of these lengths.
    Single(usize, Vec<usize>),
    Merged(usize, Flow, u16),
    Turn,
    /// The device takes that many buffers.
    Take(usize),
    /// The device uses that many buffers, the latest first or the oldest.
    Give(usize, bool),
    /// The device uses a buffer that was not posted.
    Lie,
    End,
    Begin(Vec<u32>, bool, Option<u16>),
}

fn event() -> impl Strategy<Value = Event> {
    let lens = proptest::collection::vec(select(vec![10usize, 60, 1514, 2036, 2037, 9000]), 1..8);
    let begin = (proptest::sample::subsequence(ALL.to_vec(), 0..=5), any::<bool>());
    let mtu = select(vec![None, Some(1500), Some(9000)]);
    prop_oneof![
        6 => (0usize..2, lens).prop_map(|(cpu, lens)| Event::Single(cpu, lens)),
        4 => (0usize..2, select(FLOWS.to_vec()), 2u16..20)
            .prop_map(|(cpu, flow, count)| Event::Merged(cpu, flow, count)),
        8 => Just(Event::Turn),
        5 => (1usize..20).prop_map(Event::Take),
        5 => (1usize..20, any::<bool>()).prop_map(|(count, latest)| Event::Give(count, latest)),
        1 => Just(Event::Lie),
        1 => Just(Event::End),
        3 => (begin, mtu).prop_map(|((bits, packed), mtu)| Event::Begin(bits, packed, mtu)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For any actions of the CPUs, the device and the session: each packet is counted once, as
    /// sent or as dropped for a reason; the device reads packets in the order of handover; no frame
    /// and no slot is lost.
    #[test]
    fn promise_2_handed_in_is_sent_or_dropped(
        size in select(vec![16u16, 64]),
        events in proptest::collection::vec(event(), 1..60),
    ) {
        let mut rig = Rig::new(size);
        // Frames that may still leave, in this order.
        let (mut expected, mut taken) = (VecDeque::<Vec<u8>>::new(), VecDeque::new());
        // After a violation, buffers may be overwritten before the device reads them.
        let mut has_lied = false;
        rig.begin(&ALL, None);
        for event in events {
            match event {
                Event::Single(cpu, lens) => {
                    let frames: Vec<_> = lens.into_iter().map(|len| frame(len.max(14))).collect();
                    let packets: Vec<_> = frames.iter().map(|bytes| rig.packet(bytes)).collect();
                    prop_assert_eq!(rig.hand(cpu, packets), 0);
                    expected.extend(frames);
                }
                Event::Merged(cpu, flow, count) => {
                    let frames = segments(flow, count, 1000);
                    let packet = match count % 3 {
                        0 => rig.merged(&frames),
                        1 => rig.whole(&frames),
                        _ => {
                            let whole = rig.whole(&frames);
                            rig.in_pieces(whole)
                        }
                    };
                    prop_assert_eq!(rig.hand(cpu, [packet]), 0);
                    expected.extend(frames);
                }
                Event::Turn => {
                    rig.step();
                }
                Event::Take(count) if !has_lied => {
                    for _ in 0..count {
                        let Some(got) = rig.device.as_mut().and_then(ReferenceDevice::take) else { break };
                        let (header, bytes) = rig.read(&got);
                        for segment in cut_by_header(header, &bytes) {
                            // The frames in between were dropped.
                            let at = expected.iter().position(|frame| *frame == segment);
                            prop_assert!(at.is_some(), "{} bytes out of order", segment.len());
                            expected.drain(..=at.unwrap());
                        }
                        taken.push_back(got.id);
                    }
                }
                Event::Give(count, is_latest) => {
                    for _ in 0..count {
                        let id = if is_latest { taken.pop_back() } else { taken.pop_front() };
                        let Some(id) = id else { break };
                        rig.give(id);
                    }
                }
                Event::Take(_) => {}
                Event::Lie => {
                    if let Some(device) = &mut rig.device {
                        device.give_bad(u16::MAX);
                        has_lied = true;
                    }
                }
                Event::End => {
                    rig.transmit.end();
                    (rig.device, taken) = (None, VecDeque::new());
                    prop_assert_eq!(rig.transmit.slots.free.len(), usize::from(size));
                }
                Event::Begin(mut bits, packed, mtu) => {
                    bits.extend(packed.then_some(VIRTIO_F_RING_PACKED));
                    rig.begin(&bits, mtu);
                    taken.clear();
                    has_lied = false;
                }
            }
        }
        let Rig { transmit, sinks, mut pool, handed, mut buffers, .. } = rig;
        drop(transmit);
        pool.flush();
        prop_assert_eq!(buffers.away_blocks(), 0);
        for (sink, handed) in sinks.iter().zip(handed) {
            let counters = sink.counters();
            prop_assert_eq!(counters.packets() + counters.dropped_in_all(), handed);
        }
        prop_assert_eq!(pool.in_use(), 0);
    }
}
