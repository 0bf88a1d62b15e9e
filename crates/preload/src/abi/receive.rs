//! Calls that receive.

use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

use libc::{iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t, timespec};
use rustix::io::Errno;

use super::next::next;
use super::vectors::{VECTORS_MAX, Vectors};
use super::{address, answer, answer_int};
use crate::ancillary::ControlWriter;
use crate::runtime::running;
use crate::socket::Socket;
use crate::stream::{Stream, StreamMode};
use crate::table;
use crate::udp::{Message, ReceiveMode, Udp};

/// Mode of a call with these flags.
///
/// # Errors
/// `EAGAIN` for the error queue, which is always empty.
fn mode(flags: c_int) -> Result<ReceiveMode, Errno> {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(Errno::AGAIN);
    }
    Ok(ReceiveMode {
        dont_wait: flags & libc::MSG_DONTWAIT != 0,
        peek: flags & libc::MSG_PEEK != 0,
    })
}

/// Length that a call returns: with `MSG_TRUNC` that of the datagram.
fn returned((copied, whole): (usize, usize), flags: c_int) -> usize {
    if flags & libc::MSG_TRUNC != 0 { whole } else { copied }
}

/// Receives into buffers. The sender of a datagram is passed to `sender`.
fn receive(
    socket: &Socket,
    vectors: Vectors<'_>,
    flags: c_int,
    sender: impl FnOnce(std::net::SocketAddr),
) -> Result<usize, Errno> {
    match socket {
        Socket::Udp(udp) => receive_datagram(udp, vectors, flags, sender),
        Socket::Listener(_) => Err(Errno::NOTCONN),
        Socket::Stream(stream) => receive_bytes(stream, vectors, flags),
    }
}

/// Receives bytes of a connection.
fn receive_bytes(stream: &Stream, vectors: Vectors<'_>, flags: c_int) -> Result<usize, Errno> {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(Errno::AGAIN);
    }
    if flags & libc::MSG_OOB != 0 {
        let Some(byte) = stream.receive_urgent()? else { return Ok(0) };
        let mut filler = vectors.filler();
        filler.put(&[byte]);
        return Ok(filler.lens().0);
    }
    let is = |flag| flags & flag != 0;
    let mode = StreamMode {
        dont_wait: is(libc::MSG_DONTWAIT),
        peek: is(libc::MSG_PEEK),
        wait_all: is(libc::MSG_WAITALL),
        discard: is(libc::MSG_TRUNC),
    };
    stream.receive(vectors.rooms(), mode)
}

fn receive_datagram(
    socket: &Udp,
    vectors: Vectors<'_>,
    flags: c_int,
    sender: impl FnOnce(std::net::SocketAddr),
) -> Result<usize, Errno> {
    let mut filler = vectors.filler();
    let mut source = None;
    socket.receive(1, mode(flags)?, |_, message| {
        message.each_piece(|piece| filler.put(piece));
        source = Some(message.source());
    })?;
    if let Some(source) = source {
        sender(source);
    }
    Ok(returned(filler.lens(), flags))
}

/// # Safety
/// As `recvfrom(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    let Some(socket) = table::find(fd) else {
        let next = next!(
            recvfrom(c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t
        );
        // SAFETY: the caller's promise.
        return unsafe { next(fd, buffer, len, flags, from, from_len) };
    };
    let vector = iovec { iov_base: buffer, iov_len: len };
    // SAFETY: the caller's promise.
    let vectors = unsafe { Vectors::one(&vector) };
    if let (Socket::Stream(_), false, false) = (&*socket, from.is_null(), from_len.is_null()) {
        // A connection's peer is not named.
        // SAFETY: the caller's promise.
        unsafe { from_len.write(0) };
    }
    answer(receive(&socket, vectors, flags, |source| {
        // SAFETY: the caller's promise.
        unsafe { address::write_counted(source, from, from_len) };
    }))
}

/// # Safety
/// As `recv(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recv(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let (from, from_len) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the caller's promise; without an address it is the same call.
    unsafe { recvfrom(fd, buffer, len, flags, from, from_len) }
}

