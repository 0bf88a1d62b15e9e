//! Commands to a device, and devices that mishandle them.

use forebay_rx::hash::FlowHash;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use crate::Test;
use crate::back_end::control::Control;
use crate::back_end::frames::datagram;
use crate::back_end::queues::Header;
use crate::back_end::rig::{Rig, Setup};
use crate::back_end::session::{Backend, Offer, Site};
use crate::hostile::In;

pub(crate) const TESTS: &[Test] = &[
    ("net_3_queue_pairs_and_hashes_are_commanded", told),
    ("net_3_control_queue_follows_unused_pairs", many),
    ("rps_5_one_pair_is_told_hashes", one),
    ("rps_5_requested_hash_is_the_packets", hashed),
    ("rps_5_only_offered_hashes_are_requested", hash_types),
    ("net_3_refused_commands_leave_one_pair", || {
        judge(Control::Refuses, &REFUSED);
    }),
    ("promise_5_unwritten_answer_is_none", || judge(Control::Unwritten, &REFUSED)),
    ("net_3_no_commands_follow_enabled_rings", || {
        let queues = "2: no answer to VQ_PAIRS_SET in 500 ms";
        let device_hash = "no: no answer to HASH_CONFIG in 500 ms";
        judge(Control::Silent, &Told { queues, device_hash, pairs: 2 });
    }),
    ("promise_5_command_answered_by_another_id", || {
        lie(Control::Id(7), In::Both, "it answered 7, which is not a command");
    }),
    ("promise_5_command_answered_with_excessive_id", || {
        lie(Control::Id(0xffff), In::Both, "it answered 65535, which is not a command");
    }),
    ("promise_5_command_answered_by_no_byte", || {
        lie(Control::Len(0), In::Both, "it answered with 0 bytes, not with one");
    }),
    ("promise_5_command_answered_by_too_many_bytes", || {
        lie(Control::Len(u32::MAX), In::Both, "it answered with 4294967295 bytes");
    }),
    ("promise_5_command_answered_twice", || {
        // Noticed with two used entries or with four, so the message varies.
        lie(Control::Twice, In::Both, "control queue: ");
    }),
    ("promise_5_command_ring_used_jump", || {
        lie(Control::Jump(3), In::Split, "the used index went from 0 to 3 with 2 buffers posted");
    }),
    ("promise_5_command_ring_used_backwards", || {
        lie(Control::Jump(0xffff), In::Split, "the used index went from 0 to 65535");
    }),
    ("promise_5_command_ring_overwritten", scribbled),
    ("promise_5_closed_at_a_command", || {
        lie(Control::Closes, In::Both, "the back end closed the connection");
    }),
    ("net_3_back_end_without_commands_works", || {
        lie(Control::Missing, In::Both, "");
    }),
];

const REFUSED: Told = Told {
    queues: "1 of 2: the back end refused VQ_PAIRS_SET",
    device_hash: "no: the back end refused HASH_CONFIG",
    pairs: 1,
};

/// Facts of a session, and the number of its queue pairs.
struct Told {
    queues: &'static str,
    device_hash: &'static str,
    pairs: usize,
}

const DONE: Told = Told { queues: "2", device_hash: "yes", pairs: 2 };

/// Offers two queue pairs, and hashes.
fn offer(control: Control, packed: bool) -> Offer {
    let offer = Offer { control, ..Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).pairs(2) };
    let offer = offer.with(VIRTIO_NET_F_HASH_REPORT);
    if packed { offer.packed() } else { offer }
}

fn setup(packed: bool) -> Setup {
    Setup { queues: 2, device_hash: true, ..Setup::usual().packed(packed) }
}

/// Delivers a packet to each queue pair in use, and compares the facts.
fn check(rig: &Rig, device: &mut Backend, told: &Told) {
    for pair in 0..told.pairs {
        let count = rig.delivered() + 1;
        device.deliver(pair, Header::default(), &datagram(1, 500)).unwrap();
        rig.await_delivered(device, count).unwrap();
    }
    assert_eq!(
        (rig.fact("queues"), rig.fact("device_hash")),
        (told.queues.to_owned(), told.device_hash.to_owned())
    );
    for ring in 0..device.control_ring() {
        assert_eq!(device.is_enabled(ring), ring < 2 * told.pairs, "ring {ring}");
    }
}

fn told() {
    for (packed, event_idx) in [(false, false), (false, true), (true, false), (true, true)] {
        let offer = offer(Control::Serves, packed);
        let offer = if event_idx { offer.with(VIRTIO_RING_F_EVENT_IDX) } else { offer };
        let site = Site::new();
        let rig = Rig::start(&site.path(), &setup(packed));
        let mut device = site.meet(offer.clone());
        check(&rig, &mut device, &DONE);
        let [pairs, hashes] = &device.commands[..] else { panic!("{:?}", device.commands) };
        assert_eq!(pairs[..], [4, 0, 2, 0]);
        // Class and command; hash types, reserved words, key length.
        assert_eq!(hashes[..15], [4, 2, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 40]);
        assert_eq!(hashes.len(), 15 + 40);
        assert!(hashes[15..].iter().any(|byte| *byte != 0), "nobody can guess the key");
        let before = device.commands.clone();
        device.close();
        let mut device = site.meet(offer);
        check(&rig, &mut device, &DONE);
        assert!(device.commands == before, "flows keep their hash");
        rig.stop(Some(&mut device));
        let ends = device.log.iter().filter(|request| format!("{request:?}") == "GET_VRING_BASE");
        assert_eq!(ends.count(), 5, "VQ11: {:?}", device.log);
    }
}

