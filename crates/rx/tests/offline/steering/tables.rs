//! Replaced tables and changed hashes, while packets flow.

use forebay_rx::SteerReason::{Held, Rps, Stay};
use forebay_rx::backlog::Backlogs;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{
    FlowTables, MoveAfter, OLDER_SLOTS_MAX, RpsMap, SpreadPolicy, SteerConfig, Steering, Verdict,
};
use forebay_rx::{CpuId, RxQueue, SteerReason};

use crate::steering::world::{Flow, Settings, World, cpus_of, put};
use crate::steering::{FLOW, NEIGHBOUR, ON_BOTH, ON_CPU_2, OTHER, OTHERS_NEIGHBOUR, all_on_cpu_1};

/// Flow of the slot next to that of [`FLOW`].
const NEXT: Flow = Flow { id: 5, hash: 0x5000_0007 };

fn is_fenced(world: &mut World, flow: Flow) -> bool {
    world.intake.state_of(world.hash_of(flow)).is_fenced
}

#[test]
fn rfs_9_any_size_keeps_flows() {
    for rps_flow_cnt in [1, 2, 4, 8, 4096, 0] {
        let mut world = all_on_cpu_1(Settings::default());
        world.arrive(&[FLOW; 5]);
        world.arrive(&[OTHER]);
        world.set_rps_flow_cnt(rps_flow_cnt);
        world.arrive(&[FLOW, OTHER]);
        assert_eq!((world.intake.held(), world.queued_on(1)), (0, 8), "nobody waits");
        world.set_mask(ON_CPU_2);
        world.arrive(&[FLOW]);
        assert_eq!(world.queued_on(1), 9, "too far behind to wait");
        world.deliver(1, 7);
        world.arrive(&[OTHER]);
        world.settle();
        world.check();
        assert_eq!(world.journal.ways_of(FLOW).last(), Some(&(1, Stay)));
        assert_eq!(world.journal.ways_of(OTHER)[..2], [(1, Rps); 2]);
    }
}

#[test]
fn rfs_9_new_table_moves_as_old() {
    for rps_flow_cnt in [2, 4, 64] {
        let mut world = all_on_cpu_1(Settings::default());
        world.arrive(&[FLOW, OTHER]);
        world.deliver(1, 1);
        world.set_rps_flow_cnt(rps_flow_cnt);
        world.set_mask(ON_CPU_2);
        world.arrive(&[FLOW, OTHER]);
        assert_eq!((world.queued_on(2), world.intake.held()), (1, 1), "{rps_flow_cnt}");
        world.settle();
        world.check();
        assert_eq!(world.journal.ways()[1..], [(1, Rps), (2, SteerReason::Drained), (2, Held)]);
    }
}

/// A slot that joins too many old slots reads none of them.
#[test]
fn promise_3_shrunken_table_waits_for_fence() {
    for (rps_flow_cnt, waits) in [(4096, false), (8192, true)] {
        let mut world = all_on_cpu_1(Settings { rps_flow_cnt, ..Settings::default() });
        world.arrive(&[FLOW, OTHER]);
        world.set_rps_flow_cnt(8192 / OLDER_SLOTS_MAX / 2);
        assert_eq!(is_fenced(&mut world, FLOW), waits, "{rps_flow_cnt}");
        world.arrive(&[FLOW, OTHER]);
        assert_eq!((world.intake.held() > 0, world.queued_on(1) > 2), (waits, !waits));
        assert!(world.intake.take_retired().is_none(), "it may be asked yet");
        while world.deliver(1, 1) > 0 {}
        world.settle();
        world.check();
        assert!(world.intake.take_retired().is_some() && world.intake.take_retired().is_none());
    }
}

#[test]
fn rfs_9_only_moving_slots_wait() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[FLOW, OTHER]);
    world.set_mask(ON_BOTH);
    world.arrive(&[OTHER]); // its desired CPU is no longer CPU 1
    world.set_rps_flow_cnt(8);
    assert_eq!([FLOW, OTHER].map(|flow| is_fenced(&mut world, flow)), [false, true]);
    world.arrive(&[FLOW, OTHERS_NEIGHBOUR, OTHER]);
    assert_eq!((world.queued_on(1), world.intake.held()), (3, 3));
    world.deliver(1, 2); // packets from before the replacement
    world.idle_turn();
    assert_eq!((world.queued_on(2), world.intake.held()), (1, 2), "the line goes first");
    world.deliver(2, 1);
    world.idle_turn();
    assert_eq!((world.queued_on(2), world.intake.held()), (2, 0), "then those behind the fence");
    assert!(!is_fenced(&mut world, OTHER));
    world.settle();
    world.check();
}

