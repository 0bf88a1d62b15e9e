//! The scenario in which everything is drawn.

use forebay_rx::steer::{BalanceConfig, BalancePolicy, MoveAfter, SpreadPolicy};
use forebay_sys::random::Random;

use crate::action::{Action, Recurring, SimCoalesceAt, Span};
use crate::costs::{Costs, SERVICE_NS};
use crate::cpu_set::CpuSet;
use crate::scenario::{Hashes, ReaderPlan, Scenario, ScenarioKnobs, TrafficPlan, before_wrap};
use crate::shift::Shift;

const US: u64 = 1_000;

/// Tenths of the runs that include each kind of change.
const ACTION_TENTHS: u64 = 7;

pub(crate) fn draw(cpus: Option<u16>, random: &mut Random) -> Scenario {
    let drawn_cpus = u16::try_from(random.between(2, 8)).unwrap_or(2);
    let cpus = cpus.unwrap_or(drawn_cpus);
    let queues = if random.below(3) == 0 { 2 } else { 1 };
    let traffic = traffic(cpus, random);
    let readers = (random.below(5) > 0).then(|| readers(random));
    let knobs = knobs(cpus, random);
    Scenario {
        cpus,
        queues,
        packets: 16_000,
        readers,
        costs: Costs { stall_one_in: pick(random, [0, 64, 256]), factor: 1 },
        recurring: recurring(&traffic, random),
        traffic,
        knobs,
    }
}

fn traffic(cpus: u16, random: &mut Random) -> TrafficPlan {
    let longest_run = pick(random, [1, 4, 16]);
    let load_percent = random.between(60, 90 * u64::from(cpus));
    let has_elephant = random.below(4) == 0;
    TrafficPlan {
        flows: pick(random, [1, 2, 7, 64, 64, 512]),
        run: Span(1, longest_run),
        load_percent,
        elephant_percent: if has_elephant { random.below(load_percent) } else { 0 },
        lifetime: (random.below(3) == 0).then_some(Span(10, 300)),
        hashes: pick(
            random,
            [
                Hashes::Apart,
                Hashes::SockSlotPairs,
                Hashes::FewFlowSlots,
                Hashes::SamePairs,
                Hashes::Computed,
                Hashes::Computed,
            ],
        ),
        zipf: None,
        without_hash_percent: pick(random, [0, 0, 2, 20]),
        shift: Shift::None,
        service_ns: SERVICE_NS,
        fragments: false,
    }
}

fn readers(random: &mut Random) -> ReaderPlan {
    let latest = pick(random, [2 * US, 20 * US, 100 * US]);
    let again_ns = Span(1, latest);
    let first_ns = Span(1, latest * random.between(1, 5));
    ReaderPlan { first_ns, again_ns, settled: random.below(2) == 0 }
}

fn knobs(cpus: u16, random: &mut Random) -> ScenarioKnobs {
    let move_after = [(0, 0), (8, 50 * US), (64, 1_000 * US), (64, 1_000 * US)];
    let (packets, time_ns) = pick(random, move_after);
    ScenarioKnobs {
        rps_cpus: CpuSet::range(0, cpus),
        rps_flow_cnt: pick(random, [2, 16, 256, 4096]),
        sock_flow_entries: pick(random, [0, 8, 256, 32_768, 32_768]),
        netdev_max_backlog: pick(random, [8, 40, 300, 1_000, 1_000, 1_000]),
        hold_max: pick(random, [1, 32, 256, 1_024, 4_096, 4_096]),
        batch_max: pick(random, [1, 8, 64, 64]),
        move_after: MoveAfter { packets, time_ns },
        spread: pick(random, [SpreadPolicy::Always, SpreadPolicy::WhenBusy]),
        start: match random.below(3) {
            0 => 0,
            1 => before_wrap(random),
            _ => u32::try_from(random.bits() >> 32).unwrap_or(0),
        },
        coalesce: pick(
            random,
            [SimCoalesceAt::Nowhere, SimCoalesceAt::Nowhere, SimCoalesceAt::Arrive],
        ),
        gro_flush_timeout_ns: 20 * US,
        balance: balance(random),
        indirection: false,
    }
}

fn balance(random: &mut Random) -> BalanceConfig {
    BalanceConfig {
        policy: pick(random, [BalancePolicy::Off, BalancePolicy::Load]),
        target_percent: pick(random, [101, 105, 150]),
        moves_per_second: pick(random, [10_000, 1_000_000]),
        window_us: pick(random, [100, 100, 1_000]),
    }
}

/// Draws the actions of this run, and their frequency.
fn recurring(traffic: &TrafficPlan, random: &mut Random) -> Vec<Recurring> {
    let short = Span(10 * US, 300 * US);
    let mut actions = vec![
        (Action::RpsCpus { least: 0 }, 200 * US),
        (Action::RpsFlowCnt(&[0, 2, 64, 4096, 4096]), 400 * US),
        (Action::SockFlowEntries(&[0, 8, 32_768, 32_768]), 400 * US),
        (Action::MaxBacklog(&[5, 50, 300, 1_000, 1_000]), 500 * US),
        (Action::Coalesce, 500 * US),
        (Action::FlowLimit, 1_000 * US),
        (Action::ReaderMoves, 40 * US),
        (Action::CpuOut { lasts_ns: short }, 400 * US),
        (Action::Kill { lasts_ns: short }, 500 * US),
        (Action::Pause { lasts_ns: short }, 300 * US),
        (Action::Slow { lasts_ns: short }, 500 * US),
        (Action::Burst { packets: Span(20, 400) }, 500 * US),
    ];
    if traffic.hashes == Hashes::Computed {
        actions.push((Action::HashKey, 400 * US));
    }
    actions.retain(|_| random.below(10) < ACTION_TENTHS);
    let hurry = pick(random, [1, 1, 4]);
    let recurring = actions.into_iter().map(|(action, mean_ns)| {
        let mean_ns = mean_ns / hurry;
        Recurring { action, every_ns: Span(mean_ns / 4, mean_ns * 2) }
    });
    recurring.collect()
}

fn pick<T: Copy, const N: usize>(random: &mut Random, from: [T; N]) -> T {
    let index = random.below(N as u64);
    from[usize::try_from(index).unwrap_or(0)]
}
