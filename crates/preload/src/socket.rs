//! A socket of the program that the library has taken over, of any kind.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::abi;
use crate::critical::outside;
use crate::listener::Listener;
use crate::stream::Stream;
use crate::table;
use crate::udp::Udp;
use crate::udp_options::timeout;

/// Socket of ours, shared by the descriptors that were duplicated from each other.
pub(crate) enum Socket {
    Udp(Udp),
    Listener(Listener),
    Stream(Stream),
}

/// Outcome of a call by which the library may take over a socket of the kernel.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Takeover {
    /// The socket is one of ours.
    Ours,
    /// The socket stays the kernel's.
    Kernels,
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

    /// Socket of the kernel that is bound to the address, if there is one.
    pub(crate) fn holder(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Udp(udp) => udp.reserved(),
            Self::Listener(listener) => Some(listener.kernel()),
            Self::Stream(stream) => Some(stream.holder()),
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
            Self::Listener(listener) if listener.has_ended() => Ok(0),
            Self::Listener(_) => Err(Errno::INVAL),
            Self::Stream(stream) => stream.unread_len(),
        }
    }

    /// True for a copy inherited by fork: threads of the parent may have held its locks.
    pub(crate) fn is_of_parent(&self) -> bool {
        match self {
            Self::Udp(udp) => udp.is_of_parent(),
            Self::Listener(listener) => listener.is_of_parent(),
            Self::Stream(stream) => stream.is_of_parent(),
        }
    }

    /// Ends a reference from the table.
    pub(crate) fn let_go(self: Arc<Self>) {
        if self.is_of_parent() {
            // A number holds a reference.
            let has_others = Arc::strong_count(&self) > 1 && !table::numbers_of(&self).is_empty();
            match &*self {
                _ if has_others => {}
                Self::Udp(udp) => udp.close_copy(),
                Self::Listener(listener) => listener.close_copy(),
                Self::Stream(_) => {}
            }
            // Its locks may be held by threads that this process has not.
            std::mem::forget(self);
        }
    }
}

/// Pause between two looks for more bytes.
const MORE_LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Waits of one call. Its time-out is that of all of them together, as of the kernel's calls.
#[derive(Default)]
pub(crate) struct CallWait {
    /// Time at which the first wait began.
    began: Option<Instant>,
}

impl CallWait {
    /// Waits until a descriptor is readable, as a call of the kernel's sockets: interrupted, restarted, or ended by
    /// the descriptor's time-out. A call that has received a part is never restarted, nor is one with a time-out.
    ///
    /// # Errors
    /// `EAGAIN` after the time-out; `EINTR`.
    pub(crate) fn readable(
        &mut self,
        readiness: BorrowedFd<'_>,
        has_part: bool,
    ) -> Result<(), Errno> {
        let is_later = has_part || self.began.is_some();
        let timeout = if is_later { timeout(readiness, libc::SO_RCVTIMEO) } else { None };
        if has_part || timeout.is_some() {
            return self.polled(readiness, PollFlags::IN, timeout);
        }
        self.began.get_or_insert_with(Instant::now);
        outside(|handled| match handled.end_call() {
            true => Err(Errno::INTR),
            false => match recv(readiness, &mut [0; 1], RecvFlags::PEEK) {
                Ok(_) | Err(Errno::CONNRESET) => Ok(()),
                Err(error) => Err(error),
            },
        })
    }

    /// Waits until a descriptor is writable. After a signal whose handler has `SA_RESTART` it waits on, if the call
    /// `may_restart` and has no time-out, as the kernel's.
    ///
    /// # Errors
    /// `EAGAIN` after the time-out; `EINTR`.
    pub(crate) fn writable(
        &mut self,
        readiness: BorrowedFd<'_>,
        timeout: Option<Duration>,
        may_restart: bool,
    ) -> Result<(), Errno> {
        loop {
            match self.polled(readiness, PollFlags::OUT, timeout) {
                Err(Errno::INTR) if may_restart && timeout.is_none() && abi::handlers_restart() => {
                }
                result => return result,
            }
        }
    }

    /// Waits a moment for more bytes. False if the call is to return those that there are: at the end of the stream, after a
    /// signal and after the time-out.
    pub(crate) fn waits_for_more(&mut self, readiness: BorrowedFd<'_>) -> bool {
        let began = *self.began.get_or_insert_with(Instant::now);
        let is_over = |timeout| began.elapsed() >= timeout;
        if timeout(readiness, libc::SO_RCVTIMEO).is_some_and(is_over) {
            return false;
        }
        // Bytes are there, so that more are not told.
        let mut polled = [PollFd::new(&readiness, PollFlags::RDHUP)];
        outside(|handled| !handled.has_any() && poll(&mut polled, Some(&MORE_LOOK)) == Ok(0))
    }

    /// Polls a descriptor for the time that is left.
    fn polled(
        &mut self,
        readiness: BorrowedFd<'_>,
        asked: PollFlags,
        timeout: Option<Duration>,
    ) -> Result<(), Errno> {
        let began = *self.began.get_or_insert_with(Instant::now);
        let left = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = [PollFd::new(&readiness, asked)];
        outside(|handled| match handled.has_any() {
            true => Err(Errno::INTR),
            false => match poll(&mut polled, left.as_ref())? {
                0 => Err(Errno::AGAIN),
                _ => Ok(()),
            },
        })
    }
}
