//! Calls on descriptors: close, dup, fcntl, ioctl.

use std::ffi::{c_int, c_long, c_uint, c_ulong};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use forebay_sys::hidden::{self, Hidden};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::next::next;
use super::system::{F_SETOWN_EX, F_SETSIG};
use super::{answer_int, is_nowhere, last_error, number, replace};
use crate::critical::{self, Critical};
use crate::runtime::is_in_parents_memory;
use crate::socket::Socket;
use crate::table::{self, Closing};
use crate::{epoll_sets, kept, relay};

/// Request for the number of bytes that are not sent yet (linux/sockios.h).
const SIOCOUTQNSD: c_ulong = 0x894b;
/// Request for whether the next byte to read is the urgent one (linux/sockios.h).
const SIOCATMARK: c_ulong = 0x8905;

/// Request for signals of what arrives, which a flag of the file stands for (`O_ASYNC`).
const FIOASYNC: c_ulong = 0x5452;
/// Requests that set the mode of a descriptor, and the owner of its signals: `FIOSETOWN` and `SIOCSPGRP` at last.
const OF_MODE: [c_ulong; 4] = [libc::FIONBIO, FIOASYNC, 0x8901, 0x8902];
/// Requests for the mark and the owner of a descriptor, which is that of these signals: `FIOSETOWN`, `SIOCSPGRP`, `FIOGETOWN` and
/// `SIOCGPGRP` (asm-generic/sockios.h).
const OF_DESCRIPTOR: [c_ulong; 6] = [libc::FIOCLEX, libc::FIONCLEX, 0x8901, 0x8902, 0x8903, 0x8904];

/// Requests of the time when the last datagram came (`SIOCGSTAMP`, `SIOCGSTAMPNS`), which sockets of ours tell with the datagram alone.
const OF_TIMES: [c_ulong; 2] = [0x8906, 0x8907];

/// Requests of the addresses of interfaces, `SIOCGIFADDR` to `SIOCSIFNETMASK`, which sockets of another family lack.
const OF_INTERFACES: std::ops::RangeInclusive<c_ulong> = 0x8915..=0x891c;

/// # Safety
/// As `close(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if stays_open(fd) {
        return answer_int(Err(Errno::BADF));
    }
    epoll_sets::forget(fd);
    let next = next!(close(c_int) -> c_int);
    if !table::may_be_ours(fd) {
        // SAFETY: the caller's promise.
        return unsafe { next(fd) };
    }
    let _critical = critical::enter();
    relay::close_copy(fd);
    match table::begin_closing(fd) {
        Closing::Begun => answer_int(Err(Errno::BADF)),
        // SAFETY: the caller's promise.
        Closing::Others => unsafe { next(fd) },
        Closing::Ours => answer_int(close_ours(fd).map(|()| 0)),
    }
}

/// Closes a descriptor whose socket this thread is to remove. No point of cancellation: the thread does all of it.
fn close_ours(fd: c_int) -> Result<(), Errno> {
    let change = relay::change();
    // Calls of other threads that no longer find the socket fail.
    make_unusable(fd);
    let socket = table::remove_closing(fd);
    let next = next!(syscall(c_long, c_int) -> c_long);
    // SAFETY: the call touches no memory, and the program closes the descriptor.
    let result = unsafe { next(libc::SYS_close, fd) };
    let closed = if result == 0 { Ok(()) } else { Err(last_error()) };
    socket.into_iter().for_each(Socket::let_go);
    drop(change);
    closed
}

/// File that all calls answer by `EBADF` (`O_PATH`).
static UNUSABLE: ArcSwapOption<Hidden> = ArcSwapOption::const_empty();

/// Opens the file that is put at descriptors which are closed, while the process has descriptors left and may open files.
pub(crate) fn prepare_to_close() {
    // No directory, by which a program would find its way out of one that it is confined to (`chroot`).
    let open = |path| rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let hidden = |file| Hidden::new(file).map(Arc::new);
    if UNUSABLE.load().is_none()
        && let Ok(file) = open("/dev/null").or_else(|_| open("/proc/self/exe")).and_then(hidden)
    {
        // Ignored: another thread was first.
        let _ = UNUSABLE.compare_and_swap(&None::<Arc<Hidden>>, Some(file));
    }
}

