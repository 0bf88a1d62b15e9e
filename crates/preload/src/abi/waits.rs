//! Calls that wait for several descriptors. The kernel does the waiting. Before it, a listener that no engine serves yet
//! gets one, and the calling thread receives the packets that have arrived. Descriptors that the library has opened for
//! itself are hidden: at their numbers, nothing is open.

use std::ffi::{c_int, c_void};

use forebay_sys::hidden;
use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use rustix::io::Errno;

use super::descriptors::{is_hidden, unless_hidden};
use super::next::next;
use super::{answer_int, is_nowhere};
use crate::runtime::receive_and_wait;
use crate::socket::Socket;
use crate::{epoll_sets, listener, relay, table, udp};

/// Time-out of a call that looks and does not wait.
const NO_TIME: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

/// Mask of a look. With that of a call a signal would come that the program has blocked, and has the call wait for.
const NO_MASK: *const sigset_t = std::ptr::null();

/// Most descriptors of a set that is looked at: as many as a process can have by the kernel's default of `fs.nr_open`.
const POLLED_MAX: usize = 1 << 20;

/// Receives and waits. A call may spin first if `look` sees what it waits for, and its time-out is known to be longer. With
/// `is_ended` a signal that has come meanwhile ends the call, as one that comes during the wait; else the kernel's call would
/// not see it: it has a mask of its own, or does not wait.
fn receive_and_sleep(
    may_spin: bool,
    is_ended: bool,
    look: impl Fn() -> c_int,
    sleep: impl FnOnce() -> c_int,
) -> c_int {
    receive_and_wait(may_spin, look, |handled| match is_ended && handled.has_any() {
        true => answer_int(Err(Errno::INTR)),
        false => sleep(),
    })
}

/// True if a call may wait for a socket that this process does not serve yet.
fn any_unserved() -> bool {
    listener::any_unserved() || udp::any_unused() || relay::may_be_elsewhere()
}

/// Serves the socket at a descriptor, which has just become ours, if the program waits for it already.
pub(super) fn serve_registered(fd: c_int) {
    if epoll_sets::is_registered(fd) {
        serve(fd);
    }
}

/// Serves the listener or the UDP socket at a descriptor. What fails was told, and is answered by `accept`, or when the
/// socket is read.
fn serve(fd: c_int) {
    let Some(socket) = table::find_usable(fd) else { return };
    match &*socket {
        Socket::Listener(listener) => drop(listener.serve(socket.shared())),
        Socket::Udp(udp) if !udp.is_of_parent() => drop(udp.begin_use()),
        Socket::Udp(_) | Socket::Stream(_) => {}
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
    if operation == libc::EPOLL_CTL_ADD && any_unserved() {
        serve(fd);
    }
    let next = next!(epoll_ctl(c_int, c_int, c_int, *mut epoll_event) -> c_int);
    // SAFETY: the caller's promise.
    let result = unsafe { next(unless_hidden(epoll), operation, unless_hidden(fd), event) };
    if operation == libc::EPOLL_CTL_ADD && result == 0 {
        epoll_sets::note(epoll, fd);
    }
    result
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
    let wait = |timeout| unsafe { next(unless_hidden(epoll), events, events_max, timeout) };
    receive_and_sleep(timeout != 0, timeout != 0, || wait(0), || wait(timeout))
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
    let wait = |timeout, signals| unsafe {
        next(unless_hidden(epoll), events, events_max, timeout, signals)
    };
    let is_ended = timeout != 0 && signals.is_null();
    receive_and_sleep(timeout != 0, is_ended, || wait(0, NO_MASK), || wait(timeout, signals))
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
    let wait = |timeout, signals| unsafe {
        next(unless_hidden(epoll), events, events_max, timeout, signals)
    };
    receive_and_sleep(
        timeout.is_null(),
        signals.is_null(),
        || wait(&NO_TIME, NO_MASK),
        || wait(timeout, signals),
    )
}

/// Serves the listeners of a set, and waits for it by `wait`. For that, none of the numbers that the program has not opened
/// is open: the call tells `POLLNVAL` of them.
///
/// # Safety
/// As for the set given to `poll(2)`.
unsafe fn wait_for_polled(
    polled: *mut pollfd,
    count: nfds_t,
    wait: impl FnOnce(*mut pollfd) -> c_int,
) -> c_int {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    // The kernel refuses such a set, unless `fs.nr_open` was raised: it is passed on as it is.
    if is_nowhere(polled) || count > POLLED_MAX {
        return wait(polled);
    }
    // SAFETY: the caller's promise; other threads may look at the set, but change it no more than this one does.
    let set = unsafe { std::slice::from_raw_parts(polled, count) };
    if any_unserved() {
        set.iter().for_each(|polled| serve(polled.fd));
    }
    if !set.iter().any(|polled| is_hidden(polled.fd)) {
        return wait(polled);
    }
    let mut seen = set.to_vec();
    seen.iter_mut().for_each(|polled| polled.fd = unless_hidden(polled.fd));
    let found = wait(seen.as_mut_ptr());
    for (index, seen) in seen.iter().enumerate() {
        let place = polled.wrapping_add(index);
        // SAFETY: the caller's promise, for one of `count` elements.
        unsafe { (*place).revents = seen.revents };
    }
    found
}

/// # Safety
/// As `poll(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn poll(polled: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    let next = next!(poll(*mut pollfd, nfds_t, c_int) -> c_int);
    let wait_for = |polled: *mut pollfd| {
        // SAFETY: the caller's promise, for its set or a copy of it.
        let wait = |timeout| unsafe { next(polled, count, timeout) };
        receive_and_sleep(timeout != 0, true, || wait(0), || wait(timeout))
    };
    // SAFETY: the caller's promise.
    unsafe { wait_for_polled(polled, count, wait_for) }
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
    let next = next!(__poll_chk(*mut pollfd, nfds_t, c_int, size_t) -> c_int);
    let wait_for = |polled: *mut pollfd| {
        // SAFETY: the caller's promise, for its set or a copy of it.
        let wait = |timeout| unsafe { next(polled, count, timeout, room) };
        receive_and_sleep(timeout != 0, true, || wait(0), || wait(timeout))
    };
    // SAFETY: the caller's promise.
    unsafe { wait_for_polled(polled, count, wait_for) }
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
    let next = next!(ppoll(*mut pollfd, nfds_t, *const timespec, *const sigset_t) -> c_int);
    let wait_for = |polled: *mut pollfd| {
        // SAFETY: the caller's promise, for its set or a copy of it.
        let wait = |timeout, signals| unsafe { next(polled, count, timeout, signals) };
        receive_and_sleep(
            timeout.is_null(),
            signals.is_null(),
            || wait(&NO_TIME, NO_MASK),
            || wait(timeout, signals),
        )
    };
    // SAFETY: the caller's promise.
    unsafe { wait_for_polled(polled, count, wait_for) }
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
    let next =
        next!(__ppoll_chk(*mut pollfd, nfds_t, *const timespec, *const sigset_t, size_t) -> c_int);
    let wait_for = |polled: *mut pollfd| {
        // SAFETY: the caller's promise, for its set or a copy of it.
        let wait = |timeout, signals| unsafe { next(polled, count, timeout, signals, room) };
        receive_and_sleep(
            timeout.is_null(),
            signals.is_null(),
            || wait(&NO_TIME, NO_MASK),
            || wait(timeout, signals),
        )
    };
    // SAFETY: the caller's promise.
    unsafe { wait_for_polled(polled, count, wait_for) }
}

