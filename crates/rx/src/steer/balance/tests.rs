use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::arrive::PollStatus::{Drained, Last, MorePending};

mod changes; // groups whose rate changes, and room for heavy ones
mod pair; //    two CPUs, where heavy groups change places with others

const SHIFT: u32 = 20;
const WINDOW_NS: u64 = 10_000_000;
const COST_NS: u64 = 500;

/// Flow with a constant rate.
#[derive(Clone, Copy, Debug)]
struct Source {
    hash: u32,
    /// Packets in a window.
    packets: u32,
}

/// CPUs of unlimited capacity, and queues polled by CPU 0.
struct Bench {
    /// By queue.
    balances: Vec<Balance>,
    map: RpsMap,
    loads: Vec<CpuLoad>,
    now_ns: u64,
    window_ns: u64,
    /// Factor of all rates and of polling.
    load: u64,
    /// In each window, for all queues together.
    polling_ns: u64,
    /// Work of CPU 0 in each window for packets that came in earlier ones.
    backlog_ns: u64,
}

impl Bench {
    fn new(cpus: u16, polling_ns: u64) -> Self {
        Self::of_queues(1, cpus, polling_ns)
    }

    fn of_queues(queues: usize, cpus: u16, polling_ns: u64) -> Self {
        let map = RpsMap::new((0..cpus).map(CpuId));
        let board = Arc::new(BalanceBoard::new(queues, cpus.into()));
        let balances = (0..queues).map(|queue| {
            let mut balance = Balance::default();
            let config = BalanceConfig { policy: BalancePolicy::Load, ..BalanceConfig::default() };
            balance.set_config(config, SHIFT, &map);
            balance.set_board(Arc::clone(&board), queue);
            balance
        });
        let balances = balances.collect();
        let loads = vec![CpuLoad::default(); cpus.into()];
        Self {
            balances,
            map,
            loads,
            now_ns: 5,
            window_ns: WINDOW_NS,
            load: 1,
            polling_ns,
            backlog_ns: 0,
        }
    }

    fn cpu_of(&self, source: Source) -> CpuId {
        self.cpu_in(0, source)
    }

    /// CPU of a flow of this queue.
    fn cpu_in(&self, queue: usize, source: Source) -> CpuId {
        let hash = FlowHash(source.hash);
        self.balances[queue].cpu_of(hash).or_else(|| self.map.select(hash)).unwrap()
    }

    /// Loads of a window under the current assignment, and the round after it.
    fn window(&mut self, sources: &[Source]) -> (Vec<u64>, Option<BalanceRound>) {
        let (work, mut rounds) = self.window_of(&[sources]);
        (work, rounds.remove(0))
    }

    /// Loads of a window with sources by queue, and the round of each queue after it.
    fn window_of(&mut self, queues: &[&[Source]]) -> (Vec<u64>, Vec<Option<BalanceRound>>) {
        let mut work = vec![0; self.loads.len()];
        for (queue, sources) in queues.iter().enumerate() {
            for &source in *sources {
                let cpu = self.cpu_in(queue, source).index();
                let hash = FlowHash(source.hash);
                let groups = self.balances[queue].groups.as_mut().unwrap();
                let packets = u64::from(source.packets) * self.load;
                groups.weigh(hash, u32::try_from(packets).unwrap());
                self.loads[cpu].packets += packets;
                work[cpu] += packets * COST_NS;
            }
        }
        for (load, work_ns) in self.loads.iter_mut().zip(&work) {
            load.delivering_ns += work_ns;
            load.busy_ns += work_ns;
        }
        work[0] += self.backlog_ns;
        self.loads[0].packets += self.backlog_ns / COST_NS;
        self.loads[0].delivering_ns += self.backlog_ns;
        self.loads[0].busy_ns += self.backlog_ns;
        let polling_ns = self.polling_ns * self.load;
        self.loads[0].busy_ns += polling_ns;
        work[0] += polling_ns;
        self.now_ns += self.window_ns;
        let rounds = self.balances.iter_mut().map(|balance| {
            assert!(balance.is_due(self.now_ns));
            balance.round(self.now_ns, &self.loads, &self.map)
        });
        let rounds = rounds.collect();
        (work, rounds)
    }
}

