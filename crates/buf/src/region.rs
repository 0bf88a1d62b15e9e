//! Memory region: all the frames of an engine, or memory shared with a peer.

use std::alloc::{self, Layout};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::sync::Arc;

/// Alignment of a region: a page boundary, so that the kernel can share it (AF_XDP's UMEM).
pub const REGION_ALIGN_BYTES: usize = 4096;

/// Initialised memory that lives until its last frame is returned. Only the chunks carved from it
/// give access to the bytes.
pub struct Region {
    base: NonNull<u8>,
    len_bytes: usize,
    release: RegionRelease,
    /// Parts of a shared region that are in use; disjoint. `None` if no peer may write to the
    /// region.
    shared: Option<Mutex<Vec<Range<usize>>>>,
}

/// Function that gives a region's memory back: base address and length in bytes.
pub type ReleaseFn = unsafe fn(NonNull<u8>, usize);

enum RegionRelease {
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
        Self { base, len_bytes, release: RegionRelease::Heap, shared: None }
    }

    /// Takes `len_bytes` zeroed bytes from the heap, treated as memory that a peer may write to:
    /// for tests whose device runs in this process.
    ///
    /// # Panics
    /// As [`allocate`](Self::allocate).
    #[must_use]
    pub fn allocate_shared(len_bytes: usize) -> Self {
        let mut region = Self::allocate(len_bytes);
        region.shared = Some(Mutex::default());
        region
    }

    /// Adopts memory that was mapped elsewhere: huge pages, or a file descriptor that a peer
    /// shares. `release` is called with the same address and length once the last frame is
    /// returned.
    ///
    /// # Safety
    /// `base` is aligned to [`REGION_ALIGN_BYTES`]; the `len_bytes` bytes from there are
    /// readable, writable, initialised, owned by the caller, touched by nobody else from now on,
    /// and stay so until `release` is called.
    #[must_use]
    pub unsafe fn from_mapping(base: NonNull<u8>, len_bytes: usize, release: ReleaseFn) -> Self {
        debug_assert_eq!(base.addr().get() % REGION_ALIGN_BYTES, 0);
        Self { base, len_bytes, release: RegionRelease::By(release), shared: None }
    }

    /// Adopts memory that a peer has mapped, too, and may read and write at any time, as a virtio
    /// device does. No frame is ever carved from it; see [`PageFragCache`](crate::PageFragCache).
    ///
    /// # Safety
    /// As for [`from_mapping`](Self::from_mapping), except that other processes may read and write
    /// the bytes at any time. The bytes stay mapped whatever a peer does (a file that can shrink is
    /// sealed).
    #[must_use]
    pub unsafe fn from_shared_mapping(
        base: NonNull<u8>,
        len_bytes: usize,
        release: ReleaseFn,
    ) -> Self {
        // SAFETY: by the caller's promise. `shared` is set below, so `carve` refuses to make frames
        // of bytes that a peer may write.
        let mut region = unsafe { Self::from_mapping(base, len_bytes, release) };
        region.shared = Some(Mutex::default());
        region
    }

    /// True if a peer may read and write this memory at any time.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Claims a part of a shared region, in bytes from its beginning. `None` if the region is not
    /// shared, the part exceeds it, or overlaps another claim.
    #[must_use]
    pub fn claim(region: &Arc<Self>, part: Range<usize>) -> Option<Claim> {
        if part.start > part.end || part.end > region.len_bytes {
            return None;
        }
        let mut parts = region.shared.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let overlaps = |other: &Range<usize>| part.start < other.end && other.start < part.end;
        if parts.iter().any(overlaps) {
            return None;
        }
        parts.push(part.clone());
        Some(Claim { region: Arc::clone(region), part })
    }

    /// Size of the region.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Base address, page-aligned, and size in bytes: for a kernel that maps the region.
    #[must_use]
    pub fn span(&self) -> (NonNull<u8>, usize) {
        (self.base, self.len_bytes)
    }

    /// True for a mapping, whose pages belong to nothing else.
    #[must_use]
    pub fn is_mapping(&self) -> bool {
        matches!(self.release, RegionRelease::By(_))
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
            RegionRelease::Heap => unsafe {
                alloc::dealloc(self.base.as_ptr(), Self::heap_layout(self.len_bytes));
            },
            // SAFETY: the promise of `from_mapping`; no chunk or piece is held any more, since
            // every home with outstanding chunks or pieces keeps the region alive.
            RegionRelease::By(release) => unsafe { release(self.base, self.len_bytes) },
        }
    }
}

/// Part of a shared region in use, released on drop. Keeps the region alive.
#[derive(Debug)]
pub struct Claim {
    region: Arc<Region>,
    part: Range<usize>,
}

impl Claim {
    /// Range in bytes from the region's beginning.
    #[must_use]
    pub fn part(&self) -> Range<usize> {
        self.part.clone()
    }

    /// Address of the first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        // SAFETY: the part lies within the region.
        unsafe { self.region.base.add(self.part.start) }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(parts) = &self.region.shared {
            let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
            parts.retain(|part| *part != self.part);
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.len_bytes)
    }
}
