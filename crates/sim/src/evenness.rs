//! Evenness of the load on CPUs in the course of a run, computed from the flows' shares of the traffic, without chance.

use forebay_rx::steer::{BALANCE_LOAD_MIN_NS, REST_NS};
use forebay_rx::{CpuId, RxQueue};
use serde::Serialize;

use crate::costs::{INTAKE_NS, SERVICE_NS};
use crate::laws::{Law, Laws};
use crate::machine::SimMachine;
use crate::shift::PHASES;
use crate::traffic::{BILLION, FlowId, Traffic};
use crate::virtual_cpu::CpuPace;

/// Time between two looks.
pub(crate) const LOOK_NS: u64 = 10_000_000;

/// Load of the busiest CPU that is even, in percent of what is possible.
const EVEN_PERCENT: u64 = 110;

/// Result of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Balanced {
    /// Load of the busiest CPU at the end of the worst phase, in percent of the mean. Phases that end with all CPUs mostly
    /// idle do not count: nothing is balanced then (RPS-B3).
    pub busiest_percent: u64,
    /// Lowest possible load of the busiest CPU then, set by the heaviest flow or by polling.
    pub possible_percent: u64,
    /// Longest time during which the busiest CPU had more than 110 % of what was possible, and was not mostly idle.
    pub uneven_ns: u64,
    /// CPUs that packets went to at the end of each phase. `None` for a phase that was never looked at.
    pub cpus: [Option<usize>; 4],
    /// Time from the start of the second phase until packets went to all CPUs. `None` if they never did.
    pub spread_ns: Option<u64>,
    /// Number of times that a flow's desired CPU changed, a second.
    pub desired_changes_a_second: u64,
    /// Largest load beside a flow that needs a CPU by itself, in percent of that flow's, at the end of a phase.
    pub beside_heavy_percent: u64,
}

/// Observations so far.
#[derive(Debug, Default)]
pub(crate) struct Evenness {
    balanced: Balanced,
    /// Desired CPUs of the flows when they were last looked at, and when they last changed.
    desired: Vec<(Option<CpuId>, Option<u64>)>,
    desired_changes: u64,
    phase: u64,
    phase_began_ns: u64,
    /// Number of CPUs of each queue.
    sizes: Vec<QueueSize>,
    /// State at the last look.
    last: Look,
    even_at_ns: u64,
}

/// Number of CPUs that packets of a queue went to at the last look.
#[derive(Clone, Copy, Debug, Default)]
struct QueueSize {
    active_cpus: Option<usize>,
    has_resized: bool,
    /// Times of its last two changes, except the first change of all.
    resized_ns: [Option<u64>; 2],
}

#[derive(Clone, Copy, Debug, Default)]
struct Look {
    busiest_percent: u64,
    possible_percent: u64,
    beside_heavy_percent: u64,
    /// True if no CPU has work for [`BALANCE_LOAD_MIN_NS`] a second.
    is_idle: bool,
}

impl Balanced {
    /// The worse of two runs, figure by figure.
    #[must_use]
    pub fn worse(self, other: Self) -> Self {
        let is_worse = other.busiest_percent * self.possible_percent.max(1)
            > self.busiest_percent * other.possible_percent.max(1);
        let busiest = if is_worse { other } else { self };
        Self {
            uneven_ns: self.uneven_ns.max(other.uneven_ns),
            desired_changes_a_second: self
                .desired_changes_a_second
                .max(other.desired_changes_a_second),
            beside_heavy_percent: self.beside_heavy_percent.max(other.beside_heavy_percent),
            spread_ns: most(self.spread_ns, other.spread_ns),
            cpus: std::array::from_fn(|phase| most(self.cpus[phase], other.cpus[phase])),
            ..busiest
        }
    }
}

/// The larger of two figures. A run that never had one is the worst.
fn most<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    one.zip(other).map(|(one, other)| one.max(other))
}

impl Evenness {
    /// Looks at the assignment of all flows. A flow that moves twice within [`REST_NS`] breaks a law.
    pub(crate) fn look<M: SimMachine>(
        &mut self,
        now_ns: u64,
        (machine, traffic, pace): (&M, &Traffic, &CpuPace),
        cpus: usize,
        laws: &mut Laws,
    ) {
        if now_ns > 0 && traffic.phase() != self.phase {
            self.end_phase();
        }
        if self.phase != traffic.phase() {
            (self.phase, self.phase_began_ns) = (traffic.phase(), now_ns);
        }
        let queues = (0..).map(RxQueue).take(pace.polling.len());
        let sizes = queues.map(|queue| machine.active_cpus(queue).unwrap_or(cpus));
        self.see_cpus(&sizes.collect::<Vec<_>>(), now_ns, cpus, laws);
        let shares = traffic.shares();
        self.desired.resize(shares.len(), (None, None));
        let (mut polls, mut loads) = (vec![0; cpus], vec![(0, 0); cpus]);
        for (index, &share) in (0..).zip(&shares) {
            let flow = traffic.flow(FlowId(index));
            let polling = pace.polling[usize::from(flow.queue.0)];
            let at = machine
                .standing(flow.queue, flow.hash)
                .map_or(polling, |stands| stands.desired_cpu);
            polls[polling.index()] += share * INTAKE_NS;
            loads[polling.index()].0 += share * INTAKE_NS;
            let (load, heaviest) = &mut loads[at.index()];
            *load += share * SERVICE_NS;
            *heaviest = (share * SERVICE_NS).max(*heaviest);
            self.see(FlowId(index), flow.queue, at, now_ns, laws);
        }
        let (busiest, sum) =
            loads.iter().fold((0, 0), |(max, sum), (load, _)| (max.max(*load), sum + load));
        let of_mean = |load: u64| load * 100 * cpus as u64 / sum.max(1);
        let (alone, (load, heaviest)) =
            loads.iter().enumerate().max_by_key(|(_, (_, flow))| *flow).unwrap_or((0, &(0, 0)));
        let most_polls = polls.iter().copied().max().unwrap_or(0);
        let beside = load - polls[alone] - heaviest;
        let is_heavy = of_mean(*heaviest) > 100;
        self.last = Look {
            busiest_percent: of_mean(busiest),
            possible_percent: of_mean(most_polls.max(*heaviest)).max(100),
            beside_heavy_percent: if is_heavy { beside * 100 / heaviest } else { 0 },
            is_idle: work_ns(busiest, traffic) < BALANCE_LOAD_MIN_NS.into(),
        };
        let is_even = self.last.busiest_percent * 100 <= self.last.possible_percent * EVEN_PERCENT;
        if is_even || self.last.is_idle {
            self.even_at_ns = now_ns;
        }
        self.balanced.uneven_ns = self.balanced.uneven_ns.max(now_ns - self.even_at_ns);
    }

