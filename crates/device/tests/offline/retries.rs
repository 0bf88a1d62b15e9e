//! Devices that ignore instructions, or violate the protocol where the other tests do not: at the
//! end of a run, in one of two queues, in sending.

use std::time::Duration;

use vhost::vhost_user::message::FrontendReq;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MRG_RXBUF};

use crate::Test;
use crate::back_end::frames::datagram;
use crate::back_end::queues::Header;
use crate::back_end::rig::{Rig, Setup};
use crate::back_end::ring::{Layout, Used};
use crate::back_end::session::{Backend, Failure, Offer, Site, bit, connect};
use crate::hostile::RING;

pub(crate) const TESTS: &[Test] = &[
    ("promise_5_full_events_hold_no_packet_up", full_events),
    ("promise_3_run_ends_despite_generous_device", floods),
    ("promise_5_violating_queue_leaves_the_other", one_of_two),
    ("flows_leave_by_existing_pairs", fewer_pairs),
    ("flows_leave_by_open_pairs", shut_pair),
    ("promise_5_invalid_completion_restarts_session", of_the_sent),
    ("promise_5_unsolicited_messages_are_ignored", unasked),
    ("promise_5_connecting_and_leaving_lets_others_follow", many_come),
    ("sessions_may_agree_differently", other_features),
];

/// The device does not answer the request to stop, and uses whatever it has as fast as it can.
fn floods() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    let mut device = site.meet(Offer::usual());
    // The packets stay in the buffers, which are posted again and again.
    device.stocked(0, RING.into()).unwrap();
    for number in 0..RING.into() {
        device.place(0, Header::default(), &datagram(number, 188)).unwrap();
    }
    let flood = |device: &mut Backend| {
        let Layout::Split(split) = &mut device.ring(0).layout else { panic!("a packed ring") };
        let used = split.not_given().into_iter();
        let used = used.map(|id| Used { id: id.into(), len_bytes: 200, descriptors: 1 });
        let used: Vec<_> = used.collect();
        if split.give(&used) {
            device.ring(0).call();
        }
        used.len()
    };
    while rig.delivered() < 1000 {
        flood(&mut device);
    }
    device.offer.fails = Some((FrontendReq::SET_VRING_ENABLE, Failure::Silence));
    let said = device.log.len();
    let mut given_since = 0;
    let ended = rig.stop_while(|| {
        if device.log.len() == said {
            let _ = device.serve(Duration::ZERO);
            flood(&mut device);
        } else {
            given_since += flood(&mut device);
        }
    });
    assert!(given_since <= RING.into(), "{given_since} of {}", ended.frames);
    assert!(ended.drops.keys().all(|&reason| reason == "backlog_full"), "{:?}", ended.drops);
}

/// Two queues violate the protocol, one after the other: the first is disabled until the session
/// ends.
fn one_of_two() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup { queues: 2, ..Setup::usual() });
    let mut device = site.meet(Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).pairs(2));
    for pair in [0, 1] {
        device.deliver(pair, Header::default(), &datagram(1, 300)).unwrap();
    }
    rig.await_delivered(&mut device, 2).unwrap();
    goes_back(&mut device, 0);
    // The device is told to disable that queue, and only that one.
    let disabled = |device: &mut Backend| !device.is_enabled(0) && !device.is_enabled(1);
    device.wait("the end of a queue", disabled).unwrap();
    assert!(device.is_enabled(2) && device.is_enabled(3));
    for number in 2..100 {
        device.deliver(1, Header::default(), &datagram(number, 300)).unwrap();
    }
    rig.await_delivered(&mut device, 100).unwrap();
    assert_eq!(rig.sessions(), 1);
    goes_back(&mut device, 2);
    device.serve_to_end();
    let mut device = site.meet(device.offer.clone());
    for pair in [0, 1] {
        device.deliver(pair, Header::default(), &datagram(1, 300)).unwrap();
    }
    rig.await_delivered(&mut device, 102).unwrap();
    rig.stop(Some(&mut device));
}

/// Delivers packets of many flows to a queue pair, and waits until the same number has come back.
fn echo(device: &mut Backend, pair: usize) {
    for number in 0..64 {
        device.deliver(pair, Header::default(), &datagram(number, 300)).unwrap();
    }
    assert_eq!(device.await_sent(pair, 64).unwrap().len(), 64);
}

/// Flows are spread over the queue pairs of the device, which may be fewer than requested.
fn fewer_pairs() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup { queues: 4, ..Setup::usual().echoing() });
    let mut device = site.meet(Offer::usual());
    echo(&mut device, 0);
    rig.stop(Some(&mut device));
}

fn shut_pair() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup { queues: 2, ..Setup::usual().echoing() });
    let mut device = site.meet(Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).pairs(2));
    for pair in [0, 1] {
        device.deliver(pair, Header::default(), &datagram(1, 300)).unwrap();
    }
    let mut echoed = 0;
    let mut is_echoed = |device: &mut Backend| {
        echoed += device.sent(0).len() + device.sent(1).len();
        echoed == 2
    };
    device.wait("the first echoes", &mut is_echoed).unwrap();
    goes_back(&mut device, 0);
    device.wait("the end of a queue", |device| !device.is_enabled(1)).unwrap();
    echo(&mut device, 1);
    assert_eq!(rig.sessions(), 1);
    rig.stop(Some(&mut device));
}

/// Moves the used index of a ring back by one.
fn goes_back(device: &mut Backend, ring: usize) {
    let ring = device.ring(ring);
    let Layout::Split(split) = &ring.layout else { panic!("a packed ring") };
    split.store_index(split.given.wrapping_sub(1));
    ring.call();
}

