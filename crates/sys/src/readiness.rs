//! Descriptor for poll(2) whose readability and writability are set by the engine, independently
//! and level-triggered.
//!
//! The descriptor is one end of a pair of connected stream sockets. A byte written at the other end
//! makes it readable, until the byte is read again. Unread bytes towards the other end that exceed
//! its send buffer's threshold make it not writable. The other end is shut down for `EPOLLRDHUP` and
//! `EPOLLHUP`, and closed with a byte unread for `EPOLLERR`; from there is no way back. Others should neither
//! read nor write either end; where they do, nothing here waits, and later news are told.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_send_buffer_size, socket_send_buffer_size};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};

use super::hidden::Hidden;

/// More than a quarter of the smallest send buffer: with these bytes unread the socket is not
/// writable.
const STOPPER: [u8; 2048] = [0; 2048];

/// End of the pair that is polled.
#[derive(Debug)]
pub struct ReadinessDescriptor(Hidden);

/// End of the pair that sets readability and writability.
#[derive(Debug)]
pub struct ReadinessSetter {
    /// `None` once an error was told.
    socket: Option<Hidden>,
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

/// Pair whose setter is done with: from then on others may carry bytes over it.
#[derive(Debug)]
pub enum Released {
    /// The setter's end. Nothing is unread at either, and both have buffers of the usual size.
    Open(Hidden),
    /// The setter's end, of which sides have ended: it carries nothing to the other one.
    Ended(Hidden),
    /// An error was told: the setter's end is closed.
    Failed,
}

/// Creates both ends. Initially writable, not readable.
///
/// # Errors
/// If the process has no descriptors left.
pub fn readiness() -> io::Result<(ReadinessSetter, ReadinessDescriptor)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (socket, descriptor) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let (socket, descriptor) = (Hidden::new(socket)?, Hidden::new(descriptor)?);
    // The kernel raises 0 to its minimum.
    set_socket_send_buffer_size(&descriptor, 0)?;
    let socket = Some(socket);
    let (is_readable, is_writable, ended) = (false, true, Ended::default());
    Ok((
        ReadinessSetter { socket, is_readable, is_writable, ended },
        ReadinessDescriptor(descriptor),
    ))
}

// No call below waits, whatever flag others have set on the descriptor. `AGAIN` says that they have read what was
// there, or have written.
impl ReadinessSetter {
    /// Makes the other end readable.
    pub fn readable(&mut self) {
        if let (false, Some(socket)) = (self.is_readable, &self.socket) {
            self.is_readable = write_some(socket, &[0]);
        }
    }

    /// Makes the other end not readable, unless the peer's side has ended.
    pub fn not_readable(&mut self, descriptor: &ReadinessDescriptor) {
        if self.is_readable && self.ended == Ended::Nothing {
            self.is_readable = !read_all(&descriptor.0, &mut [0; 8]);
        }
    }

    /// Makes the other end writable.
    pub fn writable(&mut self) {
        if let (false, Some(socket)) = (self.is_writable, &self.socket) {
            // Room for what others have written besides.
            self.is_writable = read_all(socket, &mut [0; 2 * STOPPER.len()]);
        }
    }

    /// Makes the other end not writable, unless both sides have ended.
    pub fn not_writable(&mut self, descriptor: &ReadinessDescriptor) {
        if self.is_writable && self.ended < Ended::Both {
            self.is_writable = !write_some(&descriptor.0, &STOPPER);
        }
    }

    /// Tells that sides have ended. Does nothing if that was told before.
    pub fn end(&mut self, ended: Ended, descriptor: &ReadinessDescriptor) {
        if ended <= self.ended {
            return;
        }
        let before = std::mem::replace(&mut self.ended, ended);
        self.is_readable = true;
        if ended >= Ended::Both {
            self.writable();
        }
        let Some(socket) = &self.socket else { return };
        let _ = match ended {
            Ended::Nothing => Ok(()),
            Ended::Peer => shutdown(socket, Shutdown::Write),
            Ended::Both => shutdown(socket, Shutdown::Both),
            Ended::Failed => {
                // After a shutdown no byte can be left unread: the error is then told as the end.
                if before < Ended::Both {
                    write_some(&descriptor.0, &[0]);
                }
                // Before the shutdown: who waits is woken by the end and the error at the same time.
                self.socket = None;
                // Copies in children keep the setter's end open. If there are none, this would be one more edge.
                if has_hung_up(&descriptor.0) {
                    Ok(())
                } else {
                    shutdown(&descriptor.0, Shutdown::Both)
                }
            }
        };
    }

