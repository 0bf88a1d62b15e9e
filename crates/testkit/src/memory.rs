//! Heap of each thread, counted as glibc takes it: a header of 8 bytes, and sizes in steps of 16.

#![allow(unsafe_code, reason = "an allocator is unsafe to implement")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Header of a block, and the step of sizes and least size of blocks with it (`malloc_usable_size` and 8).
const HEADER_BYTES: usize = 8;
const STEP_BYTES: usize = 16;
const BLOCK_MIN_BYTES: usize = 32;

/// Allocator of the system, which counts: for `#[global_allocator]` of a test.
#[derive(Debug)]
pub struct CountingAllocator;

/// Memory that a thread has allocated so far and not freed. Blocks that another thread frees count there.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Heap {
    /// Bytes of all blocks, with their headers and what rounding adds.
    pub bytes: i64,
    /// Blocks allocated or grown so far.
    pub allocations: u64,
}

thread_local! {
    static HEAP: Cell<Heap> = const { Cell::new(Heap { bytes: 0, allocations: 0 }) };
}

/// Memory of the calling thread.
pub fn heap() -> Heap {
    HEAP.get()
}

/// Bytes that a block takes.
fn block_bytes(size: usize) -> i64 {
    let bytes = (size + HEADER_BYTES).next_multiple_of(STEP_BYTES).max(BLOCK_MIN_BYTES);
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn count(bytes: i64, allocations: u64) {
    // Not after the thread's own end.
    let _ = HEAP.try_with(|heap| {
        let Heap { bytes: before, allocations: so_far } = heap.get();
        heap.set(Heap { bytes: before + bytes, allocations: so_far + allocations });
    });
}

// SAFETY: all calls go to the system's allocator as they come; counting allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(block_bytes(layout.size()), 1);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(block_bytes(layout.size()), 1);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-block_bytes(layout.size()), 0);
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(block_bytes(new_size) - block_bytes(layout.size()), 1);
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, new_size) }
    }
}
