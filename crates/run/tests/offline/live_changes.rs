//! Live changes and dying threads: flows stay in order and frames are accounted for.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::{fs, thread};

use forebay_control::Control;
use forebay_device::QueueShare;
use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
use forebay_engine::knobs::{BalanceChange, Change, Queues};
use forebay_engine::{Config, Engine, Outcome, VirtualCosts};
use forebay_run::order_check::OrderCheck;
use forebay_run::replay::{ReplayConfig, ReplayReport, TracePlan};
use forebay_rx::counters::Counter;
use forebay_rx::delivery::Batch;
use forebay_rx::hash::{FlowHash, Hasher, Indirection};
use forebay_rx::steer::{BalancePolicy, SpreadPolicy};
use forebay_rx::{CpuId, Handler, RxQueue, Source, SteerReason};
use forebay_sys as sys;
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::errno::Errno;
use proptest::prelude::*;

use crate::replays::{drop_when_full, run, script, stepped};

fn traffic(frames: u64, flows: u32) -> SyntheticPlan {
    SyntheticPlan { frames, flows, ..SyntheticPlan::default() }
}

/// Number of this range, sometimes one beyond all bursts.
fn or_large(few: Range<u32>) -> impl Strategy<Value = u32> {
    prop_oneof![4 => few, 1 => 1000..=i32::MAX.cast_unsigned(), 1 => Just(i32::MAX.cast_unsigned())]
}

/// Every kind of change that loses no packet, for three CPUs and two queues.
fn lossless_change() -> impl Strategy<Value = String> {
    let hash = any::<u32>().prop_map(|hash| hash | 1);
    prop_oneof![
        (1..8u32).prop_map(|mask| format!("rps_cpus={mask:x}")),
        (0..2u16, 0..8u32).prop_map(|(queue, mask)| format!("rx-{queue}/rps_cpus={mask:x}")),
        (0..5u32).prop_map(|log| format!("rps_flow_cnt={}", (1 << (4 * log)) >> 4)),
        (0..5u32).prop_map(|log| format!("rps_sock_flow_entries={}", (1 << (4 * log)) >> 4)),
        (hash, 0..3u16).prop_map(|(hash, cpu)| format!("rfs_desired={hash:x}:{cpu}")),
        any::<u8>().prop_map(|key| format!("hash_key={}", hex::encode([key; 16]))),
        prop::sample::select(&["auto", "outer", "inner", "quic:9000:8"][..])
            .prop_map(|rules| format!("flow_key={rules}")),
        prop::sample::select(&["cpus=0", "cpus=2", "cpus=0-1", "cpus=1-2", "cpus=0-2"][..])
            .prop_map(str::to_owned),
        (0..3u16, 0..2u8).prop_map(|(cpu, runs)| format!("online={cpu}:{runs}")),
        or_large(1..200).prop_map(|frames| format!("dev_weight={frames}")),
        or_large(1..3).prop_map(|times| format!("dev_weight_rx_bias={times}")),
        or_large(1..300).prop_map(|packets| format!("netdev_budget={packets}")),
        (20_000..50_000u32).prop_map(|us| format!("netdev_budget_usecs={us}")), // two ticks at least
        (0..50u32).prop_map(|frames| format!("skb_defer_max={frames}")),
        prop::sample::select(&["coalesce=gro", "coalesce=off", "coalesce_at=deliver"][..])
            .prop_map(str::to_owned),
    ]
}

fn scripted(change: impl Strategy<Value = String>) -> impl Strategy<Value = Vec<String>> {
    let change = (0..4000u64, change).prop_map(|(frame, change)| format!("{frame}:{change}"));
    prop::collection::vec(change, 0..40)
}

