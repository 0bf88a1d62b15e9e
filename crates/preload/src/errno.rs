//! Errors as the kernel's numbers.

use std::io;

use rustix::io::Errno;

/// Number that the kernel would report for an error of the library.
pub(crate) fn errno(error: &io::Error) -> Errno {
    if let Some(number) = Errno::from_io_error(error) {
        return number;
    }
    match error.kind() {
        io::ErrorKind::WouldBlock => Errno::AGAIN,
        io::ErrorKind::ConnectionRefused => Errno::CONNREFUSED,
        io::ErrorKind::InvalidInput => Errno::INVAL,
        io::ErrorKind::NotConnected => Errno::NOTCONN,
        io::ErrorKind::BrokenPipe => Errno::NETDOWN, // the engine has ended
        _ => Errno::IO,
    }
}
