//! Changes at an intake while packets flow. Each change counts from the next packet on, and
//! begins an epoch, by which traces tell packets before and after.

use std::sync::Arc;

use super::Intake;
use crate::backlog::FlowLimit;
use crate::coalesce::{CoalesceConfig, Coalescer, FlushReason};
use crate::cpu::CpuId;
use crate::hash::Hasher;
use crate::steer::{BalanceConfig, FlowTables, RpsMap, SockFlowTable};

impl Intake {
    /// Replaces the RPS map; the next packet is steered by the new one, as epoch `epoch`. CPUs
    /// that the intake is not connected to, or that do not run, are left out (RPS-9).
    pub fn set_rps_cpus(&mut self, cpus: impl IntoIterator<Item = CpuId>, epoch: u32) {
        self.steering.set_rps_map(RpsMap::new(cpus));
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Says which CPUs run. To the others no packet goes but behind its own predecessors, and they
    /// leave by the drain rule; `rps_cpus` still asks for them when they come back.
    pub fn set_running(&mut self, cpus: impl IntoIterator<Item = CpuId>, epoch: u32) {
        let connected: Vec<_> = self.backlogs.cpus().collect();
        let cpus = cpus.into_iter().filter(|cpu| connected.contains(cpu));
        self.steering.set_running(RpsMap::new(cpus));
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Says which CPU polls the queue from now on: what is not steered is delivered there.
    pub fn set_polling_cpu(&mut self, cpu: CpuId, epoch: u32) {
        self.steering.set_polling_cpu(cpu);
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Replaces the table that applications record in where they run; none turns RFS off.
    pub fn set_sock_flows(&mut self, sock_flows: Option<Arc<SockFlowTable>>, epoch: u32) {
        self.steering.set_sock_flows(sock_flows);
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Replaces the flow table by one of another size, which knows where every flow is; 0 turns RFS
    /// off for this queue (RFS-10). It is made here and now: see [`set_flow_tables`](Self::set_flow_tables).
    pub fn set_rps_flow_cnt(&mut self, rps_flow_cnt: u32, epoch: u32) {
        self.set_flow_tables(FlowTables::new(rps_flow_cnt), epoch);
    }

    /// The same, with a table that was made elsewhere: however large it is, this takes no longer.
    pub fn set_flow_tables(&mut self, tables: FlowTables, epoch: u32) {
        match &mut self.hashed_before {
            // In the next turn, with the new hashes.
            Some((_, of_hashes)) => {
                let unused = std::mem::replace(of_hashes, tables);
                self.steering.retire(unused);
            }
            None => self.steering.set_flow_tables(tables, self.now_ns, &self.backlogs),
        }
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Has flows hash differently from the next packet on. Packets keep the hashes they have: what
    /// is here goes on in the next turn, before slots lose their meaning. A flow table is made here and
    /// now: see [`set_hasher_with`](Self::set_hasher_with).
    pub fn set_hasher(&mut self, hasher: Arc<Hasher>, epoch: u32) {
        let tables = match &self.hashed_before {
            Some((_, next)) => next.alike(),
            None => self.steering.tables_alike(),
        };
        self.set_hasher_with(hasher, tables, epoch);
    }

    /// The same, with a flow table that was made elsewhere.
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

    /// Changes how hash ranges are assigned to CPUs.
    pub fn set_balance(&mut self, config: BalanceConfig, epoch: u32) {
        self.steering.set_balance(config);
        self.backlogs.watch();
        self.epoch = epoch;
    }

    /// Takes a flow table that is of no more use, to be freed where nobody waits for it.
    pub fn take_retired(&mut self) -> Option<FlowTables> {
        self.steering.take_retired()
    }

    /// Changes how many packets a backlog takes. See
    /// [`Backlogs`](crate::backlog::Backlogs::set_netdev_max_backlog).
    pub fn set_netdev_max_backlog(&mut self, packets: u32, epoch: u32) {
        self.backlogs.set_netdev_max_backlog(packets);
        self.epoch = epoch;
    }

    /// Turns the flow limit on or off.
    pub fn set_flow_limit(&mut self, flow_limit: Option<FlowLimit>, epoch: u32) {
        self.backlogs.set_flow_limit(flow_limit);
        self.epoch = epoch;
    }

    /// Changes how packets are coalesced before steering, if they are. What is held goes first.
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

    /// Notes a change that concerns somebody else, so that traces tell packets before and after.
    pub fn set_epoch(&mut self, epoch: u32) {
        self.epoch = epoch;
    }
}
