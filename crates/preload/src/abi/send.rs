//! Calls that send.

use std::borrow::Cow;
use std::ffi::{c_int, c_uint, c_void};
use std::net::SocketAddr;

use libc::{iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;

use super::descriptors::is_hidden;
use super::messages::{check_flags, check_name_len};
use super::next::next;
use super::relayed::give_passed;
use super::vectors::{VECTORS_MAX, Vectors};
use super::{address, answer, answer_int, answer_sent, is_beyond, is_nowhere, unless_moved};
use crate::ancillary::SendControl;
use crate::datagram::{DatagramFamily, DatagramMode, OutgoingDatagram, SocketFamily};
use crate::errno::MOVED;
use crate::runtime::running;
use crate::socket::Socket;
use crate::stream::SendMode;
use crate::table;
use crate::udp::Udp;

/// Bytes of the longest address (`struct sockaddr_storage`).
const NAME_BYTES_MAX: socklen_t = 128;

/// Flag of a call that sends nothing (linux/socket.h).
const MSG_PROBE: c_int = 0x10;

/// Mode of a call with these flags, on a UDP socket.
fn datagram_mode(flags: c_int) -> DatagramMode {
    let is = |flag| flags & flag != 0;
    DatagramMode {
        dont_wait: is(libc::MSG_DONTWAIT),
        more_follows: is(libc::MSG_MORE),
        is_urgent: is(libc::MSG_OOB),
        is_probe: is(MSG_PROBE),
    }
}

/// Message of the program, for a UDP socket.
struct Message<'a> {
    vectors: Vectors<'a>,
    /// Address and its length, if the program names one.
    name: Option<(*const sockaddr, socklen_t)>,
    control: Option<(*const u8, usize)>,
}

impl<'a> OutgoingDatagram<'a> for Message<'a> {
    fn len_bytes(&self) -> usize {
        self.vectors.len_bytes()
    }

    fn destination(&self, socket: SocketFamily) -> Result<Option<SocketAddr>, Errno> {
        let Some((name, len)) = self.name else { return Ok(None) };
        // SAFETY: the promise of the call's caller.
        unsafe { address::read_destination(name, len, socket) }
    }

    fn control(&self, family: DatagramFamily) -> Result<SendControl, Errno> {
        let Some((control, len)) = self.control else { return Ok(SendControl::default()) };
        // SAFETY: the promise of the call's caller; the memory may be the program's.
        let bytes = unsafe { std::slice::from_raw_parts(control, len) };
        SendControl::read(bytes, family, &running()?.interfaces)
    }

    fn payload(&self) -> Result<Cow<'a, [u8]>, Errno> {
        self.vectors.gather()
    }
}

/// Flags that decide on SIGPIPE: `EPIPE` of a UDP socket never raises it.
fn signal_flags(socket: &Socket, flags: c_int) -> c_int {
    if matches!(socket, Socket::Udp(_)) { flags | libc::MSG_NOSIGNAL } else { flags }
}

/// Sends buffers: as a datagram, or as bytes of a connection.
fn send_all(
    socket: &Socket,
    vectors: Vectors<'_>,
    name: Option<(*const sockaddr, socklen_t)>,
    flags: c_int,
) -> Result<usize, Errno> {
    match socket {
        Socket::Udp(udp) => {
            udp.send(&Message { vectors, name, control: None }, datagram_mode(flags))
        }
        Socket::Listener(_) => Err(Errno::PIPE),
        Socket::Stream(stream) => {
            let is = |flag| flags & flag != 0;
            let mode = SendMode {
                dont_wait: is(libc::MSG_DONTWAIT),
                more_follows: is(libc::MSG_MORE),
                ends_record: is(libc::MSG_EOR),
                is_urgent: is(libc::MSG_OOB),
            };
            if is(libc::MSG_FASTOPEN) {
                return Err(stream.refuse_opening());
            }
            if !vectors.all_accessible() {
                return Err(Errno::FAULT);
            }
            stream.send(vectors.pieces(), mode)
        }
    }
}

/// Sends buffers of `writev`, which does nothing without a byte.
fn write_all(socket: &Socket, vectors: Vectors<'_>, flags: c_int) -> Result<usize, Errno> {
    if vectors.len_bytes() == 0 { Ok(0) } else { send_all(socket, vectors, None, flags) }
}

