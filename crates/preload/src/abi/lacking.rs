//! setsockopt of options that sockets of ours lack.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};

use libc::socklen_t;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_protocol, socket_type};
use rustix::net::{SocketFlags, socket_with};

use super::system::{option_bytes, set_option_at};
use crate::option::SocketOption;

/// Option whose value cannot be compared: the kernel counts it in instructions.
const ATTACH_FILTER: SocketOption = SocketOption::of_socket(libc::SO_ATTACH_FILTER);

/// Answers `setsockopt` of an option that a socket of ours lacks. A new socket of the kernel is asked first: what it refuses is
/// refused with its error, and a value that changes nothing there is taken.
///
/// # Errors
/// As `setsockopt(2)`; `ENOPROTOOPT` for any other value.
///
/// # Safety
/// As `setsockopt(2)`.
pub(super) unsafe fn set(
    kernel: BorrowedFd<'_>,
    option: SocketOption,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    let (family, kind) = (socket_domain(kernel)?, socket_type(kernel)?);
    let new = socket_with(family, kind, SocketFlags::CLOEXEC, socket_protocol(kernel)?)?;
    let read = || (option != ATTACH_FILTER).then(|| option_bytes(new.as_fd(), option)).flatten();
    let unset = read();
    // SAFETY: the caller's promise, for another socket.
    unsafe { set_option_at(new.as_fd(), option, value, len) }?;
    if unset.is_none() || read() != unset {
        return Err(Errno::NOPROTOOPT);
    }
    // SAFETY: as above.
    unsafe { set_option_at(kernel, option, value, len) }
}