/// Puts a file at a descriptor which all calls answer by `EBADF`, until it is closed. If there is none, calls find the
/// descriptor that was polled.
pub(crate) fn make_unusable(fd: c_int) {
    prepare_to_close();
    if let Some(unusable) = &*UNUSABLE.load() {
        // Ignored: as without one.
        let _ = replace(fd, unusable.as_fd(), true);
    }
}

/// True for the number of a descriptor that the program has not opened, and so does not know: for it, none is open. A
/// child that uses its parent's memory has descriptors of its own, and loses these when it runs another program.
pub(super) fn is_hidden(fd: c_int) -> bool {
    hidden::is_hidden(fd) && !is_in_parents_memory()
}

/// True for a number that the program does not close. A child that uses its parent's memory leaves those open that it loses anyway:
/// the program that it runs may get the listeners behind them.
fn stays_open(fd: c_int) -> bool {
    hidden::is_hidden(fd) && (!is_in_parents_memory() || !kept::outlives_exec(fd))
}

/// Number to give the kernel for `fd`: one at which nothing is open, if the program does not know `fd`.
pub(super) fn unless_hidden(fd: c_int) -> c_int {
    if is_hidden(fd) { c_int::MAX } else { fd }
}

/// # Safety
/// As `close_range(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let only_marks = c_int::try_from(libc::CLOSE_RANGE_CLOEXEC).is_ok_and(|mark| flags & mark != 0);
    let next = next!(close_range(c_uint, c_uint, c_int) -> c_int);
    let closes_all = c_int::try_from(libc::CLOSE_RANGE_UNSHARE).is_ok_and(|all| flags & !all == 0);
    if only_marks || !closes_all || first > last {
        // SAFETY: the caller's promise.
        return unsafe { next(first, last, flags) };
    }
    epoll_sets::forget_within(first, last);
    for number in table::within(first, last) {
        // SAFETY: the caller's promise, for one of the numbers.
        unsafe { close(number) };
    }
    let mut rest = Some(first);
    while let Some(first) = rest {
        let hidden = hidden::within(first, last)
            .find(|number| stays_open(*number))
            .and_then(|it| u32::try_from(it).ok());
        let end = hidden.map_or(Some(last), |hidden| hidden.checked_sub(1));
        if let Some(end) = end.filter(|end| first <= *end) {
            // SAFETY: the caller's promise, for a part of the range.
            let result = unsafe { next(first, end, flags) };
            if result != 0 {
                return result;
            }
        }
        rest = hidden.and_then(|hidden| hidden.checked_add(1)).filter(|next| *next <= last);
    }
    0
}

/// # Safety
/// As `closefrom(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: the caller's promise: the call is defined as this one.
    unsafe { close_range(c_uint::try_from(first).unwrap_or(0), c_uint::MAX, 0) };
}

/// Enters the socket of `old` at `new`, a duplicate of it, if the call has succeeded. A duplicate that the table
/// has no slot for is closed: `EMFILE`.
fn duplicated(old: c_int, new: c_int) -> c_int {
    if new >= 0
        && new != old
        && let Some(socket) = table::find(old)
    {
        if !table::has_slot(new) {
            // SAFETY: the descriptor was just made, and nobody else knows it.
            unsafe { close(new) };
            return answer_int(Err(Errno::MFILE));
        }
        table::insert(new, Arc::clone(socket.shared()));
    }
    new
}

/// Gives a connection that is to be used by another number to the kernel, if it is another process's. A child that uses its
/// parent's memory is to run another program, which then uses it.
fn settle(fd: c_int) {
    if table::may_be_ours(fd) {
        match is_in_parents_memory() {
            true => relay::give(fd),
            false => drop(table::find(fd)),
        }
    }
}

/// # Safety
/// As `dup(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    if is_hidden(fd) {
        return answer_int(Err(Errno::BADF));
    }
    settle(fd);
    let next = next!(dup(c_int) -> c_int);
    // SAFETY: the caller's promise.
    duplicated(fd, unsafe { next(fd) })
}

