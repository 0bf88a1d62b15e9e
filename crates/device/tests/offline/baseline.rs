//! A well-behaved device: packets arrive unchanged in both directions.

use std::time::Duration;

use forebay_device::config::virtio::RxBufferSizing;
use forebay_rx::parse::Checksum;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use crate::Test;
use crate::back_end::frames::{datagram, number_of, of_flow, segment};
use crate::back_end::queues::Header;
use crate::back_end::rig::{Rig, Setup};
use crate::back_end::ring::is_readable;
use crate::back_end::session::{Backend, DEADLINE, Offer, Site, connect};

pub(crate) const TESTS: &[Test] = &[
    ("net_8_frames_of_every_length_arrive", || lengths(Offer::usual(), false)),
    ("net_8_and_by_packed_rings", || lengths(Offer::usual().packed(), true)),
    ("net_8_and_with_event_indices", || {
        lengths(Offer::usual().with(VIRTIO_RING_F_EVENT_IDX), false);
        lengths(Offer::usual().with(VIRTIO_RING_F_EVENT_IDX).packed(), true);
    }),
    ("net_8_frames_arrive_without_merged_buffers", unmerged),
    ("net_10_packet_buffers_published_one_by_one", published_late),
    ("init_1_features_then_rings_then_use", message_order),
    ("net_3_every_queue_pair_receives", queue_pairs),
    ("back_end_connects_where_we_listen", listening),
    ("device_checksum_state_is_carried", checksums),
    ("gso_packet_comes_whole", whole),
    ("cfg_2_buffers_hold_mtu_packets", mtu),
    ("net_2_unmerged_buffers_cover_agreed_packet", unmerged_sizes),
    ("vio_3_buffers_follow_packet_lengths", || follow(Offer::usual(), false)),
    ("vio_3_and_those_of_packed_rings", || follow(Offer::usual().packed(), true)),
    ("burst_of_largest_packets_fits", burst_room),
    ("small_ring_takes_no_large_packets", small_ring),
    ("net_9_unmerged_buffer_count_is_ignored", unmerged_number),
    ("packed_base_has_both_positions", bases),
    ("device_that_polls_is_never_kicked", || {
        unkicked(Offer::usual(), false);
        unkicked(Offer::usual().packed(), true);
    }),
    ("vq_7_nobody_sleeps_with_work", wake_ups),
    ("echoes_reach_the_device", || echoes(Offer::usual(), false)),
    ("echoes_reach_device_packed", || {
        echoes(Offer::usual().packed(), true);
    }),
];

/// Starts a driver and a well-behaved device.
fn meet(offer: Offer, setup: &Setup) -> (Site, Rig, Backend) {
    let site = Site::new();
    let rig = Rig::start(&site.path(), setup);
    let device = site.meet(offer);
    (site, rig, device)
}

/// Delivers frames and compares them, more than once around the ring.
fn check(rig: Rig, device: &mut Backend, frames: &[Vec<u8>]) {
    for frame in frames {
        device.deliver(0, Header::default(), frame).unwrap();
    }
    rig.await_delivered(device, frames.len()).unwrap();
    let ended = rig.stop(Some(device));
    assert_eq!((ended.frames, ended.drops.len()), (frames.len() as u64, 0), "{:?}", ended.drops);
    for port in 1000..1016 {
        let is_of = |bytes: &Vec<u8>| bytes[34..36] == u16::to_be_bytes(port);
        let seen = ended.seen.iter().map(|it| &it.bytes).filter(|bytes| is_of(bytes));
        assert!(seen.eq(frames.iter().filter(|bytes| is_of(bytes))), "the flow of port {port}");
    }
    for delivered in &ended.seen {
        assert!(delivered.truesize as usize >= delivered.bytes.len(), "SEED3");
        assert_eq!(delivered.checksum, Checksum::Good);
    }
}

fn lengths(offer: Offer, packed: bool) {
    let (_site, rig, mut device) = meet(offer, &Setup::usual().packed(packed));
    assert_eq!(device.ring(0).is_packed(), packed);
    // Every one up to an MTU of 1500, and some of those above it, in turn with short ones.
    let lens = (46..=1514).chain((1515..9000).step_by(149)).chain([65_500, 60, 65_535, 1000]);
    let frames: Vec<_> = (0..).zip(lens).map(|(number, len)| datagram(number, len)).collect();
    check(rig, &mut device, &frames);
}

fn unmerged() {
    let offer = Offer::usual().without(VIRTIO_NET_F_MRG_RXBUF);
    let (_site, rig, mut device) = meet(offer, &Setup::usual());
    let frames = (0..).zip((46..1515).step_by(7)).map(|(number, len)| datagram(number, len));
    check(rig, &mut device, &frames.collect::<Vec<_>>());
}