fn imbalance_percent(work: &[u64]) -> u64 {
    let sum: u64 = work.iter().sum();
    work.iter().max().unwrap() * 100 * work.len() as u64 / sum.max(1)
}

/// Packets that take a CPU this part of its time.
fn percent(share: u64) -> u32 {
    u32::try_from(WINDOW_NS * share / 100 / COST_NS).unwrap()
}

fn spread_hash(index: u32) -> u32 {
    index.wrapping_mul(0x9e37_79b9).max(1)
}

/// Sources with rates `largest / n` for rank n.
fn zipf(flows: u32, largest: u32) -> Vec<Source> {
    (1..=flows)
        .map(|rank| Source { hash: spread_hash(rank), packets: (largest / rank).max(1) })
        .collect()
}

#[test]
fn rps_b1_skewed_flows_are_evened_out() {
    for (cpus, flows, largest) in [(2, 64, 8_000), (8, 4_096, 8_000), (64, 65_536, 12_000)] {
        let mut bench = Bench::new(cpus, 1_000_000);
        let sources = zipf(flows, largest);
        let (before, _) = bench.window(&sources);
        for _ in 0..100 {
            bench.window(&sources);
        }
        let (after, _) = bench.window(&sources);
        let mean = after.iter().sum::<u64>() / u64::from(cpus);
        let largest_ns = u64::from(largest) * COST_NS;
        let possible = (largest_ns * 100 / mean).max(100);
        let is = imbalance_percent(&after);
        assert!(is <= possible * 110 / 100, "{cpus} CPUs: {is} %, {possible} % is possible");
        let was = imbalance_percent(&before);
        assert!(was <= 110 || is < was, "{cpus} CPUs: {is} %, no better than {was} % of ranges");
    }
}

/// A CPU without time left polls little, and its polls leave frames behind: its ranges seem no heavier than others.
#[test]
fn rps_b1_ranges_leave_starved_cpu() {
    let hashes = (0..400).map(|at| at * (u32::MAX / 400) + 1);
    let packets = u32::try_from(WINDOW_NS * 6 / 10 / COST_NS / 100).unwrap();
    let sources: Vec<_> = hashes.map(|hash| Source { hash, packets }).collect();
    let on_first =
        |bench: &Bench| sources.iter().filter(|it| bench.cpu_of(**it) == CpuId(0)).count();
    let windows = |bench: &mut Bench, count, status| {
        for _ in 0..count {
            bench.balances[0].note_poll(CpuId(0), status);
            bench.window(&sources);
        }
    };
    let mut bench = Bench::new(4, 0);
    let by_map = on_first(&bench);
    bench.backlog_ns = WINDOW_NS * 4 / 10;
    windows(&mut bench, 20, Drained);
    assert_eq!(on_first(&bench), by_map, "polls keep up");
    windows(&mut bench, 1, MorePending);
    bench.balances[0].note_poll(CpuId(0), Drained);
    windows(&mut bench, 1, MorePending);
    assert_eq!(on_first(&bench), by_map, "a poll in the last window emptied the queue");
    // Two windows to be sure, and one to ask again.
    windows(&mut bench, 2, MorePending);
    windows(&mut bench, 1, Last); // no memory was free
    let starved = on_first(&bench);
    assert!(starved < 60, "{starved} ranges are left");
    // Once polls keep up, the CPU gets ranges again, except those that rest.
    bench.backlog_ns = 0;
    windows(&mut bench, 200, Drained);
    let (work, _) = bench.window(&sources);
    assert!(on_first(&bench) > starved && imbalance_percent(&work) <= 106, "{work:?}");
}

/// Flows that are spread evenly over all hashes, and fill four CPUs.
fn even_load_of_four() -> Vec<Source> {
    let packets = u32::try_from(WINDOW_NS / COST_NS / 100).unwrap();
    (0..400).map(|at| Source { hash: at * (u32::MAX / 400) + 1, packets }).collect()
}

