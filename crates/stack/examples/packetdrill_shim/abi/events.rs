//! `poll` and `epoll`; pipes, which sockets of ours do not know.

use std::ffi::{c_int, c_void};
use std::slice;

use libc::{epoll_event, loff_t, pollfd, size_t, ssize_t};

use super::{answer, answer_len, new_descriptor, shim};
use crate::errno::Errno;
use crate::polls::Polled;

pub(super) extern "C" fn poll(
    state: *mut c_void,
    fds: *mut pollfd,
    count: u64,
    timeout_ms: c_int,
) -> c_int {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller's array has that many entries.
    let fds = unsafe { slice::from_raw_parts_mut(fds, count) };
    let mut polled: Vec<Polled> =
        fds.iter().map(|entry| Polled { fd: entry.fd, events: entry.events, revents: 0 }).collect();
    let timeout_us = u64::try_from(timeout_ms).ok().map(|ms| ms * 1000);
    let result = shim(state).poll(&mut polled, timeout_us);
    for (entry, polled) in fds.iter_mut().zip(&polled) {
        entry.revents = polled.revents;
    }
    answer(result)
}

pub(super) extern "C" fn epoll_create(state: *mut c_void, _size: c_int) -> c_int {
    shim(state).epoll_create(new_descriptor())
}

pub(super) extern "C" fn epoll_ctl(
    state: *mut c_void,
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let event = if event.is_null() {
        epoll_event { events: 0, u64: 0 }
    } else {
        // SAFETY: not null, and then an event of the caller; it is packed.
        unsafe { event.read_unaligned() }
    };
    answer(shim(state).epoll_ctl((epoll, fd), operation, (event.events, event.u64)))
}

pub(super) extern "C" fn epoll_wait(
    state: *mut c_void,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout_ms: c_int,
) -> c_int {
    let Some(count) = usize::try_from(count).ok().filter(|&count| count > 0) else {
        return answer(Err(Errno(libc::EINVAL)));
    };
    let timeout_us = u64::try_from(timeout_ms).ok().map(|ms| ms * 1000);
    answer(shim(state).epoll_wait(epoll, count, timeout_us).map(|told| {
        for (at, &(bits, data)) in told.iter().enumerate() {
            let event = epoll_event { events: bits, u64: data };
            // SAFETY: the caller's array has `count` entries, and no more are told.
            let place = unsafe { events.add(at) };
            // SAFETY: as above; entries are packed.
            unsafe { place.write_unaligned(event) };
        }
        i32::try_from(told.len()).unwrap_or(i32::MAX)
    }))
}

pub(super) extern "C" fn pipe(_state: *mut c_void, _fds: *mut c_int) -> c_int {
    answer(Err(Errno(libc::ENOSYS)))
}

pub(super) extern "C" fn splice(
    _state: *mut c_void,
    _from: c_int,
    _from_offset: *mut loff_t,
    _to: c_int,
    _to_offset: *mut loff_t,
    _len: size_t,
    _flags: u32,
) -> ssize_t {
    answer_len(Err(Errno(libc::ENOSYS)))
}
