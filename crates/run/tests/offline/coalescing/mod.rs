//! Coalescing in the whole engine, on arrival or on delivery: under changes and drops, flows stay
//! in order and every frame is accounted for.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

mod held; //    packets held for more segments
mod streams; // captures of flows of many kinds
mod traced; //  merged packets in the files of a trace
mod written; // merged packets in captures

use std::num::NonZeroU16;
use std::path::Path;

use forebay_device::Rate;
use forebay_device::pcap::{Capture, ReplayPlan};
use forebay_device::synthetic::SyntheticPlan;
use forebay_engine::knobs::{Coalesce, CoalesceAt};
use forebay_run::replay::{Input, Mode, ReplayConfig, ReplayReport};
use forebay_rx::CpuId;
use forebay_rx::coalesce::CoalesceConfig;
use forebay_sys as sys;
use forebay_sys::cpu_list::CpuList;
use proptest::prelude::*;

use crate::replays::{drop_when_full, run, script, stepped};

const ENDS: [CoalesceAt; 2] = [CoalesceAt::Arrive, CoalesceAt::Deliver];

/// UDP flows whose datagrams arrive in rows, all of one size.
fn in_rows(frames: u64, flows: u32) -> SyntheticPlan {
    SyntheticPlan { frames, flows, run: (4, 40), ..SyntheticPlan::default() }
}

fn coalescing(at: CoalesceAt, mut plan: ReplayConfig) -> ReplayConfig {
    plan.engine.coalesce = Coalesce { is_on: true, at, ..Coalesce::default() };
    plan
}

/// Checks that every frame entered coalescing once, as in a run that never switches it.
fn assert_merged(report: &ReplayReport, frames: u64) {
    assert_eq!((report.path.packets_in, report.path.lro.segments_in), (frames, frames));
    let (least, most) = (frames / 64, frames / 3);
    assert!((least..most).contains(&report.path.lro.packets_out), "{:?}", report.path.lro);
}

#[test]
fn promise_1_rows_merge_while_masks_change() {
    for at in ENDS {
        for cpus in 1..=4 {
            let mut plan = coalescing(at, stepped(cpus, in_rows(20_000, 64), 7));
            plan.work_ns = 200;
            let masks = ["1", "2", "3", "f"].into_iter().cycle();
            let changes = (1..20).zip(masks).map(|(at, mask)| format!("{at}000:rps_cpus={mask}"));
            let changes: Vec<_> = changes.collect();
            plan.engine.script = script(&changes.iter().map(String::as_str).collect::<Vec<_>>());
            let report = run(plan);
            assert_eq!(
                (report.path.delivered, report.flows),
                (20_000, 64),
                "{:?}",
                report.path.dropped
            );
            assert_merged(&report, 20_000);
            assert_eq!(report.path.steer.moves > 0, cpus > 1, "{:?}", report.path.steer);
        }
    }
}

#[test]
fn promise_1_and_2_hold_on_threads_that_coalesce() {
    let allowed = sys::allowed_cpus();
    let others = (0..).map(CpuId).filter(|cpu| !allowed.contains(cpu));
    let cpus: Vec<_> = allowed.iter().copied().chain(others).take(2).collect();
    let second = cpus[1];
    for at in ENDS {
        let input = Input::Synthetic(in_rows(60_000, 64));
        let mut plan =
            coalescing(at, crate::replays::plan(cpus.iter().copied(), input, Mode::Live));
        let mask = CpuList::new([second]).to_mask(4096);
        plan.engine.script = script(&[&format!("30000:rps_cpus={mask}")]);
        let report = run(plan);
        assert_eq!(report.path.delivered, 60_000);
        assert_eq!(report.path.lro.segments_in, 60_000);
        // The number of packets that one CPU finds queued, and can merge, depends on the machine.
        assert!(
            at == CoalesceAt::Deliver || report.path.lro.packets_out < 20_000,
            "{:?}",
            report.path.lro
        );
    }
}

#[test]
fn promise_2_and_3_merged_drop_counts_all_frames() {
    let rate = Rate::PerSecond(5_000_000);
    let traffic = SyntheticPlan { rate, ..in_rows(20_000, 64) };
    let mut plan = coalescing(CoalesceAt::Arrive, stepped(2, traffic, 5));
    plan.work_ns = 20_000;
    plan.engine.netdev_max_backlog = 20;
    plan.engine.script = script(&["1000:pause=1", "15000:resume=1"]);
    drop_when_full(&mut plan);
    let report = run(plan);
    assert_merged(&report, 20_000);
    let kept = report.path.per_cpu[1].backlog_max;
    assert!(report.path.dropped["backlog_full"] > 100 * kept, "{report:?}");
    assert_eq!(report.path.delivered + report.path.dropped["backlog_full"], 20_000);
    for cpu in &report.path.per_cpu {
        assert_eq!(cpu.enqueued, cpu.packets, "frames, not packets");
        assert!(cpu.backlog_max <= 21, "packets, not frames: {}", cpu.backlog_max);
    }
    let by_cpu: u64 = report.path.per_cpu.iter().map(|cpu| cpu.dropped).sum();
    assert_eq!(by_cpu, report.path.dropped_in_all());
}

