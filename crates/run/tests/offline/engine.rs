//! Engine under changes, pauses and failures: flows stay in order and frames are accounted for.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use forebay_device::Rate;
use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
use forebay_engine::knobs::Script;
use forebay_engine::{Config, Engine, Outcome, VirtualCosts, WhenFull};
use forebay_run::replay::{Input, Mode, Replay, ReplayConfig, ReplayReport, TracePlan};
use forebay_rx::arrive::{Burst, PollRequest, Polled, SourceError};
use forebay_rx::delivery::Batch;
use forebay_rx::hash::Hasher;
use forebay_rx::{CpuId, DropReason, Handler, Packet, Source};
use forebay_sys as sys;
use forebay_sys::Error;
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;
use proptest::prelude::*;

use crate::replays::{drop_when_full, plan, run, script, stepped};

const FLOWS: [u32; 4] = [1, 7, 64, 512];

/// Start value of counters that every run wraps.
const NEAR_WRAP: u32 = u32::MAX - 20;

fn traffic(frames: u64, flows: u32) -> SyntheticPlan {
    SyntheticPlan { frames, flows, ..SyntheticPlan::default() }
}

/// Script that writes these masks in turn, every `period` frames.
fn flips(frames: u64, period: u64, masks: &[&str]) -> Script {
    let starts = (period..frames).step_by(usize::try_from(period).unwrap());
    let changes = starts.zip(masks.iter().cycle());
    let changes: Vec<_> = changes.map(|(at, mask)| format!("{at}:rps_cpus={mask}")).collect();
    script(&changes.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Checks that all frames were delivered, as in a run that waits when full and is never paused.
fn assert_all_delivered(report: &ReplayReport, frames: u64) {
    assert_eq!(
        (report.path.packets_in, report.path.delivered),
        (frames, frames),
        "{:?}",
        report.path.dropped
    );
}

mod any_run {
    use super::*;

    /// Changes at random frames; those that can cost packets only if the run may be `lossy`.
    fn changes(cpus: u16, frames: u64, lossy: bool) -> impl Strategy<Value = Vec<String>> {
        let knob = prop_oneof![
            4 => (1..1u32 << cpus).prop_map(|mask| format!("rps_cpus={mask:x}")),
            1 => Just("rps_cpus=0".to_owned()),
            u32::from(lossy) => (0..300u32).prop_map(|max| format!("netdev_max_backlog={max}")),
            u32::from(lossy) => (0..cpus).prop_map(|cpu| format!("pause={cpu}")),
            u32::from(lossy) => (0..cpus).prop_map(|cpu| format!("resume={cpu}")),
        ];
        let change = (0..frames, knob).prop_map(|(frame, knob)| format!("{frame}:{knob}"));
        prop::collection::vec(change, 0..40)
    }

    prop_compose! {
        fn any_plan(lossy: bool)(
            (cpus, changes) in (1..=4u16).prop_flat_map(move |cpus| {
                (Just(cpus), changes(cpus, 3000, lossy))
            }),
            queues in 1..=3u16,
            flows in prop::sample::select(&FLOWS[..]),
            seed in any::<u64>(),
            start in prop_oneof![Just(0), Just(NEAR_WRAP), any::<u32>()],
            rps_flow_cnt in prop::sample::select(&[1, 16, 4096][..]),
            move_after in prop::sample::select(&[0, 3, 64][..]),
            hold_max in prop::sample::select(&[64, 100, 4096][..]),
            work_ns in prop::sample::select(&[0, 100, 1000][..]),
        ) -> ReplayConfig {
            let mut plan = stepped(cpus, SyntheticPlan { seed, ..traffic(3000, flows) }, seed);
            let script = script(&changes.iter().map(String::as_str).collect::<Vec<_>>());
            plan.queues = NonZeroU16::new(queues).unwrap();
            plan.work_ns = work_ns;
            plan.engine.script = script;
            plan.engine.start_counters = start;
            plan.engine.rps_flow_cnt = rps_flow_cnt;
            plan.engine.move_after.packets = move_after;
            plan.engine.hold_max = hold_max;
            plan.engine.netdev_max_backlog = 200;
            plan
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(192))]

        #[test]
        fn promise_1_and_2_a_source_that_waits_loses_nothing(plan in any_plan(false)) {
            assert_all_delivered(&run(plan), 3000);
        }

        #[test]
        fn promise_1_and_2_hold_under_pauses_and_drops(
            mut plan in any_plan(true),
        ) {
            drop_when_full(&mut plan);
            let report = run(plan);
            prop_assert_eq!(report.path.packets_in, 3000);
            for cpu in &report.path.per_cpu {
                prop_assert!(cpu.backlog_max <= 301, "cpu{}: {}", cpu.cpu, cpu.backlog_max);
            }
        }
    }
}

#[test]
fn promise_1_flows_follow_masks_in_order() {
    let mut held = 0;
    for flows in FLOWS {
        for cpus in 2..=4 {
            let mut plan = stepped(cpus, traffic(20_000, flows), 11);
            plan.work_ns = 200;
            plan.engine.start_counters = NEAR_WRAP;
            plan.engine.script = flips(20_000, 1000, &["1", "2", "3"]);
            let report = run(plan);
            assert_all_delivered(&report, 20_000);
            assert_eq!(report.flows, u64::from(flows));
            assert!(
                report.path.steer.moves > 0,
                "{flows} flows, {cpus} CPUs: {:?}",
                report.path.steer
            );
            held += report.path.steer.held;
        }
    }
    assert!(held > 0, "no move was a held one");
}

/// Run that two CPUs sustain with ease, with the changes of a script.
fn with_ease(changes: &[&str]) -> ReplayReport {
    let rate = Rate::PerSecond(1_000_000);
    let mut plan = stepped(2, SyntheticPlan { rate, ..traffic(10_000, 64) }, 5);
    plan.engine.netdev_max_backlog = 200;
    plan.engine.script = script(changes);
    drop_when_full(&mut plan);
    run(plan)
}

#[test]
fn promise_2_and_3_paused_cpu_keeps_backlog_only() {
    assert_eq!(with_ease(&[]).path.dropped_in_all(), 0);
    let report = with_ease(&["1000:pause=1", "5000:resume=1"]);
    assert_eq!(report.path.dropped["backlog_full"], report.path.dropped_in_all());
    assert_eq!(report.path.per_cpu[1].dropped, report.path.dropped_in_all());
    assert_eq!(report.path.per_cpu[1].backlog_max, 201);
    assert!(
        report.path.per_cpu[1].packets > report.path.per_cpu[1].dropped,
        "it went on: {report:?}"
    );
}

#[test]
fn promise_2_exhausted_memory_drops_by_name() {
    let large = SyntheticPlan { payload_bytes: (17_000, 17_000), ..traffic(6000, 64) };
    let mut plan = stepped(2, large, 1);
    plan.engine.script = script(&["0:pause=0", "0:pause=1", "5500:resume=0", "5500:resume=1"]);
    let report = run(plan);
    assert_eq!(report.path.packets_in, 6000, "the frame that ends the pause comes");
    assert!(report.path.dropped["no_buffer"] > 0, "{report:?}");
}

#[test]
fn promise_2_pauses_end_with_the_source() {
    assert_all_delivered(&with_ease(&["9900:pause=1", "9900:pause=0"]), 10_000);
}

#[test]
fn rps_9_foreign_cpus_are_left_out() {
    for mask in ["0", "ff0", "80000000,00000000"] {
        let mut plan = stepped(2, traffic(1000, 64), 3);
        plan.engine.script = script(&[&format!("0:rps_cpus={mask}")]);
        let report = run(plan);
        assert_all_delivered(&report, 1000);
        assert_eq!(report.path.per_cpu[1].packets, 0, "{mask} leaves no CPU: RPS is off");
    }
}

mod live {
    use super::*;

    /// Two CPUs of this machine. If there is only one, both threads run on it.
    fn two_cpus() -> Vec<CpuId> {
        let allowed = sys::allowed_cpus();
        let others = (0..).map(CpuId).filter(|cpu| !allowed.contains(cpu));
        allowed.iter().copied().chain(others).take(2).collect()
    }

    /// Masks of the second CPU, of the first, and of both.
    fn masks(cpus: &[CpuId]) -> Vec<String> {
        let mask = |cpus: &[CpuId]| CpuList::new(cpus.iter().copied()).to_mask(4096);
        vec![mask(&cpus[1..]), mask(&cpus[..1]), mask(cpus)]
    }

    #[test]
    fn promise_1_and_2_hold_on_threads_while_masks_change() {
        let cpus = two_cpus();
        let masks = masks(&cpus);
        let masks: Vec<_> = masks.iter().map(String::as_str).collect();
        for (flows, queues) in FLOWS.into_iter().zip([1, 2, 3, 2]) {
            let input = Input::Synthetic(traffic(60_000, flows));
            let mut plan = plan(cpus.iter().copied(), input, Mode::Live);
            plan.queues = NonZeroU16::new(queues).unwrap();
            plan.engine.start_counters = NEAR_WRAP;
            plan.work_ns = 300; // so that a batch in progress is older than the head for a while
            plan.engine.script = flips(60_000, 200, &masks);
            let report = run(plan);
            assert_all_delivered(&report, 60_000);
            assert_eq!(report.flows, u64::from(flows));
            assert!(report.path.steer.moves > 0, "{flows} flows: {:?}", report.path.steer);
        }
    }

    #[test]
    fn promise_2_pauses_on_threads_lose_nothing_silently() {
        let cpus = two_cpus();
        let (first, second) = (cpus[0], cpus[1]);
        let mut plan = plan(cpus, Input::Synthetic(traffic(60_000, 64)), Mode::Live);
        plan.engine.script = script(&[
            &format!("5000:pause={second}"),
            &format!("15000:resume={second}"),
            &format!("25000:pause={first}"),
            &format!("30000:resume={first}"),
            &format!("50000:pause={second}"),
        ]);
        drop_when_full(&mut plan);
        let report = run(plan);
        assert_eq!(report.path.packets_in, 60_000);
        assert!(report.path.dropped["backlog_full"] > 0, "a pause outlasts a backlog: {report:?}");
    }

    #[test]
    fn promise_4_stop_delivers_what_was_received() {
        let cpus = two_cpus();
        let endless = traffic(u64::MAX, 64);
        let mut plan = plan(cpus, Input::Synthetic(endless), Mode::Live);
        plan.queues = NonZeroU16::new(2).unwrap();
        let replay = Replay::open(plan).unwrap();
        let (stopper, progress) = (replay.stopper(), Arc::clone(replay.progress()));
        let stops = thread::spawn(move || {
            while progress.done.load(Ordering::Relaxed) < 10_000 {
                thread::yield_now();
            }
            stopper.stop();
        });
        let report = replay.run().unwrap();
        stops.join().unwrap();
        assert_eq!(report.broken_promises(), [""; 0]);
        assert_eq!((report.path.queued, report.path.dropped_in_all()), (0, 0));
        assert_eq!(report.path.delivered, report.path.packets_in);
    }

    #[test]
    fn handler_panic_ends_run_with_message() {
        let cpus = two_cpus();
        let sources = vec![made_up(traffic(100_000, 64))];
        let config = config(&cpus);
        let engine = Engine::build(&config, sources, Clock::machine(), |_| Fused(500)).unwrap();
        let error = engine.run().map(|_| ()).unwrap_err();
        let Error::Panicked { cpu, message } = &error else { panic!("{error}") };
        assert!(cpus.contains(cpu));
        assert_eq!(message, "the fuse has blown");
        assert!(error.is_refusal());
    }

    /// Handler that panics once it has had this many packets.
    struct Fused(usize);

    impl Handler for Fused {
        fn handle(&mut self, batch: &mut Batch<'_>) {
            self.0 = self.0.checked_sub(batch.packets.len()).expect("the fuse has blown");
        }
    }
}

/// All deliveries of a run in order, and figures of its report.
fn schedule(seed: u64) -> String {
    let directory = crate::replays::directory("schedule");
    let mut plan = stepped(3, traffic(5000, 64), seed);
    plan.queues = NonZeroU16::new(2).unwrap();
    plan.engine.script = flips(5000, 300, &["6", "1", "7"]);
    plan.trace = Some(TracePlan { directory: directory.clone(), parse: false });
    let report = run(plan);
    let deliveries = std::fs::read_to_string(directory.join("deliver.csv")).unwrap();
    let figures = serde_json::to_value(&report).unwrap();
    let figures = ["elapsed_s", "per_cpu", "steer"].map(|name| figures[name].to_string());
    format!("{deliveries}{figures:?}")
}

#[test]
fn promise_9_a_seed_determines_the_whole_run() {
    assert!(schedule(1) == schedule(1));
    assert!(schedule(1) != schedule(2));
}

mod drops {
    use super::*;

    /// Run with twice the load that two CPUs can process.
    fn overload(flows: u32, changes: &[&str]) -> ReplayReport {
        let rate = Rate::PerSecond(2_000_000);
        let mut plan = stepped(2, SyntheticPlan { rate, ..traffic(20_000, flows) }, 5);
        plan.work_ns = 2000;
        plan.engine.script = script(changes);
        drop_when_full(&mut plan);
        let report = run(plan);
        assert_eq!(report.path.packets_in, 20_000);
        report
    }

    fn reasons(report: &ReplayReport) -> Vec<&'static str> {
        report.path.dropped.iter().filter(|(_, count)| **count > 0).map(|(name, _)| *name).collect()
    }

    #[test]
    fn promise_2_full_backlog_drops_by_name() {
        for flows in FLOWS {
            let report = overload(flows, &["0:netdev_max_backlog=100"]);
            assert_eq!(reasons(&report), ["backlog_full"], "{flows} flows");
            let by_cpu: u64 = report.path.per_cpu.iter().map(|cpu| cpu.dropped).sum();
            assert_eq!(by_cpu, report.path.dropped_in_all());
            assert!(report.path.per_cpu.iter().all(|cpu| cpu.backlog_max <= 101));
        }
    }

    #[test]
    fn promise_2_flow_limit_drops_by_name() {
        let report = overload(1, &["0:flow_limit_cpu_bitmap=1"]);
        assert_eq!(reasons(&report), ["flow_limit"], "one flow never fills the backlog");
        let report = overload(512, &["0:flow_limit_cpu_bitmap=1"]);
        assert_eq!(reasons(&report), ["backlog_full"], "no flow of many has more than its share");
    }

    #[test]
    fn promise_2_flow_limit_keeps_or_renews_table() {
        let after = |bitmaps: &[&str]| {
            let two_buckets = ["flow_limit_table_len=2", bitmaps[0], "flow_limit_table_len=4096"];
            let changes = two_buckets.iter().chain(&bitmaps[1..]).map(|it| format!("0:{it}"));
            let changes: Vec<_> = changes.collect();
            let report = overload(512, &changes.iter().map(String::as_str).collect::<Vec<_>>());
            report.path.dropped["flow_limit"] > 0
        };
        let off = "flow_limit_cpu_bitmap=";
        let first = "flow_limit_cpu_bitmap=1";
        let second = "flow_limit_cpu_bitmap=2";
        let both = "flow_limit_cpu_bitmap=3";
        assert!(after(&[first]), "flows that share a bucket share its limit");
        assert!(after(&[first, both, first]), "a CPU that stays keeps its table");
        assert!(!after(&[first, off, first]), "a CPU that returns has a new table");
        assert!(!after(&[first, second, first]), "a CPU that returns has a new table");
        assert!(!after(&[second, first]), "a CPU that is new has a new table");
    }

    #[test]
    fn promise_2_and_3_full_hold_drops_by_name() {
        let mut plan = stepped(2, traffic(20_000, 64), 5);
        plan.work_ns = 2000;
        plan.engine.hold_max = 8;
        plan.engine.move_after.packets = 0;
        plan.engine.script = flips(20_000, 500, &["1", "2"]);
        drop_when_full(&mut plan);
        let report = run(plan);
        assert_eq!(reasons(&report), ["backlog_full", "hold_full"]);
    }

    /// Handler that keeps every packet.
    #[derive(Default)]
    struct Hoarder(Vec<Packet>);

    impl Handler for Hoarder {
        fn handle(&mut self, batch: &mut Batch<'_>) {
            self.0.append(batch.packets);
        }
    }

    #[test]
    fn promise_4_kept_frames_are_missed() {
        let traffic = traffic(50_000, 64);
        let clock = Clock::virtual_at_zero();
        let config = Config { when_full: WhenFull::Drop, ..config(&[CpuId(0), CpuId(1)]) };
        let engine =
            Engine::build(&config, vec![made_up(traffic)], clock, |_| Hoarder::default()).unwrap();
        let outcome = engine.run_stepped(9, VirtualCosts::default());
        let kept: usize = outcome.handlers.iter().map(|hoarder| hoarder.0.len()).sum();
        assert_eq!(outcome.frames_away, kept);
        let lacked = outcome.queues[0].drops[DropReason::NoBuffer.index()].get();
        assert!(lacked > 0);
        assert_conserved(&outcome, 50_000);
    }
}

