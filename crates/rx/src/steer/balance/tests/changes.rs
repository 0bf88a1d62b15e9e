//! Groups whose rate changes, and room for heavy ones beside work that cannot leave.

use super::*;

/// A flow becomes heavy in the course of a window, while another one ends. It fits where that one was, or seems to, but would
/// rest there beside the polling.
#[test]
fn rps_b2_rising_flow_stays_where_it_is() {
    let flow = |hash, percent: u64| {
        let packets = u32::try_from(WINDOW_NS * percent / 100 / COST_NS).unwrap();
        Source { hash, packets }
    };
    for first_percent in [80, 56, 24, 0] {
        let mut bench = Bench::new(4, WINDOW_NS * 40 / 100);
        let light = (1..=400).map(|index| Source { hash: spread_hash(index), packets: 100 });
        let light: Vec<_> = light.collect();
        let ending = [&light[..], &[flow(1, 20)]].concat();
        for sources in [&light, &ending] {
            for _ in 0..150 {
                bench.window(sources);
            }
        }
        assert_eq!(bench.cpu_of(flow(1, 20)), CpuId(0), "it shares the CPU that polls");
        let rising = |percent| flow(0xa000_0001, percent);
        let cpu = bench.cpu_of(rising(80));
        assert_ne!(cpu, CpuId(0));
        bench.window(&[&light[..], &[rising(first_percent)]].concat());
        let risen = [&light[..], &[rising(80)]].concat();
        for _ in 0..20 {
            bench.window(&risen);
            assert_eq!(bench.cpu_of(rising(80)), cpu);
        }
        let (work, _) = bench.window(&risen);
        assert!(work[cpu.index()] <= WINDOW_NS * 86 / 100, "{work:?}");
    }
}

/// The burst of a flow in a single window changes no CPU, however busy the CPU was.
#[test]
fn rps_b4_burst_moves_no_flow() {
    let mut bench = Bench::new(4, 0);
    let light: Vec<_> =
        (0..400).map(|index| Source { hash: spread_hash(index), packets: 100 }).collect();
    for _ in 0..50 {
        bench.window(&light);
    }
    let before: Vec<_> = light.iter().map(|source| bench.cpu_of(*source)).collect();
    let burst = Source { hash: light[7].hash, packets: 4_000 };
    bench.window(&[&light[..], &[burst]].concat());
    for _ in 0..20 {
        bench.window(&light);
        assert_eq!(bench.cpu_of(burst), before[7]);
    }
}

/// A CPU whose flows come in bursts of one window gives some away, too.
#[test]
fn rps_b1_flows_in_bursts_are_evened_out() {
    for period in [2, 3, 4, 6] {
        let mut bench = Bench::new(4, 0);
        let light: Vec<_> =
            (0..400).map(|index| Source { hash: spread_hash(index), packets: 25 }).collect();
        let heavy: Vec<_> = (1..=4).map(|at| Source { hash: at << 24, packets: 12_000 }).collect();
        let both = [&light[..], &heavy[..]].concat();
        for window in 0..400 {
            bench.window(if window % period == 0 { &both } else { &light });
        }
        let mut cpus: Vec<_> = heavy.iter().map(|source| bench.cpu_of(*source)).collect();
        cpus.sort_unstable();
        cpus.dedup();
        assert!(cpus.len() > 1, "all four on {cpus:?}, each {period} windows");
    }
}

/// Flows whose rates rise in each window leave the CPU that they fill.
#[test]
fn rps_b1_rising_flows_are_evened_out() {
    let mut bench = Bench::new(4, 0);
    let flows = |packets| (1..=4).map(|at| Source { hash: at << 24, packets }).collect::<Vec<_>>();
    let mut packets = 400;
    while packets < 1_000_000 {
        bench.window(&flows(packets));
        packets = packets * 5 / 4;
    }
    let flows = flows(packets);
    assert!(flows.iter().any(|flow| bench.cpu_of(*flow) != bench.cpu_of(flows[0])));
}

