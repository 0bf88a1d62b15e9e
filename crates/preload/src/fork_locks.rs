//! Locks that a thread takes before it forks, so that the child finds them free: other threads, which may have held
//! them, are not copied.

use std::any::Any;
use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for a lock: its holder may be this thread, interrupted by a signal whose handler forks.
const WAIT_MAX: Duration = Duration::from_secs(1);
const WAIT_LOOK: Duration = Duration::from_millis(1);

thread_local! {
    /// Locks of this thread while it forks.
    static KEPT: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// Takes a lock, unless that takes too long.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    let began = Instant::now();
    loop {
        match mutex.try_lock() {
            Ok(locked) => return Some(locked),
            Err(TryLockError::Poisoned(locked)) => return Some(locked.into_inner()),
            Err(TryLockError::WouldBlock) if began.elapsed() < WAIT_MAX => thread::sleep(WAIT_LOOK),
            Err(TryLockError::WouldBlock) => return None,
        }
    }
}

/// Keeps a lock until the process has forked.
pub(crate) fn keep<T>(locked: MutexGuard<'static, T>) {
    // Ignored: a thread that forks as it ends has no locks to keep.
    let _ = KEPT.try_with(|kept| kept.borrow_mut().push(Box::new(locked)));
}

/// Releases the locks that were kept, in the parent and in the child.
pub(crate) fn release() {
    let _ = KEPT.try_with(|kept| kept.take());
}
