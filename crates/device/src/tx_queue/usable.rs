//! Queues of a device that can send now.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Queues of a device that can send now, for its sinks. A device in another process may have fewer
/// queues than requested, and may lose some.
#[derive(Debug)]
pub(crate) struct UsableQueues {
    /// Number of changes of the list. Written under the lock.
    changes: AtomicU64,
    list: Mutex<Vec<usize>>,
}

/// One sink's copy of the list.
#[derive(Debug)]
pub(super) struct UsableCopy {
    /// Number of changes as of the copy.
    seen: u64,
    list: Vec<usize>,
}

impl UsableQueues {
    /// Returns a list of all of `count` queues.
    pub(crate) fn all(count: usize) -> Self {
        Self { changes: AtomicU64::new(0), list: Mutex::new((0..count).collect()) }
    }

    /// Makes the first `count` queues the usable ones.
    pub(crate) fn set_first(&self, count: usize) {
        self.change(|list| *list = (0..count).collect());
    }

    /// Takes a queue out of the list. The last one stays: it counts what it cannot send.
    pub(crate) fn remove(&self, queue: usize) {
        self.change(|list| {
            if list.len() > 1 {
                list.retain(|&it| it != queue);
            }
        });
    }

    fn change(&self, how: impl FnOnce(&mut Vec<usize>)) {
        // The list is consistent after every operation, so a poisoned lock is usable.
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        how(&mut list);
        // Release: a sink that sees the new number then takes the lock and reads the list.
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Returns a copy.
    pub(super) fn copy(&self) -> UsableCopy {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        UsableCopy { seen: self.changes.load(Ordering::Relaxed), list: list.clone() }
    }
}

impl UsableCopy {
    /// Returns the usable queues; never none. Costs one load of a rarely written word.
    #[inline]
    pub(super) fn list(&mut self, of: &UsableQueues) -> &[usize] {
        if of.changes.load(Ordering::Acquire) != self.seen {
            *self = of.copy();
        }
        &self.list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_follows_the_list() {
        let queues = UsableQueues::all(4);
        let mut copy = queues.copy();
        assert_eq!(copy.list(&queues), [0, 1, 2, 3]);
        queues.set_first(3);
        assert_eq!(copy.list(&queues), [0, 1, 2]);
        queues.remove(0);
        queues.remove(0);
        assert_eq!(copy.list(&queues), [1, 2]);
        [1, 2].into_iter().for_each(|queue| queues.remove(queue));
        assert_eq!(copy.list(&queues), [2]);
        queues.set_first(4);
        assert_eq!(copy.list(&queues), [0, 1, 2, 3]);
    }
}