    /// Ends the run.
    pub(crate) fn end(&mut self, now_ns: u64) -> Balanced {
        if self.phase == PHASES - 1 {
            self.end_phase();
        }
        self.balanced.desired_changes_a_second =
            self.desired_changes * 1_000_000_000 / now_ns.max(1);
        self.balanced
    }

    /// Looks at the number of CPUs of each queue. One that changes three times within [`REST_NS`] breaks a law.
    fn see_cpus(&mut self, sizes: &[usize], now_ns: u64, cpus: usize, laws: &mut Laws) {
        let phase = usize::try_from(self.phase).unwrap_or(0);
        let most = sizes.iter().copied().max().unwrap_or(0);
        self.balanced.cpus[phase] = Some(most);
        if phase == 1 && most == cpus {
            self.balanced.spread_ns.get_or_insert(now_ns - self.phase_began_ns);
        }
        self.sizes.resize(sizes.len(), QueueSize::default());
        for (queue, (size, &active)) in self.sizes.iter_mut().zip(sizes).enumerate() {
            if size.active_cpus.replace(active).is_none_or(|before| before == active) {
                continue;
            }
            if !std::mem::replace(&mut size.has_resized, true) {
                continue;
            }
            let [first, second] = size.resized_ns;
            if let Some(first_ns) = first.filter(|first_ns| now_ns - first_ns + LOOK_NS < REST_NS) {
                laws.broke(Law::Rest, || {
                    format!(
                        "queue {queue} has {active} CPUs at {now_ns} ns, three sizes since {first_ns} ns"
                    )
                });
            }
            size.resized_ns = [second, Some(now_ns)];
        }
    }

    fn see(&mut self, flow: FlowId, queue: RxQueue, at: CpuId, now_ns: u64, laws: &mut Laws) {
        let (desired_cpu, changed_ns) = &mut self.desired[flow.index()];
        if desired_cpu.replace(at).is_none_or(|before| before == at) {
            return;
        }
        self.desired_changes += 1;
        // If the number of the queue's CPUs changes, the law limits those changes instead.
        let has_resized = self.sizes[usize::from(queue.0)].has_resized;
        let before_ns = changed_ns.replace(now_ns).filter(|_| !has_resized);
        if let Some(before_ns) =
            before_ns.filter(|before_ns| now_ns - before_ns + LOOK_NS < REST_NS)
        {
            laws.broke(Law::Rest, || {
                format!("flow {} moves at {before_ns} ns and at {now_ns} ns", flow.0)
            });
        }
    }

    fn end_phase(&mut self) {
        let (last, worst) = (self.last, &mut self.balanced);
        let is_worst = last.busiest_percent * worst.possible_percent.max(1)
            >= worst.busiest_percent * last.possible_percent;
        if is_worst && !last.is_idle {
            worst.busiest_percent = last.busiest_percent;
            worst.possible_percent = last.possible_percent;
        }
        let beside = &mut worst.beside_heavy_percent;
        *beside = last.beside_heavy_percent.max(*beside);
    }
}

/// Work of a CPU in ns a second. `load` is the sum of its flows' shares, in billionths, times what a packet costs there.
fn work_ns(load: u64, traffic: &Traffic) -> u128 {
    u128::from(load) * u128::from(traffic.work_ns()) / u128::from(BILLION * SERVICE_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_is_worse_than_late() {
        let soon = Balanced {
            spread_ns: Some(7),
            cpus: [Some(1), Some(4), Some(1), Some(2)],
            ..Balanced::default()
        };
        let never = Balanced { spread_ns: None, cpus: [Some(3), None, Some(1), None], ..soon };
        for worse in [soon.worse(never), never.worse(soon)] {
            assert_eq!((worse.spread_ns, worse.cpus), (None, [Some(3), None, Some(1), None]));
        }
        let late = Balanced { spread_ns: Some(9), ..soon };
        assert_eq!(soon.worse(late).spread_ns, Some(9));
    }
}
