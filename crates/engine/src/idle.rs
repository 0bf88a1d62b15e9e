//! Time for which a CPU spins before it sleeps.
//!
//! Sleeping saves power, but a wake-up costs as much as more than a hundred packets on a virtual
//! machine. So a CPU spins while its recent pauses have been short, and sleeps at once while they
//! are long: the time wasted is bounded by the cost of a wake-up. A CPU that other programs want
//! spins for a moment only: one of them may be the application that waits for its packets.

use crate::knobs::Coalesce;

/// Longest time that a CPU spins: about the cost of a wake-up to the CPU and its waker.
pub const SPIN_MAX_NS: u64 = 100_000;

/// Value of [`Config::spin_max_ns`](crate::Config::spin_max_ns) with which a CPU never sleeps, not
/// even if other programs want it.
pub const SPIN_ALWAYS_NS: u64 = u64::MAX;

/// Spin time while work is pending and waits only for other CPUs, which are at work.
const BLOCKED_SPIN_NS: u64 = 1_000_000;

/// Time between two checks for preemption.
const LOOK_NS: u64 = 10_000_000;

/// Number of preemptions between two checks from which on the CPU counts as contended: another
/// program wants it. Kernel threads preempt only now and then.
const PREEMPTIONS: u64 = 4;

/// Time for which a CPU then counts as contended.
const CONTENDED_NS: u64 = 100_000_000;

/// Longest time that a contended CPU spins.
const CONTENDED_SPIN_NS: u64 = 20_000;

/// Spin state of one CPU.
#[derive(Debug)]
pub(super) struct Idle {
    spin_max_ns: u64,
    /// Current spin time.
    spin_ns: u64,
    /// Start of the pause, if there is one.
    since_ns: Option<u64>,
    /// Time of the last check for preemption, and the thread's number of preemptions then.
    looked_ns: u64,
    preemptions: u64,
    /// End of the time for which the CPU counts as contended.
    contended_until_ns: u64,
}

impl Idle {
    pub(super) fn new(spin_max_ns: u64) -> Self {
        Self {
            spin_max_ns,
            spin_ns: spin_max_ns,
            since_ns: None,
            looked_ns: 0,
            preemptions: 0,
            contended_until_ns: 0,
        }
    }

    /// Records work found at `now_ns`. A pause that spinning could have bridged resets the spin
    /// time to the maximum; a longer one halves it.
    pub(super) fn worked(&mut self, now_ns: u64) {
        if let Some(since_ns) = self.since_ns.take() {
            let pause_ns = now_ns.saturating_sub(since_ns);
            let is_short = pause_ns <= self.spin_max_ns;
            self.spin_ns = if is_short { self.spin_max_ns } else { self.spin_ns / 2 };
        }
    }

    /// Forgets the pause, if there is one: its end was not seen.
    pub(super) fn forget_pause(&mut self) {
        self.since_ns = None;
    }

    /// Checks from time to time whether other programs want the CPU. `preemptions` returns how
    /// often the calling thread has been preempted.
    pub(super) fn look(&mut self, now_ns: u64, preemptions: impl FnOnce() -> u64) {
        if now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return;
        }
        let before = std::mem::replace(&mut self.preemptions, preemptions());
        self.looked_ns = now_ns;
        if self.preemptions.saturating_sub(before) >= PREEMPTIONS {
            self.contended_until_ns = now_ns.saturating_add(CONTENDED_NS);
        }
    }

    #[cfg(test)]
    pub(super) fn set_contended(&mut self, is_contended: bool) {
        self.looked_ns = u64::MAX;
        self.contended_until_ns = if is_contended { u64::MAX } else { 0 };
    }

    /// True if other programs have wanted the CPU a short time ago, and it may sleep.
    pub(super) fn is_contended(&self, now_ns: u64) -> bool {
        self.spin_max_ns != SPIN_ALWAYS_NS && now_ns < self.contended_until_ns
    }

    /// Records that there is no work at `now_ns`, and returns true if the CPU must sleep.
    pub(super) fn should_sleep(&mut self, now_ns: u64, is_blocked: bool) -> bool {
        let since_ns = *self.since_ns.get_or_insert(now_ns);
        if self.spin_max_ns == SPIN_ALWAYS_NS {
            return false;
        }
        let spin_ns = match is_blocked {
            _ if now_ns < self.contended_until_ns => self.spin_ns.min(CONTENDED_SPIN_NS),
            true => BLOCKED_SPIN_NS,
            false => self.spin_ns,
        };
        now_ns.saturating_sub(since_ns) >= spin_ns
    }
}

