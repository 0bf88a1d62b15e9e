//! Memory that the device and the driver both access: atomic words at fixed places.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use forebay_buf::Claim;

use super::memory::address;

/// Types that may be placed in shared memory.
///
/// # Safety
/// Made of atomics only, without padding: any bytes are a value of the type, and writes of the
/// other side at any time are not a data race.
pub(super) unsafe trait Shared {}

// SAFETY: an atomic.
unsafe impl Shared for AtomicU16 {}
// SAFETY: an atomic.
unsafe impl Shared for AtomicU32 {}
// SAFETY: an atomic.
unsafe impl Shared for AtomicU64 {}

/// Array of words of one kind in shared memory. It keeps the memory, which this process accesses
/// only through such words.
pub(super) struct Words<T> {
    words: NonNull<[T]>,
    _memory: Arc<Claim>,
}

// SAFETY: shared words are atomics, and the memory, which this value keeps, is not tied to a
// thread.
unsafe impl<T: Shared> Send for Words<T> {}

impl<T: Shared> Words<T> {
    /// Locates `count` words at `offset_bytes` of the memory.
    ///
    /// # Panics
    /// If the words exceed the memory, or are not aligned.
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

    /// All words.
    #[inline]
    pub(super) fn all(&self) -> &[T] {
        // SAFETY: within memory that this value keeps, and aligned, see `new`; any bytes are a `T`.
        unsafe { self.words.as_ref() }
    }

    /// Zeroes all of the claimed memory: only while no device uses it.
    pub(super) fn clear_all(&self) {
        let all = self.overlay::<AtomicU64>();
        all.all().iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// All of the claimed memory, as words of another kind.
    pub(super) fn overlay<U: Shared>(&self) -> Words<U> {
        Words::new(&self._memory, 0, self._memory.part().len() / size_of::<U>())
    }

    /// Address of the words, to give to a device.
    pub(super) fn address(&self) -> u64 {
        address(self.words.cast())
    }
}

impl<T> Clone for Words<T> {
    fn clone(&self) -> Self {
        Self { words: self.words, _memory: Arc::clone(&self._memory) }
    }
}
