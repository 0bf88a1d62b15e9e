//! Threads of the application that transmit for a CPU that sleeps.

use forebay_rx::RxQueue;

use super::spins::lent_cpu;
use super::*;

/// Situation in which a thread has queued three packets.
#[derive(Clone, Copy, Debug)]
struct Situation {
    /// Time since a borrower has found packets, in ns; `None` if none has.
    used_since_ns: Option<u64>,
    is_lent: bool,
    /// True if the caller is the thread of a CPU.
    is_cpu: bool,
    sleep_state: u8,
    sends_max: u64,
    is_sending: bool,
    /// True if something arrives meanwhile.
    is_received: bool,
}

/// Situation in which the caller transmits everything, and wakes nobody.
const ALONE: Situation = Situation {
    used_since_ns: Some(0),
    is_lent: true,
    is_cpu: false,
    sleep_state: SUSPENDED,
    sends_max: 3,
    is_sending: false,
    is_received: false,
};

#[test]
fn exe_9_sender_transmits_for_sleeping_cpu() {
    for (situation, left, is_left_asleep) in [
        (ALONE, 0, true),
        (Situation { sleep_state: WAKEABLE, ..ALONE }, 0, true),
        (Situation { used_since_ns: Some(IN_USE_NS - 1), ..ALONE }, 0, true),
        (Situation { used_since_ns: Some(IN_USE_NS), ..ALONE }, 3, false),
        (Situation { used_since_ns: None, ..ALONE }, 3, false),
        (Situation { is_lent: false, ..ALONE }, 3, false),
        (Situation { is_cpu: true, ..ALONE }, 3, false),
        (Situation { sends_max: 2, ..ALONE }, 1, false),
        (Situation { is_sending: true, ..ALONE }, 0, true),
        // Nobody would look for the frames.
        (Situation { is_sending: true, sleep_state: WAKEABLE, ..ALONE }, 0, false),
        // Packets received are not the sender's business, and wake the CPU if they are to.
        (Situation { is_received: true, ..ALONE }, 0, true),
    ] {
        let fed = Arc::<Fed>::default();
        let borrowers = lent_cpu(SPIN_MAX_NS, &fed);
        let loan = &borrowers.loans[0];
        loan.shared.set_loan(0, Arc::downgrade(loan) as _);
        loan.used_ns.store(u64::from(situation.used_since_ns.is_some()), Ordering::Relaxed);
        loan.shared.clock.advance_to(1 + situation.used_since_ns.unwrap_or(0));
        loan.sleep_state.store(situation.sleep_state, Ordering::Relaxed);
        fed.is_received.store(situation.is_received, Ordering::Relaxed);
        let taken = if situation.is_lent { None } else { loan.lent().take() };
        fed.sends_max.store(situation.sends_max, Ordering::Relaxed);
        fed.is_sending.store(situation.is_sending, Ordering::Relaxed);
        fed.to_send.store(3, Ordering::Relaxed);
        let send = loan.shared.waker_to_send(RxQueue(0));
        match situation.is_cpu {
            true => acting_as_cpu(&*send),
            false => send(),
        }
        assert_eq!(fed.to_send.load(Ordering::Relaxed), left, "{situation:?}");
        let is_asleep = loan.shared.cpu_waker(0).is_asleep();
        assert_eq!(is_asleep, is_left_asleep, "{situation:?}");
        drop(taken);
    }
}

/// Packets that are sent beside turns of other threads, and sleeps of the CPU, all leave.
#[test]
fn exe_9_no_queued_packet_is_forgotten() {
    let rig = Rig::start();
    rig.fed.sends_max.store(u64::MAX, Ordering::Relaxed);
    let send = rig.state.waker_to_send(RxQueue(0));
    for round in 0..500_u64 {
        if round % 5 == 0 {
            rig.handle_here(1);
            rig.busy_poll.suspend();
        }
        if round % 7 == 0 {
            rig.until_asleep();
        }
        rig.fed.to_send.fetch_add(1, Ordering::Relaxed);
        send();
        while rig.fed.to_send.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
    }
    rig.end();
}

/// The CPU's thread lets go of its worker at its next pause if a borrower has just asked for it, and asks again.
#[test]
fn exe_9_sought_cpu_does_not_spin() {
    for (spin_max_ns, is_alone, is_sought) in [
        (SPIN_MAX_NS, true, true),
        (SPIN_MAX_NS, false, false), // it sleeps then
        (0, true, false),
        (SPIN_ALWAYS_NS, true, false),
    ] {
        let (_cpu, borrowers) = lone_cpu(spin_max_ns, &Arc::default());
        let loan = &borrowers.loans[0];
        loan.was_lent.store(true, Ordering::Relaxed);
        borrowers.waiting.store(u32::from(!is_alone), Ordering::Relaxed);
        loan.shared.clock.advance_to(1);
        assert!(!loan.is_sought(1));
        borrowers.before_wait();
        assert_eq!(loan.is_sought(WANTED_NS), is_sought, "{spin_max_ns} {is_alone}");
        assert!(!loan.is_sought(1 + WANTED_NS));
    }
}
