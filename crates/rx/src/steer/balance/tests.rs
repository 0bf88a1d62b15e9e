use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

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

/// CPUs of unlimited capacity, and one queue polled by CPU 0.
struct Bench {
    balance: Balance,
    map: RpsMap,
    loads: Vec<CpuLoad>,
    now_ns: u64,
    polling_ns: u64,
}

impl Bench {
    fn new(cpus: u16, polling_ns: u64) -> Self {
        let map = RpsMap::new((0..cpus).map(CpuId));
        let mut balance = Balance::default();
        let config = BalanceConfig { policy: BalancePolicy::Load, ..BalanceConfig::default() };
        balance.set_config(config, SHIFT, &map);
        let loads = vec![CpuLoad::default(); cpus.into()];
        Self { balance, map, loads, now_ns: 5, polling_ns }
    }

    fn cpu_of(&self, source: Source) -> CpuId {
        let hash = FlowHash(source.hash);
        self.balance.cpu_of(hash).or_else(|| self.map.select(hash)).unwrap()
    }

    /// Loads of a window under the current assignment, and the round after it.
    fn window(&mut self, sources: &[Source]) -> (Vec<u64>, Option<BalanceRound>) {
        let mut work = vec![0; self.loads.len()];
        for &source in sources {
            let cpu = self.cpu_of(source).index();
            (0..source.packets).for_each(|_| self.balance.weigh(FlowHash(source.hash)));
            self.loads[cpu].packets += u64::from(source.packets);
            work[cpu] += u64::from(source.packets) * COST_NS;
        }
        for (load, work_ns) in self.loads.iter_mut().zip(&work) {
            load.delivering_ns += work_ns;
            load.busy_ns += work_ns;
        }
        self.loads[0].busy_ns += self.polling_ns;
        work[0] += self.polling_ns;
        self.now_ns += WINDOW_NS;
        assert!(self.balance.is_due(self.now_ns));
        (work, self.balance.round(self.now_ns, &self.loads, &self.map))
    }
}

fn imbalance_percent(work: &[u64]) -> u64 {
    let sum: u64 = work.iter().sum();
    work.iter().max().unwrap() * 100 * work.len() as u64 / sum.max(1)
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
    bench.balance.config.moves_per_second = 100;
    let sources: Vec<_> =
        (0..4_000).map(|index| Source { hash: index << 16 | 1, packets: 100 }).collect();
    let moves = (0..50).map(|_| bench.window(&sources).1.map_or(0, |round| round.moves));
    let total: u32 = moves.sum();
    assert!((40..=58).contains(&total), "{total} in half a second");
}

#[test]
fn rps_b4_rate_of_zero_moves_nothing() {
    let mut bench = Bench::new(8, 0);
    bench.balance.config.moves_per_second = 0;
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
    bench.balance.set_board(Arc::clone(&board), 0);
    bench.window(&zipf(10, 100));
    let now_ns = bench.now_ns + WINDOW_NS;
    let claim = board.claim().unwrap();
    assert_eq!(bench.balance.round(now_ns, &bench.loads, &bench.map), None);
    drop(claim);
    assert!(!bench.balance.is_due(now_ns) && bench.balance.is_due(now_ns + RETRY_NS));
    assert!(bench.balance.round(now_ns + RETRY_NS, &bench.loads, &bench.map).is_some());
}

#[test]
fn rps_b5_groups_leave_withdrawn_cpus() {
    let mut bench = Bench::new(4, 0);
    let sources = zipf(500, 9_000);
    for _ in 0..50 {
        bench.window(&sources);
    }
    assert!(sources.iter().any(|source| bench.balance.cpu_of(FlowHash(source.hash)).is_some()));
    bench.map = RpsMap::new([0, 2].map(CpuId));
    bench.balance.set_map(&bench.map);
    for _ in 0..50 {
        assert!(sources.iter().all(|source| bench.map.contains(bench.cpu_of(*source))));
        bench.window(&sources);
    }
    bench.balance.set_config(BalanceConfig::default(), SHIFT, &bench.map);
    assert!(sources.iter().all(|source| bench.balance.cpu_of(FlowHash(source.hash)).is_none()));
    assert!(!bench.balance.is_due(u64::MAX));
}

fn sources() -> impl Strategy<Value = Vec<Source>> {
    let source = (1_u32.., 0_u32..14).prop_map(|(hash, log)| Source { hash, packets: 1 << log });
    vec(source, 1..200)
}

proptest! {
    /// For any traffic, groups rest after a move, and no round expects to make the imbalance worse.
    #[test]
    fn rps_b4_groups_rest_and_rounds_help(
        cpus in 1_u16..9,
        phases in vec((sources(), 1_usize..20), 1..6),
        polling_ns in 0..WINDOW_NS,
    ) {
        let mut bench = Bench::new(cpus, polling_ns);
        let mut moved_at: BTreeMap<u32, (CpuId, u64)> = BTreeMap::new();
        for (sources, windows) in phases {
            for _ in 0..windows {
                let (_, round) = bench.window(&sources);
                if let Some(round) = round {
                    prop_assert!(round.after_percent <= round.before_percent, "{:?}", round);
                }
                for group in 0..4096_u32 {
                    let at = bench.cpu_of(Source { hash: group << SHIFT | 1 << 19, packets: 0 });
                    let now_ns = bench.now_ns;
                    let (was_at, since_ns) = moved_at.entry(group).or_insert((at, 0));
                    if *was_at != at {
                        let rested = *since_ns == 0 || now_ns - *since_ns >= REST_NS - 1_000_000;
                        prop_assert!(rested, "group {} moved twice", group);
                        (*was_at, *since_ns) = (at, now_ns);
                    }
                }
            }
        }
    }
}
