//! Calls on descriptors: close, dup, fcntl, ioctl.

use std::ffi::{c_int, c_uint, c_ulong};
use std::os::fd::AsRawFd;

use rustix::io::Errno;

use super::answer_int;
use super::next::next;
use crate::table;

/// # Safety
/// As `close(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    table::remove(fd);
    let next = next!(close(c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(fd) }
}

/// # Safety
/// As `close_range(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let only_marks = c_int::try_from(libc::CLOSE_RANGE_CLOEXEC).is_ok_and(|mark| flags & mark != 0);
    if !only_marks {
        table::within(first, last).for_each(table::remove);
    }
    let next = next!(close_range(c_uint, c_uint, c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(first, last, flags) }
}

/// # Safety
/// As `closefrom(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn closefrom(first: c_int) {
    table::within(c_uint::try_from(first).unwrap_or(0), c_uint::MAX).for_each(table::remove);
    let next = next!(closefrom(c_int) -> ());
    // SAFETY: the caller's promise.
    unsafe { next(first) }
}

/// Enters the socket of `old` at `new`, a duplicate of it, if the call has succeeded. A duplicate that the table
/// has no slot for is closed: `EMFILE`.
fn duplicated(old: c_int, new: c_int) -> c_int {
    if new >= 0
        && new != old
        && let Some(socket) = table::find(old)
    {
        if !table::has_slot(new) {
            // SAFETY: the descriptor was just made, and nobody else knows it.
            unsafe { close(new) };
            return answer_int(Err(Errno::MFILE));
        }
        table::insert(new, socket);
    }
    new
}

/// # Safety
/// As `dup(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    let next = next!(dup(c_int) -> c_int);
    // SAFETY: the caller's promise.
    duplicated(fd, unsafe { next(fd) })
}

/// # Safety
/// As `dup2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    let next = next!(dup2(c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    let new = unsafe { next(fd, to) };
    replaced(fd, new)
}

/// # Safety
/// As `dup3(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    let next = next!(dup3(c_int, c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    let new = unsafe { next(fd, to, flags) };
    replaced(fd, new)
}

/// The same where `new` may have been a socket of ours before.
fn replaced(old: c_int, new: c_int) -> c_int {
    if new >= 0 && new != old {
        table::remove(new);
    }
    duplicated(old, new)
}

/// # Safety
/// As `fcntl(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let next = next!(fcntl(c_int, c_int, c_ulong) -> c_int);
    let Some(socket) = table::find(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { next(fd, command, argument) };
    };
    match command {
        // The flags of the readiness descriptor are not the program's.
        libc::F_GETFL | libc::F_SETFL => {
            // SAFETY: the caller's promise, for another socket of the kernel.
            let result = unsafe { next(socket.kernel().as_raw_fd(), command, argument) };
            if command == libc::F_SETFL && result == 0 {
                socket.adopt_settings();
            }
            result
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            // SAFETY: the caller's promise.
            duplicated(fd, unsafe { next(fd, command, argument) })
        }
        // SAFETY: the caller's promise.
        _ => unsafe { next(fd, command, argument) },
    }
}

/// # Safety
/// As `fcntl(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller's promise; on 64 bits both are one function.
    unsafe { fcntl(fd, command, argument) }
}

/// # Safety
/// As `ioctl(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int {
    let next = next!(ioctl(c_int, c_ulong, *mut c_int) -> c_int);
    let Some(socket) = table::find(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { next(fd, request, argument) };
    };
    if request == libc::FIONREAD {
        let len = socket.next_len().map(|len| c_int::try_from(len).unwrap_or(c_int::MAX));
        return answer_int(len.map(|len| {
            // SAFETY: the argument of this request is the address of an int.
            unsafe { argument.write(len) };
            0
        }));
    }
    if matches!(request, libc::FIOCLEX | libc::FIONCLEX) {
        // SAFETY: the caller's promise; the mark is the descriptor's own.
        return unsafe { next(fd, request, argument) };
    }
    // SAFETY: the caller's promise, for another socket of the kernel.
    let result = unsafe { next(socket.kernel().as_raw_fd(), request, argument) };
    if request == libc::FIONBIO && result == 0 {
        socket.adopt_settings();
    }
    result
}
