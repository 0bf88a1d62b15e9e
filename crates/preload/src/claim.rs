//! Right of one process to run an engine that several have a copy of, since they were forked; and the order of
//! such engines, of which the newest takes new connections.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use forebay_stack::tcp::Succession;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::thread::futex;

use crate::abi::Span;
use crate::{abi, protected};

/// Words that all processes share.
const RECEIVING: usize = 0;
const LEADING: usize = 1;
const LAST: usize = 2;
const WORDS: usize = 3;

/// Pause before a number is locked again.
const RETRY: Duration = Duration::from_millis(1);

/// Place in the file of the bytes that say which engines were run.
const RUN_AT: u64 = 4096;

/// An engine's number, in a file that all copies of all engines share. The process that has the byte of this
/// number locked is the one that runs the engine, or has run it: another byte says that the state of the
/// copies is old.
pub(crate) struct Claim {
    file: Arc<OwnedFd>,
    words: &'static [AtomicU32; WORDS],
    number: u32,
    place: Arc<Succession>,
}

impl Claim {
    /// Claim to the first engine.
    pub(crate) fn new() -> io::Result<Self> {
        let file = memfd_create("forebay-claim", MemfdFlags::CLOEXEC)?;
        let file = protected::duplicate(&file)?;
        protected::protect(file.as_fd());
        let words = abi::shared_words(file.as_fd())?;
        Ok(Self::of(Arc::new(file), words, 0))
    }

    /// Claim to another engine, which takes new connections in place of all before it.
    pub(crate) fn next(&self) -> Self {
        let number = self.words[LAST].fetch_add(1, Ordering::SeqCst) + 1;
        Self::of(Arc::clone(&self.file), self.words, number)
    }

    fn of(file: Arc<OwnedFd>, words: &'static [AtomicU32; WORDS], number: u32) -> Self {
        let place = Arc::new(Succession::new(number, &words[RECEIVING], &words[LEADING]));
        Self { file, words, number, place }
    }

    /// Place of the engine among those of other processes.
    pub(crate) fn place(&self) -> &Arc<Succession> {
        &self.place
    }

    /// Claims the engine for this process. False if a process has or had it.
    pub(crate) fn take(&self) -> bool {
        // Another one may have all newer numbers for a moment: see `await_newer`.
        let is_locked = || abi::lock(self.file.as_fd(), self.own());
        while !is_locked() && !self.was_run() {
            thread::sleep(RETRY);
        }
        let run_at = RUN_AT + u64::from(self.number);
        is_locked() && !self.was_run() && pwrite(&self.file, &[1], run_at) == Ok(1)
    }

    /// True if a process runs or has run this engine.
    pub(crate) fn was_run(&self) -> bool {
        let mut was_run = [0; 1];
        // Beyond the end of the file nothing is read.
        pread(&self.file, &mut was_run, RUN_AT + u64::from(self.number)).is_ok() && was_run != [0]
    }

    /// Waits until no other process has the engine, or a newer one, and claims it.
    pub(crate) fn wait(&self) -> bool {
        let has_turn = abi::lock_in_turn(self.file.as_fd(), self.own());
        has_turn && self.await_newer(|| ())
    }

    /// Ends the claim.
    pub(crate) fn release(&self) {
        abi::unlock(self.file.as_fd(), self.own());
    }

    /// Process that has the engine, if it lives.
    pub(crate) fn holder(&self) -> Option<i32> {
        abi::lock_holder(self.file.as_fd(), self.own())
    }

    /// True if a process has a newer engine.
    pub(crate) fn has_newer(&self) -> bool {
        abi::lock_holder(self.file.as_fd(), self.newer()).is_some()
    }

    /// True if a process has an older engine.
    pub(crate) fn has_older(&self) -> bool {
        let older = Span { first: 0, len: Some(self.number) };
        self.number > 0 && abi::lock_holder(self.file.as_fd(), older).is_some()
    }

    /// Takes new connections from now on.
    pub(crate) fn lead(&self) {
        self.place.lead();
        // Ignored: nobody waits.
        let _ = futex::wake(&self.words[LEADING], futex::Flags::empty(), u32::MAX);
    }

    /// Waits until another process takes new connections, at most for a time.
    pub(crate) fn await_successor(&self, at_most: Option<Duration>) {
        let timeout = at_most.and_then(|wait| futex::Timespec::try_from(wait).ok());
        // Ignored: it is looked at again.
        let _ =
            futex::wait(&self.words[LEADING], futex::Flags::empty(), self.number, timeout.as_ref());
    }

    /// Waits until all newer engines have ended, and then does something before another one may begin. False if
    /// that failed.
    pub(crate) fn await_newer(&self, then: impl FnOnce()) -> bool {
        let have_ended = abi::lock_in_turn(self.file.as_fd(), self.newer());
        if have_ended {
            then();
            abi::unlock(self.file.as_fd(), self.newer());
        }
        have_ended
    }

    fn own(&self) -> Span {
        Span { first: self.number, len: Some(1) }
    }

    fn newer(&self) -> Span {
        Span { first: self.number + 1, len: None }
    }
}
