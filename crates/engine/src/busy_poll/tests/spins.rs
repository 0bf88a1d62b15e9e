//! Threads of the application that spin before they sleep.

use super::*;
use crate::cpu_waker::SleepOn;

/// Borrowers of a CPU that sleeps, with the worker in its place.
pub(super) fn lent_cpu(spin_max_ns: u64, fed: &Arc<Fed>) -> Borrowers<Ordered> {
    let (cpu, borrowers) = lone_cpu(spin_max_ns, fed);
    let (loan, worker) = (&borrowers.loans[0], cpu.into_worker());
    *loan.lent() = Some(Lent { worker, until_ns: None });
    loan.was_lent.store(true, Ordering::Relaxed);
    loan.shared.cpu_waker(0).prepare_to_wait(SleepOn::Descriptors);
    borrowers
}

#[test]
fn exe_9_short_pauses_are_spun() {
    let fed = Arc::<Fed>::default();
    let borrowers = lent_cpu(SPIN_MAX_NS, &fed);
    let clock = borrowers.loans[0].shared.clock.clone();
    let wait = |at_ns| {
        clock.advance_to(at_ns);
        let arrived = borrowers.before_wait();
        borrowers.after_wait();
        arrived
    };
    assert_eq!(wait(1), Arrived::Soon);
    assert_eq!(wait(SPIN_MAX_NS), Arrived::Soon);
    assert_eq!(wait(SPIN_MAX_NS + 1), Arrived::Nothing);
    // The sleep was longer than spinning could have bridged.
    clock.advance_to(3 * SPIN_MAX_NS);
    borrowers.suspend();
    assert_eq!(wait(4 * SPIN_MAX_NS), Arrived::Soon);
    assert_eq!(wait(4 * SPIN_MAX_NS + SPIN_MAX_NS / 2), Arrived::Nothing);
    fed.frames.store(1, Ordering::Relaxed);
    assert_eq!(wait(4 * SPIN_MAX_NS + SPIN_MAX_NS / 2), Arrived::Packets);
    assert_eq!(wait(5 * SPIN_MAX_NS), Arrived::Soon);
    // Another thread waits.
    assert_eq!(borrowers.before_wait(), Arrived::Soon);
    assert_eq!(borrowers.before_wait(), Arrived::Nothing);
}

#[test]
fn exe_9_program_may_never_spin() {
    let borrowers = lent_cpu(0, &Arc::default());
    assert_eq!(borrowers.before_wait(), Arrived::Nothing);
}

/// Of CPUs that never sleep, or hardly: its time-outs come.
#[test]
fn exe_9_program_spins_no_longer() {
    let borrowers = lent_cpu(SPIN_ALWAYS_NS, &Arc::default());
    let wait = || {
        let arrived = borrowers.before_wait();
        borrowers.after_wait();
        arrived
    };
    assert_eq!(wait(), Arrived::Soon);
    borrowers.loans[0].shared.clock.advance_to(SPIN_MAX_NS);
    assert_eq!(wait(), Arrived::Nothing);
}

/// A CPU's thread that sleeps until the end of a suspension is not woken for more packets, or for a time that comes soon.
#[test]
fn exe_9_suspended_cpu_is_left_asleep() {
    for (state, is_left) in [(SUSPENDED, true), (UNDECIDED, false), (WAKEABLE, false)] {
        let fed = Arc::<Fed>::default();
        let borrowers = lent_cpu(SPIN_MAX_NS, &fed);
        let loan = &borrowers.loans[0];
        fed.frames.store(100_000, Ordering::Relaxed);
        borrowers.suspend();
        loan.sleep_state.store(state, Ordering::Relaxed);
        assert_eq!(borrowers.before_wait(), Arrived::Packets);
        assert!(loan.suspended_until_ns() > 0);
        assert_eq!(loan.shared.cpu_waker(0).is_asleep(), is_left);
    }
}

#[test]
fn exe_9_lent_worker_needs_turns() {
    let (mut cpu, _borrowers) = lone_cpu(SPIN_MAX_NS, &Arc::default());
    let due = |due_ns| Activity::IdleUntil(Some(due_ns));
    let late_ns = 10 + TIMER_SLACK_NS;
    for (activity, until_ns, needed) in [
        (Activity::Worked(1), None, Needed::Soon),
        (Activity::Blocked, None, Needed::Now),
        (Activity::IdleUntil(None), None, Needed::Nothing),
        (due(10), None, Needed::Soon),
        (due(10), Some(late_ns), Needed::Nothing),
        (due(10), Some(late_ns + 1), Needed::Soon),
    ] {
        assert_eq!(Needed::after(cpu.worker(), activity, until_ns, 1), needed, "{activity:?}");
    }
    let state = Arc::clone(&cpu.worker().shared);
    state.change(&Change::NetdevMaxBacklog(3000)).unwrap();
    assert!(cpu.worker().has_pending_work());
    assert_eq!(Needed::after(cpu.worker(), Activity::IdleUntil(None), None, 1), Needed::Now);
    cpu.worker().life = ThreadState::Terminated;
    assert_eq!(Needed::after(cpu.worker(), Activity::Worked(1), None, 1), Needed::Now);
}
