//! Preview: the loads of CPUs with and without balancing, for traffic that is known.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::rps::RpsMap;
use super::{Balance, BalanceBoard, BalanceConfig, BalancePolicy, CpuLoad, NS_PER_S, REST_NS};
use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Shift of a flow table with at least as many slots as there are groups.
const TABLE_SHIFT: u32 = 20;

/// Length of a round: shorter than the time after which the plan of a queue is dropped.
const ROUND_NS: u64 = 100_000_000;

/// Number of packets in a round, to which those of the traffic are scaled.
const ROUND_PACKETS: u64 = 1_000_000;

/// Rounds without a move after which nothing more will move: those in which groups rest, and two more.
const QUIET_ROUNDS: u64 = REST_NS / ROUND_NS + 2;

/// Maximum number of rounds.
const ROUNDS_MAX: u32 = 1_000;

/// Packets of one queue.
#[derive(Clone, Debug, Default)]
pub struct QueueTraffic {
    /// CPUs that the packets may go to.
    pub map: RpsMap,
    /// Hash of each packet.
    pub hashes: Vec<FlowHash>,
}

/// Loads of all CPUs before and after balancing, as if every packet took the same time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BalancePreview {
    /// Number of packets by [`CpuId::index`], by equal ranges.
    pub before: Vec<u64>,
    /// Number of packets by [`CpuId::index`], once no more groups move.
    pub after: Vec<u64>,
    /// Number of moves until then.
    pub moves: u32,
}

impl BalancePreview {
    /// Balances queues whose traffic stays the same, until nothing moves.
    #[must_use]
    pub fn of(queues: &[QueueTraffic], config: BalanceConfig) -> Self {
        let cpus = queues.iter().filter_map(|queue| queue.map.cpus().last());
        let cpus = cpus.max().map_or(0, |cpu| cpu.index() + 1);
        let board = Arc::new(BalanceBoard::new(queues.len(), cpus));
        let config =
            BalanceConfig { policy: BalancePolicy::Load, moves_per_second: u32::MAX, ..config };
        let off: Vec<_> = queues.iter().map(|_| Balance::default()).collect();
        let before = packets(queues, &off, cpus);
        let balances = queues.iter().zip(off).enumerate().map(|(number, (queue, mut balance))| {
            balance.set_config(config, TABLE_SHIFT, &queue.map);
            balance.set_board(Arc::clone(&board), number);
            balance
        });
        let mut balances: Vec<_> = balances.collect();
        let moves = balance_all(queues, &mut balances, &before);
        Self { after: packets(queues, &balances, cpus), before, moves }
    }

    /// Load of the busiest CPU in percent of the mean of all that are in a map, before and after.
    #[must_use]
    pub fn busiest_percent(&self, queues: &[QueueTraffic]) -> [u64; 2] {
        let count = mapped(queues, self.before.len());
        [&self.before, &self.after].map(|packets| {
            let sum = packets.iter().sum::<u64>().max(1);
            packets.iter().max().unwrap_or(&0) * 100 * count / sum
        })
    }
}

/// Number of CPUs that are in a map.
fn mapped(queues: &[QueueTraffic], cpus: usize) -> u64 {
    let cpus = (0..cpus).filter_map(|cpu| u16::try_from(cpu).ok()).map(CpuId);
    cpus.filter(|cpu| queues.iter().any(|queue| queue.map.contains(*cpu))).count() as u64
}

/// Lets all queues balance until nothing moves. Returns the number of moves.
fn balance_all(queues: &[QueueTraffic], balances: &mut [Balance], before: &[u64]) -> u32 {
    let all: u64 = before.iter().sum();
    let cost_ns = mapped(queues, before.len()) * (ROUND_NS / 4 * 3) / ROUND_PACKETS;
    let weights: Vec<_> = queues.iter().map(|queue| weights(queue, all)).collect();
    let (mut loads, mut packets_now) = (vec![CpuLoad::default(); before.len()], before.to_vec());
    let (mut now_ns, mut moves, mut quiet_rounds) = (NS_PER_S, 0, 0);
    for _ in 0..ROUNDS_MAX {
        for (load, packets) in loads.iter_mut().zip(&packets_now) {
            let packets = packets * ROUND_PACKETS / all.max(1);
            load.packets += packets;
            load.delivering_ns += packets * cost_ns;
            load.busy_ns += packets * cost_ns;
        }
        now_ns += ROUND_NS;
        let mut moves_now = 0;
        for ((queue, weights), balance) in queues.iter().zip(&weights).zip(&mut *balances) {
            if let Some(groups) = &mut balance.groups {
                weights.iter().for_each(|(hash, packets)| groups.weigh(*hash, *packets));
            }
            let round = balance.round(now_ns, &loads, &queue.map);
            moves_now += round.map_or(0, |round| round.moves);
        }
        moves += moves_now;
        quiet_rounds = if moves_now == 0 { quiet_rounds + 1 } else { 0 };
        if quiet_rounds == QUIET_ROUNDS {
            break;
        }
        packets_now = packets(queues, balances, before.len());
    }
    moves
}