/// The device has more queue pairs than requested.
fn many() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &setup(false));
    let mut device = site.accept(offer(Control::Serves, false).pairs(5));
    device.wait("commands", |device| device.commands.len() == 2).unwrap();
    assert_eq!(device.commands[0], [4, 0, 2, 0]);
    assert!((0..10).all(|ring| device.is_up(ring) == (ring < 4)) && device.is_up(10));
    rig.stop(Some(&mut device));
}

fn one() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup { device_hash: true, ..Setup::usual() });
    let offer = Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).with(VIRTIO_NET_F_HASH_REPORT);
    let mut device = site.meet(offer);
    check(&rig, &mut device, &Told { queues: "1", device_hash: "yes", pairs: 1 });
    assert_eq!(device.commands.iter().map(|it| &it[..2]).collect::<Vec<_>>(), [[4, 2]]);
    rig.stop(Some(&mut device));
}

fn hashed() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &setup(false));
    let mut device = site.meet(offer(Control::Serves, false));
    let header = Header { hash: (0xdead_beef, 3), ..Header::default() };
    device.deliver(0, header, &datagram(1, 500)).unwrap();
    rig.await_delivered(&mut device, 1).unwrap();
    let ended = rig.stop(Some(&mut device));
    assert_eq!(ended.seen[0].hash, FlowHash::computed(0xdead_beef));
}

fn hash_types() {
    let none = "no: of the hashes 0x1c0 of the back end none is of use";
    for (hash_types, asked, device_hash) in
        [(0x2, Some(0x2), "yes"), (0x1ff, Some(0x3f), "yes"), (0x1c0, None, none)]
    {
        let site = Site::new();
        let rig = Rig::start(&site.path(), &setup(false));
        let offer = Offer { hash_types, ..offer(Control::Serves, false) };
        let mut device = site.meet(offer);
        check(&rig, &mut device, &Told { device_hash, ..DONE });
        let types = device.commands.get(1).map(|command| command[2]);
        assert_eq!(types, asked, "of {hash_types:#x}");
        rig.stop(Some(&mut device));
    }
}

/// The session continues, with the expected facts.
fn judge(control: Control, told: &Told) {
    for packed in [false, true] {
        let site = Site::new();
        let rig = Rig::start(&site.path(), &setup(packed));
        let mut device = site.meet(offer(control, packed));
        check(&rig, &mut device, told);
        assert_eq!(rig.sessions(), 1);
        let ended = rig.stop(Some(&mut device));
        assert!(ended.drops.is_empty(), "{:?}", ended.drops);
    }
}

/// Two sessions end by the violation. The third one is without commands, with the reason as a fact.
/// The fourth one sends commands again.
fn lie(control: Control, rings: In, why: &str) {
    for &packed in if rings == In::Both { &[false, true][..] } else { &[false] } {
        let site = Site::new();
        let rig = Rig::start(&site.path(), &setup(packed));
        for _ in 0..2 {
            let mut device = site.accept(offer(control, packed));
            device.serve_to_end();
            assert_eq!(rig.sessions(), 0);
        }
        let mut device = site.meet(offer(control, packed));
        let count = rig.delivered() + 2;
        for pair in 0..2 {
            device.deliver(pair, Header::default(), &datagram(1, 500)).unwrap();
        }
        rig.await_delivered(&mut device, count).unwrap();
        for fact in ["queues", "device_hash"].map(|name| rig.fact(name)) {
            assert!(fact.contains("it is done without commands") && fact.contains(why), "{fact}");
        }
        device.close();
        let mut device = site.meet(offer(Control::Serves, packed));
        check(&rig, &mut device, &DONE);
        rig.stop(Some(&mut device));
    }
}

/// After any result of the overwritten ring, the next device gets all commands.
fn scribbled() {
    for packed in [false, true] {
        let site = Site::new();
        let rig = Rig::start(&site.path(), &setup(packed));
        for byte in [0, 1, 0x7f, 0x80, 0xff] {
            let before = rig.sessions();
            let mut device = site.accept(offer(Control::Scribbles(byte), packed));
            let _ = device.wait("what comes of it", |_| rig.sessions() > before);
            device.close();
            let mut device = site.meet(offer(Control::Serves, packed));
            check(&rig, &mut device, &DONE);
            device.close();
        }
        let mut device = site.meet(offer(Control::Serves, packed));
        rig.stop(Some(&mut device));
    }
}
