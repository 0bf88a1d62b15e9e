//! Descriptors that the program in this process does not know, since a library has opened them: it must neither close
//! them nor put others in their place.
//!
//! Each is marked by its number as long as its owner lives. A library that is loaded into a program looks at the
//! marks when the program names a number, and has them [opened from a high number on](open_from), so that the
//! program's own descriptors have the numbers that they would have without it.

use std::mem;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, getrlimit};

/// Numbers that can be marked: the kernel's default for `fs.nr_open`. Pages of marks never set take no memory.
const NUMBERS_MAX: usize = 1 << 20;

/// Lowest number that is not one of the three of standard input and output, which the program may have closed.
const ABOVE_STANDARD: RawFd = 3;

static IS_HIDDEN: [AtomicBool; NUMBERS_MAX] = [const { AtomicBool::new(false) }; NUMBERS_MAX];

/// Lowest number that was marked, and the one above all of them.
static START: AtomicI32 = AtomicI32::new(RawFd::MAX);
static END: AtomicI32 = AtomicI32::new(0);

/// Lowest number of those opened from now on, if the process may have such; 0: any.
static LOWEST: AtomicI32 = AtomicI32::new(0);

/// Owner of a hidden descriptor.
#[derive(Debug)]
pub struct Hidden<T: AsFd = OwnedFd>(T);

impl<T: AsFd + From<OwnedFd> + Into<OwnedFd>> Hidden<T> {
    /// Hides a descriptor that was just opened, at a number of the range for such. If the process has none left there, it
    /// keeps its number. To be called at once: until then the program can close it.
    ///
    /// # Errors
    /// `EBADF` if it is closed: the number may be the program's, and is left alone.
    pub fn new(opened: T) -> Result<Self, Errno> {
        Self::moved(opened, LOWEST.load(Ordering::Relaxed))
    }

    fn moved(opened: T, lowest: RawFd) -> Result<Self, Errno> {
        if lowest == 0 || opened.as_fd().as_raw_fd() >= lowest {
            return Ok(Self::at_its_number(opened));
        }
        match duplicate_from(opened.as_fd(), lowest) {
            Ok(moved) => Ok(Self::at_its_number(moved.into())),
            Err(Errno::MFILE | Errno::INVAL) => Ok(Self::at_its_number(opened)),
            Err(error) => {
                mem::forget(opened);
                Err(error)
            }
        }
    }

    /// Another descriptor of the same file, hidden as well.
    ///
    /// # Errors
    /// `EMFILE` if the process has no descriptors left.
    pub fn duplicate(file: impl AsFd) -> Result<Self, Errno> {
        let lowest = LOWEST.load(Ordering::Relaxed);
        let duplicate = duplicate_from(file.as_fd(), lowest);
        let duplicate = duplicate.or_else(|_| fcntl_dupfd_cloexec(&file, ABOVE_STANDARD))?;
        Ok(Self::at_its_number(duplicate.into()))
    }
}

impl<T: AsFd> Hidden<T> {
    fn at_its_number(opened: T) -> Self {
        let number = opened.as_fd().as_raw_fd();
        if let Some(mark) = mark(number) {
            mark.store(true, Ordering::Relaxed);
            START.fetch_min(number, Ordering::Relaxed);
            END.fetch_max(number + 1, Ordering::Relaxed);
        }
        Self(opened)
    }
}

impl<T: AsFd> AsFd for Hidden<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<T: AsFd> AsRawFd for Hidden<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl<T: AsFd> Deref for Hidden<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsFd> Drop for Hidden<T> {
    fn drop(&mut self) {
        // Before it is closed: the kernel may give the number to the program at once.
        reveal(self.0.as_fd());
    }
}

/// Sets the lowest number for hidden descriptors that are opened from now on, if the process may have such numbers.
pub fn open_from(lowest: RawFd) {
    LOWEST.store(lowest, Ordering::Relaxed);
}

/// True for the number of a hidden descriptor.
#[inline]
pub fn is_hidden(number: RawFd) -> bool {
    mark(number).is_some_and(|mark| mark.load(Ordering::Relaxed))
}

/// Hidden numbers from `first` to `last`, in order.
pub fn within(first: u32, last: u32) -> impl Iterator<Item = RawFd> {
    let clamped = |number: u32| RawFd::try_from(number).unwrap_or(RawFd::MAX);
    let start = START.load(Ordering::Relaxed).max(clamped(first));
    let end = END.load(Ordering::Relaxed).min(clamped(last.saturating_add(1)));
    (start..end).filter(|number| is_hidden(*number))
}

/// Ends the mark of a descriptor that is closed without its owner, which is forgotten.
pub fn reveal(descriptor: BorrowedFd<'_>) {
    if let Some(mark) = mark(descriptor.as_raw_fd()) {
        mark.store(false, Ordering::Relaxed);
    }
}

/// Duplicates a descriptor at this number or above; from half of the process's numbers on if these are fewer.
fn duplicate_from(descriptor: BorrowedFd<'_>, lowest: RawFd) -> Result<OwnedFd, Errno> {
    fcntl_dupfd_cloexec(descriptor, lowest).or_else(|_| {
        let limit = getrlimit(Resource::Nofile).current;
        let half = limit.and_then(|limit| RawFd::try_from(limit / 2).ok()).unwrap_or(0);
        fcntl_dupfd_cloexec(descriptor, half.min(lowest).max(ABOVE_STANDARD))
    })
}

fn mark(number: RawFd) -> Option<&'static AtomicBool> {
    IS_HIDDEN.get(usize::try_from(number).ok()?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::FromRawFd;

    use super::*;

    #[test]
    fn mark_ends_with_its_owner() {
        let hidden = Hidden::new(File::open("/dev/null").unwrap()).unwrap();
        let number = hidden.as_raw_fd();
        let others = Hidden::<OwnedFd>::duplicate(&hidden).unwrap();
        assert!(is_hidden(number) && is_hidden(others.as_raw_fd()));
        let at = u32::try_from(number).unwrap();
        assert_eq!(within(at, at).collect::<Vec<_>>(), [number]);
        assert!(
            within(0, at).any(|it| it == number) && within(at, u32::MAX).next() == Some(number)
        );
        drop(hidden);
        assert!(!is_hidden(number) && is_hidden(others.as_raw_fd()));
        assert_eq!(within(at, at).next(), None);
        assert!(!is_hidden(-1) && !is_hidden(RawFd::MAX));
        assert_eq!(within(u32::MAX, u32::MAX).next(), None);
    }

    #[test]
    fn closed_descriptor_is_left_alone() {
        let number = RawFd::MAX - 1;
        // SAFETY: the process cannot have so many descriptors: it is closed, and nothing is done with it.
        let closed = unsafe { OwnedFd::from_raw_fd(number) };
        assert_eq!(Hidden::moved(closed, RawFd::MAX).unwrap_err(), Errno::BADF);
        assert!(!is_hidden(number));
        let opened = File::open("/dev/null").unwrap();
        let hidden = Hidden::moved(opened, RawFd::MAX).expect("another number, or its own");
        assert!(is_hidden(hidden.as_raw_fd()) && hidden.as_raw_fd() >= ABOVE_STANDARD);
    }
}
