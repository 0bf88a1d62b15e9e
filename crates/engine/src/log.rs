//! The change log: what is changed while the engine runs, in one order for all of its threads.
//!
//! Nodes are linked and only ever added. A reader keeps its own place and never waits: one load
//! shows that there is nothing new. A node is freed when the last reader has passed it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The end that adds entries: one, behind a lock.
#[derive(Debug)]
pub struct Writer<T> {
    /// The latest node, which the next one will follow.
    last: Arc<LogNode<T>>,
    /// Nodes with entries that some reader has not passed.
    pending: Arc<AtomicUsize>,
}

/// A reader's place in the log.
#[derive(Debug)]
pub struct LogCursor<T> {
    /// The node read last.
    at: Arc<LogNode<T>>,
}

#[derive(Debug)]
struct LogNode<T> {
    /// None in the first node, which only has a place.
    entry: Option<LogCounted<T>>,
    next: OnceLock<Arc<LogNode<T>>>,
}

/// An entry that is counted for as long as it is kept.
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
    /// Adds an entry behind all others, for every reader to find.
    pub fn append(&mut self, entry: T) {
        self.pending.fetch_add(1, Ordering::Relaxed);
        let entry = LogCounted { entry, pending: Arc::clone(&self.pending) };
        let node = Arc::new(LogNode { entry: Some(entry), next: OnceLock::new() });
        // Only the one writer sets it, and moves on at once.
        let _ = self.last.next.set(Arc::clone(&node));
        self.last = node;
    }

    /// A reader of all that is added from now on.
    pub fn cursor(&self) -> LogCursor<T> {
        LogCursor { at: Arc::clone(&self.last) }
    }

    /// Number of entries that are kept because some reader has not passed them, and the latest one.
    pub fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }
}

impl<T> LogCursor<T> {
    /// True if there is an entry that was not read yet. One load.
    #[inline]
    pub fn has_next(&self) -> bool {
        self.at.next.get().is_some()
    }
}

/// The entries that were not read yet; there may be more later.
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
        // One after another: a late reader's chain may be long, and each would drop its next.
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
