//! Scenarios whose load is followed: balanced, or given as many CPUs as it needs.

use forebay_rx::steer::{BalanceConfig, BalancePolicy, SpreadPolicy};

use super::{Scenario, Situation, US, base};
use crate::action::{Action, Recurring, Span};
use crate::shift::Shift;

/// Factor of the costs where the load shifts: a CPU handles 25,000 packets a second.
const SHIFTING_FACTOR: u64 = 40;

/// Factor of the costs where flows are shuffled: a CPU handles 250 packets a second. Groups rest for a second, and rounds
/// come every 10 ms, so that faster CPUs would have more packets for a move.
const SHUFFLED_FACTOR: u64 = 4_000;

/// Moves a second for each CPU in a run of 80 ms.
const MOVES_A_CPU: u32 = 1_250;

/// Limit of backlogs where the load shifts: four bursts. The usual 1,000 packets would take as long as 40,000, and queued
/// work of two thirds of a second would outlast a phase.
const SHIFTING_BACKLOG: u32 = 256;

/// Heavy and light flows on CPUs that are busy nine tenths of the time, one queue for every eight
/// of them: flows move away from CPUs that have packets of theirs.
pub(super) fn skewed(cpus: u16) -> Scenario {
    let mut scenario = base(cpus);
    scenario.queues = cpus.div_ceil(8);
    scenario.packets = 60_000 * u64::from(cpus);
    scenario.traffic.flows = 1_024 * u32::from(cpus);
    scenario.traffic.zipf = Some(cpus.into());
    scenario.traffic.load_percent = 82 * u64::from(cpus);
    scenario.knobs.rps_flow_cnt = 4_096;
    scenario.knobs.sock_flow_entries = 0;
    scenario.knobs.balance = BalanceConfig {
        policy: BalancePolicy::Load,
        // A run of 80 ms shows the moves that take half a second otherwise, for every CPU as many.
        moves_per_second: MOVES_A_CPU.saturating_mul(cpus.into()).max(20_000),
        window_us: 5_000,
        ..BalanceConfig::default()
    };
    let bursts = Action::Burst { packets: Span(50, 300) };
    scenario.recurring = vec![Recurring { action: bursts, every_ns: Span(200 * US, 1_000 * US) }];
    scenario
}

/// Flows that change their weights all the time, on slow CPUs: groups move all the time, and their flows have packets on the
/// way.
pub(super) fn shuffled(cpus: u16) -> Scenario {
    let mut scenario = skewed(cpus);
    scenario.costs.factor = SHUFFLED_FACTOR;
    scenario.packets = 5_000 * u64::from(cpus);
    scenario.knobs.netdev_max_backlog = SHIFTING_BACKLOG;
    scenario.knobs.balance =
        BalanceConfig { policy: BalancePolicy::Load, ..BalanceConfig::default() };
    scenario.recurring.clear();
    let traffic = &mut scenario.traffic;
    traffic.run = Span(1, 4);
    traffic.flows = (32 * u32::from(cpus)).next_power_of_two();
    traffic.load_percent = 75 * u64::from(cpus);
    traffic.service_ns *= SHUFFLED_FACTOR;
    traffic.shift = Shift::Shuffled { packets: 100 * u64::from(cpus) };
    scenario
}

impl Situation {
    /// Creates a load that shifts in a run of four seconds, on slow CPUs that are busy three quarters
    /// of the time.
    pub(super) fn shifting(self, cpus: u16) -> Scenario {
        let mut scenario = skewed(cpus);
        if cpus > 8 {
            // With a queue for every eight CPUs polling alone has more than the mean.
            scenario.queues = cpus.div_ceil(4);
        }
        scenario.costs.factor = SHIFTING_FACTOR;
        scenario.knobs.netdev_max_backlog = SHIFTING_BACKLOG;
        scenario.packets = 75_000 * u64::from(cpus);
        scenario.recurring = Vec::new();
        scenario.knobs.balance =
            BalanceConfig { policy: BalancePolicy::Load, ..BalanceConfig::default() };
        let traffic = &mut scenario.traffic;
        traffic.run = Span(1, 4);
        traffic.load_percent = 68 * u64::from(cpus);
        traffic.service_ns *= SHIFTING_FACTOR;
        (traffic.shift, traffic.elephant_percent) = match self {
            Self::HeavyFlow => (Shift::HeavyFlow, 95),
            Self::Diurnal => (Shift::Diurnal, 0),
            Self::Waves => (Shift::Waves, 0),
            _ => (Shift::Aimed { cpus }, 100),
        };
        if self == Self::Waves {
            scenario.packets = 8_000 * u64::from(cpus);
            scenario.costs.stall_one_in = 0;
            scenario.traffic.flows = 64 * u32::from(cpus);
            scenario.traffic.load_percent = 60 * u64::from(cpus);
            scenario.knobs.spread = SpreadPolicy::WhenBusy;
            scenario.knobs.balance.policy = BalancePolicy::Off;
        }
        scenario
    }

    /// True if the load is followed, so that the run shows how even it is.
    #[must_use]
    pub fn follows_load(self) -> bool {
        matches!(
            self,
            Self::Skewed
                | Self::HeavyFlow
                | Self::Diurnal
                | Self::Aimed
                | Self::Waves
                | Self::Shuffled
        )
    }
}
