//! Back ends that are killed and started again, under load.

use crate::Test;
use crate::backend::{Offer, Site};
use crate::device::Header;
use crate::frames::datagram;
use crate::rig::{Rig, Setup};

pub(crate) const TESTS: &[Test] = &[
    ("stat_1_traffic_resumes_after_every_restart_and_all_is_accounted_for", || restarts(false)),
    ("stat_1_and_with_packed_rings", || restarts(true)),
    ("stat_1_sessions_that_end_as_soon_as_they_began_are_followed_by_others", brief),
];

/// How often; `RESTARTS` says otherwise.
const RESTARTS: u32 = 10;

/// Each is killed in the middle of something: buffers given back or not, packets half there.
fn restarts(packed: bool) {
    let restarts = std::env::var("RESTARTS").map_or(RESTARTS, |count| count.parse().unwrap());
    let mut site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual().packed(packed).echoing());
    let offer = if packed { Offer::usual().packed() } else { Offer::usual() };
    let mut number = 0;
    for round in 0..restarts {
        let mut device = site.meet(offer.clone());
        let before = rig.delivered();
        while rig.delivered() < before + 300 {
            number += 1;
            let len = [60, 1514, 9000, 300][number as usize % 4];
            device.deliver(0, Header::default(), &datagram(number, len)).unwrap();
            device.sent(0);
        }
        let header = Header { num_buffers: Some(3), ..Header::default() };
        let half = device.place(0, header, &datagram(0, 1400)).unwrap();
        match round % 4 {
            0 => {}
            1 => device.give(0, &half),
            2 => site.leave(),
            _ => site.desert(),
        }
        drop(device);
        if round % 4 >= 2 {
            site.listen();
        }
    }
    let mut device = site.meet(offer);
    device.wait("as many sessions", |_| rig.sessions() == u64::from(restarts) + 1).unwrap();
    let ended = rig.stop(Some(&mut device));
    assert!(ended.frames >= u64::from(restarts) * 300, "{ended:?}");
    assert!(ended.drops.keys().all(|&reason| reason == "length_error"), "{:?}", ended.drops);
}

/// The driver may see the end before it sleeps, while it does or on the way there.
fn brief() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    for _ in 0..200 {
        drop(site.meet(Offer::usual()));
    }
    let mut device = site.meet(Offer::usual());
    device.deliver(0, Header::default(), &datagram(1, 500)).unwrap();
    rig.await_delivered(&mut device, 1).unwrap();
    rig.stop(Some(&mut device));
}
