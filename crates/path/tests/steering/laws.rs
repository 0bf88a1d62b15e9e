//! The promises as laws over schedules: whatever arrives, changes or stalls, in whatever order.

use std::collections::BTreeMap;

use mem::Position;
use path::backlog::{Backlogs, FlowLimit};
use path::delivery::Delivery;
use path::hash::FlowHash;
use path::packet::Arrival;
use path::steer::{MoveAfter, RpsMap, SPREAD_WINDOW_NS, SpreadPolicy};
use path::{Because, CpuId, DropReason, RxQueue};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::world::{CPUS, Flow, Journal, Order, POLLING, Seen, Settings, World, cpus_of, put};

/// Flows that meet in all ways: two of one hash, some of one slot, some at the edges of a CPU's
/// range or of a slot, and one without a hash.
const HASHES: [u32; 10] = [
    0,
    1,
    1,
    0x1000_0000,
    0x5555_5555,
    0x5555_5556,
    0x7fff_ffff,
    0x8000_0000,
    0xaaaa_aaab,
    u32::MAX,
];

#[derive(Clone, Debug)]
enum Step {
    Arrive(Vec<u16>),
    /// As many as there is room for.
    ArriveInRoom(Vec<u16>),
    Take {
        cpu: u16,
        max: usize,
    },
    Finish {
        cpu: u16,
    },
    Deliver {
        cpu: u16,
        budget: usize,
    },
    Pause {
        cpu: u16,
        paused: bool,
    },
    Mask(u8),
    MaxBacklog(u32),
    FlowLimit(bool),
    Pass {
        time_ns: u64,
        busy_percent: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let cpu = || 0..CPUS;
    let flow = || 0..u16::try_from(HASHES.len()).unwrap();
    prop_oneof![
        9 => vec(flow(), 0..12).prop_map(Step::Arrive),
        1 => vec(flow(), 60..80).prop_map(Step::Arrive),
        1 => vec(flow(), 0..12).prop_map(Step::ArriveInRoom),
        6 => (cpu(), 1usize..6).prop_map(|(cpu, max)| Step::Take { cpu, max }),
        6 => cpu().prop_map(|cpu| Step::Finish { cpu }),
        2 => (cpu(), 1usize..20).prop_map(|(cpu, budget)| Step::Deliver { cpu, budget }),
        1 => (cpu(), any::<bool>()).prop_map(|(cpu, paused)| Step::Pause { cpu, paused }),
        2 => (0u8..16).prop_map(Step::Mask),
        1 => any::<u8>().prop_map(Step::Mask),
        1 => (1u32..40).prop_map(Step::MaxBacklog),
        1 => any::<bool>().prop_map(Step::FlowLimit),
        2 => (0..2 * SPREAD_WINDOW_NS, 0u64..100)
            .prop_map(|(time_ns, busy_percent)| Step::Pass { time_ns, busy_percent }),
    ]
}

fn settings() -> impl Strategy<Value = Settings> {
    let start = prop_oneof![any::<u32>(), (0u32..60).prop_map(|ahead| u32::MAX - ahead)];
    let time_ns = prop_oneof![Just(0), 1u64..100, Just(u64::MAX)];
    let move_after = (0u32..12, time_ns);
    (start, 1u32..4, move_after, 0u32..40, any::<bool>(), 1u32..8, 1u32..40).prop_map(
        |(start, log, (packets, time_ns), hold_max, always, batch_max, netdev_max_backlog)| {
            Settings {
                rps_cpus: 0b1111,
                rps_flow_cnt: 1 << log,
                move_after: MoveAfter { packets, time_ns },
                hold_max,
                spread: if always { SpreadPolicy::Always } else { SpreadPolicy::WhenBusy },
                batch_max,
                netdev_max_backlog,
                start,
            }
        },
    )
}

fn all(flows: &[u16]) -> Vec<Flow> {
    flows.iter().map(|&id| Flow { id, hash: HASHES[usize::from(id)] }).collect()
}

/// A world and who is paused in it.
struct Run {
    world: World,
    paused: [bool; CPUS as usize],
    netdev_max_backlog: u32,
}

impl Run {
    fn new(settings: Settings) -> Self {
        let netdev_max_backlog = settings.netdev_max_backlog;
        Self { world: World::new(settings), paused: [false; CPUS as usize], netdev_max_backlog }
    }

    fn step(&mut self, step: &Step) {
        let world = &mut self.world;
        match *step {
            Step::Arrive(ref flows) => {
                world.arrive(&all(flows));
            }
            Step::ArriveInRoom(ref flows) => {
                let wanted = u32::try_from(flows.len()).unwrap();
                let room = world.intake.room_for(wanted);
                let before = world.drops.len();
                world.arrive(&all(&flows[..room as usize]));
                let drops = &world.drops[before..];
                assert!(drops.iter().all(|drop| drop.1 == DropReason::FlowLimit), "{drops:?}");
            }
            Step::Take { cpu, .. } | Step::Deliver { cpu, .. } if self.paused[usize::from(cpu)] => {
            }
            Step::Take { cpu, max } => world.take(cpu, max),
            Step::Deliver { cpu, budget } => {
                world.finish(cpu);
                assert!(world.deliver(cpu, budget) <= budget);
            }
            Step::Finish { cpu } => world.finish(cpu),
            Step::Pause { cpu, paused } => self.paused[usize::from(cpu)] = paused,
            Step::Mask(mask) => world.set_mask(mask),
            Step::MaxBacklog(packets) => {
                world.intake.set_netdev_max_backlog(packets, 0);
                self.netdev_max_backlog = packets;
            }
            Step::FlowLimit(on) => {
                world.intake.set_flow_limit(on.then(|| FlowLimit::new(8)).flatten(), 0);
            }
            Step::Pass { time_ns, busy_percent } => {
                world.now_ns += time_ns;
                world.busy_ns += time_ns * busy_percent / 100;
            }
        }
    }