/// # Safety
/// As `dup2(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    if let Err(error) = check_duplicate(fd, to) {
        return answer_int(Err(error));
    }
    settle(fd);
    let _changes = before_replaced(fd, to);
    let next = next!(dup2(c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    let new = unsafe { next(fd, to) };
    replaced(fd, new)
}

/// # Safety
/// As `dup3(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    // Others the kernel refuses, whatever the numbers are.
    if flags & !libc::O_CLOEXEC == 0
        && fd != to
        && let Err(error) = check_duplicate(fd, to)
    {
        return answer_int(Err(error));
    }
    settle(fd);
    let _changes = before_replaced(fd, to);
    let next = next!(dup3(c_int, c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    let new = unsafe { next(fd, to, flags) };
    replaced(fd, new)
}

/// Checks the numbers of `dup2` and `dup3`.
///
/// # Errors
/// `EBADF` if the first is not open for the program; `EBUSY` if the library uses the second.
fn check_duplicate(fd: c_int, to: c_int) -> Result<(), Errno> {
    if is_hidden(fd) {
        return Err(Errno::BADF);
    }
    if !is_hidden(to) {
        return Ok(());
    }
    // SAFETY: the call touches no memory.
    let is_open = unsafe { fcntl(fd, libc::F_GETFD, 0) } >= 0;
    Err(if is_open { Errno::BUSY } else { Errno::BADF }) // the program would close it
}

/// Closes the hidden copy of a connection whose number another file is about to have. No fork copies that connection before what
/// it returns is dropped.
fn before_replaced(fd: c_int, to: c_int) -> Option<(impl Sized, Critical)> {
    if fd == to || fd < 0 || !table::may_be_ours(to) {
        return None;
    }
    let critical = critical::enter();
    relay::close_copy(to);
    Some((relay::change(), critical))
}

/// Enters a duplicate, whose number may have been that of a socket of ours before.
fn replaced(old: c_int, new: c_int) -> c_int {
    let _critical = critical::enter();
    if new >= 0 && new != old {
        epoll_sets::forget(new);
        table::remove(new).into_iter().for_each(Socket::let_go);
    }
    duplicated(old, new)
}

/// # Safety
/// As `fcntl(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    if is_hidden(fd) {
        return answer_int(Err(Errno::BADF));
    }
    let next = next!(fcntl(c_int, c_int, c_ulong) -> c_int);
    if command == libc::F_GETFD || command == libc::F_SETFD {
        let mark = c_ulong::try_from(libc::FD_CLOEXEC).unwrap_or(0);
        if command == libc::F_SETFD && argument & mark == 0 {
            settle(fd); // another program is to use it
        }
        // SAFETY: the caller's promise. The flag is the number's own.
        return unsafe { next(fd, command, argument) };
    }
    if command == libc::F_DUPFD || command == libc::F_DUPFD_CLOEXEC {
        settle(fd);
    }
    let Some(socket) = table::find(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { next(fd, command, argument) };
    };
    match command {
        libc::F_GETFL | libc::F_SETFL => {
            // The flags of the readiness descriptor of a UDP socket are not the program's.
            let flagged = match &*socket {
                Socket::Udp(udp) => udp.kernel().as_raw_fd(),
                Socket::Listener(_) | Socket::Stream(_) => fd,
            };
            // SAFETY: the caller's promise, for another socket of the kernel.
            let result = unsafe { next(flagged, command, argument) };
            if command == libc::F_SETFL && result == 0 {
                let flag = c_ulong::try_from(libc::O_NONBLOCK).unwrap_or(0);
                set_nonblocking(&socket, argument & flag != 0);
                if flagged != fd {
                    let signals = c_ulong::try_from(libc::O_ASYNC).unwrap_or(0);
                    // SAFETY: no argument of the command is an address.
                    unsafe { next(fd, command, argument & signals) };
                }
                if let Some(store) = store_of_listener(&socket) {
                    // SAFETY: as above.
                    unsafe { next(store, command, argument) };
                }
            }
            result
        }
        libc::F_SETOWN | F_SETOWN_EX | F_SETSIG => {
            // SAFETY: the caller's promise.
            let result = unsafe { next(fd, command, argument) };
            if let Some(store) = store_of_listener(&socket).filter(|_| result == 0) {
                // SAFETY: as above.
                unsafe { next(store, command, argument) };
            }
            result
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            // SAFETY: the caller's promise.
            duplicated(fd, unsafe { next(fd, command, argument) })
        }
        // SAFETY: the caller's promise.
        _ => unsafe { next(fd, command, argument) },
    }
}

