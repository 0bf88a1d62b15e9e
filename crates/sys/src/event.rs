//! Eventfd that wakes a thread sleeping on descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

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
        self.poll(descriptors.iter().map(AsRawFd::as_raw_fd), at_most);
    }

    /// Waits as [`wait`](Self::wait) does, for descriptors by their numbers, which another thread may close meanwhile:
    /// the wait may then end early, or for other files with these numbers. Negative numbers are passed over, as by
    /// poll(2).
    pub fn wait_by_number(&self, descriptors: &[RawFd], at_most: Option<Duration>) {
        self.poll(descriptors.iter().copied(), at_most);
    }

    fn poll(&self, numbers: impl Iterator<Item = RawFd>, at_most: Option<Duration>) {
        let numbers = numbers.chain([self.0.as_raw_fd()]);
        let mut polled: Vec<_> =
            numbers.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        let mut timeout = at_most.and_then(timespec);
        let timeout = timeout.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        let no_mask = ptr::null::<libc::sigset_t>();
        // A signal may interrupt the wait: the caller then finds nothing and waits again. By itself, past the preloaded
        // library's `ppoll`, which refuses descriptors that the program does not know.
        // SAFETY: the kernel reads and writes the time, if there is one, and the elements of `polled`, of which it is told
        // the number; both outlive the call, and no mask of signals is read. Any number may be polled: one that is not
        // open is answered by POLLNVAL.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_ppoll,
                polled.as_mut_ptr(),
                polled.len(),
                timeout,
                no_mask,
                size_of::<libc::sigset_t>(),
            )
        };
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

/// Time for the system; `None`, no limit, for one that is too long for it.
fn timespec(duration: Duration) -> Option<libc::timespec> {
    Some(libc::timespec {
        tv_sec: duration.as_secs().try_into().ok()?,
        tv_nsec: duration.subsec_nanos().into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_may_be_waited_for() {
        let event = Event::new().unwrap();
        event.signal();
        event.wait_by_number(&[-1, RawFd::MIN], None); // as signalled
        event.wait_by_number(&[-1], Some(Duration::ZERO));
        event.wait_by_number(&[RawFd::MAX], None); // as not open
        event.signal();
        event.wait(&[event.descriptor()], Some(Duration::MAX));
        event.wait(&[], Some(Duration::from_nanos(1)));
    }
}
