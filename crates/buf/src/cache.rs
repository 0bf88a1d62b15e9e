//! Cache lines: kept apart, and asked for ahead of their use.

/// Bytes in a cache line.
pub(crate) const LINE_BYTES: usize = 64;

/// A value on cache lines of its own: two, because the neighbouring line is fetched along.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct OwnLine<T>(pub T);

/// Asks for the line at `address`, to read it.
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

/// Asks for all lines of `bytes`, to read them a little later.
pub fn prefetch(bytes: &[u8]) {
    bytes.chunks(LINE_BYTES).for_each(|line| prefetch_to_read(line.as_ptr()));
}

/// Asks for the line that `value` begins on, to read it a little later.
#[inline]
pub fn prefetch_value<T>(value: &T) {
    prefetch_to_read(std::ptr::from_ref(value).cast());
}

/// Asks for the line that `value` begins on, to write it a little later.
#[inline]
pub fn prefetch_value_to_write<T>(value: &T) {
    prefetch_to_write(std::ptr::from_ref(value).cast());
}

/// Asks for the line at `address`, to write it: takes it from the CPU that has it. A store waits
/// for its line, and every later load that needs the store's bytes in another shape waits with it.
#[inline]
pub(crate) fn prefetch_to_write(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch touches no memory that the program can see, and never faults. Where the
    // CPU lacks the instruction it is a no-op. The intrinsic with the hint for writing compiles to
    // a prefetch for reading unless the build is for one CPU, hence the assembly.
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
