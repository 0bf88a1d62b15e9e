//! RFS: packets follow their application without overtaking each other.

use forebay_rx::SteerReason::{Drained, Held, Inline, Rfs, Rps, Stay};
use forebay_rx::{DropReason, SteerReason};

use crate::steering::world::{CPUS, Flow, Settings, World};
use crate::steering::{FLOW, NEIGHBOUR, OTHER, OTHERS_NEIGHBOUR};

type Meanwhile = fn(&mut World);

/// Flow without a hash.
const NO_HASH: Flow = Flow { id: 9, hash: 0 };

/// Flow whose slot is between those of [`FLOW`] and [`OTHER`].
const BETWEEN: Flow = Flow { id: 5, hash: 0x5000_0007 };

#[test]
fn rfs_1_packets_follow_application_or_map() {
    let mut world = World::new(Settings::default());
    world.application(FLOW, 2);
    for _ in 0..3 {
        world.arrive(&[FLOW, OTHER, BETWEEN]);
        world.deliver(2, 100);
    }
    world.settle();
    world.check();
    let ways = [FLOW, OTHER, BETWEEN].map(|flow| world.journal.ways_of(flow));
    assert_eq!(ways, [[(2, Rfs); 3], [(3, Rps); 3], [(1, Rps); 3]]);
}

#[test]
fn rfs_2_moving_application_follows_drain_rule() {
    let processed = |world: &mut World| assert!(world.deliver(1, 100) > 0);
    let in_hand = |world: &mut World| world.take(1, 100);
    // With batch_max = 4.
    let cases: [(&str, usize, Meanwhile, (u16, SteerReason)); 4] = [
        ("processed", 5, processed, (2, Drained)),
        ("all in hand", 1, in_hand, (2, Held)),
        ("a batch waits", 4, |_| (), (2, Held)),
        ("a batch is in hand and one more waits", 5, in_hand, (1, Stay)),
    ];
    for (name, predecessors, meanwhile, way) in cases {
        let mut world = World::new(Settings::default());
        world.application(FLOW, 1);
        world.arrive(&vec![FLOW; predecessors]);
        meanwhile(&mut world);
        world.application(FLOW, 2);
        world.arrive(&[FLOW]);
        world.settle();
        world.check();
        assert_eq!(world.journal.ways().last(), Some(&way), "{name}");
    }
}

#[test]
fn rfs_6_an_unset_slot_follows_at_once() {
    let mut world = World::new(Settings::default());
    world.application(FLOW, 3);
    world.arrive(&[FLOW]);
    assert_eq!((world.queued_on(3), world.intake.held()), (1, 0));
}

/// The kernel moves such a flow at once, and packets still queued are delivered later by another
/// CPU.
#[test]
fn rfs_6_stopped_cpu_drains_then_idles() {
    let mut world = World::new(Settings::default());
    world.application(FLOW, 1);
    world.arrive(&[FLOW; 2]);
    world.application(OTHERS_NEIGHBOUR, 1);
    world.set_running(!0b0010);
    world.arrive(&[FLOW, OTHERS_NEIGHBOUR]);
    assert_eq!([0, 1, 3].map(|cpu| world.queued_on(cpu)), [0, 2, 1]);
    assert_eq!(world.intake.held(), 1, "its predecessors have not been processed");
    world.deliver(1, 1);
    world.idle_turn();
    assert_eq!(world.intake.held(), 1, "one of them has not");
    world.deliver(1, 1);
    world.idle_turn();
    assert_eq!(world.intake.held(), 0);

    world.settle();
    world.set_running(u8::MAX);
    world.arrive(&[FLOW]);
    world.settle();
    world.check();
    let way = [(1, Rfs), (1, Rfs), (0, Held), (1, Drained)];
    assert_eq!(world.journal.ways_of(FLOW), way, "it is followed there again when it runs");
}

#[test]
fn rps_9_requested_mask_returns_with_cpus() {
    let mut world = World::new(Settings { rps_cpus: 0b0110, ..Settings::default() });
    let mut on = |running| {
        world.set_running(running);
        world.arrive(&[OTHER]);
        world.settle();
        world.check();
        *world.journal.ways().last().unwrap()
    };
    let ways = [0xff, 0b1011, 0b1001, 0b0100, 0xff].map(&mut on);
    assert_eq!(ways, [(2, Rps), (1, Drained), (0, Drained), (2, Drained), (2, Rps)]);
}

#[test]
fn rfs_6_flow_waits_for_inline_reader() {
    let mut world = World::new(Settings { rps_cpus: 0b0010, ..Settings::default() });
    world.read_inline(1);
    world.arrive(&[FLOW; 3]);
    assert_eq!(world.deliver(1, 2), 2);
    assert_eq!(world.deliver(1, 8), 1);
    world.set_mask(0b0100);
    world.arrive(&[FLOW]);
    world.idle_turn();
    assert_eq!(world.intake.held(), 1, "the reader has not answered the first three");
    world.release(1);
    world.idle_turn();
    world.idle_turn();
    assert_eq!((world.intake.held(), world.deliver(2, 8)), (0, 1));
    world.check();
}

