//! What a device and we both touch: atomic words, each at its place in the shared memory.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use mem::Region;

use super::memory::address;

/// What lies in shared memory.
///
/// # Safety
/// Made of atomics and nothing else, without padding: any bytes are a value of it, and whoever writes
/// them at any time races with nobody.
pub(super) unsafe trait Shared {}

// SAFETY: an atomic.
unsafe impl Shared for AtomicU16 {}
// SAFETY: an atomic.
unsafe impl Shared for AtomicU32 {}
// SAFETY: an atomic.
unsafe impl Shared for AtomicU64 {}

/// Some words of one kind, one behind the other. They hold the memory.
pub(super) struct Words<T> {
    words: NonNull<[T]>,
    _memory: Arc<Region>,
}

// SAFETY: shared words are atomics, and no thread is tied to the memory, which this value holds.
unsafe impl<T: Shared> Send for Words<T> {}

impl<T: Shared> Words<T> {
    /// The `count` words from there on.
    ///
    /// # Panics
    /// When they are not within the memory, or not aligned.
    pub(super) fn new(memory: &Arc<Region>, offset_bytes: usize, count: usize) -> Self {
        let (base, len_bytes) = memory.span();
        let end = count.checked_mul(size_of::<T>()).and_then(|len| len.checked_add(offset_bytes));
        assert!(end.is_some_and(|end| end <= len_bytes), "words lie within the shared memory");
        // SAFETY: within the mapping, see above.
        let first = unsafe { base.add(offset_bytes) };
        assert!(first.addr().get().is_multiple_of(align_of::<T>()), "words are aligned");
        let words = NonNull::slice_from_raw_parts(first.cast(), count);
        Self { words, _memory: Arc::clone(memory) }
    }

    /// All of them.
    #[inline]
    pub(super) fn all(&self) -> &[T] {
        // SAFETY: within memory that is held, and aligned, see `new`; any bytes are a `T`.
        unsafe { self.words.as_ref() }
    }

    /// Where a device finds them.
    pub(super) fn address(&self) -> u64 {
        address(self.words.cast())
    }
}
