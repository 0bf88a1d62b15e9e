//! Configuration of an engine.

use std::path::Path;
use std::sync::Arc;

use forebay_rx::CpuId;
use forebay_rx::backlog::{NETDEV_MAX_BACKLOG, capacity_for};
use forebay_rx::flow_key::FlowKeyRules;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::intake::DEV_WEIGHT;
use forebay_rx::parse::Verify;
use forebay_rx::steer::{
    BalanceConfig, HOLD_MAX, MoveAfter, RPS_FLOW_CNT, RPS_SOCK_FLOW_ENTRIES, SpreadPolicy,
};
use forebay_sys as sys;
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::topology::Topology;

use super::devices::DeviceQueues;
use super::idle::SPIN_MAX_NS;
use super::limits::Limits;
use crate::knobs::{Change, Coalesce, Machine, Script};
use crate::trace::{IntakeTrace, Trace};

/// Default number of frames per CPU for packets made by its handler, with live devices.
pub const SPARE_FRAMES: u32 = 256;

/// Configuration of an engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// CPUs to run on, one thread each. The first ones poll the queues.
    pub cpus: CpuList,
    /// Devices of the sources' queues, in the order of the sources. If empty: one device, called
    /// `replay` in the tree of knobs.
    pub devices: Vec<DeviceQueues>,
    /// CPUs that packets go to: `rps_cpus` of every queue. `None`: those that share a cache with
    /// the CPUs that poll, once the number of queues is known.
    pub rps_cpus: Option<CpuList>,
    /// Hash function of flows.
    pub hasher: Arc<Hasher>,
    /// Checksum verification.
    pub verify: Verify,
    /// Initial coalescing; `None`: off.
    pub coalesce: Coalesce,
    /// Slots of each queue's flow table; 0 turns RFS off.
    pub rps_flow_cnt: u32,
    /// Entries of the socket-flow table (`rps_sock_flow_entries`); 0 turns RFS off.
    pub rps_sock_flow_entries: u32,
    /// Budgets of a CPU's turn.
    pub limits: Limits,
    /// Condition on which a held move begins.
    pub move_after: MoveAfter,
    /// Maximum number of held packets per queue.
    pub hold_max: u32,
    /// Condition on which packets leave the polling CPU.
    pub spread: SpreadPolicy,
    /// Balance of the load over the CPUs of the RPS map.
    pub balance: BalanceConfig,
    /// Length of a backlog, in packets (`netdev_max_backlog`).
    pub netdev_max_backlog: u32,
    /// Maximum number of packets per delivered batch. In the trace of a live run, one, but for packets that are
    /// merged on delivery.
    pub batch_max: u32,
    /// Initial value of all head and tail counters, to test their wrap.
    pub start_counters: u32,
    /// Scripted changes during the run.
    pub script: Script,
    /// Flows to be explained in the [outcome](super::Outcome::explained).
    pub explain: Vec<FlowHash>,
    /// Effect of a full backlog on the source.
    pub when_full: WhenFull,
    /// Longest time that a CPU polls without work before it sleeps.
    pub spin_max_ns: u64,
    /// Frames per CPU for packets made by its handler.
    pub spare_frames: u32,
    /// Additional frames per queue that applications may keep.
    pub kept_frames: u32,
    /// Number of other threads that make packets; each gets as many spare frames.
    pub senders: u16,
    /// Frames of the smallest size per CPU, for datagrams of slow readers.
    pub small_frames: u32,
    /// Trace to record.
    pub trace: Option<Arc<Trace>>,
}

/// Effect of a full backlog.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhenFull {
    /// Wait: the source is not polled while its backlog is full, unless a CPU is paused. For
    /// captures.
    #[default]
    Wait,
    /// Drop: as behind a device, which does not wait.
    Drop,
}

/// Sizes of delivered batches.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchSizes {
    packets_max: u32,
    /// True if the head of a backlog follows each packet.
    is_each_shown: bool,
}

impl BatchSizes {
    /// Maximum number of packets per batch while packets are coalesced like this. Packets merged on delivery are processed
    /// together.
    pub(super) fn max_with(self, coalesce: &Coalesce) -> u32 {
        let is_alone = self.is_each_shown && coalesce.on_delivery().is_none();
        if is_alone { 1 } else { self.packets_max }
    }
}

impl Config {
    /// Default configuration on these CPUs.
    #[must_use]
    pub fn new(cpus: CpuList, hasher: Arc<Hasher>) -> Self {
        Self {
            devices: Vec::new(),
            rps_cpus: Some(cpus.clone()),
            cpus,
            hasher,
            verify: Verify::Checksums,
            coalesce: Coalesce::default(),
            rps_flow_cnt: RPS_FLOW_CNT,
            rps_sock_flow_entries: RPS_SOCK_FLOW_ENTRIES,
            limits: Limits {
                netdev_budget_usecs: Machine::here().netdev_budget_usecs_min(),
                ..Limits::default()
            },
            move_after: MoveAfter::default(),
            hold_max: HOLD_MAX,
            spread: SpreadPolicy::default(),
            balance: BalanceConfig::default(),
            netdev_max_backlog: NETDEV_MAX_BACKLOG,
            batch_max: u32::try_from(DEV_WEIGHT).unwrap_or(u32::MAX),
            start_counters: 0,
            script: Script::default(),
            explain: Vec::new(),
            when_full: WhenFull::default(),
            spin_max_ns: SPIN_MAX_NS,
            spare_frames: 0,
            kept_frames: 0,
            senders: 0,
            small_frames: 0,
            trace: None,
        }
    }

