//! Sockets of the server: ours, or the kernel's to compare with.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use forebay::net;

/// Listener of either kind.
pub(crate) enum RpcListener {
    Own(net::TcpListener),
    Kernel(std::net::TcpListener),
}

/// Connection of either kind.
pub(super) enum RpcStream {
    Own(net::TcpStream),
    Kernel(std::net::TcpStream),
}

impl RpcListener {
    /// Takes a connection, whose answers leave at once.
    pub(super) fn accept(&self) -> io::Result<RpcStream> {
        match self {
            Self::Own(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true).ok(); // else the connection is gone already
                Ok(RpcStream::Own(stream))
            }
            Self::Kernel(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                Ok(RpcStream::Kernel(stream))
            }
        }
    }

    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Own(listener) => {
                listener.set_nonblocking(true);
                Ok(())
            }
            Self::Kernel(listener) => listener.set_nonblocking(true),
        }
    }

    /// Descriptor to poll.
    pub(super) fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        match self {
            Self::Own(listener) => listener.descriptor(),
            Self::Kernel(listener) => Ok(listener.as_fd()),
        }
    }
}

impl RpcStream {
    /// Descriptor to poll.
    pub(super) fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        match self {
            Self::Own(stream) => stream.descriptor(),
            Self::Kernel(stream) => Ok(stream.as_fd()),
        }
    }

    pub(super) fn read(&self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Own(stream) => (&mut &*stream).read(room),
            Self::Kernel(stream) => (&mut &*stream).read(room),
        }
    }

    pub(super) fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Own(stream) => (&mut &*stream).write_all(bytes),
            Self::Kernel(stream) => (&mut &*stream).write_all(bytes),
        }
    }
}
