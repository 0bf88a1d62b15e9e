//! getsockopt and setsockopt.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

use forebay_stack::tcp::kernel_form::tcp_info;
use forebay_stack::tcp::{Algorithm, State};
use libc::socklen_t;
use rustix::io::Errno;

use super::next::next;
use super::{address, answer_int, groups, is_nowhere, keeping_errno, lacking, relayed};
use crate::option::SocketOption;
use crate::socket::Socket;
use crate::stream::Stream;
use crate::table;
use crate::tcp_options::{RCVBUF_LOCK, SNDBUF_LOCK, TIMEOUTS, congestion_name, is_accepted};
use crate::udp::groups::{is_about_groups, note_choice};
use crate::udp_options::UDP_CORK;

/// Longest name of a congestion control (`TCP_CA_NAME_MAX`).
const CONGESTION_NAME_BYTES: usize = 16;

/// Properties of a connected UDP socket, which the kernel's socket at the same port has, such as the MTU of the path.
const OF_PEER: [SocketOption; 5] = [
    SocketOption::of_ipv4(libc::IP_MTU),
    SocketOption::of_ipv6(libc::IPV6_MTU),
    SocketOption::of_ipv6(libc::IPV6_PATHMTU),
    SocketOption::of_ipv6(libc::IPV6_ADDRFORM),
    PEER_NAME,
];

/// Address of the peer, by the name of an option.
const PEER_NAME: SocketOption = SocketOption::of_socket(libc::SO_PEERNAME);

/// # Safety
/// As `setsockopt(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let next = next!(setsockopt(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int);
    let option = SocketOption { level, name };
    let Some(socket) = table::find_usable(fd) else {
        note_choice(option);
        // SAFETY: the caller's promise.
        return unsafe { relayed::set_option(next, fd, option, value, len) };
    };
    if let Socket::Stream(stream) = &*socket
        // SAFETY: the caller's promise.
        && let Some(number) = unsafe { int_argument(value, len) }
        && let Some(set) = stream.set_own(option, number)
    {
        return answer_int(set.map(|()| 0));
    }
    if let Socket::Udp(udp) = &*socket
        && is_about_groups(option)
    {
        // SAFETY: the caller's promise.
        return answer_int(unsafe { groups::set(udp, option, value, len) }.map(|()| 0));
    }
    let store = match &*socket {
        Socket::Udp(udp) => udp.check_option(option).map(|()| udp.kernel().as_raw_fd()),
        Socket::Stream(stream) if stream.is_fixed(option) => Err(Errno::INVAL),
        _ if !is_accepted(option) => Err(Errno::NOPROTOOPT),
        Socket::Listener(listener) => Ok(listener.kernel().as_raw_fd()),
        // Calls wait on this descriptor.
        Socket::Stream(_) if is_timeout(option) => Ok(fd),
        Socket::Stream(stream) => stream.kernel().map(|kernel| kernel.as_raw_fd()),
    };
    let store = match store {
        Ok(store) => store,
        Err(Errno::NOPROTOOPT) => {
            // SAFETY: the caller's promise.
            return answer_int(unsafe { lacking::set(&socket, option, value, len) }.map(|()| 0));
        }
        Err(error) => return answer_int(Err(error)),
    };
    // SAFETY: the caller's promise.
    let is_unknown = unsafe { names_unknown_congestion(option, value, len) };
    if is_unknown && !matches!(&*socket, Socket::Udp(_)) {
        return answer_int(Err(Errno::NOENT)); // as of a module that is not there
    }
    // SAFETY: the caller's promise, for another socket of the kernel.
    let result = unsafe { next(store, level, name, value, len) };
    if result != 0 {
        return result;
    }
    match &*socket {
        Socket::Udp(udp) if option == SocketOption::of_udp(UDP_CORK) => udp.adopt_cork(),
        Socket::Udp(udp) => udp.adopt_settings(),
        Socket::Listener(listener) => keeping_errno(|| listener.adopt_option(option)),
        Socket::Stream(_) if is_timeout(option) => {}
        Socket::Stream(stream) => {
            if let Err(error) = stream.adopt_option(option) {
                return answer_int(Err(error));
            }
        }
    }
    0
}