/// # Safety
/// As `recvfrom(2)`; ends the program if the buffer is shorter than `len`, as glibc does.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    check_room(len, room);
    // SAFETY: the caller's promise.
    unsafe { recvfrom(fd, buffer, len, flags, from, from_len) }
}

/// # Safety
/// As `recv(2)`; ends the program if the buffer is shorter than `len`, as glibc does.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    check_room(len, room);
    // SAFETY: the caller's promise.
    unsafe { recv(fd, buffer, len, flags) }
}

fn check_room(len: size_t, room: size_t) {
    if len > room {
        eprintln!("*** buffer overflow detected ***: terminated");
        std::process::abort();
    }
}

/// # Safety
/// As `read(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    let Some(socket) = table::find(fd) else {
        let next = next!(read(c_int, *mut c_void, size_t) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, buffer, len) };
    };
    if len == 0 {
        return 0; // receives nothing (`sock_read_iter`)
    }
    let vector = iovec { iov_base: buffer, iov_len: len };
    // SAFETY: the caller's promise.
    let vectors = unsafe { Vectors::one(&vector) };
    answer(receive(&socket, vectors, 0, |_| ()))
}

/// # Safety
/// As `read(2)`; ends the program if the buffer is shorter than `len`, as glibc does.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    room: size_t,
) -> ssize_t {
    check_room(len, room);
    // SAFETY: the caller's promise.
    unsafe { read(fd, buffer, len) }
}

/// # Safety
/// As `readv(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    let Some(socket) = table::find(fd) else {
        let next = next!(readv(c_int, *const iovec, c_int) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, vectors, count) };
    };
    // SAFETY: the caller's promise.
    let vectors = unsafe { Vectors::counted(vectors, count) };
    answer(vectors.and_then(|vectors| receive(&socket, vectors, 0, |_| ())))
}

/// Buffers of a header.
///
/// # Safety
/// As for a header given to `recvmsg(2)`.
unsafe fn vectors_of<'a>(header: &msghdr) -> Result<Vectors<'a>, Errno> {
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
    let (copied, whole) = filler.lens();
    header.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
    if copied < whole {
        header.msg_flags |= libc::MSG_TRUNC;
    }
    if !header.msg_name.is_null() {
        let (name, room) = (header.msg_name.cast(), header.msg_namelen);
        // SAFETY: the caller's promise.
        header.msg_namelen = unsafe { address::write(message.source(), name, room) };
    }
    let room = if header.msg_control.is_null() { 0 } else { header.msg_controllen };
    let mut writer = ControlWriter::new(room);
    if let Message::Taken(datagram) = message {
        let interfaces = running().map_or(&[][..], |runtime| &runtime.interfaces);
        let interface = interfaces.get(usize::from(datagram.device().0)).copied();
        writer.put_datagram(datagram, &socket.settings(), interface.unwrap_or(0));
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

/// Receives into the buffers of a header.
///
/// # Safety
/// As for a header given to `recvmsg(2)`.
unsafe fn receive_header(
    socket: &Socket,
    header: &mut msghdr,
    flags: c_int,
) -> Result<usize, Errno> {
    let stream = match socket {
        Socket::Udp(udp) => {
            // First: a datagram that is taken is gone.
            // SAFETY: the caller's promise.
            unsafe { vectors_of(header) }?;
            let mut len = Ok(0);
            udp.receive(1, mode(flags)?, |_, message| {
                // SAFETY: the caller's promise.
                len = unsafe { fill(header, udp, message, flags) };
            })?;
            return len;
        }
        Socket::Listener(_) => return Err(Errno::NOTCONN),
        Socket::Stream(stream) => stream,
    };
    // SAFETY: the caller's promise.
    let vectors = unsafe { vectors_of(header) }?;
    let len = receive_bytes(stream, vectors, flags)?;
    // A connection's peer is not named, and nothing goes with its bytes.
    header.msg_flags = flags & (libc::MSG_CMSG_CLOEXEC | libc::MSG_OOB);
    (header.msg_namelen, header.msg_controllen) = (0, 0);
    Ok(len)
}

/// # Safety
/// As `recvmsg(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvmsg(fd: c_int, header: *mut msghdr, flags: c_int) -> ssize_t {
    let Some(socket) = table::find(fd) else {
        let next = next!(recvmsg(c_int, *mut msghdr, c_int) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, header, flags) };
    };
    // SAFETY: the caller's promise: valid, and used by nobody else.
    let Some(header) = (unsafe { header.as_mut() }) else { return answer(Err(Errno::FAULT)) };
    // SAFETY: the caller's promise.
    answer(unsafe { receive_header(&socket, header, flags) })
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
    let Some(socket) = table::find(fd) else {
        let next = next!(recvmmsg(c_int, *mut mmsghdr, c_uint, c_int, *mut timespec) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, headers, count, flags, timeout) };
    };
    let count = usize::try_from(count).unwrap_or(0).min(VECTORS_MAX);
    if count == 0 {
        return 0;
    }
    // SAFETY: the caller's promise.
    let headers = unsafe { std::slice::from_raw_parts_mut(headers, count) };
    // SAFETY: the caller's promise.
    let limit = unsafe { timeout.as_ref() }.map(|timeout| {
        let seconds = u64::try_from(timeout.tv_sec).unwrap_or(0);
        Duration::new(seconds, u32::try_from(timeout.tv_nsec).unwrap_or(0))
    });
    let received = match &*socket {
        Socket::Udp(udp) => receive_many(udp, headers, flags, limit),
        // SAFETY: the caller's promise.
        socket => unsafe { receive_each(socket, headers, flags, limit) },
    };
    answer_int(received)
}

