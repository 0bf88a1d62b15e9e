//! The engine on one thread: the same turns, in an order and at times that a seed determines.
//!
//! Each CPU does one thing at a time, which takes virtual time: it takes in a burst, or works on a
//! batch of packets. The CPU that finishes first goes next. Durations vary by the seed, sometimes
//! wildly, so that seeds explore interleavings that real threads show once in a million runs. A
//! seed that finds one shows it again.

use forebay_rx::Handler;
use forebay_sys::random::Random;

use super::measured::Measured;
use super::outcome::Outcome;
use super::queue::Activity;
use super::shared::EngineState;
use super::worker::{ThreadState, Worker};

/// Costs in virtual time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VirtualCosts {
    /// Taking in one frame.
    pub intake_ns: u64,
    /// Delivering one packet, before the application's work.
    pub delivery_ns: u64,
    /// The application's work on one packet.
    pub work_ns: u64,
}

impl Default for VirtualCosts {
    fn default() -> Self {
        Self { intake_ns: 100, delivery_ns: 50, work_ns: 0 }
    }
}

/// Longest time until a dead thread is replaced.
const REPLACE_NS: u64 = 200_000;

/// Mean time to wake up, or until the next check for another CPU's progress.
const IDLE_NS: u64 = 1_000;

/// One turn in this many takes [`STALL_FACTOR`] times as long, as after an interrupt or with a
/// noisy neighbour.
const STALL_ONE_IN: u64 = 64;
const STALL_FACTOR: u64 = 20;

/// Runs workers, all built on one virtual clock, until all of them end. `observe` is called with the
/// time after every step.
pub(super) fn run<H: Handler>(
    workers: Vec<Worker<H>>,
    shared: &EngineState,
    (seed, costs): (u64, VirtualCosts),
    mut observe: impl FnMut(u64),
) -> Outcome<H> {
    let mut random = Random::new(seed);
    let mut steppers: Vec<_> = workers.into_iter().map(Stepper::new).collect();
    let mut now_ns = 0;
    while let Some(stepper) = next(&mut steppers, &mut random) {
        now_ns = stepper.free_at_ns.max(now_ns);
        shared.clock.advance_to(now_ns);
        stepper.step(now_ns, &mut random, costs);
        for stepper in &mut steppers {
            stepper.wake_if_rung(now_ns, &mut random);
        }
        observe(now_ns);
    }
    let workers = steppers.into_iter().map(|stepper| stepper.worker).collect();
    Outcome::of(workers, shared, now_ns)
}

/// CPU that finishes first, of those that have not ended; a random one of several.
fn next<'a, H: Handler>(
    steppers: &'a mut [Stepper<H>],
    random: &mut Random,
) -> Option<&'a mut Stepper<H>> {
    let running = || steppers.iter().filter(|stepper| !stepper.ended);
    let first_ns = running().map(|stepper| stepper.free_at_ns).min()?;
    let ties = running().filter(|stepper| stepper.free_at_ns == first_ns).count();
    let pick = usize::try_from(random.below(ties as u64)).unwrap_or(0);
    steppers.iter_mut().filter(|stepper| !stepper.ended && stepper.free_at_ns == first_ns).nth(pick)
}

/// A worker in virtual time.
struct Stepper<H> {
    worker: Worker<H>,
    /// Time at which the CPU finishes its current work.
    free_at_ns: u64,
    /// True if the CPU works on a batch.
    has_batch: bool,
    /// True if the CPU took in frames last; the backlogs go next.
    took_in: bool,
    /// True if the CPU sleeps until `free_at_ns` or until it is woken.
    asleep: bool,
    ended: bool,
}

impl<H: Handler> Stepper<H> {
    fn new(worker: Worker<H>) -> Self {
        Self {
            worker,
            free_at_ns: 0,
            has_batch: false,
            took_in: false,
            asleep: false,
            ended: false,
        }
    }

    /// Ends the CPU's current work, and begins the next.
    fn step(&mut self, now_ns: u64, random: &mut Random, costs: VirtualCosts) {
        if std::mem::take(&mut self.asleep) {
            self.worker.shared.cpu_waker(self.worker.index).finish_wait();
        }
        if self.worker.life == ThreadState::Terminated {
            self.worker.recover(None);
            self.has_batch = false;
            self.free_at_ns = now_ns.saturating_add(random.between(1, REPLACE_NS));
            return;
        }
        if std::mem::take(&mut self.has_batch) {
            let Worker { delivery, returns, handler, .. } = &mut self.worker;
            delivery.handle(returns, handler);
            self.worker.delivery.complete(&mut self.worker.returns);
            self.worker.flush();
        }
        let cost_ns = self.begin(now_ns, random, costs);
        self.free_at_ns = now_ns.saturating_add(cost_ns);
    }