    /// Number of the setter's end; `None` once an error was told.
    #[must_use]
    pub fn number(&self) -> Option<RawFd> {
        self.socket.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Releases the pair. What it was told is taken back, but for ends.
    ///
    /// # Errors
    /// If an end has no room for a buffer of the usual size.
    pub fn release(self, descriptor: &ReadinessDescriptor) -> io::Result<Released> {
        let Some(socket) = self.socket else { return Ok(Released::Failed) };
        if self.ended > Ended::Nothing {
            return Ok(Released::Ended(socket));
        }
        let mut room = [0; 2 * STOPPER.len()];
        for end in [&descriptor.0, &socket] {
            while recv(end, &mut room, RecvFlags::DONTWAIT).is_ok_and(|(len, _)| len > 0) {}
        }
        // The kernel tells twice of what it is asked for.
        set_socket_send_buffer_size(&descriptor.0, socket_send_buffer_size(&socket)? / 2)?;
        Ok(Released::Open(socket))
    }
}

/// True if both sides of an end have ended.
fn has_hung_up(socket: &Hidden) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec::default())).is_ok()
        && polled[0].revents().contains(PollFlags::HUP)
}

/// Writes to an end. True if the other one has as many bytes unread as others permit.
///
/// Other failures (`NOBUFS`) are lack of memory for one small buffer. For that the kernel waits, and ends a process if it must:
/// only in a memory cgroup where it may end none (`memory.oom_control`, `oom_score_adj`) is a program not notified. The state
/// stays unset then, so that the next call for the socket tells it.
fn write_some(socket: &Hidden, bytes: &[u8]) -> bool {
    let sent = send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    sent.is_ok() || sent == Err(Errno::AGAIN)
}

/// Reads what is unread at an end. False if that failed.
fn read_all(socket: &Hidden, room: &mut [u8]) -> bool {
    let taken = recv(socket, room, RecvFlags::DONTWAIT);
    taken.is_ok() || matches!(taken, Err(Errno::AGAIN))
}

