//! Steering end to end, without threads: intake and deliveries of a few CPUs, stepped by hand.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

mod world; //     the CPUs, and laws of any world
mod bursts; //    full bursts, room for bursts, bad frames
mod borders; //   slots that contain a boundary of the map
mod changes; //   changes while packets flow
mod holds; //     held moves of elephants beside other flows
mod journal; //   records of the CPUs
mod laws; //      the promises over random schedules
mod rfs; //       packets follow their applications
mod tables; //    tables and keys are replaced
mod reference; // notes, counters and moves against a reference
mod explain; //   explanations of a flow's CPU

use etherparse::PacketBuilder;
use forebay_buf::Position;
use forebay_rx::SteerReason::{Drained, Held, Inline, Rps, Spread, Stay};
use forebay_rx::arrive::Burst;
use forebay_rx::backlog::{Backlogs, FlowLimit};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::parse::{self, Link, Verify, View};
use forebay_rx::steer::{FULL_BURSTS_TO_SPREAD, MoveAfter, RpsMap, SPREAD_WINDOW_NS, SpreadPolicy};
use forebay_rx::{CpuId, Delivery, DropReason, RxQueue, SteerReason};
use journal::Journal;
use world::{CPUS, Flow, POLLING, Settings, World, cpus_of, offer, put};

/// Two flows of one slot, and two of another.
const FLOW: Flow = Flow { id: 1, hash: 0x1000_0005 };
const NEIGHBOUR: Flow = Flow { id: 2, hash: 0x1000_0006 };
const OTHER: Flow = Flow { id: 3, hash: 0xf000_0005 };
const OTHERS_NEIGHBOUR: Flow = Flow { id: 4, hash: 0xf000_0006 };

const ON_CPU_1: u8 = 0b0010;
const ON_CPU_2: u8 = 0b0100;
/// `FLOW` stays on CPU 1, `OTHER` goes to CPU 2.
const ON_BOTH: u8 = 0b0110;

/// A world in which all flows go to CPU 1.
fn all_on_cpu_1(settings: Settings) -> World {
    World::new(Settings { rps_cpus: ON_CPU_1, ..settings })
}

/// Uses up the flow limit's share of [`FLOW`], on a backlog that is always half full.
fn spend_flow_limit(world: &mut World) {
    world.intake.set_flow_limit(FlowLimit::new(4096), 0);
    for _ in 0..64 {
        world.arrive(&[FLOW]);
        world.deliver(1, 1);
    }
}

#[test]
fn rps_4_flow_keeps_cpu_one_wakeup_burst() {
    let rps_cpus = 0b1110;
    let mut world = World::new(Settings { rps_cpus, rps_flow_cnt: 4096, ..Settings::default() });
    let flows = (0..48).map(|id| Flow { id, hash: 1 + u32::from(id) * 0x0555_5555 });
    let flows: Vec<_> = flows.collect();
    for budget in [0, 7, 100] {
        let mut woken = world.arrive(&flows);
        woken.sort_unstable();
        assert!(woken.into_iter().eq(cpus_of(rps_cpus)), "rps_6");
        (1..4).for_each(|cpu| assert!(world.deliver(cpu, budget) <= budget));
    }
    world.settle();
    world.check();
    let map = RpsMap::new(cpus_of(rps_cpus));
    assert_eq!(world.journal.seen.len(), 3 * flows.len());
    for seen in &world.journal.seen {
        assert_eq!((Some(seen.cpu), seen.note.steer_reason), (map.select(seen.hash), Rps));
    }
}

#[test]
fn rps_5_device_hash_used_or_no_steering() {
    let mut world = World::new(Settings::default());
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
    let mut bytes = Vec::new();
    builder.udp(1000, 53).write(&mut bytes, b"query").unwrap();
    let wire_len = u32::try_from(bytes.len()).unwrap();
    let headers = parse::parse(&bytes, wire_len, Link::Ethernet, Verify::Nothing);
    let computed = Hasher::keyed(&world::KEY, false).hash(&View::new(&bytes, &headers));

    let from_device = FlowHash(!computed.0);
    let mut packets: Vec<_> = [&bytes, &bytes, &vec![0; 60]].map(|it| world.packet(it)).into();
    packets[0].hash = from_device;
    world.turn(Burst { packets, ..Burst::default() });
    world.settle();
    world.check();

    let map = RpsMap::new(cpus_of(0b1111));
    for (hash, steer_reason) in [(from_device, Rps), (computed, Rps), (FlowHash::NONE, Inline)] {
        let seen = world.journal.seen.iter().find(|seen| seen.hash == hash).unwrap();
        let cpu = if hash.is_some() { map.select(hash) } else { Some(POLLING) };
        assert_eq!((Some(seen.cpu), seen.note.steer_reason), (cpu, steer_reason));
    }
    assert_eq!(world.intake.counters().unsteered.get(), 1);
}