    /// Begins an intake or a batch, alternating while there is work for both, and returns its cost
    /// in nanoseconds.
    fn begin(&mut self, now_ns: u64, random: &mut Random, costs: VirtualCosts) -> u64 {
        if std::mem::take(&mut self.took_in)
            && let Some(cost_ns) = self.begin_batch(now_ns, random, costs)
        {
            return self.busy(cost_ns);
        }
        self.worker.end_turn();
        self.worker.begin_turn(now_ns);
        if std::mem::take(&mut self.worker.backlogs_first)
            && let Some(cost_ns) = self.begin_batch(now_ns, random, costs)
        {
            return self.busy(cost_ns);
        }
        match self.worker.intake_turn() {
            Activity::Worked(frames) => {
                self.took_in = true;
                let cost_ns = varied(random, costs.intake_ns.saturating_mul(frames as u64));
                self.busy(cost_ns)
            }
            activity => match self.begin_batch(now_ns, random, costs) {
                Some(cost_ns) => self.busy(cost_ns),
                None => self.idle(activity, now_ns, random),
            },
        }
    }

    fn begin_batch(
        &mut self,
        now_ns: u64,
        random: &mut Random,
        costs: VirtualCosts,
    ) -> Option<u64> {
        let worker = &mut self.worker;
        let granted = worker.grant_delivery();
        if granted == 0 {
            return None;
        }
        let taken = match worker.life {
            ThreadState::Terminating => worker.take_last_batch(granted),
            _ => worker.delivery.take(granted),
        };
        worker.budget.spend(taken);
        let taken = taken as u64;
        if worker.shared.measured() != Measured::Nothing {
            worker.delivery.record_waits(now_ns);
        }
        worker.delivery.coalesce();
        let packets = worker.delivery.batch_len() as u64;
        self.has_batch = taken > 0;
        self.has_batch.then(|| {
            let delivery_ns = costs.delivery_ns.saturating_mul(taken);
            let work_ns = costs.work_ns.saturating_mul(packets);
            let cost_ns = varied(random, delivery_ns.saturating_add(work_ns));
            if self.worker.policies.need_delivery_time() {
                self.worker.shared.add_delivering(self.worker.index, cost_ns);
            }
            cost_ns
        })
    }

    fn busy(&self, cost_ns: u64) -> u64 {
        self.worker.shared.add_busy(self.worker.index, cost_ns);
        cost_ns
    }

    fn idle(&mut self, activity: Activity, now_ns: u64, random: &mut Random) -> u64 {
        self.ended = self.worker.has_ended();
        let due_ns = match activity {
            _ if self.worker.must_follow() => now_ns,
            Activity::Worked(_) | Activity::Blocked => {
                now_ns.saturating_add(random.between(1, 2 * IDLE_NS))
            }
            Activity::IdleUntil(due_ns) => due_ns.unwrap_or(u64::MAX),
            Activity::Ended => u64::MAX,
        };
        self.asleep = !self.ended;
        self.worker.shared.cpu_waker(self.worker.index).wait_in_virtual_time();
        let tick_ns = self.worker.handler.sleep_max_ns().map(|ns| now_ns.saturating_add(ns));
        let due_ns = tick_ns.map_or(due_ns, |tick_ns| due_ns.min(tick_ns));
        due_ns.saturating_sub(now_ns).max(1)
    }

    /// Wakes the CPU, a little later, if it was woken.
    fn wake_if_rung(&mut self, now_ns: u64, random: &mut Random) {
        if self.asleep && !self.worker.shared.cpu_waker(self.worker.index).is_waiting() {
            self.asleep = false;
            let awake_ns = now_ns.saturating_add(random.between(1, 2 * IDLE_NS));
            self.free_at_ns = self.free_at_ns.min(awake_ns);
        }
    }
}

/// Random cost between half and one and a half times `cost_ns`, and rarely a stall.
fn varied(random: &mut Random, cost_ns: u64) -> u64 {
    let most_ns = cost_ns.saturating_add(cost_ns / 2);
    let cost_ns = random.between(cost_ns / 2, most_ns).max(1);
    if random.below(STALL_ONE_IN) == 0 { cost_ns.saturating_mul(STALL_FACTOR) } else { cost_ns }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promise_5_huge_costs_do_not_overflow() {
        let mut random = Random::new(1);
        let mut most_ns = 0;
        for cost_ns in [u64::MAX, u64::MAX / 2, u64::MAX / 20] {
            for _ in 0..1000 {
                let varied_ns = varied(&mut random, cost_ns);
                assert!(varied_ns >= cost_ns / 2, "{cost_ns}: {varied_ns}");
                most_ns = most_ns.max(varied_ns);
            }
        }
        assert_eq!(most_ns, u64::MAX, "a stall of the largest cost");
    }
}