/// # Safety
/// As `sendto(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    let Some(socket) = table::find_usable(fd) else {
        let next = next!(
            sendto(c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t
        );
        // SAFETY: the caller's promise.
        return unsafe { next(fd, buffer, len, flags, to, to_len) };
    };
    let vector = iovec { iov_base: buffer.cast_mut(), iov_len: len };
    // SAFETY: the caller's promise.
    let vectors = match unsafe { Vectors::one(&vector) } {
        Ok(vectors) => vectors,
        Err(error) => return answer_sent(Err(error), libc::MSG_NOSIGNAL),
    };
    let name = (!to.is_null()).then_some((to, to_len));
    if let Some((to, to_len)) = name
        && let Err(error) = address::check(to, to_len)
    {
        return answer_sent(Err(error), libc::MSG_NOSIGNAL);
    }
    let signal = signal_flags(&socket, flags);
    let sent = send_all(&socket, vectors, name, flags);
    answer_sent(unless_moved!(socket, sent, sendto(fd, buffer, len, flags, to, to_len)), signal)
}

/// # Safety
/// As `send(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn send(
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise; without an address it is the same call.
    unsafe { sendto(fd, buffer, len, flags, std::ptr::null(), 0) }
}

/// # Safety
/// As `write(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t {
    if table::find_usable(fd).is_some() {
        if is_beyond(buffer, len) {
            return answer(Err(Errno::FAULT));
        }
        // SAFETY: the caller's promise.
        return unsafe { send(fd, buffer, len, 0) };
    }
    if is_hidden(fd) {
        return answer(Err(Errno::BADF));
    }
    let next = next!(write(c_int, *const c_void, size_t) -> ssize_t);
    // SAFETY: the caller's promise.
    unsafe { next(fd, buffer, len) }
}

/// # Safety
/// As `writev(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    let Some(socket) = table::find_usable(fd) else {
        if is_hidden(fd) {
            return answer(Err(Errno::BADF));
        }
        let next = next!(writev(c_int, *const iovec, c_int) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, vectors, count) };
    };
    // SAFETY: the caller's promise.
    let checked = unsafe { Vectors::counted(vectors, count) };
    let signal = signal_flags(&socket, 0);
    let sent = checked.and_then(|checked| write_all(&socket, checked, 0));
    answer_sent(unless_moved!(socket, sent, writev(fd, vectors, count)), signal)
}

/// # Safety
/// As `pwritev2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pwritev2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    let Some(socket) = table::find_usable(fd).filter(|_| offset == -1) else {
        let next = next!(pwritev2(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t);
        // SAFETY: the caller's promise. An offset is refused for the descriptor of a socket of ours, too.
        return unsafe { next(fd, vectors, count, offset, flags) };
    };
    // SAFETY: the caller's promise.
    let checked = unsafe { Vectors::counted(vectors, count) };
    let (checked, asked) = match checked.and_then(|vectors| vectors.with_flags(flags)) {
        Ok(checked) => checked,
        Err(error) => return answer_sent(Err(error), libc::MSG_NOSIGNAL),
    };
    let signal = signal_flags(&socket, asked);
    let sent = write_all(&socket, checked, asked);
    let sent = unless_moved!(socket, sent, pwritev2(fd, vectors, count, offset, flags));
    answer_sent(sent, signal)
}

/// # Safety
/// As `pwritev2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pwritev64v2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise; on 64 bits both are one function.
    unsafe { pwritev2(fd, vectors, count, offset, flags) }
}

/// Sends the message of a header.
///
/// # Safety
/// As for a header given to `sendmsg(2)`.
unsafe fn send_header(socket: &Socket, header: &msghdr, flags: c_int) -> Result<usize, Errno> {
    check_flags(flags)?;
    check_name_len(header)?;
    // SAFETY: the caller's promise.
    let vectors = unsafe { Vectors::new(header.msg_iov, header.msg_iovlen) }?;
    let Socket::Udp(udp) = socket else {
        if let Some((name, len)) = name_of(header) {
            address::check(name, len)?;
        }
        if let Some((control, len)) = control_of(header)? {
            // SAFETY: the caller's promise; the memory may be the program's.
            SendControl::check_stream(unsafe { std::slice::from_raw_parts(control, len) })?;
        }
        return send_all(socket, vectors, None, flags);
    };
    // SAFETY: the caller's promise.
    unsafe { send_datagram(udp, header, vectors, flags) }
}

/// Name in a header, if there is one, and its length: one that is too long is cut.
fn name_of(header: &msghdr) -> Option<(*const sockaddr, socklen_t)> {
    let is_named = !header.msg_name.is_null() && header.msg_namelen > 0;
    let len = header.msg_namelen.min(NAME_BYTES_MAX);
    is_named.then_some((header.msg_name.cast_const().cast(), len))
}