/// The least busy CPU has work that cannot leave, and no room for a group: one that is a little busier takes it, or this one,
/// if it then has less of that than the other keeps.
#[test]
fn rps_b1_groups_find_a_roomier_cpu() {
    let percent = |percent: u64| u32::try_from(WINDOW_NS * percent / 100 / COST_NS).unwrap();
    let flow = |hash, share| Source { hash, packets: percent(share) };
    let on = |cpu: u32, number: u32| cpu << 30 | number << 22 | 1;
    // CPU 0 polls half of the time, CPU 1 has flows of a fifth, and the others light ones.
    let busy = (0..5).map(|number| flow(on(1, number), 20));
    let light =
        [2, 3].into_iter().flat_map(|cpu| (0..51).map(move |number| flow(on(cpu, number), 1)));
    let sources: Vec<_> = busy.chain(light).collect();
    let mut bench = Bench::new(4, WINDOW_NS / 2);
    for _ in 0..100 {
        bench.window(&sources);
    }
    let (work, _) = bench.window(&sources);
    assert!(imbalance_percent(&work) <= 115, "{work:?}");
}

/// All other CPUs have more work that cannot leave than the busiest.
#[test]
fn rps_b1_groups_join_fixed_work() {
    let percent = |percent: u64| u32::try_from(WINDOW_NS * percent / 100 / COST_NS).unwrap();
    let sources: Vec<_> =
        (0..5).map(|number| Source { hash: number << 22 | 1, packets: percent(20) }).collect();
    let mut bench = Bench::new(4, 0);
    for _ in 0..100 {
        for cpu in 1..4 {
            bench.loads[cpu].busy_ns += WINDOW_NS / 2;
        }
        bench.window(&sources);
    }
    let left = sources.iter().filter(|source| bench.cpu_of(**source) == CpuId(0)).count();
    assert!(left < 5, "all stay on the CPU that they fill");
}

/// Groups with a burst in this window do not leave, so that a heavy one must not count on their room.
#[test]
fn rps_b4_swap_counts_no_unconfirmed_groups() {
    let percent = |percent: u64| u32::try_from(WINDOW_NS * percent / 100 / COST_NS).unwrap();
    let mut bench = Bench::new(2, WINDOW_NS * 15 / 100);
    let light = |packets| {
        (0..10_u32).map(move |number| Source { hash: 1 << 31 | number << 24 | 1, packets })
    };
    let heavy = Source { hash: 7, packets: percent(80) };
    let calm: Vec<_> = light(percent(2)).collect();
    for _ in 0..100 {
        bench.window(&calm);
    }
    let calm: Vec<_> = light(percent(2)).chain([heavy]).collect();
    let burst: Vec<_> = light(percent(4)).chain([heavy]).collect();
    for _ in 0..2 {
        bench.window(&calm);
    }
    assert_eq!(bench.cpu_of(heavy), CpuId(0));
    bench.window(&burst);
    let (work, _) = bench.window(&calm);
    assert!(work.iter().all(|work_ns| *work_ns <= WINDOW_NS * 96 / 100), "{work:?}");
}

/// A heavy flow begins on the CPU that polls, two windows after another one has ended. Light groups that moved at once would
/// rest where it has room.
#[test]
fn rps_b2_pair_awaits_heavy_flow() {
    let percent = |percent: u64| u32::try_from(WINDOW_NS * percent / 100 / COST_NS).unwrap();
    let mut bench = Bench::new(2, WINDOW_NS * 10 / 100);
    let light: Vec<_> =
        (0..20).map(|number| Source { hash: number << 27 | 1, packets: percent(2) }).collect();
    let heavy = |hash| Source { hash, packets: percent(90) };
    let [ending, beginning] = [heavy(1 << 31 | 1 << 20), heavy(1 << 20)];
    for _ in 0..200 {
        bench.window(&[&light[..], &[ending]].concat());
    }
    assert_eq!([bench.cpu_of(ending), bench.cpu_of(beginning)], [1, 0].map(CpuId));
    for _ in 0..2 {
        bench.window(&light);
    }
    for _ in 0..2 {
        bench.window(&[&light[..], &[beginning]].concat());
    }
    let (work, _) = bench.window(&[&light[..], &[beginning]].concat());
    assert_eq!(bench.cpu_of(beginning), CpuId(1));
    assert!(work.iter().all(|work_ns| *work_ns <= WINDOW_NS * 92 / 100), "{work:?}");
}

