//! Notes, counters and moves of steering against the packets' course, and records of lost packets.

use forebay_rx::SteerReason::{Drained, Held, Rps};
use forebay_rx::backlog::FlowLimit;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{Drops, HeldPackets, Move};
use forebay_rx::{CpuId, DropReason};

use crate::steering::world::{Flow, Settings, World};
use crate::steering::{FLOW, NEIGHBOUR, ON_CPU_1, ON_CPU_2, OTHER, all_on_cpu_1, spend_flow_limit};

#[test]
fn move_reports_wait_and_duration() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[NEIGHBOUR; 2]);
    world.arrive(&[FLOW; 4]);
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW]);
    let refused_ns = world.now_ns;
    let state = world.intake.state_of(world.hash_of(FLOW));
    assert_eq!((state.slot, state.slots, state.is_fenced), (Some(0), 4, false));
    assert_eq!((state.cpu, state.desired), (Some(CpuId(1)), (CpuId(2), Rps)));
    assert_eq!((state.ahead, state.held, state.last_flow), (7, None, FlowHash(FLOW.hash)));
    assert_eq!(state.moves, []);

    world.now_ns += 100;
    world.arrive(&[FLOW; 5]); // three stay and two are held
    let held_ns = world.now_ns;
    world.deliver(1, 3);
    world.idle_turn();
    let state = world.intake.state_of(world.hash_of(FLOW));
    let held = HeldPackets { packets: 2, since_ns: held_ns, to: CpuId(2) };
    assert_eq!((state.cpu, state.ahead, state.held), (Some(CpuId(1)), 7, Some(held)));

    world.deliver(1, 7);
    world.now_ns += 1000;
    world.idle_turn();
    let state = world.intake.state_of(world.hash_of(NEIGHBOUR));
    assert_eq!((state.cpu, state.ahead, state.held), (Some(CpuId(2)), 2, None));
    let at_ns = world.now_ns;
    let expected = Move {
        at_ns,
        flow: FlowHash(FLOW.hash),
        slot: state.moves[0].slot,
        from: CpuId(1),
        to: CpuId(2),
        desired_by: Rps,
        steer_reason: Held,
        ahead: 6,
        stayed: 4,
        waited_ns: at_ns - refused_ns,
        held_ns: at_ns - held_ns,
    };
    assert_eq!(state.moves, [expected]);
    assert_eq!(world.intake.counters().held_max_ns.get(), at_ns - held_ns);
    world.settle();
    world.check();
}

#[test]
fn ahead_is_current_when_idle() {
    let mut world = all_on_cpu_1(Settings::default());
    for _ in 0..100 {
        world.arrive(&[FLOW; 2]);
        let ahead = [0, 1, 1].map(|budget| {
            world.deliver(1, budget);
            world.intake.state_of(world.hash_of(FLOW)).ahead
        });
        assert_eq!(ahead, [2, 1, 0]);
    }
}

#[test]
fn unwaited_move_says_so() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[FLOW]);
    world.deliver(1, 1);
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW]);
    let moves = world.intake.state_of(world.hash_of(FLOW)).moves;
    let [Move { steer_reason, ahead, stayed, waited_ns, held_ns, .. }] = moves[..] else {
        panic!("{moves:?}");
    };
    assert_eq!((steer_reason, ahead, stayed, waited_ns, held_ns), (Drained, 0, 0, 0, 0));
    assert_eq!(world.intake.state_of(world.hash_of(OTHER)).moves, [], "another slot's");
}

/// An event seen in the middle of a turn may have happened after the turn's time was read.
#[test]
fn one_turn_move_says_so() {
    let mut world = World::new(Settings { rps_cpus: 0, ..Settings::default() });
    (0..100).for_each(|_| world.idle_turn()); // heads are no longer refreshed
    world.application(FLOW, 1);
    world.arrive(&[FLOW]);
    world.deliver(1, 1);
    world.application(FLOW, 2);
    world.arrive(&[FLOW]);
    let held_ns = world.now_ns;
    assert_eq!(world.intake.held(), 1);
    world.now_ns += 100;
    world.idle_turn();
    let moves = world.intake.state_of(world.hash_of(FLOW)).moves;
    let [Move { steer_reason, ahead, stayed, waited_ns, .. }] = moves[..] else {
        panic!("{moves:?}")
    };
    assert_eq!((steer_reason, ahead, stayed, waited_ns), (Held, 0, 0, world.now_ns - held_ns));
    assert_eq!(moves[0].held_ns, waited_ns);
    world.settle();
    world.check();
}

