//! Filters of sockets: classic BPF.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// One instruction (`struct sock_filter`, linux/filter.h).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilterInstruction {
    /// Operation.
    pub code: u16,
    /// Number of instructions that are skipped if it is so.
    pub jt: u8,
    /// Instructions that are skipped if it is not.
    pub jf: u8,
    /// The number in the instruction.
    pub k: u32,
}

/// Has the kernel run this filter on each packet before the socket gets it, in place of the filter
/// before. What the socket has already is not filtered again.
///
/// # Errors
/// What the kernel says: `EINVAL` when the filter reads or jumps where it may not, or is empty.
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
