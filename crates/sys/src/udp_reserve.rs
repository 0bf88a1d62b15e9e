//! Reservation of a UDP port against other programs on the kernel's stack.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use rustix::net::sockopt::{
    set_ipv6_v6only, set_socket_recv_buffer_size, set_socket_reuseaddr, set_socket_reuseport,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, socket_with};

use super::drop_filter::refuse_packets;
use super::hidden::Hidden;

/// Options of the socket that reserves a port.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReserveOptions {
    /// `SO_REUSEPORT`.
    pub reuse_port: bool,
    /// `SO_REUSEADDR`.
    pub reuse_address: bool,
    /// `IPV6_V6ONLY`, of an IPv6 socket.
    pub v6_only: bool,
}

/// Binds a kernel socket that drops every packet, and so reserves the port: other programs cannot
/// bind it, unless they share it by the same option, and the kernel does not answer packets to it
/// with ICMP port unreachable.
///
/// # Errors
/// `EADDRINUSE` if a program has the port; `EACCES` for a privileged port; if no descriptors are
/// left.
pub fn reserve(local: SocketAddr, options: ReserveOptions) -> io::Result<Hidden<UdpSocket>> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP))?;
    let socket = Hidden::<UdpSocket>::new(socket.into())?;
    if local.is_ipv6() {
        set_ipv6_v6only(&socket, options.v6_only)?;
    }
    set_socket_reuseport(&socket, options.reuse_port)?;
    set_socket_reuseaddr(&socket, options.reuse_address)?;
    set_socket_recv_buffer_size(&socket, 0)?;
    refuse_packets(socket.as_fd())?;
    bind(&socket, &local)?;
    Ok(socket)
}
