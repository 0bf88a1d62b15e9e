//! A socket of the program that the library has taken over, of any kind.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::abi;
use crate::listener::Listener;
use crate::stream::Stream;
use crate::table;
use crate::udp::Udp;

/// Socket of ours, shared by the descriptors that were duplicated from each other.
pub(crate) enum Socket {
    Udp(Udp),
    Listener(Listener),
    Stream(Stream),
}

impl Socket {
    /// The kernel's socket, which stores the options.
    pub(crate) fn kernel(&self) -> Result<BorrowedFd<'_>, Errno> {
        match self {
            Self::Udp(udp) => Ok(udp.kernel()),
            Self::Listener(listener) => Ok(listener.kernel()),
            Self::Stream(stream) => stream.kernel(),
        }
    }

    pub(crate) fn local(&self) -> SocketAddr {
        match self {
            Self::Udp(udp) => udp.local(),
            Self::Listener(listener) => listener.local(),
            Self::Stream(stream) => stream.local(),
        }
    }

    pub(crate) fn peer(&self) -> Result<SocketAddr, Errno> {
        match self {
            Self::Udp(udp) => udp.peer(),
            Self::Listener(_) => Err(Errno::NOTCONN),
            Self::Stream(stream) => stream.peer(),
        }
    }

    /// Number of bytes that can be read, or of the next datagram (`FIONREAD`).
    pub(crate) fn readable_len(&self) -> Result<usize, Errno> {
        match self {
            Self::Udp(udp) => udp.next_len(),
            Self::Listener(_) => Err(Errno::INVAL),
            Self::Stream(stream) => stream.unread_len(),
        }
    }

    /// Ends a reference from the table.
    pub(crate) fn let_go(self: Arc<Self>) {
        let is_of_parent = match &*self {
            Self::Udp(udp) => udp.is_of_parent(),
            Self::Listener(listener) => listener.is_of_parent(),
            Self::Stream(stream) => stream.is_of_parent(),
        };
        if is_of_parent {
            if let (Self::Listener(listener), true) = (&*self, table::numbers_of(&self).is_empty())
            {
                listener.close_copy();
            }
            // Its locks may be held by threads that this process has not.
            std::mem::forget(self);
        }
    }
}

/// Waits until a descriptor is writable. After a signal whose handler has `SA_RESTART` it waits on, if the call
/// `may_restart` and has no time-out, as the kernel's.
///
/// # Errors
/// `EAGAIN` after the time-out; `EINTR`.
pub(crate) fn wait_writable(
    readiness: BorrowedFd<'_>,
    timeout: Option<Duration>,
    may_restart: bool,
) -> Result<(), Errno> {
    let timeout = timeout.and_then(|wait| Timespec::try_from(wait).ok());
    loop {
        match poll(&mut [PollFd::new(&readiness, PollFlags::OUT)], timeout.as_ref()) {
            Err(Errno::INTR) if may_restart && timeout.is_none() && abi::handlers_restart() => {}
            Ok(0) => return Err(Errno::AGAIN),
            result => return result.map(drop),
        }
    }
}
