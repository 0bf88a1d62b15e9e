//! A port that is kept from the kernel's programs.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use rustix::net::sockopt::{set_ipv6_v6only, set_socket_recv_buffer_size, set_socket_reuseport};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, socket_with};

use super::socket_filter::FilterInstruction;

/// `BPF_RET | BPF_K` of no bytes: nothing gets past.
const REFUSE: FilterInstruction = FilterInstruction { code: 0x06, jt: 0, jf: 0, k: 0 };

/// Takes a port of the kernel's: a socket that receives nothing. So no other program binds it, and the
/// kernel does not answer that nobody is there where it sees what is sent to the port too.
///
/// # Errors
/// `EADDRINUSE` when a program has it; `EACCES` of a low port; when no descriptors are left.
pub fn reserve(local: SocketAddr, is_shared: bool, v6_only: bool) -> io::Result<UdpSocket> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP))?;
    if local.is_ipv6() {
        set_ipv6_v6only(&socket, v6_only)?;
    }
    set_socket_reuseport(&socket, is_shared)?;
    set_socket_recv_buffer_size(&socket, 0)?;
    super::socket_filter::attach(socket.as_fd(), &[REFUSE])?;
    bind(&socket, &local)?;
    Ok(UdpSocket::from(socket))
}
