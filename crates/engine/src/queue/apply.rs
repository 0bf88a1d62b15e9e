//! Effect of a change on a queue.

use std::sync::Arc;

use forebay_rx::backlog::FlowLimit;

use super::Queue;
use crate::changes::{ChangedParts, Made};
use crate::deferred_free::Retired;
use crate::knobs::Change;
use crate::shared::EngineState;

impl Queue {
    /// Applies a change from the next packet on. The first queue to reach its epoch writes it to
    /// the trace.
    pub(super) fn apply(&mut self, made: &Made, shared: &EngineState) {
        self.scripted += usize::from(made.is_scripted);
        self.epoch = made.epoch;
        // A scripted change that was refused begins an epoch all the same.
        let Some(change) = &made.change else { return self.intake.set_epoch(made.epoch) };
        if !self.apply_to_intake(change, &made.parts, shared) {
            self.intake.set_epoch(made.epoch);
        }
        match change {
            Change::Pause(cpu) => shared.set_paused(*cpu, true, made.epoch),
            Change::Resume(cpu) => shared.set_paused(*cpu, false, made.epoch),
            _ => {}
        }
        if shared.announces(made.epoch)
            && let Some(trace) = &self.trace
        {
            let now_ns = shared.clock.now_ns();
            for (what, value) in &made.rows {
                trace.trace().changed(now_ns, made.epoch, what, value);
            }
        }
    }

    /// Applies a change to the intake. Returns true if that set the intake's epoch, too.
    fn apply_to_intake(
        &mut self,
        change: &Change,
        parts: &ChangedParts,
        shared: &EngineState,
    ) -> bool {
        let (epoch, number) = (self.epoch, self.number());
        match (change, parts) {
            (Change::RpsCpus(queues, cpus), _) if queues.contain(number) => {
                self.intake.set_rps_cpus(cpus.cpus().iter().copied(), epoch);
            }
            (_, ChangedParts::FlowTables(made)) => {
                // The change concerns other queues only.
                let Some(tables) = made.take(number) else { return false };
                self.intake.set_flow_tables(tables, epoch);
            }
            (_, ChangedParts::SockFlows(table)) => self.intake.set_sock_flows(table.clone(), epoch),
            (_, ChangedParts::Hasher(hasher, made)) => {
                let Some(tables) = made.take(number) else { return false };
                if let Some(trace) = &mut self.trace {
                    trace.set_hasher(Arc::clone(hasher));
                }
                self.intake.set_hasher_with(Arc::clone(hasher), tables, epoch);
            }
            (Change::Cpus(cpus), _) => {
                self.intake.set_running(cpus.cpus().iter().copied(), epoch);
            }
            (Change::NetdevMaxBacklog(packets), _) => {
                self.intake.set_netdev_max_backlog(*packets, epoch);
            }
            (Change::FlowLimitCpuBitmap(cpus), parts) => {
                self.flow_limit_cpus.clone_from(cpus);
                let made = match parts {
                    ChangedParts::FlowLimits(made) => made.take(number),
                    _ => None,
                };
                let before = self.replace_flow_limit(made);
                before.into_iter().for_each(|it| shared.reclaimer.take(Retired::FlowLimit(it)));
                return false;
            }
            (Change::Coalesce(change), _) => {
                self.coalesce = self.coalesce.after(*change);
                self.intake.set_coalesce(self.coalesce.on_arrival(), epoch);
            }
            (Change::Balance(change), _) => {
                self.balance = change.applied_to(self.balance);
                self.intake.set_balance(self.balance, epoch);
            }
            (Change::Spread(change), _) => {
                self.spread = change.applied_to(self.spread);
                self.intake.set_spread(self.spread, epoch);
            }
            _ => return false,
        }
        true
    }

    /// Takes the limit made for a new `flow_limit_cpu_bitmap`, and returns the one that is not used any more. If the
    /// polling CPU stays in the bitmap, it keeps its table. Otherwise the table before is freed, and the next one has
    /// `flow_limit_table_len` buckets (`flow_limit_cpu_sysctl` in net/core/sysctl_net_core.c).
    fn replace_flow_limit(&mut self, made: Option<FlowLimit>) -> Option<FlowLimit> {
        if self.intake.has_flow_limit() && self.flow_limit_cpus.contains(self.polling_cpu) {
            return made;
        }
        let on = self.intake.set_flow_limit(None, self.epoch);
        let before = std::mem::replace(&mut self.spare_flow_limit, made).or(on);
        self.update_flow_limit();
        before
    }

    /// Turns the flow limit on if the polling CPU is in `flow_limit_cpu_bitmap`, else off. The queue keeps the table
    /// meanwhile.
    pub(super) fn update_flow_limit(&mut self) {
        let limits = self.flow_limit_cpus.contains(self.polling_cpu);
        if limits != self.intake.has_flow_limit() {
            let next = if limits { self.spare_flow_limit.take() } else { None };
            let before = self.intake.set_flow_limit(next, self.epoch);
            self.spare_flow_limit = self.spare_flow_limit.take().or(before);
        }
    }
}
