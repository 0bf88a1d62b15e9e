//! Where a queue waits for the CPU that is to poll it from now on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::queue::Queue;

/// The queues that were handed to one CPU.
#[derive(Default)]
pub(super) struct Mailbox {
    has_mail: AtomicBool,
    queues: Mutex<Vec<Queue>>,
}

impl Mailbox {
    /// Hands a queue over. Ring the CPU's bell afterwards.
    pub(super) fn put(&self, queue: Queue) {
        self.queues().push(queue);
        // Release: pairs with the load in `has_mail`.
        self.has_mail.store(true, Ordering::Release);
    }

    /// Whether there is anything, at the cost of one load.
    pub(super) fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// Takes all that was handed over.
    pub(super) fn take(&self) -> Vec<Queue> {
        let mut queues = self.queues();
        self.has_mail.store(false, Ordering::Relaxed);
        std::mem::take(&mut queues)
    }

    fn queues(&self) -> MutexGuard<'_, Vec<Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mailbox({} queues)", self.queues().len())
    }
}
