//! sendfile and splice.

use std::ffi::{c_int, c_uint};

use libc::{loff_t, off_t, size_t, ssize_t};
use rustix::io::Errno;

use super::next::next;
use super::{answer, answer_sent};
use crate::socket::Socket;
use crate::stream::{SendMode, Stream};
use crate::table;

/// Bytes that are copied from a file at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// # Safety
/// As `sendfile(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendfile(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    len: size_t,
) -> ssize_t {
    let Some(socket) = table::find(to) else {
        let next = next!(sendfile(c_int, c_int, *mut off_t, size_t) -> ssize_t);
        // SAFETY: the caller's promise.
        return unsafe { next(to, from, offset, len) };
    };
    let Socket::Stream(stream) = &*socket else { return answer(Err(Errno::INVAL)) };
    // SAFETY: the caller's promise.
    let sent = match unsafe { offset.as_mut() } {
        Some(offset) => send_from(stream, from, offset, len),
        None => send_from_position(stream, from, len),
    };
    answer_sent(sent, 0)
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
            return if sent > 0 { Ok(sent) } else { Err(super::last_error()) };
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

/// Does the same from the file's position.
fn send_from_position(stream: &Stream, from: c_int, len: usize) -> Result<usize, Errno> {
    // SAFETY: the call touches no memory.
    let mut offset = unsafe { libc::lseek(from, 0, libc::SEEK_CUR) };
    if offset < 0 {
        // A pipe, which cannot be read twice if the connection does not take all.
        return Err(Errno::INVAL);
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
    if table::find(from).is_some() || table::find(to).is_some() {
        // As of a file that cannot: programs then copy.
        return answer(Err(Errno::INVAL));
    }
    let next = next!(splice(c_int, *mut loff_t, c_int, *mut loff_t, size_t, c_uint) -> ssize_t);
    // SAFETY: the caller's promise.
    unsafe { next(from, from_offset, to, to_offset, len, flags) }
}