fn plan(changes: &[String], flows: u32, seed: u64) -> ReplayConfig {
    let mut plan = stepped(3, SyntheticPlan { seed, ..traffic(4000, flows) }, seed);
    plan.queues = NonZeroU16::new(2).unwrap();
    plan.work_ns = 300;
    plan.engine.netdev_max_backlog = 200;
    plan.engine.script = script(&changes.iter().map(String::as_str).collect::<Vec<_>>());
    plan
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn promise_1_and_2_hold_under_any_live_change(
        changes in scripted(lossless_change()),
        flows in prop::sample::select(&[1u32, 7, 64, 512][..]),
        seed in any::<u64>(),
    ) {
        let report = run(plan(&changes, flows, seed));
        prop_assert_eq!(report.path.delivered, 4000, "{:?}", report.path.dropped);
    }

    #[test]
    fn promise_1_and_2_hold_under_dying_threads(
        changes in scripted(prop_oneof![
            3 => lossless_change(),
            1 => (0..3u16).prop_map(|cpu| format!("kill={cpu}")),
            1 => (0..2000u32).prop_map(|packets| format!("netdev_max_backlog={packets}")),
            1 => (0..3u16).prop_map(|cpu| format!("pause={cpu}")),
            1 => (0..3u16).prop_map(|cpu| format!("resume={cpu}")),
        ]),
        flows in prop::sample::select(&[1u32, 7, 64, 512][..]),
        seed in any::<u64>(),
    ) {
        let mut plan = plan(&changes, flows, seed);
        drop_when_full(&mut plan);
        prop_assert_eq!(run(plan).path.packets_in, 4000);
    }
}

/// Run on two CPUs with these changes.
fn changed(changes: &[&str]) -> ReplayReport {
    let mut plan = stepped(2, traffic(10_000, 64), 5);
    plan.work_ns = 300;
    plan.engine.script = script(changes);
    run(plan)
}

/// The device that deals frames to the queues has a key of its own, which does not change.
#[test]
fn promise_1_key_changes_with_several_queues() {
    let hashes = |queues| {
        let directory = crate::replays::directory(&format!("rekeyed-{queues}"));
        let mut plan = stepped(2, traffic(10_000, 64), 5);
        plan.queues = NonZeroU16::new(queues).unwrap();
        plan.engine.script = script(&["5000:hash_key=0f112233445566778899aabbccddeef1"]);
        plan.trace = Some(TracePlan { directory: directory.clone(), parse: false });
        run(plan);
        let rows = fs::read_to_string(directory.join("deliver.csv")).unwrap();
        let (header, rows) = rows.split_once('\n').unwrap();
        let at = header.split(',').position(|column| column == "hash").unwrap();
        let hash = |row: &str| row.split(',').nth(at).unwrap().to_owned();
        rows.lines().map(hash).collect::<std::collections::BTreeSet<_>>().len()
    };
    for queues in [1, 2, 3] {
        assert_eq!(hashes(queues), 2 * 64, "{queues} queues: each flow has two hashes");
    }
}

#[test]
fn promise_1_dying_thread_costs_its_batch() {
    let directory = crate::replays::directory("killed");
    let mut plan = stepped(2, traffic(10_000, 64), 5);
    plan.work_ns = 300;
    plan.engine.script = script(&["3000:kill=1", "6000:kill=0"]);
    plan.trace = Some(TracePlan { directory: directory.clone(), parse: false });
    let report = run(plan);
    let lost = report.path.dropped["cpu_lost"];
    assert!((1..=128).contains(&lost), "two batches at most: {lost}");
    assert_eq!(report.path.delivered + lost, 10_000);
    let drops = fs::read_to_string(directory.join("drop.csv")).unwrap();
    assert_eq!(drops.lines().filter(|row| row.contains(",cpu_lost,")).count() as u64, lost);
}

#[test]
fn rps_9_removed_cpu_drains_and_returns() {
    let out = changed(&["0:cpus=0"]);
    assert_eq!((out.path.delivered, out.path.per_cpu[1].packets), (10_000, 0));
    let back = changed(&["0:online=1:0", "5000:online=1:1"]);
    assert!((1..5000).contains(&back.path.per_cpu[1].packets), "{back:?}");
    let polls = changed(&["100:cpus=1"]);
    let busy_ns = [0, 1].map(|cpu: usize| polls.path.per_cpu[cpu].busy_ns);
    assert!(busy_ns[0] * 10 < busy_ns[1], "its queue is polled by the other: {polls:?}");
    assert_eq!(polls.path.delivered, 10_000);
}

