//! Descriptor for poll(2) whose readability and writability are set by the engine, independently
//! and level-triggered.
//!
//! The descriptor is one end of a pair of connected stream sockets. A byte written at the other end
//! makes it readable, until the byte is read again. Unread bytes towards the other end that exceed
//! its send buffer's threshold make it not writable. The other end is shut down for `EPOLLRDHUP` and
//! `EPOLLHUP`, and closed with a byte unread for `EPOLLERR`; from there is no way back. Others should neither
//! read nor write either end; where they do, nothing here waits, and later news are told.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};

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

// No call below waits, whatever flag others have set on the descriptor. `AGAIN` says that they have read what was
// there, or have written.
impl Teller {
    /// Makes the other end readable.
    pub fn readable(&mut self) {
        if let (false, Some(descriptor)) = (self.is_readable, &self.descriptor) {
            self.is_readable = tell(descriptor, &[0]);
        }
    }

    /// Makes the other end not readable, unless the peer's side has ended.
    pub fn not_readable(&mut self, told: &ReadinessTold) {
        if self.is_readable && self.ended == Ended::Nothing {
            self.is_readable = !take(&told.0, &mut [0; 8]);
        }
    }

    /// Makes the other end writable.
    pub fn writable(&mut self) {
        if let (false, Some(descriptor)) = (self.is_writable, &self.descriptor) {
            // Room for what others have written besides.
            self.is_writable = take(descriptor, &mut [0; 2 * STOPPER.len()]);
        }
    }

    /// Makes the other end not writable, unless both sides have ended.
    pub fn not_writable(&mut self, told: &ReadinessTold) {
        if self.is_writable && self.ended < Ended::Both {
            self.is_writable = !tell(&told.0, &STOPPER);
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
                    tell(&told.0, &[0]);
                }
                // A copy in a child keeps the end open, but not this.
                let ended = shutdown(descriptor, Shutdown::Both);
                self.descriptor = None;
                ended
            }
        };
    }
}

/// Writes to an end. True if the other one has as many bytes unread as others permit.
fn tell(descriptor: &OwnedFd, bytes: &[u8]) -> bool {
    let sent = send(descriptor, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    sent.is_ok() || sent == Err(Errno::AGAIN)
}

/// Reads what is unread at an end. False if that failed.
fn take(descriptor: &OwnedFd, room: &mut [u8]) -> bool {
    let taken = recv(descriptor, room, RecvFlags::DONTWAIT);
    taken.is_ok() || matches!(taken, Err(Errno::AGAIN))
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
    fn error_is_told_despite_copies() {
        let (mut teller, told) = readiness().unwrap();
        let copy = teller.descriptor.as_ref().unwrap().try_clone().unwrap();
        teller.end(Ended::Failed, &told);
        let asked = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let events = || {
            let mut polled = [PollFd::new(&told, asked)];
            poll(&mut polled, Some(&Timespec::default())).unwrap();
            polled[0].revents()
        };
        assert_eq!(events(), asked - PollFlags::ERR);
        drop(copy);
        assert_eq!(events(), asked);
    }

    #[test]
    fn strays_neither_block_nor_silence() {
        let (mut teller, told) = readiness().unwrap();
        rustix::fs::fcntl_setfl(&told, rustix::fs::OFlags::empty()).unwrap();
        let (says, said) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for _ in 0..10 {
                teller.readable();
                rustix::io::read(&told, &mut [0; 8]).unwrap();
                teller.not_readable(&told);
                teller.readable();
                assert_eq!(seen(&told), (true, true));
                teller.not_readable(&told);
                assert_eq!(seen(&told), (false, true));
                // As many bytes as there is room for.
                while send(&told, &[0; 100], SendFlags::DONTWAIT).is_ok() {}
                teller.not_writable(&told);
                assert_eq!(seen(&told), (false, false));
                teller.writable();
                teller.not_writable(&told);
                teller.writable();
                assert_eq!(seen(&told), (false, true));
            }
            says.send(()).unwrap();
        });
        said.recv_timeout(std::time::Duration::from_secs(60)).expect("no call waits");
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
