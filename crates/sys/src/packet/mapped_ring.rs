//! Memory of a receive ring: equal parts that pass between the kernel and this process in order.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{self, MapFlags, ProtFlags};

use super::PacketSocket;

/// Parts of a ring: blocks or slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Parts {
    /// Number of parts.
    pub(super) count: usize,
    /// Size of a part.
    pub(super) len_bytes: usize,
    /// Offset of the word in each part that says whose it is (`tp_status`, `block_status`).
    pub(super) status_at: usize,
}

/// Mapping of a ring that a socket has.
#[derive(Debug)]
pub(super) struct MappedRing {
    base: NonNull<u8>,
    parts: Parts,
    /// Index of the part that the kernel hands over next.
    next: usize,
}

// SAFETY: the mapping belongs to this value alone, and is not tied to a thread.
unsafe impl Send for MappedRing {}

impl MappedRing {
    /// Maps the ring of a socket (`PACKET_RX_RING`), which has these parts.
    pub(super) fn of(socket: &PacketSocket, parts: Parts) -> io::Result<Self> {
        let Parts { count, len_bytes, status_at } = parts;
        let is_aligned = [len_bytes, status_at].iter().all(|n| n % align_of::<AtomicU32>() == 0);
        let has_status =
            status_at.checked_add(size_of::<AtomicU32>()).is_some_and(|end| end <= len_bytes);
        let whole_bytes = len_bytes.checked_mul(count);
        let Some(whole_bytes) = whole_bytes.filter(|&n| n > 0 && is_aligned && has_status) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let (anywhere, rights) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh mapping at an address of the kernel's choice; it replaces no memory.
        let mapped =
            unsafe { mm::mmap(anywhere, whole_bytes, rights, MapFlags::SHARED, socket, 0) }?;
        let base = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, parts, next: 0 })
    }

    /// Oldest part, if the kernel has handed it over. The bytes are as the kernel wrote them,
    /// unchecked.
    pub(super) fn oldest(&self) -> Option<&[u8]> {
        // Pairs with the kernel's barrier before it writes the status: a reader of the status sees
        // all that the kernel wrote before.
        let status = self.status().load(Ordering::Acquire);
        if status & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // SAFETY: a part of the mapping, which holds initialised bytes that the kernel does not
        // touch until `give_back`, which takes `&mut self`.
        Some(unsafe { std::slice::from_raw_parts(self.first_byte(), self.parts.len_bytes) })
    }

    /// Returns the oldest part to the kernel, if it was handed over.
    pub(super) fn give_back(&mut self) {
        if self.oldest().is_none() {
            return;
        }
        // Pairs with the kernel's read of the status before it writes to the part: all reads of
        // this process come before.
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.next = (self.next + 1) % self.parts.count;
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: `of` has checked that a part has room for this word.
        let status = unsafe { self.first_byte().add(self.parts.status_at) };
        // SAFETY: aligned, as `of` has checked and mappings begin at pages; it lives as long as the
        // mapping; both sides only access it whole.
        unsafe { AtomicU32::from_ptr(status.cast()) }
    }

    fn first_byte(&self) -> *mut u8 {
        // SAFETY: `next` is less than the number of parts, so this is inside the mapping.
        unsafe { self.base.as_ptr().add(self.next * self.parts.len_bytes) }
    }
}

impl Drop for MappedRing {
    fn drop(&mut self) {
        let whole_bytes = self.parts.count * self.parts.len_bytes;
        // SAFETY: mapped in `of` with this length, and nobody holds a slice of it any more.
        let unmapped = unsafe { mm::munmap(self.base.as_ptr().cast(), whole_bytes) };
        debug_assert!(unmapped.is_ok(), "a ring of ours cannot be unmapped: {unmapped:?}");
    }
}
