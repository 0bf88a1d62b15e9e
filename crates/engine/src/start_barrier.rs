//! Barrier at which the threads of a run wait for each other, asleep: threads that spin with
//! `sched_yield` pass the CPU on to everybody else for as long as the machine is busy.

use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Barrier that releases the threads of a run, once, when all of them are ready on their CPUs.
#[derive(Debug, Default)]
pub(super) struct StartBarrier {
    ready_threads: Mutex<usize>,
    changed: Condvar,
    /// Time on the engine's clock at which the barrier released them.
    released_ns: OnceLock<u64>,
}

impl StartBarrier {
    /// Marks the calling thread as ready, and returns when all are.
    pub(super) fn arrive(&self) {
        let mut ready_threads = self.lock();
        *ready_threads += 1;
        self.changed.notify_all();
        let passed = self.changed.wait_while(ready_threads, |_| !self.is_released());
        drop(passed.unwrap_or_else(PoisonError::into_inner));
    }

    /// Releases the threads once `threads` of them are ready, and returns the time of `now_ns` then.
    pub(super) fn release_when_ready(&self, threads: usize, now_ns: impl FnOnce() -> u64) -> u64 {
        let ready = self.changed.wait_while(self.lock(), |ready| *ready < threads);
        let released_ns = *self.released_ns.get_or_init(now_ns);
        self.changed.notify_all();
        drop(ready.unwrap_or_else(PoisonError::into_inner));
        released_ns
    }

    /// Waits until the threads are released, `timeout` at most, without being one of the threads.
    pub(super) fn wait(&self, timeout: Duration) {
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, |_| !self.is_released());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Time on the engine's clock at which the barrier released them; `None` before.
    pub(super) fn released_ns(&self) -> Option<u64> {
        self.released_ns.get().copied()
    }

    /// True once the threads are released.
    pub(super) fn is_released(&self) -> bool {
        self.released_ns.get().is_some()
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.ready_threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn nobody_passes_before_the_last_arrives() {
        const THREADS: usize = 4;
        for _ in 0..200 {
            let (barrier, arrived) = (StartBarrier::default(), AtomicUsize::new(0));
            thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        arrived.fetch_add(1, Ordering::Relaxed);
                        barrier.arrive();
                        assert_eq!(arrived.load(Ordering::Relaxed), THREADS);
                        assert_eq!(barrier.released_ns(), Some(7));
                    });
                }
                scope.spawn(|| {
                    barrier.wait(Duration::MAX);
                    assert!(barrier.is_released());
                });
                assert_eq!(barrier.release_when_ready(THREADS, || 7), 7);
            });
        }
    }

    #[test]
    fn wait_ends_although_nobody_comes() {
        let barrier = StartBarrier::default();
        barrier.wait(Duration::from_millis(1));
        assert_eq!(barrier.released_ns(), None);
    }
}