/// Receives into the headers in turn: one batch with `MSG_WAITFORONE` or of a socket that does not wait, else
/// until all are filled. The limit is looked at after each batch, as by the kernel.
fn receive_many(
    socket: &Udp,
    headers: &mut [mmsghdr],
    flags: c_int,
    limit: Option<Duration>,
) -> Result<usize, Errno> {
    let began = std::time::Instant::now();
    let mut mode = mode(flags)?;
    let mut done = 0;
    while let Some(rest) = headers.get_mut(done..).filter(|rest| !rest.is_empty()) {
        // SAFETY: the promise of recvmmsg's caller.
        let checked = |header: &mmsghdr| unsafe { vectors_of(&header.msg_hdr) }.err();
        // A datagram that is taken for a header whose buffers are refused would be lost.
        let refused = rest.iter().enumerate().find_map(|(index, it)| Some((index, checked(it)?)));
        let max = match refused {
            Some((0, error)) if done == 0 => return Err(error),
            Some((0, _)) => break,
            Some((index, _)) => index,
            None => rest.len(),
        };
        let received = socket.receive(max, mode, |index, message| {
            let Some(header) = rest.get_mut(index) else { return };
            // SAFETY: the promise of recvmmsg's caller.
            let len = unsafe { fill(&mut header.msg_hdr, socket, message, flags) };
            header.msg_len = len.ok().and_then(|len| len.try_into().ok()).unwrap_or(0);
        });
        match received {
            Ok(count) => done += count,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
        mode.dont_wait |= flags & libc::MSG_WAITFORONE != 0;
        if limit.is_some_and(|limit| began.elapsed() >= limit) {
            break;
        }
    }
    Ok(done)
}

/// Receives into many headers from a connection, one header after the other.
///
/// # Safety
/// As for headers given to `recvmmsg(2)`.
unsafe fn receive_each(
    socket: &Socket,
    headers: &mut [mmsghdr],
    mut flags: c_int,
    limit: Option<Duration>,
) -> Result<usize, Errno> {
    let began = std::time::Instant::now();
    let mut done = 0;
    for header in headers {
        // SAFETY: the caller's promise.
        match unsafe { receive_header(socket, &mut header.msg_hdr, flags) } {
            Ok(len) => header.msg_len = len.try_into().unwrap_or(c_uint::MAX),
            Err(error) if done == 0 => return Err(error),
            Err(error) => {
                if let Socket::Stream(stream) = socket {
                    stream.leave(error);
                }
                break;
            }
        }
        done += 1;
        if flags & libc::MSG_WAITFORONE != 0 {
            flags |= libc::MSG_DONTWAIT;
        }
        if limit.is_some_and(|limit| began.elapsed() >= limit) {
            break;
        }
    }
    Ok(done)
}
