//! Mailboxes for items that are handed over to a CPU.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Items handed to one CPU, oldest first.
pub(crate) struct Mailbox<T> {
    has_mail: AtomicBool,
    mail: Mutex<Vec<T>>,
}

impl<T> Mailbox<T> {
    /// Adds an item. Wake the CPU afterwards.
    pub(crate) fn put(&self, mail: T) {
        self.mail().push(mail);
        // Release: pairs with the load in `has_mail`.
        self.has_mail.store(true, Ordering::Release);
    }

    /// True if there are items; costs one load.
    pub(crate) fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// Takes all items.
    pub(crate) fn take(&self) -> Vec<T> {
        let mut mail = self.mail();
        self.has_mail.store(false, Ordering::Relaxed);
        std::mem::take(&mut mail)
    }

    fn mail(&self) -> MutexGuard<'_, Vec<T>> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Self { has_mail: AtomicBool::new(false), mail: Mutex::default() }
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mailbox({} waiting)", self.mail().len())
    }
}
