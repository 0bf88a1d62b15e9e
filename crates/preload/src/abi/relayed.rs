//! Connections that the kernel's calls use ([`relay`]): what the kernel does not know of them, and calls after which the library
//! does not learn of their use.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};

use libc::{FILE, msghdr, posix_spawn_file_actions_t, sockaddr, socklen_t};
use rustix::io::Errno;

use super::next::next;
use super::send::control_of;
use super::{address, is_nowhere, keeping_errno, last_error, with_number};
use crate::relay::{self, RelayName, passed_numbers};
use crate::tcp_options::new_socket;
use crate::{option::SocketOption, table};

type SetOption = unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;
type OptionOf = unsafe extern "C" fn(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int;

/// Levels of options that the kernel's pair has none of.
const LEVELS: [c_int; 3] = [libc::IPPROTO_TCP, libc::IPPROTO_IP, libc::IPPROTO_IPV6];

/// State of a connection that is open, the first byte of `struct tcp_info`.
const TCP_ESTABLISHED: u8 = 1;

/// Name of the connection that a descriptor's pair carries.
fn name_of(fd: c_int) -> Option<RelayName> {
    if fd < 0 { None } else { with_number(fd, RelayName::of_peer) }
}

/// Ends of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Local,
    Peer,
}

/// Writes the address of a connection in place of the pair's, which the kernel has just written.
///
/// # Safety
/// As `getsockname(2)`, with a length that was `room` before the call.
pub(super) unsafe fn rename(
    fd: c_int,
    end: End,
    to: *mut sockaddr,
    len: *mut socklen_t,
    room: socklen_t,
) -> Result<(), Errno> {
    // SAFETY: the kernel has written so many bytes, and their number.
    if !unsafe { is_local_name(to, len, room) } {
        return Ok(());
    }
    let Some(name) = name_of(fd) else { return Ok(()) };
    // SAFETY: valid, as the kernel has written it.
    unsafe { len.write(room) };
    let address = if end == End::Local { name.local } else { name.peer };
    // SAFETY: the caller's promise.
    unsafe { address::write_counted(address, to, len) }
}

/// True for an address of this host's own sockets (`AF_UNIX`).
///
/// # Safety
/// As `getsockname(2)`.
unsafe fn is_local_name(to: *const sockaddr, len: *const socklen_t, room: socklen_t) -> bool {
    if is_nowhere(to) || is_nowhere(len) || room < 2 {
        return false;
    }
    // SAFETY: the caller's promise.
    if unsafe { len.read() } < 2 {
        return false;
    }
    // SAFETY: the caller's promise, for two bytes of at least as many.
    let family = unsafe { to.cast::<u16>().read_unaligned() };
    i32::from(family) == libc::AF_UNIX
}

/// Room that a program gives for an address.
///
/// # Safety
/// `len` is nowhere, or valid.
pub(super) unsafe fn room_at(len: *const socklen_t) -> socklen_t {
    // SAFETY: the caller's promise.
    if is_nowhere(len) { 0 } else { unsafe { len.read() } }
}

/// Takes back the sender's address that the kernel has written: a connection's peer is not named.
///
/// # Safety
/// As `recvfrom(2)`, with a length that was `room` before the call.
pub(super) unsafe fn unname(
    fd: c_int,
    from: *const sockaddr,
    len: *mut socklen_t,
    room: socklen_t,
) {
    // SAFETY: the caller's promise.
    if unsafe { is_local_name(from, len, room) } && name_of(fd).is_some() {
        // SAFETY: valid, as the kernel has written it.
        unsafe { len.write(0) };
    }
}

/// Socket of the kernel that answers for a connection, if the kernel does not know the option of its pair.
fn stand_in(fd: c_int, option: SocketOption) -> Option<OwnedFd> {
    if !LEVELS.contains(&option.level) || last_error() != Errno::OPNOTSUPP {
        return None;
    }
    let stand_in = new_socket(name_of(fd)?.local.is_ipv6()).ok()?;
    // As relays send.
    let _ = rustix::net::sockopt::set_tcp_nodelay(&stand_in, true);
    Some(stand_in)
}

