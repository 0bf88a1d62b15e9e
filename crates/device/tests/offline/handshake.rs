//! Back ends that misbehave before there is a ring.

use vhost::vhost_user::message::FrontendReq;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO,
    VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_MQ,
    VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
};

use crate::Test;
use crate::back_end::frames::datagram;
use crate::back_end::messages::Oddity;
use crate::back_end::queues::Header;
use crate::back_end::rig::{Rig, Setup};
use crate::back_end::session::{Backend, Failure, Offer, Site, bit};

pub(crate) const TESTS: &[Test] = &[
    ("promise_5_closed_in_the_handshake", || fails(Failure::Close)),
    ("promise_5_silence_in_the_handshake", || fails(Failure::Silence)),
    ("promise_5_no_answer_in_the_handshake", || fails(Failure::Nonsense(0))),
    ("promise_5_nonsense_in_the_handshake", || fails(Failure::Nonsense(8))),
    ("promise_5_too_much_in_the_handshake", || fails(Failure::Nonsense(4000))),
    ("promise_5_closed_at_any_message", closed),
    ("promise_5_answers_that_are_none", odd_answers),
    ("promise_5_impossible_queue_counts", queue_numbers),
    ("promise_5_an_mtu_that_cannot_be", mtus),
    ("promise_5_silence_at_the_end", || at_the_end(Failure::Silence)),
    ("promise_5_closed_at_the_end", || at_the_end(Failure::Close)),
    ("promise_5_nonsense_at_the_end", || at_the_end(Failure::Nonsense(3000))),
    ("promise_5_invalid_answers_at_the_end", || {
        ODDITIES.into_iter().for_each(|oddity| at_the_end(Failure::But(oddity)));
    }),
    ("feat_4_empty_or_legacy_features_are_refused", legacy),
    ("feat_3_all_64_features_are_accepted", all_features),
    ("feat_2_dependencies_accepted_together_or_not", dependent),
    ("feat_1_subset_is_answered_with_subset", subsets),
];

/// Connects a well-behaved device after any failure, and uses it.
fn goes_on(site: &Site, rig: &Rig, offer: Offer) -> Backend {
    let mut device = site.meet(offer);
    let count = rig.delivered() + 1;
    device.deliver(0, Header::default(), &datagram(1, 500)).unwrap();
    rig.await_delivered(&mut device, count).unwrap();
    device
}

fn fails(failure: Failure) {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup { queues: 2, ..Setup::usual() });
    let pairs = Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).pairs(2);
    for request in [
        FrontendReq::GET_FEATURES,
        FrontendReq::GET_PROTOCOL_FEATURES,
        FrontendReq::GET_QUEUE_NUM,
        FrontendReq::SET_MEM_TABLE,
        FrontendReq::SET_VRING_ADDR,
        FrontendReq::SET_VRING_ENABLE,
    ] {
        let offer = Offer { fails: Some((request, failure)), ..pairs.clone() };
        // With a valid answer by chance, the device may come up.
        let _ = site.accept(offer).come_up();
    }
    let mut device = goes_on(&site, &rig, pairs);
    rig.stop(Some(&mut device));
}

const ODDITIES: [Oddity; 8] = [
    Oddity::OtherRequest,
    Oddity::NoReply,
    Oddity::OtherVersion,
    Oddity::Length(0),
    Oddity::Length(7),
    Oddity::Length(0x8000_0000),
    Oddity::Length(u32::MAX),
    Oddity::Descriptors(3),
];

/// Closes after each kind of message.
fn closed() {
    use FrontendReq as Of;
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    let usual = Offer::usual().with(VIRTIO_NET_F_MTU);
    for last in [
        Of::SET_OWNER,
        Of::GET_FEATURES,
        Of::GET_PROTOCOL_FEATURES,
        Of::SET_PROTOCOL_FEATURES,
        Of::GET_CONFIG,
        Of::SET_FEATURES,
        Of::SET_MEM_TABLE,
        Of::SET_VRING_NUM,
        Of::SET_VRING_BASE,
        Of::SET_VRING_ADDR,
        Of::SET_VRING_CALL,
        Of::SET_VRING_KICK,
        Of::SET_VRING_ENABLE,
    ] {
        let mut device =
            site.accept(Offer { fails: Some((last, Failure::Close)), ..usual.clone() });
        device.serve_to_end();
        assert_eq!(device.log.last(), Some(&last));
        drop(goes_on(&site, &rig, usual.clone()));
    }
    let mut device = goes_on(&site, &rig, usual);
    rig.stop(Some(&mut device));
}

