//! Forebay's UDP sockets with the calls of tokio's.
//!
//! ```no_run
//! use forebay::net::{Net, NetConfig};
//! use forebay::{Config, Device, DeviceConfig, Via};
//! use forebay_tokio::UdpSocket;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = DeviceConfig::new("eth1", Via::AfXdp);
//! config.take = "udp:7".parse()?;
//! let device = Device::open(&config)?;
//! let (net, engine) = Net::over(&Config::live(), &NetConfig::default(), &mut [device])?;
//! std::thread::spawn(|| engine.run()); // CPUs of their own, not tokio's
//! let socket = UdpSocket::bind(&net, "0.0.0.0:7")?;
//! let mut buffer = vec![0; 65_536];
//! loop {
//!     let (len, from) = socket.recv_from(&mut buffer).await?;
//!     socket.send_to(&buffer[..len], from).await?;
//! }
//! # }
//! ```
//!
//! Every call may be cancelled: a datagram is taken out of the queue by the very poll that returns it.

#![forbid(unsafe_code)]

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::task::{Context, Poll, ready};

use forebay::net::message::{Received, Transmit};
use forebay::net::{Datagrams, Net};
use tokio::io::unix::AsyncFd;
pub use tokio::io::{Interest, ReadBuf, Ready};

/// A UDP socket of a [`Net`], on a tokio runtime.
///
/// Any number of tasks may use it by reference. Of tasks that use `poll_…` calls, the last one that polled for
/// reading is woken, and the last one for writing, as with tokio's own.
#[derive(Debug)]
pub struct UdpSocket(AsyncFd<forebay::net::UdpSocket>);

impl UdpSocket {
    /// Binds a socket. To be called on a runtime whose I/O is enabled.
    ///
    /// # Errors
    /// As [`forebay::net::SocketOptions::bind`].
    pub fn bind(net: &Net, local: impl ToSocketAddrs) -> io::Result<Self> {
        Self::new(net.bind(local)?)
    }

    /// Registers a bound socket with the runtime. From then on its own calls do not wait either.
    ///
    /// # Errors
    /// When the process has no descriptors left, or the runtime cannot wait for one.
    ///
    /// # Panics
    /// Outside of a runtime whose I/O is enabled.
    #[expect(deprecated, reason = "a socket's descriptor is one and the same while it lives")]
    pub fn new(socket: forebay::net::UdpSocket) -> io::Result<Self> {
        socket.set_nonblocking(true);
        socket.descriptor()?;
        AsyncFd::new(socket).map(Self)
    }

    /// The socket itself, for its options.
    #[must_use]
    pub fn inner(&self) -> &forebay::net::UdpSocket {
        self.0.get_ref()
    }

    /// The socket itself, no longer on the runtime.
    #[must_use]
    pub fn into_inner(self) -> forebay::net::UdpSocket {
        self.0.into_inner()
    }

    /// Local address.
    ///
    /// # Errors
    /// None: tokio's has some.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.inner().local_addr())
    }

    /// Address of the peer that it is connected to.
    ///
    /// # Errors
    /// `NotConnected`.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.inner().peer_addr().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Connects to a peer.
    ///
    /// # Errors
    /// As [`forebay::net::UdpSocket::connect`].
    #[expect(clippy::unused_async, reason = "tokio's is, too: it looks names up")]
    pub async fn connect(&self, to: impl ToSocketAddrs) -> io::Result<()> {
        self.inner().connect(to)
    }

    /// Waits until the socket may be ready for any of these.
    ///
    /// # Errors
    /// When the runtime is shutting down.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        let mut guard = self.0.ready(interest).await?;
        guard.retain_ready();
        Ok(guard.ready())
    }

    /// Waits until it may be readable.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub async fn readable(&self) -> io::Result<()> {
        self.ready(Interest::READABLE).await.map(drop)
    }

    /// Waits until it may be writable: packet memory has come home after a send would have blocked.
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

    /// Tries a call of the socket's; if it would block, the runtime waits for the next readiness.
    ///
    /// # Errors
    /// Those of `call`.
    pub fn try_io<R>(
        &self,
        interest: Interest,
        call: impl FnOnce(&forebay::net::UdpSocket) -> io::Result<R>,
    ) -> io::Result<R> {
        self.0.try_io(interest, call)
    }

    /// Calls until it does not block.
    ///
    /// # Errors
    /// Those of `call`.
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
    /// Receives one datagram into `buffer`; returns its length there and its sender.
    ///
    /// # Errors
    /// As [`forebay::net::UdpSocket::recv_from`].
    pub async fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.async_io(Interest::READABLE, |socket| socket.recv_from(buffer)).await
    }

    /// The same of a connected peer.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub async fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.recv_from(buffer).await.map(|(len, _)| len)
    }

    /// Reads the next datagram without taking it.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub async fn peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.async_io(Interest::READABLE, |socket| socket.peek_from(buffer)).await
    }

    /// Receives one datagram, with all that its headers say.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub async fn recv_msg(&self, buffer: &mut [u8]) -> io::Result<Received> {
        self.async_io(Interest::READABLE, |socket| socket.recv_msg(buffer)).await
    }

    /// Receives between 1 and `max` datagrams in place.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub async fn recv_batch(&self, batch: &mut Datagrams, max: usize) -> io::Result<usize> {
        self.async_io(Interest::READABLE, |socket| socket.recv_batch(batch, max)).await
    }

    /// Receives one datagram if there is one.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from); `WouldBlock`.
    pub fn try_recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.try_io(Interest::READABLE, |socket| socket.recv_from(buffer))
    }

    /// The same of a connected peer.
    ///
    /// # Errors
    /// As [`try_recv_from`](Self::try_recv_from).
    pub fn try_recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.try_recv_from(buffer).map(|(len, _)| len)
    }

    /// Reads the next datagram, if there is one, without taking it.
    ///
    /// # Errors
    /// As [`try_recv_from`](Self::try_recv_from).
    pub fn try_peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.try_io(Interest::READABLE, |socket| socket.peek_from(buffer))
    }

    /// Polls for a datagram.
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

    /// The same of a connected peer.
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

    /// Polls for a batch of datagrams in place.
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
    /// Sends a datagram.
    ///
    /// # Errors
    /// As [`forebay::net::UdpSocket::send_to`].
    pub async fn send_to(&self, payload: &[u8], to: impl ToSocketAddrs) -> io::Result<usize> {
        let to = first(to)?;
        self.async_io(Interest::WRITABLE, |socket| socket.send_to(payload, to)).await
    }

    /// Sends a datagram to the connected peer.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub async fn send(&self, payload: &[u8]) -> io::Result<usize> {
        self.async_io(Interest::WRITABLE, |socket| socket.send(payload)).await
    }

    /// Sends a datagram, or several of one length, with control data.
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

    /// Polls a datagram out.
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

    /// Polls a datagram out to the connected peer.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn poll_send(&self, cx: &mut Context<'_>, payload: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_io(cx, Interest::WRITABLE, |socket| socket.send(payload))
    }
}

fn first(of: impl ToSocketAddrs) -> io::Result<SocketAddr> {
    let none = || io::Error::new(io::ErrorKind::InvalidInput, "no address to send to");
    of.to_socket_addrs()?.next().ok_or_else(none)
}
