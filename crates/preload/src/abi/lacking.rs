//! setsockopt of options that sockets of ours lack.

use std::ffi::c_void;
use std::os::fd::AsFd;

use libc::socklen_t;
use rustix::io::Errno;

use super::is_nowhere;
use super::system::{option_bytes, set_option_at};
use crate::lacking::new_like;
use crate::option::SocketOption;
use crate::socket::Socket;

/// Options that a new socket may be asked about: they read back whole, and have no effect on anything but the socket.
const ASKED: [SocketOption; 6] = [
    SocketOption::of_socket(libc::SO_RCVLOWAT),
    SocketOption::of_socket(libc::SO_MARK),
    SocketOption::of_socket(libc::SO_PEEK_OFF),
    SocketOption::of_ipv4(libc::IP_TRANSPARENT),
    SocketOption::of_ipv4(libc::IP_FREEBIND),
    SocketOption::of_ipv4(libc::IP_BIND_ADDRESS_NO_PORT),
];

/// Options of these levels whose values may have less bytes than an `int`.
const OF_OTHER_TYPES: [SocketOption; 4] = [
    SocketOption::of_socket(libc::SO_BINDTODEVICE),
    SocketOption::of_tcp(libc::TCP_CONGESTION),
    SocketOption::of_tcp(libc::TCP_ULP),
    SocketOption::of_tcp(libc::TCP_FASTOPEN_KEY),
];

/// Answers `setsockopt` of an option that a socket of ours lacks. A new socket of the kernel is asked where that has no other
/// effect: of the options above, and of calls without a value that can be read. What it refuses is refused with its error, and a
/// value that changes nothing there is taken.
///
/// # Errors
/// As `setsockopt(2)`; `ENOPROTOOPT` for any other value.
///
/// # Safety
/// As `setsockopt(2)`.
pub(super) unsafe fn set(
    socket: &Socket,
    option: SocketOption,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    let has_value = !is_nowhere(value) && i32::try_from(len).is_ok();
    // First, as all of these levels have it but for those of other types.
    let is_of_tcp = option.level == libc::IPPROTO_TCP && !matches!(socket, Socket::Udp(_));
    let is_int =
        (is_of_tcp || option.level == libc::SOL_SOCKET) && !OF_OTHER_TYPES.contains(&option);
    if has_value && is_int && len < 4 {
        return Err(Errno::INVAL);
    }
    if has_value && !ASKED.contains(&option) {
        return Err(Errno::NOPROTOOPT);
    }
    // No socket can be made: not what the call is about.
    let kernel = match socket {
        Socket::Stream(stream) => stream.holder(),
        Socket::Udp(udp) => udp.kernel(),
        Socket::Listener(listener) => listener.kernel(),
    };
    let new = new_like(kernel).map_err(|_| Errno::NOPROTOOPT)?;
    let unset = option_bytes(new.as_fd(), option);
    // SAFETY: the caller's promise, for another socket.
    unsafe { set_option_at(new.as_fd(), option, value, len) }?;
    if option_bytes(new.as_fd(), option) != unset || has_value && unset.is_none() {
        return Err(Errno::NOPROTOOPT);
    }
    if !has_value {
        return Ok(());
    }
    // SAFETY: as above.
    unsafe { set_option_at(socket.kernel()?, option, value, len) }
}
