//! The promises as laws over schedules: whatever arrives, changes or stalls, in whatever order.

use std::collections::BTreeMap;

use forebay_buf::Position;
use forebay_rx::backlog::{Backlogs, FlowLimit, Note};
use forebay_rx::delivery::Delivery;
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::steer::{MoveAfter, RpsMap, SPREAD_WINDOW_NS, SpreadPolicy};
use forebay_rx::{CpuId, DropReason, RxQueue, SteerReason};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::steering::journal::{Journal, Order, Seen};
use crate::steering::world::{CPUS, Flow, Settings, World, cpus_of, put};

/// Flows that collide in all ways: two of one hash, some of one slot, some at the edges of a CPU's
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
    /// Arrival of as many of these as there is room for.
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
    Running(u8),
    Polling {
        cpu: u16,
    },
    /// Move of a flow's application to this CPU.
    Application {
        flow: u16,
        cpu: u16,
    },
    SockFlows {
        entries: Option<u32>,
    },
    FlowCnt(u32),
    Rekey,
    Lose {
        cpu: u16,
    },
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
        1 => any::<u8>().prop_map(Step::Running),
        1 => cpu().prop_map(|cpu| Step::Polling { cpu }),
        4 => (flow(), 0..CPUS + 1).prop_map(|(flow, cpu)| Step::Application { flow, cpu }),
        1 => option::of(1u32..64).prop_map(|entries| Step::SockFlows { entries }),
        1 => prop_oneof![0u32..20, Just(2048)].prop_map(Step::FlowCnt),
        1 => Just(Step::Rekey),
        1 => cpu().prop_map(|cpu| Step::Lose { cpu }),
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
    let policies = (any::<bool>(), any::<bool>());
    (start, 1u32..4, move_after, 0u32..40, policies, 1u32..8, 1u32..40).prop_map(
        |(start, log, (packets, time_ns), hold_max, policies, batch_max, netdev_max_backlog)| {
            let (always, balances) = policies;
            Settings {
                rps_cpus: 0b1111,
                rps_flow_cnt: 1 << log,
                move_after: MoveAfter { packets, time_ns },
                hold_max,
                spread: if always { SpreadPolicy::Always } else { SpreadPolicy::WhenBusy },
                balances,
                batch_max,
                netdev_max_backlog,
                start,
            }
        },
    )
}

fn flow(id: u16) -> Flow {
    Flow { id, hash: HASHES[usize::from(id)] }
}

fn all(flows: &[u16]) -> Vec<Flow> {
    flows.iter().map(|&id| flow(id)).collect()
}

/// World, and the CPUs that are paused.
struct Run {
    world: World,
    paused: [bool; CPUS as usize],
    netdev_max_backlog: u32,
    /// True if there may be a line before a fence.
    may_be_lined_up: bool,
}

impl Run {
    fn new(settings: Settings) -> Self {
        let netdev_max_backlog = settings.netdev_max_backlog;
        Self {
            world: World::new(settings),
            paused: [false; CPUS as usize],
            netdev_max_backlog,
            may_be_lined_up: false,
        }
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
            Step::Running(mask) => world.set_running(mask),
            Step::Polling { cpu } => world.set_polling_cpu(CpuId(cpu)),
            Step::Application { flow: id, cpu } => world.application(flow(id), cpu),
            Step::SockFlows { entries } => world.set_sock_flows(entries),
            Step::FlowCnt(rps_flow_cnt) => world.set_rps_flow_cnt(rps_flow_cnt),
            Step::Rekey => world.rekey(),
            Step::Lose { cpu } => {
                world.lose(cpu);
            }
            Step::MaxBacklog(packets) => {
                let epoch = world.begin_epoch(|_| ());
                world.intake.set_netdev_max_backlog(packets, epoch);
                self.netdev_max_backlog = packets;
            }
            Step::FlowLimit(on) => {
                let limit = on.then(|| FlowLimit::new(8)).flatten();
                let epoch = world.begin_epoch(|_| ());
                world.intake.set_flow_limit(limit, epoch);
            }
            Step::Pass { time_ns, busy_percent } => {
                world.now_ns += time_ns;
                world.busy_ns += time_ns * busy_percent / 100;
            }
        }
    }

    /// Takes a step, then checks the laws that hold at any time.
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
        let held = self.world.intake.held();
        match step {
            Step::FlowCnt(_) | Step::Rekey => self.may_be_lined_up = true,
            _ => self.may_be_lined_up &= held > 0,
        }
        if nothing_waits && matches!(step, Step::Arrive(flows) if flows.is_empty()) {
            let queued = queued(&self.world);
            // Other packets wait until the line is processed.
            let moves_on = self.may_be_lined_up && queued != [0; CPUS as usize];
            let full = queued.contains(&limit);
            assert!(full || moves_on || held == 0, "promise 3: held behind nothing");
        }
    }
}