/// Violation in the transmit ring.
type Lie = (&'static str, fn(&mut Backend));

fn of_the_sent() {
    let lies: [Lie; 5] = [
        ("back", |device| goes_back(device, 1)),
        ("far ahead", |device| {
            let Layout::Split(split) = &device.ring(1).layout else { panic!("a packed ring") };
            split.store_index(split.given.wrapping_add(1000));
        }),
        ("what it was not given", |device| {
            let has = to_be_sent(device);
            give_sent(device, (0..).find(|id| !has.contains(id)).unwrap().into());
        }),
        ("what there is not", |device| give_sent(device, u32::MAX)),
        ("twice", |device| {
            let chain = device.ring(1).take().unwrap();
            device.ring(1).give(&[chain.used(0), chain.used(0)]);
        }),
    ];
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual().echoing());
    let mut sessions = 0;
    let mut met = || {
        let mut device = site.meet(Offer::usual());
        for number in 1..=10 {
            device.deliver(0, Header::default(), &datagram(number, 300)).unwrap();
        }
        device.await_sent(0, 10).unwrap();
        sessions += 1;
        assert_eq!(rig.sessions(), sessions);
        device
    };
    for (name, lie) in lies {
        eprintln!("{name}");
        let mut device = met();
        // Packets that the device has and has not sent.
        for number in [1, 2] {
            device.deliver(0, Header::default(), &datagram(number, 300)).unwrap();
        }
        device.wait("what is to be sent", |device| to_be_sent(device).len() == 2).unwrap();
        lie(&mut device);
        // A sending CPU processes the used entries.
        device.deliver(0, Header::default(), &datagram(3, 300)).unwrap();
        device.serve_to_end();
    }
    let mut device = met();
    rig.stop(Some(&mut device));
}

/// Returns the ids of buffers that the device has and has not sent.
fn to_be_sent(device: &mut Backend) -> Vec<u16> {
    let Layout::Split(split) = &device.ring(1).layout else { panic!("a packed ring") };
    split.not_given()
}

fn give_sent(device: &mut Backend, id: u32) {
    device.ring(1).give(&[Used { id, len_bytes: 0, descriptors: 1 }]);
}

/// Unsolicited answers, before and during a session.
fn unasked() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    for before in [0, 5, 12, 20, 100] {
        let mut early = site.accept(Offer::usual());
        early.say_unasked(before);
        let _ = early.come_up();
    }
    for bytes in [1, 12, 20, 300, 100_000_000] {
        let mut device = site.meet(Offer::usual());
        let count = rig.delivered() + 20;
        device.say_unasked(bytes);
        for number in 0..20 {
            device.deliver(0, Header::default(), &datagram(number, 300)).unwrap();
        }
        rig.await_delivered(&mut device, count).unwrap();
    }
    let mut device = site.meet(Offer::usual());
    device.say_unasked(100);
    rig.stop(Some(&mut device));
}

/// Some back ends send bytes first, and one waits until the previous one has closed.
fn many_come() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ours.sock");
    let rig = Rig::start(&path, &Setup::usual().listening());
    for round in 1..=3 {
        for bytes in [0, 11, 12, 40] {
            connect(&path, Offer::usual()).say_unasked(bytes);
        }
        let mut device = connect(&path, Offer::usual());
        let mut waiting = connect(&path, Offer::usual());
        device.come_up().unwrap();
        device.deliver(0, Header::default(), &datagram(1, 500)).unwrap();
        rig.await_delivered(&mut device, 2 * round - 1).unwrap();
        assert!(!waiting.is_up(0));
        device.close();
        waiting.come_up().unwrap();
        waiting.deliver(0, Header::default(), &datagram(2, 500)).unwrap();
        rig.await_delivered(&mut waiting, 2 * round).unwrap();
    }
    rig.stop(None);
}

/// Sessions differ in ring layout and header length, and no state of the previous one is left.
fn other_features() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual().packed(true));
    let usual = Offer::usual();
    let bare = Offer { features: bit(VIRTIO_F_VERSION_1), ..Offer::usual() };
    let unmerged = usual.clone().without(VIRTIO_NET_F_MRG_RXBUF);
    let offers = [usual.clone(), usual.clone().packed(), bare, unmerged.packed(), usual.packed()];
    let mut count = 0;
    for offer in offers.iter().cycle().take(20) {
        let mut device = site.meet(offer.clone());
        for number in 0..100 {
            let len = [60, 300, 1500][number as usize % 3];
            device.deliver(0, Header::default(), &datagram(number, len)).unwrap();
        }
        count += 100;
        rig.await_delivered(&mut device, count).unwrap();
    }
    assert_eq!(rig.numbers().len(), count, "byte for byte");
    rig.stop(None);
}

/// An eventfd is one open file for both sides. The device fills the counters, so that blocking
/// writes to them would wait, and does not answer when told to stop.
fn full_events() {
    for packed in [false, true] {
        let site = Site::new();
        let rig = Rig::start(&site.path(), &Setup::usual().packed(packed).echoing());
        let offer = if packed { Offer::usual().packed() } else { Offer::usual() };
        let silent = Some((FrontendReq::GET_VRING_BASE, Failure::Silence));
        let mut device = site.meet(Offer { fails: silent, ..offer });
        for number in 1..=20 {
            [0, 1].into_iter().for_each(|ring| device.ring(ring).has_kicks_wait());
            device.deliver(0, Header::default(), &datagram(number, 300)).unwrap();
            device.await_sent(0, 1).unwrap();
        }
        [0, 1].into_iter().for_each(|ring| device.ring(ring).has_kicks_wait());
        assert_eq!((rig.delivered(), rig.sessions()), (20, 1));
        rig.stop(Some(&mut device));
    }
}
