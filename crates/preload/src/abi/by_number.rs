//! System calls by their number (`syscall`): libuv, and so Node.js and uvloop, closes descriptors in this way.

use std::ffi::{c_int, c_long, c_uint};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use super::descriptors::{close, close_range, dup, dup3, is_hidden};
use super::exec::{execve, execveat};
use super::messages::recvmmsg;
use super::next::next;
use super::receive::read;
use super::send::{sendmmsg, write};
use crate::table;

/// Makes calls on descriptors of ours as the functions of their names. All others go to the kernel, where they are no points
/// of cancellation.
///
/// # Safety
/// As `syscall(2)`. It is variadic in C: on x86-64 and AArch64 Linux up to six integers are passed as to this function, whose
/// further ones are then not used.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "as the kernel")]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let fd = a as c_int;
    let may_be_ours = || table::may_be_ours(fd) || is_hidden(fd);
    match number {
        // SAFETY: the caller's promise, here and below.
        libc::SYS_close if may_be_ours() => unsafe { close(fd) }.into(),
        libc::SYS_close_range => {
            // SAFETY: as above.
            unsafe { close_range(a as c_uint, b as c_uint, c as c_int) }.into()
        }
        // SAFETY: as above.
        libc::SYS_dup => unsafe { dup(fd) }.into(),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        libc::SYS_dup2 => unsafe { super::descriptors::dup2(fd, b as c_int) }.into(),
        // SAFETY: as above.
        libc::SYS_dup3 => unsafe { dup3(fd, b as c_int, c as c_int) }.into(),
        // SAFETY: as above.
        libc::SYS_read if may_be_ours() => unsafe {
            read(fd, with_exposed_provenance_mut(b as usize), c as usize) as c_long
        },
        // SAFETY: as above.
        libc::SYS_write if may_be_ours() => unsafe {
            write(fd, with_exposed_provenance_mut(b as usize), c as usize) as c_long
        },
        libc::SYS_recvmmsg if may_be_ours() => {
            let headers = with_exposed_provenance_mut(b as usize);
            let timeout = with_exposed_provenance_mut(e as usize);
            // SAFETY: as above.
            unsafe { recvmmsg(fd, headers, c as c_uint, d as c_int, timeout) }.into()
        }
        libc::SYS_sendmmsg if may_be_ours() => {
            let headers = with_exposed_provenance_mut(b as usize);
            // SAFETY: as above.
            unsafe { sendmmsg(fd, headers, c as c_uint, d as c_int) }.into()
        }
        libc::SYS_execve => {
            let strings = |at: c_long| with_exposed_provenance(at as usize);
            // SAFETY: as above.
            unsafe { execve(with_exposed_provenance(a as usize), strings(b), strings(c)) }.into()
        }
        libc::SYS_execveat => {
            let strings = |at: c_long| with_exposed_provenance(at as usize);
            let path = with_exposed_provenance(b as usize);
            // SAFETY: as above.
            unsafe { execveat(fd, path, strings(c), strings(d), e as c_int) }.into()
        }
        // SAFETY: as above.
        _ => unsafe { kernels()(number, a, b, c, d, e, f) },
    }
}

type ByNumber =
    unsafe extern "C" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;

/// The C library's function. Found when the library is loaded: a signal handler may make the first call.
pub(super) fn kernels() -> ByNumber {
    next!(syscall(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long)
}
