//! Socket filters in classic BPF.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Instructions of a filter, at most (`BPF_MAXINSNS`).
const INSTRUCTIONS_MAX: usize = 4096;

/// One instruction (`struct sock_filter`, linux/filter.h).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilterInstruction {
    /// Operation.
    pub code: u16,
    /// Number of instructions skipped if the condition holds.
    pub jt: u8,
    /// Number of instructions skipped if it does not hold.
    pub jf: u8,
    /// Immediate operand.
    pub k: u32,
}

/// Filter of a socket; empty without one.
///
/// # Errors
/// The kernel's, if the descriptor is not a socket.
pub fn attached(socket: BorrowedFd<'_>) -> io::Result<Vec<FilterInstruction>> {
    let none = FilterInstruction { code: 0, jt: 0, jf: 0, k: 0 };
    let mut filter = vec![none; INSTRUCTIONS_MAX];
    let mut count = libc::socklen_t::try_from(filter.len()).unwrap_or(0);
    // SAFETY: the kernel writes at most `count` instructions of its layout, for which there is room, and
    // their number (`sk_get_filter`).
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_GET_FILTER,
            filter.as_mut_ptr().cast(),
            &raw mut count,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    filter.truncate(usize::try_from(count).unwrap_or(0));
    Ok(filter)
}

/// Attaches a filter to a socket in place of an earlier one. Packets already queued on the socket
/// are not filtered again.
///
/// # Errors
/// The kernel's error: `EINVAL` if the filter reads or jumps out of bounds, or is empty.
pub fn attach(socket: BorrowedFd<'_>, filter: &[FilterInstruction]) -> io::Result<()> {
    let too_long = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(too_long)?,
        // The kernel copies it and writes nothing back.
        filter: filter.as_ptr().cast_mut().cast(),
    };
    let bytes = libc::socklen_t::try_from(size_of_val(&program)).map_err(too_long)?;
    // SAFETY: the option is a `sock_fprog` of that size, whose filter is `len` instructions of the
    // kernel's layout; both outlive the call, which only reads them.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            bytes,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
