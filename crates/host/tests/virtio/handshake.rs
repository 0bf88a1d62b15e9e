//! Back ends that are odd before there is a ring.

use vhost::vhost_user::message::FrontendReq;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO,
    VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_MQ,
};

use crate::Test;
use crate::backend::{Backend, Failure, Offer, Site, bit};
use crate::device::Header;
use crate::frames::datagram;
use crate::rig::{Rig, Setup};

pub(crate) const TESTS: &[Test] = &[
    ("promise_5_closed_in_the_handshake", || fails(Failure::Close)),
    ("promise_5_silence_in_the_handshake", || fails(Failure::Silence)),
    ("promise_5_no_answer_in_the_handshake", || fails(Failure::Nonsense(0))),
    ("promise_5_nonsense_in_the_handshake", || fails(Failure::Nonsense(8))),
    ("promise_5_too_much_in_the_handshake", || fails(Failure::Nonsense(4000))),
    ("promise_5_silence_at_the_end", at_the_end),
    ("feat_4_no_features_or_those_of_a_legacy_device_are_refused", legacy),
    ("feat_3_all_64_features_are_no_reason_to_fail", all_features),
    ("feat_2_what_a_feature_depends_on_is_accepted_with_it_or_neither", dependent),
    ("feat_1_every_subset_is_answered_with_a_subset", subsets),
];

/// After whatever was, a device is met and used.
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
        // Where nonsense makes sense, it may come up.
        let _ = site.accept(offer).come_up();
    }
    let mut device = goes_on(&site, &rig, pairs);
    rig.stop(Some(&mut device));
}

fn at_the_end() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    let fails = Some((FrontendReq::GET_VRING_BASE, Failure::Silence));
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

/// That nothing was accepted that was not offered is judged by the device.
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