#[test]
fn rps_9_offline_cpus_are_left_out() {
    for (cpus, way) in [([2, 9], (2, Rps)), ([8, 9], (POLLING.0, Inline))] {
        let mut world = World::new(Settings::default());
        world.intake.set_rps_cpus(cpus.map(CpuId), 0);
        world.arrive(&[FLOW]);
        world.settle();
        assert_eq!(world.journal.ways(), [way], "of {cpus:?}");
    }
}

/// Events between a packet's predecessors and itself.
type Meanwhile = fn(&mut World);

#[test]
fn rfs_5_rfs_6_desired_cpu_change_decision_table() {
    let nowhere = |_: &mut World| {};
    let processed = |world: &mut World| assert!(world.deliver(1, 100) > 0);
    let in_hand = |world: &mut World| world.take(1, 100);
    // With batch_max = 4.
    let cases: [(&str, usize, Meanwhile, (u16, SteerReason)); 6] = [
        ("processed", 5, processed, (2, Drained)),
        ("all in hand", 1, in_hand, (2, Held)),
        ("one waits", 1, nowhere, (2, Held)),
        ("a batch waits", 4, nowhere, (2, Held)),
        ("more than a batch waits", 5, nowhere, (1, Stay)),
        ("a batch is in hand and one more waits", 5, in_hand, (1, Stay)),
    ];
    for (name, predecessors, meanwhile, way) in cases {
        let mut world = all_on_cpu_1(Settings::default());
        world.arrive(&vec![FLOW; predecessors]);
        meanwhile(&mut world);
        world.set_mask(ON_CPU_2);
        world.arrive(&[FLOW]);
        world.settle();
        world.check();
        assert_eq!(world.journal.ways().last(), Some(&way), "{name}");
        let counters = world.intake.counters();
        assert_eq!(counters.moves.get(), u64::from(way.0 == 2), "{name}");
        assert_eq!(counters.holds.get(), u64::from(way.1 == Held), "{name}");
        assert_eq!(counters.stays.get(), u64::from(way.1 == Stay), "{name}");
    }
}

#[test]
fn rfs_6_each_turn_rereads_old_head() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[FLOW; 5]);
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW]);
    world.deliver(1, 5);
    world.arrive(&[FLOW]);
    world.settle();
    world.check();
    assert_eq!(world.journal.ways()[5..], [(1, Stay), (2, Held)]);
}

#[test]
fn promise_1_removed_cpu_keeps_only_own_flow() {
    for (mask, held) in [(ON_BOTH, 0), (ON_CPU_2, 1)] {
        let mut world = all_on_cpu_1(Settings::default());
        world.arrive(&[OTHER; 10]);
        world.set_mask(mask);
        world.arrive(&[OTHERS_NEIGHBOUR]);
        assert_eq!(world.intake.held(), held);
        world.settle();
        world.check();
    }
}

#[test]
fn rfs_6_move_waits_only_for_predecessors() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[OTHER; 2]);
    world.take(1, 2);
    world.set_mask(ON_BOTH);
    world.arrive(&[OTHER, FLOW]);
    for _ in 0..100 {
        world.idle_turn();
        assert_eq!(world.deliver(2, 10), 0, "its predecessors are in the hands of CPU 1");
        assert_eq!(world.intake.held(), 1);
    }
    world.finish(1);
    world.idle_turn();
    assert_eq!(world.intake.held(), 0);
    assert_eq!([1, 2].map(|cpu| world.queued_on(cpu)), [1, 1]);
    world.settle();
    world.check();
    assert_eq!(world.journal.ways(), [(1, Rps), (1, Rps), (1, Rps), (2, Held)]);
    let proof = world.journal.seen[3].note.head_old;
    assert_eq!(proof, Some(Position(world.settings.start).plus(2)));
}

#[test]
fn rfs_6_dropped_first_packet_shows_proof() {
    let mut world = all_on_cpu_1(Settings { netdev_max_backlog: 1, ..Settings::default() });
    spend_flow_limit(&mut world);
    world.arrive(&[NEIGHBOUR]);
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW, NEIGHBOUR]);
    world.settle();
    world.check();
    assert_eq!(world.drops.iter().map(|drop| drop.1).collect::<Vec<_>>(), [DropReason::FlowLimit]);
    let moved = world.journal.seen.last().unwrap();
    assert_eq!((moved.cpu, moved.note.steer_reason), (CpuId(2), Held));
    assert_eq!(moved.note.head_old, Some(Position(world.settings.start).plus(65)));
}

