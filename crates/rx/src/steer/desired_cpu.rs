//! Desired CPU of a flow: the CPU of its application by the socket-flow table, else the CPU that
//! its hash range is assigned to by load, else the RPS map's.
//!
//! An application on a CPU outside the map is not followed, unless there is no map.

use std::sync::Arc;

use forebay_buf::Position;

use super::balance::{Balance, BalanceBoard, BalanceConfig, BalanceRound, CpuLoad};
use super::flow_table::{CurrentCpu, FlowTable};
use super::ids::SlotId;
use super::meter::Meter;
use super::rps::RpsMap;
use super::sock_flow::SockFlowTable;
use super::spread::{Spread, SpreadConfig, SpreadPolicy};
use crate::arrive::PollStatus;
use crate::cpu::CpuId;
use crate::hash::FlowHash;
use crate::packet::Packet;
use crate::steer_reason::SteerReason;

/// Difference of two CPUs' other work in a window below which they count as equal.
const SLACK_NS: u64 = 1_000_000;

/// Source of the desired CPUs of one queue's flows.
#[derive(Debug)]
pub(super) struct DesiredCpus {
    polling_cpu: CpuId,
    /// `rps_cpus` as requested.
    asked: RpsMap,
    /// Running CPUs.
    running: RpsMap,
    /// Requested CPUs that run (RPS-9).
    map: RpsMap,
    /// Part of `map` that the load needs now.
    active: RpsMap,
    /// True if `active` is not all of `map`.
    is_partial: bool,
    /// True if packets that are not steered for another reason stay on the polling CPU.
    is_gathered: bool,
    /// True for each CPU to which applications are followed, by index.
    followed: Box<[bool]>,
    sock_flows: Option<Arc<SockFlowTable>>,
    /// True if the queue has a flow table in the kernel's sense: without one there is no RFS.
    has_rfs: bool,
    spread: Spread,
    meter: Meter,
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
            active: RpsMap::default(),
            is_partial: false,
            is_gathered: false,
            followed: Box::default(),
            sock_flows: None,
            has_rfs: true,
            spread: Spread::new(spread),
            meter: Meter::default(),
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
        self.of_slot(hash, table, slot, || table.get(slot).current_cpu())
    }

    /// Desired CPU of a packet of a slot with that current CPU, and the reason.
    #[inline]
    pub(super) fn of_slot(
        &self,
        hash: FlowHash,
        table: &FlowTable,
        slot: SlotId,
        current_cpu: impl FnOnce() -> CurrentCpu,
    ) -> (CpuId, SteerReason) {
        let inline = (self.polling_cpu, SteerReason::Inline);
        if !hash.is_some() {
            return inline;
        }
        if let Some(cpu) = self.application(hash) {
            return (cpu, SteerReason::Rfs);
        }
        if self.is_gathered {
            return self.in_active(self.polling_cpu, hash);
        }
        if let Some(cpu) = self.balance.cpu_of(hash) {
            return (cpu, SteerReason::Balance);
        }
        let Some(cpu) = self.active.select(hash) else { return inline };
        let cpu = match current_cpu() {
            // A boundary of the map is inside the slot. Either side is right; the slot stays,
            // instead of moving back and forth with every packet.
            CurrentCpu::On(at) if at != cpu && self.straddles(table, slot, at) => at,
            _ => cpu,
        };
        self.in_active(cpu, hash)
    }

    /// CPU of the active ones, with the reason: the map has it for this flow, or has another one that is not needed.
    #[inline]
    fn in_active(&self, cpu: CpuId, hash: FlowHash) -> (CpuId, SteerReason) {
        let is_by_map = !self.is_partial || self.map.select(hash) == Some(cpu);
        (cpu, if is_by_map { SteerReason::Rps } else { SteerReason::Spread })
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

    pub(super) fn set_polling_cpu(&mut self, cpu: CpuId) {
        self.polling_cpu = cpu;
        self.update();
    }

    /// Takes note of a poll, and of the state of its source afterwards.
    pub(super) fn note_poll(&mut self, status: PollStatus) {
        self.balance.note_poll(self.polling_cpu, status);
    }

    /// Evaluates the bursts, once a turn. Returns true if desired CPUs have changed.
    pub(super) fn update_spread(
        &mut self,
        now_ns: u64,
        full_burst: bool,
        tails: impl Iterator<Item = (CpuId, Position)>,
    ) -> bool {
        if !self.spread.is_followed() {
            return false;
        }
        if self.spread.is_mark_due(now_ns) {
            self.meter.mark(tails);
        }
        self.spread.update(now_ns, full_burst) && self.choose()
    }

    /// True if the loads of all CPUs are due to be read.
    pub(super) fn is_load_due(&self, now_ns: u64) -> bool {
        self.spread.is_due(now_ns) || self.balance.is_due(now_ns)
    }

    /// Decides how many CPUs the load needs, from the loads of all, by [`CpuId::index`], and the frames that the queue has
    /// taken in. Returns true if desired CPUs have changed.
    pub(super) fn resize(
        &mut self,
        now_ns: u64,
        (loads, frames): (&[CpuLoad], u64),
        ends: impl Iterator<Item = (CpuId, [Position; 2])>,
    ) -> bool {
        if !self.spread.is_due(now_ns) {
            return false;
        }
        let past_ns = self.meter.end_window(now_ns, loads, ends, (self.polling_cpu, frames));
        let load = self.meter.load(past_ns, &self.map, &self.active);
        self.spread.end_window(now_ns, load) && self.choose()
    }

    /// Notes where the backlog of a CPU begins.
    pub(super) fn connect(&mut self, cpu: CpuId, start: Position) {
        self.meter.connect(cpu, start);
    }

    /// Replaces the configuration of the spread.
    pub(super) fn set_spread(&mut self, config: SpreadConfig) {
        self.spread.set_config(config);
        self.choose();
    }

    /// Number of CPUs that the load needs now.
    pub(super) fn active_cpus(&self) -> usize {
        self.active.cpus().len()
    }

    /// Replaces the configuration of the balance.
    pub(super) fn set_balance(&mut self, config: BalanceConfig, table: &FlowTable) {
        self.balance.set_config(config, table.shift(), &self.active);
    }

    /// Adapts to a flow table of another size.
    pub(super) fn set_table(&mut self, table: &FlowTable) {
        self.balance.set_table(table.shift(), &self.active);
    }

    /// Resets the weights and CPUs of hash ranges, because flows hash differently from now on.
    pub(super) fn rehash(&mut self, table: &FlowTable) {
        self.balance.reset(table.shift(), &self.active);
    }

    /// Weighs packets: by group if balancing decides their CPU, otherwise by CPU.
    pub(super) fn weigh(&mut self, packets: &[Packet]) {
        if !self.balance.is_on() {
            return;
        }
        for hash in packets.iter().map(|packet| packet.hash) {
            match self.application(hash) {
                _ if !hash.is_some() => self.balance.weigh_fixed(self.polling_cpu),
                Some(cpu) => self.balance.weigh_fixed(cpu),
                None if self.active.cpus().is_empty() => self.balance.weigh_fixed(self.polling_cpu),
                None => self.balance.weigh(hash),
            }
        }
    }

    /// Balances the loads of all CPUs, by [`CpuId::index`].
    pub(super) fn balance(&mut self, now_ns: u64, loads: &[CpuLoad]) -> Option<BalanceRound> {
        if !self.balance.is_due(now_ns) {
            return None;
        }
        self.balance.round(now_ns, loads, &self.active)
    }

    /// Lets the queue balance together with all others on the board.
    pub(super) fn set_board(&mut self, board: Arc<BalanceBoard>, queue: usize) {
        self.balance.set_board(board, queue);
    }

    /// CPU of the flow's application, if it is followed there.
    #[inline]
    fn application(&self, hash: FlowHash) -> Option<CpuId> {
        let cpu = self.sock_flows.as_ref()?.desired(hash)?;
        (self.has_rfs && self.allows(cpu)).then_some(cpu)
    }

    /// True if the map has `cpu` for some flow of the slot. CPUs of the map ascend with the hash.
    fn straddles(&self, table: &FlowTable, slot: SlotId, cpu: CpuId) -> bool {
        let [first, last] = table.range(slot).map(|hash| self.active.select(hash));
        self.active.contains(cpu) && first <= Some(cpu) && Some(cpu) <= last
    }

    fn update(&mut self) {
        let running = |cpu: &CpuId| self.running.contains(*cpu);
        self.map = RpsMap::new(self.asked.cpus().iter().copied().filter(running));
        let followed = if self.map.cpus().is_empty() { &self.running } else { &self.map };
        let cpus = followed.cpus().last().map_or(0, |cpu| cpu.index() + 1);
        let cpus = (0..cpus).filter_map(|cpu| u16::try_from(cpu).ok()).map(CpuId);
        self.followed = cpus.map(|cpu| followed.contains(cpu)).collect();
        self.choose();
    }

    /// Chooses the CPUs that packets go to: the polling CPU, then those that have packets already, then those with the least
    /// other work. If the map lacks the polling CPU, it is used whole. Returns true if that changes them.
    fn choose(&mut self) -> bool {
        let size = self.spread.size(self.map.cpus().len());
        let mut chosen = self.map.cpus().to_vec();
        if self.map.contains(self.polling_cpu) {
            let others_ns = |cpu: &CpuId| self.meter.others_ns(*cpu) / SLACK_NS;
            let far = |cpu: &CpuId| cpu.0.wrapping_sub(self.polling_cpu.0);
            chosen.sort_by_key(|cpu| {
                (*cpu != self.polling_cpu, !self.active.contains(*cpu), others_ns(cpu), far(cpu))
            });
            chosen.truncate(size);
        }
        let before = std::mem::replace(&mut self.active, RpsMap::new(chosen));
        self.is_partial = self.active.cpus().len() < self.map.cpus().len();
        self.is_gathered = self.spread.is_gathered() && self.map.contains(self.polling_cpu);
        debug_assert!(
            self.active.cpus().iter().all(|cpu| self.allows(*cpu)),
            "a CPU of the set can be desired"
        );
        self.balance.set_map(&self.active);
        before != self.active
    }
}
