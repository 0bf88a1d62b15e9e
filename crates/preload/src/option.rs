//! Names of socket options, as `setsockopt` has them.

/// A socket option: its level, and its number there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SocketOption {
    pub(crate) level: i32,
    pub(crate) name: i32,
}

impl SocketOption {
    /// Option of all sockets (`SOL_SOCKET`).
    pub(crate) const fn of_socket(name: i32) -> Self {
        Self { level: libc::SOL_SOCKET, name }
    }

    pub(crate) const fn of_ipv4(name: i32) -> Self {
        Self { level: libc::IPPROTO_IP, name }
    }

    pub(crate) const fn of_ipv6(name: i32) -> Self {
        Self { level: libc::IPPROTO_IPV6, name }
    }

    pub(crate) const fn of_tcp(name: i32) -> Self {
        Self { level: libc::IPPROTO_TCP, name }
    }

    pub(crate) const fn of_udp(name: i32) -> Self {
        Self { level: libc::SOL_UDP, name }
    }
}