    /// Takes a step, then checks what holds at any time.
    fn checked_step(&mut self, step: &Step) {
        let queued = |world: &World| [0, 1, 2, 3, 4, 5, 6, 7].map(|cpu| world.queued_on(cpu));
        let before = queued(&self.world);
        let nothing_waits = before == [0; CPUS as usize];
        self.step(step);
        self.world.check();
        // The kernel's queue holds one more than its limit.
        let limit = u64::from(self.netdev_max_backlog) + 1;
        for (before, now) in before.into_iter().zip(queued(&self.world)) {
            assert!(now <= before.max(limit), "promise 3: {now} queued, the limit is {limit}");
        }
        if nothing_waits && matches!(step, Step::Arrive(flows) if flows.is_empty()) {
            let full = queued(&self.world).contains(&limit);
            assert!(full || self.world.intake.held() == 0, "promise 3: held behind nothing");
        }
    }
}

/// What the notes say, slot by slot in the order of arrival.
fn check_notes(world: &World) {
    world.journal.check_positions();
    let mut last: BTreeMap<u32, Seen> = BTreeMap::new();
    let mut first_stay: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
    for seen in &world.journal.seen {
        let note = seen.note;
        let Some(slot) = world.journal.slot(seen) else {
            assert_eq!((seen.cpu, note.because), (POLLING, Because::Inline), "no hash: no move");
            continue;
        };
        assert!(note.because != Because::Inline || seen.cpu == POLLING);
        let last = last.insert(slot, *seen);
        assert_eq!(note.behind, last.map_or(FlowHash::NONE, |last| last.hash), "{seen:?}");
        if let Some(last) = last
            && last.cpu != seen.cpu
        {
            assert!(last.handled_ns < note.enqueued_ns, "rfs_6: {seen:?} overtakes {last:?}");
            let head = note.head_old.expect("a move shows the head counter that allows it");
            assert!(head.since(last.note.position) < 1 << 31, "rfs_6: {seen:?} after {last:?}");
        } else {
            assert_eq!(note.head_old, None, "{seen:?} moved nothing");
        }
        if note.because == Because::Stay {
            let (stays, since_ns) = first_stay.entry(slot).or_insert((0, note.enqueued_ns));
            *stays += 1;
            let MoveAfter { packets, time_ns } = world.settings.move_after;
            assert!(*stays <= packets, "promise 3: {seen:?} stays beyond move_after");
            assert!(note.enqueued_ns - *since_ns < time_ns, "promise 3: {seen:?} stays too long");
        } else {
            first_stay.remove(&slot);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 1000 }))]

    #[test]
    fn promises_1_2_3_hold_whatever_the_schedule(
        settings in settings(),
        steps in vec(step(), 0..if cfg!(miri) { 20 } else { 150 }),
    ) {
        let mut run = Run::new(settings);
        for step in &steps {
            run.checked_step(step);
        }
        run.world.settle();
        run.world.check();
        check_notes(&run.world);
    }
}

#[test]
fn promise_1_the_checker_of_order_sees_one_swap_in_one_flow() {
    let mut order = Order::default();
    // The arrivals of flow 1 wrap; those of flow 2 come between them.
    for (flow, arrival) in [(1, u32::MAX), (2, 3), (1, 0), (1, 2), (2, 4), (1, 1), (1, 5)] {
        order.see(flow, Arrival(arrival));
    }
    assert_eq!(order.breaks, [(1, Arrival(1), Arrival(2))]);
}

/// RPS as the kernel does it: the map alone, without a flow table. What RPS-C3 warns of is what
/// the law above would find.
#[test]
fn promise_1_the_kernels_rule_breaks_order_when_the_mask_changes() {
    let mut world = World::new(Settings::default());
    let mut backlogs = Backlogs::new(RxQueue(0), CPUS.into(), 100);
    let start = Position(u32::MAX);
    let mut deliveries = [0, 1].map(|cpu| {
        let lane = backlogs.connect(CpuId(cpu), 128, start, true);
        Delivery::new(CpuId(cpu), vec![lane], 64)
    });
    let mut journal = Journal::new(4, start);
    for mask in [0b01, 0b10] {
        let map = RpsMap::new(cpus_of(mask));
        let mut packet = world.packet(&[0, 1]);
        packet.hash.0 = 77;
        put(&mut backlogs, map.select(packet.hash).unwrap(), packet);
    }
    for delivery in deliveries.iter_mut().rev() {
        delivery.turn(64, &mut world.pool, &mut journal);
    }
    assert_eq!(journal.order.breaks.len(), 1);
}
