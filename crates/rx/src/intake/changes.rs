//! Live changes of an intake. Each change applies from the next packet on and begins an epoch, by
//! which traces tell packets before and after it.

use std::sync::Arc;

use super::Intake;
use crate::backlog::FlowLimit;
use crate::coalesce::{CoalesceConfig, Coalescer, FlushReason};
use crate::cpu::CpuId;
use crate::hash::Hasher;
use crate::steer::{BalanceBoard, BalanceConfig, FlowTables, RpsMap, SockFlowTable, SpreadConfig};

impl Intake {
    /// Replaces the RPS map from the next packet on, in epoch `epoch`. CPUs without a connection,
    /// or that do not run, are left out (RPS-9).
    pub fn set_rps_cpus(&mut self, cpus: impl IntoIterator<Item = CpuId>, epoch: u32) {
        self.steering.set_rps_map(RpsMap::new(cpus));
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Sets the running CPUs. The others get no packets except behind predecessors of the same
    /// flow, and their flows leave by the drain rule. `rps_cpus` keeps such CPUs for when they run
    /// again.
    pub fn set_running(&mut self, cpus: impl IntoIterator<Item = CpuId>, epoch: u32) {
        let connected: Vec<_> = self.backlogs.cpus().collect();
        let cpus = cpus.into_iter().filter(|cpu| connected.contains(cpu));
        self.steering.set_running(RpsMap::new(cpus));
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Sets the CPU that polls the queue from now on; unsteered packets are delivered there.
    pub fn set_polling_cpu(&mut self, cpu: CpuId, epoch: u32) {
        self.steering.set_polling_cpu(cpu);
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Replaces the table in which applications record their CPUs; `None` turns RFS off.
    pub fn set_sock_flows(&mut self, sock_flows: Option<Arc<SockFlowTable>>, epoch: u32) {
        self.steering.set_sock_flows(sock_flows);
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Replaces the flow table by one of another size that keeps the flows' current CPUs; 0 turns
    /// RFS off for this queue (RFS-10). The new table is allocated in this call;
    /// [`set_flow_tables`](Self::set_flow_tables) takes a ready one.
    pub fn set_rps_flow_cnt(&mut self, rps_flow_cnt: u32, epoch: u32) {
        self.set_flow_tables(FlowTables::new(rps_flow_cnt), epoch);
    }

    /// Replaces the flow table by one allocated elsewhere, in a time that does not depend on its
    /// size.
    pub fn set_flow_tables(&mut self, tables: FlowTables, epoch: u32) {
        match &mut self.hashed_before {
            // Installed in the next turn, together with the new hashes.
            Some((_, of_hashes)) => {
                let unused = std::mem::replace(of_hashes, tables);
                self.steering.retire(unused);
            }
            None => self.steering.set_flow_tables(tables, self.now_ns, &self.backlogs),
        }
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Replaces the hash function from the next packet on. Packets already in the intake keep their
    /// hashes and are steered in the next turn, before the slots lose their meaning. A flow table
    /// is allocated in this call; [`set_hasher_with`](Self::set_hasher_with) takes a ready one.
    pub fn set_hasher(&mut self, hasher: Arc<Hasher>, epoch: u32) {
        let tables = match &self.hashed_before {
            Some((_, next)) => next.alike(),
            None => self.steering.tables_alike(),
        };
        self.set_hasher_with(hasher, tables, epoch);
    }

    /// Replaces the hash function, with a flow table allocated elsewhere.
    pub fn set_hasher_with(&mut self, hasher: Arc<Hasher>, tables: FlowTables, epoch: u32) {
        if let Some(coalescer) = &mut self.coalescer {
            coalescer.flush(FlushReason::Switch, &mut self.coalesced);
        }
        let hashed_before = Some((self.coalesced.len(), tables));
        if let Some((_, unused)) = std::mem::replace(&mut self.hashed_before, hashed_before) {
            self.steering.retire(unused);
        }
        self.hasher = hasher;
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Makes the queue balance as one with all that share the board.
    pub fn set_board(&mut self, board: Arc<BalanceBoard>) {
        self.steering.set_board(board, self.queue);
    }

    /// Replaces the configuration of the balance.
    pub fn set_balance(&mut self, config: BalanceConfig, epoch: u32) {
        self.steering.set_balance(config);
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Changes how many CPUs the load gets.
    pub fn set_spread(&mut self, config: SpreadConfig, epoch: u32) {
        self.steering.set_spread(config);
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Takes a retired flow table, to be freed off the path.
    pub fn take_retired(&mut self) -> Option<FlowTables> {
        self.steering.take_retired()
    }

    /// Sets the length of the backlogs, in packets. See
    /// [`Backlogs`](crate::backlog::Backlogs::set_netdev_max_backlog).
    pub fn set_netdev_max_backlog(&mut self, packets: u32, epoch: u32) {
        self.backlogs.set_netdev_max_backlog(packets);
        self.epoch = epoch;
    }

    /// Turns the flow limit on or off. Returns the one before, to be freed off the path.
    pub fn set_flow_limit(
        &mut self,
        flow_limit: Option<FlowLimit>,
        epoch: u32,
    ) -> Option<FlowLimit> {
        self.epoch = epoch;
        self.backlogs.set_flow_limit(flow_limit)
    }

    /// True if the flow limit is on.
    #[must_use]
    pub fn has_flow_limit(&self) -> bool {
        self.backlogs.has_flow_limit()
    }

    /// Replaces the configuration of coalescing before steering; `None` turns it off. Held packets
    /// are flushed first.
    pub fn set_coalesce(&mut self, coalesce: Option<CoalesceConfig>, epoch: u32) {
        match (&mut self.coalescer, coalesce) {
            (Some(coalescer), Some(config)) => coalescer.set_config(config, &mut self.coalesced),
            (Some(coalescer), None) => coalescer.flush(FlushReason::Switch, &mut self.coalesced),
            (None, _) => {}
        }
        let counters = &self.counters.coalesce;
        self.coalescer = coalesce.map(|config| {
            let present = self.coalescer.take();
            present.unwrap_or_else(|| Coalescer::new(config, Arc::clone(counters)))
        });
        self.epoch = epoch;
    }

    /// Begins an epoch for a change outside the intake, so that traces tell packets before and
    /// after it.
    pub fn set_epoch(&mut self, epoch: u32) {
        self.epoch = epoch;
    }
}
