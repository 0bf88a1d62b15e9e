//! Cache lines: padding and prefetches.

/// Bytes in a cache line.
pub const LINE_BYTES: usize = 64;

/// Value on cache lines of its own: two, because the adjacent-line prefetcher loads pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct OwnLine<T>(pub T);

/// Prefetches the line at `address` for reading.
#[inline]
pub(crate) fn prefetch_to_read(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch touches no memory that the program can see, and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// Prefetches all lines of `bytes` for reading.
pub fn prefetch(bytes: &[u8]) {
    bytes.chunks(LINE_BYTES).for_each(|line| prefetch_to_read(line.as_ptr()));
}

/// Prefetches the line that `value` begins on for reading.
#[inline]
pub fn prefetch_value<T>(value: &T) {
    prefetch_to_read(std::ptr::from_ref(value).cast());
}

/// Prefetches the line that `value` begins on for writing.
#[inline]
pub fn prefetch_value_to_write<T>(value: &T) {
    prefetch_to_write(std::ptr::from_ref(value).cast());
}

/// Prefetches the line at `address` for writing, which takes it from the CPU that has it. Otherwise
/// a store waits for its line, and so does every later load that cannot be forwarded from the
/// store.
#[inline]
pub(crate) fn prefetch_to_write(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch touches no memory that the program can see, and never faults. On a CPU
    // without the instruction it is a no-op. Assembly, because the intrinsic with the hint for
    // writing compiles to a prefetch for reading unless the build targets a CPU with PREFETCHW.
    unsafe {
        std::arch::asm!(
            "prefetchw [{address}]",
            address = in(reg) address,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}
