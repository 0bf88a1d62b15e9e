//! Periodic tasks beside a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::error;

/// Interval between two checks for a failure.
const TELL_PERIOD: Duration = Duration::from_millis(100);

/// A thread that repeats a task until this value is dropped.
pub(crate) struct Ticker {
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Starts the task: runs it now, and then every `period`.
    pub(crate) fn every(period: Duration, mut act: impl FnMut() + Send + 'static) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&done);
        let thread = thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                act();
                thread::park_timeout(period);
            }
        });
        Self { done, thread: Some(thread) }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Ignored: a panic of the task does not affect the run.
            let _ = thread.join();
        }
    }
}

/// Reports, once, on standard error the first failure that keeps packets from being written.
pub(crate) fn tell_once(mut failure: impl FnMut() -> Option<String> + Send + 'static) -> Ticker {
    let mut is_told = false;
    Ticker::every(TELL_PERIOD, move || {
        if !is_told && let Some(failure) = failure() {
            error!("{failure}; what follows is counted as not_written");
            is_told = true;
        }
    })
}