/// Packets of each group in a round, by a hash of it. `all` is the number of packets of all queues.
fn weights(queue: &QueueTraffic, all: u64) -> Vec<(FlowHash, u32)> {
    let mut packets = BTreeMap::<u32, u64>::new();
    for hash in &queue.hashes {
        *packets.entry(hash.0 >> TABLE_SHIFT).or_default() += 1;
    }
    let scaled = |(group, packets)| {
        let packets = u32::try_from(packets * ROUND_PACKETS / all.max(1)).unwrap_or(u32::MAX);
        (FlowHash(group << TABLE_SHIFT), packets)
    };
    packets.into_iter().map(scaled).collect()
}

/// Number of packets of each CPU under the current assignment, by [`CpuId::index`].
fn packets(queues: &[QueueTraffic], balances: &[Balance], cpus: usize) -> Vec<u64> {
    let mut packets = vec![0; cpus];
    for (queue, balance) in queues.iter().zip(balances) {
        for hash in &queue.hashes {
            let cpu = balance.cpu_of(*hash).or_else(|| queue.map.select(*hash));
            cpu.into_iter().for_each(|cpu| packets[cpu.index()] += 1);
        }
    }
    packets
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn traffic(cpus: u16, weights: impl IntoIterator<Item = (u32, usize)>) -> QueueTraffic {
        let hashes = weights.into_iter().flat_map(|(hash, packets)| vec![FlowHash(hash); packets]);
        QueueTraffic { map: RpsMap::new((0..cpus).map(CpuId)), hashes: hashes.collect() }
    }

    #[test]
    fn rps_b6_preview_evens_two_queues() {
        // Heavy flows of both queues lie in the range of CPU 0.
        let flows = |at: u32| (0..40).map(move |flow| ((at + flow) << 20 | 1, 100));
        let queues = [traffic(2, flows(0)), traffic(2, flows(1_000))];
        let preview = BalancePreview::of(&queues, BalanceConfig::default());
        assert_eq!(preview.before, [8_000, 0]);
        assert_eq!(preview.busiest_percent(&queues)[0], 200);
        let [_, after] = preview.busiest_percent(&queues);
        assert!(after <= 106, "{after} %");
        assert!((30..=50).contains(&preview.moves), "{preview:?}");
    }

    #[test]
    fn rps_b6_elephant_is_left_alone() {
        let queues = [traffic(2, [(1, 5_000), (2 << 20, 100), (3 << 20, 100), (1 << 31, 1_000)])];
        let preview = BalancePreview::of(&queues, BalanceConfig::default());
        assert_eq!((preview.before, preview.after), (vec![5_200, 1_000], vec![5_000, 1_200]));
    }

    #[test]
    fn rps_b6_nothing_is_without_effect() {
        assert_eq!(BalancePreview::of(&[], BalanceConfig::default()), BalancePreview::default());
        let preview = BalancePreview::of(&[traffic(3, [])], BalanceConfig::default());
        assert_eq!((preview.after, preview.moves), (vec![0; 3], 0));
    }

    proptest! {
        /// With a power of two of CPUs, no group is in the ranges of two of them.
        #[test]
        fn rps_b6_preview_never_makes_worse(
            queues in prop::collection::vec(
                (prop::sample::select(vec![1u16, 2, 4, 8]), prop::collection::vec((any::<u32>(), 1usize..500), 0..60)), 1..4),
        ) {
            let queues: Vec<_> =
                queues.into_iter().map(|(cpus, weights)| traffic(cpus, weights)).collect();
            let preview = BalancePreview::of(&queues, BalanceConfig::default());
            let sum = |packets: &[u64]| packets.iter().sum::<u64>();
            prop_assert_eq!(sum(&preview.before), sum(&preview.after));
            let [before, after] = preview.busiest_percent(&queues);
            prop_assert!(after <= before, "{} % and then {} %", before, after);
        }
    }
}
