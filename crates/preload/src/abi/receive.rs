//! Calls that receive into buffers.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;

use libc::{iovec, off_t, size_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;

use super::descriptors::is_hidden;
use super::next::next;
use super::relayed::{room_at, unname};
use super::vectors::Vectors;
use super::{address, answer, is_beyond, number, unless_moved};
use crate::datagram::ReceiveMode;
use crate::socket::Socket;
use crate::stream::{Stream, StreamMode};
use crate::table;
use crate::udp::Udp;

/// Bytes that are discarded without a buffer at a time (`MSG_TRUNC`), and those that a look finds, more than a connection
/// keeps.
const DISCARDED_BYTES_MAX: usize = 1 << 20;
const PEEKED_BYTES_MAX: usize = 16 << 20;

/// Mode of a call with these flags.
pub(super) fn mode(flags: c_int) -> ReceiveMode {
    let is = |flag| flags & flag != 0;
    ReceiveMode { dont_wait: is(libc::MSG_DONTWAIT), peek: is(libc::MSG_PEEK), has_part: false }
}

/// Number of the socket whose error queue a call reads; `None` if it reads none.
pub(super) fn error_queue(socket: &Socket, flags: c_int) -> Option<Result<c_int, Errno>> {
    match socket {
        Socket::Udp(udp) if flags & libc::MSG_ERRQUEUE != 0 => Some(udp.error_queue().map(number)),
        _ => None,
    }
}

/// Result of a call that read the error queue of a socket.
pub(super) fn followed<T: Default + PartialOrd>(socket: &Socket, read: T) -> T {
    if let Socket::Udp(udp) = socket
        && read >= T::default()
    {
        udp.follow_error_queue();
    }
    read
}

/// Length that a call returns: with `MSG_TRUNC` that of the datagram.
pub(super) fn returned((copied, whole): (usize, usize), flags: c_int) -> usize {
    if flags & libc::MSG_TRUNC != 0 { whole } else { copied }
}

/// Receives into buffers. The sender of a datagram is passed to `sender`.
fn receive(
    socket: &Socket,
    vectors: Vectors<'_>,
    flags: c_int,
    sender: impl FnOnce(Option<SocketAddr>) -> Result<(), Errno>,
) -> Result<usize, Errno> {
    match socket {
        Socket::Udp(udp) => receive_datagram(udp, vectors, flags, sender),
        Socket::Listener(_) if flags & libc::MSG_ERRQUEUE != 0 => Err(Errno::AGAIN),
        Socket::Listener(_) => Err(Errno::NOTCONN),
        Socket::Stream(stream) => receive_bytes(stream, vectors, flags, false),
    }
}

/// Receives bytes of a connection. A signal ends the wait of a call that `has_part`, in any case.
pub(super) fn receive_bytes(
    stream: &Stream,
    vectors: Vectors<'_>,
    flags: c_int,
    has_part: bool,
) -> Result<usize, Errno> {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(Errno::AGAIN);
    }
    if flags & libc::MSG_OOB != 0 {
        let peek = flags & libc::MSG_PEEK != 0;
        let Some(byte) = stream.receive_urgent(peek)? else { return Ok(0) };
        if flags & libc::MSG_TRUNC != 0 {
            return Ok(vectors.len_bytes().min(1));
        }
        let mut filler = vectors.filler();
        filler.put(&[byte]);
        return Ok(filler.lens()?.0);
    }
    let is = |flag| flags & flag != 0;
    let mode = StreamMode {
        dont_wait: is(libc::MSG_DONTWAIT),
        peek: is(libc::MSG_PEEK),
        wait_all: is(libc::MSG_WAITALL),
        discard: is(libc::MSG_TRUNC),
        has_part,
    };
    if vectors.len_bytes() == 0 {
        return stream.receive(std::iter::once(&mut [][..]), mode);
    }
    let is_taken = !mode.discard || !mode.peek;
    if vectors.all_accessible() && is_taken {
        return stream.receive(vectors.rooms(), mode);
    }
    if mode.discard {
        // Nothing is written, not even what is only looked at.
        return discard(stream, vectors.len_bytes(), mode);
    }
    // As the kernel: waits for a byte, and leaves it there if the bytes are more than fit before.
    let peeks = StreamMode { peek: true, wait_all: false, ..mode };
    if stream.receive(std::iter::once(&mut [0][..]), peeks)? == 0 {
        return Ok(0);
    }
    let before = vectors.accessible()?;
    if stream.unread_len()? > before.len_bytes() {
        return Err(Errno::FAULT);
    }
    stream.receive(before.rooms(), mode)
}

/// Discards bytes, or only looks at them, as many times as it takes.
fn discard(stream: &Stream, len: usize, mode: StreamMode) -> Result<usize, Errno> {
    let at_once = if mode.peek { PEEKED_BYTES_MAX } else { DISCARDED_BYTES_MAX };
    let mut unwritten = vec![0; len.min(at_once)];
    let mut done = 0;
    while done < len {
        let room = unwritten.len().min(len - done);
        let dont_wait = mode.dont_wait || done > 0 && !mode.wait_all;
        let mode = StreamMode { dont_wait, has_part: mode.has_part || done > 0, ..mode };
        match stream.receive(std::iter::once(&mut unwritten[..room]), mode) {
            Ok(some) => {
                done += some;
                // The stream has no more, or has ended.
                if some < room || mode.peek {
                    break;
                }
            }
            Err(error) if done == 0 => return Err(error),
            Err(error) => {
                stream.set_pending_error(error);
                break;
            }
        }
    }
    Ok(done)
}