#[test]
fn mask_overrides_application() {
    let mut world = World::new(Settings { rps_cpus: 0b1100, ..Settings::default() });
    world.application(FLOW, 1);
    let mut under = |mask| {
        world.set_mask(mask);
        world.arrive(&[FLOW]);
        let desired = world.intake.state_of(world.hash_of(FLOW)).desired;
        world.settle();
        world.check();
        assert_eq!(world.journal.seen.last().unwrap().cpu, desired.0);
        (desired.0.0, desired.1)
    };
    let desired_cpus = [0b1100, 0b1010, 0, 0b1000].map(&mut under);
    assert_eq!(desired_cpus, [(2, Rps), (1, Rfs), (1, Rfs), (3, Rps)]);
}

#[test]
fn rfs_10_flow_count_zero_disables_rfs() {
    let mut world = World::new(Settings::default());
    world.application(FLOW, 1);
    world.arrive(&[FLOW; 2]);
    world.set_rps_flow_cnt(0);
    world.arrive(&[FLOW]);
    assert_eq!(world.intake.held(), 1, "to the map's CPU, but not before its predecessors");
    world.settle();
    world.set_rps_flow_cnt(4);
    world.arrive(&[FLOW]);
    world.settle();
    world.check();
    let cpus: Vec<_> = world.journal.ways().into_iter().map(|way| way.0).collect();
    assert_eq!(cpus, [1, 1, 0, 1]);
}

#[test]
fn rfs_9_live_flow_count_rounds_up() {
    let mut world = World::new(Settings::default());
    let mut slots = |rps_flow_cnt| {
        world.set_rps_flow_cnt(rps_flow_cnt);
        world.intake.state_of(world.hash_of(FLOW)).slots
    };
    assert_eq!([3, 4, 5, 4096, 4097, 0].map(&mut slots), [4, 4, 8, 4096, 8192, 4096]);
}

#[test]
fn rfs_9_replaced_table_knows_applications() {
    let mut world = World::new(Settings::default());
    world.application(FLOW, 2);
    for entries in [Some(16), Some(1 << 12), None, Some(64)] {
        world.set_sock_flows(entries);
        world.arrive(&[FLOW]);
        world.settle();
        world.check();
    }
    assert_eq!(world.journal.ways(), [(2, Rfs), (2, Rfs), (0, Drained), (2, Drained)]);
}

#[test]
fn promise_3_two_applications_in_slot_alternate() {
    let mut world = World::new(Settings::default());
    world.application(FLOW, 1);
    world.application(NEIGHBOUR, 2);
    for round in 0..200 {
        world.arrive(&[FLOW, NEIGHBOUR]);
        (0..CPUS).for_each(|cpu| {
            world.deliver(cpu, 8);
        });
        let delivered = world.journal.seen.len();
        assert!(delivered + 8 >= 2 * round, "{delivered} in {round} rounds");
        world.check();
    }
    world.settle();
    world.check();
    for (flow, cpu) in [(FLOW, 1), (NEIGHBOUR, 2)] {
        let ways = world.journal.ways_of(flow);
        let at_home = ways.iter().filter(|way| way.0 == cpu).count();
        assert!(at_home >= 50, "{flow:?} met its application {at_home} times in 200");
    }
}

#[test]
fn promise_1_thrashing_application_is_followed_in_order() {
    let mut world = World::new(Settings::default());
    for round in 0..1000 {
        world.application(FLOW, round % 4);
        world.arrive(&[FLOW; 3]);
        world.deliver(round / 2 % 4, 20);
        world.take(round * 3 % 4, 2);
        world.check();
    }
    world.settle();
    world.check();
    assert!(world.intake.counters().moves.get() > 100);
}

/// Hazard H10.
#[test]
fn h10_dropped_packet_moves_no_tail() {
    let mut world =
        World::new(Settings { netdev_max_backlog: 7, batch_max: 2, ..Settings::default() });
    world.application(FLOW, 1);
    world.arrive(&[FLOW; 9]);
    let ahead = |world: &mut World| world.intake.state_of(world.hash_of(FLOW)).ahead;
    assert_eq!((world.queued_on(1), world.drops.len(), ahead(&mut world)), (8, 1, 8));

    world.application(FLOW, 2);
    world.arrive(&[FLOW; 7]);
    assert_eq!((world.drops.len(), ahead(&mut world)), (1, 8), "none stays where no room is");
    assert_eq!(world.intake.held(), 7, "all wait to move");
    world.deliver(1, 8);
    world.idle_turn();
    assert_eq!((world.intake.held(), world.queued_on(2)), (0, 7));
    world.settle();
    world.check();
    assert!(world.drops.iter().all(|drop| drop.1 == DropReason::BacklogFull));
}

/// Hazard H12.
#[test]
fn h12_unhashed_packets_move_with_polling_cpu() {
    let mut world = World::new(Settings::default());
    world.arrive(&[NO_HASH, FLOW]);
    world.set_polling_cpu(forebay_rx::CpuId(3));
    world.arrive(&[NO_HASH, FLOW]);
    assert_eq!(world.intake.held(), 1);
    assert_eq!([0, 3].map(|cpu| world.queued_on(cpu)), [3, 0], "flows stay where the map says");
    world.deliver(0, 1);
    world.arrive(&[NO_HASH]);
    assert_eq!((world.intake.held(), world.queued_on(3)), (0, 2), "behind nothing of a flow");
    world.settle();
    world.check();
    assert_eq!(world.journal.ways_of(NO_HASH), [(0, Inline), (3, Held), (3, Inline)]);
    let state = world.intake.state_of(world.hash_of(NO_HASH));
    assert_eq!((state.slot, state.cpu), (None, Some(forebay_rx::CpuId(3))));
}
