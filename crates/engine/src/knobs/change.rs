//! Live changes: each of one knob, with its new value.

use std::str::FromStr;

use forebay_rx::backlog::FlowLimit;
use forebay_rx::flow_key::FlowKeyRules;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{RPS_FLOW_CNT_MAX, RPS_SOCK_FLOW_ENTRIES_MAX};
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::cpu_list::CpuList;
use forebay_sys::error::Error;

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

impl FromStr for Change {
    type Err = Error;

    /// Reads `knob=value`, or `rx-N/knob=value` for one queue.
    fn from_str(text: &str) -> Result<Self, Error> {
        let Some((knob, value)) = text.split_once('=') else {
            return Err(refused("a change", text, "it has the form KNOB=VALUE"));
        };
        let (queues, knob) = match knob.trim().split_once('/') {
            Some((queue, knob)) => (Queues::One(parse_queue(queue)?), knob),
            None => (Queues::All, knob.trim()),
        };
        let known = Self::KNOBS.into_iter().find(|known| *known == knob);
        if let Some(change) = CoalesceChange::parse(knob, value) {
            return change.map(Self::Coalesce);
        }
        if let Some(change) = BalanceChange::parse(knob, value) {
            return change.map(Self::Balance);
        }
        if let Some(change) = SpreadChange::parse(knob, value) {
            return change.map(Self::Spread);
        }
        match known {
            Some(knob) => Self::parse(knob, queues, value),
            None => Err(refused(
                "a knob",
                knob,
                &format!("those that change during a run are {}", Self::known()),
            )),
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

    fn known() -> String {
        let mut known = Self::KNOBS.to_vec();
        known.extend(CoalesceChange::KNOBS);
        known.extend(BalanceChange::KNOBS);
        known.extend(SpreadChange::KNOBS);
        known.join(", ")
    }

    fn parse(knob: &'static str, queues: Queues, value: &str) -> Result<Self, Error> {
        let refused = |why: &str| refused(knob, value, why);
        let mask =
            || CpuList::parse_mask_or_list(value).map_err(|error| refused(&error.to_string()));
        let list = || CpuList::parse_list(value).map_err(|error| refused(&error.to_string()));
        let between = |least: u32, most: u32| {
            let number = value.trim().parse().ok();
            number
                .filter(|number| (least..=most).contains(number))
                .ok_or_else(|| refused(&format!("it is a number from {least} to {most}")))
        };
        let cpu = |text: &str| {
            let number = text.trim().parse().map(CpuId);
            number.map_err(|_| refused("it is the number of a CPU"))
        };
        let int_max = i32::MAX.unsigned_abs();
        Ok(match knob {
            "rps_cpus" => Self::RpsCpus(queues, mask()?),
            "rps_flow_cnt" => Self::RpsFlowCnt(queues, between(0, RPS_FLOW_CNT_MAX)?),
            _ if queues != Queues::All => return Err(refused("it is not about one queue")),
            "rps_default_mask" => Self::RpsDefaultMask(mask()?),
            "rps_sock_flow_entries" => {
                Self::RpsSockFlowEntries(between(0, RPS_SOCK_FLOW_ENTRIES_MAX)?)
            }
            "rfs_desired" => {
                let (flow, at) = value.split_once(':').unwrap_or((value, ""));
                let flow = u32::from_str_radix(flow.trim(), 16).ok().filter(|hash| *hash != 0);
                let flow =
                    flow.ok_or_else(|| refused("it is HASH:CPU, the hash in hexadecimal"))?;
                Self::RfsDesired { flow: FlowHash(flow), cpu: cpu(at)? }
            }
            "hash_key" => Self::HashKey(
                hex::decode(value.trim())
                    .map_err(|_| refused("it is pairs of hexadecimal digits"))?,
            ),
            "flow_key" => {
                let rules = value.parse::<FlowKeyRules>();
                Self::FlowKey(rules.map_err(|wrong| refused(&wrong.to_string()))?)
            }
            "cpus" => Self::Cpus(list()?),
            "online" => match value.trim().split_once(':') {
                Some((at, "0")) => Self::Online(cpu(at)?, false),
                Some((at, "1")) => Self::Online(cpu(at)?, true),
                _ => return Err(refused("it is CPU:0 or CPU:1")),
            },
            "netdev_max_backlog" => Self::NetdevMaxBacklog(between(0, u32::MAX)?),
            "netdev_budget" => Self::NetdevBudget(between(1, int_max)?),
            "netdev_budget_usecs" => Self::NetdevBudgetUsecs(between(1, int_max)?),
            "dev_weight" => Self::DevWeight(between(1, int_max)?),
            "dev_weight_rx_bias" => Self::DevWeightRxBias(between(1, int_max)?),
            "skb_defer_max" => Self::SkbDeferMax(between(0, int_max)?),
            "flow_limit_cpu_bitmap" => Self::FlowLimitCpuBitmap(mask()?),
            "flow_limit_table_len" => {
                let len = between(1, u32::MAX)?;
                if FlowLimit::new(len).is_none() {
                    return Err(refused("it is a power of two"));
                }
                Self::FlowLimitTableLen(len)
            }
            "pause" => Self::Pause(cpu(value)?),
            "resume" => Self::Resume(cpu(value)?),
            _ => Self::Kill(cpu(value)?),
        })
    }
}

fn parse_queue(text: &str) -> Result<RxQueue, Error> {
    let number = text.trim().strip_prefix("rx-").and_then(|number| number.parse().ok());
    number.map(RxQueue).ok_or_else(|| refused("a queue", text, "it has the form rx-N"))
}

pub(super) fn refused(what: &'static str, value: &str, why: &str) -> Error {
    Error::Setting { what, value: value.to_owned(), why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(text: &str) -> Result<Change, String> {
        text.parse().map_err(|error: Error| error.to_string())
    }

    #[test]
    fn knobs_read_and_write_back() {
        for text in [
            "rps_cpus=3",
            "rx-1/rps_cpus=2",
            "rps_default_mask=1",
            "rps_flow_cnt=4096",
            "rx-0/rps_flow_cnt=0",
            "rps_sock_flow_entries=32768",
            "rfs_desired=0badcafe:1",
            "hash_key=00112233445566778899aabbccddeeff",
            "flow_key=inner,quic:443,8443-8449:8",
            "cpus=0-1",
            "online=1:0",
            "netdev_max_backlog=50",
            "netdev_budget=300",
            "netdev_budget_usecs=2000",
            "dev_weight=64",
            "dev_weight_rx_bias=2",
            "skb_defer_max=0",
            "flow_limit_cpu_bitmap=1",
            "flow_limit_table_len=8192",
            "coalesce=gro",
            "rps_balance=load",
            "rps_spread_busy=75",
            "pause=1",
            "resume=1",
            "kill=1",
        ] {
            let change = changed(text).unwrap();
            assert_eq!(format!("{}={}", change.what(), change.value(2)), text);
        }
    }

    #[test]
    fn impossible_setting_has_reason() {
        for text in [
            "rps_cpus",
            "rps_cpus=0x3",
            "rps_cpu=3",
            "rx-/rps_cpus=3",
            "rx-0/netdev_budget=300",
            "rps_flow_cnt=1073741825",
            "rps_sock_flow_entries=536870913",
            "rfs_desired=0:1",
            "rfs_desired=5",
            "rfs_desired=xyz:1",
            "hash_key=0",
            "flow_key=all",
            "flow_key=quic:443",
            "cpus=0-",
            "online=1",
            "netdev_max_backlog=-1",
            "netdev_budget=0",
            "dev_weight=0",
            "flow_limit_table_len=1000",
            "coalesce=on",
            "rps_balance=on",
            "rps_spread=busy",
            "coalesce_at=x",
            "lro_descriptors=0",
            "gro_flush_timeout=1ms",
            "mtu=67",
            "pause=x",
            "kill=",
        ] {
            assert!(changed(text).unwrap_err().contains("cannot be"), "{text}");
        }
    }
}
