//! Changes while packets flow: maps, CPUs, tables, and the load.

use std::sync::Arc;

use forebay_buf::Position;

use super::Steering;
use super::balance::{BalanceBoard, BalanceConfig, BalanceRound, CpuLoad};
use super::rps::RpsMap;
use super::sock_flow::SockFlowTable;
use super::spread::SpreadConfig;
use super::tables::FlowTables;
use crate::arrive::PollStatus;
use crate::backlog::Backlogs;
use crate::cpu::{CpuId, RxQueue};
use crate::packet::Packet;

impl Steering {
    /// Replaces the RPS map; flows move as their next packets arrive (RPS-11).
    pub fn set_rps_map(&mut self, rps_map: RpsMap) {
        self.desired_cpus.set_asked(rps_map);
    }

    /// Notes where the backlog of a new CPU begins.
    pub fn connect(&mut self, cpu: CpuId, start: Position) {
        self.desired_cpus.connect(cpu, start);
    }

    /// Sets the running CPUs: the others get no new flows (RPS-9), and their flows leave.
    pub fn set_running(&mut self, running: RpsMap) {
        self.desired_cpus.set_running(running);
    }

    /// Sets the polling CPU.
    pub fn set_polling_cpu(&mut self, cpu: CpuId) {
        self.desired_cpus.set_polling_cpu(cpu);
    }

    /// Replaces the socket-flow table.
    pub fn set_sock_flows(&mut self, sock_flows: Option<Arc<SockFlowTable>>) {
        self.desired_cpus.set_sock_flows(sock_flows);
    }

    /// Replaces the flow table. The old one is read until all packets that it knows are processed.
    pub fn set_flow_tables(&mut self, tables: FlowTables, now_ns: u64, backlogs: &Backlogs) {
        self.desired_cpus.set_rfs(tables.has_rfs);
        self.desired_cpus.set_table(&tables.slots);
        self.tables.replace(tables, self.fences.to_raise());
        self.raise_fence(now_ns, backlogs);
    }

    /// Replaces the flow table after a change of the hash key, which makes recorded slots void.
    pub fn rehash(&mut self, tables: FlowTables, now_ns: u64, backlogs: &Backlogs) {
        self.desired_cpus.set_rfs(tables.has_rfs);
        self.desired_cpus.rehash(&tables.slots);
        self.tables.replace_by_fence(tables, self.fences.to_raise());
        self.journal.forget_moves();
        self.raise_fence(now_ns, backlogs);
    }

    /// Keeps a retired flow table until it is [taken](Self::take_retired).
    pub fn retire(&mut self, tables: FlowTables) {
        self.tables.retire(tables);
    }

    /// Takes a retired flow table, to be freed off the path.
    pub fn take_retired(&mut self) -> Option<FlowTables> {
        self.tables.take_retired()
    }

    /// Creates empty tables of the current size.
    #[must_use]
    pub fn tables_alike(&self) -> FlowTables {
        self.tables.now.alike()
    }

    /// Takes note of a poll, and of the state of its source afterwards.
    pub fn note_poll(&mut self, status: PollStatus) {
        self.desired_cpus.note_poll(status);
    }

    /// Evaluates the bursts, once a turn. Returns true if desired CPUs have changed.
    pub fn update_spread(&mut self, now_ns: u64, full_burst: bool, backlogs: &Backlogs) -> bool {
        self.desired_cpus.update_spread(now_ns, full_burst, backlogs.tails())
    }

    /// Replaces the configuration of the spread.
    pub fn set_spread(&mut self, config: SpreadConfig) {
        self.desired_cpus.set_spread(config);
    }

    /// Number of CPUs that the load needs now.
    #[must_use]
    pub fn active_cpus(&self) -> usize {
        self.desired_cpus.active_cpus()
    }

    /// Decides how many CPUs the load needs, from the loads of all CPUs and the frames that the queue has taken in. Returns
    /// true if desired CPUs have changed.
    pub fn resize(
        &mut self,
        now_ns: u64,
        loads: (&[CpuLoad], u64),
        backlogs: &mut Backlogs,
    ) -> bool {
        self.desired_cpus.resize(now_ns, loads, backlogs.ends())
    }

    /// Replaces the configuration of the balance.
    pub fn set_balance(&mut self, config: BalanceConfig) {
        self.desired_cpus.set_balance(config, &self.tables.now.slots);
    }

    /// Weighs packets for the balance, if it is on.
    pub fn weigh(&mut self, packets: &[Packet]) {
        self.desired_cpus.weigh(packets);
    }

    /// True if the loads of all CPUs are due to be read.
    #[must_use]
    pub fn is_load_due(&self, now_ns: u64) -> bool {
        self.desired_cpus.is_load_due(now_ns)
    }

    /// Lets the queue balance together with all others on the board, under this number.
    pub fn set_board(&mut self, board: Arc<BalanceBoard>, queue: RxQueue) {
        self.desired_cpus.set_board(board, queue.0.into());
    }

    /// Balances the loads of all CPUs, by [`CpuId::index`]; `None` if there is nothing to compare
    /// with.
    pub fn balance(&mut self, now_ns: u64, loads: &[CpuLoad]) -> Option<BalanceRound> {
        self.desired_cpus.balance(now_ns, loads)
    }

    fn raise_fence(&mut self, now_ns: u64, backlogs: &Backlogs) {
        self.fences.raise(&mut self.holds, backlogs);
        debug_assert!(self.fences.is_any(), "a replaced table has a fence behind its packets");
        self.watch_anew(now_ns);
    }
}
