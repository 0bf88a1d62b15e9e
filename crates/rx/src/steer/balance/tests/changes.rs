//! Groups whose rate changes, and room for heavy ones beside work that cannot leave.

use super::*;

/// A flow becomes heavy in the course of a window, while another one ends. It fits where that one was, or seems to, but would
/// rest there beside the polling.
#[test]
fn rps_b2_rising_flow_stays_where_it_is() {
    let flow = |hash, share| Source { hash, packets: percent(share) };
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
