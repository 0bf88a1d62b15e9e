//! Counter that only this crate can write, as only `forebay_rx` can write those of `forebay_rx::counters`.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counter that one CPU's stack writes and any thread reads, without locked instructions.
///
/// Only the stack can write it:
///
/// ```compile_fail,E0624
/// forebay_stack::counter::StackCounter::default().add(1);
/// ```
#[derive(Debug, Default)]
pub struct StackCounter(AtomicU64);

impl StackCounter {
    /// Value; may be slightly old when read by another thread.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `count`. Only the writer calls this: a load and a store, no read-modify-write.
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.get().wrapping_add(count), Ordering::Relaxed);
    }

    /// Starts again from zero, for another subject. Only the writer calls this.
    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