#[test]
fn promise_3_saturated_cpu_left_after_move_after() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[OTHER; 20]);
    world.set_mask(ON_BOTH);
    world.arrive(&[OTHER; 10]);
    assert_eq!((world.queued_on(1), world.intake.held()), (24, 6), "four may stay");
    world.arrive(&[FLOW; 30]); // CPU 1 stays saturated

    world.deliver(1, 23);
    world.idle_turn();
    assert_eq!(world.intake.held(), 6, "one of its packets is not processed");
    world.deliver(1, 1);
    world.idle_turn();
    assert_eq!(world.intake.held(), 0);
    assert_eq!([1, 2].map(|cpu| world.queued_on(cpu)), [30, 6]);

    world.arrive(&[OTHER; 14]);
    world.set_mask(ON_CPU_1);
    world.arrive(&[OTHER; 10]);
    assert_eq!((world.queued_on(2), world.intake.held()), (24, 6), "another move, four more");
    world.settle();
    world.check();
}

#[test]
fn promise_3_saturated_cpu_is_left_in_time() {
    let time_ns = 1000;
    let mut world = all_on_cpu_1(Settings {
        move_after: MoveAfter { packets: u32::MAX, time_ns },
        ..Settings::default()
    });
    world.arrive(&[FLOW; 20]);
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW]);
    let since_ns = world.now_ns;
    for (at_ns, held) in [(time_ns - 1, 0), (time_ns, 1), (time_ns + 1, 2)] {
        world.now_ns = since_ns + at_ns - 1; // the turn itself takes one
        world.arrive(&[FLOW]);
        assert_eq!(world.intake.held(), held, "after {at_ns} ns");
    }
    world.settle();
    world.check();
}

#[test]
fn promise_3_slot_with_several_targets_leaves_timely() {
    // The first of two slots contains the boundary between CPU 1 and CPU 2, and is on CPU 3.
    let neighbours = [0x5555_5555, 0x5555_5556].map(|hash| Flow { id: 0, hash });
    let mut world =
        World::new(Settings { rps_cpus: 0b1000, rps_flow_cnt: 2, ..Settings::default() });
    world.arrive(&[neighbours[0]; 20]);
    world.set_mask(0b1110);
    world.arrive(&neighbours.repeat(5));
    assert_eq!((world.queued_on(3), world.intake.held()), (24, 6));
    world.settle();
    world.check();
    let ways = world.journal.ways();
    assert!(ways[24..].iter().all(|&way| way == (1, Held)), "{ways:?}");
}

#[test]
fn promise_2_slot_of_many_cpus_keeps_flows() {
    // Each of two slots contains the ranges of four CPUs, so two CPUs are between the ends of the
    // first.
    let eight = Settings { rps_cpus: 0xff, rps_flow_cnt: 2, ..Settings::default() };
    let mut world = World::new(eight);
    let [one, two] = [(1, 0x2000_0001), (2, 0x4000_0001)].map(|(id, hash)| Flow { id, hash });
    for burst in [[one; 2], [two; 2], [one; 2]] {
        world.arrive(&burst);
    }
    world.settle();
    world.check();
    assert_eq!((world.drops.len(), world.journal.seen.len()), (0, 6));
}

#[test]
fn flow_limit_counts_beyond_half_backlog() {
    let mut world = all_on_cpu_1(Settings { netdev_max_backlog: 50, ..Settings::default() });
    world.intake.set_flow_limit(FlowLimit::new(4096), 0);
    for _ in 0..1000 {
        world.arrive(&[FLOW]);
        world.deliver(1, 1);
    }
    assert_eq!(world.drops, [], "one packet at a time is no backlog");
    world.check();
}

#[test]
fn notes_stay_with_their_packets() {
    let mut world = all_on_cpu_1(Settings { batch_max: 40, ..Settings::default() });
    for (burst, more) in [(10, 10), (30, 5), (1, 40)] {
        world.arrive(&vec![FLOW; burst]);
        // Refreshes the tail of the packets, but not that of the notes.
        assert!(world.deliveries[1].has_work());
        world.arrive(&vec![OTHER; more]);
        world.deliver(1, burst);
        world.check();
    }
    world.settle();
    world.check();
    let ways: Vec<_> = world.journal.seen.iter().map(|seen| seen.note.previous_flow).collect();
    assert_eq!(ways.len(), 96);
    world.journal.check_positions();
}

