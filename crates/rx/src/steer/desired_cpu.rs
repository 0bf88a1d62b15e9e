//! Desired CPU of a flow: the CPU of its application by the socket-flow table, else the CPU that
//! its hash range is assigned to by load, else the RPS map's.
//!
//! An application on a CPU outside the map is not followed, unless there is no map.

use std::sync::Arc;

use forebay_buf::Position;

use super::balance::{Balance, BalanceConfig, BalanceRound, CpuLoad};
use super::flow_table::{CurrentCpu, FlowTable};
use super::ids::SlotId;
use super::rps::RpsMap;
use super::sock_flow::SockFlowTable;
use super::spread::{Spread, SpreadPolicy, Tick};
use crate::cpu::CpuId;
use crate::hash::FlowHash;
use crate::packet::Packet;
use crate::steer_reason::SteerReason;

/// Source of the desired CPUs of one queue's flows.
#[derive(Debug)]
pub(super) struct DesiredCpus {
    pub(super) polling_cpu: CpuId,
    /// `rps_cpus` as requested.
    asked: RpsMap,
    /// Running CPUs.
    running: RpsMap,
    /// Requested CPUs that run (RPS-9).
    map: RpsMap,
    /// True for each CPU to which applications are followed, by index.
    followed: Box<[bool]>,
    sock_flows: Option<Arc<SockFlowTable>>,
    /// True if the queue has a flow table in the kernel's sense: without one there is no RFS.
    has_rfs: bool,
    spread: Spread,
    balance: Balance,
}

impl DesiredCpus {
    /// Creates a source of desired CPUs with an empty map.
    pub(super) fn new(polling_cpu: CpuId, spread: SpreadPolicy) -> Self {
        Self {
            polling_cpu,
            asked: RpsMap::default(),
            running: RpsMap::default(),
            map: RpsMap::default(),
            followed: Box::default(),
            sock_flows: None,
            has_rfs: true,
            spread: Spread::new(spread),
            balance: Balance::default(),
        }
    }

    /// Desired CPU of a packet, and the reason.
    #[inline]
    pub(super) fn of(
        &self,
        hash: FlowHash,
        table: &FlowTable,
        slot: SlotId,
    ) -> (CpuId, SteerReason) {
        let inline = (self.polling_cpu, SteerReason::Inline);
        if !hash.is_some() {
            return inline;
        }
        if let Some(cpu) = self.application(hash) {
            return (cpu, SteerReason::Rfs);
        }
        if !self.spread.is_spreading() && self.map.contains(self.polling_cpu) {
            return inline;
        }
        if let Some(cpu) = self.balance.cpu_of(hash) {
            return (cpu, SteerReason::Balance);
        }
        let Some(cpu) = self.map.select(hash) else { return inline };
        match table.get(slot).current_cpu() {
            // A boundary of the map is inside the slot. Either side is right; the slot stays,
            // instead of moving back and forth with every packet.
            CurrentCpu::On(at) if at != cpu && self.straddles(table, slot, at) => {
                (at, SteerReason::Rps)
            }
            _ => (cpu, SteerReason::Rps),
        }
    }

    #[inline]
    pub(super) fn prefetch(&self, hash: FlowHash) {
        if let Some(sock_flows) = &self.sock_flows {
            sock_flows.prefetch(hash);
        }
    }

    /// True if `cpu` can be a desired CPU.
    pub(super) fn allows(&self, cpu: CpuId) -> bool {
        self.followed.get(cpu.index()).copied().unwrap_or(false)
    }

    /// True if a packet may go to `cpu`. Without a hash, only the polling CPU is allowed.
    pub(super) fn may_go_to(&self, hash: FlowHash, cpu: CpuId) -> bool {
        if hash.is_some() { self.allows(cpu) } else { cpu == self.polling_cpu }
    }

    pub(super) fn set_asked(&mut self, asked: RpsMap) {
        self.asked = asked;
        self.update();
    }

    pub(super) fn set_running(&mut self, running: RpsMap) {
        self.running = running;
        self.update();
    }

    pub(super) fn set_sock_flows(&mut self, sock_flows: Option<Arc<SockFlowTable>>) {
        self.sock_flows = sock_flows;
    }

    pub(super) fn set_rfs(&mut self, has_rfs: bool) {
        self.has_rfs = has_rfs;
    }

    /// See [`Spread::update`].
    pub(super) fn update_spread(&mut self, tick: Tick, full_burst: bool) -> bool {
        self.spread.update(tick, full_burst)
    }

    /// Replaces the configuration of the balance.
    pub(super) fn set_balance(&mut self, config: BalanceConfig, table: &FlowTable) {
        self.balance.set_config(config, table.shift(), &self.map);
    }

    /// Adapts to a flow table of another size.
    pub(super) fn set_table(&mut self, table: &FlowTable) {
        self.balance.set_table(table.shift(), &self.map);
    }

    /// Resets the weights and CPUs of hash ranges, because flows hash differently from now on.
    pub(super) fn rehash(&mut self, table: &FlowTable) {
        self.balance.reset(table.shift(), &self.map);
    }

    /// Weighs the packets whose CPU can be balanced: those with a hash and without a followed
    /// application.
    pub(super) fn weigh(&mut self, packets: &[Packet]) {
        if !self.balance.is_on() {
            return;
        }
        for hash in packets.iter().map(|packet| packet.hash) {
            if hash.is_some() && self.application(hash).is_none() {
                self.balance.weigh(hash);
            }
        }
    }

    /// True if a balancing round is due.
    pub(super) fn is_balance_due(&self, now_ns: u64) -> bool {
        self.balance.is_due(now_ns)
    }

    /// Balances the loads of all CPUs, by [`CpuId::index`].
    pub(super) fn balance(
        &mut self,
        now_ns: u64,
        loads: &[CpuLoad],
        heads: impl Iterator<Item = (CpuId, Position)>,
    ) -> Option<BalanceRound> {
        if !self.spread.is_spreading() {
            self.balance.pause();
            return None;
        }
        self.balance.round(now_ns, loads, heads, &self.map)
    }

    /// CPU of the flow's application, if it is followed there.
    #[inline]
    fn application(&self, hash: FlowHash) -> Option<CpuId> {
        let cpu = self.sock_flows.as_ref()?.desired(hash)?;
        (self.has_rfs && self.allows(cpu)).then_some(cpu)
    }

    /// True if the map has `cpu` for some flow of the slot. CPUs of the map ascend with the hash.
    fn straddles(&self, table: &FlowTable, slot: SlotId, cpu: CpuId) -> bool {
        let [first, last] = table.range(slot).map(|hash| self.map.select(hash));
        self.map.contains(cpu) && first <= Some(cpu) && Some(cpu) <= last
    }

    fn update(&mut self) {
        let running = |cpu: &CpuId| self.running.contains(*cpu);
        self.map = RpsMap::new(self.asked.cpus().iter().copied().filter(running));
        let followed = if self.map.cpus().is_empty() { &self.running } else { &self.map };
        let cpus = followed.cpus().last().map_or(0, |cpu| cpu.index() + 1);
        let cpus = (0..cpus).filter_map(|cpu| u16::try_from(cpu).ok()).map(CpuId);
        self.followed = cpus.map(|cpu| followed.contains(cpu)).collect();
        debug_assert!(
            self.map.cpus().iter().all(|cpu| self.allows(*cpu)),
            "a CPU of the map can be desired"
        );
        self.balance.set_map(&self.map);
    }
}
