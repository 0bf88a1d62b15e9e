//! Two CPUs: heavy groups change places with others, and nothing moves before their weight is known.

use super::*;

/// A flow that fills a CPU appears on the one of two that polls. It changes places with the other flows, before those that
/// leave its CPU rest on the other one.
#[test]
fn rps_b2_elephant_leaves_polling_of_two() {
    // When the second one appears, polling has become less, so that the other CPU has more for others.
    for (largest, polling_ns, polling_later_ns) in
        [(400, 1_500_000, 1_500_000), (1_300, 3_000_000, 1_500_000)]
    {
        let mut bench = Bench::new(2, polling_ns);
        let mut sources = zipf(1_000, largest);
        for _ in 0..200 {
            bench.window(&sources);
        }
        let elephant = Source { hash: 7, packets: 18_000 };
        assert_eq!(bench.cpu_of(elephant), CpuId(0));
        sources.push(elephant);
        bench.polling_ns = polling_later_ns;
        let mut before_ns = u64::MAX / 200;
        for _ in 0..60 {
            let (work, _) = bench.window(&sources);
            let busiest_ns = *work.iter().max().unwrap();
            assert!(busiest_ns * 100 <= before_ns * 103, "B4: {work:?}, and {before_ns} ns before");
            before_ns = before_ns.min(busiest_ns);
        }
        let (work, _) = bench.window(&sources);
        assert_eq!(bench.cpu_of(elephant), CpuId(1), "{work:?}");
        assert!(work[1] <= u64::from(elephant.packets) * COST_NS / 100 * 105, "{work:?}");
    }
}

/// A flow that fills the polling CPU loses frames there, and seems lighter than it is. It stays if it would fill the other CPU
/// beyond what this one has.
#[test]
fn rps_b4_lost_frames_count_in_swap() {
    let mut bench = Bench::new(2, WINDOW_NS * 15 / 100);
    bench.backlog_ns = WINDOW_NS * 24 / 100;
    let elephant = Source { hash: 7, packets: percent(61) };
    let following = percent(35);
    for _ in 0..50 {
        // These packets follow their application.
        (0..following).for_each(|_| bench.balances[0].weigh_fixed(CpuId(1)));
        let fixed_ns = u64::from(following) * COST_NS;
        bench.loads[1].packets += u64::from(following);
        bench.loads[1].delivering_ns += fixed_ns;
        bench.loads[1].busy_ns += fixed_ns;
        bench.balances[0].note_poll(CpuId(0), MorePending);
        bench.window(&[elephant]);
        assert_eq!(bench.cpu_of(elephant), CpuId(0));
    }
}

/// Two CPUs have a heavy flow each, the polling one light flows, too. The heavy ones do not change places: the one that came
/// could not leave again.
#[test]
fn rps_b4_heavy_flows_of_two_stay() {
    let mut bench = Bench::new(2, WINDOW_NS / 20);
    let flow = |hash, share| Source { hash, packets: percent(share) };
    let heavy = [flow(7, 33), flow(7 | 1 << 31, 54)];
    let light = (1..=26).map(|number| flow(number << 24, 1));
    let sources: Vec<_> = heavy.into_iter().chain(light).collect();
    let (first, _) = bench.window(&sources);
    assert!(first[0] > first[1], "{first:?}");
    for _ in 0..200 {
        let (work, _) = bench.window(&sources);
        assert!(work.iter().all(|ns| *ns <= first[0]), "{work:?}, and {first:?} at first");
    }
}

/// Groups with a burst in this window do not leave, so that a heavy one must not count on their room.
#[test]
fn rps_b4_swap_counts_no_unconfirmed_groups() {
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

/// A heavy flow begins two windows after another one has ended, and goes to CPU 1, which the light ones leave to it.
fn assert_finds_room(bench: &mut Bench, light: &[Source], beginning: Source) {
    for _ in 0..2 {
        bench.window(light);
    }
    let sources = [light, &[beginning]].concat();
    for _ in 0..2 {
        bench.window(&sources);
    }
    let (work, _) = bench.window(&sources);
    assert_eq!(bench.cpu_of(beginning), CpuId(1));
    assert!(work.iter().all(|work_ns| *work_ns <= WINDOW_NS * 92 / 100), "{work:?}");
}

/// A heavy flow begins on the CPU that polls, two windows after another one has ended. Light groups that moved at once would
/// rest where it has room.
#[test]
fn rps_b2_pair_awaits_heavy_flow() {
    let mut bench = Bench::new(2, WINDOW_NS * 10 / 100);
    let light: Vec<_> =
        (0..20).map(|number| Source { hash: number << 27 | 1, packets: percent(2) }).collect();
    let heavy = |hash| Source { hash, packets: percent(90) };
    let [ending, beginning] = [heavy(1 << 31 | 1 << 20), heavy(1 << 20)];
    for _ in 0..200 {
        bench.window(&[&light[..], &[ending]].concat());
    }
    assert_eq!([bench.cpu_of(ending), bench.cpu_of(beginning)], [1, 0].map(CpuId));
    assert_finds_room(&mut bench, &light, beginning);
}

/// Bursts of heavy flows in every window hold back no other moves of two CPUs.
#[test]
fn rps_b1_pair_moves_between_bursts() {
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
    assert_finds_room(&mut bench, &light, beginning);
}
