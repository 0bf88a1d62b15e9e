//! Live changes: each of one knob, with its new value.

use forebay_rx::flow_key::FlowKeyRules;
use forebay_rx::hash::FlowHash;
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::cpu_list::CpuList;
use forebay_sys::error::Error;
use forebay_sys::number::kstrtobool;

use super::balance::BalanceChange;
use super::coalesce::CoalesceChange;
use super::spread::SpreadChange;

/// A live change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// CPUs that packets may go to.
    RpsCpus(Queues, CpuList),
    /// CPUs that packets of queues created later may go to.
    RpsDefaultMask(CpuList),
    /// Slots of a queue's flow table; 0 turns RFS off for the queue.
    RpsFlowCnt(Queues, u32),
    /// Entries of the socket-flow table; 0 turns RFS off.
    RpsSockFlowEntries(u32),
    /// CPU on which the application of a flow runs.
    RfsDesired {
        /// The flow.
        flow: FlowHash,
        /// The CPU.
        cpu: CpuId,
    },
    /// Key of the flow hash.
    HashKey(Vec<u8>),
    /// Rules for flow keys.
    FlowKey(FlowKeyRules),
    /// CPUs that run from now on.
    Cpus(CpuList),
    /// State of one CPU: running or not.
    Online(CpuId, bool),
    /// Length of a backlog, in packets.
    NetdevMaxBacklog(u32),
    /// Maximum number of frames and packets that a CPU takes in one turn, over all queues and
    /// backlogs.
    NetdevBudget(u32),
    /// Maximum duration of a turn, in microseconds.
    NetdevBudgetUsecs(u32),
    /// Maximum number of frames that a CPU takes from one queue at once.
    DevWeight(u32),
    /// Maximum number of packets that a CPU takes from its backlogs, as a multiple of `dev_weight`.
    DevWeightRxBias(u32),
    /// Maximum number of frames that wait to be returned together.
    SkbDeferMax(u32),
    /// CPUs that apply the flow limit when they poll.
    FlowLimitCpuBitmap(CpuList),
    /// Buckets of flow limits that are turned on after this.
    FlowLimitTableLen(u32),
    /// Coalescing.
    Coalesce(CoalesceChange),
    /// Balance of the load over CPUs.
    Balance(BalanceChange),
    /// Number of CPUs that the load gets.
    Spread(SpreadChange),
    /// Pause: the CPU stops taking packets from its backlogs.
    Pause(CpuId),
    /// End of the CPU's pause.
    Resume(CpuId),
    /// Fault injection: the CPU's thread ends after it dequeues its next batch, and is replaced.
    Kill(CpuId),
}

/// Queues that a change concerns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queues {
    /// All queues.
    All,
    /// One queue.
    One(RxQueue),
}

impl Queues {
    /// True if the change concerns `queue`.
    #[must_use]
    pub fn contain(self, queue: RxQueue) -> bool {
        self == Self::All || self == Self::One(queue)
    }
}

impl Change {
    /// Name of the knob.
    #[must_use]
    pub fn knob(&self) -> &'static str {
        match self {
            Self::RpsCpus(..) => "rps_cpus",
            Self::RpsDefaultMask(_) => "rps_default_mask",
            Self::RpsFlowCnt(..) => "rps_flow_cnt",
            Self::RpsSockFlowEntries(_) => "rps_sock_flow_entries",
            Self::RfsDesired { .. } => "rfs_desired",
            Self::HashKey(_) => "hash_key",
            Self::FlowKey(_) => "flow_key",
            Self::Cpus(_) => "cpus",
            Self::Online(..) => "online",
            Self::NetdevMaxBacklog(_) => "netdev_max_backlog",
            Self::NetdevBudget(_) => "netdev_budget",
            Self::NetdevBudgetUsecs(_) => "netdev_budget_usecs",
            Self::DevWeight(_) => "dev_weight",
            Self::DevWeightRxBias(_) => "dev_weight_rx_bias",
            Self::SkbDeferMax(_) => "skb_defer_max",
            Self::FlowLimitCpuBitmap(_) => "flow_limit_cpu_bitmap",
            Self::FlowLimitTableLen(_) => "flow_limit_table_len",
            Self::Coalesce(change) => change.knob(),
            Self::Balance(change) => change.knob(),
            Self::Spread(change) => change.knob(),
            Self::Pause(_) => "pause",
            Self::Resume(_) => "resume",
            Self::Kill(_) => "kill",
        }
    }

    /// Name of the knob, prefixed with the queue if the change concerns one queue.
    #[must_use]
    pub fn what(&self) -> String {
        match self {
            Self::RpsCpus(Queues::One(queue), _) | Self::RpsFlowCnt(Queues::One(queue), _) => {
                format!("{queue}/{}", self.knob())
            }
            _ => self.knob().to_owned(),
        }
    }

    /// Value as it reads back, on a machine of `cpus` CPUs.
    #[must_use]
    pub fn value(&self, cpus: u16) -> String {
        match self {
            Self::RpsCpus(_, list)
            | Self::RpsDefaultMask(list)
            | Self::FlowLimitCpuBitmap(list) => list.to_mask(cpus),
            Self::RfsDesired { flow, cpu } => format!("{:08x}:{cpu}", flow.0),
            Self::HashKey(key) => hex::encode(key),
            Self::FlowKey(rules) => rules.to_string(),
            Self::Cpus(list) => list.to_string(),
            Self::Online(cpu, runs) => format!("{cpu}:{}", u8::from(*runs)),
            Self::RpsFlowCnt(_, number)
            | Self::RpsSockFlowEntries(number)
            | Self::NetdevMaxBacklog(number)
            | Self::NetdevBudget(number)
            | Self::NetdevBudgetUsecs(number)
            | Self::DevWeight(number)
            | Self::DevWeightRxBias(number)
            | Self::SkbDeferMax(number)
            | Self::FlowLimitTableLen(number) => number.to_string(),
            Self::Coalesce(change) => change.value(),
            Self::Balance(change) => change.value(),
            Self::Spread(change) => change.value(),
            Self::Pause(cpu) | Self::Resume(cpu) | Self::Kill(cpu) => cpu.to_string(),
        }
    }

    /// CPUs that the change names; `None` if it is not about CPUs.
    #[must_use]
    pub fn cpus(&self) -> Option<CpuList> {
        match self {
            Self::RpsCpus(_, list)
            | Self::RpsDefaultMask(list)
            | Self::FlowLimitCpuBitmap(list)
            | Self::Cpus(list) => Some(list.clone()),
            Self::RfsDesired { cpu, .. }
            | Self::Online(cpu, _)
            | Self::Pause(cpu)
            | Self::Resume(cpu)
            | Self::Kill(cpu) => Some(CpuList::new([*cpu])),
            _ => None,
        }
    }
}

