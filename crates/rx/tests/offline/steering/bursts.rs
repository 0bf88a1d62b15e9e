//! Bursts: full ones, room for their packets, and bad frames.

use etherparse::PacketBuilder;
use forebay_rx::DropReason;
use forebay_rx::arrive::Burst;
use forebay_rx::arrive::PollStatus::{self, Drained, Last, MorePending};
use forebay_rx::intake::DEV_WEIGHT;
use forebay_rx::steer::{
    BalanceConfig, BalancePolicy, CpuLoad, FULL_BURSTS_TO_SPREAD, HOLD_SHARE_LEAST,
    SPREAD_WINDOW_NS, SpreadPolicy,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::steering::world::{CPUS, Flow, POLLING, Settings, World};

/// Flows of CPUs 0 to 3.
const FLOWS: [Flow; 4] = [
    Flow { id: 1, hash: 0x1000_0001 },
    Flow { id: 2, hash: 0x5000_0002 },
    Flow { id: 3, hash: 0x9000_0003 },
    Flow { id: 4, hash: 0xd000_0004 },
];

#[test]
fn rps_c2_full_burst_is_dev_weight() {
    for (len, spreads) in [(DEV_WEIGHT - 1, false), (DEV_WEIGHT, true)] {
        let mut world =
            World::new(Settings { spread: SpreadPolicy::WhenBusy, ..Settings::default() });
        world.now_ns += SPREAD_WINDOW_NS;
        world.idle_turn();
        for _ in 0..=FULL_BURSTS_TO_SPREAD {
            world.arrive(&vec![FLOWS[3]; len]);
            world.deliver(POLLING.0, len);
            world.deliver(3, len);
        }
        let elsewhere = world.deliveries[3].counters().frames.get();
        assert_eq!(elsewhere > 0, spreads, "bursts of {len}");
        world.settle();
        world.check();
    }
}

/// Whatever `dev_weight` is.
#[test]
fn rps_c2_full_burst_fills_the_request() {
    for (asked, len, spreads) in [(32, 32, true), (32, 31, false), (256, 255, false), (1, 1, true)]
    {
        let mut world = World::new(Settings {
            spread: SpreadPolicy::WhenBusy,
            netdev_max_backlog: 300,
            ..Settings::default()
        });
        world.now_ns += SPREAD_WINDOW_NS;
        world.idle_turn();
        for _ in 0..=FULL_BURSTS_TO_SPREAD {
            let packets = (0..len).map(|_| world.packet_of(FLOWS[3])).collect();
            world.turn(Burst { packets, asked, ..Burst::default() });
            world.deliver(POLLING.0, len);
            world.deliver(3, len);
        }
        let elsewhere = world.deliveries[3].counters().frames.get();
        assert_eq!(elsewhere > 0, spreads, "{len} of {asked}");
        world.settle();
        world.check();
    }
}

/// Ranges that leave the polling CPU in ten windows, in which it is always busy. Each window has a turn for every one of
/// `turns`: its number of packets, and the state of the source after them.
fn ranges_leaving(turns: &[(usize, PollStatus)]) -> u64 {
    let mut world = World::new(Settings { rps_flow_cnt: 4096, ..Settings::default() });
    let config = BalanceConfig { policy: BalancePolicy::Load, ..BalanceConfig::default() };
    world.intake.set_balance(config, 0);
    let mut loads = vec![CpuLoad::default(); CPUS.into()];
    let window_ns = u64::from(config.window_us) * 1_000;
    for _ in 0..10 {
        for &(len, poll_status) in turns {
            let packets = (0..len).map(|_| world.packet_of(FLOWS[0])).collect();
            world.turn(Burst { packets, poll_status, ..Burst::default() });
            (0..4).for_each(|cpu| _ = world.deliver(cpu, len));
        }
        world.now_ns += window_ns;
        let CpuLoad { busy_ns, delivering_ns, packets, .. } = &mut loads[POLLING.index()];
        [busy_ns, delivering_ns].into_iter().for_each(|ns| *ns += window_ns);
        *packets += window_ns / 1_000;
        world.intake.follow_load(world.now_ns, &loads);
    }
    world.settle();
    world.check();
    world.intake.counters().balanced.get()
}

/// A poll keeps up with its queue if it empties it, however many frames it takes: a device without free memory gives few,
/// and a change of the settings splits a burst.
#[test]
fn rps_b1_short_poll_may_leave_frames() {
    let full = DEV_WEIGHT;
    for (name, turns, leave) in [
        ("full", &[(full, MorePending)][..], true),
        ("starved", &[(3, Last)], true),
        ("starved of all memory", &[(3, MorePending), (0, Last)], true),
        ("split, and frames are left", &[(40, MorePending), (full - 40, MorePending)], true),
        ("split, and the queue is empty", &[(40, MorePending), (full - 40, Drained)], false),
        ("short, and the queue is empty", &[(3, Drained)], false),
        ("full, and the queue is empty", &[(full, Drained)], false),
        ("starved, and then empty", &[(3, Last), (3, Drained)], false),
    ] {
        assert_eq!(ranges_leaving(turns) > 0, leave, "{name}");
    }
}

#[test]
fn promise_2_wrong_checksums_are_counted_each() {
    let mut good = Vec::new();
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
    builder.udp(7, 9).write(&mut good, b"payload").unwrap();
    let with_flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    // A byte of the IPv4 header's checksum, and one of the payload.
    let (ip_bad, l4_bad) = (with_flipped(24), with_flipped(good.len() - 1));
    let mut world = World::new(Settings::default());
    let frames = [&good, &ip_bad, &ip_bad, &l4_bad, &l4_bad, &l4_bad];
    let packets = frames.map(|bytes| world.packet(bytes)).into();
    world.turn(Burst { packets, ..Burst::default() });
    let counters = world.intake.counters();
    let counted = [&counters.flawed, &counters.ip_checksum_bad, &counters.l4_checksum_bad];
    assert_eq!(counted.map(|counter| counter.get()), [0, 2, 3]);
    world.settle();
}

#[derive(Clone, Debug)]
enum Step {
    /// Arrival of a packet of each of these flows.
    Arrive(Vec<usize>),
    Deliver(u16, usize),
    Mask(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        vec(0..FLOWS.len(), 1..30).prop_map(Step::Arrive),
        (0u16..4, 1usize..40).prop_map(|(cpu, count)| Step::Deliver(cpu, count)),
        (1u8..16).prop_map(Step::Mask),
    ]
}

proptest! {
    /// Packets within `room_for` are not dropped for lack of room, whatever their flows.
    #[test]
    fn promise_2_room_is_used(
        steps in vec(step(), 0..60),
        netdev_max_backlog in 1u32..80,
        hold_max in 1u32..300,
    ) {
        let mut world = World::new(Settings { netdev_max_backlog, hold_max, ..Settings::default() });
        let hold_share = (hold_max / 4).max(HOLD_SHARE_LEAST).min(hold_max);
        prop_assert_eq!(world.intake.hold_share(), hold_share as usize);
        let room = world.intake.room_for(u32::MAX);
        prop_assert_eq!(room, hold_share.min(netdev_max_backlog + 1), "nothing is there yet");
        for step in steps {
            match step {
                Step::Arrive(flows) => {
                    let room = world.intake.room_for(flows.len().try_into().unwrap()) as usize;
                    let flows: Vec<_> = flows.into_iter().map(|at| FLOWS[at]).take(room).collect();
                    world.arrive(&flows);
                    prop_assert!(world.drops.iter().all(|drop| drop.1 == DropReason::FlowLimit));
                }
                Step::Deliver(cpu, count) => {
                    world.deliver(cpu, count);
                }
                Step::Mask(mask) => world.set_mask(mask),
            }
            let queued = world.intake.queued_by_cpu().map(|(_, packets)| packets).max();
            prop_assert!(queued <= Some(netdev_max_backlog + 1) && queued.is_some());
        }
        world.settle();
        world.check();
    }
}