#[test]
fn rfs_9_joined_slots_wait_for_both() {
    for (processed_before, waits) in [([0, 0], true), ([1, 0], false), ([0, 1], false)] {
        let mut world = World::new(Settings::default());
        world.application(FLOW, 1);
        world.application(NEXT, 2);
        world.arrive(&[FLOW, NEXT]);
        (1..).zip(processed_before).for_each(|(cpu, packets)| {
            world.deliver(cpu, packets);
        });
        world.idle_turn();
        world.set_rps_flow_cnt(2);
        assert_eq!(is_fenced(&mut world, FLOW), waits, "{processed_before:?}");
        if waits {
            world.arrive(&[NEXT, FLOW]);
            for cpu in [2, 1] {
                world.idle_turn();
                assert_eq!((world.intake.held(), world.queued_on(3)), (2, 0));
                world.deliver(cpu, 1);
            }
            world.idle_turn();
            assert_eq!(world.intake.held(), 0, "both have");
        } else {
            // Flows wait for the one CPU that has packets, if they are to leave it.
            let is_next = processed_before[0] > 0;
            let (flow, there, wants) = if is_next { (NEXT, 2, 1) } else { (FLOW, 1, 2) };
            world.application(flow, wants);
            world.arrive(&[flow; 2]);
            assert_eq!(world.intake.held(), 2);
            world.deliver(there, 1);
            world.idle_turn();
            assert_eq!((world.intake.held(), world.queued_on(wants)), (0, 2));
        }
        world.settle();
        world.check();
    }
}

#[test]
fn promise_1_rekeyed_flow_waits_for_everything() {
    let mut world = World::new(Settings { rps_cpus: ON_BOTH, ..Settings::default() });
    world.arrive(&[FLOW, OTHER]);
    world.take(1, 1);
    world.rekey();
    for _ in 0..2 {
        world.arrive(&[FLOW]);
        assert!(is_fenced(&mut world, FLOW) && is_fenced(&mut world, OTHER));
    }
    world.finish(1);
    world.arrive(&[FLOW]);
    assert_eq!(world.intake.held(), 3, "nobody knows what is on CPU 2");
    world.take(2, 1);
    world.idle_turn();
    assert_eq!(world.intake.held(), 3, "nor what is in its hands");
    world.finish(2);
    world.arrive(&[FLOW]);
    assert_eq!(world.intake.held(), 0);
    assert!(!is_fenced(&mut world, FLOW));
    world.settle();
    world.check();
    let ways = world.journal.ways_of(FLOW);
    assert_eq!(ways, [(1, Rps), (1, Held), (1, Held), (1, Held), (1, Rps)]);
}

/// World in which two flows of different slots have three packets each in the line, behind two on
/// CPU 1, and backlogs take four.
fn with_a_line() -> World {
    let mut world = all_on_cpu_1(Settings { netdev_max_backlog: 3, ..Settings::default() });
    world.arrive(&[FLOW, OTHER]);
    world.set_mask(0b1100);
    world.arrive(&[FLOW, OTHER, FLOW, OTHER, FLOW, OTHER]);
    assert_eq!(world.intake.held(), 6);
    world.rekey();
    assert_eq!(world.intake.held(), 6, "in the line");
    world.deliver(1, 2);
    world
}

#[test]
fn promise_1_line_goes_in_order_to_cpu() {
    let mut world = with_a_line();
    world.arrive(&[FLOW, OTHER]);
    assert_eq!((world.queued_on(2), world.intake.held()), (4, 4), "as many as there is room for");
    for [on_2, held] in [[4, 3], [4, 2], [3, 2], [2, 2], [1, 2]] {
        world.deliver(2, 1);
        world.idle_turn();
        assert_eq!([world.queued_on(2), world.intake.held() as u64], [on_2, held]);
    }
    world.deliver(2, 1);
    world.idle_turn();
    assert_eq!(world.intake.held(), 0);
    world.settle();
    world.check();
    let line: Vec<_> =
        world.journal.seen[2..8].iter().map(|seen| (seen.cpu.0, seen.flow)).collect();
    assert_eq!(line, [1, 1, 1, 3, 3, 3].map(|flow| (2, flow)));
}

#[test]
fn promise_1_line_leaves_drained_stopped_cpu() {
    let mut world = with_a_line();
    world.idle_turn();
    assert_eq!((world.queued_on(2), world.intake.held()), (4, 2));
    world.set_running(!0b0100);
    for on_2 in [3, 2, 1] {
        world.deliver(2, 1);
        world.idle_turn();
        assert_eq!((world.queued_on(2), world.intake.held()), (on_2, 2));
    }
    world.deliver(2, 1);
    world.idle_turn();
    assert_eq!((world.queued_on(3), world.intake.held()), (2, 0));
    world.settle();
    world.check();
}

