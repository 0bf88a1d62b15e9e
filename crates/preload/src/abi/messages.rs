//! Calls that receive into headers (`struct msghdr`).

use std::ffi::{c_int, c_uint};
use std::time::{Duration, Instant};

use libc::{mmsghdr, msghdr, ssize_t, timespec};
use rustix::io::Errno;

use super::next::next;
use super::receive::{error_queue, followed, mode, receive_bytes, returned};
use super::relayed::unname;
use super::vectors::Vectors;
use super::{address, answer, answer_int, is_nowhere, unless_moved};
use crate::ancillary::ControlWriter;
use crate::datagram::Message;
use crate::socket::Socket;
use crate::table;
use crate::udp::Udp;

/// Checks the length of the name of a header, before anything is received or sent.
///
/// # Errors
/// `EINVAL` if it is negative (`__copy_msghdr`).
pub(super) fn check_name_len(header: &msghdr) -> Result<(), Errno> {
    let is_negative = i32::try_from(header.msg_namelen).is_err();
    if is_negative && !header.msg_name.is_null() { Err(Errno::INVAL) } else { Ok(()) }
}

/// Checks the flags of a call with headers.
///
/// # Errors
/// `EINVAL` of `MSG_CMSG_COMPAT`, which is the kernel's own.
pub(super) fn check_flags(flags: c_int) -> Result<(), Errno> {
    const MSG_CMSG_COMPAT: c_int = c_int::MIN; // linux/socket.h
    if flags & MSG_CMSG_COMPAT == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

/// Buffers of a header.
///
/// # Safety
/// As for a header given to `recvmsg(2)`.
unsafe fn vectors_of<'a>(header: &msghdr) -> Result<Vectors<'a>, Errno> {
    check_name_len(header)?;
    // SAFETY: the caller's promise.
    unsafe { Vectors::new(header.msg_iov, header.msg_iovlen) }
}

/// Fills a header and its buffers from a message. Returns the length for the caller.
///
/// # Safety
/// As for a header given to `recvmsg(2)`.
unsafe fn fill(
    header: &mut msghdr,
    socket: &Udp,
    message: &Message<'_>,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    let mut filler = unsafe { vectors_of(header) }?.filler();
    message.each_piece(|piece| filler.put(piece));
    let (copied, whole) = filler.lens()?;
    header.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
    if copied < whole {
        header.msg_flags |= libc::MSG_TRUNC;
    }
    if !header.msg_name.is_null() {
        let (name, room) = (header.msg_name.cast(), header.msg_namelen);
        // SAFETY: the caller's promise.
        header.msg_namelen = unsafe { address::write(socket.source_of(message), name, room) }?;
    }
    let room = if is_nowhere(header.msg_control) { 0 } else { header.msg_controllen };
    let mut writer = ControlWriter::new(room);
    let settings = socket.settings();
    if settings.asks_control() {
        writer.put_datagram(&message.about(), &settings, &socket.arrival_of(message));
    }
    let (control, is_truncated) = writer.finish();
    if is_truncated {
        header.msg_flags |= libc::MSG_CTRUNC;
    }
    if !control.is_empty() {
        let to = header.msg_control.cast();
        // SAFETY: the writer has written no more than `room` bytes, which the program has there.
        unsafe { std::ptr::copy_nonoverlapping(control.as_ptr(), to, control.len()) };
    }
    header.msg_controllen = control.len();
    Ok(returned((copied, whole), flags))
}

/// Receives into the buffers of a header, of a call that has filled others if it `has_part`.
///
/// # Safety
/// As for a header given to `recvmsg(2)`.
unsafe fn receive_header(
    socket: &Socket,
    header: &mut msghdr,
    flags: c_int,
    has_part: bool,
) -> Result<usize, Errno> {
    let stream = match socket {
        Socket::Udp(udp) => {
            // First: a datagram that is taken is gone.
            // SAFETY: the caller's promise.
            unsafe { vectors_of(header) }?;
            let mut len = Ok(0);
            let received = udp.receive(1, mode(flags), |_, message| {
                // SAFETY: the caller's promise.
                len = unsafe { fill(header, udp, message, flags) };
            })?;
            if received == 0 {
                set_nameless(header, flags & libc::MSG_CMSG_CLOEXEC);
            }
            return len;
        }
        Socket::Listener(_) => {
            // SAFETY: the caller's promise.
            unsafe { vectors_of(header) }?;
            return Err(Errno::NOTCONN);
        }
        Socket::Stream(stream) => stream,
    };
    // SAFETY: the caller's promise.
    let vectors = unsafe { vectors_of(header) }?;
    let len = receive_bytes(stream, vectors, flags, has_part)?;
    // A connection's peer is not named, and nothing goes with its bytes.
    set_nameless(header, flags & (libc::MSG_CMSG_CLOEXEC | libc::MSG_OOB));
    Ok(len)
}

/// Fills a header of what has no sender, and comes without control messages.
fn set_nameless(header: &mut msghdr, flags: c_int) {
    if !header.msg_name.is_null() {
        header.msg_namelen = 0;
    }
    (header.msg_controllen, header.msg_flags) = (0, flags);
}

type ByHeader = unsafe extern "C" fn(c_int, *mut msghdr, c_int) -> ssize_t;

/// Receives from a socket that is not ours.
///
/// # Safety
/// As `recvmsg(2)`.
unsafe fn received_by_kernel(
    next: ByHeader,
    fd: c_int,
    header: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise.
    let room = if is_nowhere(header) { 0 } else { unsafe { (*header).msg_namelen } };
    // SAFETY: the caller's promise.
    let received = unsafe { next(fd, header, flags) };
    if received >= 0 && room > 0 {
        // SAFETY: valid, as the kernel has written it.
        let header = unsafe { &mut *header };
        // SAFETY: the caller's promise.
        unsafe { unname(fd, header.msg_name.cast(), &raw mut header.msg_namelen, room) };
    }
    received
}

/// # Safety
/// As `recvmsg(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvmsg(fd: c_int, header: *mut msghdr, flags: c_int) -> ssize_t {
    let Some(socket) = table::find_usable(fd) else {
        let next = next!(recvmsg(c_int, *mut msghdr, c_int) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { received_by_kernel(next, fd, header, flags) };
    };
    if let Err(error) = check_flags(flags) {
        return answer(Err(error));
    }
    if let Some(queue) = error_queue(&socket, flags) {
        let next = next!(recvmsg(c_int, *mut msghdr, c_int) -> ssize_t);
        let told = |queue| {
            // SAFETY: the caller's promise, for another socket of the kernel.
            followed(&socket, unsafe { next(queue, header, flags) })
        };
        return queue.map_or_else(|error| answer(Err(error)), told);
    }
    // SAFETY: the caller's promise: valid, and used by nobody else.
    let valid = if is_nowhere(header) { None } else { unsafe { header.as_mut() } };
    let Some(header) = valid else { return answer(Err(Errno::FAULT)) };
    // SAFETY: the caller's promise.
    let received = unsafe { receive_header(&socket, header, flags, false) };
    answer(unless_moved!(socket, received, recvmsg(fd, header, flags)))
}

/// # Safety
/// As `recvmmsg(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    headers: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    let Some(socket) = table::find_usable(fd) else {
        let next = next!(recvmmsg(c_int, *mut mmsghdr, c_uint, c_int, *mut timespec) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, headers, count, flags, timeout) };
    };
    if let Err(error) = check_flags(flags) {
        return answer_int(Err(error));
    }
    let mut limit = match (timeout.is_null(), is_nowhere(timeout)) {
        (true, _) => None,
        (false, true) => return answer_int(Err(Errno::FAULT)),
        // SAFETY: the caller's promise.
        (false, false) => match Limit::of(unsafe { &mut *timeout }) {
            Ok(limit) => Some(limit),
            Err(error) => return answer_int(Err(error)),
        },
    };
    let length = count;
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 {
        return 0;
    }
    if is_nowhere(headers) {
        return answer_int(Err(Errno::FAULT));
    }
    // SAFETY: the caller's promise.
    let headers = unsafe { std::slice::from_raw_parts_mut(headers, count) };
    if let Some(queue) = error_queue(&socket, flags) {
        let next = next!(recvmmsg(c_int, *mut mmsghdr, c_uint, c_int, *mut timespec) -> c_int);
        let told = |queue| {
            // SAFETY: the caller's promise.
            followed(&socket, unsafe { next(queue, headers.as_mut_ptr(), length, flags, timeout) })
        };
        return queue.map_or_else(|error| answer_int(Err(error)), told);
    }
    let received = match &*socket {
        Socket::Udp(udp) => receive_many(udp, headers, flags, limit.as_mut()),
        // SAFETY: the caller's promise.
        socket => unsafe { receive_each(socket, headers, flags, limit.as_mut()) },
    };
    answer_int(unless_moved!(
        socket,
        received,
        recvmmsg(fd, headers.as_mut_ptr(), length, flags, timeout)
    ))
}

