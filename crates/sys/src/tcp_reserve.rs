//! Reservation of a TCP port against other programs on the kernel's stack.
//!
//! A listener's reservation lives as long as its connections do. Once the listener is closed, its port can be listened on
//! again beside the reservation, as the kernel permits beside connections with `SO_REUSEADDR`.

use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::sockopt::{
    ipv6_v6only, set_ipv6_v6only, set_socket_reuseaddr, set_socket_reuseport, socket_reuseaddr,
    socket_reuseport,
};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, getsockname, ipproto, listen, socket_with,
};

use super::drop_filter::refuse_packets;
use super::hidden::Hidden;

/// Reservations of listeners. Who forks a process of several threads keeps the lock meanwhile, so that it is free in the
/// child.
pub static LISTENERS: Mutex<Listeners> = Mutex::new(Listeners(Vec::new()));

/// Reservations of this process's listeners. Each is open while it is listed.
#[derive(Debug)]
pub struct Listeners(Vec<Listed>);

impl Listeners {
    /// True if a listener is open that excludes another one at an address.
    fn has_live(&self, local: Local, is_shared: bool) -> bool {
        let is_shared = |it: &Listed| is_shared && socket_reuseport(it.socket()).unwrap_or(false);
        self.at(local).any(|it| it.is_live && !is_shared(it))
    }

    /// Reservations of closed listeners at an address that permit others (`SO_REUSEADDR`).
    fn closed(&self, local: Local) -> impl Iterator<Item = BorrowedFd<'_>> {
        let closed = self.at(local).filter(|it| !it.is_live).map(Listed::socket);
        closed.filter(|it| socket_reuseaddr(it).unwrap_or(false))
    }

    fn at(&self, local: Local) -> impl Iterator<Item = &Listed> {
        self.0.iter().filter(move |it| it.local.overlaps(local))
    }
}

#[derive(Debug)]
struct Listed {
    number: RawFd,
    local: Local,
    /// False of a listener that is closed, whose connections keep the reservation.
    is_live: bool,
}

impl Listed {
    fn socket(&self) -> BorrowedFd<'_> {
        // SAFETY: it is open while it is listed, and it is borrowed from the list.
        unsafe { BorrowedFd::borrow_raw(self.number) }
    }
}

/// Address that a socket is bound to, or is to be.
#[derive(Clone, Copy, Debug)]
struct Local {
    address: SocketAddr,
    v6_only: bool,
}

impl Local {
    fn of(socket: BorrowedFd<'_>, mut address: SocketAddr) -> Result<Self, Errno> {
        let v6_only = address.is_ipv6() && ipv6_v6only(socket)?;
        address.set_ip(address.ip().to_canonical());
        Ok(Self { address, v6_only })
    }

    /// True if sockets at both addresses can get the same packet.
    fn overlaps(self, other: Self) -> bool {
        let [ours, theirs] = [self, other].map(|it| it.address.ip());
        let is_any = ours.is_unspecified() || theirs.is_unspecified();
        let shares_family = || [true, false].iter().any(|&ipv4| self.has(ipv4) && other.has(ipv4));
        self.address.port() == other.address.port() && (ours == theirs || is_any && shares_family())
    }

    /// True if packets of IPv4, or of IPv6, go to it.
    fn has(self, is_ipv4: bool) -> bool {
        let ip = self.address.ip();
        ip.is_ipv4() == is_ipv4 || ip.is_ipv6() && ip.is_unspecified() && !self.v6_only
    }
}

/// Kernel socket that reserves a port: other programs cannot bind it, and the kernel does not answer segments to it with
/// a reset. It listens, and drops every packet.
#[derive(Debug)]
pub struct Reservation {
    socket: ManuallyDrop<Hidden>,
    is_of_listener: bool,
}

impl Reservation {
    /// Reserves the port of a listener. A shared port can be reserved again (`SO_REUSEPORT`).
    ///
    /// # Errors
    /// `EADDRINUSE` if a program, or a listener of this one that is not closed, has the port; `EACCES` for a privileged
    /// port; if no descriptors are left.
    pub fn listen(local: SocketAddr, is_shared: bool, v6_only: bool) -> io::Result<Self> {
        let socket = new_socket(local, is_shared, v6_only)?;
        beside_closed(socket.as_fd(), local, || bind(&socket, &local))?;
        beside_closed(socket.as_fd(), local, || listen(&socket, 0))?;
        Self::of_listener(socket)
    }

    /// Reserves a port for a connection, which the kernel chooses if `local` has none.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn of_connection(local: SocketAddr) -> io::Result<Self> {
        let socket = new_socket(local, false, true)?;
        bind(&socket, &local)?;
        listen(&socket, 0)?;
        Ok(Self { socket: ManuallyDrop::new(socket), is_of_listener: false })
    }

    /// The reservation of a listener by a socket that listens, and that [drops every packet](refuse_packets).
    ///
    /// # Errors
    /// The kernel's, if the descriptor is not a socket.
    pub fn of_listener(socket: Hidden) -> io::Result<Self> {
        let local = Local::of(socket.as_fd(), local_addr(&socket)?)?;
        let number = socket.as_fd().as_raw_fd();
        listeners().0.push(Listed { number, local, is_live: true });
        Ok(Self { socket: ManuallyDrop::new(socket), is_of_listener: true })
    }

    /// Port that is reserved.
    ///
    /// # Errors
    /// The kernel's, if the descriptor is not a socket.
    pub fn port(&self) -> io::Result<u16> {
        local_addr(self).map(|local| local.port())
    }

    /// Tells if the listener is open: once it is closed, the port can be listened on again, while connections keep the
    /// reservation.
    pub fn set_live(&self, is_live: bool) {
        let number = self.as_fd().as_raw_fd();
        if let Some(listed) = listeners().0.iter_mut().find(|it| it.number == number) {
            listed.is_live = is_live;
        }
    }

    /// Forgets the reservation, whose descriptor is then closed without it.
    pub fn unlist(&self) {
        listeners().0.retain(|it| it.number != self.as_fd().as_raw_fd());
    }
}

