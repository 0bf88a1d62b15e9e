//! Queues of a device that can send now.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Queues of a device that can send now, for its sinks. A device in another process may have fewer
/// queues than requested, and may lose some.
#[derive(Debug)]
pub(crate) struct UsableQueues {
    /// Number of queues, usable or not.
    count: usize,
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
    /// By queue.
    is_usable: Vec<bool>,
}

impl UsableQueues {
    /// Returns a list of all of `count` queues.
    pub(crate) fn all(count: usize) -> Self {
        Self { count, changes: AtomicU64::new(0), list: Mutex::new((0..count).collect()) }
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
        UsableCopy {
            seen: self.changes.load(Ordering::Relaxed),
            is_usable: (0..self.count).map(|queue| list.contains(&queue)).collect(),
            list: list.clone(),
        }
    }
}

impl UsableCopy {
    /// Copies the list again if it has changed. Costs one load of a rarely written word.
    #[inline]
    pub(super) fn follow(&mut self, of: &UsableQueues) {
        if of.changes.load(Ordering::Acquire) != self.seen {
            *self = of.copy();
        }
    }

    /// Returns the queue of a flow, by its hash. Only flows of a queue that cannot send go to others: those that wait in a
    /// queue must not be overtaken in another.
    #[inline]
    pub(super) fn queue_of(&self, hash: usize) -> usize {
        let home = hash % self.is_usable.len();
        match self.is_usable[home] {
            true => home,
            false => self.list[hash / self.is_usable.len() % self.list.len()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_of_others_keep_their_queue() {
        let queues = UsableQueues::all(4);
        let mut copy = queues.copy();
        let mut expect = |usable: &[usize]| {
            copy.follow(&queues);
            let mut taken = [false; 4];
            for hash in 0..100 {
                let (home, queue) = (hash % 4, copy.queue_of(hash));
                assert!(usable.contains(&queue) && (queue == home || !usable.contains(&home)));
                taken[queue] = true;
            }
            assert_eq!(taken.iter().filter(|taken| **taken).count(), usable.len());
        };
        expect(&[0, 1, 2, 3]);
        queues.set_first(3);
        expect(&[0, 1, 2]);
        queues.remove(0);
        queues.remove(0);
        expect(&[1, 2]);
        [1, 2].into_iter().for_each(|queue| queues.remove(queue));
        expect(&[2]);
        queues.set_first(4);
        expect(&[0, 1, 2, 3]);
    }
}
