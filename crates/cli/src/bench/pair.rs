//! Repeats across two cores, classified by the distance of the cores.
//!
//! On a shared host the virtual CPUs move, from one second to the next, between threads of one
//! core, cores that share a cache, and cores that do not, and every figure across two cores changes
//! with them. So each repeat is short, and is preceded and followed by a measurement of the round
//! trip of one cache line. Figures are compared within a class only.

use std::collections::BTreeMap;
use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay_rx::CpuId;
use forebay_sys as sys;
use serde_json::{Value, json};

use super::BenchArgs;
use super::figures::{Figures, RoundSpread};
use super::solo::nanoseconds;
use crate::failure::Failure;

/// Upper bounds, exclusive, in ns, on the round trip between the two threads of a core, and between
/// cores that share a last-level cache.
const SIBLINGS_BELOW_NS: f64 = 85.0;
const SAME_CACHE_BELOW_NS: f64 = 260.0;

const BATCHES: usize = 5;
const TRIPS: u32 = 200;

/// Distance of two CPUs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum CacheClass {
    SmtSibling,
    SameL3,
    FarL3,
    /// The distance changed during the repeat.
    Moved,
}

impl CacheClass {
    fn of(round_trip_ns: f64) -> Self {
        match round_trip_ns {
            ns if ns < SIBLINGS_BELOW_NS => Self::SmtSibling,
            ns if ns < SAME_CACHE_BELOW_NS => Self::SameL3,
            _ => Self::FarL3,
        }
    }

    /// Class of a repeat that began at this distance and ended at another.
    pub(crate) fn until(self, after: Self) -> Self {
        if self == after { self } else { Self::Moved }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SmtSibling => "smt_sibling",
            Self::SameL3 => "same_l3",
            Self::FarL3 => "far_l3",
            Self::Moved => "moved",
        }
    }
}

/// State that the two sides of a benchmark share: one opens a round, the other closes it.
#[derive(Default)]
pub(super) struct Rounds {
    pub(super) probe: Probe,
    opened: AtomicU64,
    closed: AtomicU64,
}

/// Round number that means that no more rounds follow.
const END: u64 = u64::MAX;

impl Rounds {
    pub(super) fn open(&self, round: u64) {
        self.opened.store(round, Ordering::Release);
    }

    /// Announces that no more rounds follow.
    pub(super) fn end(&self) {
        self.open(END);
    }

    pub(super) fn wait_until_closed(&self, round: u64) {
        while self.closed.load(Ordering::Acquire) < round {}
    }

    pub(super) fn close(&self, round: u64) {
        self.closed.store(round, Ordering::Release);
    }

    /// Waits for a round, and answers the probe meanwhile. Returns false if no more rounds follow.
    pub(super) fn wait_until_open(&self, round: u64) -> bool {
        loop {
            match self.opened.load(Ordering::Acquire) {
                END => return false,
                opened if opened >= round => return true,
                _ => self.probe.answer_if_asked(),
            }
        }
    }
}

/// CPUs of a two-CPU benchmark: the first two.
pub(crate) fn two_of(cpus: &[CpuId]) -> Result<CpuPair, Failure> {
    match cpus {
        &[producer, consumer, ..] => Ok(CpuPair { producer, consumer }),
        _ => Err(Failure::usage(
            "this benchmark needs two CPUs, and only one may be used",
            "run it where there are two, or allow both (taskset)",
        )),
    }
}

/// CPUs of a two-CPU benchmark.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuPair {
    /// CPU that produces, and runs the benchmark.
    pub(crate) producer: CpuId,
    /// CPU that consumes.
    pub(crate) consumer: CpuId,
}

/// Distance of two CPUs at this time. The calling thread stays where it is; two others ask and
/// answer.
pub(crate) fn distance(cpus: CpuPair) -> CacheClass {
    let (probe, is_done) = (Probe::default(), AtomicBool::new(false));
    let round_trip_ns = thread::scope(|scope| {
        scope.spawn(|| {
            // Ignored, as below: the distance of unpinned threads is still one of this machine.
            let _ = sys::pin_to(cpus.consumer);
            while !is_done.load(Ordering::Relaxed) {
                probe.answer_if_asked();
                thread::yield_now();
            }
        });
        let asked = scope.spawn(|| {
            let _ = sys::pin_to(cpus.producer);
            let round_trip_ns = probe.round_trip_ns();
            is_done.store(true, Ordering::Relaxed);
            round_trip_ns
        });
        asked.join().unwrap_or(f64::INFINITY)
    });
    CacheClass::of(round_trip_ns)
}