/// On a slow machine the rest of a packet may time out, but not of most packets.
fn published_late() {
    let mut setup = Setup::usual();
    setup.virtio.rx_buffers = RxBufferSizing::Mtu;
    let (_site, rig, mut device) = meet(Offer::usual(), &setup);
    for number in 0..50 {
        let placed = device.place(0, Header::default(), &datagram(number, 20_000)).unwrap();
        assert!(placed.used.len() > 1);
        for &used in &placed.used {
            device.ring(0).give(&[used]);
            std::thread::yield_now();
        }
    }
    device.wait("most of them", |_| rig.numbers().len() >= 40).unwrap();
    rig.stop(Some(&mut device));
}

fn message_order() {
    let (_site, rig, mut device) = meet(Offer::usual(), &Setup::usual());
    // A stop before there is a session cuts the connection, and requests nothing.
    device.wait("a session", |_| rig.sessions() == 1).unwrap();
    let log: Vec<_> = device.log.iter().map(|request| format!("{request:?}")).collect();
    let at = |name: &str| log.iter().position(|request| request.starts_with(name));
    let order = ["SET_OWNER", "GET_FEATURES", "SET_FEATURES", "SET_MEM_TABLE", "SET_VRING_"];
    let places = order.map(|name| at(name).unwrap());
    assert!(places.is_sorted(), "{log:?}");
    let enabled = at("SET_VRING_ENABLE").unwrap();
    let before =
        ["SET_VRING_NUM", "SET_VRING_BASE", "SET_VRING_ADDR"].map(|name| at(name).unwrap());
    assert!(before.iter().all(|&place| place < enabled), "{log:?}");
    assert!(device.features & (1 << VIRTIO_F_VERSION_1) > 0, "FEAT4");
    rig.stop(Some(&mut device));
    let ends = device.log.iter().filter(|request| format!("{request:?}") == "GET_VRING_BASE");
    assert_eq!(ends.count(), 2, "VQ11: {:?}", device.log);
    let written = device.log.iter().any(|request| format!("{request:?}") == "SET_CONFIG");
    assert!(!written, "CFG1");
}

fn queue_pairs() {
    let offer = Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).pairs(3);
    let setup = Setup { queues: 3, ..Setup::usual() };
    let (_site, rig, mut device) = meet(offer, &setup);
    for number in 0..300 {
        let pair = number as usize % 3;
        device.deliver(pair, Header::default(), &datagram(number, 60 + pair * 2000)).unwrap();
    }
    rig.await_delivered(&mut device, 300).unwrap();
    let ended = rig.stop(Some(&mut device));
    for delivered in &ended.seen {
        let number = number_of(&delivered.bytes).unwrap();
        assert_eq!(u32::from(delivered.queue), number % 3);
    }
}

fn listening() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ours.sock");
    let rig = Rig::start(&path, &Setup::usual().listening());
    // One back end after the other.
    for round in 1..=3 {
        let mut device = connect(&path, Offer::usual());
        device.come_up().unwrap();
        device.deliver(0, Header::default(), &datagram(1, 500)).unwrap();
        rig.await_delivered(&mut device, round).unwrap();
    }
    rig.stop(None);
}

fn checksums() {
    let (_site, rig, mut device) = meet(Offer::usual(), &Setup::usual());
    let right = datagram(7, 3000);
    let mut wrong = right.clone();
    wrong[2999] ^= 1;
    let deliver = |device: &mut Backend, flags, frame: &[u8]| {
        let (csum_start, csum_offset) = (34, 6);
        let header = Header { flags, csum_start, csum_offset, ..Header::default() };
        device.deliver(0, header, frame).unwrap();
    };
    let mut half = right.clone();
    half[40..42].copy_from_slice(&pseudo_sum(17, right.len()));
    deliver(&mut device, 0, &right);
    deliver(&mut device, 0, &wrong); // flags 0: not verified by the device (NET7)
    deliver(&mut device, 2, &right);
    deliver(&mut device, 1, &half);
    rig.await_delivered(&mut device, 4).unwrap();
    let seen = rig.stop(Some(&mut device)).seen;
    let checksums: Vec<_> = seen.iter().map(|it| it.checksum).collect();
    assert_eq!(checksums, [Checksum::Good, Checksum::Bad, Checksum::Good, Checksum::Good]);
    assert!(seen[3].bytes == right, "the checksum is completed");
}