#[test]
fn old_key_moves_match_no_flow() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[FLOW]);
    world.deliver(1, 1);
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW]);
    world.rekey();
    world.idle_turn();
    let whoever = Flow { id: 7, hash: FLOW.hash };
    world.key = 0; // another flow hashes like FLOW did
    assert_eq!(world.intake.state_of(world.hash_of(whoever)).moves, []);
}

#[test]
fn watched_slot_flows_are_named() {
    let mut world = World::new(Settings::default());
    world.arrive(&[FLOW, NEIGHBOUR]);
    assert_eq!(world.intake.state_of(FlowHash(FLOW.hash)).sharers, [], "nobody watched");
    world.intake.watch(FlowHash(FLOW.hash));
    world.arrive(&[NEIGHBOUR, OTHER, FLOW, NEIGHBOUR]);
    let mut sharers = |flow: Flow| world.intake.state_of(FlowHash(flow.hash)).sharers;
    assert_eq!(sharers(FLOW), [NEIGHBOUR, FLOW].map(|flow| FlowHash(flow.hash)));
    assert_eq!(sharers(OTHER), []);
    world.settle();
}

#[test]
fn flow_drops_name_their_cpu() {
    let mut world = all_on_cpu_1(Settings { netdev_max_backlog: 1, ..Settings::default() });
    spend_flow_limit(&mut world);
    world.arrive(&[NEIGHBOUR, FLOW]);
    let (flow, limited_ns) = (FlowHash(FLOW.hash), world.now_ns);
    world.intake.set_flow_limit(None::<FlowLimit>, 0);
    world.arrive(&[FLOW; 3]);
    world.settle();
    world.check();
    let mut drops: Vec<_> = world.intake.drops_of(flow).collect();
    drops.sort_by_key(|drops| drops.reason.index());
    let cpu = Some(CpuId(1));
    let last_ns = drops[0].last_ns;
    let expected = [
        Drops { flow, reason: DropReason::BacklogFull, cpu, frames: 2, last_ns },
        Drops { flow, reason: DropReason::FlowLimit, cpu, frames: 1, last_ns: limited_ns },
    ];
    assert_eq!(drops, expected);
    assert!(last_ns > limited_ns);
    assert_eq!(world.intake.drops_of(FlowHash(NEIGHBOUR.hash)).count(), 0);
}

#[test]
fn promise_2_lost_batch_is_counted_once() {
    let mut world = all_on_cpu_1(Settings::default());
    assert_eq!(world.lose(1), 0, "nothing was in hand");
    world.arrive(&[FLOW; 6]);
    assert_eq!(world.lose(1), 0, "what is on the backlog is not lost");
    world.take(1, 4);
    assert_eq!(world.lose(1), 4);
    assert_eq!(world.lose(1), 0, "once");
    world.check();
    assert!(world.drops.iter().all(|drop| drop.1 == DropReason::CpuLost));

    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW]);
    assert_eq!(world.intake.held(), 1, "the ring is carried on, and waited for");
    world.deliver(1, 2);
    world.idle_turn();
    assert_eq!((world.intake.held(), world.queued_on(2)), (0, 1));
    world.set_mask(ON_CPU_1);
    world.settle();
    world.check();
    assert_eq!((world.journal.seen.len(), world.drops.len()), (3, 4));
    assert_eq!(world.deliveries[1].counters().lost.get(), 4);
}

#[test]
fn promise_1_lost_thread_frees_its_flows() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[FLOW]);
    world.take(1, 1);
    world.set_running(!ON_CPU_1);
    world.arrive(&[FLOW]);
    assert_eq!(world.intake.held(), 1);
    world.lose(1);
    world.idle_turn();
    assert_eq!(world.intake.held(), 0);
    world.settle();
    world.check();
}