/// Time that a call may take for many messages. As in the kernel, it is looked at after each batch alone.
struct Limit<'a> {
    time: Duration,
    began: Instant,
    /// Time that is left, for the program.
    left: &'a mut timespec,
}

impl<'a> Limit<'a> {
    /// # Errors
    /// `EINVAL` for an invalid time.
    fn of(left: &'a mut timespec) -> Result<Self, Errno> {
        let seconds = u64::try_from(left.tv_sec).map_err(|_| Errno::INVAL)?;
        let nanos = u32::try_from(left.tv_nsec).map_err(|_| Errno::INVAL)?;
        if nanos >= 1_000_000_000 {
            return Err(Errno::INVAL);
        }
        Ok(Self { time: Duration::new(seconds, nanos), began: Instant::now(), left })
    }

    /// Writes the time that is left. True if there is none.
    fn is_over(&mut self) -> bool {
        let left = self.time.saturating_sub(self.began.elapsed());
        self.left.tv_sec = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
        self.left.tv_nsec = left.subsec_nanos().into();
        left.is_zero()
    }
}

/// Receives into the headers in turn: one batch with `MSG_WAITFORONE` or of a socket that does not wait, else
/// until all are filled. The limit is looked at after each batch, as by the kernel.
fn receive_many(
    socket: &Udp,
    headers: &mut [mmsghdr],
    flags: c_int,
    mut limit: Option<&mut Limit<'_>>,
) -> Result<usize, Errno> {
    let mut mode = mode(flags);
    let mut done = 0;
    while let Some(rest) = headers.get_mut(done..).filter(|rest| !rest.is_empty()) {
        // The time is looked at after each.
        let asked = if limit.is_some() { 1 } else { rest.len() };
        let max = match batch_max(rest.get(..asked).unwrap_or_default()) {
            Ok(max) => max,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        };
        let mut failed = None;
        let received = socket.receive(max, mode, |index, message| {
            let Some(header) = rest.get_mut(index) else { return };
            // SAFETY: the promise of recvmmsg's caller.
            match unsafe { fill(&mut header.msg_hdr, socket, message, flags) } {
                Ok(len) => header.msg_len = len.try_into().unwrap_or(0),
                Err(error) => failed = Some((index, error)),
            }
        });
        let received = match (received, failed) {
            (Ok(_), Some((0, error))) => Err(error),
            (Ok(_), Some((filled, error))) => {
                socket.set_pending_error(error);
                return Ok(done + filled);
            }
            (received, _) => received,
        };
        match received {
            // The end, which each call finds as an empty message.
            Ok(0) => {
                if let Some(header) = rest.first_mut() {
                    (header.msg_len, header.msg_hdr.msg_namelen) = (0, 0);
                }
                done += 1;
            }
            Ok(count) => done += count,
            Err(error) if done == 0 => return Err(error),
            Err(error) => {
                socket.set_pending_error(error);
                break;
            }
        }
        mode.dont_wait |= flags & libc::MSG_WAITFORONE != 0;
        mode.has_part = true;
        if limit.as_mut().is_some_and(|limit| limit.is_over()) {
            break;
        }
    }
    Ok(done)
}