fn whole() {
    let (_site, rig, mut device) = meet(Offer::usual(), &Setup::usual());
    let mut frame = segment(1, 60_000);
    let sum = pseudo_sum(6, frame.len());
    frame[50..52].copy_from_slice(&sum);
    let header = Header {
        flags: 1,
        gso_type: 1,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
        ..Header::default()
    };
    device.deliver(0, header, &frame).unwrap();
    rig.await_delivered(&mut device, 1).unwrap();
    let ended = rig.stop(Some(&mut device));
    let [delivered] = &ended.seen[..] else { panic!("{:?}", ended.drops) };
    assert_eq!((delivered.gso_size, delivered.checksum), (1448, Checksum::Good));
    assert!(delivered.bytes == frame);
}

/// Checksum field of a frame with a partial checksum: the sum of the pseudo header.
fn pseudo_sum(protocol: u32, frame_len: usize) -> [u8; 2] {
    let len = u32::try_from(frame_len - 34).unwrap();
    let sum: u32 = [0x0a09, 2, 0x0a09, 1, protocol, len].into_iter().sum();
    u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap().to_be_bytes()
}

fn mtu() {
    let offer = Offer { mtu: 9000, ..Offer::usual().with(VIRTIO_NET_F_MTU) };
    for (offer, is_mergeable) in
        [(offer.clone(), true), (offer.without(VIRTIO_NET_F_MRG_RXBUF), false)]
    {
        let (_site, rig, mut device) = meet(offer, &Setup::usual());
        device.stocked(0, 8).unwrap();
        let posted = device.posted_bytes(0);
        let room = if is_mergeable { posted.iter().sum() } else { *posted.iter().min().unwrap() };
        assert!(room >= 12 + 14 + 9000, "{posted:?}");
        let frames: Vec<_> = (0..10).map(|number| datagram(number, 9014)).collect();
        check(rig, &mut device, &frames);
    }
}

/// Buffers of copied packets are posted again, but not without end if they are larger than now
/// needed.
fn follow(offer: Offer, packed: bool) {
    let (_site, rig, mut device) = meet(offer, &Setup::usual().packed(packed));
    let small = |posted: &[u32]| posted.len() == 64 && posted.iter().all(|&bytes| bytes < 2 * 2176);
    let large = |posted: &[u32]| posted.iter().all(|&bytes| bytes >= 9012);
    let mut delivered = 0;
    for _ in 0..2 {
        device.stocked(0, 64).unwrap();
        assert!(small(&device.posted_bytes(0)), "{:?}", device.posted_bytes(0));
        for (len, count) in [(9000, 900), (60, 2000)] {
            // At most as many as a backlog holds.
            for number in 0..count {
                device.deliver(0, Header::default(), &datagram(number, len)).unwrap();
                delivered += 1;
                if number % 100 == 99 {
                    rig.await_delivered(&mut device, delivered).unwrap();
                }
            }
            if len == 9000 {
                let posted = device.posted_bytes(0);
                assert!(large(&posted) && !posted.is_empty(), "{posted:?}");
                // Sixteen packets, and the last buffer, with the rest of its block.
                let most = 16 * 9000 + 2 * 9088;
                assert!(posted.iter().sum::<u32>() <= most, "{posted:?}");
            }
        }
    }
    rig.stop(Some(&mut device));
}

/// With the largest packets too, the posted buffers have room for a burst of 16.
fn burst_room() {
    let (_site, rig, mut device) = meet(Offer::usual(), &Setup::usual());
    for number in 0..100 {
        device.deliver(0, Header::default(), &datagram(number, 60_000)).unwrap();
        rig.await_delivered(&mut device, number as usize + 1).unwrap();
    }
    let room = |device: &mut Backend| device.posted_bytes(0).iter().sum::<u32>();
    device.wait("room", |device| room(device) >= 16 * 60_000).unwrap();
    rig.stop(Some(&mut device));
}

fn unmerged_sizes() {
    let offer = Offer::usual().without(VIRTIO_NET_F_MRG_RXBUF);
    let cut = [VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6];
    let plain = cut.into_iter().fold(offer.clone(), Offer::without);
    for offer in [offer, plain] {
        let (_site, rig, mut device) = meet(offer, &Setup::usual());
        device.stocked(0, 8).unwrap();
        let posted = device.posted_bytes(0);
        let least = if cut.into_iter().any(|bit| device.has(bit)) { 65_562 } else { 1526 };
        assert!(posted.iter().all(|&bytes| bytes >= least), "{least}: {posted:?}");
        rig.stop(Some(&mut device));
    }
}

