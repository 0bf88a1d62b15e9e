//! bind, connect, names and options.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{sockaddr, socklen_t};
use rustix::io::Errno;

use super::next::next;
use super::{address, answer_int};
use crate::socket::Socket;
use crate::table;

type ByAddress = unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;

/// # Safety
/// As `bind(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn bind(fd: c_int, at: *const sockaddr, len: socklen_t) -> c_int {
    let next = next!(bind(c_int, *const sockaddr, socklen_t) -> c_int);
    if table::find(fd).is_some() {
        return answer_int(Err(Errno::INVAL)); // bound already
    }
    // SAFETY: the caller's promise.
    let local = unsafe { address::read(at, len) };
    if fd >= 0
        && let Ok(local) = local
    {
        // SAFETY: not negative; it is only used for this call, by which the program says that it is open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
        match Socket::bind(descriptor, local) {
            Ok(Some(())) => return 0,
            Ok(None) => {}
            Err(error) => return answer_int(Err(error)),
        }
    }
    // SAFETY: the caller's promise.
    unsafe { next(fd, at, len) }
}

/// # Safety
/// As `connect(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    let Some(socket) = table::find(fd) else {
        let next = next!(connect(c_int, *const sockaddr, socklen_t) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, to, len) };
    };
    // SAFETY: the caller's promise.
    let to = unsafe { address::read(to, len) };
    answer_int(to.and_then(|to| socket.connect(to)).map(|()| 0))
}

/// # Safety
/// As `getsockname(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getsockname(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(socket) = table::find(fd) else {
        let next: ByAddress = next!(getsockname(c_int, *mut sockaddr, *mut socklen_t) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, to, len) };
    };
    // SAFETY: the caller's promise.
    unsafe { address::write_counted(socket.local(), to, len) };
    0
}

/// # Safety
/// As `getpeername(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getpeername(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(socket) = table::find(fd) else {
        let next: ByAddress = next!(getpeername(c_int, *mut sockaddr, *mut socklen_t) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, to, len) };
    };
    match socket.peer() {
        Ok(peer) => {
            // SAFETY: the caller's promise.
            unsafe { address::write_counted(peer, to, len) };
            0
        }
        Err(error) => answer_int(Err(error)),
    }
}

/// # Safety
/// As `setsockopt(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let next = next!(setsockopt(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int);
    let Some(socket) = table::find(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { next(fd, level, name, value, len) };
    };
    if let Err(error) = socket.check_option(level, name) {
        return answer_int(Err(error));
    }
    // SAFETY: the caller's promise, for another socket of the kernel.
    let result = unsafe { next(socket.kernel().as_raw_fd(), level, name, value, len) };
    if result == 0 {
        socket.adopt_settings();
    }
    result
}

/// # Safety
/// As `getsockopt(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let next = next!(getsockopt(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int);
    let socket = table::find(fd);
    let fd = socket.as_ref().map_or(fd, |socket| socket.kernel().as_raw_fd());
    // SAFETY: the caller's promise.
    unsafe { next(fd, level, name, value, len) }
}

/// # Safety
/// As `listen(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if table::find(fd).is_some() {
        return answer_int(Err(Errno::OPNOTSUPP));
    }
    let next = next!(listen(c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(fd, backlog) }
}

/// # Safety
/// As `shutdown(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    if let Some(socket) = table::find(fd) {
        return answer_int(socket.peer().and(Err(Errno::OPNOTSUPP)));
    }
    let next = next!(shutdown(c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(fd, how) }
}

/// # Safety
/// As `accept(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int {
    if table::find(fd).is_some() {
        return answer_int(Err(Errno::OPNOTSUPP));
    }
    let next: ByAddress = next!(accept(c_int, *mut sockaddr, *mut socklen_t) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(fd, from, len) }
}

/// # Safety
/// As `accept4(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    if table::find(fd).is_some() {
        return answer_int(Err(Errno::OPNOTSUPP));
    }
    let next = next!(accept4(c_int, *mut sockaddr, *mut socklen_t, c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(fd, from, len, flags) }
}
