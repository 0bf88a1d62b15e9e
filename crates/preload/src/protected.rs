//! Descriptors of the library that the program does not know, and must not close.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, fcntl_dupfd_cloexec, fcntl_getfd};
use rustix::process::{Resource, getrlimit};

use crate::abi;

/// Lowest number of most of them, so that the program's own descriptors have the numbers that they would have
/// without us.
const FROM: RawFd = 512;

/// Numbers that can be protected.
const NUMBERS_MAX: usize = 1 << 16;

thread_local! {
    /// True while the library closes descriptors of its own on this thread: it does so by the function that the
    /// program calls.
    static CLOSES_OWN: Cell<bool> = const { Cell::new(false) };
}

static IS_PROTECTED: [AtomicBool; NUMBERS_MAX] = [const { AtomicBool::new(false) }; NUMBERS_MAX];

/// Duplicates a descriptor for the library, at a high number if the program may have such.
///
/// # Errors
/// `EMFILE` if the process has no descriptors left.
pub(crate) fn duplicate(descriptor: impl AsFd) -> Result<OwnedFd, Errno> {
    let at_from = fcntl_dupfd_cloexec(&descriptor, FROM);
    at_from.or_else(|_| {
        let limit = getrlimit(Resource::Nofile).current;
        let half = limit.and_then(|limit| RawFd::try_from(limit / 2).ok()).unwrap_or(0);
        fcntl_dupfd_cloexec(&descriptor, half).or_else(|_| fcntl_dupfd_cloexec(&descriptor, 0))
    })
}

/// Protects a descriptor from the program.
pub(crate) fn protect(descriptor: BorrowedFd<'_>) {
    if let Some(mark) = at(descriptor.as_raw_fd()) {
        mark.store(true, Ordering::Relaxed);
    }
}

/// Protects all descriptors that `open` opens, and does not close itself, from the program. Not those of a
/// program with several threads, which may open descriptors at the same time: these would never be closed.
pub(crate) fn protect_opened_by<T>(open: impl FnOnce() -> T) -> T {
    if numbers_in("/proc/self/task").len() != 1 {
        return closing_own(open);
    }
    let before = open_numbers();
    let opened = closing_own(open);
    for number in open_numbers().difference(&before) {
        if let Some(mark) = at(*number) {
            mark.store(true, Ordering::Relaxed);
        }
    }
    opened
}

/// Lets `close` close descriptors of the library, whose protection then ends.
pub(crate) fn closing_own<T>(close: impl FnOnce() -> T) -> T {
    let before = CLOSES_OWN.replace(true);
    let closed = close();
    CLOSES_OWN.set(before);
    closed
}

/// Numbers of all open descriptors, but for the one that the list was read by.
fn open_numbers() -> BTreeSet<RawFd> {
    let mut numbers = numbers_in("/proc/self/fd");
    numbers.retain(|number| abi::with_number(*number, |it| fcntl_getfd(it)).is_ok());
    numbers
}

/// Names of a folder's files that are numbers.
fn numbers_in(folder: &str) -> BTreeSet<RawFd> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Ends the protection of a descriptor that is about to be closed.
pub(crate) fn unprotect(descriptor: BorrowedFd<'_>) {
    if let Some(mark) = at(descriptor.as_raw_fd()) {
        mark.store(false, Ordering::Relaxed);
    }
}

/// True for a descriptor that must not be closed, since the program does not know it. Ends the protection of one that
/// the library closes.
pub(crate) fn refuses_close(descriptor: RawFd) -> bool {
    let Some(mark) = at(descriptor).filter(|mark| mark.load(Ordering::Relaxed)) else {
        return false;
    };
    let is_own = CLOSES_OWN.get();
    if is_own {
        mark.store(false, Ordering::Relaxed);
    }
    !is_own
}

/// True for a descriptor that the program must not close.
pub(crate) fn is_protected(descriptor: RawFd) -> bool {
    at(descriptor).is_some_and(|mark| mark.load(Ordering::Relaxed))
}

/// Parts of a range of numbers that have no protected one.
pub(crate) fn unprotected_ranges(first: u32, last: u32) -> Vec<(u32, u32)> {
    let mut ranges = Vec::new();
    let mut begin = first;
    let end = last.min(u32::try_from(NUMBERS_MAX).unwrap_or(u32::MAX));
    for number in first..=end {
        if RawFd::try_from(number).is_ok_and(is_protected) {
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
    IS_PROTECTED.get(usize::try_from(descriptor).ok()?)
}
