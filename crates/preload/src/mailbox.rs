//! Queue of connections that one process of a program passes on to another. All processes share it.

use std::os::fd::{AsFd, BorrowedFd};

use forebay_stack::tcp::PassedConnection;
use forebay_sys::hidden::Hidden;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

/// Longest message.
const MESSAGE_BYTES_MAX: usize = 1 << 17;

/// A pair of sockets: each message is received by one process.
pub(crate) struct Mailbox {
    near: Hidden,
    far: Hidden,
}

impl Mailbox {
    /// Mailbox of this process, and of all that it forks.
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok(Self { near: Hidden::new(near)?, far: Hidden::new(far)? })
    }

    /// Mailbox by its [ends](Self::ends).
    pub(crate) fn of_ends(near: Hidden, far: Hidden) -> Self {
        Self { near, far }
    }

    /// Ends, which another program of this process may have.
    pub(crate) fn ends(&self) -> [BorrowedFd<'_>; 2] {
        [self.near.as_fd(), self.far.as_fd()]
    }

    /// Puts in a connection for another process, and the number of attempts so far to go on with it.
    /// False if there is no room.
    pub(crate) fn put(&self, passed: &PassedConnection, attempts: u16) -> bool {
        let message = [&attempts.to_ne_bytes()[..], &passed.to_bytes()].concat();
        send(&self.near, &message, SendFlags::NOSIGNAL).is_ok()
    }

    /// Takes a connection, and the number of attempts to go on with it.
    pub(crate) fn take(&self) -> Option<(PassedConnection, u16)> {
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        let (len, _) = recv(&self.far, &mut message[..], RecvFlags::empty()).ok()?;
        let (attempts, passed) = message.get(..len)?.split_first_chunk()?;
        Some((PassedConnection::of_bytes(passed)?, u16::from_ne_bytes(*attempts)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_8_full_mailbox_refuses_connections() {
        let mailbox = Mailbox::new().unwrap();
        let mut said = [0; 100];
        said[46] = 8; // the path's MTU
        let passed = PassedConnection::of_bytes(&said).unwrap();
        let count = (0..10_000).take_while(|attempts| mailbox.put(&passed, *attempts)).count();
        assert!((1..10_000).contains(&count), "{count}");
        for attempts in 0..count {
            assert_eq!(mailbox.take(), Some((passed.clone(), u16::try_from(attempts).unwrap())));
        }
        assert!(mailbox.take().is_none() && mailbox.put(&passed, 0));
    }
}
