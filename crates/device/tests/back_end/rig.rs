//! The driver under test: a device in an engine, and the packets that it delivers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_device::config::virtio::{Role, VirtioOptions};
use forebay_device::{Device, DeviceConfig, Facts, KernelCounts, Via};
use forebay_engine::{Config, Engine, Outcome, Stopper};
use forebay_rx::delivery::Batch;
use forebay_rx::hash::FlowHash;
use forebay_rx::parse::Checksum;
use forebay_rx::sink::Sink;
use forebay_rx::{DropReason, Handler};

use crate::back_end::frames::number_of;
use crate::back_end::session::{Backend, Closed, DEADLINE};

/// Packet as delivered to a handler.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Delivered {
    pub(crate) queue: u16,
    pub(crate) bytes: Vec<u8>,
    pub(crate) gso_size: u16,
    pub(crate) truesize: u32,
    pub(crate) checksum: Checksum,
    pub(crate) hash: FlowHash,
}

/// Handler of one CPU: copies all packets, and optionally sends them back.
struct Taker {
    seen: Arc<Mutex<Vec<Delivered>>>,
    way_back: Option<Box<dyn Sink>>,
}

impl Handler for Taker {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        let packets = batch.packets.iter().map(|packet| Delivered {
            queue: batch.rx_queue.0,
            bytes: packet.fragments().flatten().copied().collect(),
            gso_size: packet.gso_size(),
            truesize: packet.frame.truesize(),
            checksum: packet.headers.l4_checksum,
            hash: packet.hash,
        });
        self.seen.lock().unwrap().extend(packets);
        if let Some(way) = &mut self.way_back {
            way.send(batch.packets).unwrap();
        }
    }
}

/// Settings of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) virtio: VirtioOptions,
    pub(crate) queues: u16,
    /// True to use the device's hashes.
    pub(crate) device_hash: bool,
    /// True to send packets back to the device.
    pub(crate) echoes: bool,
}

impl Setup {
    /// Rings of 64 entries, one queue.
    pub(crate) fn usual() -> Self {
        let virtio = VirtioOptions { queue_size: 64, ..VirtioOptions::default() };
        Self { virtio, queues: 1, device_hash: false, echoes: false }
    }

    pub(crate) fn packed(mut self, packed: bool) -> Self {
        self.virtio.packed = packed;
        self
    }

    pub(crate) fn listening(mut self) -> Self {
        self.virtio.role = Role::Listen;
        self
    }

    pub(crate) fn echoing(self) -> Self {
        Self { echoes: true, ..self }
    }
}

/// Running driver.
pub(crate) struct Rig {
    engine: JoinHandle<Outcome<Taker>>,
    stopper: Stopper,
    seen: Arc<Mutex<Vec<Delivered>>>,
    counts: Vec<Arc<KernelCounts>>,
    pub(crate) facts: Facts,
}

/// Results of a run.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) frames: u64,
    pub(crate) drops: BTreeMap<&'static str, u64>,
    pub(crate) seen: Vec<Delivered>,
}

impl Rig {
    pub(crate) fn start(path: &Path, setup: &Setup) -> Self {
        let name = path.to_str().unwrap();
        let mut devices = [Device::open(&DeviceConfig {
            queues: setup.queues,
            device_hash: setup.device_hash,
            virtio: setup.virtio.clone(),
            ..DeviceConfig::new(name, Via::VhostUser)
        })
        .unwrap()];
        let (counts, facts) = (devices[0].counts.clone(), devices[0].facts.clone());
        let seen = Arc::<Mutex<Vec<_>>>::default();
        let config = Config::live();
        let takers = config.cpus.cpus().iter().map(|_| Taker {
            seen: Arc::clone(&seen),
            way_back: setup.echoes.then(|| devices[0].sink().unwrap()),
        });
        let mut takers: Vec<_> = takers.collect();
        let engine = Engine::over(&config, &mut devices, |_| takers.pop().unwrap()).unwrap();
        let stopper = engine.stopper();
        let engine = thread::spawn(move || {
            let outcome = engine.run().unwrap();
            // Ends the session, for which the back end may have to answer.
            drop(devices);
            outcome
        });
        Self { engine, stopper, seen, counts, facts }
    }