/// Number of headers that one batch may fill: up to the first without memory, whose datagram is lost as in the kernel, and
/// without the first that is refused, for which none is taken.
///
/// # Errors
/// The refusal of the first header.
fn batch_max(headers: &[mmsghdr]) -> Result<usize, Errno> {
    for (index, header) in headers.iter().enumerate() {
        // SAFETY: the promise of recvmmsg's caller.
        match unsafe { vectors_of(&header.msg_hdr) } {
            Ok(vectors) if vectors.all_accessible() => {}
            Ok(_) => return Ok(index + 1),
            Err(error) if index == 0 => return Err(error),
            Err(_) => return Ok(index),
        }
    }
    Ok(headers.len())
}

/// Receives into many headers from a connection, one header after the other.
///
/// # Safety
/// As for headers given to `recvmmsg(2)`.
unsafe fn receive_each(
    socket: &Socket,
    headers: &mut [mmsghdr],
    mut flags: c_int,
    mut limit: Option<&mut Limit<'_>>,
) -> Result<usize, Errno> {
    if let Socket::Stream(stream) = socket
        && let Some(error) = stream.take_error()?
    {
        return Err(error); // before what can be read
    }
    let mut done = 0;
    for header in headers {
        // SAFETY: the caller's promise.
        match unsafe { receive_header(socket, &mut header.msg_hdr, flags, done > 0) } {
            Ok(len) => header.msg_len = len.try_into().unwrap_or(c_uint::MAX),
            Err(error) if done == 0 => return Err(error),
            Err(error) => {
                if let Socket::Stream(stream) = socket {
                    stream.set_pending_error(error);
                }
                break;
            }
        }
        done += 1;
        if flags & libc::MSG_WAITFORONE != 0 {
            flags |= libc::MSG_DONTWAIT;
        }
        let is_urgent = header.msg_hdr.msg_flags & libc::MSG_OOB != 0;
        if limit.as_mut().is_some_and(|limit| limit.is_over()) || is_urgent {
            break;
        }
    }
    Ok(done)
}
