//! Changes and faults: their details are drawn when they occur.

use std::fmt;

use forebay_rx::{CpuId, RxQueue};

use super::{Happening, World};
use crate::action::{Action, Recurring, SimChange, SimCoalesceAt, Span};
use crate::cpu_set::CpuSet;
use crate::machine::SimMachine;
use crate::traffic::FlowId;
use crate::virtual_cpu::Doing;

/// Interval of checks for the stop of a CPU that was taken offline.
const NOTICE_NS: u64 = 5_000;

impl<M: SimMachine> World<M> {
    pub(super) fn happen(&mut self, what: Happening) {
        match what {
            Happening::Recurs(index) => {
                // Recurring actions end with the traffic, so that the run comes to rest.
                if !self.traffic.has_ended() {
                    self.act(self.scenario.recurring[index].action);
                    self.recur(index);
                }
            }
            Happening::Reads(flow) => self.read(flow),
            Happening::Resumes(cpu) => {
                self.cpu(cpu).paused -= 1;
                self.note("resume", &cpu);
                self.resume(cpu);
            }
            Happening::RunsFastAgain(cpu) => self.cpu(cpu).slowed -= 1,
            Happening::IsReplaced(cpu) => {
                self.cpu(cpu).dead = false;
                self.cpu(cpu).sleep(None);
                self.resume(cpu);
            }
            Happening::IsNoticed(cpu) => self.notice(cpu),
            Happening::ComesBack(cpu) => self.put_back(cpu),
            Happening::IsLookedAt => self.look_at_assignment(),
        }
    }

