//! sendfile and splice.

use std::ffi::{c_int, c_uint};
use std::os::fd::AsRawFd;

use libc::{loff_t, off_t, size_t, ssize_t};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use super::descriptors::unless_hidden;
use super::next::next;
use super::{answer, answer_sent, is_nowhere, unless_moved, with_number};
use crate::critical::outside;
use crate::socket::Socket;
use crate::stream::{SendMode, Stream, StreamMode};
use crate::table;

/// Bytes that are copied from a file at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// Flags that `splice` knows.
const SPLICE_FLAGS: c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

/// # Safety
/// As `sendfile(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendfile(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    len: size_t,
) -> ssize_t {
    let (to, from) = (unless_hidden(to), unless_hidden(from));
    let offset_at = offset;
    let Some(socket) = table::find(to) else {
        let next = next!(sendfile(c_int, c_int, *mut off_t, size_t) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(to, from, offset, len) };
    };
    if !offset.is_null() && is_nowhere(offset) {
        return answer(Err(Errno::FAULT));
    }
    let stream = match &*socket {
        Socket::Stream(stream) => stream,
        Socket::Listener(_) => return answer_sent(Err(Errno::PIPE), 0),
        Socket::Udp(_) => return answer(Err(Errno::INVAL)),
    };
    // SAFETY: the caller's promise; null, or an address of the program.
    let sent = match unsafe { offset.as_mut() } {
        Some(offset) => send_from(stream, from, offset, len),
        None => send_from_position(stream, from, len),
    };
    answer_sent(unless_moved!(socket, sent, sendfile(to, from, offset_at, len)), 0)
}

/// # Safety
/// As `sendfile(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendfile64(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    len: size_t,
) -> ssize_t {
    // SAFETY: the caller's promise; on 64 bits both are one function.
    unsafe { sendfile(to, from, offset, len) }
}

