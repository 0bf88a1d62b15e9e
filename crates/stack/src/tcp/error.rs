//! Errors of sockets, as the kernel's error numbers name them.

use std::{fmt, io};

/// Error of a call or of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TcpError {
    /// Nothing to read or no room to write now (`EAGAIN`).
    WouldBlock,
    /// The connection is being opened (`EINPROGRESS`).
    InProgress,
    /// The connection is being opened already (`EALREADY`).
    Already,
    /// The socket is connected already (`EISCONN`).
    IsConnected,
    /// The socket is not connected (`ENOTCONN`).
    NotConnected,
    /// The peer answered the SYN by a reset (`ECONNREFUSED`).
    Refused,
    /// The peer reset the connection (`ECONNRESET`).
    Reset,
    /// The connection was given up before it was open (`ECONNABORTED`).
    Aborted,
    /// The connection was ended before (`EPIPE`).
    BrokenPipe,
    /// The peer did not answer in time (`ETIMEDOUT`).
    TimedOut,
    /// A router says that the host cannot be reached (`EHOSTUNREACH`).
    HostUnreachable,
    /// A router says that the network cannot be reached (`ENETUNREACH`).
    NetworkUnreachable,
    /// A router does not know the host (`EHOSTDOWN`).
    HostUnknown,
    /// A router has isolated this host (`ENONET`).
    HostIsolated,
    /// A router refuses the route that the packet asks for (`EOPNOTSUPP`).
    NoSourceRoute,
    /// A router cannot read a header (`EPROTO`).
    BadHeader,
    /// The host does not speak TCP (`ENOPROTOOPT`).
    NoProtocol,
    /// A firewall on the way does not permit it (`EACCES`).
    Prohibited,
    /// Another socket has the address (`EADDRINUSE`).
    AddressInUse,
    /// No local port is free (`EADDRNOTAVAIL`).
    NoPort,
    /// A limit on sockets or memory is reached (`ENOBUFS`).
    NoBuffers,
    /// The call does not fit the socket's state (`EINVAL`).
    Invalid,
    /// The settings do not allow this call (`EOPNOTSUPP`).
    Unsupported,
    /// The socket does not exist (any more) (`EBADF`).
    NoSocket,
}

impl fmt::Display for TcpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WouldBlock => "no data or no room now: wait until the socket is ready",
            Self::InProgress => "the connection is being opened: wait until it is writable",
            Self::Already => "the connection is being opened already: wait until it is writable",
            Self::IsConnected => "the socket is connected already: use another one",
            Self::NotConnected => "the socket is not connected: connect it first",
            Self::Refused => "the peer refused the connection: check that a program listens there",
            Self::Reset => "the peer reset the connection: connect again",
            Self::Aborted => "the connection was given up before it was open: connect again",
            Self::BrokenPipe => "the connection was ended before: connect again",
            Self::TimedOut => "the peer did not answer in time: check that it can be reached",
            Self::HostUnreachable => "a router cannot reach the peer's host: check the address",
            Self::NetworkUnreachable => "a router cannot reach the peer's network: check routes",
            Self::HostUnknown => "a router does not know the peer's host: check the address",
            Self::HostIsolated => "a router has isolated this host: ask its administrator",
            Self::NoSourceRoute => "a router refuses the source route: send without one",
            Self::BadHeader => "a router cannot read a header: check devices on the way",
            Self::NoProtocol => "the peer's host does not speak TCP: check the address",
            Self::Prohibited => "a firewall on the way does not permit it: ask its administrator",
            Self::AddressInUse => "another socket has this address and port: choose another port",
            Self::NoPort => "all local ports towards this peer are in use: close connections",
            Self::NoBuffers => "the limit of sockets or memory is reached: raise it or close some",
            Self::Invalid => "the socket's state does not allow this call",
            Self::Unsupported => "the settings do not allow this call: switch Fast Open on",
            Self::NoSocket => "the socket is closed",
        })
    }
}

impl std::error::Error for TcpError {}

impl From<TcpError> for io::Error {
    fn from(error: TcpError) -> Self {
        use io::ErrorKind as Kind;
        let kind = match error {
            TcpError::WouldBlock | TcpError::InProgress | TcpError::Already => Kind::WouldBlock,
            TcpError::IsConnected | TcpError::Invalid => Kind::InvalidInput,
            TcpError::NotConnected | TcpError::NoSocket => Kind::NotConnected,
            TcpError::Refused => Kind::ConnectionRefused,
            TcpError::Reset => Kind::ConnectionReset,
            TcpError::Aborted => Kind::ConnectionAborted,
            TcpError::BrokenPipe => Kind::BrokenPipe,
            TcpError::TimedOut => Kind::TimedOut,
            TcpError::HostUnreachable | TcpError::HostUnknown => Kind::HostUnreachable,
            TcpError::NetworkUnreachable | TcpError::HostIsolated => Kind::NetworkUnreachable,
            TcpError::NoProtocol | TcpError::NoSourceRoute | TcpError::Unsupported => {
                Kind::Unsupported
            }
            TcpError::BadHeader => Kind::Other,
            TcpError::Prohibited => Kind::PermissionDenied,
            TcpError::AddressInUse => Kind::AddrInUse,
            TcpError::NoPort => Kind::AddrNotAvailable,
            TcpError::NoBuffers => Kind::OutOfMemory,
        };
        Self::new(kind, error)
    }
}
