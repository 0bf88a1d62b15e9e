//! Waking a CPU: one wake-up per target and burst, and none for a CPU that is awake.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

/// What wakes one CPU's thread.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    /// Set by the sleeper before it looks for work a last time; cleared by whoever wakes it.
    sleeping: AtomicBool,
    /// The thread of the CPU; another one once it is lost.
    sleeper: Mutex<Option<Thread>>,
    rung: AtomicU64,
    /// How often of these for packets of another CPU.
    rung_for_packets: AtomicU64,
}

impl Bell {
    /// Makes the calling thread the one that this bell wakes.
    pub(super) fn belongs_to_this_thread(&self) {
        *self.sleeper() = Some(thread::current());
    }

    /// Wakes the CPU if it sleeps. Call it after publishing what it is to find.
    pub(super) fn ring(&self) {
        self.wake();
    }

    /// The same for packets that another CPU has put on this one's backlog.
    pub(super) fn ring_for_packets(&self) {
        if self.wake() {
            self.rung_for_packets.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns whether the CPU slept.
    fn wake(&self) -> bool {
        // SeqCst: either this load sees the sleeper's flag, or the sleeper's last look, after its
        // own fence, sees what was published before this one.
        fence(Ordering::SeqCst);
        let slept =
            self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::AcqRel);
        if slept {
            self.rung.fetch_add(1, Ordering::Relaxed);
            if let Some(sleeper) = &*self.sleeper() {
                sleeper.unpark();
            }
        }
        slept
    }

    fn sleeper(&self) -> MutexGuard<'_, Option<Thread>> {
        self.sleeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until the bell rings, or for `at_most`, unless `has_work` finds some at the last
    /// moment.
    pub(super) fn sleep(&self, at_most: Option<Duration>, has_work: impl FnOnce() -> bool) {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst); // pairs with the one in `ring`
        if !has_work() {
            match at_most {
                Some(at_most) => thread::park_timeout(at_most),
                None => thread::park(),
            }
        }
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Sleeps in virtual time: the next ring is counted and ends it.
    pub(super) fn doze(&self) {
        self.sleeping.store(true, Ordering::Relaxed);
    }

    /// Ends a sleep in virtual time by itself.
    pub(super) fn rise(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Whether nobody has rung since [`doze`](Self::doze).
    pub(super) fn is_dozing(&self) -> bool {
        self.sleeping.load(Ordering::Relaxed)
    }

    /// How often the CPU was woken.
    pub(crate) fn rung(&self) -> u64 {
        self.rung.load(Ordering::Relaxed)
    }

    /// How often it was woken for packets of another CPU.
    pub(crate) fn rung_for_packets(&self) -> u64 {
        self.rung_for_packets.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_sleeper_is_never_left_asleep_with_work() {
        let bell = Arc::new(Bell::default());
        let work = Arc::new(AtomicU64::new(0));
        let (bell_of_worker, work_to_do) = (Arc::clone(&bell), Arc::clone(&work));
        let rounds = 20_000;
        let worker = thread::spawn(move || {
            bell_of_worker.belongs_to_this_thread();
            for done in 0..rounds {
                while work_to_do.load(Ordering::Acquire) == done {
                    let has_work = || work_to_do.load(Ordering::Acquire) != done;
                    bell_of_worker.sleep(None, has_work);
                }
            }
        });
        for _ in 0..rounds {
            work.fetch_add(1, Ordering::Release);
            bell.ring();
            if work.load(Ordering::Relaxed).is_multiple_of(64) {
                thread::yield_now();
            }
        }
        worker.join().unwrap();
        assert!(bell.rung() <= rounds);
    }
}
