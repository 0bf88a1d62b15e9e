//! Descriptor for poll(2) whose readability and writability are set by the engine, independently
//! and level-triggered.
//!
//! The descriptor is one end of a pair of connected stream sockets. A byte written at the other end
//! makes it readable, until the byte is read again. Unread bytes towards the other end that exceed
//! its send buffer's threshold make it not writable. The other end is shut down for `EPOLLRDHUP` and
//! `EPOLLHUP`, and closed with a byte unread for `EPOLLERR`; from there is no way back. Nobody but this
//! module reads or writes either end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

/// More than a quarter of the smallest send buffer: with these bytes unread the socket is not
/// writable.
const STOPPER: [u8; 2048] = [0; 2048];

/// End of the pair that is polled.
#[derive(Debug)]
pub struct ReadinessTold(OwnedFd);

/// End of the pair that sets readability and writability.
#[derive(Debug)]
pub struct Teller {
    /// `None` once an error was told.
    descriptor: Option<OwnedFd>,
    is_readable: bool,
    is_writable: bool,
    ended: Ended,
}

/// Ends of a connection that were told. Each includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Ended {
    /// None.
    #[default]
    Nothing,
    /// The peer's side: readable from here on (`EPOLLRDHUP`).
    Peer,
    /// Both sides: writable, too (`EPOLLHUP`).
    Both,
    /// Both sides, and an error waits (`EPOLLERR`).
    Failed,
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
    let descriptor = Some(descriptor);
    let (is_readable, is_writable, ended) = (false, true, Ended::default());
    Ok((Teller { descriptor, is_readable, is_writable, ended }, ReadinessTold(told)))
}

// No call below fails except by the state that was checked before: both ends are open and
// non-blocking, and nobody else uses them.
impl Teller {
    /// Makes the other end readable.
    pub fn readable(&mut self) {
        if let (false, Some(descriptor)) = (self.is_readable, &self.descriptor) {
            self.is_readable = rustix::io::write(descriptor, &[0]).is_ok();
        }
    }

    /// Makes the other end not readable, unless the peer's side has ended.
    pub fn not_readable(&mut self, told: &ReadinessTold) {
        if self.is_readable && self.ended == Ended::Nothing {
            self.is_readable = rustix::io::read(&told.0, &mut [0; 8]).is_err();
        }
    }

    /// Makes the other end writable.
    pub fn writable(&mut self) {
        if let (false, Some(descriptor)) = (self.is_writable, &self.descriptor) {
            self.is_writable = rustix::io::read(descriptor, &mut [0; STOPPER.len()]).is_ok();
        }
    }

    /// Makes the other end not writable, unless both sides have ended.
    pub fn not_writable(&mut self, told: &ReadinessTold) {
        if self.is_writable && self.ended < Ended::Both {
            self.is_writable = rustix::io::write(&told.0, &STOPPER).is_err();
        }
    }

    /// Tells that sides have ended. Does nothing if that was told before.
    pub fn end(&mut self, ended: Ended, told: &ReadinessTold) {
        if ended <= self.ended {
            return;
        }
        let before = std::mem::replace(&mut self.ended, ended);
        self.is_readable = true;
        if ended >= Ended::Both {
            self.writable();
        }
        let Some(descriptor) = &self.descriptor else { return };
        let _ = match ended {
            Ended::Nothing => Ok(()),
            Ended::Peer => shutdown(descriptor, Shutdown::Write),
            Ended::Both => shutdown(descriptor, Shutdown::Both),
            Ended::Failed => {
                // After a shutdown no byte can be left unread: the error is then told as the end.
                if before < Ended::Both {
                    let _ = rustix::io::write(&told.0, &[0]);
                }
                self.descriptor = None;
                Ok(())
            }
        };
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
    fn ends_are_told_apart() {
        let all =
            PollFlags::IN | PollFlags::OUT | PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let peer = PollFlags::IN | PollFlags::RDHUP;
        for is_writable in [true, false] {
            let cases =
                [(Ended::Peer, peer), (Ended::Both, all - PollFlags::ERR), (Ended::Failed, all)];
            for (ended, mut expected) in cases {
                let (mut teller, told) = readiness().unwrap();
                if !is_writable {
                    teller.not_writable(&told);
                } else if ended == Ended::Peer {
                    expected |= PollFlags::OUT;
                }
                teller.end(ended, &told);
                teller.not_readable(&told);
                teller.readable();
                let mut polled = [PollFd::new(&told, all)];
                poll(&mut polled, Some(&Timespec::default())).unwrap();
                assert_eq!(polled[0].revents(), expected, "{ended:?}, {is_writable}");
            }
        }
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
