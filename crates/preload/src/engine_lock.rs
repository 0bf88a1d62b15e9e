//! Lock of an engine, of which forks leave a copy in several processes: the process that has the lock runs the engine.
//! Also the order of such engines, and the slots of the processes that run one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use forebay_sys::hidden::Hidden;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::thread::futex;

use crate::abi;
use crate::abi::Span;
use crate::mailbox::Mailbox;
use crate::shares::{SLOTS, SharedTable, Shares};

/// Words that all processes share.
const CHANGES: usize = 0;
const LAST: usize = 1;
/// Counts of forks that copied an engine, and of children that have recorded their copy, by the engine's number modulo
/// `COUNTED`: children of an engine that is older by `COUNTED` have recorded theirs long ago.
const FORKS: usize = 2;
const COPIES: usize = FORKS + COUNTED;
const WORDS: usize = COPIES + COUNTED;
const COUNTED: usize = 64;

/// Files of a lock: of the engines, of the table, and the ends of the mailbox.
pub(crate) const FILES: usize = 4;

/// Sizes of what the files have: a library with others cannot use them.
pub(crate) const LAYOUT: [usize; 2] = [WORDS, SharedTable::WORDS];

/// Pause before a number is locked again.
const RETRY: Duration = Duration::from_millis(1);

/// Place in the file of the bytes that say which engines were run.
const RUN_AT: u64 = 4096;

/// Place of the locks, in the file of the table, of processes that have a copy of an engine. Those of slots are
/// at the beginning.
const COPIES_AT: u32 = 1 << 20;

/// One engine's lock. All copies of all engines share a file; byte `number` is locked by the process that runs this
/// engine. A second byte, written at the start, records that the engine was run, so that the other copies are stale.
pub(crate) struct EngineLock {
    file: Arc<Hidden>,
    words: &'static [AtomicU32; WORDS],
    number: u32,
    /// File of the table.
    slots: Arc<Hidden>,
    shares: Arc<Shares>,
    mailbox: Arc<Mailbox>,
    /// Taken while slots are cleared: the locks of files exclude processes, not threads. A child has an engine, and so
    /// a lock, of its own.
    evicting: Mutex<()>,
}

impl EngineLock {
    /// Lock of the first engine.
    pub(crate) fn new() -> io::Result<Self> {
        let (file, slots) = (memory_file("forebay-lock")?, memory_file("forebay-shares")?);
        let words = abi::shared_words(file.as_fd())?;
        let shares = Arc::new(Shares::new(SharedTable::new(slots.as_fd())?));
        let (slots, mailbox) = (Arc::new(slots), Arc::new(Mailbox::new()?));
        let (file, evicting) = (Arc::new(file), Mutex::default());
        Ok(Self { file, words, number: 0, slots, shares, mailbox, evicting })
    }

    /// Lock by the [files](Self::files) and the number that this process had as another program.
    pub(crate) fn of_files(
        [file, slots, near, far]: [Hidden; FILES],
        number: u32,
    ) -> io::Result<Self> {
        let words = abi::kept_words(file.as_fd())?;
        let shares = Arc::new(Shares::new(SharedTable::kept(slots.as_fd())?));
        let (slots, mailbox) = (Arc::new(slots), Arc::new(Mailbox::of_ends(near, far)));
        let (file, evicting) = (Arc::new(file), Mutex::default());
        Ok(Self { file, words, number, slots, shares, mailbox, evicting })
    }

    /// Number of the engine.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Files that all processes share.
    pub(crate) fn files(&self) -> [BorrowedFd<'_>; FILES] {
        let [near, far] = self.mailbox.ends();
        [self.file.as_fd(), self.slots.as_fd(), near, far]
    }

    /// Lock of another engine, for another process.
    pub(crate) fn next(&self) -> Self {
        let number = self.words[LAST].fetch_add(1, Ordering::SeqCst) + 1;
        for kind in [FORKS, COPIES] {
            self.words[kind + counted(number)].store(0, Ordering::SeqCst);
        }
        self.numbered(number)
    }

    /// Lock of the same engine, for a process that has run none by it.
    pub(crate) fn again(&self) -> Self {
        self.numbered(self.number)
    }

    fn numbered(&self, number: u32) -> Self {
        let (file, slots) = (Arc::clone(&self.file), Arc::clone(&self.slots));
        let (shares, mailbox) = (Arc::new(self.shares.next()), Arc::clone(&self.mailbox));
        let evicting = Mutex::default();
        Self { file, words: self.words, number, slots, shares, mailbox, evicting }
    }

    /// Place of the engine's process in the table of all.
    pub(crate) fn shares(&self) -> &Arc<Shares> {
        &self.shares
    }

