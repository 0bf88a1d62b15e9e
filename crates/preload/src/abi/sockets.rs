//! bind, connect, listen, accept and names.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use libc::{sockaddr, socklen_t};
use rustix::io::Errno;
use rustix::net::sockopt::socket_acceptconn;

use super::descriptors::is_hidden;
use super::next::next;
use super::relayed::{End, rename, room_at};
use super::waits::serve_registered;
use super::{address, answer_int, last_error, number, with_number};
use crate::critical;
use crate::listener::Listener;
use crate::socket::{Socket, Takeover};
use crate::table;
use crate::udp::Udp;

type ByAddress = unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;

/// # Safety
/// As `bind(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn bind(fd: c_int, at: *const sockaddr, len: socklen_t) -> c_int {
    let next = next!(bind(c_int, *const sockaddr, socklen_t) -> c_int);
    let _critical = critical::enter();
    if let Some(socket) = table::find(fd) {
        // Bound already, as the socket of the kernel that has the address, which answers.
        return match socket.holder() {
            // SAFETY: the caller's promise, for another socket of the kernel.
            Some(holder) => unsafe { next(number(holder), at, len) },
            None => answer_int(Err(Errno::INVAL)),
        };
    }
    // SAFETY: the caller's promise.
    let local = unsafe { address::read_bound(at, len) };
    if fd >= 0
        && let Ok(local) = local
    {
        // SAFETY: not negative; it is only used for this call, by which the program says that it is open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
        match Udp::bind(descriptor, local) {
            Ok(Takeover::Ours) => {
                serve_registered(fd);
                return 0;
            }
            Ok(Takeover::Kernels) => {}
            Err(error) => return answer_int(Err(error)),
        }
    }
    let bind = || {
        // SAFETY: the caller's promise.
        let result = unsafe { next(fd, at, len) };
        if result < 0 { Err(last_error()) } else { Ok(()) }
    };
    let bound = match (bind(), local) {
        (Err(Errno::ADDRINUSE), Ok(local)) => {
            // SAFETY: the call has found a socket there; it is only used for this call.
            let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
            Listener::bind_beside_closed(descriptor, local, bind)
        }
        (bound, _) => bound,
    };
    answer_int(bound.map(|()| 0))
}

/// # Safety
/// As `connect(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    let Some(socket) = table::find_usable(fd) else {
        let next = next!(connect(c_int, *const sockaddr, socklen_t) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, to, len) };
    };
    // SAFETY: the caller's promise.
    let name = unsafe { address::read(to, len) };
    // SAFETY: the caller's promise.
    let is_none = unsafe { address::is_without_family(to, len) };
    answer_int(match (&*socket, name) {
        (_, Err(Errno::FAULT)) => Err(Errno::FAULT),
        (Socket::Udp(udp), _) if is_none => udp.disconnect().map(|()| 0),
        (Socket::Udp(udp), name) => {
            // SAFETY: the caller's promise.
            unsafe { connect_udp(udp, name, to, len) }.map(|()| 0)
        }
        (Socket::Listener(listener), _) if is_none => {
            let _ = listener.shutdown(socket.shared()); // one that has ended stays so
            Ok(0)
        }
        (_, Err(error)) if !address::has_length(len) => Err(error),
        (Socket::Listener(_) | Socket::Stream(_), _) => Err(Errno::ISCONN),
    })
}

/// Connects a UDP socket, as the kernel's at the same port if there is one, which answers.
///
/// # Safety
/// As `connect(2)`.
unsafe fn connect_udp(
    udp: &Udp,
    name: Result<SocketAddr, Errno>,
    to: *const sockaddr,
    len: socklen_t,
) -> Result<(), Errno> {
    udp.check()?;
    let Some(reserved) = udp.reserved() else { return udp.connect(name?) };
    let next = next!(connect(c_int, *const sockaddr, socklen_t) -> c_int);
    // SAFETY: the caller's promise, for another socket of the kernel.
    if unsafe { next(number(reserved), to, len) } < 0 {
        return Err(last_error());
    }
    udp.follow_peer(reserved, name?)
}

/// # Safety
/// As `getsockname(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getsockname(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(socket) = table::find(fd) else {
        let next: ByAddress = next!(getsockname(c_int, *mut sockaddr, *mut socklen_t) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { kernels_name(next, fd, End::Local, to, len) };
    };
    // SAFETY: the caller's promise.
    answer_int(unsafe { address::write_counted(socket.local(), to, len) }.map(|()| 0))
}

