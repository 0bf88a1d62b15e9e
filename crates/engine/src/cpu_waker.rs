//! Waking a CPU: one wake-up per target and burst, and none for a CPU that is awake.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use forebay_buf::wake::{Sleep, SleepState};
use forebay_sys::Event;

/// Longest sleep on descriptors if there is no event that could end it.
const UNWAKEABLE_SLEEP: Duration = Duration::from_millis(1);

/// Wake-up of one CPU's thread.
#[derive(Debug, Default)]
pub struct CpuWaker {
    /// Set by the sleeper before its last look for work; cleared by the waker.
    state: SleepState,
    /// Thread of the CPU; another one after that thread has died.
    sleeper: Mutex<Option<Thread>>,
    /// Eventfd, created when the CPU first sleeps on descriptors. `None`: its creation failed.
    event: OnceLock<Option<Event>>,
    wakeups: AtomicU64,
    /// Number of wake-ups for packets of another CPU.
    wakeups_for_packets: AtomicU64,
}

/// Wake-up sources of a sleeping CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SleepOn {
    /// Calls of `wake` only.
    Wakeup,
    /// Calls of `wake`, and the descriptors of the CPU's queues.
    Descriptors,
}

impl CpuWaker {
    /// Makes the calling thread the one that this waker wakes.
    pub(super) fn bind_to_current_thread(&self) {
        *self.sleeper() = Some(thread::current());
    }

    /// Wakes the CPU if it sleeps. Call it after publishing what the CPU is to find.
    pub(super) fn wake(&self) {
        self.wake_sleeper();
    }

    /// Wakes the CPU if it sleeps, for packets that another CPU put on its backlog.
    pub(super) fn wake_for_packets(&self) {
        if self.wake_sleeper() {
            self.wakeups_for_packets.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Wakes the CPU; returns true if it slept.
    fn wake_sleeper(&self) -> bool {
        let Some(slept) = self.state.wake() else { return false };
        match slept {
            Sleep::Parked => {
                if let Some(sleeper) = &*self.sleeper() {
                    sleeper.unpark();
                }
            }
            Sleep::Polling => {
                if let Some(event) = self.event() {
                    event.signal();
                }
            }
        }
        self.wakeups.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn sleeper(&self) -> MutexGuard<'_, Option<Thread>> {
        self.sleeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn event(&self) -> Option<&Event> {
        self.event.get_or_init(|| Event::new().ok()).as_ref()
    }

    /// Announces that the CPU is about to sleep. The caller then looks for work a last time,
    /// [waits](Self::wait) if there is none, and finally [ends](Self::finish_wait) the sleep.
    pub(super) fn prepare_to_wait(&self, on: SleepOn) {
        self.state.prepare_to_wait(match on {
            SleepOn::Wakeup => Sleep::Parked,
            SleepOn::Descriptors => Sleep::Polling,
        });
    }

    /// Sleeps until a wake-up, until a descriptor is readable, or for `at_most`.
    pub(super) fn wait(&self, at_most: Option<Duration>, descriptors: &[BorrowedFd<'_>]) {
        if !descriptors.is_empty() {
            self.on_event(at_most, |event| event.wait(descriptors, at_most));
            return;
        }
        match at_most {
            Some(at_most) => thread::park_timeout(at_most),
            None => thread::park(),
        }
    }

    /// Sleeps as [`wait`](Self::wait) does on descriptors, even if there are none, which are given by their numbers:
    /// another thread may turn their worker meanwhile.
    pub(super) fn wait_by_number(&self, at_most: Option<Duration>, descriptors: &[RawFd]) {
        self.on_event(at_most, |event| event.wait_by_number(descriptors, at_most));
    }

    /// Waits for the event, or for a short time if it could not be created.
    fn on_event(&self, at_most: Option<Duration>, wait: impl FnOnce(&Event)) {
        match self.event() {
            Some(event) => wait(event),
            None => thread::sleep(at_most.unwrap_or(UNWAKEABLE_SLEEP).min(UNWAKEABLE_SLEEP)),
        }
    }

    /// Sleeps in virtual time: the next wake-up is counted and ends the sleep.
    pub(super) fn wait_in_virtual_time(&self) {
        self.state.prepare_to_wait(Sleep::Parked);
    }

    /// Ends a sleep.
    pub(super) fn finish_wait(&self) {
        self.state.finish_wait();
    }

    /// True if the CPU sleeps, or is about to.
    pub(super) fn is_asleep(&self) -> bool {
        self.state.is_asleep()
    }

    /// True if the CPU has not been woken since [`wait_in_virtual_time`](Self::wait_in_virtual_time).
    pub(super) fn is_waiting(&self) -> bool {
        self.state.is_asleep()
    }

    /// Number of times the CPU was woken.
    pub fn wakeups(&self) -> u64 {
        self.wakeups.load(Ordering::Relaxed)
    }

    /// Number of times the CPU was woken for packets of another CPU.
    pub fn wakeups_for_packets(&self) -> u64 {
        self.wakeups_for_packets.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Runs a sleeper against a thread that wakes it for each piece of work.
    fn never_left_asleep(on: SleepOn) {
        let waker = Arc::new(CpuWaker::default());
        let work = Arc::new(AtomicU64::new(0));
        let (waker_of_worker, work_to_do) = (Arc::clone(&waker), Arc::clone(&work));
        let rounds = 20_000;
        let worker = thread::spawn(move || {
            waker_of_worker.bind_to_current_thread();
            let silent = Event::new().unwrap();
            let descriptors = match on {
                SleepOn::Wakeup => vec![],
                SleepOn::Descriptors => vec![silent.descriptor()],
            };
            for done in 0..rounds {
                while work_to_do.load(Ordering::Acquire) == done {
                    waker_of_worker.prepare_to_wait(on);
                    if work_to_do.load(Ordering::Acquire) == done {
                        waker_of_worker.wait(None, &descriptors);
                    }
                    waker_of_worker.finish_wait();
                }
            }
        });
        for _ in 0..rounds {
            work.fetch_add(1, Ordering::Release);
            waker.wake();
            if work.load(Ordering::Relaxed).is_multiple_of(64) {
                thread::yield_now();
            }
        }
        worker.join().unwrap();
        assert!(waker.wakeups() <= rounds);
    }

    #[test]
    fn sleeper_is_woken_for_work() {
        never_left_asleep(SleepOn::Wakeup);
    }

    #[test]
    fn descriptor_sleeper_is_woken_for_work() {
        never_left_asleep(SleepOn::Descriptors);
    }

    #[test]
    fn readable_descriptor_ends_sleep() {
        let (waker, other) = (CpuWaker::default(), Event::new().unwrap());
        other.signal();
        waker.prepare_to_wait(SleepOn::Descriptors);
        waker.wait(None, &[other.descriptor()]);
        waker.finish_wait();
        assert_eq!(waker.wakeups(), 0);
    }
}
