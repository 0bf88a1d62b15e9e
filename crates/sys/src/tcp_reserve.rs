//! Reservation of a TCP port against other programs on the kernel's stack.
//!
//! A listener's reservation lives as long as its connections do. Once the listener is closed, its port can be listened at
//! anew beside the reservation, as the kernel permits beside connections with `SO_REUSEADDR`.

use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::sockopt::{
    set_ipv6_v6only, set_socket_reuseaddr, set_socket_reuseport, socket_reuseaddr, socket_reuseport,
};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, getsockname, ipproto, listen, socket_with,
};

use super::hidden::Hidden;
use super::socket_filter::{self, FilterInstruction};

/// `BPF_RET | BPF_K` with 0: drops every packet.
const REFUSE: FilterInstruction = FilterInstruction { code: 0x06, jt: 0, jf: 0, k: 0 };

/// Reservations of listeners. Who forks a process of several threads keeps the lock meanwhile, so that it is free in the
/// child.
pub static LISTENERS: Mutex<Listeners> = Mutex::new(Listeners(Vec::new()));

/// Reservations of this process's listeners. Each is open while it is listed.
#[derive(Debug)]
pub struct Listeners(Vec<Listed>);

#[derive(Clone, Copy, Debug)]
struct Listed {
    number: RawFd,
    local: SocketAddr,
    /// False of a listener that is closed, whose connections keep the reservation.
    is_live: bool,
}

impl Listed {
    /// True if sockets at these addresses exclude each other, or one at a wildcard of any family.
    fn overlaps(&self, local: SocketAddr) -> bool {
        let [ours, theirs] = [self.local, local].map(|address| address.ip().to_canonical());
        self.local.port() == local.port()
            && (ours == theirs || ours.is_unspecified() || theirs.is_unspecified())
    }
}

/// Kernel socket that reserves a port: other programs cannot bind it, and the kernel does not answer segments to it with
/// a reset. It listens, and drops every packet.
#[derive(Debug)]
pub struct Reservation {
    socket: ManuallyDrop<Hidden>,
    is_listeners: bool,
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
        Ok(Self { socket: ManuallyDrop::new(socket), is_listeners: false })
    }

    /// The reservation of a listener by a socket that listens, and that [drops every packet](refuse_packets).
    ///
    /// # Errors
    /// The kernel's, if the descriptor is not a socket.
    pub fn of_listener(socket: Hidden) -> io::Result<Self> {
        let local = SocketAddr::try_from(getsockname(&socket)?)?;
        let number = socket.as_fd().as_raw_fd();
        listeners().0.push(Listed { number, local, is_live: true });
        Ok(Self { socket: ManuallyDrop::new(socket), is_listeners: true })
    }

    /// Port that is reserved.
    ///
    /// # Errors
    /// The kernel's, if the descriptor is not a socket.
    pub fn port(&self) -> io::Result<u16> {
        let address = SocketAddr::try_from(getsockname(self)?)?;
        Ok(address.port())
    }

    /// Lets the port be listened at anew: the listener is closed, and connections may keep the reservation.
    pub fn close_listener(&self) {
        let number = self.as_fd().as_raw_fd();
        if let Some(listed) = listeners().0.iter_mut().find(|it| it.number == number) {
            listed.is_live = false;
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
        // A listener's is closed with the list locked: who finds the port in use then finds the reservation there, too.
        let listeners = self.is_listeners.then(|| {
            let mut listeners = listeners();
            listeners.0.retain(|it| it.number != self.as_fd().as_raw_fd());
            listeners
        });
        // SAFETY: it is dropped once, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.socket) };
        drop(listeners);
    }
}

/// Calls `bind` or `listen` for a socket, and once more if only closed listeners have the port, with `SO_REUSEPORT` set for
/// the time of the call: then with `SO_REUSEADDR` the kernel would find connections only.
///
/// # Errors
/// Those of the call.
pub fn beside_closed(
    socket: BorrowedFd<'_>,
    local: SocketAddr,
    call: impl Fn() -> Result<(), Errno>,
) -> Result<(), Errno> {
    let called = call();
    if called != Err(Errno::ADDRINUSE) {
        return called;
    }
    let listeners = listeners();
    let others = || listeners.0.iter().filter(|it| it.overlaps(local));
    if !socket_reuseaddr(socket)? || others().any(|it| it.is_live) {
        return called;
    }
    // SAFETY: what is listed is open, and the list is locked.
    let others = others().map(|it| unsafe { BorrowedFd::borrow_raw(it.number) });
    let permit = |other: &BorrowedFd<'_>| socket_reuseaddr(other).unwrap_or(false);
    let sockets = others.filter(permit).chain([socket]);
    let unshared: Vec<_> =
        sockets.filter(|it| socket_reuseport(it).is_ok_and(|is_shared| !is_shared)).collect();
    // Ignored: the port is then in use, which the call tells again.
    let share = |is_shared| unshared.iter().for_each(|it| _ = set_socket_reuseport(it, is_shared));
    share(true);
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

fn listeners() -> MutexGuard<'static, Listeners> {
    LISTENERS.lock().unwrap_or_else(PoisonError::into_inner)
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
