//! Scenarios: events that may happen in a run, each described by a small value.

mod loads; // scenarios whose load is followed

use std::fmt;
use std::str::FromStr;

use forebay_rx::steer::{BalanceConfig, HOLD_MAX, HOLD_SHARE_LEAST, MoveAfter, SpreadPolicy};
use forebay_sys::random::Random;

use crate::action::{Action, Recurring, SimCoalesceAt, Span};
use crate::costs::{Costs, SERVICE_NS};
use crate::cpu_set::{CPUS_MAX, CpuSet};
use crate::everything;
use crate::shift::Shift;

/// Scenarios by name. The first seven are the situations in which REQUIREMENTS section 2 examines
/// the kernel's rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Situation {
    /// Nothing changes.
    RpsStable,
    /// Masks change.
    MaskChange,
    /// Flows begin on RPS, until the first read by their application moves them.
    RfsTakeover,
    /// Flows share entries of the socket-flow table in pairs.
    SlotCollision,
    /// The flow tables are rewritten while applications move.
    FlowCntRewrite,
    /// The socket-flow table is rewritten.
    SockEntriesRewrite,
    /// CPUs are taken offline and brought back.
    CpuOffline,
    /// Threads die with a dequeued batch.
    CpuCrash,
    /// One flow has more packets than a CPU can process.
    Elephant,
    /// As `Elephant`, with packets merged before they are steered.
    MergedElephant,
    /// One flow has more packets than a CPU can process, and may fill all room for held packets;
    /// most other flows are short.
    Strangers,
    /// All counters begin just before they wrap.
    CounterWrap,
    /// Datagrams come in fragments, and masks change.
    Fragments,
    /// Flows differ in weight by orders of magnitude, and the load is balanced.
    Skewed,
    /// A flow that fills a CPU appears, another takes its place, and both are gone.
    HeavyFlow,
    /// The load rises and falls, and other flows become the heavy ones.
    Diurnal,
    /// An attacker aims many flows at one CPU.
    Aimed,
    /// The load is light, heavy, light and moderate, and the number of CPUs follows.
    Waves,
    /// Other flows become heavy again and again, on CPUs with hardly any time left.
    Shuffled,
    /// Everything is drawn at random.
    Everything,
}

/// Parameters of one run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) cpus: u16,
    /// Number of queues. Queue N is polled by CPU N at first.
    pub(crate) queues: u16,
    pub(crate) packets: u64,
    pub(crate) traffic: TrafficPlan,
    /// Read pattern of applications; `None` if reads are not recorded, as without RFS.
    pub(crate) readers: Option<ReaderPlan>,
    pub(crate) knobs: ScenarioKnobs,
    pub(crate) costs: Costs,
    pub(crate) recurring: Vec<Recurring>,
}

/// Parameters of the traffic.
#[derive(Clone, Debug)]
pub(crate) struct TrafficPlan {
    /// Number of concurrent flows.
    pub(crate) flows: u32,
    /// Number of consecutive packets of one flow.
    pub(crate) run: Span,
    /// Load in percent of one CPU's capacity.
    pub(crate) load_percent: u64,
    /// Part of the load that flow 0 has.
    pub(crate) elephant_percent: u64,
    /// Number of packets until a flow ends and another replaces it.
    pub(crate) lifetime: Option<Span>,
    pub(crate) hashes: Hashes,
    /// Weights by Zipf's law, if flows differ in weight: number of first ranks that hardly do.
    pub(crate) zipf: Option<u32>,
    /// Percentage of flows that have no hash.
    pub(crate) without_hash_percent: u64,
    /// True if every two frames of a flow are the fragments of one datagram.
    pub(crate) fragments: bool,
    /// Change of the load in the course of the run.
    pub(crate) shift: Shift,
    /// Mean time that a CPU takes for a packet: the load is in percent of that.
    pub(crate) service_ns: u64,
}

/// Collisions among the hashes of flows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hashes {
    /// Drawn independently.
    Apart,
    /// Pairs agree in their low bits: they share an entry of a socket-flow table of that size or
    /// smaller.
    SockSlotPairs,
    /// All agree in their upper bits, except for the top two.
    FewFlowSlots,
    /// Pairs have the same hash.
    SamePairs,
    /// Computed by the path from addresses and ports.
    Computed,
}

/// Read pattern of applications. A reader takes packets that its flow was handed some time ago; the
/// CPU recorded is the reader's, not the one that delivered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReaderPlan {
    /// Delay until a flow is read for the first time.
    pub(crate) first_ns: Span,
    /// Delay until it is read again.
    pub(crate) again_ns: Span,
    /// True if readers start where RPS sends their flows.
    pub(crate) settled: bool,
}