impl AsFd for ReadinessDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::epoll;

    use super::*;

    fn seen(descriptor: &ReadinessDescriptor) -> (bool, bool) {
        let mut polled = [PollFd::new(descriptor, PollFlags::IN | PollFlags::OUT)];
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
                let (mut setter, descriptor) = readiness().unwrap();
                if !is_writable {
                    setter.not_writable(&descriptor);
                } else if ended == Ended::Peer {
                    expected |= PollFlags::OUT;
                }
                setter.end(ended, &descriptor);
                setter.not_readable(&descriptor);
                setter.readable();
                let mut polled = [PollFd::new(&descriptor, all)];
                poll(&mut polled, Some(&Timespec::default())).unwrap();
                assert_eq!(polled[0].revents(), expected, "{ended:?}, {is_writable}");
            }
        }
    }

    #[test]
    fn waiter_sees_end_and_error_together() {
        for _ in 0..200 {
            let (mut setter, descriptor) = readiness().unwrap();
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| {
                    let mut polled = [PollFd::new(&descriptor, PollFlags::empty())];
                    poll(&mut polled, None).unwrap();
                    polled[0].revents()
                });
                std::thread::yield_now();
                setter.end(Ended::Failed, &descriptor);
                assert_eq!(waits.join().unwrap(), PollFlags::HUP | PollFlags::ERR);
            });
        }
    }

    #[test]
    fn released_pair_carries_bytes() {
        let (mut setter, descriptor) = readiness().unwrap();
        setter.readable();
        setter.not_writable(&descriptor);
        let number = setter.number();
        let Released::Open(end) = setter.release(&descriptor).unwrap() else { panic!("ended") };
        assert_eq!(number, Some(end.as_raw_fd()));
        assert_eq!(seen(&descriptor), (false, true));
        let bytes = [7; 100_000];
        assert_eq!(send(&descriptor, &bytes, SendFlags::DONTWAIT), Ok(bytes.len()));
        let mut room = vec![0; bytes.len()];
        assert_eq!(rustix::io::read(&end, &mut room), Ok(bytes.len()));
        assert!(room == bytes);
        send(&end, b"answer", SendFlags::DONTWAIT).unwrap();
        assert_eq!(recv(&descriptor, &mut room[..], RecvFlags::DONTWAIT), Ok((6, 6)));
    }

    #[test]
    fn ended_pair_is_released_as_such() {
        for (ended, is_closed) in
            [(Ended::Peer, false), (Ended::Both, false), (Ended::Failed, true)]
        {
            let (mut setter, descriptor) = readiness().unwrap();
            setter.end(ended, &descriptor);
            let released = setter.release(&descriptor).unwrap();
            assert_eq!(matches!(released, Released::Failed), is_closed);
            assert_eq!(matches!(released, Released::Ended(_)), !is_closed);
        }
    }

    #[test]
    fn end_and_error_are_one_edge() {
        for _ in 0..500 {
            let (mut setter, descriptor) = readiness().unwrap();
            let waits = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let (data, edges) = (epoll::EventData::new_u64(0), epoll::EventFlags::ET);
            epoll::add(&waits, &descriptor, data, edges).unwrap();
            let count = |at_most: Option<&Timespec>| {
                let mut events = Vec::with_capacity(1);
                epoll::wait(&waits, rustix::buffer::spare_capacity(&mut events), at_most).unwrap()
            };
            std::thread::scope(|scope| {
                let first = scope.spawn(|| count(None));
                std::thread::yield_now();
                setter.end(Ended::Failed, &descriptor);
                assert_eq!(first.join().unwrap(), 1);
            });
            assert_eq!(count(Some(&Timespec::default())), 0, "it was told twice");
        }
    }

    #[test]
    fn error_is_told_despite_copies() {
        let (mut setter, descriptor) = readiness().unwrap();
        let copy = setter.socket.as_ref().unwrap().try_clone().unwrap();
        setter.end(Ended::Failed, &descriptor);
        let asked = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let events = || {
            let mut polled = [PollFd::new(&descriptor, asked)];
            poll(&mut polled, Some(&Timespec::default())).unwrap();
            polled[0].revents()
        };
        assert_eq!(events(), asked - PollFlags::ERR);
        drop(copy);
        assert_eq!(events(), asked);
    }

    #[test]
    fn strays_neither_block_nor_silence() {
        let (mut setter, descriptor) = readiness().unwrap();
        rustix::fs::fcntl_setfl(&descriptor, rustix::fs::OFlags::empty()).unwrap();
        let (says, said) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for _ in 0..10 {
                setter.readable();
                rustix::io::read(&descriptor, &mut [0; 8]).unwrap();
                setter.not_readable(&descriptor);
                setter.readable();
                assert_eq!(seen(&descriptor), (true, true));
                setter.not_readable(&descriptor);
                assert_eq!(seen(&descriptor), (false, true));
                // As many bytes as there is room for.
                while send(&descriptor, &[0; 100], SendFlags::DONTWAIT).is_ok() {}
                setter.not_writable(&descriptor);
                assert_eq!(seen(&descriptor), (false, false));
                setter.writable();
                setter.not_writable(&descriptor);
                setter.writable();
                assert_eq!(seen(&descriptor), (false, true));
            }
            says.send(()).unwrap();
        });
        said.recv_timeout(std::time::Duration::from_secs(60)).expect("no call waits");
    }

    #[test]
    fn readable_and_writable_are_separate() {
        let (mut setter, descriptor) = readiness().unwrap();
        assert_eq!(seen(&descriptor), (false, true));
        for _ in 0..1000 {
            for _ in 0..2 {
                setter.not_writable(&descriptor);
                assert_eq!(seen(&descriptor), (false, false));
            }
            for _ in 0..2 {
                setter.readable();
                assert_eq!(seen(&descriptor), (true, false));
            }
            for _ in 0..2 {
                setter.writable();
                assert_eq!(seen(&descriptor), (true, true));
            }
            for _ in 0..2 {
                setter.not_readable(&descriptor);
                assert_eq!(seen(&descriptor), (false, true));
            }
        }
    }
}
