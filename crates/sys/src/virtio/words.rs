//! Memory that a device and we both touch: atomic words, each at its place in the shared memory.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use forebay_buf::Claim;

use super::memory::address;

/// Types that may lie in shared memory.
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

/// Some words of one kind, one behind the other. They hold the memory, which nothing else in this process
/// looks into but as such words.
pub(super) struct Words<T> {
    words: NonNull<[T]>,
    _memory: Arc<Claim>,
}

// SAFETY: shared words are atomics, and no thread is tied to the memory, which this value holds.
unsafe impl<T: Shared> Send for Words<T> {}

impl<T: Shared> Words<T> {
    /// The `count` words from there on.
    ///
    /// # Panics
    /// When they are not within the memory, or not aligned.
    pub(super) fn new(memory: &Arc<Claim>, offset_bytes: usize, count: usize) -> Self {
        let (base, len_bytes) = (memory.base(), memory.part().len());
        let end = count.checked_mul(size_of::<T>()).and_then(|len| len.checked_add(offset_bytes));
        assert!(end.is_some_and(|end| end <= len_bytes), "words lie within the shared memory");
        // SAFETY: within the claim, see above.
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

    /// Makes all of the claimed memory zero: only while no device uses it.
    pub(super) fn clear_all(&self) {
        let all = self.overlay::<AtomicU64>();
        all.all().iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// All of the claimed memory, as words of another kind.
    pub(super) fn overlay<U: Shared>(&self) -> Words<U> {
        Words::new(&self._memory, 0, self._memory.part().len() / size_of::<U>())
    }

    /// Address at which a device finds them.
    pub(super) fn address(&self) -> u64 {
        address(self.words.cast())
    }
}

impl<T> Clone for Words<T> {
    fn clone(&self) -> Self {
        Self { words: self.words, _memory: Arc::clone(&self._memory) }
    }
}