/// # Safety
/// As `getsockopt(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let next = next!(getsockopt(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int);
    let option = SocketOption { level, name };
    let takes_error = option == SocketOption::of_socket(libc::SO_ERROR);
    let socket = if takes_error { table::find_usable(fd) } else { table::find(fd) };
    if takes_error && socket.is_some() {
        // First: an error that is taken is gone.
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { room_of(len) } {
            return answer_int(Err(error));
        }
    }
    let store = match socket.as_deref() {
        // SAFETY: the caller's promise.
        None => return unsafe { relayed::option_of(next, fd, option, value, len) },
        Some(Socket::Stream(stream)) if option == PEER_NAME => {
            let peer = stream.last_peer().map(address::encode);
            // SAFETY: the caller's promise.
            let told = peer.and_then(|peer| unsafe { put_part(&peer, value, len) });
            return answer_int(told.map(|()| 0));
        }
        Some(Socket::Stream(stream)) => {
            match own_answer(stream, option) {
                Ok(None) if is_timeout(option) => Ok(fd),
                Ok(None) => stream.kernel().map(|kernel| kernel.as_raw_fd()),
                // The room for options of IPv6 has no sign.
                // SAFETY: the caller's promise.
                Ok(Some(bytes)) if level == libc::IPPROTO_IPV6 => unsafe {
                    return answer_int(put_all(&bytes, value, len).map(|()| 0));
                },
                Ok(Some(bytes)) => {
                    // SAFETY: the caller's promise.
                    return answer_int(unsafe { put(&bytes, value, len) }.map(|()| 0));
                }
                Err(error) => Err(error),
            }
        }
        Some(Socket::Udp(udp)) if takes_error => {
            let error = udp.take_error().map(|error| error.map_or(0, Errno::raw_os_error));
            // SAFETY: the caller's promise.
            let told = error.and_then(|error| unsafe { put(&error.to_ne_bytes(), value, len) });
            return answer_int(told.map(|()| 0));
        }
        // Of the address and of the route that the kernel has found for the peer.
        Some(Socket::Udp(udp)) if OF_PEER.contains(&option) => {
            Ok(udp.reserved().unwrap_or(udp.kernel()).as_raw_fd())
        }
        Some(socket) => socket.kernel().map(|kernel| kernel.as_raw_fd()),
    };
    match store {
        // SAFETY: the caller's promise.
        Ok(store) => unsafe { next(store, level, name, value, len) },
        Err(error) => answer_int(Err(error)),
    }
}

/// Value of an option of type `int`; `None` of fewer bytes, and of a negative number of them.
///
/// # Safety
/// `value` is null, or `len` bytes at it can be read.
unsafe fn int_argument(value: *const c_void, len: socklen_t) -> Option<c_int> {
    let len = i32::try_from(len).ok().and_then(|len| usize::try_from(len).ok());
    if is_nowhere(value) || len.is_none_or(|len| len < size_of::<c_int>()) {
        return None;
    }
    // SAFETY: the caller's promise: `len` bytes can be read, and an int has no more.
    Some(unsafe { value.cast::<c_int>().read_unaligned() })
}

/// True for the name of a congestion control that connections of ours lack.
///
/// # Safety
/// `len` bytes at `value` can be read.
unsafe fn names_unknown_congestion(
    option: SocketOption,
    value: *const c_void,
    len: socklen_t,
) -> bool {
    if option != SocketOption::of_tcp(libc::TCP_CONGESTION) || is_nowhere(value) {
        return false;
    }
    if !matches!(i32::try_from(len), Ok(1..)) {
        return false; // no name at all, which the kernel refuses
    }
    let len = usize::try_from(len).unwrap_or(0).min(CONGESTION_NAME_BYTES);
    // SAFETY: the caller's promise, for as many bytes or fewer.
    let name = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len) };
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    ![Algorithm::Cubic, Algorithm::NewReno]
        .iter()
        .any(|known| congestion_name(*known).as_bytes() == name)
}

fn is_timeout(option: SocketOption) -> bool {
    TIMEOUTS.contains(&option)
}

