//! Eventfd that wakes a thread sleeping on descriptors.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;
use std::{io, ptr};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Event that one thread waits for and any thread signals.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// Creates an event that is not signalled.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
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

    /// Waits as [`wait`](Self::wait) does, for descriptors that another thread may close meanwhile: the wait may then
    /// end early, or for other files with their numbers.
    pub fn wait_for(&self, descriptors: &[RawFd], at_most: Option<Duration>) {
        let polled = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let own = self.0.as_raw_fd();
        let mut polled: Vec<_> = descriptors.iter().copied().chain([own]).map(polled).collect();
        let timeout = at_most.and_then(timespec);
        let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
        let count = polled.len() as libc::nfds_t;
        // SAFETY: the array has `count` entries, and the time-out, if there is one, lives until the call returns. A number
        // that is not open is answered by POLLNVAL.
        let _ = unsafe { libc::ppoll(polled.as_mut_ptr(), count, timeout, ptr::null()) };
        if polled.last().is_some_and(|event| event.revents & libc::POLLIN != 0) {
            self.clear();
        }
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

/// Time-out of the C library; `None` if it is too long for the system.
fn timespec(at_most: Duration) -> Option<libc::timespec> {
    let tv_sec = at_most.as_secs().try_into().ok()?;
    let tv_nsec = at_most.subsec_nanos().into();
    Some(libc::timespec { tv_sec, tv_nsec })
}
