//! Time for which a CPU looks for work before it sleeps.
//!
//! Sleeping saves power; waking costs, on a virtual machine more than a hundred packets' worth.
//! So a CPU looks on for as long as its recent pauses have been short, and sleeps at once when they
//! are long: what it wastes is bounded by what a wake-up would have cost. Where other programs want
//! the CPU it looks no longer than a moment: it may be the application that waits for it.

use crate::knobs::Coalesce;

/// The longest that a CPU looks for work: about what waking costs it and whoever wakes it.
pub const SPIN_MAX_NS: u64 = 100_000;

/// The shortest, so that the next burst of a busy queue finds the CPU awake.
const SPIN_MIN_NS: u64 = 4_000;

/// The same while work is there and only waits for other CPUs, which are at it.
const BLOCKED_SPIN_NS: u64 = 1_000_000;

/// Time between two questions whether others want the CPU.
const LOOK_NS: u64 = 10_000_000;

/// Threads that were preempted so often between two looks share their CPU with another program. The
/// kernel's own threads come now and then.
const PREEMPTIONS: u64 = 4;

/// Time for which a CPU is taken for shared after that.
const SHARED_NS: u64 = 100_000_000;

/// The longest that a CPU that others want looks for work.
const SHARED_SPIN_NS: u64 = 20_000;

/// The pauses of one CPU.
#[derive(Debug)]
pub(super) struct Idle {
    spin_max_ns: u64,
    /// Time for which the CPU looks for work now.
    spin_ns: u64,
    /// Time at which the pause began, if there is one.
    since_ns: Option<u64>,
    /// Time at which it was asked last whether others want the CPU, and how often the thread had been
    /// preempted by then.
    looked_ns: u64,
    preemptions: u64,
    /// Until when the CPU is shared.
    shared_until_ns: u64,
}

impl Idle {
    pub(super) fn new(spin_max_ns: u64) -> Self {
        Self {
            spin_max_ns,
            spin_ns: spin_max_ns,
            since_ns: None,
            looked_ns: 0,
            preemptions: 0,
            shared_until_ns: 0,
        }
    }

    /// Notes that there was work, found at `now_ns`. A pause that spinning could have bridged
    /// makes the next one be spun through; a longer one halves the spinning.
    pub(super) fn worked(&mut self, now_ns: u64) {
        if let Some(since_ns) = self.since_ns.take() {
            let pause_ns = now_ns.saturating_sub(since_ns);
            self.spin_ns = if pause_ns <= self.spin_max_ns {
                self.spin_max_ns
            } else {
                (self.spin_ns / 2).max(SPIN_MIN_NS.min(self.spin_max_ns))
            };
        }
    }

    /// Looks, now and then, whether others want the CPU: `preemptions` says how often the calling
    /// thread has been preempted.
    pub(super) fn look(&mut self, now_ns: u64, preemptions: impl FnOnce() -> u64) {
        if now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return;
        }
        let before = std::mem::replace(&mut self.preemptions, preemptions());
        self.looked_ns = now_ns;
        if self.preemptions.saturating_sub(before) >= PREEMPTIONS {
            self.shared_until_ns = now_ns.saturating_add(SHARED_NS);
        }
    }

    /// Notes that there is none at `now_ns`, and says whether to sleep.
    pub(super) fn should_sleep(&mut self, now_ns: u64, is_blocked: bool) -> bool {
        let since_ns = *self.since_ns.get_or_insert(now_ns);
        let spin_ns = match is_blocked {
            _ if now_ns < self.shared_until_ns => self.spin_ns.min(SHARED_SPIN_NS),
            true => BLOCKED_SPIN_NS,
            false => self.spin_ns,
        };
        now_ns.saturating_sub(since_ns) >= spin_ns
    }
}

/// The polls that are left before a CPU sleeps on the descriptors of its queues, as
/// `napi_defer_hard_irqs` has it (`napi_complete_done` in net/core/dev.c): until then nothing wakes it
/// that comes to a queue, and what came is found by the next poll.
#[derive(Debug, Default)]
pub(super) struct Deferral {
    /// Polls that have found nothing since there was work.
    empty: u32,
}

impl Deferral {
    /// Notes that there was work.
    pub(super) fn worked(&mut self) {
        self.empty = 0;
    }