/// Sends a part of a file, and advances the offset by what was sent.
fn send_from(stream: &Stream, from: c_int, offset: &mut off_t, len: usize) -> Result<usize, Errno> {
    let mut buffer = vec![0; CHUNK_BYTES.min(len)];
    let mut sent = 0;
    while sent < len {
        let count = buffer.len().min(len - sent);
        // SAFETY: `count` bytes of the buffer can be written.
        let read = unsafe { libc::pread(from, buffer.as_mut_ptr().cast(), count, *offset) };
        let Ok(read) = usize::try_from(read) else {
            return match super::last_error() {
                _ if sent > 0 => Ok(sent),
                Errno::ISDIR => Err(Errno::INVAL),
                error => Err(error),
            };
        };
        let Some(bytes) = buffer.get(..read).filter(|bytes| !bytes.is_empty()) else { break };
        let mode =
            SendMode { more_follows: read == count && sent + read < len, ..SendMode::default() };
        match stream.send(std::iter::once(bytes), mode) {
            Ok(written) => {
                sent += written;
                *offset += off_t::try_from(written).unwrap_or(0);
                if written < read {
                    break;
                }
            }
            Err(_) if sent > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(sent)
}

/// Sends a part of a file from its position on, and advances that by what was sent.
fn send_from_position(stream: &Stream, from: c_int, len: usize) -> Result<usize, Errno> {
    // SAFETY: the call touches no memory.
    let mut offset = unsafe { libc::lseek(from, 0, libc::SEEK_CUR) };
    if offset < 0 {
        return Err(match super::last_error() {
            Errno::BADF => Errno::BADF,
            // Not of a pipe, which cannot be read twice if the connection does not take all.
            _ => Errno::INVAL,
        });
    }
    let sent = send_from(stream, from, &mut offset, len);
    // SAFETY: as above.
    unsafe { libc::lseek(from, offset, libc::SEEK_SET) };
    sent
}

/// # Safety
/// As `splice(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut loff_t,
    to: c_int,
    to_offset: *mut loff_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let (from, to) = (unless_hidden(from), unless_hidden(to));
    let (source, sink) = (table::find(from), table::find(to));
    if source.is_some() || sink.is_some() {
        let (has_from_offset, has_to_offset) = (!from_offset.is_null(), !to_offset.is_null());
        let spliced = match (source.as_deref(), sink.as_deref()) {
            (Some(Socket::Stream(stream)), None) => {
                let (has_offset, has_pipe_offset) = (has_from_offset, has_to_offset);
                to_pipe(stream, to, &Splice { len, flags, has_offset, has_pipe_offset })
            }
            (None, Some(Socket::Stream(stream))) => {
                let (has_pipe_offset, has_offset) = (has_from_offset, has_to_offset);
                from_pipe(from, stream, &Splice { len, flags, has_offset, has_pipe_offset })
            }
            (Some(Socket::Listener(_)), None) if check_pipe(to).is_ok() => Err(Errno::NOTCONN),
            (None, Some(Socket::Listener(_))) if check_pipe(from).is_ok() => Err(Errno::PIPE),
            _ => Err(Errno::INVAL),
        };
        let both = (source, sink);
        let anew =
            unless_moved!(both, spliced, splice(from, from_offset, to, to_offset, len, flags));
        return answer_sent(anew, 0);
    }
    let next = next!(splice(c_int, *mut loff_t, c_int, *mut loff_t, size_t, c_uint) -> ssize_t);
    // SAFETY: the caller's promise.
    unsafe { next(from, from_offset, to, to_offset, len, flags) }
}

/// Call that moves bytes between a pipe and a connection.
struct Splice {
    /// Bytes to be moved, at most.
    len: usize,
    flags: c_uint,
    /// True with an offset of the connection.
    has_offset: bool,
    /// True with an offset of the pipe.
    has_pipe_offset: bool,
}

/// Checks a call.
fn check_splice(pipe: c_int, call: &Splice) -> Result<(), Errno> {
    if call.flags & !SPLICE_FLAGS != 0 {
        return Err(Errno::INVAL);
    }
    check_pipe(pipe)?;
    match (call.has_pipe_offset, call.has_offset) {
        (false, false) => Ok(()),
        (true, _) => Err(Errno::SPIPE),
        (false, true) => Err(Errno::INVAL),
    }
}

/// # Errors
/// `EINVAL` if the descriptor is none of a pipe; `EBADF`.
fn check_pipe(pipe: c_int) -> Result<(), Errno> {
    if pipe < 0 {
        return Err(Errno::BADF);
    }
    let file = with_number(pipe, |pipe| rustix::fs::fstat(pipe))?;
    let is_pipe = file.st_mode & libc::S_IFMT == libc::S_IFIFO;
    if is_pipe { Ok(()) } else { Err(Errno::INVAL) }
}

/// Events of a pipe, after those asked for, an error or the end of the other side have come.
fn polled(pipe: c_int, asked: PollFlags, waits: bool) -> Result<PollFlags, Errno> {
    let at_once = Timespec::default();
    with_number(pipe, |pipe| {
        let mut polled = [PollFd::new(&pipe, asked)];
        outside(|handled| match waits && handled.end_call() {
            true => Err(Errno::INTR),
            false => poll(&mut polled, (!waits).then_some(&at_once)),
        })?;
        Ok(polled[0].revents())
    })
}

/// Moves bytes of a connection to a pipe: as many as there are, and as the pipe has room for.
fn to_pipe(stream: &Stream, pipe: c_int, call: &Splice) -> Result<usize, Errno> {
    check_splice(pipe, call)?;
    let &Splice { len, flags, .. } = call;
    let status = with_number(pipe, |pipe| rustix::fs::fcntl_getfl(pipe))?;
    let waits = flags & libc::SPLICE_F_NONBLOCK == 0 && !status.contains(OFlags::NONBLOCK);
    let mut moved = 0;
    while moved < len {
        let events = polled(pipe, PollFlags::OUT, waits && moved == 0)?;
        if events.contains(PollFlags::ERR) {
            // Nobody reads: the caller raises the signal, once.
            return if moved > 0 { Ok(moved) } else { Err(Errno::PIPE) };
        }
        if !events.contains(PollFlags::OUT) {
            return if moved > 0 { Ok(moved) } else { Err(Errno::AGAIN) };
        }
        // A pipe that is writable has room for so much, without which the write would wait.
        let mut buffer = [0; libc::PIPE_BUF];
        let room = &mut buffer[..libc::PIPE_BUF.min(len - moved)];
        let peeks = StreamMode { peek: true, dont_wait: moved > 0, ..StreamMode::default() };
        let peeked = match stream.receive(std::iter::once(&mut *room), peeks) {
            Ok(0) => break,
            Ok(peeked) => peeked,
            Err(_) if moved > 0 => break,
            Err(error) => return Err(error),
        };
        // SAFETY: `peeked` bytes of the buffer can be read.
        let written = unsafe { libc::write(pipe, room.as_ptr().cast(), peeked) };
        let Ok(written) = usize::try_from(written) else {
            return if moved > 0 { Ok(moved) } else { Err(super::last_error()) };
        };
        let takes = StreamMode { discard: true, dont_wait: true, ..StreamMode::default() };
        stream.receive(std::iter::once(&mut room[..written]), takes)?;
        moved += written;
    }
    Ok(moved)
}

/// Moves bytes of a pipe to a connection, waiting for the first.
fn from_pipe(pipe: c_int, stream: &Stream, call: &Splice) -> Result<usize, Errno> {
    check_splice(pipe, call)?;
    let &Splice { len, flags, .. } = call;
    // What the connection does not take stays in the pipe. The copy is empty at each `tee`, which would not wait for the pipe
    // if the copy were non-blocking.
    let (copy, copy_in) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let mut moved = 0;
    while moved < len {
        let waits = flags & libc::SPLICE_F_NONBLOCK == 0 && moved == 0;
        let how = if waits { 0 } else { libc::SPLICE_F_NONBLOCK };
        // SAFETY: the call touches no memory.
        let tee = || unsafe { libc::tee(pipe, copy_in.as_raw_fd(), len - moved, how) };
        let teed = outside(|handled| match waits && handled.end_call() {
            true => Err(Errno::INTR),
            false => usize::try_from(tee()).map_err(|_| super::last_error()),
        });
        let teed = match teed {
            Ok(teed) => teed,
            Err(_) if moved > 0 => return Ok(moved),
            Err(error) => return Err(error),
        };
        if teed == 0 {
            break;
        }
        let mut bytes = vec![0; teed];
        let read = rustix::io::read(&copy, &mut bytes)?;
        let bytes = bytes.get_mut(..read).unwrap_or_default();
        let more_follows = flags & libc::SPLICE_F_MORE != 0;
        let mode = SendMode { more_follows, ..SendMode::default() };
        let sent = match stream.send(std::iter::once(&*bytes), mode) {
            Ok(sent) => sent,
            Err(_) if moved > 0 => break,
            Err(error) => return Err(error),
        };
        // SAFETY: `sent` bytes of the buffer can be written. They are in the pipe.
        unsafe { libc::read(pipe, bytes.as_mut_ptr().cast(), sent) };
        moved += sent;
        if sent < read {
            break;
        }
    }
    Ok(moved)
}