/// Checks the notes of all packets.
fn check_notes(world: &World) {
    world.journal.check_positions();
    let mut slots: BTreeMap<(u32, Option<u32>), InSlot> = BTreeMap::new();
    let mut last_of_flow: BTreeMap<u16, Seen> = BTreeMap::new();
    for seen in &world.journal.seen {
        check_target(world, seen);
        if let Some(last) = last_of_flow.insert(seen.flow, *seen)
            && last.cpu != seen.cpu
        {
            assert!(last.handled_ns < seen.note.enqueued_ns, "rfs_6: {seen:?} overtakes {last:?}");
        }
        let epoch = &world.epochs[seen.note.epoch as usize];
        if world.arrived_in(seen.note.arrival).table != epoch.table {
            // A packet of the line: it was held when the table was replaced.
            let Note { steer_reason, head_old, previous_flow, .. } = seen.note;
            assert_eq!(
                (steer_reason, head_old, previous_flow),
                (SteerReason::Held, None, FlowHash::NONE)
            );
            continue;
        }
        let slot = (epoch.table, epoch.slot(seen.hash));
        slots.entry(slot).or_default().check(world, slot, seen);
    }
}

/// Checks that a packet without predecessors goes to a CPU by the rules of its epoch.
fn check_target(world: &World, seen: &Seen) {
    let epoch = &world.epochs[seen.note.epoch as usize];
    let may_be = match seen.note.steer_reason {
        SteerReason::Rfs => epoch.is_followed(seen.cpu),
        SteerReason::Rps | SteerReason::Balance | SteerReason::Spread => epoch.is_mapped(seen.cpu),
        SteerReason::Inline => seen.cpu == epoch.polling,
        SteerReason::Drained | SteerReason::Held => {
            epoch.is_allowed(seen.cpu) || seen.cpu == epoch.polling
        }
        // No flow goes to a CPU outside the map because another flow of its slot is there.
        SteerReason::Stay => epoch.is_allowed(seen.cpu) || seen.note.previous_flow == seen.hash,
    };
    assert!(may_be, "{seen:?} under {epoch:?}");
}

/// Packets of one slot of one table, in the order of arrival.
#[derive(Default)]
struct InSlot {
    last: Option<Seen>,
    /// Number of packets that stayed, and time of the first.
    stays: Option<(u32, u64)>,
}

impl InSlot {
    fn check(&mut self, world: &World, (table, slot): (u32, Option<u32>), seen: &Seen) {
        let note = seen.note;
        let Some(last) = self.last.replace(*seen) else { return };
        let mut between = world.journal.lost.iter().filter(|lost| {
            let epoch = world.arrived_in(lost.arrival);
            (epoch.table, epoch.slot(lost.hash)) == (table, slot)
                && lost.arrival.is_after(last.note.arrival)
                && note.arrival.is_after(lost.arrival)
        });
        let lost = between.next_back();
        assert_eq!(note.previous_flow, lost.map_or(last.hash, |lost| lost.hash), "{seen:?}");
        if let Some(lost) = lost {
            assert!(lost.cpu == seen.cpu || lost.lost_ns < note.enqueued_ns, "rfs_6: {seen:?}");
        } else if last.cpu != seen.cpu {
            assert!(last.handled_ns < note.enqueued_ns, "rfs_6: {seen:?} overtakes {last:?}");
            let head = note.head_old.expect("a move shows the head counter that allows it");
            assert!(head.since(last.note.position) < 1 << 31, "rfs_6: {seen:?} after {last:?}");
        } else {
            assert_eq!(note.head_old, None, "{seen:?} moved nothing");
        }
        if note.steer_reason == SteerReason::Stay {
            let (stays, since_ns) = self.stays.get_or_insert((0, note.enqueued_ns));
            *stays += 1;
            let MoveAfter { packets, time_ns } = world.settings.move_after;
            let is_late = *stays > packets || note.enqueued_ns - *since_ns >= time_ns;
            // A flow that cannot be held for lack of room stays as long as that lasts.
            let had_room = world.intake.counters().unheld.get() == 0;
            assert!(!(is_late && had_room), "promise 3: {seen:?} stays beyond move_after");
        } else {
            self.stays = None;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 1000 }))]

    #[test]
    fn promises_1_2_3_hold_under_any_schedule(
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
        for id in (0..).take(HASHES.len()) {
            let state = run.world.intake.state_of(run.world.hash_of(flow(id)));
            assert!(!state.is_fenced && state.held.is_none() && state.ahead == 0, "{state:?}");
        }
    }
}

#[test]
fn promise_1_order_check_sees_one_swap() {
    let mut order = Order::default();
    // The arrivals of flow 1 wrap; those of flow 2 come between them.
    for (flow, arrival) in [(1, u32::MAX), (2, 3), (1, 0), (1, 2), (2, 4), (1, 1), (1, 5)] {
        order.see(flow, Arrival(arrival));
    }
    assert_eq!(order.breaks, [(1, Arrival(1), Arrival(2))]);
}

/// RPS as in the kernel: the map alone, without a flow table. The law above detects the reordering
/// that RPS-C3 warns of.
#[test]
fn promise_1_kernel_rule_breaks_order() {
    let mut world = World::new(Settings::default());
    let mut backlogs = Backlogs::new(RxQueue(0), CPUS.into(), 100);
    let start = Position(u32::MAX);
    let mut deliveries = [0, 1].map(|cpu| {
        let lane = backlogs.connect(CpuId(cpu), 128, start, true);
        Delivery::new(CpuId(cpu), vec![lane], 64)
    });
    let mut journal = Journal::new(start);
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
