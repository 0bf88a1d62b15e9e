//! End of a run by itself: its time is over, or a part that it needs has failed.

use std::error::Error as StdError;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_buf::Pool;
use forebay_engine::Stopper;
use forebay_rx::Source;
use forebay_rx::arrive::{Attachment, Burst, FrameNeeds, PollRequest, Polled, SourceError};
use forebay_sys::error::{Error, Result};
use forebay_sys::failure::{FailureNote, FirstFailure};

use super::report::StoppedBy;

/// Consequence of a failure, as it is reported.
const CONSEQUENCE: &str = "the run ends";

/// Channel by which a run learns that it must end.
pub(super) struct Ending {
    /// Sender that is cloned for each part that can fail.
    tells: Sender<EndingNotice>,
    told: Receiver<EndingNotice>,
    failure: FirstFailure,
}

/// Reports that a part of the run has failed.
#[derive(Clone)]
pub(super) struct Alarm {
    tells: Sender<EndingNotice>,
    failure: FirstFailure,
}

enum EndingNotice {
    /// A part of the run has failed.
    Failure,
    /// The run is over.
    Over,
}

impl Default for Ending {
    fn default() -> Self {
        let (tells, told) = mpsc::channel();
        Self { tells, told, failure: FirstFailure::default() }
    }
}

impl Alarm {
    /// Reports an error. Sending fails only if the run is over.
    pub(super) fn ring(&self, error: &(dyn StdError + 'static)) {
        let note = match error.downcast_ref::<Error>() {
            Some(error) => FailureNote::of(error, CONSEQUENCE),
            None => FailureNote {
                problem: error.to_string(),
                consequence: CONSEQUENCE,
                help: "see what the device needs".to_owned(),
            },
        };
        // Only the first failure is kept.
        let _ = self.failure.set(note);
        let _ = self.tells.send(EndingNotice::Failure);
    }
}

impl Ending {
    pub(super) fn alarm(&self) -> Alarm {
        Alarm { tells: self.tells.clone(), failure: Arc::clone(&self.failure) }
    }

    /// First failure that ends the run.
    pub(super) fn failure(&self) -> &FirstFailure {
        &self.failure
    }

    /// Starts a thread that stops the run when its time is over or a part of it fails. The thread
    /// ends when the guard is finished.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn guard(self, stopper: Stopper, duration: Option<Duration>) -> Result<Guard> {
        let Self { tells, told, failure: _ } = self;
        let until = duration.and_then(|duration| Instant::now().checked_add(duration));
        let watch = move || {
            let stopped_by = wait(&told, until);
            if stopped_by.is_some() {
                stopper.stop();
            }
            stopped_by
        };
        let thread = thread::Builder::new().name("forebay-ending".to_owned()).spawn(watch);
        let refused = |source| Error::Helper { work: "watches over the run", source };
        Ok(Guard { tells, thread: thread.map_err(refused)? })
    }
}

/// Waits for the first reason to end; `None` if the run is over without one.
fn wait(told: &Receiver<EndingNotice>, until: Option<Instant>) -> Option<StoppedBy> {
    let told = match until {
        Some(until) => told.recv_timeout(until.saturating_duration_since(Instant::now())),
        None => told.recv().map_err(RecvTimeoutError::from),
    };
    match told {
        Ok(EndingNotice::Failure) => Some(StoppedBy::Failure),
        Err(RecvTimeoutError::Timeout) => Some(StoppedBy::Duration),
        Ok(EndingNotice::Over) | Err(RecvTimeoutError::Disconnected) => None,
    }
}

/// Thread that watches over a run.
pub(super) struct Guard {
    tells: Sender<EndingNotice>,
    thread: JoinHandle<Option<StoppedBy>>,
}

impl Guard {
    /// Ends the watch after the run, and returns the reason for the end, if the watch saw one.
    pub(super) fn finish(self) -> Option<StoppedBy> {
        let _ = self.tells.send(EndingNotice::Over);
        self.thread.join().unwrap_or(None)
    }
}

/// A source whose failure rings the alarm.
pub(super) struct WatchedSource {
    source: Box<dyn Source>,
    alarm: Alarm,
}

impl WatchedSource {
    pub(super) fn new(source: Box<dyn Source>, ending: &Ending) -> Self {
        Self { source, alarm: ending.alarm() }
    }
}

impl Source for WatchedSource {
    fn needs(&self) -> FrameNeeds {
        self.source.needs()
    }

    fn attach(&mut self, at: Attachment<'_>) -> Result<(), SourceError> {
        self.source.attach(at)
    }

    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        self.source.poll(ask, pool, burst).inspect_err(|error| self.alarm.ring(&**error))
    }

    fn transmit(&mut self, pool: &mut Pool) -> usize {
        self.source.transmit(pool)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.source.descriptor()
    }

    fn has_work(&mut self) -> bool {
        self.source.has_work()
    }

    fn has_unsent(&mut self) -> bool {
        self.source.has_unsent()
    }

    fn is_sending(&self) -> bool {
        self.source.is_sending()
    }
}
