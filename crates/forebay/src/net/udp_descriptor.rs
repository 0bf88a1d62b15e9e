//! Descriptors of UDP sockets: the one that is polled, and the kernel's socket at the same port.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use forebay_stack::socket::queue::SocketQueue;
use forebay_sys::readiness::{Ended, ReadinessDescriptor, ReadinessSetter};

use super::udp::UdpSocket;

impl UdpSocket {
    /// Descriptor of [`AsFd`], or the reason why there is none.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        self.0.descriptor()
    }

    /// The [descriptor](Self::descriptor), which is that of `make` if there is none so far. A datagram that has come before
    /// makes it readable only then: whoever is to learn of it may be named to the descriptor before.
    ///
    /// # Errors
    /// Errors of `make`.
    pub fn descriptor_from(
        &self,
        make: impl FnOnce() -> io::Result<(ReadinessSetter, ReadinessDescriptor)>,
    ) -> io::Result<BorrowedFd<'_>> {
        self.0.descriptor_from(make)
    }

    /// Notifies pollers of the [descriptor](Self::descriptor) for ever that sides of the socket have ended (`shutdown`).
    ///
    /// # Errors
    /// As [`descriptor`](Self::descriptor).
    pub fn notify_ended(&self, ended: Ended) -> io::Result<()> {
        self.0.notify_ended(ended)
    }

    /// Queue of received datagrams, by which whoever learns of a [refusal](SocketQueue::refuse) tells the socket.
    #[must_use]
    pub fn queue(&self) -> &Arc<SocketQueue> {
        &self.0.queue
    }

    /// Socket of the kernel that reserves the port, if there is one. The kernel tells it of ICMP errors, which do not
    /// come to a port that is taken.
    #[must_use]
    pub fn reserved(&self) -> Option<BorrowedFd<'_>> {
        self.0.reserved.as_ref().map(AsFd::as_fd)
    }
}

impl AsFd for UdpSocket {
    /// Descriptor for `poll(2)`, `epoll` and tokio's `AsyncFd`: readable while a datagram is
    /// queued, writable unless a send would block. Created by the first call. Other operations on
    /// the descriptor have no meaning.
    ///
    /// # Panics
    /// If the process has no descriptors left; [`descriptor`](Self::descriptor) returns an error
    /// instead.
    #[expect(clippy::expect_used, reason = "the trait has no errors")]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor().expect("no descriptors are left for a socket")
    }
}

impl AsRawFd for UdpSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