/// # Safety
/// As `getpeername(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getpeername(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(socket) = table::find(fd) else {
        let next: ByAddress = next!(getpeername(c_int, *mut sockaddr, *mut socklen_t) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { kernels_name(next, fd, End::Peer, to, len) };
    };
    // SAFETY: the caller's promise.
    let named = socket.peer().and_then(|peer| unsafe { address::write_counted(peer, to, len) });
    answer_int(named.map(|()| 0))
}

/// Name of a socket that is not ours, by the kernel's call. Of a connection that a pair carries it is the connection's.
///
/// # Safety
/// As `getsockname(2)`.
unsafe fn kernels_name(
    next: ByAddress,
    fd: c_int,
    end: End,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's promise.
    let room = unsafe { room_at(len) };
    // SAFETY: the caller's promise.
    let result = unsafe { next(fd, to, len) };
    if result < 0 {
        return result;
    }
    // uWSGI looks for listeners at all numbers. The library itself asks for the names of others here.
    if is_hidden(fd) && with_number(fd, |socket| socket_acceptconn(socket)) == Ok(true) {
        return answer_int(Err(Errno::BADF));
    }
    // SAFETY: the caller's promise.
    answer_int(unsafe { rename(fd, end, to, len, room) }.map(|()| 0))
}

/// # Safety
/// As `listen(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    let _critical = critical::enter();
    match table::find(fd).as_deref() {
        Some(Socket::Udp(_)) => return answer_int(Err(Errno::OPNOTSUPP)),
        Some(Socket::Stream(_)) => return answer_int(Err(Errno::INVAL)),
        Some(Socket::Listener(listener)) if listener.has_ended() => {
            if let Err(error) = listener.give_back(fd) {
                return answer_int(Err(error));
            }
        }
        // A change of the backlog, which stays what it was.
        Some(Socket::Listener(_)) => return 0,
        None => {}
    }
    if fd >= 0 {
        // SAFETY: not negative; it is only used for this call, by which the program says that it is open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
        match Listener::listen(descriptor, backlog) {
            Ok(Takeover::Ours) => {
                serve_registered(fd);
                return 0;
            }
            Ok(Takeover::Kernels) => {}
            Err(error) => return answer_int(Err(error)),
        }
    }
    let next = next!(listen(c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(fd, backlog) }
}

/// # Safety
/// As `shutdown(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let Some(socket) = table::find_usable(fd) else {
        let next = next!(shutdown(c_int, c_int) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, how) };
    };
    let ended = match &*socket {
        Socket::Udp(udp) => udp.shutdown(how),
        Socket::Stream(stream) => stream.shutdown(how),
        Socket::Listener(listener) => match how {
            libc::SHUT_WR if listener.has_ended() => Err(Errno::NOTCONN),
            libc::SHUT_WR => Ok(()),
            libc::SHUT_RD | libc::SHUT_RDWR => listener.shutdown(socket.shared()),
            _ => Err(Errno::INVAL),
        },
    };
    answer_int(ended.map(|()| 0))
}

/// # Safety
/// As `accept(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int {
    if table::find(fd).is_some() {
        // SAFETY: the caller's promise; without flags it is the same call.
        return unsafe { accept4(fd, from, len, 0) };
    }
    let next: ByAddress = next!(accept(c_int, *mut sockaddr, *mut socklen_t) -> c_int);
    // SAFETY: the caller's promise.
    unsafe { next(fd, from, len) }
}

/// # Safety
/// As `accept4(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let Some(socket) = table::find(fd) else {
        let next = next!(accept4(c_int, *mut sockaddr, *mut socklen_t, c_int) -> c_int);
        // SAFETY: the caller's promise.
        return unsafe { next(fd, from, len, flags) };
    };
    let accepted = match &*socket {
        _ if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 => Err(Errno::INVAL),
        Socket::Udp(_) => Err(Errno::OPNOTSUPP),
        Socket::Stream(_) => Err(Errno::INVAL),
        Socket::Listener(listener) => listener.accept(socket.shared(), flags),
    };
    match accepted {
        Ok((number, peer)) => {
            if from.is_null() {
                return number;
            }
            // SAFETY: the caller's promise.
            match unsafe { address::write_counted(peer, from, len) } {
                Ok(()) => number,
                Err(error) => {
                    // As in the kernel, the connection is lost.
                    // SAFETY: the descriptor was just made, and nobody else knows it.
                    unsafe { super::descriptors::close(number) };
                    answer_int(Err(error))
                }
            }
        }
        Err(error) => answer_int(Err(error)),
    }
}
