//! Live changes on their way to the threads: numbered, in one order for all of them.

use std::sync::Arc;

use super::log::{Cursor, Writer};
use crate::control::{Change, Script};

/// What the log holds.
#[derive(Debug)]
pub(super) struct Entry {
    /// The epoch that begins with it.
    pub(super) epoch: u32,
    /// What changes.
    pub(super) change: Change,
    /// Whether the script says so, rather than somebody who watches.
    pub(super) is_scripted: bool,
}

/// A thread's place in the log.
pub(super) type Follower = Cursor<Arc<Entry>>;

/// The writing end: behind a lock, for whoever changes something.
#[derive(Debug)]
pub(super) struct Changes {
    log: Writer<Arc<Entry>>,
    /// The number of changes so far.
    epoch: u32,
    /// How many of them the script made.
    scripted: usize,
}

impl Changes {
    pub(super) fn new() -> Self {
        Self { log: Writer::new(), epoch: 0, scripted: 0 }
    }

    /// A follower of all changes from now on.
    pub(super) fn follower(&self) -> Follower {
        self.log.cursor()
    }

    /// Makes the next changes of the script until `count` of them are made. Returns whether there
    /// were any to make.
    pub(super) fn make_scripted(&mut self, script: &Script, count: usize) -> bool {
        let due = script.changes().iter().take(count).skip(self.scripted);
        let due: Vec<_> = due.map(|scripted| scripted.change.clone()).collect();
        self.scripted += due.len();
        let is_any = !due.is_empty();
        due.into_iter().for_each(|change| self.append(change, true));
        is_any
    }

    fn append(&mut self, change: Change, is_scripted: bool) {
        self.epoch += 1;
        self.log.append(Arc::new(Entry { epoch: self.epoch, change, is_scripted }));
    }
}
