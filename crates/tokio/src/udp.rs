//! Datagrams, with the calls of `tokio::net::UdpSocket`.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as BlockingToSocketAddrs};
use std::task::{Context, Poll, ready};

use forebay::net::message::{Received, Transmit};
use forebay::net::{Datagrams, Net};
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, ReadBuf, Ready};
use tokio::net::{ToSocketAddrs, lookup_host};

/// UDP socket of a [`Net`], registered with a tokio runtime.
///
/// Any number of tasks may share it by reference. Of the tasks that use `poll_…` calls, only the
/// last to poll for reading and the last to poll for writing are woken, as with tokio's socket.
#[derive(Debug)]
pub struct UdpSocket(AsyncFd<forebay::net::UdpSocket>);

impl UdpSocket {
    /// Binds a socket. Must be called on a runtime whose I/O driver is enabled. A name is looked up on the calling thread.
    ///
    /// # Errors
    /// As [`forebay::net::SocketOptions::bind`].
    pub fn bind(net: &Net, local: impl BlockingToSocketAddrs) -> io::Result<Self> {
        Self::new(net.bind(local)?)
    }

    /// Registers a bound socket with the runtime, and makes the socket nonblocking.
    ///
    /// # Errors
    /// If the process has no file descriptors left, or the runtime cannot poll the socket's.
    ///
    /// # Panics
    /// If called outside a runtime whose I/O driver is enabled.
    #[expect(deprecated, reason = "a socket's descriptor is one and the same while it lives")]
    pub fn new(socket: forebay::net::UdpSocket) -> io::Result<Self> {
        socket.set_nonblocking(true);
        socket.descriptor()?;
        AsyncFd::new(socket).map(Self)
    }

    /// Underlying socket, for its options.
    #[must_use]
    pub fn inner(&self) -> &forebay::net::UdpSocket {
        self.0.get_ref()
    }

    /// Deregisters the socket from the runtime, and returns it.
    #[must_use]
    pub fn into_inner(self) -> forebay::net::UdpSocket {
        self.0.into_inner()
    }

    /// Local address.
    ///
    /// # Errors
    /// Never fails; returns a `Result` as tokio's does.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.inner().local_addr())
    }

    /// Address of the peer that the socket is connected to.
    ///
    /// # Errors
    /// `NotConnected`.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.inner().peer_addr().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Connects to a peer. A name is looked up on a thread for blocking calls.
    ///
    /// # Errors
    /// As [`forebay::net::UdpSocket::connect`].
    pub async fn connect(&self, to: impl ToSocketAddrs) -> io::Result<()> {
        let mut failed = no_address();
        for to in lookup_host(to).await? {
            match self.inner().connect(to) {
                Ok(()) => return Ok(()),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// Waits until the socket may be ready for any of the operations in `interest`.
    ///
    /// # Errors
    /// If the runtime is shutting down.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        let mut guard = self.0.ready(interest).await?;
        guard.retain_ready();
        Ok(guard.ready())
    }

    /// Waits until the socket may be readable.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub async fn readable(&self) -> io::Result<()> {
        self.ready(Interest::READABLE).await.map(drop)
    }

    /// Waits until the socket may be writable. After a send that would have blocked, that is when
    /// packet memory has been returned.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub async fn writable(&self) -> io::Result<()> {
        self.ready(Interest::WRITABLE).await.map(drop)
    }

    /// Polls for readability.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn poll_recv_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut guard = ready!(self.0.poll_read_ready(cx))?;
        guard.retain_ready();
        Poll::Ready(Ok(()))
    }

    /// Polls for writability.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut guard = ready!(self.0.poll_write_ready(cx))?;
        guard.retain_ready();
        Poll::Ready(Ok(()))
    }

    /// Tries an operation on the socket. If it would block, clears the readiness, so that the next
    /// wait ends with new readiness only.
    ///
    /// # Errors
    /// Errors of `call`.
    pub fn try_io<R>(
        &self,
        interest: Interest,
        call: impl FnOnce(&forebay::net::UdpSocket) -> io::Result<R>,
    ) -> io::Result<R> {
        self.0.try_io(interest, call)
    }

    /// Repeats an operation on the socket, waiting for readiness in between, until it does not
    /// block.
    ///
    /// # Errors
    /// Errors of `call`.
    pub async fn async_io<R>(
        &self,
        interest: Interest,
        call: impl FnMut(&forebay::net::UdpSocket) -> io::Result<R>,
    ) -> io::Result<R> {
        self.0.async_io(interest, call).await
    }

    fn poll_io<R>(
        &self,
        cx: &mut Context<'_>,
        interest: Interest,
        mut call: impl FnMut(&forebay::net::UdpSocket) -> io::Result<R>,
    ) -> Poll<io::Result<R>> {
        loop {
            let mut guard = ready!(match interest.is_writable() {
                true => self.0.poll_write_ready(cx),
                false => self.0.poll_read_ready(cx),
            })?;
            if let Ok(done) = guard.try_io(|socket| call(socket.get_ref())) {
                return Poll::Ready(done);
            }
        }
    }
}