/// Initial settings.
#[derive(Clone, Debug)]
pub(crate) struct ScenarioKnobs {
    /// All CPUs that a drawn mask may include.
    pub(crate) rps_cpus: CpuSet,
    pub(crate) rps_flow_cnt: u32,
    pub(crate) sock_flow_entries: u32,
    pub(crate) netdev_max_backlog: u32,
    pub(crate) hold_max: u32,
    pub(crate) batch_max: u32,
    pub(crate) move_after: MoveAfter,
    pub(crate) spread: SpreadPolicy,
    pub(crate) balance: BalanceConfig,
    /// True if the device balances by its own table (RSS++).
    pub(crate) indirection: bool,
    /// Initial value of head and tail counters.
    pub(crate) start: u32,
    pub(crate) coalesce: SimCoalesceAt,
    /// Time that segments wait for more after a queue ran empty.
    pub(crate) gro_flush_timeout_ns: u64,
}

/// Overrides of any scenario from the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Overrides {
    /// Number of CPUs: 2 to [`CPUS_MAX`].
    pub cpus: Option<u16>,
    /// Number of packets in each run.
    pub packets: Option<u64>,
    /// Number of flows of [`Situation::Skewed`], which then follow Zipf's law from the first rank on.
    pub flows: Option<u32>,
}

/// Greatest distance from the wrap at which positions begin.
const BEFORE_WRAP: u64 = 300;

const US: u64 = 1_000;