/// Polls left before a CPU sleeps on the descriptors of its queues, as with `napi_defer_hard_irqs`
/// (`napi_complete_done` in net/core/dev.c). Until then, frames that arrive do not wake the CPU:
/// the next poll finds them.
#[derive(Debug, Default)]
pub(super) struct Deferral {
    /// Number of empty polls since there was work.
    empty: u32,
}

impl Deferral {
    /// Records that there was work.
    pub(super) fn worked(&mut self) {
        self.empty = 0;
    }

    /// Time to sleep before the next poll, during which arriving frames do not wake the CPU; `None`
    /// if they must wake it.
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

    /// True if the CPU still spins this long into a pause.
    fn spins_at(idle: &mut Idle, into_ns: u64) -> bool {
        let start_ns = 1 << 40;
        idle.worked(start_ns);
        idle.should_sleep(start_ns, false);
        !idle.should_sleep(start_ns + into_ns, false)
    }

    /// Gives the CPU pauses of this length.
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
        assert!(!spins_at(&mut idle, SPIN_MAX_NS >> 8));
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
        let quiet_ns = start_ns + CONTENDED_NS;
        idle.look(quiet_ns, || 1003);
        assert!(!idle.should_sleep(quiet_ns, false));
        assert!(!idle.should_sleep(quiet_ns + CONTENDED_SPIN_NS, false));
        idle.look(quiet_ns + LOOK_NS - 1, || unreachable!("it is too early"));
        idle.look(quiet_ns + LOOK_NS, || 1007);
        idle.worked(quiet_ns + SPIN_MAX_NS);
        assert!(!idle.should_sleep(quiet_ns + LOOK_NS, true));
        assert!(idle.should_sleep(quiet_ns + LOOK_NS + CONTENDED_SPIN_NS, true));
        idle.worked(quiet_ns + LOOK_NS + CONTENDED_SPIN_NS);
        assert!(!idle.should_sleep(quiet_ns + LOOK_NS + CONTENDED_NS, false));
    }

    #[test]
    fn engine_may_not_spin() {
        assert!(Idle::new(0).should_sleep(5, false));
    }

    #[test]
    fn promise_10_engine_may_never_sleep() {
        let mut idle = Idle::new(SPIN_ALWAYS_NS);
        pauses(&mut idle, 10, SPIN_MAX_NS * 2);
        idle.look(LOOK_NS << 32, || 1000);
        assert!(
            !idle.should_sleep((LOOK_NS << 32) + CONTENDED_SPIN_NS, false),
            "others want the CPU"
        );
        assert!(!idle.should_sleep((LOOK_NS << 32) + BLOCKED_SPIN_NS, true));
        assert!(!idle.should_sleep(u64::MAX, false));
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
        // A change of either knob takes effect at once.
        assert_eq!(deferral.next_ns(&deferring(3, 0)), None);
        assert_eq!(deferral.next_ns(&deferring(0, 20_000)), None);
        assert_eq!(deferral.next_ns(&deferring(1, 7)), Some(7));
        assert_eq!(deferral.next_ns(&deferring(1, 7)), None);
        assert_eq!(deferral.next_ns(&deferring(2, 9)), Some(9));
    }
}