impl Change {
    /// Knobs that change during a run, besides those of [coalescing](CoalesceChange::KNOBS), of the
    /// [balance](BalanceChange::KNOBS) and of the [spread](SpreadChange::KNOBS).
    pub const KNOBS: [&'static str; 20] = [
        "rps_cpus",
        "rps_default_mask",
        "rps_flow_cnt",
        "rps_sock_flow_entries",
        "rfs_desired",
        "hash_key",
        "flow_key",
        "cpus",
        "online",
        "netdev_max_backlog",
        "netdev_budget",
        "netdev_budget_usecs",
        "dev_weight",
        "dev_weight_rx_bias",
        "skb_defer_max",
        "flow_limit_cpu_bitmap",
        "flow_limit_table_len",
        "pause",
        "resume",
        "kill",
    ];

    pub(super) fn known() -> Vec<&'static str> {
        let mut known = Self::KNOBS.to_vec();
        known.extend(CoalesceChange::KNOBS);
        known.extend(BalanceChange::KNOBS);
        known.extend(SpreadChange::KNOBS);
        known
    }

    /// Reads the value of a knob that is Forebay's own.
    ///
    /// # Errors
    /// If the value is invalid.
    pub(super) fn of_own(knob: &'static str, value: &str) -> Result<Self, Error> {
        const NUMBER: &str = "it is the number of a CPU";
        let value = value.trim();
        if let Some(change) = CoalesceChange::parse(knob, value) {
            return change.map(Self::Coalesce);
        }
        if let Some(change) = BalanceChange::parse(knob, value) {
            return change.map(Self::Balance);
        }
        if let Some(change) = SpreadChange::parse(knob, value) {
            return change.map(Self::Spread);
        }
        let refused = |why: &str| refused(knob, value, why);
        let list = || CpuList::parse_list(value).map_err(|error| refused(&error.to_string()));
        let cpu = |text: &str, form: &str| {
            let number = text.trim().parse().map(CpuId);
            number.map_err(|_| refused(form))
        };
        Ok(match knob {
            "rfs_desired" => {
                let form = "it is HASH:CPU, the hash in hexadecimal";
                let (flow, at) = value.split_once(':').unwrap_or((value, ""));
                let flow = u32::from_str_radix(flow.trim(), 16).ok().filter(|hash| *hash != 0);
                let flow = flow.ok_or_else(|| refused(form))?;
                Self::RfsDesired { flow: FlowHash(flow), cpu: cpu(at, form)? }
            }
            "hash_key" => Self::HashKey(
                hex::decode(value).map_err(|_| refused("it is pairs of hexadecimal digits"))?,
            ),
            "flow_key" => {
                let rules = value.parse::<FlowKeyRules>();
                Self::FlowKey(rules.map_err(|wrong| refused(&wrong.to_string()))?)
            }
            "cpus" => Self::Cpus(list()?),
            "online" => {
                let form = "it is CPU:0 or CPU:1";
                let (at, runs) = value.split_once(':').unwrap_or((value, ""));
                let runs = kstrtobool(runs.trim().as_bytes());
                Self::Online(cpu(at, form)?, runs.map_err(|_| refused(form))?)
            }
            "pause" => Self::Pause(cpu(value, NUMBER)?),
            "resume" => Self::Resume(cpu(value, NUMBER)?),
            "kill" => Self::Kill(cpu(value, NUMBER)?),
            _ => return Err(refused("it is no knob that changes during a run")),
        })
    }
}

pub(super) fn refused(what: &'static str, value: &str, why: &str) -> Error {
    Error::Setting { what, value: value.to_owned(), why: why.to_owned() }
}
