//! Signals: those that a thread blocks, and those that the process ignores.

use std::mem::MaybeUninit;

/// True if the process ignores a signal, as `nohup` and shells have programs do that they start.
#[must_use]
pub fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action nothing changes, and `action` is room for the present one.
    let read = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    if read != 0 {
        return false;
    }
    // SAFETY: the call that succeeded has written all of it.
    unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}

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
