//! An event that wakes a thread that sleeps on descriptors.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An event that one thread waits for and any thread signals.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// An event that has not happened.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Has it happen: whoever waits wakes, or whoever waits next does not wait.
    pub fn signal(&self) {
        // It fails only if it has happened 2^64 times and nobody waited.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits until it happens, one of `descriptors` is readable or broken, or for `at_most`.
    pub fn wait(&self, descriptors: &[BorrowedFd<'_>], at_most: Option<Duration>) {
        let mut polled: Vec<_> = descriptors
            .iter()
            .map(|descriptor| PollFd::from_borrowed_fd(*descriptor, PollFlags::IN))
            .collect();
        polled.push(PollFd::new(&self.0, PollFlags::IN));
        // What is too long for the system is as good as forever.
        let timeout = at_most.and_then(|at_most| Timespec::try_from(at_most).ok());
        // A signal may interrupt it: then the caller looks around and comes back.
        let _ = poll(&mut polled, timeout.as_ref());
        let happened = polled.last().is_some_and(|event| event.revents().contains(PollFlags::IN));
        if happened {
            self.clear();
        }
    }

    /// Has it not have happened.
    pub fn clear(&self) {
        // It is non-blocking, so this only takes back what `signal` wrote.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// Descriptor that becomes readable when it happens.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
}