    /// Returns a counter, summed over all queues.
    pub(crate) fn count(&self, name: &str) -> u64 {
        let all = self.counts.iter().flat_map(|counts| counts.iter());
        all.filter(|(known, _)| *known == name).map(|(_, count)| count).sum()
    }

    /// Returns a fact; empty if unknown.
    pub(crate) fn fact(&self, name: &str) -> String {
        self.facts.all().get(name).cloned().unwrap_or_default()
    }

    /// Returns the queues that delivered packets came from.
    pub(crate) fn queues(&self) -> BTreeSet<u16> {
        self.seen.lock().unwrap().iter().map(|delivered| delivered.queue).collect()
    }

    /// Returns the number of sessions.
    pub(crate) fn sessions(&self) -> u64 {
        self.facts.all().get("sessions").map_or(0, |count| count.parse().unwrap())
    }

    /// Returns the number of packets delivered so far.
    pub(crate) fn delivered(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// Returns the numbers of unchanged packets, in the order of delivery.
    pub(crate) fn numbers(&self) -> Vec<u32> {
        self.seen.lock().unwrap().iter().filter_map(|it| number_of(&it.bytes)).collect()
    }

    /// Waits until that many packets were delivered.
    pub(crate) fn await_delivered(&self, device: &mut Backend, count: usize) -> Result<(), Closed> {
        device.wait("packets", |_| self.delivered() >= count)
    }

    /// Stops the run while the device continues, and checks that all packets are accounted for.
    pub(crate) fn stop(self, mut device: Option<&mut Backend>) -> Ended {
        self.stop_while(|| {
            let served = device.as_mut().map(|device| device.serve(Duration::from_millis(1)));
            if served != Some(Ok(())) {
                thread::sleep(Duration::from_millis(1));
            }
        })
    }

    /// Stops the run, calling `meanwhile` repeatedly until it ends.
    pub(crate) fn stop_while(self, mut meanwhile: impl FnMut()) -> Ended {
        self.stopper.stop();
        let began = Instant::now();
        while !self.engine.is_finished() {
            assert!(began.elapsed() < DEADLINE, "the run does not end");
            meanwhile();
        }
        let mut outcome = self.engine.join().unwrap();
        assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
        let panics: Vec<_> = outcome.cpus.iter().filter_map(|cpu| cpu.last_panic.clone()).collect();
        assert!(panics.is_empty(), "{panics:?}");
        let frames: u64 = outcome.queues.iter().map(|queue| queue.frames.get()).sum();
        let delivered: u64 = outcome.cpus.iter().map(|cpu| cpu.delivery.frames.get()).sum();
        let of = |reason: DropReason| -> u64 {
            outcome.queues.iter().map(|queue| queue.drops[reason.index()].get()).sum()
        };
        let drops = DropReason::ALL.map(|reason| (reason.name(), of(reason)));
        let drops: BTreeMap<_, _> = drops.into_iter().filter(|(_, count)| *count > 0).collect();
        let dropped: u64 = drops.values().sum();
        assert_eq!(frames, delivered + dropped + outcome.queued, "promise 2: {drops:?}");
        assert_eq!((outcome.queued, outcome.frames_still_away()), (0, 0), "promise 4");
        drop(outcome);
        let seen = std::mem::take(&mut *self.seen.lock().unwrap());
        Ended { frames, drops, seen }
    }
}

/// Times from a device's listening to the delivery of its first packet. Reported only, since they
/// depend on the machine.
#[derive(Default)]
pub(crate) struct Pauses(Vec<Duration>);

impl Pauses {
    /// Adds the time until now, when the first packet was delivered.
    pub(crate) fn add(&mut self, listening: Instant) {
        self.0.push(listening.elapsed());
    }

    pub(crate) fn print(mut self, what: &str) {
        self.0.sort_unstable();
        let Some((median, largest)) = self.0.get(self.0.len() / 2).zip(self.0.last()) else {
            return;
        };
        eprintln!(
            "{} {what}: from listening to the first packet {median:.1?} (median), {largest:.1?} (largest)",
            self.0.len()
        );
    }
}
