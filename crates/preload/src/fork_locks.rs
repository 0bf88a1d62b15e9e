//! Locks that a thread takes before it forks, so that the child finds them free: other threads, which may have held
//! them, are not copied.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::{Mutex, MutexGuard, RwLock, RwLockWriteGuard, TryLockError, TryLockResult};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for a lock: its holder may be this thread, interrupted by a signal whose handler forks.
const WAIT_MAX: Duration = Duration::from_secs(1);
const WAIT_LOOK: Duration = Duration::from_millis(1);

thread_local! {
    /// Locks of this thread while it forks.
    static KEPT: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
    /// True if it could not take a lock before it forks.
    static HAS_MISSED: Cell<bool> = const { Cell::new(false) };
}

/// Takes a lock before a fork, unless that takes too long.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    lock_by(|| mutex.try_lock())
}

/// Takes a lock that others share, before a fork, unless that takes too long.
pub(crate) fn lock_alone<T>(shared: &RwLock<T>) -> Option<RwLockWriteGuard<'_, T>> {
    lock_by(|| shared.try_write())
}

fn lock_by<G>(attempt: impl Fn() -> TryLockResult<G>) -> Option<G> {
    let began = Instant::now();
    loop {
        match attempt() {
            Ok(locked) => return Some(locked),
            Err(TryLockError::Poisoned(locked)) => return Some(locked.into_inner()),
            Err(TryLockError::WouldBlock) if began.elapsed() < WAIT_MAX => thread::sleep(WAIT_LOOK),
            Err(TryLockError::WouldBlock) => {
                let _ = HAS_MISSED.try_with(|missed| missed.set(true));
                return None;
            }
        }
    }
}

/// Keeps a lock until the process has forked.
pub(crate) fn keep(locked: impl Any) {
    // Ignored: a thread that forks as it ends has no locks to keep.
    let _ = KEPT.try_with(|kept| kept.borrow_mut().push(Box::new(locked)));
}

/// Releases the locks that were kept, in the parent and in the child. True if the thread had all, so that they are free
/// in the child; another one may be locked there for good.
pub(crate) fn release() -> bool {
    let has_missed = HAS_MISSED.try_with(Cell::take).unwrap_or(true);
    let kept = KEPT.try_with(RefCell::take).unwrap_or_default();
    !kept.is_empty() && !has_missed
}

#[cfg(test)]
mod tests {
    use std::sync::PoisonError;

    use super::*;

    #[test]
    fn exe_8_child_spares_locks_not_kept() {
        static LOCKS: [Mutex<()>; 2] = [const { Mutex::new(()) }; 2];
        let keep_all = || LOCKS.iter().filter_map(lock).for_each(keep);
        assert!(!release(), "nothing was kept, as by a fork in a child of vfork");
        keep_all();
        assert!(release());
        // As a handler that forks while its thread has the lock.
        let held = LOCKS[1].lock().unwrap_or_else(PoisonError::into_inner);
        keep_all();
        assert!(!release(), "the second is locked in the child");
        assert!(LOCKS[0].try_lock().is_ok());
        drop(held);
        keep_all();
        assert!(release());
    }
}
