//! A descriptor pair that tells somebody who waits for a descriptor that he may read, and that he may write, each by
//! itself and for as long as it is so.
//!
//! The descriptor is one end of a pair of connected sockets. A byte that was put in at the other end makes it
//! readable, until it is taken out again; so much that waits for the other end to be read makes it not
//! writable. Nobody but us reads or writes either end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// More than a quarter of the least buffer that a socket has: with that waiting it is not writable.
const STOPPER: [u8; 2048] = [0; 2048];

/// The end that is told: whoever waits has this descriptor.
#[derive(Debug)]
pub struct ReadinessTold(OwnedFd);

/// The end that tells.
#[derive(Debug)]
pub struct Teller {
    descriptor: OwnedFd,
    is_readable: bool,
    is_writable: bool,
}

/// Makes both ends. One may write, and not read.
///
/// # Errors
/// When the process has no descriptors left.
pub fn readiness() -> io::Result<(Teller, ReadinessTold)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (descriptor, told) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The least that there is.
    set_socket_send_buffer_size(&told, 0)?;
    Ok((Teller { descriptor, is_readable: false, is_writable: true }, ReadinessTold(told)))
}

// None of the calls below fails but by what was checked before: both ends are there, do not block, and
// nothing else is in between.
impl Teller {
    /// Says that one may read.
    pub fn readable(&mut self) {
        if !self.is_readable {
            self.is_readable = rustix::io::write(&self.descriptor, &[0]).is_ok();
        }
    }

    /// Takes that back.
    pub fn not_readable(&mut self, told: &ReadinessTold) {
        if self.is_readable {
            self.is_readable = rustix::io::read(&told.0, &mut [0; 8]).is_err();
        }
    }

    /// Says that one may write.
    pub fn writable(&mut self) {
        if !self.is_writable {
            self.is_writable = rustix::io::read(&self.descriptor, &mut [0; STOPPER.len()]).is_ok();
        }
    }

    /// Takes that back.
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