mod one_engine {
    use super::*;

    /// Handler that counts packets and checks their order.
    struct Counts {
        ledger: Arc<OrderCheck>,
        /// The handler panics at every batch whose number is a multiple of this.
        panics_every: Option<u64>,
        batches: u64,
        seen: Arc<AtomicU64>,
    }

    impl Handler for Counts {
        fn handle(&mut self, batch: &mut Batch<'_>) {
            self.batches += 1;
            if let Some(every) = self.panics_every {
                assert!(!self.batches.is_multiple_of(every), "batch {} is bad", self.batches);
            }
            for packet in &*batch.packets {
                self.ledger.deliver(packet, batch.rx_queue, batch.cpu);
            }
            self.seen.fetch_add(batch.packets.len() as u64, Ordering::Relaxed);
        }
    }

    struct Rig {
        engine: Engine<Counts>,
        ledger: Arc<OrderCheck>,
        seen: Arc<AtomicU64>,
        cpus: Vec<CpuId>,
    }

    /// Two CPUs of this machine; if only one is allowed, a CPU that is not serves as the second.
    fn two_cpus() -> Vec<CpuId> {
        let allowed = sys::allowed_cpus();
        let others = (0..).map(CpuId).filter(|cpu| !allowed.contains(cpu));
        let mut cpus: Vec<_> = allowed.iter().copied().chain(others).take(2).collect();
        cpus.sort_unstable();
        cpus
    }

    /// Sources that divide these frames among their queues as a device does, each flow to one queue.
    fn sources(hasher: &Arc<Hasher>, queues: u16, frames: u64, flows: u32) -> Vec<Box<dyn Source>> {
        let source = |queue| -> Box<dyn Source> {
            let share = QueueShare {
                queue: RxQueue(queue),
                indirection: Indirection::new(queues),
                hasher: Arc::clone(hasher),
            };
            Box::new(SyntheticSource::new(traffic(frames, flows), Some(&share)))
        };
        (0..queues).map(source).collect()
    }

    fn rig(frames: u64, flows: u32, queues: u16, clock: Clock, panics: Option<u64>) -> Rig {
        let cpus = two_cpus();
        let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
        let mut config = Config::new(CpuList::new(cpus.iter().copied()), hasher);
        config.spread = SpreadPolicy::Always;
        let sources = sources(&config.hasher, queues, frames, flows);
        let (ledger, seen) = (Arc::new(OrderCheck::new(queues)), Arc::new(AtomicU64::new(0)));
        let engine = Engine::build(&config, sources, clock, |_| Counts {
            ledger: Arc::clone(&ledger),
            panics_every: panics,
            batches: 0,
            seen: Arc::clone(&seen),
        });
        Rig { engine: engine.unwrap(), ledger, seen, cpus }
    }

    fn assert_kept(outcome: &Outcome<Counts>, ledger: &OrderCheck, frames: u64) {
        let came: u64 = outcome.queues.iter().map(|queue| queue.frames.get()).sum();
        let drops = outcome.queues.iter().flat_map(|queue| &queue.drops);
        let dropped: u64 = drops.map(Counter::get).sum();
        let sum = |counter: fn(&forebay_engine::CpuOutcome) -> u64| -> u64 {
            outcome.cpus.iter().map(counter).sum()
        };
        let delivered = sum(|cpu| cpu.delivery.frames.get());
        let lost = sum(|cpu| cpu.delivery.lost.get());
        assert_eq!((came, dropped + delivered + lost, outcome.queued), (frames, frames, 0));
        assert_eq!(outcome.frames_away, 0);
        assert_eq!(ledger.flows(8).reordered, 0);
    }

