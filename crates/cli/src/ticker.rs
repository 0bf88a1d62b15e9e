//! A task that is repeated beside a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Period of looking for what goes wrong.
const TELL_PERIOD: Duration = Duration::from_millis(100);

/// A thread that does something at intervals until this is dropped.
pub(crate) struct Ticker {
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Does it for the first time now, and then every `period`.
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
            // What it does is of no consequence to the run.
            let _ = thread.join();
        }
    }
}

/// Says on standard error what keeps packets from being written, once, as soon as there is
/// something.
pub(crate) fn tell_once(mut failure: impl FnMut() -> Option<String> + Send + 'static) -> Ticker {
    let mut is_told = false;
    Ticker::every(TELL_PERIOD, move || {
        if !is_told && let Some(failure) = failure() {
            eprintln!("forebay: {failure}; what follows is counted as not_written");
            is_told = true;
        }
    })
}
