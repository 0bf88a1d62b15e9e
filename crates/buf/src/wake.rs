//! Sleep state of CPUs: the words by which a CPU about to sleep and a CPU that has work for it
//! avoid a lost wake-up.
//!
//! ```text
//!  sleeper:  prepare_to_wait ─ looks for work ─ sleeps         finish_wait
//!  waker:    publishes work ─ (next_to_wake) ─ wake ─ wakes the thread, if it slept
//! ```
//!
//! Each side writes a word and then reads the other's. Only sequential consistency guarantees that
//! at least one of them sees the other's write. The same holds for work that moves between CPUs
//! while somebody looks up which CPU has it.

use crate::sync::{AtomicU8, AtomicU32, Ordering, fence};

/// Manner of a CPU's sleep, which decides how to wake its thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Sleep {
    /// The CPU's thread is parked, or about to be.
    Parked = 1,
    /// The CPU's thread waits for descriptors, or is about to.
    Polling = 2,
}

/// The CPU is awake and looks for work by itself.
const AWAKE: u8 = 0;

/// Sleep state of one CPU.
#[derive(Debug)]
pub struct SleepState(AtomicU8);

impl Default for SleepState {
    fn default() -> Self {
        Self(AtomicU8::new(AWAKE))
    }
}

impl SleepState {
    /// Announces that the CPU is about to sleep. The caller then looks for work a last time, and
    /// sleeps if there is none.
    #[inline]
    pub fn prepare_to_wait(&self, how: Sleep) {
        self.0.store(how as u8, Ordering::Relaxed);
        // SeqCst: pairs with the fences in `wake` and `next_to_wake`.
        fence(Ordering::SeqCst);
    }

    /// Ends a sleep.
    #[inline]
    pub fn finish_wait(&self) {
        self.0.store(AWAKE, Ordering::Relaxed);
    }

    /// True if the CPU sleeps or is about to, and nobody has woken it.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.0.load(Ordering::Relaxed) != AWAKE
    }

    /// Marks the CPU as awake if it sleeps. To be called after publishing its work. The caller then
    /// wakes the thread in the manner returned.
    #[inline]
    #[must_use = "the thread still sleeps"]
    pub fn wake(&self) -> Option<Sleep> {
        // SeqCst: either this load sees the sleeper's state, or the sleeper's last look, after its
        // own fence, sees the work that was published before this fence.
        fence(Ordering::SeqCst);
        self.wake_behind_fence()
    }

    #[inline]
    fn wake_behind_fence(&self) -> Option<Sleep> {
        if self.0.load(Ordering::Relaxed) == AWAKE {
            return None;
        }
        match self.0.swap(AWAKE, Ordering::AcqRel) {
            state if state == Sleep::Parked as u8 => Some(Sleep::Parked),
            state if state == Sleep::Polling as u8 => Some(Sleep::Polling),
            _ => None,
        }
    }
}

/// CPU that does some work which can move between CPUs. Written by the CPU that takes the work
/// over, before it looks for work there.
#[derive(Debug)]
pub struct Poller(AtomicU32);

impl Poller {
    /// Creates the word for work that `cpu` does.
    #[must_use]
    pub fn new(cpu: u16) -> Self {
        Self(AtomicU32::new(cpu.into()))
    }

    /// Assigns the work to `cpu`, the caller's.
    pub fn take_over(&self, cpu: u16) {
        // Relaxed: the fence of its next `prepare_to_wait` puts this before its last look.
        self.0.store(cpu.into(), Ordering::Relaxed);
    }

    /// CPU that has the work; unordered, for information only.
    #[must_use]
    pub fn cpu(&self) -> u16 {
        Self::cpu_of(self.0.load(Ordering::Relaxed))
    }

    /// CPU to wake for work that was published before this call.
    #[inline]
    #[must_use = "it may sleep"]
    pub fn next_to_wake(&self) -> u16 {
        // SeqCst: either this load sees which CPU took the work over, or that CPU's last look
        // before it sleeps sees what was published before this fence.
        fence(Ordering::SeqCst);
        self.cpu()
    }

    fn cpu_of(word: u32) -> u16 {
        u16::try_from(word).unwrap_or_else(|_| unreachable!("written from 16 bits"))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn sleeper_is_woken_once() {
        let state = SleepState::default();
        assert!(!state.is_asleep());
        assert_eq!(state.wake(), None);
        for how in [Sleep::Parked, Sleep::Polling] {
            state.prepare_to_wait(how);
            assert!(state.is_asleep());
            assert_eq!(state.wake(), Some(how));
            assert_eq!((state.wake(), state.is_asleep()), (None, false));
            state.prepare_to_wait(how);
            state.finish_wait();
            assert_eq!(state.wake(), None);
        }
    }

    #[test]
    fn whoever_took_work_over_is_woken() {
        let poller = Poller::new(7);
        assert_eq!((poller.cpu(), poller.next_to_wake()), (7, 7));
        poller.take_over(u16::MAX);
        assert_eq!((poller.cpu(), poller.next_to_wake()), (u16::MAX, u16::MAX));
    }
}

#[cfg(test)]
#[cfg(loom)]
mod models;
