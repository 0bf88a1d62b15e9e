//! Held moves share one arena: a flow that fills it does not harm others.

use forebay_rx::DropReason;
use forebay_rx::steer::{HOLD_SHARE_LEAST, MoveAfter};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::steering::world::{Flow, Settings, World};
use crate::steering::{FLOW, NEIGHBOUR, OTHER};

/// Elephants on CPU 1, which is stalled, as are the CPUs that they should move to. Each has a slot
/// of its own.
const ELEPHANTS: [Flow; 5] = [
    Flow { id: 1, hash: 0x2000_0001 },
    Flow { id: 2, hash: 0x2800_0002 },
    Flow { id: 3, hash: 0x3000_0003 },
    Flow { id: 4, hash: 0x3800_0004 },
    Flow { id: 5, hash: 0x3c00_0005 },
];

/// Flows whose CPUs have room.
const OTHERS: [Flow; 2] = [Flow { id: 8, hash: 0x5000_0008 }, Flow { id: 9, hash: 0x7000_0009 }];

/// Size of the arena, which four elephants fill.
const HOLD_MAX: u32 = 4 * HOLD_SHARE_LEAST;

fn world() -> World {
    World::new(Settings {
        rps_cpus: 0xff,
        rps_flow_cnt: 64,
        move_after: MoveAfter { packets: 0, time_ns: u64::MAX },
        hold_max: HOLD_MAX,
        netdev_max_backlog: 4,
        ..Settings::default()
    })
}

fn drops_of(world: &World, flow: Flow) -> usize {
    world.dropped_flows.iter().filter(|id| **id == flow.id).count()
}

#[test]
fn promise_3_one_slot_holds_its_share() {
    let mut world = world();
    let [elephant, ..] = ELEPHANTS;
    world.arrive(&[elephant]);
    world.application(elephant, 2);
    world.arrive(&[elephant; HOLD_MAX as usize]);
    assert_eq!(world.intake.held(), HOLD_SHARE_LEAST as usize);
    assert_eq!(world.drops.len(), (HOLD_MAX - HOLD_SHARE_LEAST) as usize);
    assert!(world.drops.iter().all(|drop| drop.1 == DropReason::HoldFull));
    world.settle();
    world.check();
}

#[test]
fn promise_3_roomless_hold_ends_in_order() {
    let mut world = world();
    let [other, _] = OTHERS;
    world.arrive(&ELEPHANTS);
    ELEPHANTS.iter().for_each(|&flow| world.application(flow, 4));
    world.arrive(&[other]);
    world.application(other, 0);
    world.arrive(&[other]); // held, while there is room
    for flow in ELEPHANTS {
        world.arrive(&[flow; HOLD_SHARE_LEAST as usize]);
    }
    assert_eq!(world.intake.held(), HOLD_MAX as usize);
    world.arrive(&[other; 3]);
    assert_eq!((drops_of(&world, other), world.queued_on(2)), (0, 5), "all of them, with CPU 2");
    world.deliver(2, 5);
    world.arrive(&[other]);
    assert_eq!(world.queued_on(0), 1, "it moves when nothing needs to be held");
    world.settle();
    world.check();
}

/// A flow of CPU 1 with a packet there, whose application is now on CPU 2, which is full.
fn with_full_target() -> World {
    let settings = Settings { rps_cpus: 0b1110, netdev_max_backlog: 1, ..Settings::default() };
    let mut world = World::new(settings);
    for (flow, cpu) in [(FLOW, 1), (OTHER, 2), (NEIGHBOUR, 3)] {
        world.application(flow, cpu);
    }
    world.arrive(&[FLOW, OTHER, OTHER]);
    world.application(FLOW, 2);
    world
}

#[test]
fn promise_3_full_target_spares_other_flow() {
    let mut world = with_full_target();
    world.arrive(&[FLOW; 3]);
    assert_eq!((world.intake.held(), world.queued_on(2)), (3, 2), "behind the packet on CPU 1");
    world.deliver(1, 1);
    world.deliver(2, 1); // room for one of the three
    world.arrive(&[NEIGHBOUR]);
    assert_eq!((world.intake.held(), world.queued_on(3)), (3, 0));
    assert_eq!(drops_of(&world, NEIGHBOUR), 0, "CPU 3 has room");
    world.arrive(&[FLOW]);
    assert_eq!(drops_of(&world, FLOW), 1, "CPU 2 has none");
    world.settle();
    world.check();
}

/// More packets may be held for a CPU than it has room for. They wait for room, and none is dropped.
#[test]
fn promise_3_held_beyond_room_wait() {
    let mut world = with_full_target();
    world.arrive(&[FLOW]);
    world.deliver(1, 1);
    world.arrive(&[NEIGHBOUR; 20]);
    assert_eq!(
        (world.intake.held(), world.queued_on(3)),
        (21, 0),
        "CPU 2 is full, CPU 3 has room for two"
    );
    for _ in 0..50 {
        world.idle_turn();
        (1..4).for_each(|cpu| _ = world.deliver(cpu, 1));
        world.check();
        assert_eq!(world.drops, [], "each waits for room");
    }
    assert_eq!(world.intake.held(), 0);
    world.settle();
    world.check();
}

#[derive(Clone, Debug)]
enum Step {
    /// Arrival of this many packets of an elephant.
    Elephant(usize, usize),
    /// Packets of another flow, between which its application moves to this CPU.
    Other(usize, u16),
    /// Move of an elephant's application.
    Move(usize, u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..ELEPHANTS.len(), 1usize..100).prop_map(|(flow, count)| Step::Elephant(flow, count)),
        (0..OTHERS.len(), 2u16..4).prop_map(|(flow, cpu)| Step::Other(flow, cpu)),
        (0..ELEPHANTS.len(), 4u16..8).prop_map(|(flow, cpu)| Step::Move(flow, cpu)),
    ]
}

proptest! {
    /// A flow whose CPUs have room loses no packet, whatever other flows do.
    #[test]
    fn promise_3_elephants_spare_flows_with_room(
        steps in vec(step(), 0..200),
        hold_max in 1..=HOLD_MAX,
    ) {
        let mut world = World::new(Settings { hold_max, ..world().settings });
        world.arrive(&ELEPHANTS);
        for flow in ELEPHANTS {
            world.application(flow, 4);
            world.arrive(&[flow; HOLD_SHARE_LEAST as usize]);
        }
        for step in steps {
            match step {
                Step::Elephant(flow, count) => {
                    world.arrive(&vec![ELEPHANTS[flow]; count]);
                }
                Step::Other(flow, cpu) => {
                    world.arrive(&[OTHERS[flow]]);
                    world.take(2, 1);
                    world.take(3, 1);
                    // The current batch is not processed when the next packets arrive.
                    world.application(OTHERS[flow], cpu);
                    world.arrive(&[OTHERS[flow]; 2]);
                    world.finish(2);
                    world.finish(3);
                    world.deliver(2, 64);
                    world.deliver(3, 64);
                    world.idle_turn();
                }
                Step::Move(flow, cpu) => world.application(ELEPHANTS[flow], cpu),
            }
            for flow in OTHERS {
                prop_assert_eq!(drops_of(&world, flow), 0);
            }
        }
        world.settle();
        world.check();
    }
}
