//! Calls that wait for several descriptors. They wait in the kernel; here, a listener that no engine serves yet
//! gets one first, and the calling thread receives what has arrived.

use std::ffi::{c_int, c_void};

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use super::next::next;
use crate::listener::are_some_unserved;
use crate::runtime::receive_and_wait;
use crate::socket::Socket;
use crate::table;

/// Time-out of a call that looks and does not wait.
const NO_TIME: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

/// Serves the listener at a descriptor. What fails was told, and is answered by `accept`.
fn serve(fd: c_int) {
    if let Some(socket) = table::find(fd)
        && let Socket::Listener(listener) = &*socket
    {
        let _ = listener.serve(&socket);
    }
}

/// # Safety
/// As `epoll_ctl(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_ctl(
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    if are_some_unserved() && operation == libc::EPOLL_CTL_ADD {
        serve(fd);
    }
    let next = next!(epoll_ctl(c_int, c_int, c_int, *mut epoll_event) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(epoll, operation, fd, event) }
}

/// # Safety
/// As `epoll_wait(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_wait(
    epoll: c_int,
    events: *mut epoll_event,
    events_max: c_int,
    timeout: c_int,
) -> c_int {
    let next = next!(epoll_wait(c_int, *mut epoll_event, c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    let wait = |timeout| unsafe { next(epoll, events, events_max, timeout) };
    receive_and_wait(|| wait(0), || wait(timeout))
}

/// # Safety
/// As `epoll_pwait(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    events_max: c_int,
    timeout: c_int,
    signals: *const sigset_t,
) -> c_int {
    let next = next!(epoll_pwait(c_int, *mut epoll_event, c_int, c_int, *const sigset_t) -> c_int);
    // SAFETY: the caller's promise.
    let wait = |timeout| unsafe { next(epoll, events, events_max, timeout, signals) };
    receive_and_wait(|| wait(0), || wait(timeout))
}

/// # Safety
/// As `epoll_pwait2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    events_max: c_int,
    timeout: *const timespec,
    signals: *const sigset_t,
) -> c_int {
    let next = next!(
        epoll_pwait2(c_int, *mut epoll_event, c_int, *const timespec, *const sigset_t) -> c_int
    );
    // SAFETY: the caller's promise.
    let wait = |timeout| unsafe { next(epoll, events, events_max, timeout, signals) };
    receive_and_wait(|| wait(&NO_TIME), || wait(timeout))
}

/// Serves the listeners of a set.
///
/// # Safety
/// As for the set given to `poll(2)`.
unsafe fn serve_polled(polled: *const pollfd, count: nfds_t) {
    let count = usize::try_from(count).unwrap_or(0);
    if are_some_unserved() && !polled.is_null() && count > 0 {
        // SAFETY: the caller's promise.
        let polled = unsafe { std::slice::from_raw_parts(polled, count) };
        polled.iter().for_each(|polled| serve(polled.fd));
    }
}

/// # Safety
/// As `poll(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn poll(polled: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { serve_polled(polled, count) };
    let next = next!(poll(*mut pollfd, nfds_t, c_int) -> c_int);
    // SAFETY: the caller's promise.
    let wait = |timeout| unsafe { next(polled, count, timeout) };
    receive_and_wait(|| wait(0), || wait(timeout))
}

/// # Safety
/// As `poll(2)`; glibc ends the program if the set is shorter than `count`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __poll_chk(
    polled: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    room: size_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { serve_polled(polled, count) };
    let next = next!(__poll_chk(*mut pollfd, nfds_t, c_int, size_t) -> c_int);
    // SAFETY: the caller's promise.
    let wait = |timeout| unsafe { next(polled, count, timeout, room) };
    receive_and_wait(|| wait(0), || wait(timeout))
}

/// # Safety
/// As `ppoll(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ppoll(
    polled: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    signals: *const sigset_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { serve_polled(polled, count) };
    let next = next!(ppoll(*mut pollfd, nfds_t, *const timespec, *const sigset_t) -> c_int);
    // SAFETY: the caller's promise.
    let wait = |timeout| unsafe { next(polled, count, timeout, signals) };
    receive_and_wait(|| wait(&NO_TIME), || wait(timeout))
}

/// # Safety
/// As `ppoll(2)`; glibc ends the program if the set is shorter than `count`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __ppoll_chk(
    polled: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    signals: *const sigset_t,
    room: size_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { serve_polled(polled, count) };
    let next =
        next!(__ppoll_chk(*mut pollfd, nfds_t, *const timespec, *const sigset_t, size_t) -> c_int);
    // SAFETY: the caller's promise.
    let wait = |timeout| unsafe { next(polled, count, timeout, signals, room) };
    receive_and_wait(|| wait(&NO_TIME), || wait(timeout))
}

/// Serves the listeners of a set.
///
/// # Safety
/// As for the set given to `select(2)`.
unsafe fn serve_selected(count: c_int, readable: *const fd_set) {
    if !are_some_unserved() || readable.is_null() {
        return;
    }
    let Some(last) = count.checked_sub(1).and_then(|last| u32::try_from(last).ok()) else { return };
    for fd in table::within(0, last) {
        let (byte, bit) = (usize::try_from(fd / 8).unwrap_or(0), fd % 8);
        // SAFETY: the caller's promise: the set has the bits that the kernel reads. These are not `count`, but at
        // most as many as the process has slots for descriptors; this one is open, so that its bit is among them.
        // Little-endian words are bytes in order.
        let bits = unsafe { readable.cast::<u8>().wrapping_add(byte).read() };
        if bits & 1 << bit != 0 {
            serve(fd);
        }
    }
}

/// # Safety
/// As `select(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn select(
    count: c_int,
    readable: *mut fd_set,
    writable: *mut fd_set,
    exceptional: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { serve_selected(count, readable) };
    let next = next!(select(c_int, *mut fd_set, *mut fd_set, *mut fd_set, *mut timeval) -> c_int);
    // SAFETY: the caller's promise.
    let wait = || unsafe { next(count, readable, writable, exceptional, timeout) };
    receive_and_wait(|| 0, wait) // a look would empty the sets
}

/// # Safety
/// As `pselect(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pselect(
    count: c_int,
    readable: *mut fd_set,
    writable: *mut fd_set,
    exceptional: *mut fd_set,
    timeout: *const timespec,
    signals: *const c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { serve_selected(count, readable) };
    let next = next!(
        pselect(
            c_int,
            *mut fd_set,
            *mut fd_set,
            *mut fd_set,
            *const timespec,
            *const c_void,
        ) -> c_int
    );
    // SAFETY: the caller's promise.
    let wait = || unsafe { next(count, readable, writable, exceptional, timeout, signals) };
    receive_and_wait(|| 0, wait) // a look would empty the sets
}