    #[test]
    fn rps_9_queues_return_with_their_cpus() {
        let cpus = CpuList::new((0..4).map(CpuId));
        let mut config = Config::new(cpus, Arc::new(Hasher::keyed(&[3; 16], false)));
        config.script = script(&["1000:cpus=0-1", "5000:cpus=0-3"]);
        let sources = sources(&config.hasher, 4, 40_000, 64);
        let ledger = Arc::new(OrderCheck::new(4));
        let engine = Engine::build(&config, sources, Clock::virtual_at_zero(), |_| Counts {
            ledger: Arc::clone(&ledger),
            panics_every: None,
            batches: 0,
            seen: Arc::default(),
        });
        let engine = engine.unwrap();
        let state = engine.state();
        let mut polled: Vec<[u16; 4]> = Vec::new();
        let outcome = engine.run_stepped_observed(1, VirtualCosts::default(), |_| {
            polled.push([0, 1, 2, 3].map(|queue| state.polls(queue).unwrap().0));
            polled.dedup();
        });
        assert_kept(&outcome, &ledger, 40_000);
        assert!(polled.contains(&[0, 1, 0, 1]), "{polled:?}");
        assert_eq!([polled.first(), polled.last()], [Some(&[0, 1, 2, 3]); 2], "{polled:?}");
    }

    #[test]
    fn promise_1_panicking_handler_loses_one_batch() {
        let Rig { engine, ledger, .. } = rig(60_000, 64, 1, Clock::machine(), Some(100));
        let outcome = engine.run().unwrap();
        assert_kept(&outcome, &ledger, 60_000);
        let replaced: u64 = outcome.cpus.iter().map(|cpu| cpu.replaced).sum();
        let lost: u64 = outcome.cpus.iter().map(|cpu| cpu.delivery.lost.get()).sum();
        assert!(replaced > 0 && lost > 0);
        let panics = outcome.cpus.iter().filter_map(|cpu| cpu.last_panic.as_deref());
        assert!(panics.clone().count() > 0 && panics.clone().all(|said| said.contains("is bad")));
    }

    #[test]
    fn promise_1_everything_changes_at_once_on_threads() {
        let rig = rig(u64::MAX, 64, 2, Clock::machine(), None);
        let (control, flows, stopper) =
            (Control::of(&rig.engine), rig.engine.flows(), rig.engine.stopper());
        let (seen, cpus) = (Arc::clone(&rig.seen), rig.cpus.clone());
        let changes = thread::spawn(move || {
            let mut random = forebay_sys::random::Random::new(7);
            let mut taken = 0;
            for round in 0..600u32 {
                let target = seen.load(Ordering::Relaxed) + 200;
                while seen.load(Ordering::Relaxed) < target {
                    thread::yield_now();
                }
                let cpu = cpus[usize::try_from(random.below(2)).unwrap()];
                let large = |few: u32| if round % 8 == 0 { i32::MAX.cast_unsigned() } else { few };
                let change = match random.below(15) {
                    0 => Change::RpsCpus(Queues::All, CpuList::new([cpu])),
                    1 => Change::RpsCpus(Queues::One(RxQueue(1)), CpuList::new(cpus.clone())),
                    2 => Change::RpsFlowCnt(Queues::All, 1 << random.below(14)),
                    3 => Change::RpsSockFlowEntries(1 << random.below(17)),
                    4 => Change::HashKey(vec![round.to_le_bytes()[0]; 16]),
                    5 => Change::Online(cpu, false),
                    6 => Change::Cpus(CpuList::new(cpus.clone())),
                    7 => Change::Kill(cpu),
                    8 => Change::DevWeight(large(1 + round % 100)),
                    9 => Change::NetdevBudget(large(1 + round % 200)),
                    10 => Change::Balance(BalanceChange::Policy(BalancePolicy::Load)),
                    11 => Change::Balance(BalanceChange::Window(100)),
                    12 => Change::FlowKey(["inner", "auto"][round as usize % 2].parse().unwrap()),
                    13 => Change::DevWeightRxBias(large(1 + round % 3)),
                    _ => Change::Pause(cpu),
                };
                taken += u64::from(control.change(change).is_ok());
                control.resume(cpu).unwrap();
                flows.touch_on(FlowHash(u32::try_from(random.below(1 << 32)).unwrap()), cpu);
                flows.touch(FlowHash(7));
                if round % 100 == 0 {
                    assert_eq!(control.explain(FlowHash(12345)).unwrap().len(), 2);
                }
            }
            stopper.stop();
            taken
        });
        let outcome = rig.engine.run().unwrap();
        assert!(changes.join().unwrap() > 400, "few are refused");
        let frames = outcome.queues.iter().map(|queue| queue.frames.get()).sum();
        assert_kept(&outcome, &rig.ledger, frames);
    }

