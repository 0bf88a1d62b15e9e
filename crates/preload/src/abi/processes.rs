//! Begin, forks and end of the process.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay_sys::signals::with_all_blocked;

use super::next::next;
use super::{by_number, exec};
use crate::critical;
use crate::runtime::finish;

/// Longest wait at the end of the process for the bytes of streams, and pause between two looks.
const FLUSH_MAX: Duration = Duration::from_secs(1);
const FLUSH_LOOK: Duration = Duration::from_millis(1);

/// Status with which the process ends, once `exit` has begun.
static STATUS: AtomicI32 = AtomicI32::new(0);

unsafe extern "C" {
    fn on_exit(run: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// # Safety
/// As `_exit(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    finish();
    let next = next!(_exit(c_int) -> !);
    // SAFETY: the caller's promise.
    unsafe { next(status) }
}

/// # Safety
/// As `_Exit(3)`.
#[cfg_attr(test, expect(non_snake_case, reason = "the C library's name"))]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the caller's promise; both are one function.
    unsafe { _exit(status) }
}

/// Runs in the parent before a fork.
extern "C" fn before_fork() {
    // Until the thread has forked, here and in the child: it holds locks.
    std::mem::forget(critical::enter());
    crate::relay::note_fork();
    crate::runtime::before_fork();
}

/// Counts forks in children.
extern "C" fn in_child() {
    crate::runtime::forked();
    crate::relay::forked(crate::runtime::parents_relay_owner());
    crate::listener::forked();
    crate::epoll_sets::forked();
    crate::udp::forked();
    // A lock that the parent could not take may be locked here for good. Then the child does not note its copy of the
    // engine: a copy that was announced counts as used, and of one that was not, who locks the engine first runs it.
    if crate::fork_locks::release() {
        crate::runtime::note_copy();
    }
    super::signals::forget_earlier();
    critical::leave();
}

/// Runs in the parent after a fork.
extern "C" fn in_parent() {
    // First: a thread that waits for a lock to close a connection looks at it next.
    crate::relay::note_fork();
    crate::fork_locks::release();
    critical::leave();
}

/// Runs when the library is loaded.
extern "C" fn loaded() {
    crate::runtime::loaded();
    by_number::kernels();
    // SAFETY: the handlers live as long as the process. The child's write to atomics, and release locks that its one thread
    // has; if these are all, it takes one of them once more, and locks a file unless another process has. None waits.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    // SAFETY: the function lives as long as the process, and does not use its argument.
    unsafe { on_exit(keep_status, std::ptr::null_mut()) };
    crate::runtime::prepare_at_start(exec::loaded());
}

/// Runs when the process ends by `exit` or by the end of `main`.
extern "C" fn ended() {
    let has_relays = crate::runtime::relay_owner().is_some_and(|owner| owner.has_any());
    let are_written = !has_relays || write_streams();
    crate::runtime::finish();
    if !are_written {
        // The C library would write them once more, and wait for the lock that the thread has.
        // SAFETY: ends the process.
        unsafe { libc::_exit(STATUS.load(Ordering::Relaxed)) };
    }
}

/// Keeps the status with which the process ends.
extern "C" fn keep_status(status: c_int, _: *mut c_void) {
    STATUS.store(status, Ordering::Relaxed);
}

/// Writes what the program's streams hold, which the C library does later, when connections have ended. False if a stream is
/// given up, which another thread has locked, or whose peer reads no more.
fn write_streams() -> bool {
    // SAFETY: null stands for all streams.
    let flush = || unsafe { libc::fflush(std::ptr::null_mut()) };
    let begun = with_all_blocked(|| thread::Builder::new().spawn(flush));
    let Ok(flushes) = begun else { return true };
    let began = Instant::now();
    while !flushes.is_finished() && began.elapsed() < FLUSH_MAX {
        thread::sleep(FLUSH_LOOK);
    }
    flushes.is_finished()
}

// SAFETY: the section is the list of functions that `exit` calls, without arguments.
#[cfg_attr(not(test), unsafe(link_section = ".fini_array"))]
#[used]
static ENDED: extern "C" fn() = ended;

// SAFETY: the section is the list of functions that the loader calls, without arguments, after those of the
// libraries that this one needs.
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
#[used]
static LOADED: extern "C" fn() = loaded;