    pub(super) fn recur(&mut self, index: usize) {
        let Recurring { every_ns, .. } = self.scenario.recurring[index];
        let ns = every_ns.draw(&mut self.chance);
        self.after(ns, Happening::Recurs(index));
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::RpsCpus { least } => {
                let all = self.scenario.knobs.rps_cpus;
                let cpus = CpuSet::draw(all, least, &mut self.chance);
                self.change(&SimChange::RpsCpus(cpus));
            }
            Action::RpsFlowCnt(sizes) => {
                let change = SimChange::RpsFlowCnt(self.one_of(sizes));
                self.change(&change);
                self.replace_slots();
            }
            Action::SockFlowEntries(sizes) => {
                let change = SimChange::SockFlowEntries(self.one_of(sizes));
                self.change(&change);
            }
            Action::MaxBacklog(limits) => {
                let change = SimChange::MaxBacklog(self.one_of(limits));
                self.check();
                self.change(&change);
            }
            Action::HashKey => {
                let hasher = self.traffic.rehash();
                self.change(&SimChange::HashKey(hasher));
                self.replace_slots();
            }
            Action::Coalesce => {
                let places =
                    [SimCoalesceAt::Nowhere, SimCoalesceAt::Arrive, SimCoalesceAt::Deliver];
                let change = SimChange::Coalesce(self.one_of(&places));
                self.change(&change);
            }
            Action::FlowLimit => {
                let change = SimChange::FlowLimit(self.one_of(&[false, true]));
                self.change(&change);
            }
            Action::ReaderMoves => {
                let flow = self.traffic.pick(&mut self.chance);
                let readers = self.readers.as_mut();
                if let Some(cpu) = readers.and_then(|it| it.move_one(flow, self.online)) {
                    self.note("rfs_desired", &format_args!("{}:{cpu}", flow.0));
                }
            }
            Action::Burst { packets } => {
                let packets = packets.draw(&mut self.chance);
                self.traffic.burst(packets);
            }
            Action::CpuOut { lasts_ns } => self.take_out(lasts_ns),
            Action::Kill { lasts_ns } if M::DRAINS => self.kill(lasts_ns),
            // A machine whose threads cannot die loses a CPU instead.
            Action::Kill { lasts_ns } => self.take_out(lasts_ns),
            Action::Pause { lasts_ns } => {
                let cpu = self.any_cpu();
                self.cpu(cpu).paused += 1;
                self.note("pause", &cpu);
                self.stop(cpu, lasts_ns, Happening::Resumes(cpu));
            }
            Action::Slow { lasts_ns } => {
                let cpu = self.any_cpu();
                self.cpu(cpu).slowed += 1;
                let ns = lasts_ns.draw(&mut self.chance);
                self.after(ns, Happening::RunsFastAgain(cpu));
            }
        }
    }

    fn change(&mut self, change: &SimChange) {
        let now = self.now();
        self.machine.change(change, now, &mut self.laws, &mut self.spare.wake);
        self.wake_all();
        // A polling CPU applies the change in its next turn.
        for queue in 0..self.pace.polling.len() {
            self.wake(self.pace.polling[queue]);
        }
    }

    fn note(&mut self, what: &'static str, value: &dyn fmt::Display) {
        self.machine.note(what, value, self.now_ns);
    }

    /// Restarts observation after the slots were replaced; packets already on their way are fenced.
    fn replace_slots(&mut self) {
        (0..self.scenario.queues).map(RxQueue).for_each(|queue| self.begin_anew(queue));
    }

    fn read(&mut self, flow: FlowId) {
        if let Some(readers) = &mut self.readers {
            let (hash, cpu) = readers.read(flow);
            self.machine.record(hash, cpu);
        }
    }

    /// Kills a thread with its dequeued batch; a batch already handled is completed.
    fn kill(&mut self, lasts_ns: Span) {
        let cpu = self.any_cpu();
        if self.cpu(cpu).dead {
            return;
        }
        match std::mem::replace(&mut self.cpu(cpu).doing, Doing::Nothing) {
            Doing::Nothing => {}
            Doing::Batch => self.machine.lose(cpu, &mut self.laws),
            Doing::Handled => self.machine.complete(cpu),
        }
        let now_ns = self.now_ns;
        self.cpu(cpu).die(now_ns);
        self.note("kill", &cpu);
        self.stop(cpu, lasts_ns, Happening::IsReplaced(cpu));
    }

    fn take_out(&mut self, lasts_ns: Span) {
        let candidates = self.online.without_all(self.unnoticed);
        if self.online.len() < 2 || candidates.len() == 0 {
            // The last CPU stays online, and a CPU that was taken offline is not a candidate.
            return;
        }
        let cpu = candidates.pick(&mut self.chance);
        self.online = self.online.without(cpu);
        let online = self.online;
        if let Some(readers) = &mut self.readers {
            readers.leave(cpu, online);
        }
        for queue in (0..self.scenario.queues).map(RxQueue) {
            if self.pace.polling[usize::from(queue.0)] == cpu {
                let polling = online.pick(&mut self.chance);
                self.pace.polling[usize::from(queue.0)] = polling;
                self.change(&SimChange::PollingCpu(queue, polling));
                self.begin_anew(queue);
            }
        }
        self.change(&SimChange::Online(online));
        let lasts_ns = lasts_ns.draw(&mut self.chance);
        if !M::DRAINS {
            self.unnoticed = self.unnoticed.with(cpu);
            self.after(lasts_ns / 2, Happening::IsNoticed(cpu));
        }
        self.after(lasts_ns, Happening::ComesBack(cpu));
    }

    fn notice(&mut self, gone: CpuId) {
        if self.cpu(gone).doing != Doing::Nothing {
            self.after(NOTICE_NS, Happening::IsNoticed(gone));
            return;
        }
        self.unnoticed = self.unnoticed.without(gone);
        let runs_on = self.online.pick(&mut self.chance);
        self.change(&SimChange::CpuDead { gone, runs_on });
    }

    fn put_back(&mut self, cpu: CpuId) {
        if self.unnoticed.contains(cpu) {
            self.after(NOTICE_NS, Happening::ComesBack(cpu));
            return;
        }
        self.online = self.online.with(cpu);
        let online = self.online;
        self.change(&SimChange::Online(online));
        self.wake(cpu);
    }

    fn stop(&mut self, cpu: CpuId, lasts_ns: Span, end: Happening) {
        let now_ns = self.now_ns;
        self.cpu(cpu).stop(now_ns);
        let ns = lasts_ns.draw(&mut self.chance);
        self.after(ns, end);
    }

    fn resume(&mut self, cpu: CpuId) {
        let now_ns = self.now_ns;
        self.cpu(cpu).resume(now_ns);
        self.wake(cpu);
    }

    fn any_cpu(&mut self) -> CpuId {
        CpuSet::range(0, self.scenario.cpus).pick(&mut self.chance)
    }

    fn one_of<T: Copy>(&mut self, from: &[T]) -> T {
        let index = self.chance.below(from.len() as u64);
        from[usize::try_from(index).unwrap_or(0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::Census;
    use crate::laws::Law;
    use crate::path_machine::PathMachine;
    use crate::rules::Rules;
    use crate::scenario::{Overrides, Situation};

    #[test]
    fn promise_3_lowered_limit_spares_full_backlogs() {
        let (rules, overrides) = (Rules::Forebay, Overrides::default());
        let mut world = World::<PathMachine>::new(rules, Situation::Elephant, 1, overrides);
        // As between two looks at the backlogs.
        let mut census = Census::default();
        while census.backlogs.iter().all(|backlog| backlog.packets < 8) {
            assert!(world.step(), "no backlog fills");
            world.machine.census(&mut census);
        }
        world.act(Action::MaxBacklog(&[1]));
        world.machine.census(&mut census);
        world.laws.check(&census);
        assert_eq!(world.laws.broken(Law::Bounds), 0, "{:?}", world.laws.first);
    }
}
