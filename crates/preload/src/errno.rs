//! Errors as the kernel's numbers.

use std::io;

use rustix::io::Errno;

/// Result of a call whose connection was taken over meanwhile: it is made anew, by the kernel's connection. No call of the
/// program returns it.
pub(crate) const MOVED: Errno = Errno::RESTART;

/// Number that the kernel would report for an error of a UDP socket or of a listener, which have no stream that
/// could be broken.
pub(crate) fn unconnected_errno(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::BrokenPipe if error.raw_os_error().is_none() => Errno::NETDOWN, // the engine has ended
        _ => number(error),
    }
}

/// Number that the kernel would report for an error of a TCP connection.
pub(crate) fn stream_errno(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Errno::PIPE,
        io::ErrorKind::ResourceBusy => MOVED,
        _ => number(error),
    }
}

fn number(error: &io::Error) -> Errno {
    use io::ErrorKind as Kind;
    if let Some(number) = Errno::from_io_error(error) {
        return number;
    }
    match error.kind() {
        Kind::WouldBlock => Errno::AGAIN,
        Kind::ConnectionRefused => Errno::CONNREFUSED,
        Kind::ConnectionReset => Errno::CONNRESET,
        Kind::ConnectionAborted => Errno::CONNABORTED,
        Kind::TimedOut => Errno::TIMEDOUT,
        Kind::HostUnreachable => Errno::HOSTUNREACH,
        Kind::NetworkUnreachable => Errno::NETUNREACH,
        Kind::AddrInUse => Errno::ADDRINUSE,
        Kind::AddrNotAvailable => Errno::ADDRNOTAVAIL,
        Kind::OutOfMemory => Errno::NOBUFS,
        Kind::PermissionDenied => Errno::ACCESS,
        Kind::Unsupported => Errno::NOPROTOOPT,
        Kind::InvalidInput => Errno::INVAL,
        Kind::NotConnected => Errno::NOTCONN,
        _ => Errno::IO,
    }
}