    #[test]
    fn rfs_1_flow_goes_to_declared_cpu() {
        let Rig { engine, ledger, cpus, .. } = rig(4000, 1, 1, Clock::virtual_at_zero(), None);
        let control = Control::of(&engine);
        let flows = engine.flows();
        let flow = hash_of_first_packet();
        for cpu in cpus.iter().rev() {
            flows.touch_on(flow, *cpu);
        }
        assert_eq!(control.rfs_desired(flow, CpuId(900)).unwrap_err().errno, Errno::Inval);
        control.rfs_desired(flow, cpus[1]).unwrap();
        let outcome = engine.run_stepped(3, VirtualCosts::default());
        assert_kept(&outcome, &ledger, 4000);
        assert_eq!(outcome.cpus[1].delivery.frames.get(), 4000, "all of it on the second CPU");
    }

    /// Hash of the first packet of synthetic traffic.
    fn hash_of_first_packet() -> FlowHash {
        struct First(Option<FlowHash>);
        impl Handler for First {
            fn handle(&mut self, batch: &mut Batch<'_>) {
                self.0 = self.0.or(batch.packets.first().map(|packet| packet.hash));
            }
        }
        let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
        let config = Config::new(CpuList::new([CpuId(0)]), hasher);
        let source = Box::new(SyntheticSource::new(traffic(1, 1), None));
        let engine =
            Engine::build(&config, vec![source], Clock::virtual_at_zero(), |_| First(None))
                .unwrap();
        engine.run_stepped(1, VirtualCosts::default()).handlers[0].0.unwrap()
    }

    /// More changes each turn than a turn applies: the log fills up, and packets are delivered all the same.
    #[test]
    fn promise_3_turn_applies_few_changes() {
        struct Writes {
            control: Arc<OnceLock<Control>>,
            refused: u64,
            frames: u64,
        }
        impl Handler for Writes {
            fn handle(&mut self, batch: &mut Batch<'_>) {
                self.frames += batch.packets.len() as u64;
                for cpu in (0..100).map(|number| CpuId(number % 2)) {
                    let control = self.control.get().unwrap();
                    let written = control.set_rps_cpus(Queues::All, CpuList::new([cpu]));
                    self.refused += u64::from(written.is_err_and(|no| no.errno == Errno::Busy));
                }
            }
        }
        let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
        let config = Config::new(CpuList::new([0, 1].map(CpuId)), hasher);
        let source = Box::new(SyntheticSource::new(traffic(20_000, 64), None));
        let control = Arc::<OnceLock<Control>>::default();
        let build = |_| Writes { control: Arc::clone(&control), refused: 0, frames: 0 };
        let engine = Engine::build(&config, vec![source], Clock::virtual_at_zero(), build).unwrap();
        assert!(control.set(Control::of(&engine)).is_ok());
        let outcome = engine.run_stepped(1, VirtualCosts::default());
        let sum = |of: fn(&Writes) -> u64| outcome.handlers.iter().map(of).sum::<u64>();
        assert_eq!(sum(|handler| handler.frames), 20_000);
        assert!(sum(|handler| handler.refused) > 0, "no turn applies all that is written");
    }