    /// Configuration for live devices: all CPUs that this process may use, packets steered to those
    /// that share a cache with the polling ones, a random hash key, and drops at a full backlog.
    #[must_use]
    pub fn live() -> Self {
        let cpus = CpuList::new(sys::allowed_cpus());
        let hasher = Hasher::keyed(&sys::random_key(), false);
        let hasher = Arc::new(hasher.with_rules(FlowKeyRules::default()));
        Self {
            rps_cpus: None,
            when_full: WhenFull::Drop,
            spare_frames: SPARE_FRAMES,
            ..Self::new(cpus, hasher)
        }
    }

    /// True if `like` holds for the coalescing of this configuration at any time of the run,
    /// scripted changes included.
    #[must_use]
    pub fn coalesces(&self, like: impl Fn(&Coalesce) -> bool) -> bool {
        let mut coalesce = self.coalesce;
        let changes = self.script.changes().iter();
        let after = changes.filter_map(|scripted| match scripted.change {
            Change::Coalesce(change) => Some(change),
            _ => None,
        });
        like(&coalesce)
            || after.into_iter().any(|change| {
                coalesce = coalesce.after(change);
                like(&coalesce)
            })
    }

    /// Sizes of delivered batches. A trace shows when each packet was processed, so the backlog's head must follow each
    /// packet. In virtual time, all of a batch are processed at the time at which the head moves.
    pub(super) fn batches(&self, clock: &Clock) -> BatchSizes {
        let is_each_shown = self.trace.is_some() && !clock.is_virtual();
        BatchSizes { packets_max: self.batch_max, is_each_shown }
    }

    /// Copy for an engine of that many queues, on the machine of this `/sys`: with CPUs that packets go to, and with a random seed
    /// for coalescing.
    pub(super) fn completed(&self, queues: usize, sysfs: &Path) -> Self {
        let mut completed = self.clone();
        let near = || Topology::read(sysfs, &self.cpus).near_polling(queues, &self.cpus);
        completed.rps_cpus.get_or_insert_with(near);
        let seed = sys::random_key().first_chunk().copied().map_or(0, u64::from_ne_bytes);
        completed.coalesce.config.seed = seed;
        completed
    }

    /// CPUs that packets go to; all until the configuration is [completed](Self::completed).
    pub(super) fn rps_map(&self) -> &CpuList {
        self.rps_cpus.as_ref().unwrap_or(&self.cpus)
    }

    /// Initial polling CPU of a queue: round-robin.
    pub(super) fn polls(&self, queue: usize) -> CpuId {
        let cpus = self.cpus.cpus();
        cpus[queue % cpus.len()]
    }

    /// Recorder of one queue's or CPU's part of the trace.
    pub(super) fn intake_trace(&self) -> Option<IntakeTrace> {
        let trace = Arc::clone(self.trace.as_ref()?);
        Some(IntakeTrace::new(trace, Arc::clone(&self.hasher), self.verify))
    }

    /// One more than the highest CPU.
    pub(super) fn cpu_count(&self) -> usize {
        self.cpus.cpus().last().map_or(0, |cpu| cpu.index() + 1)
    }

    /// Slots of each backlog ring: room for the largest limit of the run.
    pub(super) fn backlog_capacity(&self) -> u32 {
        let limits = self.script.changes().iter().map(|change| match change.change {
            Change::NetdevMaxBacklog(limit) => limit,
            _ => 0,
        });
        capacity_for(limits.fold(self.netdev_max_backlog, u32::max))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Four CPUs, two to a cache.
    #[test]
    fn rps_c1_default_mask_follows_the_queues() {
        let sysfs = tempfile::tempdir().unwrap();
        for cpu in 0..4 {
            let cache = sysfs.path().join(format!("devices/system/cpu/cpu{cpu}/cache/index0"));
            fs::create_dir_all(&cache).unwrap();
            let shared = if cpu < 2 { "0-1" } else { "2-3" };
            for (file, text) in [("type", "Unified"), ("level", "3"), ("shared_cpu_list", shared)] {
                fs::write(cache.join(file), text).unwrap();
            }
        }
        let cpus = CpuList::new((0..4).map(CpuId));
        let new = Config::new(cpus, Arc::new(Hasher::keyed(&[1; 16], false)));
        let config = Config { rps_cpus: None, ..new };
        for (queues, near) in [(1, "0-1"), (2, "0-1"), (3, "0-3"), (4, "0-3"), (9, "0-3")] {
            let completed = config.completed(queues, sysfs.path());
            assert_eq!(completed.rps_cpus, CpuList::parse_list(near).ok(), "{queues} queues");
            assert_eq!(completed.completed(1, sysfs.path()).rps_cpus, completed.rps_cpus);
        }
    }
}