/// A CPU that is held up in the first window takes long for few packets. That alone moves none of its ranges.
#[test]
fn rps_b1_first_cost_may_be_chance() {
    let sources = even_load_of_four();
    let mut bench = Bench::new(8, 0);
    bench.window(&sources);
    let held_up = bench.loads[0].packets * 9 / 10;
    bench.loads[4].packets -= held_up;
    let (work, round) = bench.window(&sources);
    assert!(round.is_some_and(|round| round.before_percent <= 106), "{work:?}, {round:?}");
    bench.loads[4].packets += held_up;
    for _ in 0..50 {
        let (work, round) = bench.window(&sources);
        assert!(round.is_none_or(|round| round.moves == 0), "{work:?}, {round:?}");
    }
}

/// Polls that leave frames behind say nothing about the shares if no CPU has time left.
#[test]
fn rps_b1_overload_of_all_moves_nothing() {
    let sources = even_load_of_four();
    let mut bench = Bench::new(4, 0);
    for _ in 0..50 {
        bench.balances[0].note_poll(CpuId(0), MorePending);
        let (_, round) = bench.window(&sources);
        assert!(round.is_none_or(|round| round.moves == 0), "{round:?}");
    }
}

#[test]
fn rps_b2_elephant_is_left_alone() {
    let mut bench = Bench::new(4, 0);
    let elephant = Source { hash: 7, packets: 30_000 };
    let mut sources = zipf(400, 900);
    sources.push(elephant);
    for _ in 0..300 {
        bench.window(&sources);
    }
    let its = bench.cpu_of(elephant);
    let beside: u32 = sources
        .iter()
        .filter(|source| bench.cpu_of(**source) == its && source.hash >> SHIFT != 0)
        .map(|source| source.packets)
        .sum();
    assert_eq!(beside, 0, "packets in a window beside the elephant");
    let (work, _) = bench.window(&sources);
    let others: Vec<_> = (0..4).filter(|cpu| *cpu != its.index()).map(|cpu| work[cpu]).collect();
    assert!(imbalance_percent(&others) <= 110, "{others:?}");
}

#[test]
fn rps_b3_idle_cpus_are_not_balanced() {
    let mut bench = Bench::new(4, 0);
    let sources = [Source { hash: 1, packets: 2_000 }, Source { hash: 1 << 21, packets: 2_000 }];
    for _ in 0..50 {
        let (work, round) = bench.window(&sources);
        assert!(imbalance_percent(&work) == 400 && round.is_none_or(|round| round.moves == 0));
    }
}

#[test]
fn rps_b4_moves_are_limited_by_rate() {
    let mut bench = Bench::new(8, 0);
    bench.balances[0].config.moves_per_second = 100;
    let sources: Vec<_> =
        (0..4_000).map(|index| Source { hash: index << 16 | 1, packets: 100 }).collect();
    let moves = (0..50).map(|_| bench.window(&sources).1.map_or(0, |round| round.moves));
    let total: u32 = moves.sum();
    assert!((40..=58).contains(&total), "{total} in half a second");
}

#[test]
fn rps_b4_rate_of_zero_moves_nothing() {
    let mut bench = Bench::new(8, 0);
    bench.balances[0].config.moves_per_second = 0;
    let sources = zipf(500, 9_000);
    let moves: u32 = (0..50).map(|_| bench.window(&sources).1.map_or(0, |round| round.moves)).sum();
    assert_eq!(moves, 0);
}

/// A queue that returns from a pause knows nothing of the load, and needs two windows to move again.
#[test]
fn rps_b1_pause_begins_anew() {
    let mut bench = Bench::new(4, 0);
    let sources = zipf(500, 9_000);
    let moved = |bench: &mut Bench| bench.window(&sources).1.map(|round| round.moves);
    assert_eq!((moved(&mut bench), moved(&mut bench)), (None, Some(0)));
    bench.now_ns += 3_600 * NS_PER_S;
    assert_eq!((moved(&mut bench), moved(&mut bench)), (None, Some(0)));
    assert!(moved(&mut bench) > Some(0));
}