#[test]
fn promise_3_turn_checks_64_held_moves() {
    let flows: Vec<_> = (0..100).map(|id| Flow { id, hash: u32::from(id) << 25 | 1 }).collect();
    let all_held = || {
        let mut world = all_on_cpu_1(Settings {
            rps_flow_cnt: 128,
            move_after: MoveAfter { packets: 0, time_ns: u64::MAX },
            hold_max: 100,
            netdev_max_backlog: 250,
            ..Settings::default()
        });
        world.arrive(&flows);
        world.set_mask(ON_CPU_2);
        world.arrive(&flows);
        assert_eq!(world.intake.held(), 100);
        world.deliver(1, 100);
        world
    };
    let mut quiet = all_held();
    let held = [(); 2].map(|()| {
        quiet.idle_turn();
        quiet.intake.held()
    });
    assert_eq!(held, [36, 0]);
    let mut busy = all_held();
    busy.arrive(&flows);
    assert_eq!((busy.intake.held(), busy.queued_on(2)), (0, 200));
}

#[test]
fn promise_3_held_moves_rotate_behind_stalled_cpu() {
    // Holds that cannot move are listed first, and are more than a turn checks.
    let flow = |id: u16| Flow { id, hash: (u32::from(id) << 24) + 1 };
    let (stuck, free): (Vec<_>, Vec<_>) =
        ((0..100).map(flow).collect(), (128..228).map(flow).collect());
    let mut world = World::new(Settings {
        rps_cpus: 0b1010,
        rps_flow_cnt: 256,
        move_after: MoveAfter { packets: 0, time_ns: u64::MAX },
        hold_max: 200,
        netdev_max_backlog: 250,
        ..Settings::default()
    });
    world.arrive(&[&stuck[..], &free].concat());
    assert_eq!((world.queued_on(1), world.queued_on(3)), (100, 100));
    world.set_mask(ON_CPU_2);
    world.arrive(&[&stuck[..], &free].concat());
    assert_eq!(world.intake.held(), 200);
    world.deliver(3, 100);
    for _ in 0..200_u32.div_ceil(64) {
        world.idle_turn();
    }
    assert_eq!((world.intake.held(), world.queued_on(2)), (100, 100), "CPU 1 stands");
    world.settle();
    world.check();
}

#[test]
fn promise_1_stalled_cpu_resumes_in_order() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[FLOW; 10]);
    world.set_mask(ON_CPU_2);
    for _ in 0..20 {
        world.arrive(&[FLOW, OTHER]);
        world.deliver(2, 100);
    }
    world.check();
    assert!(world.journal.seen.iter().all(|seen| seen.flow == OTHER.id), "others go on");
    assert_eq!((world.queued_on(1), world.intake.held()), (14, 16));
    world.settle();
    world.check();
    let of_flow =
        world.journal.seen.iter().filter(|seen| seen.flow == FLOW.id).map(|seen| seen.cpu.0);
    let of_flow: Vec<_> = of_flow.collect();
    assert_eq!(of_flow, [[1; 14].as_slice(), &[2; 16]].concat());
}

#[test]
fn promise_1_returning_flow_follows_predecessors() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[FLOW; 2]);
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW; 2]);
    assert_eq!(world.intake.held(), 2);
    world.set_mask(ON_CPU_1);
    world.arrive(&[FLOW]);
    assert_eq!((world.intake.held(), world.queued_on(1)), (0, 5), "nothing to wait for");
    world.settle();
    world.check();
    assert_eq!(world.intake.counters().moves.get(), 0);
}

/// Causes one drop, of the last packet that arrives.
type Scene = fn() -> World;

#[test]
fn promise_2_drops_are_counted_once_by_name() {
    let hold_full = || {
        let settings = Settings { hold_max: 2, netdev_max_backlog: 0, ..Settings::default() };
        let mut world = all_on_cpu_1(settings);
        world.arrive(&[FLOW]);
        world.set_mask(ON_CPU_2);
        world.arrive(&[FLOW; 3]);
        world
    };
    let backlog_full = || {
        let mut world = all_on_cpu_1(Settings { netdev_max_backlog: 3, ..Settings::default() });
        world.arrive(&[FLOW; 5]);
        world
    };
    let held_behind_a_full_backlog = || {
        let mut world = all_on_cpu_1(Settings { netdev_max_backlog: 1, ..Settings::default() });
        world.arrive(&[FLOW]);
        world.set_mask(ON_CPU_2);
        world.arrive(&[OTHER, OTHER, FLOW, FLOW]);
        world.deliver(1, 1);
        world.deliver(2, 1); // room for one of the two that are held
        world.idle_turn();
        world.arrive(&[FLOW]);
        world
    };
    let flow_limit = || {
        let mut world = all_on_cpu_1(Settings { netdev_max_backlog: 1, ..Settings::default() });
        spend_flow_limit(&mut world);
        world.arrive(&[NEIGHBOUR, FLOW]);
        world
    };
    let cases: [(DropReason, Scene, Option<u16>); 4] = [
        (DropReason::HoldFull, hold_full, None),
        (DropReason::BacklogFull, backlog_full, Some(1)),
        (DropReason::BacklogFull, held_behind_a_full_backlog, Some(2)),
        (DropReason::FlowLimit, flow_limit, Some(1)),
    ];
    for (reason, scene, cpu) in cases {
        let mut world = scene();
        world.check();
        assert_eq!(world.drops, [(world.last_arrival(), reason)]);
        let dropped = world.intake.counters().per_cpu.iter().map(|target| target.dropped.get());
        assert!(dropped.eq((0..CPUS).map(|at| u64::from(Some(at) == cpu))), "{reason:?}");
        world.settle();
        world.check();
    }
}

