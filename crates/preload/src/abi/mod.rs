//! C interface: exported functions by subject, and what they share. Each converts its arguments, calls a method
//! of a [`Socket`](crate::socket::Socket) of ours or the next definition of the function, and sets `errno`.
//!
//! A pointer from the program is trusted, as the C library does, unless it points to where no program has memory: that is
//! `EFAULT`. Of execve the kernel is asked. With any other invalid pointer the program ends by SIGSEGV, where the kernel reports `EFAULT`.

#![expect(unreachable_pub, reason = "exported by name to C, not by path to Rust")]
#![cfg_attr(test, expect(dead_code, reason = "tests of this crate use the C library's functions"))]

mod next; //        next definitions of the functions
mod system; //      system calls for the safe modules
mod address; //     struct sockaddr
mod vectors; //     struct iovec
mod sockets; //     bind, connect, listen, accept, getsockname
mod options; //     getsockopt, setsockopt
mod lacking; //     setsockopt of what sockets of ours lack
mod groups; //      setsockopt of multicast groups
mod receive; //     recv, read
mod messages; //    recvmsg, recvmmsg
mod send; //        send, sendmsg, write
mod files; //       sendfile, splice
mod waits; //       epoll_ctl, poll, select
mod relayed; //     connections that the kernel's calls use
mod processes; //   _exit, forks
mod exec; //        execve and its siblings
mod exec_words; //  execl and its siblings
mod strings; //     arrays of strings
mod signals; //     handlers of signals
mod descriptors; // close, dup, fcntl, ioctl
mod by_number; //   syscall
mod memory_limits; // setrlimit, prlimit

pub(crate) use address::encode;
pub(crate) use descriptors::{make_unusable, prepare_to_close};
pub(crate) use signals::{restart, unblock, while_ending};
pub(crate) use system::{
    Span, close_forgotten, copy_option, copy_signals, fast_open_keys, handlers_restart,
    is_in_group, is_ipv6, is_on, is_plain, kept_words, lock, lock_holder, lock_in_turn,
    lock_shared, number, option_bytes, option_differs, option_value, read_file, replace,
    set_v6_only, shared_words, unlock, with_number,
};

use std::ffi::c_int;

use rustix::io::Errno;

/// Addresses that a program can have memory at: the first page is left out by default (`vm.mmap_min_addr`), and
/// `TASK_SIZE` is at most so high.
const LOWEST_ADDRESS: usize = 1 << 12;
const HIGHEST_ADDRESS: usize = 1 << 56;

/// True for an address that no program has memory at, such as null.
fn is_nowhere<T>(address: *const T) -> bool {
    !(LOWEST_ADDRESS..HIGHEST_ADDRESS).contains(&address.addr())
}

/// True for an address that is none of a program's: calls refuse it at once (`access_ok`).
fn is_kernels<T>(address: *const T) -> bool {
    address.addr() >= HIGHEST_ADDRESS
}

/// True for bytes that end beyond all addresses of a program: calls on files refuse them at once (`access_ok`), whereas a
/// single buffer of a call on a socket is used as far as it reaches.
fn is_beyond<T>(address: *const T, len: usize) -> bool {
    address.addr().checked_add(len).is_none_or(|end| end > HIGHEST_ADDRESS)
}

/// Result of a call on a connection, which is made anew if that was taken over meanwhile.
macro_rules! unless_moved {
    ($socket:ident, $result:expr, $anew:expr) => {{
        let result = $result;
        if result == Err(crate::errno::MOVED) {
            drop($socket);
            // SAFETY: the promise of this call's caller.
            return unsafe { $anew };
        }
        result
    }};
}
use unless_moved;

/// Result of a call that returns a length or 0 as C has it, with `errno` set.
fn answer(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(value) => isize::try_from(value).unwrap_or(isize::MAX),
        Err(error) => {
            // SAFETY: the function has no preconditions.
            let errno = unsafe { libc::__errno_location() };
            // SAFETY: it returned the address of this thread's errno, which lives as long as the thread.
            unsafe { errno.write(error.raw_os_error()) };
            -1
        }
    }
}

/// Result of a call that sends on a connection, as C has it: `EPIPE` comes with SIGPIPE, unless the flags forbid it.
fn answer_sent(result: Result<usize, Errno>, flags: c_int) -> isize {
    if result == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 {
        // SAFETY: the call touches no memory of ours; the program's handler is its own.
        unsafe { libc::raise(libc::SIGPIPE) };
    }
    answer(result)
}

/// Preserves `errno` for the program, whatever calls follow.
pub(crate) fn keeping_errno<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: the function has no preconditions.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: it returned the address of this thread's errno, which lives as long as the thread.
    let before = unsafe { errno.read() };
    let result = act();
    // SAFETY: as above.
    unsafe { errno.write(before) };
    result
}

/// Error of the last system call of this thread.
fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Result of a call that returns an `int`, as C has it, with `errno` set.
fn answer_int(result: Result<usize, Errno>) -> c_int {
    c_int::try_from(answer(result)).unwrap_or(c_int::MAX)
}
