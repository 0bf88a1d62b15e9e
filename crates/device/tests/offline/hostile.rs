//! A device that violates the protocol: valid packets, a violation, valid packets. After any
//! violation nothing panics or hangs, no packet is lost uncounted, and the valid packets arrive
//! byte for byte.

use std::collections::BTreeSet;

use virtio_bindings::virtio_net::VIRTIO_NET_F_HASH_REPORT;

use crate::back_end::frames::datagram;
use crate::back_end::queues::Header;
use crate::back_end::rig::{Ended, Rig, Setup};
use crate::back_end::session::{Backend, Closed, Offer, Site, bit};

/// Number of valid packets before the violation, and after it.
const GOOD: u32 = 40;

/// Number of entries of a ring.
pub(crate) const RING: u16 = 64;

/// Result of a violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Comes {
    /// Frames are dropped: the reason, and their number.
    Drops(&'static str, u64),
    /// Nothing is dropped, but a counter rises: its name, and by how much.
    Counts(&'static str, u64),
    /// No effect: all delivered packets are valid.
    Nothing,
    /// The queue is shut, and a new session begins.
    Renews,
    /// Drops, or packets that were never sent.
    Anything,
}

/// Ring layouts in which the violation is possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum In {
    Both,
    Split,
    Packed,
}

/// Violation: name, layouts, result, action.
pub(crate) type Lie = (&'static str, In, Comes, fn(&mut Scene) -> Result<(), Closed>);

/// Driver, device, and the socket between them.
pub(crate) struct Scene {
    site: Site,
    pub(crate) rig: Rig,
    pub(crate) device: Backend,
    /// Number of the next valid packet.
    next: u32,
}

impl Scene {
    pub(crate) fn open(offer: Offer, packed: bool) -> Self {
        let offer = if packed { offer.packed() } else { offer };
        let site = Site::new();
        let mut setup = Setup::usual().packed(packed);
        setup.device_hash = offer.features & bit(VIRTIO_NET_F_HASH_REPORT) > 0;
        let rig = Rig::start(&site.path(), &setup);
        let mut device = site.meet(offer);
        assert_eq!(device.ring(0).place().size, RING);
        assert_eq!(device.has(VIRTIO_NET_F_HASH_REPORT), setup.device_hash);
        Self { site, rig, device, next: 0 }
    }

    /// Builds a valid packet, without delivering it.
    pub(crate) fn frame(&mut self, len: usize) -> Vec<u8> {
        self.next += 1;
        datagram(self.next, len)
    }

    /// Replaces the device by another one, which connects after this one has closed.
    pub(crate) fn restart(&mut self) {
        self.device.close();
        self.meet();
    }

    /// Ends the session, and waits until the driver looks for another device.
    pub(crate) fn end(&self) {
        self.device.close();
        self.site.await_front_end();
    }

    /// Connects another device after the previous one has gone.
    pub(crate) fn meet(&mut self) {
        self.device = self.site.meet(self.device.offer.clone());
    }

    /// Delivers valid packets and waits for them; short ones first, each in one buffer.
    fn good(&mut self) -> Result<BTreeSet<u32>, Closed> {
        let first = self.next + 1;
        for at in 0..GOOD {
            let len = if at < GOOD / 2 { 60 + usize::try_from(at).unwrap() * 7 } else { 1400 };
            let frame = self.frame(len);
            self.device.deliver(0, Header::default(), &frame)?;
        }
        let sent: BTreeSet<_> = (first..=self.next).collect();
        let rig = &self.rig;
        self.device
            .wait("good packets", |_| sent.is_subset(&rig.numbers().into_iter().collect()))?;
        Ok(sent)
    }

    /// Delivers valid packets, in a new session if this one ends.
    fn good_at_last(&mut self) -> BTreeSet<u32> {
        match self.good() {
            Ok(sent) => sent,
            Err(Closed) => {
                self.device = self.site.meet(self.device.offer.clone());
                self.good().unwrap()
            }
        }
    }

    /// Waits until a counter has reached `count`.
    pub(crate) fn await_count(&mut self, name: &str, count: u64) -> Result<(), Closed> {
        let rig = &self.rig;
        self.device.wait(name, |_| rig.count(name) >= count)
    }
}

/// Runs one violation in each of its layouts.
pub(crate) fn tell(offer: &Offer, (name, rings, comes, lie): Lie) {
    let layouts: &[bool] = match rings {
        In::Both => &[false, true],
        In::Split => &[false],
        In::Packed => &[true],
    };
    for &packed in layouts {
        eprintln!("{name}, {}", if packed { "packed" } else { "split" });
        let mut scene = Scene::open(offer.clone(), packed);
        scene.good().unwrap();
        let told = lie(&mut scene);
        if told == Err(Closed) {
            assert_eq!(comes, Comes::Renews, "{name}: the session ended");
            scene.device = scene.site.meet(scene.device.offer.clone());
        }
        let after = scene.good_at_last();
        let (sessions, count) = (
            scene.rig.sessions(),
            match comes {
                Comes::Counts(count, _) => scene.rig.count(count),
                _ => 0,
            },
        );
        let ended = scene.rig.stop(Some(&mut scene.device));
        let told = Told { sessions, count, after, all: scene.next };
        judge(name, comes, &told, &ended);
    }
}

/// Observations of a scene.
struct Told {
    sessions: u64,
    count: u64,
    /// Numbers of the valid packets after the violation.
    after: BTreeSet<u32>,
    /// Highest number.
    all: u32,
}

fn judge(name: &str, comes: Comes, told: &Told, ended: &Ended) {
    let numbers = ended.seen.iter().filter_map(|it| crate::back_end::frames::number_of(&it.bytes));
    let numbers: Vec<_> = numbers.collect();
    let seen: BTreeSet<_> = numbers.iter().copied().collect();
    assert!((1..=GOOD).all(|number| seen.contains(&number)), "{name}: of those before");
    assert!(told.after.is_subset(&seen), "{name}: of those behind");
    assert!(seen.iter().all(|number| *number <= told.all), "{name}: {seen:?}");
    let strange = ended.seen.len() - numbers.len();
    let drops: Vec<_> = ended.drops.iter().map(|(reason, count)| (*reason, *count)).collect();
    match comes {
        Comes::Drops(reason, count) => {
            assert_eq!((drops, strange), (vec![(reason, count)], 0), "{name}");
        }
        Comes::Counts(_, count) => {
            assert_eq!((told.count, drops, strange), (count, vec![], 0), "{name}");
        }
        Comes::Nothing => assert_eq!((drops, strange), (vec![], 0), "{name}"),
        Comes::Renews => assert!(told.sessions > 1, "{name}: {} sessions", told.sessions),
        Comes::Anything => {}
    }
    if comes != Comes::Renews && comes != Comes::Anything {
        assert_eq!(told.sessions, 1, "{name}: the session ended");
        assert_eq!(numbers.len(), seen.len(), "{name}: some came twice");
    }
}