#[test]
fn promise_2_refused_frames_count_once_by_name() {
    for reason in [DropReason::LinkType, DropReason::Oversize, DropReason::NoBuffer] {
        let mut world = World::new(Settings::default());
        let packets = vec![world.packet(&[0, 1])];
        let refused = vec![world.refused(reason)];
        world.turn(Burst { packets, refused, ..Burst::default() });
        world.check();
        assert_eq!(world.drops, [(world.last_arrival(), reason)]);
        assert_eq!(world.intake.counters().bytes.get(), 2 + 60);
    }
}

#[test]
fn rps_c2_quiet_queue_gathers_bursts_spread() {
    let quiet = |spread, rps_cpus| {
        let mut world = World::new(Settings { spread, rps_cpus, ..Settings::default() });
        world.now_ns += SPREAD_WINDOW_NS;
        world.arrive(&[OTHER]);
        world.deliver(3, 1);
        world.now_ns += SPREAD_WINDOW_NS;
        world.idle_turn();
        world.arrive(&[OTHER]);
        world.settle();
        world
    };
    let mut gathered = quiet(SpreadPolicy::WhenBusy, 0b1111);
    assert_eq!(gathered.journal.ways().last(), Some(&(POLLING.0, Spread)));
    for burst in 0..FULL_BURSTS_TO_SPREAD {
        gathered.deliver(POLLING.0, 64);
        let cpu = gathered.journal.ways().last().map(|(cpu, _)| *cpu);
        assert_eq!(cpu, Some(POLLING.0), "burst {burst}");
        gathered.arrive(&[OTHER; 64]);
    }
    gathered.settle();
    gathered.check();
    assert_eq!(gathered.journal.ways().last().map(|(cpu, _)| *cpu), Some(3));

    let always = quiet(SpreadPolicy::Always, 0b1111);
    assert_eq!(always.journal.ways(), [(3, Rps); 2]);
    let polls_only = quiet(SpreadPolicy::WhenBusy, 0b1110);
    assert_eq!(polls_only.journal.ways(), [(3, Rps); 2], "the polling CPU is not in the map");
}

#[test]
fn promise_3_batches_turns_and_queues_are_bounded() {
    let mut world = World::new(Settings::default());
    let start = Position(u32::MAX);
    let mut queues = [0, 1].map(|_| Backlogs::new(RxQueue(0), 4, 9));
    let lanes = queues.each_mut().map(|queue| queue.connect(CpuId(2), 32, start, true));
    let mut delivery = Delivery::new(CpuId(2), lanes.into(), 4);
    for (flow, queue) in (0..).zip(&mut queues) {
        for _ in 0..10 {
            put(queue, CpuId(2), world.packet(&[0, flow]));
        }
        assert!(!queue.has_room(CpuId(2)));
        let (packet, reason) = offer(queue, CpuId(2), world.packet(&[0, flow])).unwrap_err();
        assert_eq!(reason, DropReason::BacklogFull, "a full ring refuses the eleventh");
        world.pool.put(packet.frame);
    }
    let mut journal = Journal::new(start);
    let turns = [9, 100, 1].map(|budget| delivery.turn(budget, &mut world.pool, &mut journal));
    assert_eq!(turns, [9, 11, 0]);
    assert_eq!(journal.batches, [4, 4, 1, 4, 4, 2, 1]);
    let flows: Vec<_> = journal.seen.iter().map(|seen| seen.flow).take(9).collect();
    assert_eq!(flows, [1, 1, 1, 1, 0, 0, 0, 0, 1]);
    assert_eq!(journal.order.breaks, []);
}
