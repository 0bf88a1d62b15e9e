//! bind, connect, listen, accept and names.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use libc::{sockaddr, socklen_t};
use rustix::io::Errno;

use super::next::next;
use super::{address, answer_int, last_error};
use crate::listener::{Listener, share_with_closed};
use crate::socket::{Socket, Takeover};
use crate::table;
use crate::udp::Udp;

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
        match Udp::bind(descriptor, local) {
            Ok(Takeover::Ours) => return 0,
            Ok(Takeover::Kernels) => {}
            Err(error) => return answer_int(Err(error)),
        }
    }
    // SAFETY: the caller's promise.
    let result = unsafe { next(fd, at, len) };
    if result < 0
        && last_error() == Errno::ADDRINUSE
        && let Ok(local) = local
    {
        // SAFETY: the call has found a socket there; it is only used for this call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
        if share_with_closed(descriptor, local) {
            // SAFETY: the caller's promise.
            return unsafe { next(fd, at, len) };
        }
        return answer_int(Err(Errno::ADDRINUSE));
    }
    result
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
    let Socket::Udp(udp) = &*socket else { return answer_int(Err(Errno::ISCONN)) };
    // SAFETY: the caller's promise.
    let to = unsafe { address::read(to, len) };
    answer_int(to.and_then(|to| udp.connect(to)).map(|()| 0))
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
/// As `listen(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    match table::find(fd).as_deref() {
        Some(Socket::Udp(_)) => return answer_int(Err(Errno::OPNOTSUPP)),
        Some(Socket::Stream(_)) => return answer_int(Err(Errno::INVAL)),
        // A change of the backlog, which stays what it was.
        Some(Socket::Listener(_)) => return 0,
        None => {}
    }
    if fd >= 0 {
        // SAFETY: not negative; it is only used for this call, by which the program says that it is open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
        match Listener::listen(descriptor, backlog) {
            Ok(Takeover::Ours) => return 0,
            Ok(Takeover::Kernels) => {}
            Err(error) => return answer_int(Err(error)),
        }
    }
    let next = next!(listen(c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(fd, backlog) }
}

/// # Safety
/// As `shutdown(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match table::find(fd).as_deref() {
        Some(Socket::Udp(udp)) => return answer_int(udp.peer().and(Err(Errno::OPNOTSUPP))),
        Some(Socket::Listener(_)) => return answer_int(Err(Errno::OPNOTSUPP)),
        Some(Socket::Stream(stream)) => return answer_int(stream.shutdown(how).map(|()| 0)),
        None => {}
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
        // SAFETY: the caller's promise; without flags it is the same call.
        return unsafe { accept4(fd, from, len, 0) };
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
    let Some(socket) = table::find(fd) else {
        let next = next!(accept4(c_int, *mut sockaddr, *mut socklen_t, c_int) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, from, len, flags) };
    };
    let accepted = match &*socket {
        Socket::Udp(_) => Err(Errno::OPNOTSUPP),
        Socket::Stream(_) => Err(Errno::INVAL),
        Socket::Listener(listener) => listener.accept(&socket, flags),
    };
    match accepted {
        Ok((number, peer)) => {
            // SAFETY: the caller's promise.
            unsafe { address::write_counted(peer, from, len) };
            number
        }
        Err(error) => answer_int(Err(error)),
    }
}