fn assert_conserved<H>(outcome: &Outcome<H>, frames: u64) {
    let came: u64 = outcome.queues.iter().map(|queue| queue.frames.get()).sum();
    let drops = outcome.queues.iter().flat_map(|queue| &queue.drops);
    let dropped: u64 = drops.map(forebay_rx::counters::Counter::get).sum();
    let delivered: u64 = outcome.cpus.iter().map(|cpu| cpu.delivery.frames.get()).sum();
    assert_eq!((came, dropped + delivered + outcome.queued), (frames, frames));
}

fn config(cpus: &[CpuId]) -> Config {
    Config::new(CpuList::new(cpus.iter().copied()), Arc::new(Hasher::keyed(&[3; 16], false)))
}

fn made_up(plan: SyntheticPlan) -> Box<dyn Source> {
    Box::new(SyntheticSource::new(plan, None))
}

/// A source that fails after its last frame.
struct Broken(SyntheticSource);

impl Source for Broken {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut forebay_buf::Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        match self.0.poll(ask, pool, burst)? {
            Polled::Exhausted => Err("the cable is gone".into()),
            polled => Ok(polled),
        }
    }
}

/// Handler that ignores packets.
struct Idler;

impl Handler for Idler {
    fn handle(&mut self, _: &mut Batch<'_>) {}
}

#[test]
fn data_before_source_failure_delivered() {
    let broken = Box::new(Broken(SyntheticSource::new(traffic(700, 64), None)));
    let sources: Vec<Box<dyn Source>> = vec![broken, made_up(traffic(300, 7))];
    let config = config(&[CpuId(0), CpuId(1)]);
    let engine = Engine::build(&config, sources, Clock::virtual_at_zero(), |_| Idler).unwrap();
    let outcome = engine.run_stepped(1, VirtualCosts::default());
    assert_conserved(&outcome, 1000);
    assert_eq!(outcome.frames_away, 0);
    let errors: Vec<_> = outcome.errors.iter().map(ToString::to_string).collect();
    assert_eq!(errors, ["the source of rx-0 failed: the cable is gone"]);
}

/// A source that ignores the request for its last frames.
struct Deaf(SyntheticSource);

impl Source for Deaf {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut forebay_buf::Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        self.0.poll(PollRequest { is_last: false, ..ask }, pool, burst)
    }
}

