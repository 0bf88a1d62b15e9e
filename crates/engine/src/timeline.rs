//! Timeline of a run: its counters at a few hundred times, from which pictures are drawn.

use std::sync::Arc;

use forebay_rx::CpuId;
use forebay_rx::counters::{Counter, DeliveryCounters, Histogram, IntakeCounters};

/// Upper bound of the samples of a timeline. Of more, every second one is dropped.
pub const SAMPLES_MAX: usize = 256;

/// Counters of a run at several times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Timeline {
    /// CPUs, in the order of [`TimelineSample::cpus`].
    pub cpus: Vec<CpuId>,
    /// Samples, the oldest first; the first is of the start and the last of the end of the run.
    pub samples: Vec<TimelineSample>,
    /// Waits of packets in backlogs over the whole run, in ns: the upper bound of each bucket, and
    /// the number of packets in it. The last bucket has no bound.
    pub waits: Vec<(Option<u64>, u64)>,
    /// Durations of held moves, likewise.
    pub holds: Vec<(Option<u64>, u64)>,
}

/// Counters up to one time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TimelineSample {
    /// Time since the start of the run, in nanoseconds.
    pub at_ns: u64,
    /// Counters of each CPU.
    pub cpus: Vec<CpuSample>,
    /// Number of times that a flow-table slot changed its CPU.
    pub moves: u64,
    /// Number of held moves begun.
    pub holds: u64,
}

/// Counters of one CPU up to one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuSample {
    /// Number of frames delivered.
    pub packets: u64,
    /// Number of packets whose waits were measured.
    pub waited: u64,
    /// Sum of these waits, in nanoseconds.
    pub waited_ns: u64,
}

/// Recorder of a timeline. Its reader disturbs no CPU of the run.
#[derive(Debug)]
pub struct TimelineRecorder {
    queues: Vec<Arc<IntakeCounters>>,
    cpus: Vec<(CpuId, Arc<DeliveryCounters>)>,
    began_ns: u64,
    /// Least time between two samples; doubled whenever there are too many.
    period_ns: u64,
    samples: Vec<TimelineSample>,
}

impl TimelineRecorder {
    /// Recorder of a run that began at `began_ns`, with counters of zero; `period_ns` is the least
    /// time between two samples at first. The recorder may be created later than the run: its first
    /// interval then has all that was counted before the first observation.
    #[must_use]
    pub fn new(
        queues: Vec<Arc<IntakeCounters>>,
        cpus: Vec<(CpuId, Arc<DeliveryCounters>)>,
        began_ns: u64,
        period_ns: u64,
    ) -> Self {
        let mut samples = Vec::with_capacity(SAMPLES_MAX + 1);
        let none = vec![CpuSample::default(); cpus.len()];
        samples.push(TimelineSample { at_ns: 0, cpus: none, moves: 0, holds: 0 });
        Self { queues, cpus, began_ns, period_ns: period_ns.max(1), samples }
    }

    /// Takes a sample if one is due.
    pub fn observe(&mut self, now_ns: u64) {
        let last_ns = self.samples.last().map_or(0, |last| last.at_ns);
        if now_ns.saturating_sub(self.began_ns) < last_ns.saturating_add(self.period_ns) {
            return;
        }
        if self.samples.len() >= SAMPLES_MAX {
            let mut is_kept = false;
            self.samples.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            self.period_ns = self.period_ns.saturating_mul(2);
        }
        self.sample(now_ns);
    }

    /// Time after which a sample is due, in nanoseconds.
    #[must_use]
    pub fn period_ns(&self) -> u64 {
        self.period_ns
    }

    /// Timeline of a run that ends at `now_ns`.
    #[must_use]
    pub fn finish(mut self, now_ns: u64) -> Timeline {
        let at_ns = now_ns.saturating_sub(self.began_ns);
        // Counters at the end may be newer than those of a sample at the same time.
        if self.samples.len() > 1 && self.samples.last().is_some_and(|last| last.at_ns >= at_ns) {
            self.samples.pop();
        }
        self.sample(now_ns);
        let waits = self.cpus.iter().map(|(_, delivery)| &delivery.wait_ns);
        let holds = self.queues.iter().map(|queue| &*queue.held_ns);
        Timeline {
            cpus: self.cpus.iter().map(|(cpu, _)| *cpu).collect(),
            waits: summed(waits),
            holds: summed(holds),
            samples: self.samples,
        }
    }

