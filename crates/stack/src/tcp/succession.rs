//! Processes that listen on the same ports, of which the newest takes new connections.
//!
//! All of them receive every segment. Each keeps its own connections to their end, and is silent about
//! those of the others.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Place of a process in the succession. Later processes have greater numbers.
#[derive(Debug)]
pub struct Succession {
    number: u32,
    /// Greatest number of those that receive.
    receiving: &'static AtomicU32,
    /// Greatest number of those that take new connections.
    leading: &'static AtomicU32,
    /// True while older processes may have connections.
    has_older: AtomicBool,
}

impl Succession {
    /// Creates the place of a process, which does not take part yet. All processes share both words.
    #[must_use]
    pub fn new(number: u32, receiving: &'static AtomicU32, leading: &'static AtomicU32) -> Self {
        Self { number, receiving, leading, has_older: AtomicBool::new(false) }
    }

    /// Announces that this process is about to receive. To be called before it does.
    pub fn receive(&self, has_older: bool) {
        self.set_has_older(has_older);
        self.receiving.fetch_max(self.number, Ordering::SeqCst);
    }

    /// Sets whether older processes may have connections.
    pub fn set_has_older(&self, has_older: bool) {
        self.has_older.store(has_older, Ordering::SeqCst);
    }

    /// True if older processes may have connections.
    #[must_use]
    pub fn has_older(&self) -> bool {
        self.has_older.load(Ordering::Relaxed)
    }

    /// Takes new connections from now on, in place of the other processes: newer ones have ended.
    pub fn lead(&self) {
        self.receiving.store(self.number, Ordering::SeqCst);
        self.leading.store(self.number, Ordering::SeqCst);
    }

    /// True if this process takes new connections: no newer one does.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.leading.load(Ordering::Relaxed) <= self.number
    }

    /// True if this process was the last that took new connections.
    #[must_use]
    pub fn was_last_to_lead(&self) -> bool {
        self.leading.load(Ordering::Relaxed) == self.number
    }

    /// True if a segment of no connection here is not one of another process either.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.receiving.load(Ordering::Relaxed) <= self.number && !self.has_older()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_5_newest_of_processes_leads() {
        static WORDS: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
        let [receiving, leading] = &WORDS;
        let [old, new] = [0, 1].map(|number| Succession::new(number, receiving, leading));
        let seen = || [&old, &new].map(|of| (of.leads(), of.is_alone()));
        old.receive(false);
        assert_eq!(seen()[0], (true, true));
        new.receive(true);
        assert_eq!(seen(), [(true, false), (true, false)], "both, until one is told");
        assert_eq!([&old, &new].map(Succession::was_last_to_lead), [true, false]);
        new.lead();
        assert_eq!(seen(), [(false, false), (true, false)]);
        assert_eq!([&old, &new].map(Succession::was_last_to_lead), [false, true]);
        new.set_has_older(false);
        assert_eq!(seen()[1], (true, true));
        old.lead();
        assert_eq!(seen()[0], (true, true), "the new one has ended");
    }
}