#[test]
fn promise_3_run_ends_despite_busy_source() {
    let rate = Rate::PerSecond(1_000);
    let endless = SyntheticPlan { frames: u64::MAX, rate, ..SyntheticPlan::default() };
    let deaf = Box::new(Deaf(SyntheticSource::new(endless, None)));
    let config = config(&[CpuId(0)]);
    let engine = Engine::build(&config, vec![deaf], Clock::virtual_at_zero(), |_| Idler).unwrap();
    engine.stopper().stop();
    let outcome = engine.run_stepped(1, VirtualCosts::default());
    let delivered = outcome.cpus[0].delivery.frames.get();
    assert!((1_000..10_000).contains(&delivered), "{delivered}");
    assert_conserved(&outcome, delivered);
}

#[test]
fn an_engine_needs_a_cpu() {
    let built = Engine::build(&config(&[]), Vec::new(), Clock::machine(), |_| Idler);
    assert!(matches!(built, Err(Error::Setting { what: "cpus", .. })));
}

#[test]
fn waiting_source_passes_smallest_backlog() {
    for packets in [0, 1, 10, 62, 63] {
        let mut plan = stepped(2, traffic(1000, 64), 3);
        plan.engine.netdev_max_backlog = packets;
        plan.engine.script = flips(1000, 100, &["1", "2", "3"]);
        assert_all_delivered(&run(plan), 1000);
    }
}

/// Compares durations: a run takes as long as its busiest CPU, which ranges give too many of 16 flows.
#[test]
fn rps_b1_engine_balances_few_flows() {
    let elapsed = |changes: &[&str]| {
        let mut plan = stepped(4, traffic(1_000_000, 16), 3);
        plan.work_ns = 2_000;
        plan.engine.script = script(changes);
        let path = run(plan).path;
        (path.elapsed_s, path.steer.balanced)
    };
    let (by_ranges, none) = elapsed(&[]);
    let (by_load, moved) = elapsed(&["0:rps_balance=load", "0:rps_balance_usecs=2000"]);
    assert!(none == 0 && moved > 0, "{moved} groups moved");
    assert!(by_load < by_ranges * 0.9, "{by_load} s by load, {by_ranges} s by ranges");
}