impl Situation {
    /// All scenarios.
    pub const ALL: [Self; 20] = [
        Self::RpsStable,
        Self::MaskChange,
        Self::RfsTakeover,
        Self::SlotCollision,
        Self::FlowCntRewrite,
        Self::SockEntriesRewrite,
        Self::CpuOffline,
        Self::CpuCrash,
        Self::Elephant,
        Self::MergedElephant,
        Self::Strangers,
        Self::CounterWrap,
        Self::Fragments,
        Self::Skewed,
        Self::HeavyFlow,
        Self::Diurnal,
        Self::Aimed,
        Self::Waves,
        Self::Shuffled,
        Self::Everything,
    ];

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RpsStable => "rps-stable",
            Self::MaskChange => "mask-change",
            Self::RfsTakeover => "rfs-takeover",
            Self::SlotCollision => "slot-collision",
            Self::FlowCntRewrite => "flow-cnt-rewrite",
            Self::SockEntriesRewrite => "sock-entries-rewrite",
            Self::CpuOffline => "cpu-offline",
            Self::CpuCrash => "cpu-crash",
            Self::Elephant => "elephant",
            Self::MergedElephant => "merged-elephant",
            Self::Strangers => "strangers",
            Self::CounterWrap => "counter-wrap",
            Self::Fragments => "fragments",
            Self::Skewed => "skewed",
            Self::HeavyFlow => "heavy-flow",
            Self::Diurnal => "diurnal",
            Self::Aimed => "aimed",
            Self::Waves => "waves",
            Self::Shuffled => "shuffled",
            Self::Everything => "everything",
        }
    }

    /// One-line description.
    #[must_use]
    pub fn about(self) -> &'static str {
        match self {
            Self::RpsStable => "nothing changes; CPUs pause, packets come in bursts",
            Self::MaskChange => "rps_cpus is written again and again",
            Self::RfsTakeover => {
                "flows begin on RPS; their application's first read takes them over"
            }
            Self::SlotCollision => "flows share entries of the socket-flow table in pairs",
            Self::FlowCntRewrite => "rps_flow_cnt is written while applications move",
            Self::SockEntriesRewrite => "rps_sock_flow_entries is written, also with its own value",
            Self::CpuOffline => "CPUs are taken out with packets queued, and put back",
            Self::CpuCrash => "threads die with packets in hand, and are replaced",
            Self::Elephant => "one flow at 1.05 or 1.5 times what a CPU can take is to move",
            Self::MergedElephant => "the same, and packets are merged before they are steered",
            Self::Strangers => {
                "one flow beyond a CPU among short ones; little can be held, and masks change"
            }
            Self::CounterWrap => "all counters begin just before 2^32; masks and applications move",
            Self::Fragments => "datagrams come in two fragments; masks and applications move",
            Self::Skewed => "few flows are heavy and many light; the load is balanced",
            Self::HeavyFlow => "a flow that fills a CPU appears, moves and vanishes; balanced",
            Self::Diurnal => "the load rises and falls, and other flows become heavy; balanced",
            Self::Aimed => "an attacker aims many flows at one CPU; balanced",
            Self::Waves => "the load is light, heavy, light and moderate; CPUs follow",
            Self::Shuffled => "other flows become heavy again and again; balanced",
            Self::Everything => "traffic, knobs, changes and faults are all drawn",
        }
    }

    /// Draws the scenario of one seed.
    pub(crate) fn draw(self, overrides: Overrides, random: &mut Random) -> Scenario {
        let cpus = overrides.cpus.map(|cpus| cpus.clamp(2, CPUS_MAX));
        let mut scenario = match self {
            Self::Everything => everything::draw(cpus, random),
            Self::Elephant => elephant(cpus.unwrap_or(4), random),
            Self::MergedElephant => {
                let mut scenario = elephant(cpus.unwrap_or(4), random);
                scenario.knobs.coalesce = SimCoalesceAt::Arrive;
                // Merged packets cost less, and a full backlog moves a flow at once: so little is
                // merged, and backlogs are hardly ever full.
                scenario.knobs.gro_flush_timeout_ns = 0;
                scenario.knobs.netdev_max_backlog = 1_000;
                scenario
            }
            Self::Strangers => strangers(cpus.unwrap_or(4), random),
            Self::Skewed => loads::skewed(cpus.unwrap_or(4)),
            Self::Shuffled => loads::shuffled(cpus.unwrap_or(4)),
            Self::HeavyFlow | Self::Diurnal | Self::Aimed | Self::Waves => {
                self.shifting(cpus.unwrap_or(4))
            }
            _ => self.of_the_kernels_model(cpus.unwrap_or(4), random),
        };
        scenario.packets = overrides.packets.unwrap_or(scenario.packets);
        if let Some(flows) = overrides.flows.filter(|_| self == Self::Skewed) {
            (scenario.traffic.flows, scenario.traffic.zipf) = (flows.max(1), Some(0));
        }
        scenario
    }

    /// Creates a scenario with four CPUs and 64 flows, as in the model of REQUIREMENTS section 2.
    fn of_the_kernels_model(self, cpus: u16, random: &mut Random) -> Scenario {
        let mut scenario = base(cpus);
        let (traffic, knobs) = (&mut scenario.traffic, &mut scenario.knobs);
        let again_ns = Span(1, 20 * US);
        let reads = ReaderPlan { first_ns: again_ns, again_ns, settled: false };
        let moves = Recurring { action: Action::ReaderMoves, every_ns: Span(10 * US, 50 * US) };
        let mut more: Vec<Recurring> = Vec::new();
        match self {
            Self::MaskChange => more.push(mask_changes()),
            Self::RfsTakeover => {
                traffic.lifetime = Some(Span(20, 200));
                scenario.readers = Some(ReaderPlan { first_ns: Span(1, 100 * US), ..reads });
            }
            Self::SlotCollision => {
                traffic.hashes = Hashes::SockSlotPairs;
                scenario.readers = Some(reads);
            }
            Self::FlowCntRewrite => {
                scenario.readers = Some(reads);
                let action = Action::RpsFlowCnt(&[1024, 1024, 4096, 256]);
                more.extend([moves, Recurring { action, every_ns: Span(50 * US, 300 * US) }]);
            }
            Self::SockEntriesRewrite => {
                scenario.readers = Some(reads);
                let action = Action::SockFlowEntries(&[32768, 32768, 4096]);
                more.extend([moves, Recurring { action, every_ns: Span(50 * US, 300 * US) }]);
            }
            Self::CpuOffline => {
                scenario.readers = Some(reads);
                let action = Action::CpuOut { lasts_ns: Span(100 * US, 400 * US) };
                more.extend([moves, Recurring { action, every_ns: Span(100 * US, 600 * US) }]);
            }
            Self::CpuCrash => {
                scenario.readers = Some(reads);
                let action = Action::Kill { lasts_ns: Span(20 * US, 300 * US) };
                more.extend([moves, Recurring { action, every_ns: Span(100 * US, 600 * US) }]);
            }
            Self::CounterWrap => {
                knobs.start = before_wrap(random);
                scenario.readers = Some(reads);
                more.extend([moves, mask_changes()]);
            }
            Self::Fragments => {
                (traffic.fragments, traffic.hashes) = (true, Hashes::Computed);
                scenario.readers = Some(reads);
                more.extend([moves, mask_changes()]);
            }
            Self::RpsStable
            | Self::Elephant
            | Self::MergedElephant
            | Self::Strangers
            | Self::Skewed
            | Self::HeavyFlow
            | Self::Diurnal
            | Self::Aimed
            | Self::Waves
            | Self::Shuffled
            | Self::Everything => {}
        }
        if scenario.readers.is_none() {
            knobs.sock_flow_entries = 0;
        }
        scenario.recurring.extend(more);
        scenario
    }
}

