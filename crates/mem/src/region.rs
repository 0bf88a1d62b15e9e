//! One piece of memory for all the frames of an engine.

use std::alloc::{self, Layout};
use std::fmt;
use std::ptr::NonNull;

/// Where a region begins: a page boundary, so that the kernel can share it (AF_XDP's UMEM).
pub const REGION_ALIGN_BYTES: usize = 4096;

/// Memory that lives until its last frame is home: owned, initialised, and reached only through
/// the chunks carved from it.
pub struct Region {
    base: NonNull<u8>,
    len_bytes: usize,
    release: Release,
}

/// How a region's memory is given back: base address and length in bytes.
pub type ReleaseFn = unsafe fn(NonNull<u8>, usize);

enum Release {
    Heap,
    By(ReleaseFn),
}

// SAFETY: a region is plain memory; chunks of it are handed out once each, and `Frame` and `Pool`
// guard every access.
unsafe impl Send for Region {}
// SAFETY: `&Region` gives no access to the memory.
unsafe impl Sync for Region {}

impl Region {
    /// Takes `len_bytes` zeroed bytes from the heap.
    ///
    /// # Panics
    /// When `len_bytes` is 0 or more than an address space holds.
    #[must_use]
    pub fn allocate(len_bytes: usize) -> Self {
        let layout = Self::heap_layout(len_bytes);
        assert!(len_bytes > 0, "a region holds at least one byte");
        // SAFETY: the layout's size is not 0.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { alloc::handle_alloc_error(layout) };
        Self { base, len_bytes, release: Release::Heap }
    }

    /// Adopts memory that was mapped elsewhere: huge pages, or a file descriptor that a peer
    /// shares. `release` is called with the same address and length when the last frame is home.
    ///
    /// # Safety
    /// `base` is aligned to [`REGION_ALIGN_BYTES`]; the `len_bytes` bytes from there are
    /// readable, writable, initialised, owned by the caller, touched by nobody else from now on,
    /// and stay so until `release` is called.
    #[must_use]
    pub unsafe fn from_mapping(base: NonNull<u8>, len_bytes: usize, release: ReleaseFn) -> Self {
        debug_assert_eq!(base.addr().get() % REGION_ALIGN_BYTES, 0);
        Self { base, len_bytes, release: Release::By(release) }
    }

    /// The region's size.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Where it begins, page-aligned, and its size in bytes: for a kernel that is to share it.
    #[must_use]
    pub fn span(&self) -> (NonNull<u8>, usize) {
        (self.base, self.len_bytes)
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn heap_layout(len_bytes: usize) -> Layout {
        Layout::from_size_align(len_bytes, REGION_ALIGN_BYTES)
            .unwrap_or_else(|_| panic!("a region of {len_bytes} bytes does not fit in memory"))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.release {
            // SAFETY: allocated in `allocate` with this very layout.
            Release::Heap => unsafe {
                alloc::dealloc(self.base.as_ptr(), Self::heap_layout(self.len_bytes));
            },
            // SAFETY: the promise of `from_mapping`; nobody holds a chunk any more, since every
            // home with frames away keeps the region alive.
            Release::By(release) => unsafe { release(self.base, self.len_bytes) },
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.len_bytes)
    }
}
