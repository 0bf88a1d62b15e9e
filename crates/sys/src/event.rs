//! Eventfd that wakes a thread sleeping on descriptors.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::hidden::Hidden;

/// Event that one thread waits for and any thread signals.
#[derive(Debug)]
pub struct Event(Hidden);

impl Event {
    /// Creates an event that is not signalled.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Hidden::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?))
    }

    /// Signals the event: a waiting thread wakes, or the next wait returns at once.
    pub fn signal(&self) {
        // The write fails only if the counter is full: 2^64 - 2 signals without a wait.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits until the event is signalled, one of `descriptors` is readable or broken, or `at_most`
    /// has passed.
    pub fn wait(&self, descriptors: &[BorrowedFd<'_>], at_most: Option<Duration>) {
        let mut polled: Vec<_> = descriptors
            .iter()
            .map(|descriptor| PollFd::from_borrowed_fd(*descriptor, PollFlags::IN))
            .collect();
        polled.push(PollFd::new(&self.0, PollFlags::IN));
        // A duration too long for the system counts as no limit.
        let timeout = at_most.and_then(|at_most| Timespec::try_from(at_most).ok());
        // A signal may interrupt the wait: the caller then finds nothing and waits again.
        let _ = poll(&mut polled, timeout.as_ref());
        let happened = polled.last().is_some_and(|event| event.revents().contains(PollFlags::IN));
        if happened {
            self.clear();
        }
    }

    /// Waits as [`wait`](Self::wait) does, for descriptors by their numbers, which another thread may close meanwhile:
    /// the wait may then end early, or for other files with these numbers.
    pub fn wait_by_number(&self, descriptors: &[RawFd], at_most: Option<Duration>) {
        // SAFETY: a borrowed descriptor is only polled, and poll(2) answers a number that is not open by POLLNVAL. Each is
        // that of a file, not -1.
        let borrow = |&fd: &RawFd| unsafe { BorrowedFd::borrow_raw(fd) };
        self.wait(&descriptors.iter().map(borrow).collect::<Vec<_>>(), at_most);
    }

    /// Resets the event to not signalled.
    pub fn clear(&self) {
        // Non-blocking: the read only resets the counter that `signal` raised.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// Descriptor that is readable while the event is signalled.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
}
