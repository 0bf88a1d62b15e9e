//! Reservation of a TCP port against other programs on the kernel's stack.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr, set_socket_reuseport};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, getsockname, ipproto, listen, socket_with,
};

use super::hidden::Hidden;
use super::socket_filter::{self, FilterInstruction};

/// `BPF_RET | BPF_K` with 0: drops every packet.
const REFUSE: FilterInstruction = FilterInstruction { code: 0x06, jt: 0, jf: 0, k: 0 };

/// Lets a kernel socket listen that drops every packet, and so reserves the port: other programs
/// cannot bind it, and the kernel does not answer segments to it with a reset. A shared port can be
/// reserved again (`SO_REUSEPORT`).
///
/// # Errors
/// `EADDRINUSE` if a program has the port; `EACCES` for a privileged port; if no descriptors are
/// left.
pub fn reserve(local: SocketAddr, is_shared: bool, v6_only: bool) -> io::Result<Hidden> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = Hidden::new(socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?)?;
    if local.is_ipv6() {
        set_ipv6_v6only(&socket, v6_only)?;
    }
    // Connections of an earlier program in TIME-WAIT do not matter: none of ours is the kernel's.
    set_socket_reuseaddr(&socket, true)?;
    set_socket_reuseport(&socket, is_shared)?;
    refuse_packets(socket.as_fd())?;
    bind(&socket, &local)?;
    listen(&socket, 0)?;
    Ok(socket)
}

/// Has a socket drop every packet: if it listens, it reserves its port.
///
/// # Errors
/// The kernel's, if the descriptor is not a socket.
pub fn refuse_packets(socket: BorrowedFd<'_>) -> io::Result<()> {
    socket_filter::attach(socket, &[REFUSE])
}

/// True for a socket with a filter of another kind than that of [`refuse_packets`].
pub fn is_filtered(socket: BorrowedFd<'_>) -> bool {
    // The kernel tells no filter of another form (`sk_get_filter`).
    socket_filter::attached(socket).map_or(true, |it| !it.is_empty() && it != [REFUSE])
}

/// Port of a reservation.
///
/// # Errors
/// The kernel's, if the descriptor is not a socket.
pub fn port_of(reserved: &Hidden) -> io::Result<u16> {
    let address = SocketAddr::try_from(getsockname(reserved)?)?;
    Ok(address.port())
}
