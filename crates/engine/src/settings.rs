//! Settings of all knobs as requested, in force or not.

use forebay_rx::RxQueue;
use forebay_rx::flow_key::FlowKeyRules;
use forebay_rx::steer::{BalanceConfig, SpreadConfig};
use forebay_sys::cpu_list::CpuList;

use super::config::Config;
use super::limits::Limits;
use crate::knobs::change::{Change, Queues};
use crate::knobs::coalesce::Coalesce;

/// Default number of buckets of a flow limit, as in the kernel.
const FLOW_LIMIT_TABLE_LEN: u32 = 4096;

/// Settings of the knobs of an engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Settings of each queue.
    pub queues: Vec<QueueSettings>,
    /// Entries of the socket-flow table; 0 for none.
    pub rps_sock_flow_entries: u32,
    /// CPUs that packets of a new device's queues go to.
    pub rps_default_mask: CpuList,
    /// CPUs that run.
    pub cpus: CpuList,
    /// CPUs that are paused.
    pub paused: CpuList,
    /// Length of a backlog, in packets.
    pub netdev_max_backlog: u32,
    /// Budgets of a CPU's turn.
    pub limits: Limits,
    /// CPUs that apply the flow limit when they poll.
    pub flow_limit_cpu_bitmap: CpuList,
    /// Buckets of flow limits that are turned on later.
    pub flow_limit_table_len: u32,
    /// Coalescing.
    pub coalesce: Coalesce,
    /// Balance of the load over CPUs.
    pub balance: BalanceConfig,
    /// Number of CPUs that the load gets.
    pub spread: SpreadConfig,
    /// Rules for flow keys.
    pub flow_key: FlowKeyRules,
}

/// Settings of one queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueSettings {
    /// CPUs that the queue's packets may go to.
    pub rps_cpus: CpuList,
    /// Slots of the queue's flow table; 0 for none, which turns RFS off.
    pub rps_flow_cnt: u32,
}

impl Settings {
    /// Initial settings of an engine with `queues` queues.
    #[must_use]
    pub fn of(config: &Config, queues: usize) -> Self {
        let queue = QueueSettings {
            rps_cpus: config.rps_map().clone(),
            rps_flow_cnt: rounded(config.rps_flow_cnt),
        };
        Self {
            queues: vec![queue; queues],
            rps_sock_flow_entries: rounded(config.rps_sock_flow_entries),
            rps_default_mask: CpuList::default(),
            cpus: config.cpus.clone(),
            paused: CpuList::default(),
            netdev_max_backlog: config.netdev_max_backlog,
            limits: config.limits,
            flow_limit_cpu_bitmap: CpuList::default(),
            flow_limit_table_len: FLOW_LIMIT_TABLE_LEN,
            coalesce: config.coalesce,
            balance: config.balance,
            spread: SpreadConfig { policy: config.spread, ..SpreadConfig::default() },
            flow_key: *config.hasher.rules(),
        }
    }

    /// Settings of a queue, if it exists.
    #[must_use]
    pub fn queue(&self, queue: RxQueue) -> Option<&QueueSettings> {
        self.queues.get(usize::from(queue.0))
    }

    /// True if the queues exist.
    #[must_use]
    pub fn has(&self, queues: Queues) -> bool {
        match queues {
            Queues::All => true,
            Queues::One(queue) => self.queue(queue).is_some(),
        }
    }

    /// Records a change.
    pub(crate) fn apply(&mut self, change: &Change) {
        match change {
            Change::RpsCpus(queues, cpus) => {
                self.each(*queues, |queue| queue.rps_cpus.clone_from(cpus));
            }
            Change::RpsFlowCnt(queues, count) => {
                self.each(*queues, |queue| queue.rps_flow_cnt = rounded(*count));
            }
            Change::RpsSockFlowEntries(entries) => self.rps_sock_flow_entries = rounded(*entries),
            Change::RpsDefaultMask(cpus) => self.rps_default_mask.clone_from(cpus),
            Change::Cpus(cpus) => self.cpus.clone_from(cpus),
            Change::Online(cpu, runs) => self.cpus = self.cpus.with(*cpu, *runs),
            Change::Pause(cpu) => self.paused = self.paused.with(*cpu, true),
            Change::Resume(cpu) => self.paused = self.paused.with(*cpu, false),
            Change::NetdevMaxBacklog(packets) => self.netdev_max_backlog = *packets,
            Change::FlowLimitCpuBitmap(cpus) => self.flow_limit_cpu_bitmap.clone_from(cpus),
            Change::FlowLimitTableLen(len) => self.flow_limit_table_len = *len,
            Change::Coalesce(change) => self.coalesce = self.coalesce.after(*change),
            Change::Balance(change) => self.balance = change.applied_to(self.balance),
            Change::Spread(change) => self.spread = change.applied_to(self.spread),
            Change::FlowKey(rules) => self.flow_key = *rules,
            Change::NetdevBudget(_)
            | Change::NetdevBudgetUsecs(_)
            | Change::DevWeight(_)
            | Change::DevWeightRxBias(_)
            | Change::SkbDeferMax(_) => self.limits = self.limits.after(change),
            Change::RfsDesired { .. } | Change::HashKey(_) | Change::Kill(_) => {}
        }
    }

    fn each(&mut self, queues: Queues, change: impl Fn(&mut QueueSettings)) {
        for (number, queue) in (0..).zip(&mut self.queues) {
            if queues.contain(RxQueue(number)) {
                change(queue);
            }
        }
    }
}

/// Entries rounded up to a power of two; 0 stays 0 (RFS-9).
fn rounded(entries: u32) -> u32 {
    if entries == 0 { 0 } else { entries.checked_next_power_of_two().unwrap_or(1 << 31) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_rx::CpuId;
    use forebay_rx::hash::Hasher;

    use super::*;

    #[test]
    fn queue_change_leaves_other_queues() {
        let cpus = CpuList::new([0, 1].map(CpuId));
        let config = Config::new(cpus, Arc::new(Hasher::keyed(&[0; 16], false)));
        let mut settings = Settings::of(&config, 2);
        for text in ["rps_flow_cnt=100", "rx-1/rps_flow_cnt=0", "rx-0/rps_cpus=2", "online=1:0"] {
            settings.apply(&text.parse().unwrap());
        }
        let counts: Vec<_> = settings.queues.iter().map(|queue| queue.rps_flow_cnt).collect();
        assert_eq!(counts, [128, 0]);
        let masks: Vec<_> = settings.queues.iter().map(|queue| queue.rps_cpus.to_mask(2)).collect();
        assert_eq!(masks, ["2", "3"]);
        assert_eq!(settings.cpus.to_string(), "0");
        assert!(settings.has(Queues::One(RxQueue(1))) && !settings.has(Queues::One(RxQueue(2))));
    }
}