    /// Connections that processes pass on.
    pub(crate) fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    /// Reserves a slot of the table for this process, until it ends. `None` if all are taken.
    pub(crate) fn reserve(&self) -> Option<usize> {
        (0..SLOTS).find(|slot| abi::lock(self.slots.as_fd(), slot_span(*slot)))
    }

    /// Lets other processes have the slot that this one has reserved.
    pub(crate) fn unreserve(&self, slot: usize) {
        abi::unlock(self.slots.as_fd(), slot_span(slot));
    }

    /// Enters the table at the slot that this process has reserved.
    pub(crate) fn enter(&self, slot: usize) {
        self.shares.enter(slot);
        // The others look for its end from now on.
        self.notify_change();
    }

    /// True if this process may take a slot, besides the one that it may have.
    pub(crate) fn has_free_slot(&self) -> bool {
        let is_free = |slot: &usize| {
            self.shares.own() != Some(*slot)
                && abi::lock_holder(self.slots.as_fd(), slot_span(*slot)).is_none()
        };
        (0..SLOTS).any(|slot| is_free(&slot))
    }

    /// Removes the processes from the table that have ended. True if there were such.
    pub(crate) fn evict_dead(&self) -> bool {
        let _evicting = self.evicting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_changed = false;
        for slot in self.shares.others() {
            // Locked while it is cleared: nobody takes the slot.
            if abi::lock(self.slots.as_fd(), slot_span(slot)) {
                is_changed |= self.shares.evict(slot);
                abi::unlock(self.slots.as_fd(), slot_span(slot));
            }
        }
        is_changed
    }

    /// Announces a fork, whose child gets a copy of the engine.
    pub(crate) fn before_copy(&self) {
        self.words[FORKS + counted(self.number)].fetch_add(1, Ordering::SeqCst);
    }

    /// Notes in a child that it has a copy of the engine, until it ends or runs another program.
    pub(crate) fn note_copy(&self) {
        abi::lock_shared(self.slots.as_fd(), self.copies());
        self.words[COPIES + counted(self.number)].fetch_add(1, Ordering::SeqCst);
    }

    /// True if another process may run the engine, or has.
    pub(crate) fn may_be_others(&self) -> bool {
        let [forks, copies] = [FORKS, COPIES]
            .map(|kind| self.words[kind + counted(self.number)].load(Ordering::SeqCst));
        forks != copies
            || self.was_run()
            || abi::lock_holder(self.slots.as_fd(), self.copies()).is_some()
    }

    /// Locks the engine for this process. False if a process has or had it locked.
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

    /// Waits until no other process has the engine, and locks it. False if that failed.
    pub(crate) fn wait(&self) -> bool {
        abi::lock_in_turn(self.file.as_fd(), self.own())
    }

    /// Waits until all newer engines have ended. False if that failed.
    pub(crate) fn await_newer(&self) -> bool {
        let have_ended = abi::lock_in_turn(self.file.as_fd(), self.newer());
        abi::unlock(self.file.as_fd(), self.newer());
        have_ended
    }

    /// Unlocks the engine.
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

    /// Number of changes to the table so far.
    pub(crate) fn changes(&self) -> u32 {
        self.words[CHANGES].load(Ordering::SeqCst)
    }

    /// Notifies all processes that the table has changed.
    pub(crate) fn notify_change(&self) {
        self.words[CHANGES].fetch_add(1, Ordering::SeqCst);
        // Ignored: nobody waits.
        let _ = futex::wake(&self.words[CHANGES], futex::Flags::empty(), u32::MAX);
    }

    /// Waits until the count of changes is no longer `seen`, or until `at_most` has passed.
    pub(crate) fn await_change(&self, seen: u32, at_most: Option<Duration>) {
        let timeout = at_most.and_then(|wait| futex::Timespec::try_from(wait).ok());
        // Ignored: it is looked at again.
        let _ = futex::wait(&self.words[CHANGES], futex::Flags::empty(), seen, timeout.as_ref());
    }

    fn own(&self) -> Span {
        Span { first: self.number, len: Some(1) }
    }

    fn newer(&self) -> Span {
        Span { first: self.number + 1, len: None }
    }

    fn copies(&self) -> Span {
        Span { first: COPIES_AT + self.number, len: Some(1) }
    }
}

fn counted(number: u32) -> usize {
    number as usize % COUNTED
}

fn slot_span(slot: usize) -> Span {
    Span { first: u32::try_from(slot).unwrap_or(0), len: Some(1) }
}

