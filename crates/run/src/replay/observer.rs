//! Observer of a replay: a thread that records the timeline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_control::Control;
use forebay_engine::timeline::{Timeline, TimelineRecorder};
use forebay_sys::error::{Error, Result};

/// Least time between two samples at first, in nanoseconds: on threads, and in virtual time.
const PERIOD_NS: u64 = 100_000;
pub(super) const VIRTUAL_PERIOD_NS: u64 = 1_000;

/// Time between two looks at a run that has not begun.
const START_PERIOD: Duration = Duration::from_millis(10);

/// Thread that records the timeline of a run.
pub(super) struct Observer {
    has_ended: Arc<AtomicBool>,
    thread: JoinHandle<Option<TimelineRecorder>>,
}

impl Observer {
    /// Starts the thread; the timeline begins with the run.
    pub(super) fn of(control: Control) -> Result<Self> {
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        let observe = move || {
            let state = control.state();
            while !state.has_started() && !ended.load(Ordering::Relaxed) {
                state.wait_for_start(START_PERIOD);
            }
            let mut recorder = state.timeline(PERIOD_NS)?;
            while !ended.load(Ordering::Relaxed) {
                recorder.observe(state.now_ns());
                thread::park_timeout(Duration::from_nanos(recorder.period_ns()));
            }
            Some(recorder)
        };
        let thread = thread::Builder::new().name("timeline".to_owned()).spawn(observe);
        let thread =
            thread.map_err(|source| Error::Helper { work: "watches over the run", source })?;
        Ok(Self { has_ended, thread })
    }

    /// Ends the thread after the run, and returns the timeline.
    pub(super) fn finish(self, now_ns: u64) -> Option<Timeline> {
        self.has_ended.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        let recorder = self.thread.join().ok().flatten()?;
        Some(recorder.finish(now_ns))
    }
}
