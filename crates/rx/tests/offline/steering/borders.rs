//! Slots that contain a boundary of the map: they stay, instead of moving back and forth.

use forebay_rx::CpuId;
use forebay_rx::SteerReason::Rps;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{CpuLoad, GATHER_AFTER_NS, SPREAD_WINDOW_NS, SpreadPolicy};

use super::world::{CPUS, Flow, POLLING, Settings, World};

#[test]
fn rps_4_border_slot_stays() {
    // With two slots and three CPUs, each slot contains a boundary of the map.
    let flow = |id, hash| Flow { id, hash };
    let borders = [
        ([flow(1, 0x1000_0001), flow(2, 0x6000_0001)], [1, 2]),
        ([flow(3, 0x9000_0001), flow(4, 0xf000_0001)], [2, 3]),
    ];
    for ([low, high], [low_cpu, high_cpu]) in borders {
        for (first, second, cpu) in [(low, high, low_cpu), (high, low, high_cpu)] {
            let rps_cpus = 0b1110;
            let mut world =
                World::new(Settings { rps_cpus, rps_flow_cnt: 2, ..Settings::default() });
            for _ in 0..10 {
                world.arrive(&[first, second]);
            }
            world.settle();
            world.check();
            let ways = world.journal.ways();
            assert!(ways.iter().all(|way| *way == (cpu, Rps)), "{ways:?}");
            let counters = world.intake.counters();
            assert_eq!((counters.moves.get(), counters.stays.get()), (0, 0));
        }
    }
}

#[test]
fn rfs_9_explanation_sees_older_table() {
    let [low, high] = [(1, 0x1000_0001), (2, 0x6000_0001)].map(|(id, hash)| Flow { id, hash });
    let mut world =
        World::new(Settings { rps_cpus: 0b1110, rps_flow_cnt: 2, ..Settings::default() });
    world.arrive(&[low, high]);
    for rps_flow_cnt in [1, 2] {
        world.set_rps_flow_cnt(rps_flow_cnt);
        let state = world.intake.state_of(FlowHash(high.hash));
        assert_eq!((state.cpu, state.desired), (Some(CpuId(1)), (CpuId(1), Rps)));
    }
    world.arrive(&[high]);
    world.settle();
    world.check();
    assert_eq!(world.journal.ways(), [(1, Rps); 3]);
}

#[test]
fn rps_s1_border_slot_stays_in_partial_set() {
    let settings = Settings {
        rps_cpus: 0b1111,
        rps_flow_cnt: 2,
        spread: SpreadPolicy::WhenBusy,
        ..Settings::default()
    };
    let mut world = World::new(settings);
    let mut loads = vec![CpuLoad::default(); CPUS.into()];
    world.intake.follow_load(SPREAD_WINDOW_NS, &loads);
    world.arrive(&[Flow { id: 9, hash: 9 }]);
    loads[POLLING.index()].frames = 1;
    loads[POLLING.index()].busy_ns = GATHER_AFTER_NS;
    world.intake.follow_load(SPREAD_WINDOW_NS + GATHER_AFTER_NS, &loads);
    assert_eq!(world.intake.active_cpus(), 3, "of four");
    // Each slot contains a boundary of three CPUs.
    let flows = [0x1000_0001, 0x6000_0001, 0x9000_0001, 0xf000_0001];
    let flows: Vec<_> = (1..).zip(flows).map(|(id, hash)| Flow { id, hash }).collect();
    for _ in 0..200 {
        world.arrive(&flows);
        world.settle();
    }
    world.check();
    let counters = world.intake.counters();
    assert_eq!((counters.moves.get(), counters.holds.get(), counters.stays.get()), (0, 0, 0));
}