/// Sets an option of a socket that is not ours. Those of TCP and IP have no effect on a connection, and are checked.
///
/// # Safety
/// As `setsockopt(2)`.
pub(super) unsafe fn set_option(
    next: SetOption,
    fd: c_int,
    option: SocketOption,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let SocketOption { level, name } = option;
    // SAFETY: the caller's promise.
    let set = |fd| unsafe { next(fd, level, name, value, len) };
    let result = keeping_errno_if_done(|| match (set(fd), LEVELS.contains(&level)) {
        (-1, true) => stand_in(fd, option).map(|stand_in| set(stand_in.as_raw_fd())),
        (result, _) => Some(result),
    });
    result.unwrap_or(-1)
}

/// Calls `act`, which may fail at first, and leaves the error of before if it did not at last.
fn keeping_errno_if_done(act: impl FnOnce() -> Option<c_int>) -> Option<c_int> {
    let mut failed = None;
    let result = keeping_errno(|| {
        let result = act();
        if result.is_none_or(|result| result < 0) {
            failed = Some(last_error());
        }
        result
    });
    if let Some(error) = failed {
        super::answer_int(Err(error));
    }
    result
}

/// Answers an option of a socket that is not ours.
///
/// # Safety
/// As `getsockopt(2)`.
pub(super) unsafe fn option_of(
    next: OptionOf,
    fd: c_int,
    option: SocketOption,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let SocketOption { level, name } = option;
    // SAFETY: the caller's promise.
    let answer = |fd| unsafe { next(fd, level, name, value, len) };
    let result = keeping_errno_if_done(|| match (answer(fd), LEVELS.contains(&level)) {
        (-1, true) => stand_in(fd, option).map(|stand_in| answer(stand_in.as_raw_fd())),
        (result, _) => Some(result),
    });
    if result == Some(0) && !is_nowhere(value) {
        // SAFETY: the kernel has written the length.
        let written = unsafe { len.read() };
        // SAFETY: the kernel has written so many bytes.
        unsafe { correct(fd, option, value, written) };
    }
    result.unwrap_or(-1)
}

/// Corrects what the kernel says of a pair, or of a socket that stands in for its connection.
///
/// # Safety
/// `len` bytes at `value` can be written.
unsafe fn correct(fd: c_int, option: SocketOption, value: *mut c_void, len: socklen_t) {
    let is_int = usize::try_from(len) == Ok(size_of::<c_int>());
    let asked = (option.level, option.name);
    match asked {
        (libc::SOL_SOCKET, libc::SO_DOMAIN | libc::SO_PROTOCOL) if is_int => {
            let Some(name) = name_of(fd) else { return };
            let family = if name.local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
            let is_domain = option.name == libc::SO_DOMAIN;
            let corrected = if is_domain { family } else { libc::IPPROTO_TCP };
            // SAFETY: the caller's promise, for an int.
            unsafe { value.cast::<c_int>().write_unaligned(corrected) };
        }
        (libc::IPPROTO_TCP, libc::TCP_INFO) if len > 0 && name_of(fd).is_some() => {
            // SAFETY: the caller's promise, for the first byte.
            unsafe { value.cast::<u8>().write(TCP_ESTABLISHED) };
        }
        _ => {}
    }
}

/// Gives the connections that a message passes on to the kernel.
///
/// # Safety
/// As for a header given to `sendmsg(2)`.
pub(super) unsafe fn give_passed(header: *const msghdr) {
    if is_nowhere(header) {
        return;
    }
    // SAFETY: the caller's promise.
    let Ok(Some((control, len))) = control_of(unsafe { &*header }) else { return };
    // SAFETY: the caller's promise; the memory may be the program's.
    let control = unsafe { std::slice::from_raw_parts(control, len) };
    passed_numbers(control).filter(|number| table::may_be_ours(*number)).for_each(relay::give);
}

/// # Safety
/// As `posix_spawn_file_actions_adddup2(3)`. The C library makes the duplicate without calling this one.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    actions: *mut posix_spawn_file_actions_t,
    fd: c_int,
    to: c_int,
) -> c_int {
    if table::may_be_ours(fd) {
        relay::give(fd);
    }
    let next = next!(
        posix_spawn_file_actions_adddup2(*mut posix_spawn_file_actions_t, c_int, c_int) -> c_int
    );
    // SAFETY: the caller's promise.
    unsafe { next(actions, fd, to) }
}

/// # Safety
/// As `fdopen(3)`. The C library reads and writes without calling this one.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if table::may_be_ours(fd) {
        relay::give(fd);
    }
    let next = next!(fdopen(c_int, *const c_char) -> *mut FILE);
    // SAFETY: the caller's promise.
    unsafe { next(fd, mode) }
}
