//! Memory for packets.

use std::io;
use std::ptr::NonNull;

use forebay_buf::Region;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};

/// `MemAvailable` of /proc/meminfo in bytes: memory available without swapping. `None` if the
/// kernel does not report it.
#[must_use]
pub fn available_memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Size of a huge page on every machine that Forebay runs on.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Maps memory for packets: zeroed, and in huge pages as far as the kernel grants them. Pages are
/// allocated when first touched.
///
/// # Errors
/// If the kernel refuses the mapping.
pub fn map_packet_memory(bytes: usize) -> Result<Region> {
    let bytes = bytes.max(1).next_multiple_of(HUGE_PAGE_BYTES);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice; no memory of ours is touched.
    let mapped = unsafe {
        mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
    };
    let refused = |source| Error::Memory { bytes, source };
    let address = mapped.map_err(|errno| refused(errno.into()))?;
    let base = NonNull::new(address.cast()).ok_or_else(|| refused(io::ErrorKind::Other.into()))?;
    // SAFETY: advice on the mapping made above. A refusal costs speed only.
    let _ = unsafe { mm::madvise(address, bytes, Advice::LinuxHugepage) };
    // SAFETY: page-aligned, zeroed, readable and writable, ours alone, and unmapped by `unmap`.
    Ok(unsafe { Region::from_mapping(base, bytes, unmap) })
}

/// Wipes a region in children that are forked later (`MADV_WIPEONFORK`). Otherwise a fork copies all pages that the kernel has
/// pinned for a device (`AF_XDP`), and the parent's next write to any other page copies that one.
pub fn wipe_on_fork(region: &Region) {
    if region.is_mapping() {
        let (base, len_bytes) = region.span();
        // SAFETY: advice on whole pages of a mapping, which keep their contents here. A refusal costs speed only.
        let _ = unsafe { mm::madvise(base.as_ptr().cast(), len_bytes, Advice::LinuxWipeOnFork) };
    }
}

/// Unmaps memory that [`map_packet_memory`] mapped.
///
/// # Safety
/// `base` and `bytes` are a mapping's, and nobody holds a pointer into it.
unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's promise.
    let unmapped = unsafe { mm::munmap(base.as_ptr().cast(), bytes) };
    debug_assert!(unmapped.is_ok(), "a mapping of ours cannot be unmapped: {unmapped:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_rounds_to_huge_pages() {
        assert_eq!(map_packet_memory(5).unwrap().len_bytes(), HUGE_PAGE_BYTES);
    }

    /// Flags of the mapping that an address is in (`VmFlags` of /proc/self/smaps).
    fn flags_at(address: usize) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let range = |line: &str| {
            let (start, end) = line.split_whitespace().next()?.split_once('-')?;
            let number = |text| usize::from_str_radix(text, 16).ok();
            Some(number(start)?..number(end)?)
        };
        let mut lines = maps.lines();
        lines.find(|line| range(line).is_some_and(|range| range.contains(&address))).unwrap();
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        flags.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn packet_memory_is_wiped_on_fork() {
        let region = map_packet_memory(1).unwrap();
        let is_wiped = || {
            let flags = flags_at(region.span().0.addr().get());
            flags.iter().any(|flag| flag == "wf") // VM_WIPEONFORK
        };
        assert!(!is_wiped(), "a child may run an engine that its parent has prepared");
        wipe_on_fork(&region);
        assert!(is_wiped());
    }

    #[test]
    fn some_memory_can_be_had() {
        assert!(available_memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