impl AsFd for Reservation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // A listener's is closed with the list locked: who finds the port in use, and locks the list, finds either the
        // reservation there or the port free.
        let listeners = self.is_of_listener.then(|| {
            let mut listeners = listeners();
            listeners.0.retain(|it| it.number != self.as_fd().as_raw_fd());
            listeners
        });
        // SAFETY: it is dropped once, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.socket) };
        drop(listeners);
    }
}

/// Calls `bind` or `listen` for a socket, and if the port is in use only by closed listeners, once more with
/// `SO_REUSEPORT` set on their reservations and on the socket. All must have `SO_REUSEADDR`: with that, Linux permits
/// what a closed listener has left, its connections, but not a reservation, which listens.
///
/// The options are taken back. As the kernel keeps the port's state (`fastreuseport`), other sockets of this user that have
/// `SO_REUSEPORT` can be bound to it until it is free.
///
/// # Errors
/// The last call's.
pub fn beside_closed(
    socket: BorrowedFd<'_>,
    address: SocketAddr,
    call: impl Fn() -> Result<(), Errno>,
) -> Result<(), Errno> {
    let called = call();
    if called != Err(Errno::ADDRINUSE) {
        return called;
    }
    let listeners = listeners();
    let (local, is_shared) = (Local::of(socket, address)?, socket_reuseport(socket)?);
    if !socket_reuseaddr(socket)? || listeners.has_live(local, is_shared) {
        return called;
    }
    let mut to_share: Vec<_> = listeners.closed(local).collect();
    if !to_share.is_empty() {
        to_share.push(socket);
    }
    to_share.retain(|it| socket_reuseport(it).is_ok_and(|is_shared| !is_shared));
    // Ignored: if an option cannot be set, the call tells again that the port is in use.
    let share = |is_shared| to_share.iter().for_each(|it| _ = set_socket_reuseport(it, is_shared));
    share(true);
    // Also if there is none: the last one may have been closed since.
    let called = call();
    share(false);
    called
}

fn new_socket(local: SocketAddr, is_shared: bool, v6_only: bool) -> io::Result<Hidden> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    let socket = Hidden::new(socket)?;
    if local.is_ipv6() {
        set_ipv6_v6only(&socket, v6_only)?;
    }
    // Connections of an earlier program in TIME-WAIT do not matter: none of ours is the kernel's.
    set_socket_reuseaddr(&socket, true)?;
    set_socket_reuseport(&socket, is_shared)?;
    refuse_packets(socket.as_fd())?;
    Ok(socket)
}

fn local_addr(socket: impl AsFd) -> io::Result<SocketAddr> {
    Ok(SocketAddr::try_from(getsockname(socket)?)?)
}

fn listeners() -> MutexGuard<'static, Listeners> {
    LISTENERS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserve(local: &str, port: u16, is_shared: bool, v6_only: bool) -> io::Result<Reservation> {
        let ip = local.parse().unwrap();
        Reservation::listen(SocketAddr::new(ip, port), is_shared, v6_only)
    }

    fn is_in_use(reserved: io::Result<Reservation>) -> bool {
        reserved.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
    }

    #[test]
    fn tcp_16_closed_listener_permits_one() {
        let first = reserve("127.0.0.1", 0, false, true).unwrap();
        let port = first.port().unwrap();
        assert!(is_in_use(reserve("127.0.0.1", port, false, true)));
        first.set_live(false);
        let second = reserve("127.0.0.1", port, false, true).unwrap();
        assert!(!socket_reuseport(&first).unwrap() && !socket_reuseport(&second).unwrap());
        for local in ["127.0.0.1", "0.0.0.0"] {
            assert!(is_in_use(reserve(local, port, false, true)), "{local}");
        }
        second.set_live(false);
        drop(first);
        reserve("0.0.0.0", port, false, true).unwrap();
    }

    #[test]
    fn tcp_16_strangers_listener_stays_alone() {
        let local = "127.0.0.1:0".parse().unwrap();
        let stranger = new_socket(local, true, true).unwrap();
        bind(&stranger, &local).unwrap();
        listen(&stranger, 0).unwrap();
        let port = local_addr(&stranger).unwrap().port();
        assert!(is_in_use(reserve("127.0.0.1", port, false, true)));
    }

    #[test]
    fn tcp_16_families_are_told_apart() {
        let v6 = reserve("::", 0, false, true).unwrap();
        let port = v6.port().unwrap();
        let _v4 = reserve("0.0.0.0", port, false, true).unwrap();
        v6.set_live(false);
        assert!(is_in_use(reserve("::", port, false, false)), "of both");
        reserve("::", port, false, true).unwrap();
    }

    #[test]
    fn tcp_16_shared_listeners_follow_closed() {
        let first = reserve("127.0.0.1", 0, false, true).unwrap();
        let port = first.port().unwrap();
        let other = reserve("127.0.0.2", port, false, true).unwrap();
        first.set_live(false);
        other.set_live(false);
        let shared = ["127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.2"];
        let shared = shared.map(|local| reserve(local, port, true, true).unwrap());
        assert!(is_in_use(reserve("127.0.0.1", port, false, true)));
        shared.iter().for_each(|it| it.set_live(false));
        reserve("127.0.0.1", port, false, true).unwrap();
    }
}
