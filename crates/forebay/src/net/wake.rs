//! Wake-up of a UDP socket's waiters: threads blocked in a call, CPUs whose thread reads, and pollers
//! of the socket's descriptor. Separate from [TCP's](super::tcp), whose readiness is set with a lock
//! held: here CPUs fill the queue without a lock, and a waiter looks there for what has come.
//!
//! A queue reports an arrival once, to the CPU that clears the flag of a sleeping reader, but there
//! may be several readers. So a wake-up is for all of them, and a reader that clears the flag
//! itself while others sleep wakes those.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use forebay_rx::CpuId;
use forebay_rx::arrive::Waker;
use forebay_stack::socket::queue::{SocketQueue, WakeReader};
use forebay_sys::readiness::{Ended, ReadinessDescriptor, ReadinessSetter};

/// Waiters for a socket.
#[derive(Default)]
pub(super) struct Wake {
    state: Mutex<WakeState>,
    changed: Condvar,
    /// Number of readers that sleep, or are about to.
    sleepers: AtomicU32,
    /// True if `setter` is set.
    has_setter: AtomicBool,
    /// CPUs whose threads read in their own turns, each with its waker.
    inline: ArcSwapOption<Vec<(CpuId, Waker)>>,
}

#[derive(Default)]
struct WakeState {
    /// Number of times readers were woken.
    wakes: Wakes,
    /// Writing side of the socket's descriptor; created when the descriptor is first requested.
    setter: Option<ReadinessSetter>,
    /// All packets before this ticket had been read at the last call of `not_readable`.
    due: u32,
}

/// Number of times that the readers of a socket were woken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Wakes(u64);

/// A reader that is about to sleep.
pub(super) struct Sleeper<'a> {
    wake: &'a Wake,
    seen: Wakes,
}

impl Wake {
    /// Registers a reader that is about to sleep: any arrival from now on wakes it.
    pub(super) fn sleeper(&self) -> Sleeper<'_> {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        Sleeper { wake: self, seen: self.state().wakes }
    }

    /// True if others wait that nobody would wake if a reader declared itself awake. `is_asleep` is
    /// true if that reader is counted as a sleeper.
    pub(super) fn has_others(&self, is_asleep: bool) -> bool {
        let inline = || self.inline.load().as_ref().map_or(0, |inline| inline.len());
        self.sleepers.load(Ordering::Relaxed) > is_asleep.into()
            || self.has_setter.load(Ordering::Relaxed)
            || inline() > usize::from(!is_asleep)
    }

    /// Adds a CPU that reads in its own turns, to be woken too.
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

    /// Sets the writing side of the socket's descriptor.
    pub(super) fn set_setter(&self, setter: ReadinessSetter) {
        self.state().setter = Some(setter);
        self.has_setter.store(true, Ordering::Relaxed);
    }

    /// Makes the descriptor readable.
    pub(super) fn readable(&self) {
        self.state().setter.iter_mut().for_each(ReadinessSetter::readable);
    }

    /// Makes the descriptor unreadable: all packets before the ticket `due` have been read.
    pub(super) fn not_readable(&self, due: u32, descriptor: &ReadinessDescriptor) {
        let mut state = self.state();
        state.due = due;
        state.setter.iter_mut().for_each(|setter| setter.not_readable(descriptor));
    }

    /// Makes the descriptor writable.
    pub(super) fn writable(&self) {
        self.state().setter.iter_mut().for_each(ReadinessSetter::writable);
    }

    /// Makes the descriptor unwritable: a send would block.
    pub(super) fn not_writable(&self, descriptor: &ReadinessDescriptor) {
        self.state().setter.iter_mut().for_each(|setter| setter.not_writable(descriptor));
    }

    /// Notifies pollers of the descriptor that sides of the socket have ended.
    pub(super) fn end(&self, ended: Ended, descriptor: &ReadinessDescriptor) {
        self.state().setter.iter_mut().for_each(|setter| setter.end(ended, descriptor));
    }

    /// Releases the socket's system resources, although wakers may still hold a reference to it.
    pub(super) fn close(&self) {
        self.inline.store(None);
        self.state().setter = None;
    }

    fn state(&self) -> MutexGuard<'_, WakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WakeReader for Wake {
    fn wake(&self, queue: &SocketQueue) {
        self.inline.load().iter().flat_map(|inline| inline.iter()).for_each(|(_, wake)| wake());
        let mut state = self.state();
        state.wakes.0 += 1;
        let WakeState { setter, due, .. } = &mut *state;
        // A reader may have read the packet of this wake-up, and have armed the next one, before this CPU looked for
        // sleeping readers: then no reader arms it again.
        if let Some(setter) = setter.as_mut().filter(|_| queue.has_news_else_arm(*due)) {
            setter.readable();
        }
        // A reader that is not counted yet takes note of this wake-up, by the lock, before it looks for the packet.
        let has_sleepers = self.sleepers.load(Ordering::Relaxed) > 0;
        drop(state);
        // A system call, whether or not anybody sleeps.
        if has_sleepers {
            self.changed.notify_all();
        }
    }
}

impl Sleeper<'_> {
    /// Sleeps until woken, at most for `at_most`.
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