/// A queue with a window of a second plans by what another has planned a second ago.
#[test]
fn rps_b1_long_windows_share_the_board() {
    let window_us = 1_000_000;
    let map = RpsMap::new([0, 1].map(CpuId));
    let board = Arc::new(BalanceBoard::new(2, 2));
    let mut queues = [0, 1].map(|queue| {
        let mut balance = Balance::default();
        let config = BalanceConfig { policy: BalancePolicy::Load, window_us, ..Default::default() };
        balance.set_config(config, SHIFT, &map);
        balance.set_board(Arc::clone(&board), queue);
        balance
    });
    // Each queue has one CPU's packets, so nothing is uneven to whoever knows of both.
    let hashes = [FlowHash(1 << 20), FlowHash(1 << 31)];
    let mut loads = vec![CpuLoad::default(); 2];
    for second in 1..10 {
        for load in &mut loads {
            load.packets += 100_000;
            load.delivering_ns += 100_000 * COST_NS * 10;
            load.busy_ns = load.delivering_ns;
        }
        for (balance, hash) in queues.iter_mut().zip(hashes) {
            (0..100_000).for_each(|_| balance.weigh(hash));
            let round = balance.round(second * NS_PER_S + 5, &loads, &map);
            let is_known = second > 2;
            let expected = BalanceRound { moves: 0, before_percent: 100, after_percent: 100 };
            assert!(!is_known || round == Some(expected), "{round:?}");
        }
    }
}

/// A queue that finds the board claimed reads the loads of all CPUs again only after a while.
#[test]
fn rps_b1_claimed_board_is_tried_later() {
    let mut bench = Bench::new(4, 0);
    let board = Arc::new(BalanceBoard::new(2, 4));
    bench.balances[0].set_board(Arc::clone(&board), 0);
    bench.window(&zipf(10, 100));
    let now_ns = bench.now_ns + WINDOW_NS;
    let claim = board.claim().unwrap();
    assert_eq!(bench.balances[0].round(now_ns, &bench.loads, &bench.map), None);
    drop(claim);
    assert!(!bench.balances[0].is_due(now_ns) && bench.balances[0].is_due(now_ns + RETRY_NS));
    assert!(bench.balances[0].round(now_ns + RETRY_NS, &bench.loads, &bench.map).is_some());
}

#[test]
fn rps_b5_groups_leave_withdrawn_cpus() {
    let mut bench = Bench::new(4, 0);
    let sources = zipf(500, 9_000);
    for _ in 0..50 {
        bench.window(&sources);
    }
    assert!(sources.iter().any(|source| bench.balances[0].cpu_of(FlowHash(source.hash)).is_some()));
    bench.map = RpsMap::new([0, 2].map(CpuId));
    bench.balances[0].set_map(&bench.map);
    for _ in 0..50 {
        assert!(sources.iter().all(|source| bench.map.contains(bench.cpu_of(*source))));
        bench.window(&sources);
    }
    bench.balances[0].set_config(BalanceConfig::default(), SHIFT, &bench.map);
    assert!(sources.iter().all(|source| bench.balances[0].cpu_of(FlowHash(source.hash)).is_none()));
    assert!(!bench.balances[0].is_due(u64::MAX));
}

fn sources() -> impl Strategy<Value = Vec<Source>> {
    let source = |logs: std::ops::Range<u32>| {
        (1_u32.., logs).prop_map(|(hash, log)| Source { hash, packets: 1 << log })
    };
    // Many flows, or few heavy ones.
    prop_oneof![vec(source(0..14), 1..200), vec(source(10..15), 1..4)]
}