/// # Safety
/// As `sockatmark(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    let mut is_at_mark = 0;
    // SAFETY: the argument is the address of an int.
    let result = unsafe { ioctl(fd, SIOCATMARK, &raw mut is_at_mark) };
    if result == 0 { is_at_mark } else { result }
}

/// The kernel's socket of a listener, which has the mode and the signals also for the processes that serve it later, and once
/// it listens anew.
fn store_of_listener(socket: &Socket) -> Option<c_int> {
    match socket {
        Socket::Listener(listener) => Some(number(listener.kernel())),
        Socket::Udp(_) | Socket::Stream(_) => None,
    }
}

fn set_nonblocking(socket: &Socket, is_nonblocking: bool) {
    match socket {
        // In place of the parent's the process opens its own, which reads the kernel's.
        Socket::Udp(udp) if udp.is_of_parent() => {}
        Socket::Udp(udp) => udp.adopt_settings(),
        Socket::Listener(listener) => listener.set_nonblocking(is_nonblocking),
        Socket::Stream(stream) => stream.set_nonblocking(is_nonblocking),
    }
}

/// # Safety
/// As `fcntl(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller's promise; on 64 bits both are one function.
    unsafe { fcntl(fd, command, argument) }
}

/// # Safety
/// As `ioctl(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int {
    let next = next!(ioctl(c_int, c_ulong, *mut c_int) -> c_int);
    if request == libc::FIOCLEX || request == libc::FIONCLEX {
        if request == libc::FIONCLEX && !is_hidden(fd) {
            settle(fd); // another program is to use it
        }
        // SAFETY: the caller's promise. The flag is the number's own.
        return unsafe { next(unless_hidden(fd), request, argument) };
    }
    let find = if request == libc::FIONREAD { table::find_usable } else { table::find };
    let Some(socket) = find(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { next(unless_hidden(fd), request, argument) };
    };
    let len = match (request, &*socket) {
        (libc::FIONREAD, socket) => Some(socket.readable_len()),
        (libc::TIOCOUTQ, Socket::Stream(stream)) => Some(stream.unacknowledged_len()),
        (SIOCOUTQNSD, Socket::Stream(stream)) => Some(stream.unsent_len()),
        (SIOCATMARK, Socket::Stream(stream)) => Some(stream.is_at_urgent().map(usize::from)),
        (libc::TIOCOUTQ | SIOCOUTQNSD, Socket::Listener(_)) => Some(Err(Errno::INVAL)),
        (SIOCATMARK, Socket::Listener(_)) => Some(Ok(0)),
        _ => None,
    };
    if let Some(len) = len {
        let len = len.map(|len| c_int::try_from(len).unwrap_or(c_int::MAX));
        let len = if is_nowhere(argument) { len.and(Err(Errno::FAULT)) } else { len };
        return answer_int(len.map(|len| {
            // SAFETY: the argument of these requests is the address of an int.
            unsafe { argument.write(len) };
            0
        }));
    }
    let told = match &*socket {
        Socket::Udp(udp) if !OF_DESCRIPTOR.contains(&request) => udp.kernel().as_raw_fd(),
        // The addresses of interfaces, and the time of a datagram, are asked of any socket of the family.
        socket if OF_INTERFACES.contains(&request) || OF_TIMES.contains(&request) => {
            socket.holder().map_or(fd, number)
        }
        _ => fd, // the mark and the owner are the descriptor's own, and the flags those of a connection's
    };
    // SAFETY: the caller's promise, for another socket of the kernel.
    let result = unsafe { next(told, request, argument) };
    if request == FIOASYNC && told != fd && result == 0 {
        // SAFETY: as above.
        return unsafe { next(fd, request, argument) };
    }
    if OF_MODE.contains(&request)
        && result == 0
        && let Some(store) = store_of_listener(&socket)
    {
        // SAFETY: as above.
        unsafe { next(store, request, argument) };
    }
    if request == libc::FIONBIO && result == 0 {
        // SAFETY: the argument of this request is the address of an int, as the kernel has found.
        set_nonblocking(&socket, unsafe { argument.read() } != 0);
    }
    result
}