/// Bursts of heavy flows in every window hold back no other moves of two CPUs.
#[test]
fn rps_b1_pair_moves_between_bursts() {
    let percent = |percent: u64| u32::try_from(WINDOW_NS * percent / 100 / COST_NS).unwrap();
    let mut bench = Bench::new(2, 0);
    let steady = (0..8).map(|number| Source { hash: number << 24 | 1, packets: percent(15) });
    let steady: Vec<_> = steady.collect();
    // A burst in each window, by one of 40 flows in turn, so that none of them is one that has bursts as usual.
    for window in 0..40 {
        let burst = Source { hash: 1 << 31 | window << 24, packets: percent(60) };
        bench.window(&[&steady[..], &[burst]].concat());
    }
    let moved = steady.iter().filter(|source| bench.cpu_of(**source) == CpuId(1)).count();
    assert!((1..8).contains(&moved), "{moved} of 8 flows on the other CPU");
}

/// Bursts of heavy flows in every window hold back the first moves of two CPUs for two windows, and later ones seldom.
#[test]
fn rps_b1_bursts_seldom_hold_pair_back() {
    let percent = |percent: u64| u32::try_from(WINDOW_NS * percent / 100 / COST_NS).unwrap();
    let mut bench = Bench::new(2, 0);
    let calm: Vec<_> =
        (0..100).map(|number| Source { hash: number << 25 | 1, packets: percent(1) }).collect();
    let steady = |at: u32| Source { hash: (at % 60) << 24 | 1 << 20, packets: percent(4) };
    let burst =
        |at: u32| Source { hash: 1 << 31 | (at % 60) << 24 | 2 << 20, packets: percent(60) };
    for _ in 0..50 {
        bench.window(&calm);
    }
    // More and more flows on the first CPU, and a burst of another flow in each window.
    let (mut sources, mut with_moves) = (calm, Vec::new());
    for window in 0..60 {
        sources.push(steady(window));
        let (_, round) = bench.window(&[&sources[..], &[burst(window)]].concat());
        if round.is_some_and(|round| round.moves > 0) {
            with_moves.push(window);
        }
    }
    assert!(with_moves[0] < 4 && with_moves.len() >= 10, "moves after windows {with_moves:?}");
}

/// After a burst that came long ago, a heavy flow is awaited as it would be without it.
#[test]
fn rps_b2_pair_awaits_after_burst() {
    let percent = |percent: u64| u32::try_from(WINDOW_NS * percent / 100 / COST_NS).unwrap();
    let mut bench = Bench::new(2, WINDOW_NS * 10 / 100);
    let light: Vec<_> =
        (0..20).map(|number| Source { hash: number << 27 | 1, packets: percent(2) }).collect();
    let flow = |hash, share| Source { hash, packets: percent(share) };
    let ending = flow(1 << 31 | 1 << 20, 50);
    let beginning = flow(1 << 20, 90);
    let before = [&light[..], &[ending]].concat();
    for _ in 0..200 {
        bench.window(&before);
    }
    assert_eq!([bench.cpu_of(ending), bench.cpu_of(beginning)], [1, 0].map(CpuId));
    bench.window(&[&before[..], &[flow(1 << 31 | 2 << 20, 100)]].concat());
    for _ in 0..50 {
        bench.window(&before);
    }
    for _ in 0..2 {
        bench.window(&light);
    }
    for _ in 0..2 {
        bench.window(&[&light[..], &[beginning]].concat());
    }
    let (work, _) = bench.window(&[&light[..], &[beginning]].concat());
    assert_eq!(bench.cpu_of(beginning), CpuId(1));
    assert!(work.iter().all(|work_ns| *work_ns <= WINDOW_NS * 92 / 100), "{work:?}");
}

/// No window is so long that a rate is too large for it.
#[test]
fn rps_b1_weights_are_right_in_long_windows() {
    const LONG_NS: u64 = 10 * NS_PER_S;
    let map = RpsMap::new([0, 1].map(CpuId));
    let mut groups = Groups::new(SHIFT, &map);
    let mut work = |packets| {
        groups.weigh(FlowHash(1), packets);
        groups.end_window(LONG_NS);
        groups.each().map(|(_, weight)| weight.work_ns(100)).sum::<u64>()
    };
    let expected = 12_000_000 * 100;
    for _ in 0..4 {
        assert_eq!(work(120_000_000), expected);
    }
}