/// Each of two elephants is better off beside the other than alone with all polling, but not both.
#[test]
fn rps_b2_two_elephants_do_not_chase() {
    let mut bench = Bench::of_queues(2, 2, WINDOW_NS / 5);
    let elephant = |hash, share| [Source { hash, packets: percent(share) }];
    let (small, large) = (elephant(1, 50), elephant(1 << 31 | 1, 60));
    let mut moves = 0;
    for _ in 0..500 {
        let (work, rounds) = bench.window_of(&[&small, &large]);
        assert!(work.iter().all(|work_ns| *work_ns <= WINDOW_NS), "{work:?}");
        moves += rounds.iter().flatten().map(|round| round.moves).sum::<u32>();
    }
    assert_eq!(moves, 0);
}

/// Flows on both sides of a boundary of the map that is inside their group go where the group counts.
#[test]
fn rps_b1_group_across_a_border_is_one() {
    let border = u32::try_from((1_u64 << 32) / 3).unwrap();
    let sides = [border - 1, border + 1].map(|hash| Source { hash, packets: 10_000 });
    assert_eq!(sides[0].hash >> SHIFT, sides[1].hash >> SHIFT);
    let mut bench = Bench::new(3, 0);
    assert_ne!(bench.map.select(FlowHash(border - 1)), bench.map.select(FlowHash(border + 1)));
    let together = |bench: &Bench| {
        let [one, other] = sides.map(|side| bench.cpu_of(side));
        assert_eq!(one, other);
        one
    };
    let home = together(&bench);
    for _ in 0..50 {
        bench.window(&sides);
        together(&bench);
    }
    let group = usize::try_from(border >> SHIFT).unwrap();
    let groups = bench.balances[0].groups.as_mut().unwrap();
    let other = CpuId((home.0 + 1) % 3);
    for cpu in [other, home] {
        groups.begin_round();
        groups.assign(group, cpu, COST_NS, 1);
        let [one, other] = sides.map(|side| groups.cpu_of(FlowHash(side.hash)));
        assert_eq!((one, other), (Some(cpu), Some(cpu)));
    }
    // The boundaries of another map are elsewhere, and the group is at its home by that map.
    groups.set_map(&RpsMap::new([0, 1].map(CpuId)), 0);
    assert_eq!(groups.cpu_of(FlowHash(border)), None);
}

/// Not even a part of a millisecond less.
#[test]
fn rps_b4_group_rests_for_a_second() {
    let mut groups = Groups::new(SHIFT, &RpsMap::new([0, 1].map(CpuId)));
    for moved_ns in [5, 999_999, 1_000_000, 1_000_001, 1_999_999] {
        groups.begin_round();
        let to = CpuId(1 - groups.each().next().unwrap().0);
        groups.assign(0, to, COST_NS, moved_ns);
        groups.weigh(FlowHash(1), 1_000);
        groups.end_window(WINDOW_NS);
        let rests = |now_ns| groups.heaviest_of(to, now_ns).is_none();
        assert!(rests(moved_ns) && rests(moved_ns + REST_NS - 1), "{moved_ns}");
        assert!(!rests(moved_ns + REST_NS + 1_000_000), "{moved_ns}");
    }
}

/// However long the windows are, no more moves than the rate allows.
#[test]
fn rps_b4_long_windows_keep_the_rate() {
    let sources: Vec<_> =
        (0..4_000).map(|index| Source { hash: index << 16 | 1, packets: 10_000 }).collect();
    for window_ns in [500_000_000, NS_PER_S, 4 * NS_PER_S, 10 * NS_PER_S] {
        let mut bench = Bench::new(8, 0);
        bench.window_ns = window_ns;
        let config = &mut bench.balances[0].config;
        config.window_us = u32::try_from(window_ns / 1_000).unwrap();
        config.moves_per_second = 5;
        let mut moves = 0;
        for _ in 0..20 {
            let moved = bench.window(&sources).1.map_or(0, |round| round.moves);
            assert!(moved <= 5, "{moved} after {window_ns} ns");
            moves += moved;
        }
        assert!(moves > 0);
    }
}