/// Control messages of a header, and their length, if there are some.
pub(super) fn control_of(header: &msghdr) -> Result<Option<(*const u8, usize)>, Errno> {
    let control = header.msg_control.cast_const().cast();
    match header.msg_controllen {
        0 => Ok(None),
        len if i32::try_from(len).is_err() => Err(Errno::NOBUFS),
        _ if is_nowhere(control) => Err(Errno::FAULT),
        len => Ok(Some((control, len))),
    }
}

/// Sends the datagram of a header.
///
/// # Safety
/// As for a header given to `sendmsg(2)`.
unsafe fn send_datagram(
    socket: &Udp,
    header: &msghdr,
    vectors: Vectors<'_>,
    flags: c_int,
) -> Result<usize, Errno> {
    let name = name_of(header);
    if let Some((name, len)) = name {
        address::check(name, len)?;
    }
    let control = control_of(header)?;
    socket.send(&Message { vectors, name, control }, datagram_mode(flags))
}

/// True if a connection has taken a part of a message, of which it sent so many bytes.
///
/// # Safety
/// As for a header given to `sendmsg(2)`.
unsafe fn is_in_part(socket: &Socket, header: &msghdr, sent_bytes: usize) -> bool {
    // SAFETY: the caller's promise.
    let whole = || unsafe { Vectors::new(header.msg_iov, header.msg_iovlen) };
    matches!(socket, Socket::Stream(_)) && whole().is_ok_and(|whole| sent_bytes < whole.len_bytes())
}

/// # Safety
/// As `sendmsg(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendmsg(fd: c_int, header: *const msghdr, flags: c_int) -> ssize_t {
    let Some(socket) = table::find_usable(fd) else {
        // SAFETY: the caller's promise.
        unsafe { give_passed(header) };
        let next = next!(sendmsg(c_int, *const msghdr, c_int) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, header, flags) };
    };
    // SAFETY: the caller's promise.
    let valid = if is_nowhere(header) { None } else { unsafe { header.as_ref() } };
    let Some(header) = valid else {
        return answer_sent(Err(Errno::FAULT), flags);
    };
    let signal = signal_flags(&socket, flags);
    // SAFETY: the caller's promise.
    let sent = unsafe { send_header(&socket, header, flags) };
    answer_sent(unless_moved!(socket, sent, sendmsg(fd, header, flags)), signal)
}

/// # Safety
/// As `sendmmsg(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    headers: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let Some(socket) = table::find_usable(fd) else {
        let headers_count =
            if is_nowhere(headers) { 0 } else { usize::try_from(count).unwrap_or(0) };
        for index in 0..headers_count.min(VECTORS_MAX) {
            // The structure begins with the header of `sendmsg`.
            let header = headers.wrapping_add(index).cast::<msghdr>();
            // SAFETY: the caller's promise, for one of `count` headers.
            unsafe { give_passed(header) };
        }
        let next = next!(sendmmsg(c_int, *mut mmsghdr, c_uint, c_int) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, headers, count, flags) };
    };
    if let Err(error) = check_flags(flags) {
        return answer_int(Err(error));
    }
    let length = count;
    let count = usize::try_from(count).unwrap_or(0).min(VECTORS_MAX);
    if count == 0 {
        return 0;
    }
    if is_nowhere(headers) {
        return answer_int(Err(Errno::FAULT));
    }
    // SAFETY: the caller's promise.
    let headers = unsafe { std::slice::from_raw_parts_mut(headers, count) };
    let mut sent = 0;
    for header in &mut *headers {
        // SAFETY: the caller's promise.
        match unsafe { send_header(&socket, &header.msg_hdr, flags) } {
            Ok(len) => {
                header.msg_len = len.try_into().unwrap_or(c_uint::MAX);
                // SAFETY: the caller's promise.
                if unsafe { is_in_part(&socket, &header.msg_hdr, len) } {
                    return sent + 1; // no other follows one that was sent in part
                }
            }
            Err(error) => {
                if error == MOVED && sent > 0 {
                    return sent;
                }
                let failed = unless_moved!(
                    socket,
                    Err::<usize, _>(error),
                    sendmmsg(fd, headers.as_mut_ptr(), length, flags)
                );
                // Raises the signal also if some have been sent.
                let told = answer_sent(failed, signal_flags(&socket, flags));
                return if sent > 0 { sent } else { c_int::try_from(told).unwrap_or(-1) };
            }
        }
        sent += 1;
    }
    sent
}
