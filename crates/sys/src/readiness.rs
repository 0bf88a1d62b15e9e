//! Descriptor for poll(2) whose readability and writability are set by the engine, independently
//! and level-triggered.
//!
//! The descriptor is one end of a pair of connected stream sockets. A byte written at the other end
//! makes it readable, until the byte is read again. Unread bytes towards the other end that exceed
//! its send buffer's threshold make it not writable. Nobody but this module reads or writes either
//! end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// More than a quarter of the smallest send buffer: with these bytes unread the socket is not
/// writable.
const STOPPER: [u8; 2048] = [0; 2048];

/// End of the pair that is polled.
#[derive(Debug)]
pub struct ReadinessTold(OwnedFd);

/// End of the pair that sets readability and writability.
#[derive(Debug)]
pub struct Teller {
    descriptor: OwnedFd,
    is_readable: bool,
    is_writable: bool,
}

/// Creates both ends. Initially writable, not readable.
///
/// # Errors
/// If the process has no descriptors left.
pub fn readiness() -> io::Result<(Teller, ReadinessTold)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (descriptor, told) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The kernel raises 0 to its minimum.
    set_socket_send_buffer_size(&told, 0)?;
    Ok((Teller { descriptor, is_readable: false, is_writable: true }, ReadinessTold(told)))
}

// No call below fails except by the state that was checked before: both ends are open and
// non-blocking, and nobody else uses them.
impl Teller {
    /// Makes the other end readable.
    pub fn readable(&mut self) {
        if !self.is_readable {
            self.is_readable = rustix::io::write(&self.descriptor, &[0]).is_ok();
        }
    }

    /// Makes the other end not readable.
    pub fn not_readable(&mut self, told: &ReadinessTold) {
        if self.is_readable {
            self.is_readable = rustix::io::read(&told.0, &mut [0; 8]).is_err();
        }
    }

    /// Makes the other end writable.
    pub fn writable(&mut self) {
        if !self.is_writable {
            self.is_writable = rustix::io::read(&self.descriptor, &mut [0; STOPPER.len()]).is_ok();
        }
    }

    /// Makes the other end not writable.
    pub fn not_writable(&mut self, told: &ReadinessTold) {
        if self.is_writable {
            self.is_writable = rustix::io::write(&told.0, &STOPPER).is_err();
        }
    }
}

impl AsFd for ReadinessTold {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn seen(told: &ReadinessTold) -> (bool, bool) {
        let mut polled = [PollFd::new(told, PollFlags::IN | PollFlags::OUT)];
        poll(&mut polled, Some(&Timespec::default())).unwrap();
        let seen = polled[0].revents();
        (seen.contains(PollFlags::IN), seen.contains(PollFlags::OUT))
    }

    #[test]
    fn readable_and_writable_are_separate() {
        let (mut teller, told) = readiness().unwrap();
        assert_eq!(seen(&told), (false, true));
        for _ in 0..1000 {
            for _ in 0..2 {
                teller.not_writable(&told);
                assert_eq!(seen(&told), (false, false));
            }
            for _ in 0..2 {
                teller.readable();
                assert_eq!(seen(&told), (true, false));
            }
            for _ in 0..2 {
                teller.writable();
                assert_eq!(seen(&told), (true, true));
            }
            for _ in 0..2 {
                teller.not_readable(&told);
                assert_eq!(seen(&told), (false, true));
            }
        }
    }
}
