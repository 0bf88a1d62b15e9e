//! Streams and listeners, with the calls of `tokio::net::TcpStream` and `tokio::net::TcpListener`.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs as BlockingToSocketAddrs};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use forebay::net::Net;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{ToSocketAddrs, lookup_host};

/// TCP listener of a [`Net`], registered with a tokio runtime.
#[derive(Debug)]
pub struct TcpListener(AsyncFd<forebay::net::TcpListener>);

impl TcpListener {
    /// Listens on an address. Must be called on a runtime whose I/O driver is enabled. A name is looked up on the calling
    /// thread.
    ///
    /// # Errors
    /// As [`forebay::net::TcpListener::bind`].
    pub fn bind(net: &Net, local: impl BlockingToSocketAddrs) -> io::Result<Self> {
        Self::new(forebay::net::TcpListener::bind(net, local)?)
    }

    /// Registers a listener with the runtime, and makes it nonblocking.
    ///
    /// # Errors
    /// If the process has no file descriptors left, or the runtime cannot poll the listener's.
    ///
    /// # Panics
    /// If called outside a runtime whose I/O driver is enabled.
    #[expect(deprecated, reason = "a listener's descriptor is one and the same while it lives")]
    pub fn new(listener: forebay::net::TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true);
        listener.descriptor()?;
        AsyncFd::new(listener).map(Self)
    }

    /// Underlying listener.
    #[must_use]
    pub fn inner(&self) -> &forebay::net::TcpListener {
        self.0.get_ref()
    }

    /// Local address.
    ///
    /// # Errors
    /// Never fails; returns a `Result` as tokio's does.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.inner().local_addr())
    }

    /// Takes a connection, and its peer's address.
    ///
    /// # Errors
    /// As [`forebay::net::TcpListener::accept_with_descriptor`]: if no descriptors are left, the connection waits for the
    /// next call.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let accept = forebay::net::TcpListener::accept_with_descriptor;
        let (stream, peer) = self.0.async_io(Interest::READABLE, accept).await?;
        Ok((TcpStream::new(stream)?, peer))
    }

    /// Polls for a connection.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            let accept = |listener: &AsyncFd<forebay::net::TcpListener>| {
                listener.get_ref().accept_with_descriptor()
            };
            if let Ok(accepted) = guard.try_io(accept) {
                return Poll::Ready(
                    accepted.and_then(|(stream, peer)| Ok((TcpStream::new(stream)?, peer))),
                );
            }
        }
    }
}

/// TCP connection of a [`Net`], registered with a tokio runtime.
#[derive(Debug)]
pub struct TcpStream(AsyncFd<forebay::net::TcpStream>);

impl TcpStream {
    /// Opens a connection to the first address that answers. A name is looked up on a thread for blocking calls.
    ///
    /// # Errors
    /// As [`forebay::net::TcpStream::connect`].
    pub async fn connect(net: &Net, to: impl ToSocketAddrs) -> io::Result<Self> {
        let mut failed = io::Error::new(io::ErrorKind::InvalidInput, "no address to connect to");
        for to in lookup_host(to).await? {
            match Self::connect_to(net, to).await {
                Ok(stream) => return Ok(stream),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    async fn connect_to(net: &Net, to: SocketAddr) -> io::Result<Self> {
        let stream = Self::new(forebay::net::TcpStream::begin_connect_with_descriptor(net, to)?)?;
        stream.0.writable().await?.retain_ready();
        match stream.inner().take_error()? {
            Some(error) => Err(error),
            None => Ok(stream),
        }
    }

    /// Registers a connection with the runtime, and makes it nonblocking.
    ///
    /// # Errors
    /// If the process has no file descriptors left, or the runtime cannot poll the connection's.
    ///
    /// # Panics
    /// If called outside a runtime whose I/O driver is enabled.
    #[expect(deprecated, reason = "a connection's descriptor is one and the same while it lives")]
    pub fn new(stream: forebay::net::TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true);
        stream.descriptor()?;
        AsyncFd::new(stream).map(Self)
    }

    /// Underlying connection, for its options.
    #[must_use]
    pub fn inner(&self) -> &forebay::net::TcpStream {
        self.0.get_ref()
    }

    /// Local address.
    ///
    /// # Errors
    /// Never fails; returns a `Result` as tokio's does.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.inner().local_addr())
    }

    /// Address of the peer.
    ///
    /// # Errors
    /// Never fails; returns a `Result` as tokio's does.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.inner().peer_addr())
    }

    /// Sends small segments at once, or not.
    ///
    /// # Errors
    /// As [`forebay::net::TcpStream::set_nodelay`].
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.inner().set_nodelay(nodelay)
    }

    /// Copies received bytes, and leaves them there.
    ///
    /// # Errors
    /// As [`forebay::net::TcpStream::peek`].
    pub async fn peek(&self, room: &mut [u8]) -> io::Result<usize> {
        self.0.async_io(Interest::READABLE, |stream| stream.peek(room)).await
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            let room = buffer.initialize_unfilled();
            if let Ok(read) = guard.try_io(|stream| stream.get_ref().read(room)) {
                return Poll::Ready(read.map(|len| buffer.advance(len)));
            }
        }
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_write_ready(cx))?;
            if let Ok(written) = guard.try_io(|stream| stream.get_ref().write(bytes)) {
                return Poll::Ready(written);
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // As tokio's: closing what has ended already is not an error.
        Poll::Ready(match self.inner().shutdown(Shutdown::Write) {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            result => result,
        })
    }
}
