//! Critical sections: parts of calls in which the thread may hold locks of the library. The handler of a signal that comes
//! meanwhile runs at their end.
//!
//! POSIX lets a handler make most of the calls of this library, also while its thread is in the middle of one. The handler
//! would then wait for ever for a lock that its own thread holds, so signals are held back: the exported `sigaction` puts a
//! function in front of the program's handlers. If the thread is in a critical part, that function blocks the signal and
//! sends it anew. This costs no system call unless a signal comes.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

use crate::abi;

thread_local! {
    static STATE: State = const {
        State { depth: AtomicU32::new(0), held: AtomicU64::new(0), handled: AtomicU64::new(0) }
    };
}

/// State of a thread, which handlers change between any two instructions.
struct State {
    /// Number of parts that have begun, one within the other.
    depth: AtomicU32,
    /// Signals that are held back, by bits.
    held: AtomicU64,
    /// Signals whose handlers have run since the call began, or began its last wait, by bits.
    handled: AtomicU64,
}

/// Part of a call, until the value is dropped.
pub(crate) struct Critical(PhantomData<*mut ()>);

/// Begins a part of a call.
pub(crate) fn enter() -> Critical {
    STATE.with(|state| {
        let depth = state.depth.load(Ordering::Relaxed);
        if depth == 0 {
            state.handled.store(0, Ordering::Relaxed);
        }
        state.depth.store(depth + 1, Ordering::Relaxed);
    });
    // A handler sees the count before any lock is taken.
    compiler_fence(Ordering::SeqCst);
    Critical(PhantomData)
}

impl Drop for Critical {
    fn drop(&mut self) {
        leave();
    }
}

/// Ends a part that was [begun](enter), and whose value was forgotten.
pub(crate) fn leave() {
    compiler_fence(Ordering::SeqCst);
    STATE.with(|state| {
        let left = state.depth.load(Ordering::Relaxed).saturating_sub(1);
        state.depth.store(left, Ordering::Relaxed);
        if left == 0 {
            state.run_held_handlers();
        }
    });
}

/// Signals whose handlers have run since the call, or its last wait, began. They interrupt the wait that follows, as in the
/// kernel, where no wait begins with a signal pending.
#[derive(Clone, Copy)]
pub(crate) struct Handled(u64);

impl Handled {
    pub(crate) const NONE: Self = Self(0);

    /// True if there are some.
    pub(crate) fn has_any(self) -> bool {
        self.0 != 0
    }

    /// True if the handler of one of them has no `SA_RESTART`.
    pub(crate) fn end_call(self) -> bool {
        self.has_any() && !abi::restart(self.0)
    }
}

/// Waits in the kernel within a part, without any lock: handlers run meanwhile, and may make calls of their own.
pub(crate) fn outside<T>(wait: impl FnOnce(Handled) -> T) -> T {
    STATE.with(|state| {
        let depth = state.depth.swap(0, Ordering::Relaxed);
        state.run_held_handlers();
        let result = wait(Handled(state.handled.swap(0, Ordering::Relaxed)));
        state.depth.store(depth, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        result
    })
}

/// True within a part.
pub(crate) fn is_inside() -> bool {
    STATE.with(|state| state.depth.load(Ordering::Relaxed)) > 0
}

/// Notes that a signal is held back, by its bit. It is blocked from then on.
pub(crate) fn hold(signal: u64) {
    STATE.with(|state| state.held.fetch_or(signal, Ordering::Relaxed));
}

/// Runs the handler of a signal, by its bit. Calls in the handler leave the set of the interrupted call as it was.
pub(crate) fn run_handler(signal: u64, run: impl FnOnce()) {
    STATE.with(|state| {
        let before = state.handled.load(Ordering::Relaxed);
        run();
        state.handled.store(before | signal, Ordering::Relaxed);
    });
}

impl State {
    /// Runs the handlers that were held back.
    fn run_held_handlers(&self) {
        compiler_fence(Ordering::SeqCst);
        if self.held.load(Ordering::Relaxed) != 0 {
            let held = self.held.swap(0, Ordering::Relaxed);
            // Handlers must not change the `errno` that the call has set.
            abi::keeping_errno(|| abi::unblock(held));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_4_signals_are_held_within_parts() {
        const ALARM: u64 = 1 << 13;
        let held = || STATE.with(|state| state.held.load(Ordering::Relaxed));
        assert!(!is_inside());
        let outer = enter();
        let inner = enter();
        hold(ALARM);
        hold(1);
        drop(inner);
        assert!(is_inside() && held() == ALARM | 1);
        outside(|handled| assert!(!is_inside() && held() == 0 && !handled.has_any()));
        assert!(is_inside());
        hold(ALARM);
        drop(outer);
        assert!(!is_inside() && held() == 0);
    }

    #[test]
    fn exe_4_handlers_end_later_waits() {
        const ALARM: u64 = 1 << 13;
        let ends_wait = || outside(|handled| (handled.has_any(), handled.end_call()));
        let call = enter();
        assert_eq!(ends_wait(), (false, false));
        outside(|_| run_handler(ALARM, || drop(enter())));
        assert_eq!(ends_wait(), (true, true), "no handler has SA_RESTART");
        assert_eq!(ends_wait(), (false, false), "a call that goes on waits then");
        outside(|_| {
            run_handler(ALARM, || ());
            run_handler(1, || assert_eq!(ends_of_call(), (false, false), "another call"));
        });
        assert_eq!(ends_wait(), (true, true));
        outside(|_| run_handler(ALARM, || ()));
        drop(call);
        assert_eq!(ends_of_call(), (false, false));
    }

    fn ends_of_call() -> (bool, bool) {
        let _call = enter();
        outside(|handled| (handled.has_any(), handled.end_call()))
    }
}
