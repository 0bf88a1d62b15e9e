//! Periodic tasks beside a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_sys::error::{Error, Result};
use forebay_sys::failure::{FailureNote, FirstFailure};
use tracing::error;

/// Interval between two checks for a failure.
const LOG_PERIOD: Duration = Duration::from_millis(100);

/// Starts a thread; `work` says for an error what it does.
pub(crate) fn spawn(
    work: &'static str,
    act: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    thread::Builder::new().spawn(act).map_err(|source| Error::Helper { work, source })
}

/// A thread that repeats a task until this value is dropped.
pub(crate) struct Ticker {
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Starts the task: runs it now, and then every `period`. `work` says for an error what it does, as in
    /// "watches the links".
    pub(crate) fn every(
        period: Duration,
        work: &'static str,
        mut act: impl FnMut() + Send + 'static,
    ) -> Result<Self> {
        let done = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&done);
        let repeat = move || {
            while !ended.load(Ordering::Relaxed) {
                act();
                thread::park_timeout(period);
            }
        };
        Ok(Self { done, thread: Some(spawn(work, repeat)?) })
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

/// Messages about failures of a run, each as soon as it happens. Dropping the value reports the
/// last ones.
pub(crate) struct FailureMessages {
    failures: Arc<Failures>,
    ticker: Option<Ticker>,
}

/// Failures of a run, each with a mark of its message.
struct Failures(Vec<(FirstFailure, AtomicBool)>);

impl FailureMessages {
    pub(crate) fn begin(failures: Vec<FirstFailure>) -> Result<Self> {
        let unmarked = failures.into_iter().map(|failure| (failure, AtomicBool::new(false)));
        let failures = Arc::new(Failures(unmarked.collect()));
        let looked = Arc::clone(&failures);
        let ticker = Ticker::every(LOG_PERIOD, "tells of failures", move || looked.log_new())?;
        Ok(Self { failures, ticker: Some(ticker) })
    }
}

impl Drop for FailureMessages {
    fn drop(&mut self) {
        drop(self.ticker.take());
        self.failures.log_new();
    }
}

impl Failures {
    /// Logs the failures that have happened since they were logged last.
    fn log_new(&self) {
        for (failure, is_logged) in &self.0 {
            if let Some(FailureNote { problem, consequence, help }) = failure.get()
                && !is_logged.swap(true, Ordering::Relaxed)
            {
                error!(problem, consequence, help, "{problem}; {consequence}; {help}");
            }
        }
    }
}