/// Cache lines that the probe bounces between the CPUs.
#[derive(Debug, Default)]
pub(super) struct Probe {
    ask: PairLine<AtomicBool>,
    answer: PairLine<AtomicBool>,
    there: PairLine<AtomicU64>,
    back: PairLine<AtomicU64>,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct PairLine<T>(T);

impl Probe {
    /// Answering side: to be called whenever idle.
    pub(super) fn answer_if_asked(&self) {
        if !self.ask.0.load(Ordering::Relaxed) {
            return;
        }
        self.answer.0.store(true, Ordering::Release);
        while self.ask.0.load(Ordering::Relaxed) {
            self.back.0.store(self.there.0.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.answer.0.store(false, Ordering::Release);
    }

    /// Asking side: minimum round trip, in nanoseconds. The other side must be idle, or become
    /// idle.
    fn round_trip_ns(&self) -> f64 {
        self.ask.0.store(true, Ordering::Relaxed);
        while !self.answer.0.load(Ordering::Acquire) {
            hint::spin_loop();
        }
        let batch = |_| {
            let started = Instant::now();
            for _ in 0..TRIPS {
                let trip = self.there.0.load(Ordering::Relaxed) + 1;
                self.there.0.store(trip, Ordering::Relaxed);
                while self.back.0.load(Ordering::Relaxed) != trip {}
            }
            nanoseconds(started.elapsed()) / f64::from(TRIPS)
        };
        let best = (0..BATCHES).map(batch).fold(f64::INFINITY, f64::min);
        self.ask.0.store(false, Ordering::Relaxed);
        while self.answer.0.load(Ordering::Acquire) {
            hint::spin_loop();
        }
        best
    }
}

/// Repeats until one class has enough samples. `repeat` returns one sample.
pub(super) fn measure(
    args: &BenchArgs,
    name: &'static str,
    unit: &'static str,
    probe: &Probe,
    mut repeat: impl FnMut() -> f64,
) -> Figures {
    const WARM_UP: usize = 2;
    let mut classes: BTreeMap<CacheClass, Vec<f64>> = BTreeMap::new();
    let started = Instant::now();
    let mut before_ns = probe.round_trip_ns();
    for round in 0.. {
        let enough = classes.iter().any(|(class, samples)| {
            *class != CacheClass::Moved && samples.len() >= args.reps as usize
        });
        let is_late = round > WARM_UP && started.elapsed() > Duration::from_secs(args.secs);
        if enough || is_late {
            break;
        }
        let sample = repeat();
        let after_ns = probe.round_trip_ns();
        let class = CacheClass::of(before_ns).until(CacheClass::of(after_ns));
        if round >= WARM_UP {
            classes.entry(class).or_default().push(sample);
        }
        before_ns = after_ns;
    }
    file(name, unit, &classes, before_ns)
}

/// Builds the figures, of the class with the most repeats; none if the distance changed during all
/// of them.
fn file(
    name: &'static str,
    unit: &'static str,
    classes: &BTreeMap<CacheClass, Vec<f64>>,
    round_trip_ns: f64,
) -> Figures {
    let stayed = classes.iter().filter(|(class, _)| **class != CacheClass::Moved);
    let most = stayed.max_by_key(|(_, samples)| samples.len());
    let (class, spread) = match most {
        Some((class, samples)) => (class.name(), RoundSpread::of(samples)),
        None => ("none", RoundSpread::default()),
    };
    let all: serde_json::Map<String, Value> = classes
        .iter()
        .map(|(class, samples)| (class.name().to_owned(), json!(RoundSpread::of(samples))))
        .collect();
    Figures::new(name, unit, spread)
        .with("class", class)
        .with("classes", all)
        .with("round_trip_ns", round_trip_ns.round())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moved_repeats_are_no_result() {
        let mut classes = BTreeMap::from([(CacheClass::Moved, vec![1.0, 2.0])]);
        let class = |classes: &_| json!(file("ring", "ns", classes, 100.0))["class"].clone();
        assert_eq!(class(&classes), "none");
        classes.insert(CacheClass::FarL3, vec![4.0]);
        assert_eq!(class(&classes), "far_l3");
    }

    #[test]
    fn round_trips_named_as_peers() {
        let classes = [53.0, 125.0, 500.0].map(CacheClass::of);
        assert_eq!(classes, [CacheClass::SmtSibling, CacheClass::SameL3, CacheClass::FarL3]);
    }
}