/// Receiving.
impl UdpSocket {
    /// Receives one datagram into `buffer`; returns its length and its sender.
    ///
    /// # Errors
    /// As [`forebay::net::UdpSocket::recv_from`].
    pub async fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.async_io(Interest::READABLE, |socket| socket.recv_from(buffer)).await
    }

    /// Receives one datagram from the connected peer.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub async fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.recv_from(buffer).await.map(|(len, _)| len)
    }

    /// Reads the next datagram without dequeuing it (`MSG_PEEK`).
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub async fn peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.async_io(Interest::READABLE, |socket| socket.peek_from(buffer)).await
    }

    /// Receives one datagram, with the fields of its headers (`recvmsg`).
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub async fn recv_msg(&self, buffer: &mut [u8]) -> io::Result<Received> {
        self.async_io(Interest::READABLE, |socket| socket.recv_msg(buffer)).await
    }

    /// Receives between 1 and `max` datagrams, without copying them.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub async fn recv_batch(&self, batch: &mut Datagrams, max: usize) -> io::Result<usize> {
        self.async_io(Interest::READABLE, |socket| socket.recv_batch(batch, max)).await
    }

    /// Receives one datagram if one is queued.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from); `WouldBlock`.
    pub fn try_recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.try_io(Interest::READABLE, |socket| socket.recv_from(buffer))
    }

    /// Receives one datagram from the connected peer if one is queued.
    ///
    /// # Errors
    /// As [`try_recv_from`](Self::try_recv_from).
    pub fn try_recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.try_recv_from(buffer).map(|(len, _)| len)
    }

    /// Reads the next datagram without dequeuing it, if one is queued.
    ///
    /// # Errors
    /// As [`try_recv_from`](Self::try_recv_from).
    pub fn try_peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.try_io(Interest::READABLE, |socket| socket.peek_from(buffer))
    }

    /// Polls to receive a datagram.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn poll_recv_from(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<SocketAddr>> {
        let room = buffer.initialize_unfilled();
        let (len, from) =
            ready!(self.poll_io(cx, Interest::READABLE, |socket| socket.recv_from(room)))?;
        buffer.advance(len);
        Poll::Ready(Ok(from))
    }

    /// Polls to receive a datagram from the connected peer.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_recv_from(cx, buffer).map_ok(drop)
    }

    /// Polls to receive a batch of datagrams, without copying them.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn poll_recv_batch(
        &self,
        cx: &mut Context<'_>,
        batch: &mut Datagrams,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        self.poll_io(cx, Interest::READABLE, |socket| socket.recv_batch(batch, max))
    }
}

/// Sending.
impl UdpSocket {
    /// Sends a datagram. A name is looked up on a thread for blocking calls.
    ///
    /// # Errors
    /// As [`forebay::net::UdpSocket::send_to`].
    pub async fn send_to(&self, payload: &[u8], to: impl ToSocketAddrs) -> io::Result<usize> {
        let to = lookup_host(to).await?.next().ok_or_else(no_address)?;
        self.async_io(Interest::WRITABLE, |socket| socket.send_to(payload, to)).await
    }

    /// Sends a datagram to the connected peer.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub async fn send(&self, payload: &[u8]) -> io::Result<usize> {
        self.async_io(Interest::WRITABLE, |socket| socket.send(payload)).await
    }

    /// Sends a datagram, or several of equal length, with control data (`sendmsg`).
    ///
    /// # Errors
    /// As [`forebay::net::UdpSocket::send_msg`].
    pub async fn send_msg(&self, message: &Transmit<'_>) -> io::Result<usize> {
        self.async_io(Interest::WRITABLE, |socket| socket.send_msg(message)).await
    }

    /// Sends a datagram if that does not block.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); `WouldBlock`.
    pub fn try_send_to(&self, payload: &[u8], to: SocketAddr) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, |socket| socket.send_to(payload, to))
    }

    /// Sends a datagram to the connected peer if that does not block.
    ///
    /// # Errors
    /// As [`try_send_to`](Self::try_send_to).
    pub fn try_send(&self, payload: &[u8]) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, |socket| socket.send(payload))
    }

    /// Sends a message if that does not block.
    ///
    /// # Errors
    /// As [`send_msg`](Self::send_msg); `WouldBlock`.
    pub fn try_send_msg(&self, message: &Transmit<'_>) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, |socket| socket.send_msg(message))
    }

    /// Polls to send a datagram.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn poll_send_to(
        &self,
        cx: &mut Context<'_>,
        payload: &[u8],
        to: SocketAddr,
    ) -> Poll<io::Result<usize>> {
        self.poll_io(cx, Interest::WRITABLE, |socket| socket.send_to(payload, to))
    }

    /// Polls to send a datagram to the connected peer.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn poll_send(&self, cx: &mut Context<'_>, payload: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_io(cx, Interest::WRITABLE, |socket| socket.send(payload))
    }
}

fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "no address to send to")
}
