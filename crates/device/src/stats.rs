//! Statistics of a device: counters of the kernel or of a user-space driver, and facts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counters for one queue. For an interface, they are the kernel's counters of dropped frames,
/// under the kernel's names. For any other device, they are counters of the user-space driver, of
/// drops and of other events. Written by the source, read by any thread.
#[derive(Debug)]
pub struct KernelCounts {
    counts: Box<[(&'static str, AtomicU64)]>,
}

impl KernelCounts {
    /// Returns counters at zero.
    #[must_use]
    pub fn new(names: &[&'static str]) -> Arc<Self> {
        Arc::new(Self { counts: names.iter().map(|&name| (name, AtomicU64::new(0))).collect() })
    }

    /// Sets the counter at `index`, in the order of the names, to the kernel's value. Only the
    /// source calls this.
    pub fn set(&self, index: usize, count: u64) {
        self.counts[index].1.store(count, Ordering::Relaxed);
    }

    /// Adds to a counter that the source itself keeps. Only the source calls this.
    pub fn add(&self, index: usize, count: u64) {
        let (_, so_far) = &self.counts[index];
        so_far.store(so_far.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    /// Returns all counters, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.counts.iter().map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
    }
}

/// Receive buffers of one queue of a virtio device, for reports. Written by its source, read by any
/// thread.
#[derive(Default, Debug)]
pub struct RxBuffers {
    size_bytes: AtomicU32,
    used: AtomicU64,
}

impl RxBuffers {
    /// Returns the size of the buffers posted now, virtio header included, in bytes; 0 before the
    /// first one (`mergeable_rx_buffer_size`).
    #[must_use]
    pub fn size_bytes(&self) -> u32 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of buffers that the device has used so far.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Sets the size of the buffers posted from now on. Only the source calls this.
    pub fn set_size_bytes(&self, size_bytes: u32) {
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
    }

    /// Adds to the number of used buffers, once a burst. Only the source calls this.
    pub fn add_used(&self, buffers: u64) {
        self.used.store(self.used() + buffers, Ordering::Relaxed);
    }
}

/// Facts about a device, by name: `("mode", "native")`. Some are known only once an engine has the
/// device's queues; clones share them.
#[derive(Clone, Default, Debug)]
pub struct Facts(Arc<Mutex<BTreeMap<&'static str, String>>>);

impl Facts {
    /// Returns facts that are known from the beginning.
    #[must_use]
    pub fn of(facts: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        Self(Arc::new(Mutex::new(facts.into_iter().collect())))
    }

    /// Adds or replaces a fact.
    pub fn set(&self, name: &'static str, value: String) {
        self.set_together([(name, value)]);
    }

    /// Adds or replaces facts of one event: readers see all of them or none.
    pub fn set_together(&self, facts: impl IntoIterator<Item = (&'static str, String)>) {
        self.map().extend(facts);
    }

    /// Returns the facts known now.
    #[must_use]
    pub fn all(&self) -> BTreeMap<&'static str, String> {
        self.map().clone()
    }

    fn map(&self) -> MutexGuard<'_, BTreeMap<&'static str, String>> {
        // The map is consistent after every operation, so a poisoned lock is usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_facts_are_read_together() {
        let facts = Facts::default();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for turn in 1..=10_000_u32 {
                    let value = turn.to_string();
                    facts.set_together([("count", value.clone()), ("last", value)]);
                }
            });
            while !writer.is_finished() {
                let all = facts.all();
                assert_eq!(all.get("count"), all.get("last"));
            }
        });
        assert_eq!(facts.all()["last"], "10000");
    }
}
