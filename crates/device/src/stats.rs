//! Statistics of a device: what the kernel or our driver counts, and facts about it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counters of the kernel for one queue, by its own names: what it dropped. Of a device that is no interface
/// it is what our driver counts, drops and others. Written by the source, read by anyone.
#[derive(Debug)]
pub struct KernelCounts {
    counts: Box<[(&'static str, AtomicU64)]>,
}

impl KernelCounts {
    /// Zeros.
    #[must_use]
    pub fn new(names: &[&'static str]) -> Arc<Self> {
        Arc::new(Self { counts: names.iter().map(|&name| (name, AtomicU64::new(0))).collect() })
    }

    /// Sets the count at `index`, in the order of the names, to what the kernel says now. Only the
    /// source calls this.
    pub fn set(&self, index: usize, count: u64) {
        self.counts[index].1.store(count, Ordering::Relaxed);
    }

    /// Counts on, where nobody but the source knows the count. Only the source calls this.
    pub fn add(&self, index: usize, count: u64) {
        let (_, so_far) = &self.counts[index];
        so_far.store(so_far.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    /// All counts, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.counts.iter().map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
    }
}

/// Receive buffers of one queue of a virtio device, for reports. Written by its source, read by
/// anyone.
#[derive(Default, Debug)]
pub struct RxBuffers {
    size_bytes: AtomicU32,
    used: AtomicU64,
}

impl RxBuffers {
    /// The size of the buffers that are posted now, virtio header included, in bytes; 0 before the
    /// first one (`mergeable_rx_buffer_size`).
    #[must_use]
    pub fn size_bytes(&self) -> u32 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Number of buffers that the device has given back so far.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Says how large the buffers are that are posted from now on. Only the source calls this.
    pub fn set_size_bytes(&self, size_bytes: u32) {
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
    }

    /// Counts buffers that the device has given back, once a burst. Only the source calls this.
    pub fn add_used(&self, buffers: u64) {
        self.used.store(self.used() + buffers, Ordering::Relaxed);
    }
}

/// Facts found out about a device, by name: `("mode", "native")`. Some of it is known only once an
/// engine has the device's queues; each copy tells of it.
#[derive(Clone, Default, Debug)]
pub struct Facts(Arc<Mutex<BTreeMap<&'static str, String>>>);

impl Facts {
    /// Facts that are known from the beginning.
    #[must_use]
    pub fn of(facts: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        Self(Arc::new(Mutex::new(facts.into_iter().collect())))
    }

    /// Adds one, or what is different now.
    pub fn set(&self, name: &'static str, value: String) {
        self.map().insert(name, value);
    }

    /// Facts that are known now.
    #[must_use]
    pub fn all(&self) -> BTreeMap<&'static str, String> {
        self.map().clone()
    }

    fn map(&self) -> MutexGuard<'_, BTreeMap<&'static str, String>> {
        // A map that is kept whole at every step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