/// Value of an option that the connection itself knows.
fn own_answer(stream: &Stream, option: SocketOption) -> Result<Option<Vec<u8>>, Errno> {
    let int = |value: i32| Some(value.to_ne_bytes().to_vec());
    let info = |of: fn(&forebay_stack::tcp::TcpInfo) -> u32| {
        let value = stream.info().map(|info| of(&info));
        value.and_then(|value| int(i32::try_from(value).unwrap_or(i32::MAX)))
    };
    if let Some(is_on) = stream.own_flag(option)? {
        return Ok(int(is_on.into()));
    }
    Ok(match (option.level, option.name) {
        // A socket of IPv6 has the options of IPv4, too.
        (libc::IPPROTO_IP, libc::IP_MTU) | (libc::IPPROTO_IPV6, libc::IPV6_MTU)
            if option.level == libc::IPPROTO_IP || stream.family() == libc::AF_INET6 =>
        {
            stream.peer()?;
            info(|info| info.path_mtu_bytes)
        }
        (libc::IPPROTO_IPV6, libc::IPV6_ADDRFORM) if stream.family() == libc::AF_INET6 => {
            let state = stream.info().map(|info| info.state);
            state.filter(|state| *state == State::Established).ok_or(Errno::NOTCONN)?;
            int(libc::AF_INET6)
        }
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            int(stream.take_error()?.map_or(0, rustix::io::Errno::raw_os_error))
        }
        (libc::SOL_SOCKET, libc::SO_TYPE) => int(libc::SOCK_STREAM),
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => int(libc::IPPROTO_TCP),
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => int(stream.family()),
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => int(0),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) if !stream.has_set_buffer(SNDBUF_LOCK) => {
            info(|info| info.send_buffer_bytes)
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF) if !stream.has_set_buffer(RCVBUF_LOCK) => {
            info(|info| info.receive_buffer_bytes)
        }
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => info(|info| info.mss_bytes),
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => stream.info().map(|info| {
            let mut name = congestion_name(info.congestion).as_bytes().to_vec();
            name.resize(CONGESTION_NAME_BYTES, 0);
            name
        }),
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            Some(tcp_info(stream.info().as_ref(), None).to_vec())
        }
        _ => None,
    })
}

/// Writes a part of a value. A room longer than the value is refused (`EINVAL`).
///
/// # Safety
/// As [`put`].
unsafe fn put_part(bytes: &[u8], value: *mut c_void, len: *mut socklen_t) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    if !is_nowhere(len) && unsafe { len.read() } as usize > bytes.len() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    unsafe { put(bytes, value, len) }
}

/// Writes as much of a value as there is room for, and its length.
///
/// # Safety
/// `len` is null or valid, and `*len` bytes at `value` can be written.
unsafe fn put(bytes: &[u8], value: *mut c_void, len: *mut socklen_t) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { room_of(len) }?;
    // SAFETY: the caller's promise.
    unsafe { put_all(bytes, value, len) }
}

/// Number of bytes that there is room for, which the kernel takes for an `int`.
///
/// # Errors
/// `EFAULT` without it; `EINVAL` if it is negative.
///
/// # Safety
/// `len` is null or valid.
unsafe fn room_of(len: *mut socklen_t) -> Result<socklen_t, Errno> {
    if is_nowhere(len) {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let room = unsafe { len.read() };
    if i32::try_from(room).is_ok() { Ok(room) } else { Err(Errno::INVAL) }
}

/// Writes as much of a value as there is room for, which has no sign, and its length.
///
/// # Safety
/// As [`put`].
unsafe fn put_all(bytes: &[u8], value: *mut c_void, len: *mut socklen_t) -> Result<(), Errno> {
    if is_nowhere(len) {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let room = unsafe { len.read() };
    let count = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
    if count > 0 && is_nowhere(value) {
        return Err(Errno::FAULT);
    }
    // SAFETY: `count` bytes can be read from the slice, and written by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), count) };
    // SAFETY: the caller's promise.
    unsafe { len.write(count.try_into().unwrap_or(0)) };
    Ok(())
}