/// Large packets are agreed on only if a ring of the smallest buffers has room for one.
fn small_ring() {
    for (queue_size, rx_buffers, is_large) in [
        (16, RxBufferSizing::Auto, false),
        (32, RxBufferSizing::Mtu, false),
        (16, RxBufferSizing::Page, false),
        (32, RxBufferSizing::Page, true),
        (64, RxBufferSizing::Auto, true),
    ] {
        let mut setup = Setup::usual();
        (setup.virtio.queue_size, setup.virtio.rx_buffers) = (queue_size, rx_buffers);
        let (_site, rig, mut device) = meet(Offer::usual(), &setup);
        let takes = [VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6].map(|bit| device.has(bit));
        assert_eq!(takes, [is_large; 2], "{queue_size} {rx_buffers}");
        rig.stop(Some(&mut device));
    }
}

/// Index 0 and wrap counter 1, of available descriptors and of used ones.
fn bases() {
    for (packed, base) in [(false, 0), (true, 0x8000_8000)] {
        let offer = Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).pairs(2);
        let offer = if packed { offer.packed() } else { offer };
        let setup = Setup { queues: 2, ..Setup::usual().packed(packed) };
        let (_site, rig, mut device) = meet(offer, &setup);
        device.wait("commands", |device| !device.commands.is_empty()).unwrap();
        for ring in 0..=device.control_ring() {
            assert_eq!(device.ring(ring).place().base, base, "ring {ring}");
        }
        rig.stop(Some(&mut device));
    }
}

fn unkicked(mut offer: Offer, packed: bool) {
    offer.polls = true;
    let (_site, rig, mut device) = meet(offer, &Setup::usual().packed(packed).echoing());
    for number in 0..200 {
        device.deliver(0, Header::default(), &datagram(number, 300)).unwrap();
    }
    assert_eq!(device.await_sent(0, 200).unwrap().len(), 200);
    for ring in [0, 1] {
        assert!(!is_readable(&device.ring(ring).kick, Duration::ZERO), "ring {ring}");
    }
    rig.stop(Some(&mut device));
}

fn unmerged_number() {
    let offer = Offer::usual().without(VIRTIO_NET_F_MRG_RXBUF);
    let (_site, rig, mut device) = meet(offer, &Setup::usual());
    for (number, buffers) in (0..).zip([0, 1, 9, 65_535].repeat(5)) {
        let header = Header { num_buffers: Some(buffers), ..Header::default() };
        device.deliver(0, header, &datagram(number, 1400)).unwrap();
    }
    rig.await_delivered(&mut device, 20).unwrap();
    let ended = rig.stop(Some(&mut device));
    assert!(ended.drops.is_empty(), "{:?}", ended.drops);
}

/// Both sides sleep until the other one wakes them, so a lost wake-up ends in a time-out.
fn wake_ups() {
    let layouts = [false, true].into_iter().flat_map(|packed| [(packed, false), (packed, true)]);
    for (packed, event_idx) in layouts {
        let offer = if packed { Offer::usual().packed() } else { Offer::usual() };
        let offer = if event_idx { offer.with(VIRTIO_RING_F_EVENT_IDX) } else { offer };
        let setup = Setup::usual().packed(packed).echoing();
        let (_site, rig, mut device) = meet(offer, &setup);
        for number in 0..2000 {
            if !device.look(0) {
                device.ring(0).sleep(DEADLINE);
            }
            device.deliver(0, Header::default(), &datagram(number, 100)).unwrap();
            let mut sent = device.sent(0);
            if sent.is_empty() {
                device.ring(1).sleep(DEADLINE);
                sent = device.sent(0);
            }
            while sent.is_empty() {
                // A kick may come early, but must come.
                device.ring(1).sleep(Duration::from_secs(20));
                sent = device.sent(0);
            }
            assert_eq!(sent.len(), 1, "number {number}");
        }
        rig.stop(Some(&mut device));
    }
}

fn echoes(offer: Offer, packed: bool) {
    let (_site, rig, mut device) = meet(offer, &Setup::usual().packed(packed).echoing());
    for round in 0..30 {
        let lens = [60, 1514, 2000, 2048, 2049, 9000, 65_535, 200];
        let frames = (0..).zip(lens).map(|(at, len)| of_flow(8 * round + at, 1000, len));
        let frames: Vec<_> = frames.collect();
        for frame in &frames {
            device.deliver(0, Header::default(), frame).unwrap();
        }
        let sent = device.await_sent(0, frames.len()).unwrap();
        for sent in &sent {
            assert_eq!((sent.header.gso_type, sent.header.flags & 1), (0, 0), "{:?}", sent.header);
        }
        assert!(sent.into_iter().map(|sent| sent.bytes).eq(frames), "round {round}");
    }
    rig.stop(Some(&mut device));
}
