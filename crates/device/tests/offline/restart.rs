//! Back ends that are killed and restarted under load.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use forebay_device::{Device, DeviceConfig, Via};

use crate::Test;
use crate::back_end::frames::{datagram, number_of};
use crate::back_end::queues::Header;
use crate::back_end::rig::{Pauses, Rig, Setup};
use crate::back_end::session::{Backend, DEADLINE, Offer, Site};

pub(crate) const TESTS: &[Test] = &[
    ("stat_1_traffic_resumes_after_every_restart", || restarts(false)),
    ("stat_1_and_with_packed_rings", || restarts(true)),
    ("stat_1_brief_sessions_are_followed_by_others", brief),
    ("vq_10_rings_of_unseen_session_zeroed", unseen),
];

/// Number of restarts, unless the environment variable `RESTARTS` is set.
const RESTARTS: u32 = 10;

/// Kills each device in the middle of work: buffers returned or not, packets incomplete.
fn restarts(packed: bool) {
    let restarts = std::env::var("RESTARTS").map_or(RESTARTS, |count| count.parse().unwrap());
    let mut site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual().packed(packed).echoing());
    let offer = if packed { Offer::usual().packed() } else { Offer::usual() };
    let (mut number, mut listening) = (0, Instant::now());
    let mut given = 0;
    let mut pauses = Pauses::default();
    for round in 0..restarts {
        let mut device = site.meet(offer.clone());
        let before = rig.delivered();
        device.deliver(0, Header::default(), &datagram(0, 60)).unwrap();
        given += 1;
        await_first(&rig, &mut device, before);
        pauses.add(listening);
        while rig.delivered() < before + 300 {
            number += 1;
            let len = [60, 1514, 9000, 300][number as usize % 4];
            device.deliver(0, Header::default(), &datagram(number, len)).unwrap();
            given += 1;
            device.sent(0);
        }
        let header = Header { num_buffers: Some(3), ..Header::default() };
        let half = device.place(0, header, &datagram(0, 1400)).unwrap();
        match round % 4 {
            0 => {}
            1 => {
                device.give(0, &half);
                given += 1;
            }
            2 => site.leave(),
            _ => site.desert(),
        }
        drop(device);
        if round % 4 >= 2 {
            site.listen();
        }
        listening = Instant::now();
    }
    pauses.print("restarts");
    let mut device = site.meet(offer);
    device.wait("as many sessions", |_| rig.sessions() == u64::from(restarts) + 1).unwrap();
    let ended = rig.stop(Some(&mut device));
    assert!(ended.frames >= u64::from(restarts) * 300, "{ended:?}");
    assert!(ended.drops.keys().all(|&reason| reason == "length_error"), "{:?}", ended.drops);
    let dropped: u64 = ended.drops.values().sum();
    assert_eq!(ended.frames, ended.seen.len() as u64 + dropped, "promise 2");
    assert!(ended.frames <= given, "{} frames of {given}", ended.frames);
    let numbers: Vec<_> = ended.seen.iter().filter_map(|it| number_of(&it.bytes)).collect();
    assert_eq!(numbers.len(), ended.seen.len(), "a packet that the device did not send");
    let sent = numbers.iter().filter(|&&number| number > 0); // each session begins with a zero
    let different: BTreeSet<_> = sent.clone().collect();
    assert_eq!(different.len(), sent.count(), "delivered twice");
}

/// Waits for the first packet of a device, polling as often as possible.
fn await_first(rig: &Rig, device: &mut Backend, before: usize) {
    let began = Instant::now();
    while rig.delivered() == before {
        assert!(began.elapsed() < DEADLINE, "nothing came after a restart");
        device.serve(Duration::ZERO).unwrap();
        std::thread::yield_now();
    }
}

/// No CPU polls the device, so no source sees the session. The next device checks that the rings are
/// zeroed.
fn unseen() {
    let site = Site::new();
    let path = site.path();
    let config = DeviceConfig::new(path.to_str().unwrap(), Via::VhostUser);
    let driver = Device::open(&config).unwrap();
    let mut device = site.meet(Offer::usual());
    [0, 1].into_iter().for_each(|ring| device.scribble(ring, 0xff));
    drop(device);
    drop(site.meet(Offer::usual()));
    drop(driver);
}

/// The driver may notice the end before it sleeps, during its sleep, or in between.
fn brief() {
    let site = Site::new();
    let rig = Rig::start(&site.path(), &Setup::usual());
    for _ in 0..40 {
        drop(site.meet(Offer::usual()));
    }
    let mut device = site.meet(Offer::usual());
    device.deliver(0, Header::default(), &datagram(1, 500)).unwrap();
    rig.await_delivered(&mut device, 1).unwrap();
    rig.stop(Some(&mut device));
}