    /// Time to sleep before the next poll, whatever comes to the queues meanwhile; `None` if that is
    /// to wake the CPU.
    pub(super) fn next_ns(&mut self, coalesce: &Coalesce) -> Option<u64> {
        let timeout_ns = coalesce.config.gro_flush_timeout_ns;
        if timeout_ns == 0 || self.empty >= coalesce.napi_defer_hard_irqs {
            return None;
        }
        self.empty += 1;
        Some(timeout_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// True if the CPU still looks for work this long into a pause.
    fn spins_at(idle: &mut Idle, into_ns: u64) -> bool {
        let start_ns = 1 << 40;
        idle.worked(start_ns);
        idle.should_sleep(start_ns, false);
        !idle.should_sleep(start_ns + into_ns, false)
    }

    /// Lets the CPU have pauses of this length.
    fn pauses(idle: &mut Idle, count: u64, pause_ns: u64) {
        for pause in 0..count {
            idle.should_sleep(pause << 32, false);
            idle.worked((pause << 32) + pause_ns);
        }
    }

    #[test]
    fn short_pauses_spin_long_ones_sleep() {
        let mut idle = Idle::new(SPIN_MAX_NS);
        assert!(spins_at(&mut idle, SPIN_MAX_NS - 1));
        pauses(&mut idle, 10, SPIN_MAX_NS * 2);
        assert!(!spins_at(&mut idle, SPIN_MIN_NS));
        pauses(&mut idle, 1, SPIN_MAX_NS / 2);
        assert!(spins_at(&mut idle, SPIN_MAX_NS - 1));
    }

    #[test]
    fn a_blocked_cpu_looks_longer() {
        let mut idle = Idle::new(SPIN_MAX_NS);
        assert!(!idle.should_sleep(0, true));
        assert!(!idle.should_sleep(BLOCKED_SPIN_NS - 1, true));
        assert!(idle.should_sleep(BLOCKED_SPIN_NS, true));
    }

    #[test]
    fn contended_cpu_is_yielded() {
        let mut idle = Idle::new(SPIN_MAX_NS);
        let start_ns = 1 << 30;
        idle.look(start_ns, || 1000);
        let quiet_ns = start_ns + SHARED_NS;
        idle.look(quiet_ns, || 1003);
        assert!(!idle.should_sleep(quiet_ns, false));
        assert!(!idle.should_sleep(quiet_ns + SHARED_SPIN_NS, false));
        idle.look(quiet_ns + LOOK_NS - 1, || unreachable!("it is too early"));
        idle.look(quiet_ns + LOOK_NS, || 1007);
        idle.worked(quiet_ns + SPIN_MAX_NS);
        assert!(!idle.should_sleep(quiet_ns + LOOK_NS, true));
        assert!(idle.should_sleep(quiet_ns + LOOK_NS + SHARED_SPIN_NS, true));
        idle.worked(quiet_ns + LOOK_NS + SHARED_SPIN_NS);
        assert!(!idle.should_sleep(quiet_ns + LOOK_NS + SHARED_NS, false));
    }

    #[test]
    fn engine_may_not_spin() {
        assert!(Idle::new(0).should_sleep(5, false));
    }

    fn deferring(polls: u32, gro_flush_timeout_ns: u64) -> Coalesce {
        let mut coalesce = Coalesce { napi_defer_hard_irqs: polls, ..Coalesce::default() };
        coalesce.config.gro_flush_timeout_ns = gro_flush_timeout_ns;
        coalesce
    }

    #[test]
    fn rps_7_napi_defer_counts_empty_polls() {
        let mut deferral = Deferral::default();
        let coalesce = deferring(3, 20_000);
        for _ in 0..2 {
            let polls: Vec<_> = (0..5).map(|_| deferral.next_ns(&coalesce)).collect();
            assert_eq!(polls, [Some(20_000), Some(20_000), Some(20_000), None, None]);
            deferral.worked();
        }
        // Either of both is in force at once.
        assert_eq!(deferral.next_ns(&deferring(3, 0)), None);
        assert_eq!(deferral.next_ns(&deferring(0, 20_000)), None);
        assert_eq!(deferral.next_ns(&deferring(1, 7)), Some(7));
        assert_eq!(deferral.next_ns(&deferring(1, 7)), None);
        assert_eq!(deferral.next_ns(&deferring(2, 9)), Some(9));
    }
}