/// Makes a file in memory, which the program does not know.
fn memory_file(name: &str) -> io::Result<Hidden> {
    Ok(Hidden::new(memfd_create(name, MemfdFlags::CLOEXEC)?)?)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::SocketAddr;
    use std::os::fd::AsRawFd;
    use std::process::{Child, Command, Stdio};

    use forebay_stack::Division;

    use super::*;

    /// Another process, which has the lock of a slot until it is dropped.
    pub(crate) struct Other(Child);

    impl Other {
        /// `None` if it does not get the lock.
        pub(crate) fn new(engine_lock: &EngineLock, slot: usize) -> Option<Self> {
            let lock = "
import fcntl, os, sys
file = open(sys.argv[1], 'r+b', buffering=0)
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(sys.argv[2]))
    print('locked', flush=True)
except OSError:
    print('refused', flush=True)
sys.stdin.read()
";
            let own = std::process::id();
            let file = format!("/proc/{own}/fd/{}", engine_lock.slots.as_raw_fd());
            let mut command = Command::new("python3");
            command.args(["-c", lock, &file, &slot.to_string()]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut this = Self(command.spawn().unwrap());
            let mut word = String::new();
            BufReader::new(this.0.stdout.take().unwrap()).read_line(&mut word).unwrap();
            (word == "locked\n").then_some(this)
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            drop(self.0.stdin.take());
            let _ = self.0.wait();
        }
    }

    #[test]
    fn exe_8_own_slot_is_kept() {
        let engine_lock = EngineLock::new().unwrap();
        assert!(
            engine_lock.has_free_slot() && Other::new(&engine_lock, 0).is_some(),
            "not taken by a look"
        );
        let changes = engine_lock.changes();
        assert_eq!(engine_lock.reserve(), Some(0));
        engine_lock.enter(0);
        assert_ne!(engine_lock.changes(), changes, "others are told");
        assert!(engine_lock.has_free_slot() && !engine_lock.evict_dead());
        assert!(Other::new(&engine_lock, 0).is_none(), "a look leaves the slot to its process");
    }

    #[test]
    fn exe_8_reserved_slot_is_no_others() {
        let engine_lock = EngineLock::new().unwrap();
        let slot = engine_lock.reserve().unwrap();
        assert!(Other::new(&engine_lock, slot).is_none());
        engine_lock.unreserve(slot);
        assert!(Other::new(&engine_lock, slot).is_some());
    }

    #[test]
    fn exe_8_failed_fork_opens_one_engine() {
        let engine_lock = EngineLock::new().unwrap();
        assert!(!engine_lock.may_be_others());
        engine_lock.before_copy();
        assert!(engine_lock.may_be_others(), "no child has noted its copy");
        let next = engine_lock.next();
        assert!(!next.may_be_others(), "one engine more is enough");
        next.before_copy();
        next.note_copy();
        assert!(!next.may_be_others(), "this process has all copies");
    }

    #[test]
    fn exe_10_kept_lock_shares_all() {
        let before = EngineLock::new().unwrap();
        before.enter(before.reserve().unwrap());
        let files = before.files().map(|file| Hidden::duplicate(file).unwrap());
        let kept = EngineLock::of_files(files, before.number()).unwrap();
        let [ours, its] = [&kept, &before].map(|lock| lock.shares());
        assert_eq!((ours.secret(), ours.origin_ns()), (its.secret(), its.origin_ns()));
        assert_eq!((ours.own(), kept.changes()), (None, before.changes()));
        let files = [(); FILES].map(|()| memory_file("too-short").unwrap());
        assert!(EngineLock::of_files(files, 0).is_err());
    }

    #[test]
    fn exe_8_childs_lock_has_no_state() {
        let parents = EngineLock::new().unwrap();
        parents.enter(parents.reserve().unwrap());
        parents.shares.join("192.0.2.1:80".parse::<SocketAddr>().unwrap());
        parents.shares.take_free();
        let _evicting = parents.evicting.lock().unwrap();
        let own = parents.again();
        assert_eq!((own.shares.own(), own.shares.needed()), (None, 0));
        own.enter(1);
        assert!(own.shares.has_other_members("192.0.2.1:80".parse().unwrap()));
        assert!(own.evict_dead(), "the lock is free; those of files do not exclude this process");
    }

    #[test]
    fn exe_8_slot_is_cleared_once() {
        let engine_lock = EngineLock::new().unwrap();
        engine_lock.enter(engine_lock.reserve().unwrap());
        let ended = engine_lock.next();
        ended.shares.enter(1);
        let changes = thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(|| engine_lock.evict_dead()));
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(changes.into_iter().filter(|is_changed| *is_changed).count(), 1);
        ended.shares.enter(1);
        let live = Other::new(&engine_lock, 1).unwrap();
        assert!(!engine_lock.evict_dead(), "it lives");
        drop(live);
        assert!(engine_lock.evict_dead());
    }
}
