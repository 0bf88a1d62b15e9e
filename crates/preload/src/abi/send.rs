//! Calls that send.

use std::ffi::{c_int, c_uint, c_void};

use libc::{iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;

use super::next::next;
use super::vectors::{VECTORS_MAX, Vectors};
use super::{address, answer_int, answer_sent};
use crate::ancillary::SendControl;
use crate::runtime::running;
use crate::socket::Socket;
use crate::stream::SendMode;
use crate::table;
use crate::udp::Udp;

/// True if a call with these flags does not wait.
///
/// # Errors
/// `EOPNOTSUPP` for data out of band, as of UDP, and for datagrams in pieces (`MSG_MORE`).
fn dont_wait(flags: c_int) -> Result<bool, Errno> {
    if flags & (libc::MSG_OOB | libc::MSG_MORE) != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(flags & libc::MSG_DONTWAIT != 0)
}

/// Sends buffers: as a datagram, or as bytes of a connection.
fn send_all(
    socket: &Socket,
    vectors: Vectors<'_>,
    to: Option<std::net::SocketAddr>,
    flags: c_int,
) -> Result<usize, Errno> {
    match socket {
        Socket::Udp(udp) => {
            udp.send(&vectors.gather(), to, SendControl::default(), dont_wait(flags)?)
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
            stream.send(vectors.pieces(), mode)
        }
    }
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
    let Some(socket) = table::find(fd) else {
        let next = next!(
            sendto(c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t
        );
        // SAFETY: the caller's promise.
        return unsafe { next(fd, buffer, len, flags, to, to_len) };
    };
    let vector = iovec { iov_base: buffer.cast_mut(), iov_len: len };
    // SAFETY: the caller's promise.
    let vectors = unsafe { Vectors::one(&vector) };
    // The address is of no concern to a connection.
    let is_named = !to.is_null() && matches!(&*socket, Socket::Udp(_));
    // SAFETY: the caller's promise.
    let to = is_named.then(|| unsafe { address::read(to, to_len) }).transpose();
    answer_sent(to.and_then(|to| send_all(&socket, vectors, to, flags)), flags)
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
    if table::find(fd).is_some() {
        // SAFETY: the caller's promise.
        return unsafe { send(fd, buffer, len, 0) };
    }
    let next = next!(write(c_int, *const c_void, size_t) -> ssize_t);
    // SAFETY: the caller's promise.
    unsafe { next(fd, buffer, len) }
}

/// # Safety
/// As `writev(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    let Some(socket) = table::find(fd) else {
        let next = next!(writev(c_int, *const iovec, c_int) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, vectors, count) };
    };
    // SAFETY: the caller's promise.
    let vectors = unsafe { Vectors::counted(vectors, count) };
    answer_sent(vectors.and_then(|vectors| send_all(&socket, vectors, None, 0)), 0)
}

/// Sends the message of a header.
///
/// # Safety
/// As for a header given to `sendmsg(2)`.
unsafe fn send_header(socket: &Socket, header: &msghdr, flags: c_int) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    let vectors = unsafe { Vectors::new(header.msg_iov, header.msg_iovlen) }?;
    let Socket::Udp(udp) = socket else { return send_all(socket, vectors, None, flags) };
    // SAFETY: the caller's promise.
    unsafe { send_datagram(udp, header, vectors, flags) }
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
    let to = if header.msg_name.is_null() {
        None
    } else {
        // SAFETY: the caller's promise.
        Some(unsafe { address::read(header.msg_name.cast(), header.msg_namelen) }?)
    };
    let control = if header.msg_control.is_null() || header.msg_controllen == 0 {
        SendControl::default()
    } else {
        let control = header.msg_control.cast::<u8>();
        // SAFETY: the caller's promise; not null.
        let bytes = unsafe { std::slice::from_raw_parts(control, header.msg_controllen) };
        SendControl::read(bytes, &running()?.interfaces)?
    };
    socket.send(&vectors.gather(), to, control, dont_wait(flags)?)
}

/// # Safety
/// As `sendmsg(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendmsg(fd: c_int, header: *const msghdr, flags: c_int) -> ssize_t {
    let Some(socket) = table::find(fd) else {
        let next = next!(sendmsg(c_int, *const msghdr, c_int) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, header, flags) };
    };
    // SAFETY: the caller's promise.
    let Some(header) = (unsafe { header.as_ref() }) else {
        return answer_sent(Err(Errno::FAULT), flags);
    };
    // SAFETY: the caller's promise.
    answer_sent(unsafe { send_header(&socket, header, flags) }, flags)
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
    let Some(socket) = table::find(fd) else {
        let next = next!(sendmmsg(c_int, *mut mmsghdr, c_uint, c_int) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, headers, count, flags) };
    };
    let count = usize::try_from(count).unwrap_or(0).min(VECTORS_MAX);
    if count == 0 {
        return 0;
    }
    // SAFETY: the caller's promise.
    let headers = unsafe { std::slice::from_raw_parts_mut(headers, count) };
    let mut sent = 0;
    for header in headers {
        // SAFETY: the caller's promise.
        match unsafe { send_header(&socket, &header.msg_hdr, flags) } {
            Ok(len) => header.msg_len = len.try_into().unwrap_or(c_uint::MAX),
            Err(error) if sent == 0 => return answer_int(Err(error)),
            Err(_) => break,
        }
        sent += 1;
    }
    answer_int(Ok(sent))
}