fn mask_changes() -> Recurring {
    Recurring { action: Action::RpsCpus { least: 1 }, every_ns: Span(30 * US, 300 * US) }
}

/// A value a little below 2^32.
pub(crate) fn before_wrap(random: &mut Random) -> u32 {
    u32::MAX - u32::try_from(random.below(BEFORE_WRAP)).unwrap_or(0)
}

fn base(cpus: u16) -> Scenario {
    let pauses = Action::Pause { lasts_ns: Span(20 * US, 200 * US) };
    let bursts = Action::Burst { packets: Span(50, 300) };
    Scenario {
        cpus,
        queues: 1,
        packets: 6_000,
        traffic: TrafficPlan {
            flows: 64,
            run: Span(1, 8),
            load_percent: 60 * u64::from(cpus),
            elephant_percent: 0,
            lifetime: None,
            hashes: Hashes::Apart,
            zipf: None,
            without_hash_percent: 0,
            fragments: false,
            shift: Shift::None,
            service_ns: SERVICE_NS,
        },
        readers: None,
        knobs: ScenarioKnobs {
            rps_cpus: CpuSet::range(0, cpus),
            rps_flow_cnt: 1024,
            sock_flow_entries: 32_768,
            netdev_max_backlog: 1_000,
            hold_max: HOLD_MAX / 4,
            batch_max: 64,
            move_after: MoveAfter::default(),
            spread: SpreadPolicy::Always,
            balance: BalanceConfig::default(),
            indirection: false,
            start: 0,
            coalesce: SimCoalesceAt::Nowhere,
            gro_flush_timeout_ns: 20 * US,
        },
        costs: Costs { stall_one_in: 256, factor: 1 },
        recurring: vec![
            Recurring { action: pauses, every_ns: Span(100 * US, 800 * US) },
            Recurring { action: bursts, every_ns: Span(200 * US, 1_000 * US) },
        ],
    }
}

/// The elephant and a few mice, on CPUs that are otherwise idle. Its reader moves, and so does the
/// mask; under the kernel's rules a mask does not affect a flow whose reader is known.
fn elephant(cpus: u16, random: &mut Random) -> Scenario {
    const MICE_PERCENT: u64 = 30;
    let elephant = if random.below(2) == 0 { 105 } else { 150 };
    let mut scenario = base(cpus.max(3));
    scenario.packets = 24_000;
    scenario.traffic.flows = 9;
    scenario.traffic.load_percent = elephant + MICE_PERCENT;
    scenario.traffic.elephant_percent = elephant;
    scenario.knobs.rps_cpus = CpuSet::range(1, scenario.cpus);
    scenario.knobs.netdev_max_backlog = 300;
    scenario.costs.stall_one_in = 0;
    let again_ns = Span(1, 20 * US);
    scenario.readers = Some(ReaderPlan { first_ns: again_ns, again_ns, settled: true });
    scenario.recurring = vec![
        Recurring { action: Action::ReaderMoves, every_ns: Span(1_500 * US, 3_000 * US) },
        Recurring { action: Action::RpsCpus { least: 2 }, every_ns: Span(4_000 * US, 6_000 * US) },
    ];
    scenario
}

/// The elephant among short flows, with few enough hold slots that the elephant can take all of
/// them. Other flows must not suffer from that.
fn strangers(cpus: u16, random: &mut Random) -> Scenario {
    let mut scenario = elephant(cpus, random);
    scenario.traffic.flows = 256;
    scenario.traffic.lifetime = Some(Span(1, 100));
    scenario.traffic.load_percent += 100;
    scenario.knobs.hold_max = HOLD_SHARE_LEAST;
    scenario.knobs.netdev_max_backlog = 1_000;
    scenario.recurring = vec![
        Recurring { action: Action::ReaderMoves, every_ns: Span(10 * US, 50 * US) },
        mask_changes(),
    ];
    scenario
}

/// A name that does not belong to a scenario.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownSituation(String);

impl fmt::Display for UnknownSituation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Situation::ALL.map(Situation::name).join(", ");
        write!(f, "there is no scenario {:?}; there are {names}", self.0)
    }
}

impl std::error::Error for UnknownSituation {}

impl FromStr for Situation {
    type Err = UnknownSituation;

    fn from_str(name: &str) -> Result<Self, UnknownSituation> {
        let found = Self::ALL.into_iter().find(|situation| situation.name() == name);
        found.ok_or_else(|| UnknownSituation(name.to_owned()))
    }
}