/// True if a set has this number, at which a descriptor is open.
///
/// # Safety
/// As for a set given to `select(2)`.
unsafe fn has_selected(set: *const fd_set, fd: c_int) -> bool {
    let (byte, bit) = (usize::try_from(fd / 8).unwrap_or(0), fd % 8);
    if is_nowhere(set) {
        return false;
    }
    // SAFETY: the caller's promise: the set has the bits that the kernel reads. These are not `count`, but at
    // most as many as the process has slots for descriptors; this one is open, so that its bit is among them.
    // Little-endian words are bytes in order.
    let bits = unsafe { set.cast::<u8>().wrapping_add(byte).read() };
    bits & 1 << bit != 0
}

/// Serves the listeners of the first of three sets, before a call waits for them.
///
/// # Errors
/// `EBADF` if they have a number that the program has not opened.
///
/// # Safety
/// As for the sets given to `select(2)`.
unsafe fn check_selected(count: c_int, sets: [*const fd_set; 3]) -> Result<(), Errno> {
    let Some(last) = count.checked_sub(1).and_then(|last| u32::try_from(last).ok()) else {
        return Ok(());
    };
    // SAFETY: the caller's promise, for numbers below `count` of descriptors that are open.
    let is_in = |set: *const fd_set, fd| unsafe { has_selected(set, fd) };
    if any_unserved() {
        let is_waited_for = |fd: &c_int| is_in(sets[0], *fd) || is_in(sets[1], *fd);
        table::within(0, last).filter(is_waited_for).for_each(serve);
    }
    let is_in_some = |fd: c_int| sets.iter().any(|set| is_in(*set, fd)) && is_hidden(fd);
    if hidden::within(0, last).any(is_in_some) { Err(Errno::BADF) } else { Ok(()) }
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
    if let Err(error) = unsafe { check_selected(count, [readable, writable, exceptional]) } {
        return answer_int(Err(error));
    }
    let next = next!(select(c_int, *mut fd_set, *mut fd_set, *mut fd_set, *mut timeval) -> c_int);
    // SAFETY: the caller's promise.
    let wait = || unsafe { next(count, readable, writable, exceptional, timeout) };
    receive_and_sleep(false, true, || 0, wait) // a look would empty the sets
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
    if let Err(error) = unsafe { check_selected(count, [readable, writable, exceptional]) } {
        return answer_int(Err(error));
    }
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
    receive_and_sleep(false, signals.is_null(), || 0, wait) // a look would empty the sets
}