/// Defective answers: a back end that answers another request is abandoned.
fn odd_answers() {
    use FrontendReq as Of;
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    let usual = Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).with(VIRTIO_NET_F_MTU).pairs(2);
    let first = |offer| {
        let mut device = site.accept(offer);
        let is_up = |device: &mut Backend| device.is_up(0) && device.is_up(1);
        device.wait("its rings", is_up).map(|()| device)
    };
    for request in [Of::GET_FEATURES, Of::GET_CONFIG, Of::GET_QUEUE_NUM, Of::SET_MEM_TABLE] {
        for oddity in ODDITIES {
            let fails = Some((request, Failure::But(oddity)));
            let came = first(Offer { fails, ..usual.clone() });
            // The bytes of an answer count, not the length in its header; descriptors are ignored.
            let is_answer = matches!(oddity, Oddity::Length(_) | Oddity::Descriptors(_));
            assert!(came.is_err() || is_answer, "{request:?} {oddity:?}");
            drop(came);
            drop(first(usual.clone()).unwrap());
        }
    }
    let mut device = first(usual).unwrap();
    rig.stop(Some(&mut device));
}

fn queue_numbers() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup { queues: 2, ..Setup::usual() });
    let pairs = |count| Offer::usual().with(VIRTIO_NET_F_CTRL_VQ).pairs(count);
    let mut none = site.accept(pairs(0));
    none.serve_to_end();
    assert!(!none.is_up(0));
    for count in [3, 129, u64::MAX] {
        let mut device = site.accept(pairs(count));
        device.wait("four rings", |device| (0..4).all(|ring| device.is_up(ring))).unwrap();
        assert!(!device.is_up(4));
    }
    let mut device = site.meet(pairs(2));
    rig.stop(Some(&mut device));
}

fn mtus() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    for mtu in [0, 1, 67, 68, u16::MAX] {
        for offer in [Offer::usual(), Offer::usual().without(VIRTIO_NET_F_MRG_RXBUF)] {
            drop(goes_on(&site, &rig, Offer { mtu, ..offer.with(VIRTIO_NET_F_MTU) }));
        }
    }
    let mut device = goes_on(&site, &rig, Offer::usual());
    rig.stop(Some(&mut device));
}

fn at_the_end(failure: Failure) {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    let fails = Some((FrontendReq::GET_VRING_BASE, failure));
    let mut device = goes_on(&site, &rig, Offer { fails, ..Offer::usual() });
    let ended = rig.stop(Some(&mut device));
    assert_eq!((ended.frames, ended.drops.len()), (1, 0));
}

fn legacy() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    let legacy = Offer::usual().without(VIRTIO_F_VERSION_1);
    for offer in [Offer { features: 0, ..Offer::usual() }, legacy] {
        let mut device = site.accept(offer);
        device.serve_to_end();
        assert!(!device.is_up(0) && !device.log.contains(&FrontendReq::SET_VRING_ENABLE));
    }
    let mut device = goes_on(&site, &rig, Offer::usual());
    rig.stop(Some(&mut device));
}

fn all_features() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    let offer = Offer { features: u64::MAX, protocol: u64::MAX, ..Offer::usual() };
    let mut device = goes_on(&site, &rig, offer);
    let reserved = !((1 << 24) - 1) & ((1 << 28) - 1);
    assert_eq!(device.features & (reserved | bit(VIRTIO_NET_F_GUEST_UFO)), 0);
    rig.stop(Some(&mut device));
}

fn dependent() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    for (feature, needs) in [
        (VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_CSUM),
        (VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_CSUM),
        (VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4),
        (VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_CSUM),
        (VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_CSUM),
        (VIRTIO_NET_F_MQ, VIRTIO_NET_F_CTRL_VQ),
        (VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_CTRL_VQ),
    ] {
        let offer = Offer { features: bit(VIRTIO_F_VERSION_1) | 1 << 30, ..Offer::usual() };
        let device = goes_on(&site, &rig, offer.with(feature));
        assert_eq!(device.features & bit(feature), 0, "{feature} without {needs}");
    }
    let offer = Offer::usual();
    let mut device = goes_on(&site, &rig, offer);
    rig.stop(Some(&mut device));
}

/// The device itself checks that no feature is accepted that was not offered.
fn subsets() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    let mut features = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..20 {
        features = features.rotate_left(23).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let offer = Offer { features: features | bit(VIRTIO_F_VERSION_1), ..Offer::usual() };
        drop(goes_on(&site, &rig, offer));
    }
    let mut device = goes_on(&site, &rig, Offer::usual());
    rig.stop(Some(&mut device));
}
