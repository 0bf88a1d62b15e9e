//! Writes that wait for memory which other connections use.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::wait::StreamWatch;

/// Interval at which writes try again while there is no memory, in µs: each connection may have a little to
/// send all the same, of which its peer has taken some (the mean of `sk_stream_wait_memory`).
const RETRY_US: u64 = 100_000;

/// Connections whose writes wait for memory.
#[derive(Default)]
pub(super) struct ShortOfMemory(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    watches: Vec<Weak<StreamWatch>>,
    /// Number of them that were open when those that are closed were last dropped.
    open: usize,
    /// Time when they last tried again, in µs.
    retried_us: u64,
}

impl ShortOfMemory {
    /// Adds a connection, once until it is released.
    pub(super) fn add(&self, watch: &Arc<StreamWatch>, now_us: u64) {
        let mut waiting = self.waiting();
        if waiting.watches.is_empty() {
            waiting.retried_us = now_us;
        }
        // Those that were closed meanwhile are at most as many as the others.
        if waiting.watches.len() >= 2 * waiting.open.max(16) {
            waiting.watches.retain(|watch| watch.strong_count() > 0);
            waiting.open = waiting.watches.len();
        }
        waiting.watches.push(Arc::downgrade(watch));
    }

    /// True if writes wait.
    pub(super) fn is_any(&self) -> bool {
        !self.waiting().watches.is_empty()
    }

    /// Wakes them if there is memory, or if it is time to try all the same.
    pub(super) fn release(&self, is_memory_back: bool, now_us: u64) {
        let mut waiting = self.waiting();
        if !is_memory_back && now_us.saturating_sub(waiting.retried_us) < RETRY_US {
            return;
        }
        let watches = mem::take(&mut *waiting).watches;
        drop(waiting);
        watches.iter().filter_map(Weak::upgrade).for_each(|watch| watch.wait.memory_is_back());
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_37_closed_connections_await_no_memory() {
        let short = ShortOfMemory::default();
        let open: Vec<Arc<StreamWatch>> = (0..100).map(|_| Arc::default()).collect();
        open.iter().for_each(|watch| short.add(watch, 7));
        (0..10_000).for_each(|_| short.add(&Arc::default(), 7));
        let waiting = short.waiting();
        let count = waiting.watches.iter().filter(|watch| watch.strong_count() > 0).count();
        assert_eq!(count, 100);
        assert!(waiting.watches.len() <= 200, "{} entries", waiting.watches.len());
    }

    /// Also without memory, but not as often as the CPU looks for some.
    #[test]
    fn tcp_37_writes_try_again_by_themselves() {
        let (short, watch) = (ShortOfMemory::default(), Arc::<StreamWatch>::default());
        let tries = |is_memory_back, now_us| {
            let seen = watch.wait.seen();
            short.release(is_memory_back, now_us);
            !watch.wait.is_quiet_since(seen)
        };
        short.add(&watch, 1_000_000);
        assert!(!tries(false, 1_000_000 + RETRY_US - 1) && short.is_any());
        assert!(tries(false, 1_000_000 + RETRY_US) && !short.is_any());
        short.add(&watch, 2_000_000);
        assert!(tries(true, 2_000_001) && !short.is_any());
    }
}