proptest! {
    /// For any traffic, groups rest after a move, and no round expects to make the imbalance worse.
    #[test]
    fn rps_b4_groups_rest_and_rounds_help(
        cpus in 1_u16..9,
        phases in vec((vec(sources(), 3), 1_usize..20), 1..6),
        queues in 1_usize..4,
        polling_ns in 0..WINDOW_NS,
        window_ns in WINDOW_NS..19 * WINDOW_NS,
    ) {
        let mut bench = Bench::of_queues(queues, cpus, polling_ns);
        (bench.window_ns, bench.load) = (window_ns, window_ns / WINDOW_NS);
        let mut moved_at: BTreeMap<(usize, u32), (CpuId, u64)> = BTreeMap::new();
        for (sources, windows) in phases {
            let sources: Vec<_> = sources.iter().take(queues).map(Vec::as_slice).collect();
            for _ in 0..windows {
                let (_, rounds) = bench.window_of(&sources);
                for round in rounds.into_iter().flatten() {
                    prop_assert!(round.after_percent <= round.before_percent, "{:?}", round);
                }
                for (queue, group) in (0..queues).flat_map(|queue| (0..4096).map(move |it| (queue, it))) {
                    let middle = Source { hash: group << SHIFT | 1 << 19, packets: 0 };
                    let (at, now_ns) = (bench.cpu_in(queue, middle), bench.now_ns);
                    let (was_at, since_ns) = moved_at.entry((queue, group)).or_insert((at, 0));
                    if *was_at != at {
                        let rested = *since_ns == 0 || now_ns - *since_ns >= REST_NS;
                        prop_assert!(rested, "group {} moved twice", group);
                        (*was_at, *since_ns) = (at, now_ns);
                    }
                }
            }
        }
    }

    /// However traffic began, once it stays the same no group is left that would even out the loads.
    #[test]
    fn rps_b1_steady_traffic_is_evened_out(
        cpus in 2_u16..9,
        before in (sources(), 0_usize..40),
        sources in prop_oneof![sources(), vec((1_u32.., 2_000_u32..6_000).prop_map(|(hash, packets)| Source { hash, packets }), 4..20)],
        fixed_ns in prop_oneof![Just(vec![0; 8]), vec(0..WINDOW_NS / 2, 8)],
    ) {
        let mut bench = Bench::new(cpus, 0);
        // Few windows, each of a tenth of a second: a group may move once in a second.
        (bench.window_ns, bench.load) = (10 * WINDOW_NS, 10);
        (0..before.1).for_each(|_| { bench.window(&before.0); });
        let mut window = || {
            let fixed = fixed_ns.iter().map(|fixed_ns| fixed_ns * bench.load);
            bench.loads.iter_mut().zip(fixed).for_each(|(load, ns)| load.busy_ns += ns);
            bench.window(&sources).0
        };
        (0..40).for_each(|_| { window(); });
        let work: Vec<_> =
            window().iter().zip(&fixed_ns).map(|(work_ns, ns)| work_ns / 10 + ns).collect();
        let busiest = (0..work.len()).max_by_key(|cpu| work[*cpu]).unwrap();
        let limit_ns = BALANCE_LOAD_MIN_NS / (NS_PER_S / WINDOW_NS);
        if imbalance_percent(&work) <= 107 || work[busiest] <= limit_ns {
            return Ok(());
        }
        let mut groups: BTreeMap<u32, u64> = BTreeMap::new();
        for source in sources.iter().filter(|source| bench.cpu_of(**source).index() == busiest) {
            *groups.entry(source.hash >> SHIFT).or_default() += u64::from(source.packets) * COST_NS;
        }
        for (group, work_ns) in groups {
            for (cpu, other_ns) in work.iter().enumerate() {
                let is_better = work_ns <= work[busiest].saturating_sub(*other_ns) * 3 / 4;
                let has_room = fixed_ns[cpu] <= fixed_ns[busiest]
                    || fixed_ns[cpu] + 2 * work_ns <= work[busiest];
                prop_assert!(
                    work_ns == 0 || !is_better || !has_room,
                    "group {} of {} ns stays on CPU {} of {:?}", group, work_ns, busiest, work
                );
            }
        }
    }
}