#[test]
fn promise_1_fence_behind_standing_fence() {
    let rekey: fn(&mut World) = World::rekey;
    let resize: fn(&mut World) = |world| world.set_rps_flow_cnt(8);
    for second in [rekey, resize] {
        for turns in 0..3 {
            let mut world = with_a_line();
            world.arrive(&[]);
            for _ in 0..turns {
                world.deliver(2, 1);
                world.arrive(&[FLOW, NEIGHBOUR]);
            }
            second(&mut world);
            world.arrive(&[FLOW, OTHER]);
            second(&mut world);
            world.arrive(&[FLOW, OTHER]);
            for _ in 0..40 {
                world.idle_turn();
                (0..4).for_each(|cpu| {
                    world.deliver(cpu, 1);
                });
                world.check();
            }
            assert_eq!(world.intake.held(), 0, "the line and both fences are gone");
            assert!(!is_fenced(&mut world, FLOW));
            world.settle();
            world.check();
        }
    }
}

#[test]
fn promise_3_front_fence_ignores_later_fence() {
    let mut world = World::new(Settings::default());
    world.application(FLOW, 1);
    world.application(NEXT, 2);
    world.application(OTHERS_NEIGHBOUR, 2);
    world.arrive(&[FLOW, NEXT]);
    world.set_rps_flow_cnt(2);
    assert!(is_fenced(&mut world, FLOW), "one slot, two CPUs");
    world.arrive(&[OTHERS_NEIGHBOUR]);
    world.set_rps_flow_cnt(4);
    world.deliver(1, 1);
    world.deliver(2, 1);
    world.arrive(&[FLOW]);
    assert!(!is_fenced(&mut world, FLOW) && world.intake.place_of(FlowHash(FLOW.hash)).has_fence);
    assert_eq!((world.intake.held(), world.queued_on(1)), (0, 1));
    world.settle();
    world.check();
}

#[test]
fn promise_3_rekeying_does_not_starve_packets() {
    let rekey: fn(&mut World, u32) = |world, _| world.rekey();
    let resize: fn(&mut World, u32) = |world, round| world.set_rps_flow_cnt(4 << (round % 2));
    for (replace, every) in [(rekey, 1), (resize, 1), (resize, 2), (resize, 3), (resize, 9)] {
        let mut world = World::new(Settings::default());
        world.application(OTHERS_NEIGHBOUR, 2);
        world.arrive(&[OTHERS_NEIGHBOUR; 3]);
        world.application(FLOW, 1);
        world.arrive(&[FLOW]);
        world.application(FLOW, 3);
        world.arrive(&[FLOW]);
        assert_eq!(world.intake.held(), 1);
        for round in 0..12 {
            if round % every == 0 {
                replace(&mut world, round);
            }
            // CPU 2 delivers more slowly.
            world.arrive(&[OTHERS_NEIGHBOUR]);
            (0..4).for_each(|cpu| {
                world.deliver(cpu, 1);
            });
            world.check();
        }
        assert_eq!(world.journal.ways_of(FLOW).len(), 2, "every {every} rounds");
        world.settle();
        world.check();
    }
}

#[test]
fn lone_fence_lifts_in_two_turns() {
    let mut world = World::new(Settings::default());
    world.arrive(&[FLOW]);
    world.deliver(0, 1);
    world.rekey();
    world.arrive(&[FLOW]);
    assert_eq!((world.intake.held(), is_fenced(&mut world, FLOW)), (0, false));
    assert_eq!(world.intake.counters().held_max_ns.get(), 0, "nobody waited");
    world.settle();
}

#[test]
fn promise_3_excess_holds_stay_or_refuse() {
    const HOLDS_MAX: u32 = 65_534;
    let mut world = World::new(Settings::default());
    let mut backlogs = Backlogs::new(RxQueue(0), 2, 100);
    let lanes = [0, 1].map(|cpu| backlogs.connect(CpuId(cpu), 4, forebay_buf::Position(0), true));
    let mut steering = Steering::new(&SteerConfig {
        polling_cpu: CpuId(0),
        rps_flow_cnt: 1 << 17,
        move_after: MoveAfter { packets: 0, time_ns: 0 },
        hold_max: 1,
        spread: SpreadPolicy::Always,
        batch_max: 4,
    });
    steering.set_running(RpsMap::new(cpus_of(0b11)));
    steering.set_rps_map(RpsMap::new(cpus_of(0b01)));
    put(&mut backlogs, CpuId(0), world.packet(&[0, 1]));
    steering.rehash(FlowTables::new(1 << 17), 0, &backlogs);
    let hash = |slot: u32| FlowHash(slot << 15 | 1);
    for slot in 0..HOLDS_MAX {
        let verdict = steering.decide(hash(slot), 0, &mut backlogs);
        assert!(matches!(verdict, Verdict::Hold(_)), "{slot}: {verdict:?}");
    }
    assert_eq!(steering.decide(hash(HOLDS_MAX), 0, &mut backlogs), Verdict::Refuse);
    drop(lanes);
}
