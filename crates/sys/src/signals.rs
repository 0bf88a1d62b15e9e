//! Signals of the calling thread.

use std::mem::MaybeUninit;

/// Runs `act` with all signals blocked, so that threads which it starts never run the program's handlers.
pub fn with_all_blocked<T>(act: impl FnOnce() -> T) -> T {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the call initialises the set that the pointer points to.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` was initialised above; `before` is room for a set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    let result = act();
    // SAFETY: `before` was written by the call above, which cannot fail with a valid `how`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    result
}