    /// However many changes are made before the run, and though a turn applies few.
    #[test]
    fn promise_8_first_frame_finds_changes_made() {
        struct Counts(u64);
        impl Handler for Counts {
            fn handle(&mut self, batch: &mut Batch<'_>) {
                self.0 += batch.packets.len() as u64;
            }
        }
        let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
        let mut config = Config::new(CpuList::new([0, 1].map(CpuId)), hasher);
        config.spread = SpreadPolicy::Always;
        let sources: Vec<Box<dyn Source>> = [(); 2]
            .map(|()| Box::new(SyntheticSource::new(traffic(64, 64), None)) as Box<dyn Source>)
            .into();
        let engine =
            Engine::build(&config, sources, Clock::virtual_at_zero(), |_| Counts(0)).unwrap();
        let control: Control = Control::of(&engine);
        for cpu in (0..50).map(|number| CpuId(u16::from(number == 49))) {
            control.set_rps_cpus(Queues::All, CpuList::new([cpu])).unwrap();
        }
        let outcome = engine.run_stepped(1, VirtualCosts::default());
        let frames: Vec<_> = outcome.handlers.iter().map(|counts| counts.0).collect();
        assert_eq!(frames, [0, 128]);
    }

    #[test]
    fn flow_is_explained_at_end() {
        let hash = hash_of_first_packet();
        let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
        let mut config = Config::new(CpuList::new([0, 1].map(CpuId)), hasher);
        config.explain = vec![hash];
        config.spread = SpreadPolicy::Always;
        let source = Box::new(SyntheticSource::new(traffic(1000, 64), None));
        struct Idler;
        impl Handler for Idler {
            fn handle(&mut self, _: &mut Batch<'_>) {}
        }
        let engine =
            Engine::build(&config, vec![source], Clock::virtual_at_zero(), |_| Idler).unwrap();
        let outcome = engine.run_stepped(1, VirtualCosts::default());
        let [explained] = &outcome.explained.concat()[..] else { panic!("one queue") };
        assert_eq!(explained.queue, RxQueue(0));
        let (cpu, steer_reason) = explained.state.desired;
        assert_eq!((explained.state.cpu, steer_reason), (Some(cpu), SteerReason::Rps));
        assert!(explained.state.sharers.contains(&hash), "it was watched from the beginning");
    }

    #[test]
    fn impossible_change_changes_nothing() {
        let Rig { engine, cpus, .. } = rig(10, 1, 1, Clock::virtual_at_zero(), None);
        let control: Control = Control::of(&engine);
        let before = control.settings();
        let refused = |change: Change| control.change(change).unwrap_err().errno;
        let none = CpuList::default();
        assert_eq!(refused(Change::Cpus(none.clone())), Errno::Busy);
        assert_eq!(refused(Change::Kill(CpuId(900))), Errno::Inval);
        assert_eq!(refused(Change::RpsCpus(Queues::One(RxQueue(1)), none)), Errno::NoEnt);
        assert_eq!(refused(Change::HashKey(vec![1; 3])), Errno::Inval);
        assert_eq!(refused(Change::RpsFlowCnt(Queues::All, 1 << 30)), Errno::NoMem);
        assert_eq!(control.settings(), before);
        control.set_online(cpus[0], false).unwrap();
        assert_eq!(control.set_online(cpus[1], false).unwrap_err().errno, Errno::Busy);
        let ignored = control.set_rps_cpus(Queues::All, CpuList::new([cpus[0], CpuId(900)]));
        assert_eq!(ignored.unwrap(), CpuList::new([cpus[0], CpuId(900)]));
        assert!(control.rps_cpus_in_force(RxQueue(0)).unwrap().is_empty(), "RPS is off");
        control.set_online(cpus[0], true).unwrap();
        assert_eq!(control.rps_cpus_in_force(RxQueue(0)), Some(CpuList::new([cpus[0]])));
    }

    #[test]
    fn explaining_ended_engine_is_bounded() {
        let Rig { engine, .. } = rig(10, 1, 1, Clock::virtual_at_zero(), None);
        let control = Control::of(&engine);
        drop(engine.run_stepped(1, VirtualCosts::default()));
        assert_eq!(control.explain(FlowHash(5)), Ok(Vec::new()));
    }
}
