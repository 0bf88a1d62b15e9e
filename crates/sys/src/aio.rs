//! Signals to eventfds that other processes have as well, by Linux AIO (`io_submit(2)`).
//!
//! Every holder of an eventfd can change the flags of its open file and fill its counter: then
//! `write(2)` blocks, and a writer cannot prevent that. The completion of an AIO request signals an
//! eventfd in the kernel (`IOCB_FLAG_RESFD`), which saturates the counter and never blocks. The
//! request reads no bytes from a file of ours, so it is complete when `io_submit` returns.

use std::ffi::{c_int, c_long, c_uint};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};

/// Completions that fit unread in the context; the kernel rounds up by the number of CPUs. Counted
/// against `fs.aio-max-nr`.
const COMPLETIONS: c_uint = 64;

/// Completions read at a time.
const READ_AT_A_TIME: u8 = 64;

/// Attempts to submit when the context is full and other threads submit, too.
const TRIES: u32 = 16;

/// `IOCB_CMD_PREAD`.
const READ: u16 = 0;

/// `IOCB_FLAG_RESFD`.
const SIGNALS: u32 = 1;

/// `struct iocb` of `linux/aio_abi.h`, in the order of a little-endian machine.
#[repr(C)]
#[derive(Default)]
struct AioRequest {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: c_int,
    address: u64,
    len_bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: c_int,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Completion {
    data: u64,
    request: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<AioRequest>() == 64 && size_of::<Completion>() == 32);
const _: () = assert!(cfg!(target_endian = "little"), "two fields of a request change places");

/// Signals eventfds without blocking; usable by any thread.
#[derive(Debug)]
pub struct Signaller {
    /// `aio_context_t`.
    context: c_long,
    /// File of the requests, from which no bytes are read.
    file: OwnedFd,
}

impl Signaller {
    /// # Errors
    /// If the system's limit is reached (`fs.aio-max-nr`), or the kernel has no AIO.
    pub fn new() -> io::Result<Self> {
        let file = memfd_create("forebay-signal", MemfdFlags::CLOEXEC)?;
        let mut context: c_long = 0;
        // SAFETY: the kernel writes one word at `context`, which must be zero, and is.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, COMPLETIONS, &raw mut context) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { context, file })
    }

    /// Signals an eventfd, whatever its flags and its counter. Never waits for its other holders.
    ///
    /// # Errors
    /// If the kernel has no memory: then the event is not signalled.
    pub(crate) fn signal(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        let mut tries = 0;
        loop {
            match self.submit(event) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && tries < TRIES => {
                    tries += 1;
                    self.read_completions();
                }
                submitted => return submitted,
            }
        }
    }

    fn submit(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        let mut request = AioRequest {
            opcode: READ,
            file: self.file.as_raw_fd(),
            flags: SIGNALS,
            event: event.as_raw_fd(),
            ..AioRequest::default()
        };
        let mut requests = [&raw mut request];
        let count: c_long = 1;
        // SAFETY: one request, which reads no bytes to a null address. It is complete on return, so
        // the kernel keeps no pointer to it.
        let submitted = unsafe {
            libc::syscall(libc::SYS_io_submit, self.context, count, requests.as_mut_ptr())
        };
        if submitted == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Discards completions to make room for more.
    #[cold]
    fn read_completions(&self) {
        let mut completions = [Completion::default(); READ_AT_A_TIME as usize];
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let (least, most): (c_long, c_long) = (0, READ_AT_A_TIME.into());
        // SAFETY: the kernel writes at most `most` completions there, and only during the call.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                least,
                most,
                completions.as_mut_ptr(),
                &raw const at_once,
            )
        };
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        // SAFETY: a context of ours, which nothing uses any more.
        let destroyed = unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
        debug_assert_eq!(destroyed, 0, "a context of ours cannot be destroyed");
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::thread;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn read(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_signal_counts_from_any_thread() {
        let signaller = Signaller::new().unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| signaller.signal(event.as_fd()).unwrap()));
            }
        });
        assert_eq!(read(&event), 4000);
    }

    #[test]
    fn blocking_event_delays_no_signal() {
        let signaller = Signaller::new().unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        (0..1000).for_each(|_| signaller.signal(event.as_fd()).unwrap());
        assert_eq!(read(&event), u64::MAX);
    }

    #[test]
    fn what_is_no_event_is_refused() {
        let signaller = Signaller::new().unwrap();
        assert!(signaller.signal(signaller.file.as_fd()).is_err());
    }
}
