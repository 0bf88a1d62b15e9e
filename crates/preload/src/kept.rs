//! Descriptors of the library that the program does not know, and must not close.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Lowest number of most of them, so that the program's own descriptors have the numbers that they would have
/// without us.
pub(crate) const FROM: RawFd = 512;

/// Numbers that can be protected.
const NUMBERS_MAX: usize = 1 << 16;

static IS_KEPT: [AtomicBool; NUMBERS_MAX] = [const { AtomicBool::new(false) }; NUMBERS_MAX];

/// Keeps a descriptor from the program.
pub(crate) fn add(descriptor: BorrowedFd<'_>) {
    if let Some(kept) = at(descriptor.as_raw_fd()) {
        kept.store(true, Ordering::Relaxed);
    }
}

/// Ends the protection of a descriptor that is about to be closed.
pub(crate) fn remove(descriptor: BorrowedFd<'_>) {
    if let Some(kept) = at(descriptor.as_raw_fd()) {
        kept.store(false, Ordering::Relaxed);
    }
}

/// True for a descriptor that the program must not close.
pub(crate) fn contains(descriptor: RawFd) -> bool {
    at(descriptor).is_some_and(|kept| kept.load(Ordering::Relaxed))
}

/// Parts of a range of numbers that have none of these.
pub(crate) fn ranges_around(first: u32, last: u32) -> Vec<(u32, u32)> {
    let mut ranges = Vec::new();
    let mut begin = first;
    let end = last.min(u32::try_from(NUMBERS_MAX).unwrap_or(u32::MAX));
    for number in first..=end {
        if RawFd::try_from(number).is_ok_and(contains) {
            if begin < number {
                ranges.push((begin, number - 1));
            }
            begin = number + 1;
        }
    }
    if begin <= last {
        ranges.push((begin, last));
    }
    ranges
}

fn at(descriptor: RawFd) -> Option<&'static AtomicBool> {
    IS_KEPT.get(usize::try_from(descriptor).ok()?)
}
