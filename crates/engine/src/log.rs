//! Change log: live changes in one order for all threads of the engine.
//!
//! Nodes are linked and only ever appended. A reader keeps its own position and never waits: one
//! load shows that there is nothing new. A node is freed when the last reader has passed it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Writer of the log: the only one, behind a lock.
#[derive(Debug)]
pub struct Writer<T> {
    /// Latest node, which the next one will follow.
    last: Arc<LogNode<T>>,
    /// Number of entries that some reader has not passed.
    pending: Arc<AtomicUsize>,
}

/// A reader's position in the log.
#[derive(Debug)]
pub struct LogCursor<T> {
    /// Node read last.
    at: Arc<LogNode<T>>,
}

#[derive(Debug)]
struct LogNode<T> {
    /// `None` in the first node, which only marks a position.
    entry: Option<LogCounted<T>>,
    next: OnceLock<Arc<LogNode<T>>>,
}

/// An entry that counts as pending while it exists.
#[derive(Debug)]
struct LogCounted<T> {
    entry: T,
    pending: Arc<AtomicUsize>,
}

impl<T> Default for Writer<T> {
    /// An empty log.
    fn default() -> Self {
        let last = Arc::new(LogNode { entry: None, next: OnceLock::new() });
        Self { last, pending: Arc::default() }
    }
}

impl<T> Writer<T> {
    /// Appends an entry for all readers.
    pub fn append(&mut self, entry: T) {
        self.pending.fetch_add(1, Ordering::Relaxed);
        let entry = LogCounted { entry, pending: Arc::clone(&self.pending) };
        let node = Arc::new(LogNode { entry: Some(entry), next: OnceLock::new() });
        // Only the one writer sets `next`, and then moves on to the new node.
        let _ = self.last.next.set(Arc::clone(&node));
        self.last = node;
    }

    /// Reader of all entries appended from now on.
    pub fn cursor(&self) -> LogCursor<T> {
        LogCursor { at: Arc::clone(&self.last) }
    }

    /// Number of entries in memory: those that some reader has not passed, and the latest one.
    pub fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }
}

impl<T> LogCursor<T> {
    /// True if there is an unread entry; costs one load.
    #[inline]
    pub fn has_next(&self) -> bool {
        self.at.next.get().is_some()
    }
}

/// Unread entries; more may follow later.
impl<T: Clone> Iterator for LogCursor<T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        let next = Arc::clone(self.at.next.get()?);
        self.at = next;
        self.at.entry.as_ref().map(|counted| counted.entry.clone())
    }
}

impl<T> Drop for LogNode<T> {
    fn drop(&mut self) {
        // Iterates: a late reader's chain may be long, and recursive drops would overflow the
        // stack.
        let mut next = self.next.take();
        while let Some(mut node) = next.and_then(Arc::into_inner) {
            next = node.next.take();
        }
    }
}

impl<T> Drop for LogCounted<T> {
    fn drop(&mut self) {
        self.pending.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn readers_see_entries_in_order() {
        const ENTRIES: u32 = 20_000;
        let mut writer = Writer::default();
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let mut cursor = writer.cursor();
                thread::spawn(move || {
                    let mut seen = 0;
                    while seen < ENTRIES {
                        match cursor.next() {
                            Some(entry) => {
                                assert_eq!(entry, seen);
                                seen += 1;
                            }
                            None => thread::yield_now(),
                        }
                    }
                    assert!(!cursor.has_next());
                })
            })
            .collect();
        (0..ENTRIES).for_each(|entry| writer.append(entry));
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(writer.pending(), 1, "the latest one is kept as a place");
    }

    #[test]
    fn entries_live_until_last_reader() {
        let mut writer = Writer::default();
        let (mut early, late) = (writer.cursor(), writer.cursor());
        for entry in 0..100_000 {
            writer.append(entry);
            assert_eq!(early.next(), Some(entry));
        }
        assert_eq!(writer.pending(), 100_000);
        drop(late); // frees a chain that is longer than any stack
        assert_eq!(writer.pending(), 1);
        assert_eq!(writer.cursor().next(), None, "who comes now reads what comes now");
    }
}
