//! Explanations of a flow's CPU.

use forebay_rx::SteerReason::{Drained, Rps};
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{HeldPackets, WATCHES_MAX};
use forebay_rx::{CpuId, DropReason};

use crate::steering::world::{Settings, World};
use crate::steering::{FLOW, NEIGHBOUR, ON_CPU_1, ON_CPU_2, OTHER, all_on_cpu_1};

const HASH: FlowHash = FlowHash(FLOW.hash);

#[test]
fn explanation_has_wait_and_move() {
    let mut world = all_on_cpu_1(Settings::default());
    assert_eq!(world.intake.state_of(HASH).cpu, None);
    world.arrive(&[FLOW; 5]);
    let state = world.intake.state_of(HASH);
    assert_eq!((state.slot, state.slots), (Some(0), 4));
    assert_eq!((state.cpu, state.desired, state.stayed), (Some(CpuId(1)), (CpuId(1), Rps), None));

    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW; 2]);
    let refused_ns = world.now_ns;
    world.idle_turn();
    let state = world.intake.state_of(HASH);
    assert_eq!((state.cpu, state.desired), (Some(CpuId(1)), (CpuId(2), Rps)));
    assert_eq!((state.ahead, state.stayed, state.held), (7, Some((2, refused_ns)), None));

    world.deliver(1, 5);
    world.arrive(&[FLOW]);
    let held_ns = world.now_ns;
    let held = Some(HeldPackets { packets: 1, since_ns: held_ns, to: CpuId(2) });
    assert_eq!(world.intake.state_of(HASH).held, held, "near: held at once");
    world.settle();
    let [moved] = world.intake.state_of(HASH).moves[..] else { panic!("it moved once") };
    assert_eq!((moved.from, moved.to, moved.desired_by), (CpuId(1), CpuId(2), Rps));
    assert_eq!((moved.ahead, moved.stayed), (5, 2), "as it was when the move was first refused");
    assert_eq!(moved.waited_ns, moved.at_ns - refused_ns);
    assert_eq!(moved.held_ns, moved.at_ns - held_ns);
    assert_eq!(world.intake.state_of(HASH).stayed, None);
}

#[test]
fn explanation_has_present_stay_only() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[FLOW; 6]);
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW; 2]);
    assert_eq!(world.intake.state_of(HASH).stayed.map(|(packets, _)| packets), Some(2));
    world.set_mask(ON_CPU_1);
    world.arrive(&[FLOW]);
    world.set_mask(ON_CPU_2);
    assert_eq!(world.intake.state_of(HASH).stayed, None, "that stay was over");
    world.arrive(&[FLOW; 3]);
    let state = world.intake.state_of(HASH);
    assert_eq!((state.stayed, state.held), (Some((3, world.now_ns)), None), "and none is overdue");
    world.set_mask(ON_CPU_1);
    world.arrive(&[FLOW]);
    world.settle();
    world.set_mask(ON_CPU_2);
    world.arrive(&[FLOW]);
    let moves = world.intake.state_of(HASH).moves;
    let [.., moved] = moves[..] else { panic!("it moved") };
    assert_eq!((moved.stayed, moved.waited_ns, moved.to), (0, 0, CpuId(2)));
    world.settle();
    world.check();
}

#[test]
fn explanation_has_target_of_hold() {
    let mut world = World::new(Settings { rps_cpus: 0b1110, ..Settings::default() });
    for (flow, cpu) in [(FLOW, 1), (NEIGHBOUR, 3)] {
        world.application(flow, cpu);
    }
    world.arrive(&[FLOW]);
    world.application(FLOW, 2);
    world.arrive(&[FLOW, NEIGHBOUR]);
    let state = world.intake.state_of(FlowHash(NEIGHBOUR.hash));
    assert_eq!((state.desired.0, state.held.map(|held| held.to)), (CpuId(3), Some(CpuId(2))));
    world.deliver(1, 1);
    world.idle_turn();
    assert_eq!((world.queued_on(2), world.queued_on(3)), (2, 0));
    world.settle();
    world.check();
}

#[test]
fn watched_flow_lists_slot_sharers() {
    let mut world = all_on_cpu_1(Settings::default());
    world.arrive(&[NEIGHBOUR]);
    assert_eq!(world.intake.state_of(HASH).watched_since_ns, None);
    let since_ns = world.now_ns;
    world.intake.watch(HASH);
    world.arrive(&[OTHER, FLOW]);
    world.arrive(&[NEIGHBOUR, FLOW]);
    world.intake.watch(HASH); // continues the first watch
    let state = world.intake.state_of(HASH);
    assert_eq!(state.watched_since_ns, Some(since_ns));
    assert_eq!(state.sharers, [FLOW, NEIGHBOUR].map(|flow| FlowHash(flow.hash)));
    world.settle();
    world.idle_turn();
    let since_ns = world.now_ns;
    world.intake.set_rps_flow_cnt(4096, 1);
    world.settle();
    world.arrive(&[OTHER, NEIGHBOUR]);
    let state = world.intake.state_of(HASH);
    assert_eq!(state.watched_since_ns, Some(since_ns));
    assert_eq!(state.sharers, [FlowHash(NEIGHBOUR.hash)]);
    for flow in 1..=u32::try_from(WATCHES_MAX).unwrap() {
        world.intake.watch(FlowHash(flow));
    }
    assert_eq!(world.intake.state_of(HASH).watched_since_ns, None, "bounded");
}

#[test]
fn explanation_has_drops_and_target() {
    let settings = Settings { netdev_max_backlog: 2, ..Settings::default() };
    let mut world = all_on_cpu_1(settings);
    world.arrive(&[FLOW; 5]);
    let drops: Vec<_> = world.intake.drops_of(HASH).collect();
    let [drops] = drops[..] else { panic!("one reason: {drops:?}") };
    assert_eq!((drops.reason, drops.cpu), (DropReason::BacklogFull, Some(CpuId(1))));
    assert_eq!((drops.frames, drops.last_ns), (2, world.now_ns));
    assert_eq!(world.intake.drops_of(FlowHash(OTHER.hash)).count(), 0);
    world.deliver(1, 100);
    world.set_mask(ON_CPU_2);
    world.arrive(&[NEIGHBOUR]);
    let [moved] = world.intake.state_of(HASH).moves[..] else { panic!("the slot moved once") };
    assert_eq!((moved.flow.0, moved.at_ns), (NEIGHBOUR.hash, world.now_ns), "with another flow");
    assert_eq!((moved.from, moved.to, moved.steer_reason), (CpuId(1), CpuId(2), Drained));
    assert_eq!((moved.ahead, moved.stayed, moved.waited_ns, moved.held_ns), (0, 0, 0, 0));
}