/// Number of frames of a capture.
const STREAM_FRAMES: usize = 3000;

/// A replay of a capture on CPUs 0 to `cpus - 1`.
fn streams_on(cpus: u16, file: &Path, rate: Rate, seed: u64) -> ReplayConfig {
    let captures = vec![Capture::File(file.to_owned())];
    let input = Input::Captures(ReplayPlan { captures, loops: 1, rate });
    crate::replays::plan((0..cpus).map(CpuId), input, Mode::Stepped { seed })
}

mod any_run {
    use std::path::PathBuf;
    use std::sync::LazyLock;

    use super::*;

    static STREAMS: LazyLock<PathBuf> = LazyLock::new(|| {
        let file = crate::replays::directory("any-run").join("streams.pcap");
        streams::write(&file, &streams::mixed(STREAM_FRAMES, 3));
        file
    });

    /// Changes of every knob, at random frames.
    pub(crate) fn changes(cpus: u16, frames: u64) -> impl Strategy<Value = Vec<String>> {
        let knob = prop_oneof![
            4 => prop::sample::select(&["gro", "lro", "off"][..])
                .prop_map(|mode| format!("coalesce={mode}")),
            3 => prop::sample::select(&["arrive", "deliver"][..])
                .prop_map(|at| format!("coalesce_at={at}")),
            1 => (1..=40u32).prop_map(|number| format!("lro_descriptors={number}")),
            1 => (68..=65_535u32).prop_map(|bytes| format!("mtu={bytes}")),
            1 => prop_oneof![Just(0), 1..2_000_000u64]
                .prop_map(|ns| format!("gro_flush_timeout={ns}")),
            3 => (0..1u32 << cpus).prop_map(|mask| format!("rps_cpus={mask:x}")),
            1 => (0..100u32).prop_map(|packets| format!("netdev_max_backlog={packets}")),
            1 => (0..cpus).prop_map(|cpu| format!("pause={cpu}")),
            1 => (0..cpus).prop_map(|cpu| format!("resume={cpu}")),
        ];
        let change = (0..frames, knob).prop_map(|(frame, knob)| format!("{frame}:{knob}"));
        prop::collection::vec(change, 0..40)
    }

    prop_compose! {
        pub(crate) fn any_plan()(
            (cpus, changes) in (1..=4u16).prop_flat_map(|cpus| {
                (Just(cpus), changes(cpus, STREAM_FRAMES as u64))
            }),
            is_captured in any::<bool>(),
            rate in prop::sample::select(
                &[Rate::Max, Rate::PerSecond(100_000), Rate::PerSecond(5_000_000)][..]
            ),
            at in prop::sample::select(&ENDS[..]),
            queues in 1..=3u16,
            flows in prop::sample::select(&[1, 7, 64][..]),
            seed in any::<u64>(),
            hold_max in prop::sample::select(&[64, 4096][..]),
            work_ns in prop::sample::select(&[0, 1000, 20_000][..]),
            drops in any::<bool>(),
        ) -> ReplayConfig {
            let frames = STREAM_FRAMES as u64;
            let mut plan = if is_captured {
                streams_on(cpus, &STREAMS, rate, seed)
            } else {
                stepped(cpus, SyntheticPlan { seed, rate, ..in_rows(frames, flows) }, seed)
            };
            plan = coalescing(at, plan);
            plan.queues = NonZeroU16::new(queues).unwrap();
            plan.work_ns = work_ns;
            plan.engine.script = script(&changes.iter().map(String::as_str).collect::<Vec<_>>());
            plan.engine.hold_max = hold_max;
            plan.engine.netdev_max_backlog = 50;
            if drops {
                drop_when_full(&mut plan);
            }
            plan
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn promise_1_2_and_4_hold_while_merging_changes(plan in any_plan()) {
            prop_assert_eq!(run(plan).path.packets_in, STREAM_FRAMES as u64);
        }
    }
}

#[test]
fn lro_9_unrequested_mode_merges_nothing() {
    let mut plan = stepped(2, in_rows(3000, 7), 1);
    assert_eq!(run(plan.clone()).path.lro.packets_out, 3000);
    plan.engine.script = script(&["1000:coalesce=gro", "2000:coalesce=off"]);
    let lro = run(plan).path.lro;
    assert_eq!(lro.segments_in, 1000, "only while it is on: {lro:?}");
    assert!(lro.packets_out < 500, "{lro:?}");
}
