//! Wake-up of a socket's waiters: threads blocked in a call, CPUs whose thread reads, and pollers of the
//! socket's descriptor.
//!
//! A queue says once that something has come, to whoever clears the sign that its reader sleeps. There
//! may be several readers. So a wake-up is for all of them, and whoever takes the sign back though
//! others sleep wakes those.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use forebay_rx::CpuId;
use forebay_rx::arrive::Waker;
use forebay_stack::socket::queue::{SocketQueue, WakeReader};
use forebay_sys::readiness::{ReadinessTold, Teller};

/// Waiters for a socket.
#[derive(Default)]
pub(super) struct Wake {
    state: Mutex<WakeState>,
    changed: Condvar,
    /// Readers that sleep, or are about to.
    sleepers: AtomicU32,
    /// True if there is a teller.
    has_teller: AtomicBool,
    /// CPUs whose threads read in their own turns, and what wakes them.
    inline: ArcSwapOption<Vec<(CpuId, Waker)>>,
}

#[derive(Default)]
struct WakeState {
    /// Number of times readers were woken.
    wakes: Wakes,
    /// Made when somebody asks for the descriptor.
    teller: Option<Teller>,
    /// All before this ticket had been read when that was last said.
    due: u32,
}

/// Number of times the readers of a socket were woken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Wakes(u64);

/// A reader that is about to sleep.
pub(super) struct Sleeper<'a> {
    wake: &'a Wake,
    seen: Wakes,
}

impl Wake {
    /// Says that a reader is about to sleep: it is woken for whatever comes from now on.
    pub(super) fn sleeper(&self) -> Sleeper<'_> {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        Sleeper { wake: self, seen: self.state().wakes }
    }

    /// True if anybody waits whom nobody else would wake, should a reader say that it is awake.
    /// `is_asleep`: that reader is counted as a sleeper.
    pub(super) fn has_others(&self, is_asleep: bool) -> bool {
        self.sleepers.load(Ordering::Relaxed) > is_asleep.into()
            || self.has_teller.load(Ordering::Relaxed)
            || self.inline.load().as_ref().is_some_and(|inline| inline.len() > 1)
    }

    /// Has a CPU woken that reads in its own turns.
    pub(super) fn add_inline(&self, cpu: CpuId, wake: impl FnOnce() -> Waker) {
        let inline = self.inline.load();
        let known = inline.as_ref().map_or(&[][..], |inline| &inline[..]);
        if known.iter().any(|(of, _)| *of == cpu) {
            return;
        }
        let wake = wake();
        self.inline.rcu(|inline| {
            let mut inline = inline.as_ref().map_or_else(Vec::new, |inline| Vec::clone(inline));
            inline.push((cpu, Arc::clone(&wake)));
            Some(Arc::new(inline))
        });
    }

    /// Tells of the socket by a descriptor from now on.
    pub(super) fn set_teller(&self, teller: Teller) {
        self.state().teller = Some(teller);
        self.has_teller.store(true, Ordering::Relaxed);
    }

    /// Says that there is something to read.
    pub(super) fn readable(&self) {
        self.state().teller.iter_mut().for_each(Teller::readable);
    }

    /// Says that there is nothing to read: all before the ticket `due` has been.
    pub(super) fn not_readable(&self, due: u32, told: &ReadinessTold) {
        let mut state = self.state();
        state.due = due;
        state.teller.iter_mut().for_each(|teller| teller.not_readable(told));
    }

    /// Says that something may be sent.
    pub(super) fn writable(&self) {
        self.state().teller.iter_mut().for_each(Teller::writable);
    }

    /// Says that what is sent would block.
    pub(super) fn not_writable(&self, told: &ReadinessTold) {
        self.state().teller.iter_mut().for_each(|teller| teller.not_writable(told));
    }

    /// Lets go of all that the socket has of the system's, whoever may still call it.
    pub(super) fn close(&self) {
        self.inline.store(None);
        self.state().teller = None;
    }

    fn state(&self) -> MutexGuard<'_, WakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WakeReader for Wake {
    fn wake(&self, hub: &SocketQueue) {
        self.inline.load().iter().flat_map(|inline| inline.iter()).for_each(|(_, wake)| wake());
        let mut state = self.state();
        state.wakes.0 += 1;
        let WakeState { teller, due, .. } = &mut *state;
        // What it is woken for may have been read already, by somebody who was awake.
        if let Some(teller) = teller.as_mut().filter(|_| hub.has_news(*due)) {
            teller.readable();
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl Sleeper<'_> {
    /// Sleeps until it is woken, at most so long.
    pub(super) fn sleep(self, at_most: Option<Duration>) {
        let Self { wake, seen } = &self;
        let (state, sleeps) = (wake.state(), |state: &mut WakeState| state.wakes == *seen);
        match at_most {
            None => drop(wake.changed.wait_while(state, sleeps)),
            Some(at_most) => drop(wake.changed.wait_timeout_while(state, at_most, sleeps)),
        }
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.wake.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}