fn receive_datagram(
    socket: &Udp,
    vectors: Vectors<'_>,
    flags: c_int,
    sender: impl FnOnce(Option<SocketAddr>) -> Result<(), Errno>,
) -> Result<usize, Errno> {
    let mut filler = vectors.filler();
    let mut source = None;
    socket.receive(1, mode(flags), |_, message| {
        message.each_piece(|piece| filler.put(piece));
        source = Some(socket.source_of(message));
    })?;
    let lens = filler.lens()?;
    sender(source)?;
    Ok(returned(lens, flags))
}

/// Receives into buffers of `readv`, which does nothing without room.
fn read_all(socket: &Socket, vectors: Vectors<'_>, flags: c_int) -> Result<usize, Errno> {
    if vectors.len_bytes() == 0 { Ok(0) } else { receive(socket, vectors, flags, |_| Ok(())) }
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
    let Some(socket) = table::find_usable(fd) else {
        let next = next!(
            recvfrom(c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t
        );
        // SAFETY: the caller's promise.
        let room = unsafe { room_at(from_len) };
        // SAFETY: the caller's promise.
        let received = unsafe { next(fd, buffer, len, flags, from, from_len) };
        if received >= 0 && !from.is_null() {
            // SAFETY: the caller's promise.
            unsafe { unname(fd, from, from_len, room) };
        }
        return received;
    };
    if let Some(queue) = error_queue(&socket, flags) {
        let next = next!(
            recvfrom(c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t
        );
        let told = |queue| {
            // SAFETY: the caller's promise, for another socket of the kernel.
            followed(&socket, unsafe { next(queue, buffer, len, flags, from, from_len) })
        };
        return queue.map_or_else(|error| answer(Err(error)), told);
    }
    let vector = iovec { iov_base: buffer, iov_len: len };
    // SAFETY: the caller's promise.
    let vectors = match unsafe { Vectors::one(&vector) } {
        Ok(vectors) => vectors,
        Err(error) => return answer(Err(error)),
    };
    let name = |source| match source {
        _ if from.is_null() => Ok(()),
        // SAFETY: the caller's promise.
        Some(source) => unsafe { address::write_counted(source, from, from_len) },
        // SAFETY: the caller's promise.
        None => unsafe { address::write_nameless(from_len) },
    };
    // A connection's peer is not named.
    let is_stream = matches!(&*socket, Socket::Stream(_));
    let received = receive(&socket, vectors, flags, name);
    let received =
        unless_moved!(socket, received, recvfrom(fd, buffer, len, flags, from, from_len));
    answer(received.and_then(|len| if is_stream { name(None).map(|()| len) } else { Ok(len) }))
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
        report!("*** buffer overflow detected ***: terminated");
        std::process::abort();
    }
}

/// # Safety
/// As `read(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    let Some(socket) = table::find_usable(fd) else {
        if is_hidden(fd) {
            return answer(Err(Errno::BADF));
        }
        let next = next!(read(c_int, *mut c_void, size_t) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, buffer, len) };
    };
    if len == 0 {
        return 0; // receives nothing (`sock_read_iter`)
    }
    if is_beyond(buffer, len) {
        return answer(Err(Errno::FAULT));
    }
    let vector = iovec { iov_base: buffer, iov_len: len };
    // SAFETY: the caller's promise.
    let vectors = unsafe { Vectors::one(&vector) };
    let received = vectors.and_then(|vectors| receive(&socket, vectors, 0, |_| Ok(())));
    answer(unless_moved!(socket, received, read(fd, buffer, len)))
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
    let Some(socket) = table::find_usable(fd) else {
        if is_hidden(fd) {
            return answer(Err(Errno::BADF));
        }
        let next = next!(readv(c_int, *const iovec, c_int) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, vectors, count) };
    };
    // SAFETY: the caller's promise.
    let checked = unsafe { Vectors::counted(vectors, count) };
    let received = checked.and_then(|checked| read_all(&socket, checked, 0));
    answer(unless_moved!(socket, received, readv(fd, vectors, count)))
}

/// # Safety
/// As `preadv2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn preadv2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    let Some(socket) = table::find_usable(fd).filter(|_| offset == -1) else {
        let next = next!(preadv2(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t);
        // SAFETY: the caller's promise. An offset is refused for the descriptor of a socket of ours, too.
        return unsafe { next(fd, vectors, count, offset, flags) };
    };
    // SAFETY: the caller's promise.
    let checked = unsafe { Vectors::counted(vectors, count) };
    let (checked, asked) = match checked.and_then(|vectors| vectors.with_flags(flags)) {
        Ok(checked) => checked,
        Err(error) => return answer(Err(error)),
    };
    let received = read_all(&socket, checked, asked);
    answer(unless_moved!(socket, received, preadv2(fd, vectors, count, offset, flags)))
}

/// # Safety
/// As `preadv2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn preadv64v2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise; on 64 bits both are one function.
    unsafe { preadv2(fd, vectors, count, offset, flags) }
}
