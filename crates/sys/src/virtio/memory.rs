//! Memory that a device in another process reads and writes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use forebay_buf::Region;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::memory::HUGE_PAGE_BYTES;

/// Memory for rings and buffers, behind a descriptor that a device can map. All pages are allocated
/// from the beginning. Its length is sealed, so that a device with the descriptor cannot truncate
/// it under us.
#[derive(Debug)]
pub struct SharedMemory {
    region: Arc<Region>,
    descriptor: OwnedFd,
    is_huge: bool,
}

impl SharedMemory {
    /// Allocates at least `len_bytes` bytes, zeroed: in reserved huge pages if enough are free,
    /// otherwise in pages of the kernel's choice.
    ///
    /// # Errors
    /// If the kernel has too little memory.
    pub fn new(len_bytes: usize) -> io::Result<Self> {
        let len_bytes = len_bytes
            .max(1)
            .checked_next_multiple_of(HUGE_PAGE_BYTES)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        Self::of_kind(len_bytes, true).or_else(|_| Self::of_kind(len_bytes, false))
    }

    fn of_kind(len_bytes: usize, is_huge: bool) -> io::Result<Self> {
        let kind =
            if is_huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind;
        let descriptor = memfd_create("forebay-virtio", flags)?;
        ftruncate(&descriptor, u64::try_from(len_bytes).unwrap_or(u64::MAX))?;
        // A peer that truncated the file would end this process at its next access (SIGBUS).
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = Mapping::new(descriptor.as_fd(), len_bytes)?;
        mapping.populate(is_huge)?;
        Ok(Self { region: Arc::new(mapping.into_region()), descriptor, is_huge })
    }

    /// Region of the whole memory, for rings and for buffers.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Descriptor that a device maps, from offset 0.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Base address, in this process and, identically, in the guest address space announced to the
    /// device.
    #[must_use]
    pub fn base_address(&self) -> u64 {
        address(self.region.span().0)
    }

    /// Length in bytes: a multiple of 2 MiB.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.region.len_bytes()
    }

    /// True if the memory is in reserved huge pages (hugetlbfs).
    #[must_use]
    pub fn is_huge(&self) -> bool {
        self.is_huge
    }
}

/// Address of a pointer as given to a device.
pub(super) fn address(pointer: NonNull<u8>) -> u64 {
    u64::try_from(pointer.addr().get()).unwrap_or_else(|_| unreachable!("an address has 64 bits"))
}

/// Mapping without references into it yet.
struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
}

impl Mapping {
    fn new(descriptor: BorrowedFd<'_>, len_bytes: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice; it replaces no memory.
        let mapped =
            unsafe { mm::mmap(anywhere, len_bytes, access, MapFlags::SHARED, descriptor, 0) }?;
        let base = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::Other)?;
        Ok(Self { base, len_bytes })
    }

    /// Allocates all pages now, so that no later access faults for want of memory.
    fn populate(&self, is_huge: bool) -> io::Result<()> {
        let address = self.base.as_ptr().cast();
        if !is_huge {
            // SAFETY: advice on a mapping of ours. A refusal costs speed only.
            let _ = unsafe { mm::madvise(address, self.len_bytes, Advice::LinuxHugepage) };
        }
        // SAFETY: advice on a mapping of ours, whose bytes stay as they are.
        Ok(unsafe { mm::madvise(address, self.len_bytes, Advice::LinuxPopulateWrite) }?)
    }

    fn into_region(self) -> Region {
        let Self { base, len_bytes } = self;
        std::mem::forget(self);
        // SAFETY: page-aligned, zeroed, readable and writable, and unmapped by `unmap`. The file
        // behind it is sealed in length; a page that a device punches out reads as zeros when it is
        // touched again. A huge page does so if the system has a free one; if not, the access ends the
        // process (SIGBUS) and reads nothing.
        unsafe { Region::from_shared_mapping(base, len_bytes, unmap) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: a mapping of ours without references into it.
        unsafe { unmap(self.base, self.len_bytes) };
    }
}

/// Unmaps a mapping.
///
/// # Safety
/// `base` and `len_bytes` are a mapping's, and nobody holds a pointer into it.
unsafe fn unmap(base: NonNull<u8>, len_bytes: usize) {
    // SAFETY: the caller's promise.
    let unmapped = unsafe { mm::munmap(base.as_ptr().cast(), len_bytes) };
    debug_assert!(unmapped.is_ok(), "a mapping of ours cannot be unmapped: {unmapped:?}");
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn shared_memory_is_sealed_against_truncation() {
        let memory = SharedMemory::new(5).unwrap();
        assert_eq!(memory.len_bytes(), HUGE_PAGE_BYTES);
        let device = File::from(memory.descriptor().try_clone_to_owned().unwrap());
        for len_bytes in [0, 4096, 4 << 20] {
            assert!(device.set_len(len_bytes).is_err(), "{len_bytes}");
        }
        // Huge pages are not written to by write(2).
        if !memory.is_huge() {
            device.write_all_at(b"hello", 4096).unwrap();
        }
        assert_eq!(memory.base_address() % 4096, 0);
    }

    #[test]
    fn memory_falls_back_to_small_pages() {
        let memory = SharedMemory::of_kind(HUGE_PAGE_BYTES, false).unwrap();
        assert!(!memory.is_huge());
        assert!(SharedMemory::new(usize::MAX - 1).is_err());
    }
}
