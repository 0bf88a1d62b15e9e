//! Errors of TCP as the kernel's numbers.

use forebay_stack::tcp::TcpError;

/// Error number of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    pub(crate) const AGAIN: Self = Self(libc::EAGAIN);
}

impl From<TcpError> for Errno {
    fn from(error: TcpError) -> Self {
        Self(match error {
            TcpError::WouldBlock => libc::EAGAIN,
            TcpError::InProgress => libc::EINPROGRESS,
            TcpError::Already => libc::EALREADY,
            TcpError::IsConnected => libc::EISCONN,
            TcpError::NotConnected => libc::ENOTCONN,
            TcpError::Refused => libc::ECONNREFUSED,
            TcpError::Reset => libc::ECONNRESET,
            TcpError::Aborted => libc::ECONNABORTED,
            TcpError::BrokenPipe => libc::EPIPE,
            TcpError::TimedOut => libc::ETIMEDOUT,
            TcpError::HostUnreachable => libc::EHOSTUNREACH,
            TcpError::NetworkUnreachable => libc::ENETUNREACH,
            TcpError::HostUnknown => libc::EHOSTDOWN,
            TcpError::HostIsolated => libc::ENONET,
            TcpError::NoSourceRoute => libc::EOPNOTSUPP,
            TcpError::BadHeader => libc::EPROTO,
            TcpError::NoProtocol => libc::ENOPROTOOPT,
            TcpError::Prohibited => libc::EACCES,
            TcpError::AddressInUse => libc::EADDRINUSE,
            TcpError::NoPort => libc::EADDRNOTAVAIL,
            TcpError::NoBuffers => libc::ENOBUFS,
            TcpError::Invalid => libc::EINVAL,
            TcpError::Unsupported => libc::EOPNOTSUPP,
            TcpError::NoSocket => libc::EBADF,
        })
    }
}
