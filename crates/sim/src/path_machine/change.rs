//! Live changes of the path.

use std::sync::Arc;

use forebay_rx::backlog::FlowLimit;
use forebay_rx::{CpuId, Intake};

use super::{PathMachine, build};
use crate::action::{SimChange, SimCoalesceAt};
use crate::machine::Poll;

/// Number of buckets of the flow limit: the kernel's default.
const FLOW_LIMIT_TABLE_LEN: u32 = 4_096;

impl PathMachine {
    pub(super) fn apply(&mut self, change: &SimChange, now_ns: u64) {
        self.epoch += 1;
        match change {
            SimChange::RpsCpus(cpus) => {
                self.rps_cpus = *cpus;
                self.each(|intake, epoch| intake.set_rps_cpus(cpus.iter(), epoch));
            }
            SimChange::RpsFlowCnt(count) => {
                self.each(|intake, epoch| intake.set_rps_flow_cnt(*count, epoch));
            }
            SimChange::SockFlowEntries(entries) => self.set_sock_flow_entries(*entries),
            SimChange::MaxBacklog(packets) => {
                self.netdev_max_backlog = *packets;
                self.each(|intake, epoch| intake.set_netdev_max_backlog(*packets, epoch));
            }
            SimChange::HashKey(hasher) => {
                self.each(|intake, epoch| intake.set_hasher(Arc::clone(hasher), epoch));
            }
            SimChange::Coalesce(at) => self.set_coalesce(*at),
            SimChange::FlowLimit(on) => {
                let limit = || on.then(|| FlowLimit::new(FLOW_LIMIT_TABLE_LEN)).flatten();
                self.each(|intake, epoch| drop(intake.set_flow_limit(limit(), epoch)));
            }
            SimChange::Online(cpus) => {
                self.running = *cpus;
                self.each(|intake, epoch| intake.set_running(cpus.iter(), epoch));
            }
            SimChange::PollingCpu(queue, cpu) => {
                let epoch = self.epoch;
                let queue = &mut self.queues[usize::from(queue.0)];
                queue.intake.set_polling_cpu(*cpu, epoch);
                queue.changed = true;
            }
            SimChange::CpuDead { .. } => {} // its thread drains by itself
        }
        self.announce(change, now_ns);
    }

    /// Begins an epoch in which nothing but flows' desired CPUs differs.
    pub(super) fn begin_epoch(&mut self) {
        self.epoch += 1;
        for queue in &mut self.queues {
            queue.intake.set_epoch(self.epoch);
        }
    }

    /// Makes a queue follow the load. A recording names every flow whose desired CPU this changes.
    pub(super) fn follow_load(&mut self, poll: &Poll<'_>) {
        let intake = &mut self.queues[usize::from(poll.queue.0)].intake;
        let flows = poll.traffic.flows().iter().filter(|flow| flow.queue == poll.queue);
        let desired =
            |intake: &Intake| flows.clone().map(|flow| intake.desired_of(flow.hash).0).collect();
        let before: Option<Vec<CpuId>> = self.recording.as_ref().map(|_| desired(intake));
        intake.follow_load(poll.now.ns, poll.loads);
        let Some(before) = before else { return };
        let after: Vec<CpuId> = desired(intake);
        if before == after {
            return;
        }
        self.begin_epoch();
        let ids = poll.traffic.flows().iter().zip(0_u32..);
        let ids = ids.filter(|(flow, _)| flow.queue == poll.queue).map(|(_, id)| id);
        for (id, (_, cpu)) in ids.zip(before.iter().zip(&after)).filter(|(_, (was, is))| was != is)
        {
            if let Some(recording) = &self.recording {
                recording.changed(poll.now.ns, self.epoch, "rfs_desired", &format!("{id}:{cpu}"));
            }
        }
    }

    fn each(&mut self, set: impl Fn(&mut Intake, u32)) {
        for queue in &mut self.queues {
            set(&mut queue.intake, self.epoch);
            queue.changed = true;
        }
    }

    /// Replaces the table. Applications record in the new one before it takes over the entries of
    /// the old one.
    fn set_sock_flow_entries(&mut self, entries: u32) {
        let cpus = u16::try_from(self.cpus.len()).unwrap_or(u16::MAX);
        let table = build::sock_flow_table(entries, cpus);
        let old = std::mem::replace(&mut self.sock_flows, table.clone());
        self.each(|intake, epoch| intake.set_sock_flows(table.clone(), epoch));
        if let (Some(new), Some(old)) = (&self.sock_flows, &old) {
            new.carry_over(old);
        }
    }

    fn set_coalesce(&mut self, at: SimCoalesceAt) {
        self.coalesce = at;
        self.merges |= at != SimCoalesceAt::Nowhere;
        let config = build::coalesce_config((at, SimCoalesceAt::Arrive), self.gro_flush_timeout_ns);
        self.each(|intake, epoch| intake.set_coalesce(config, epoch));
        for cpu in &mut self.cpus {
            cpu.coalesce_is_stale = true;
        }
    }

    fn announce(&self, change: &SimChange, now_ns: u64) {
        let Some(recording) = &self.recording else { return };
        let (what, value) = match change {
            SimChange::RpsCpus(_) | SimChange::Online(_) => ("rps_cpus", self.effective_mask()),
            SimChange::RpsFlowCnt(count) => ("rps_flow_cnt", count.to_string()),
            SimChange::SockFlowEntries(entries) => ("rps_sock_flow_entries", entries.to_string()),
            SimChange::MaxBacklog(packets) => ("netdev_max_backlog", packets.to_string()),
            SimChange::HashKey(_) => ("hash_key", "drawn".to_owned()),
            SimChange::Coalesce(at) => ("coalesce", format!("{at:?}").to_lowercase()),
            SimChange::FlowLimit(on) => ("flow_limit_cpu_bitmap", u8::from(*on).to_string()),
            SimChange::PollingCpu(queue, cpu) => ("cpus", format!("{queue} on {cpu}")),
            SimChange::CpuDead { .. } => return,
        };
        recording.changed(now_ns, self.epoch, what, &value);
    }
}
