//! Parts of calls in which the thread may hold locks of the library: handlers of signals that come meanwhile run
//! at their end.
//!
//! POSIX lets a handler make most of the calls of this library, also while its thread is in the middle of one. Locks
//! that the thread holds there would never be free, so that signals are held back: the exported `sigaction` puts a
//! function in front of the program's handlers, which blocks the signal and sends it anew if the thread is inside. That
//! costs no system call unless a signal comes.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

use crate::abi;

thread_local! {
    /// Number of the thread's parts that have begun, one within the other.
    static DEPTH: AtomicU32 = const { AtomicU32::new(0) };
    /// Signals that are held back, by bits.
    static HELD: AtomicU64 = const { AtomicU64::new(0) };
}

/// Part of a call, until the value is dropped.
pub(crate) struct Critical(PhantomData<*mut ()>);

/// Begins a part of a call.
pub(crate) fn enter() -> Critical {
    DEPTH.with(|depth| depth.store(depth.load(Ordering::Relaxed) + 1, Ordering::Relaxed));
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
    let left = DEPTH.with(|depth| {
        let left = depth.load(Ordering::Relaxed).saturating_sub(1);
        depth.store(left, Ordering::Relaxed);
        left
    });
    if left == 0 {
        let_come();
    }
}

/// Waits in the kernel within a part, without any lock: handlers run meanwhile, and may make calls of their own.
pub(crate) fn outside<T>(wait: impl FnOnce() -> T) -> T {
    let depth = DEPTH.with(|depth| depth.swap(0, Ordering::Relaxed));
    let_come();
    let result = wait();
    DEPTH.with(|current| current.store(depth, Ordering::Relaxed));
    compiler_fence(Ordering::SeqCst);
    result
}

/// Holds back a signal that has come within a part. False outside.
pub(crate) fn hold(signal: u32) -> bool {
    let is_inside = DEPTH.with(|depth| depth.load(Ordering::Relaxed)) > 0;
    if is_inside {
        HELD.with(|held| held.fetch_or(1 << (signal - 1), Ordering::Relaxed));
    }
    is_inside
}

/// Has the handlers run that were held back.
fn let_come() {
    compiler_fence(Ordering::SeqCst);
    let held = HELD.with(|held| match held.load(Ordering::Relaxed) {
        0 => 0,
        _ => held.swap(0, Ordering::Relaxed),
    });
    if held != 0 {
        abi::unblock(held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_4_signals_are_held_within_parts() {
        let held = || HELD.with(|held| held.load(Ordering::Relaxed));
        assert!(!hold(14));
        let outer = enter();
        let inner = enter();
        assert!(hold(14) && hold(1));
        drop(inner);
        assert_eq!(held(), 1 << 13 | 1);
        outside(|| assert!(!hold(14) && held() == 0, "the thread waits"));
        assert!(hold(14));
        drop(outer);
        assert!(!hold(14) && held() == 0);
    }
}