    fn sample(&mut self, now_ns: u64) {
        let sum = |counter: fn(&IntakeCounters) -> &Counter| -> u64 {
            self.queues.iter().map(|queue| counter(queue).get()).sum()
        };
        let cpus = self.cpus.iter().map(|(_, delivery)| CpuSample {
            packets: delivery.frames.get(),
            waited: delivery.wait_ns.buckets().map(|(_, count)| count).sum(),
            waited_ns: delivery.wait_ns.sum(),
        });
        let sample = TimelineSample {
            at_ns: now_ns.saturating_sub(self.began_ns),
            cpus: cpus.collect(),
            moves: sum(|queue| &queue.moves),
            holds: sum(|queue| &queue.holds),
        };
        self.samples.push(sample);
    }
}

/// Buckets of all histograms together.
fn summed<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> Vec<(Option<u64>, u64)> {
    let mut buckets: Vec<_> = Histogram::default().buckets().collect();
    for histogram in histograms {
        for (bucket, (_, count)) in buckets.iter_mut().zip(histogram.buckets()) {
            bucket.1 += count;
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
    use forebay_rx::Handler;
    use forebay_rx::delivery::Batch;
    use forebay_rx::hash::Hasher;
    use forebay_sys::clock::Clock;
    use forebay_sys::cpu_list::CpuList;
    use proptest::prelude::*;

    use super::*;
    use crate::{Config, Engine};

    struct Nothing;

    impl Handler for Nothing {
        fn handle(&mut self, _: &mut Batch<'_>) {}
    }

    fn recorder(began_ns: u64, period_ns: u64) -> TimelineRecorder {
        let queues = vec![Arc::new(IntakeCounters::new(1))];
        let cpus = vec![(CpuId(0), Arc::default())];
        TimelineRecorder::new(queues, cpus, began_ns, period_ns)
    }

    proptest! {
        #[test]
        fn plt_3_samples_are_few_and_ordered(
            steps_ns in proptest::collection::vec(0_u64..5_000, 0..2_000),
            began_ns in 0_u64..1 << 40,
        ) {
            let mut recorder = recorder(began_ns, 100);
            let mut now_ns = began_ns;
            for step_ns in steps_ns {
                now_ns += step_ns;
                recorder.observe(now_ns);
                prop_assert!(recorder.samples.len() <= SAMPLES_MAX);
            }
            let timeline = recorder.finish(now_ns);
            let times: Vec<_> = timeline.samples.iter().map(|sample| sample.at_ns).collect();
            prop_assert_eq!(times[0], 0);
            prop_assert_eq!(times[times.len() - 1], now_ns - began_ns);
            prop_assert!(times.len() <= SAMPLES_MAX + 1 && times.is_sorted());
        }
    }

    /// A recorder whose thread is late, even later than the run, has all packets since the start.
    #[test]
    fn plt_2_late_recorder_misses_nothing() {
        let plan = SyntheticPlan { frames: 1_000, ..SyntheticPlan::default() };
        let hasher = Arc::new(Hasher::keyed(&[1; 16], false));
        let config = Config::new(CpuList::new([CpuId(0)]), hasher);
        let source = Box::new(SyntheticSource::new(plan, None));
        let engine = Engine::build(&config, vec![source], Clock::machine(), |_| Nothing).unwrap();
        let state = engine.state();
        engine.run().unwrap();
        let samples = state.timeline(1).unwrap().finish(state.now_ns()).samples;
        let packets: Vec<_> = samples.iter().map(|sample| sample.cpus[0].packets).collect();
        assert_eq!(packets, [0, 1_000]);
        assert!(samples[0].at_ns == 0 && samples[1].at_ns > 0);
    }

    #[test]
    fn plt_3_long_runs_keep_resolution() {
        let mut recorder = recorder(0, 10);
        (0..1_000_000).for_each(|now_ns| recorder.observe(now_ns));
        let samples = recorder.finish(1_000_000).samples;
        assert!(samples.len() > SAMPLES_MAX / 2, "{}", samples.len());
        let gaps = samples.windows(2).map(|pair| pair[1].at_ns - pair[0].at_ns);
        assert!(gaps.max() < Some(1_000_000 / (SAMPLES_MAX as u64 / 2) * 2));
    }
}
