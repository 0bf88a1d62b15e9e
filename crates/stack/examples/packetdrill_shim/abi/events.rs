//! `poll` and `epoll`, pipes, and the error queue.

use std::ffi::{c_int, c_void};
use std::slice;

use libc::{epoll_event, loff_t, msghdr, pollfd, size_t, ssize_t};

use super::{answer, answer_len, bytes_mut, new_descriptor, shim, write_address};
use crate::calls::{Flags, Shim};
use crate::errno::Errno;
use crate::pipes::PIPE_BYTES;
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

pub(super) extern "C" fn pipe(_state: *mut c_void, fds: *mut c_int) -> c_int {
    // SAFETY: the caller's array has two entries.
    unsafe { libc::pipe(fds) }
}

/// Moves bytes between a socket of ours and a pipe of the kernel's.
pub(super) extern "C" fn splice(
    state: *mut c_void,
    from: c_int,
    _from_offset: *mut loff_t,
    to: c_int,
    _to_offset: *mut loff_t,
    len: size_t,
    flags: u32,
) -> ssize_t {
    let shim = shim(state);
    let never_waits = flags & libc::SPLICE_F_NONBLOCK != 0;
    let more_follows = flags & libc::SPLICE_F_MORE != 0;
    let mode = Flags { never_waits, more_follows, ..Flags::default() };
    let len = len.min(PIPE_BYTES);
    if shim.is_socket(from) {
        let taken = match shim.take_for_pipe(from, len, mode) {
            Ok(taken) => taken,
            Err(error) => return answer_len(Err(error)),
        };
        // SAFETY: as many bytes as there are.
        return unsafe { libc::write(to, taken.as_ptr().cast(), taken.len()) };
    }
    let mut bytes = vec![0_u8; len];
    // SAFETY: as many bytes as there is room for.
    let read = unsafe { libc::read(from, bytes.as_mut_ptr().cast(), len) };
    match usize::try_from(read) {
        Ok(read) => answer_len(shim.write(to, &bytes[..read], mode, &[])),
        Err(_) => read,
    }
}

/// Fills in a message with the oldest report of the error queue.
pub(super) fn report(shim: &Shim, fd: c_int, message: &mut msghdr) -> Result<usize, Errno> {
    let report = shim.take_report(fd)?;
    // As many bytes as the caller's buffer has.
    let room = bytes_mut(message.msg_control, message.msg_controllen);
    let (mut at, mut flags) = (0, report.flags | libc::MSG_ERRQUEUE);
    for ((level, kind), data) in report.controls {
        let header = [level, kind].map(i32::to_ne_bytes).concat();
        let len = size_of::<usize>() + header.len() + data.len();
        let Some(place) = room.get_mut(at..at + len) else {
            flags |= libc::MSG_CTRUNC;
            break;
        };
        place.copy_from_slice(&[len.to_ne_bytes().as_slice(), &header, &data].concat());
        at = (at + len.next_multiple_of(size_of::<usize>())).min(room.len());
    }
    (message.msg_controllen, message.msg_flags) = (at, flags);
    match report.peer {
        Some(peer) => write_address(peer, message.msg_name, &raw mut message.msg_namelen),
        None => message.msg_namelen = 0,
    }
    Ok(0)
}
