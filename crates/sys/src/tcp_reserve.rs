//! Reservation of a TCP port against other programs on the kernel's stack.
//!
//! A reservation lives as long as a connection of its listener, and can be listened beside once that is closed, as the
//! kernel permits with `SO_REUSEADDR`.

use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::sockopt::{
    set_ipv6_v6only, set_socket_reuseaddr, set_socket_reuseport, socket_reuseaddr,
};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, getsockname, ipproto, listen, socket_with,
};

use super::hidden::Hidden;
use super::socket_filter::{self, FilterInstruction};

/// `BPF_RET | BPF_K` with 0: drops every packet.
const REFUSE: FilterInstruction = FilterInstruction { code: 0x06, jt: 0, jf: 0, k: 0 };

/// Reservations of listeners that are closed, by port. A reservation is open while it is in the list. A process that forks
/// keeps the list locked meanwhile, so that its child can lock it, too.
pub static CLOSED: Mutex<Vec<(u16, RawFd)>> = Mutex::new(Vec::new());

/// Kernel socket that reserves a port.
#[derive(Debug)]
pub struct Reservation(ManuallyDrop<Hidden>);

impl Reservation {
    /// Lets a kernel socket listen that drops every packet, and so reserves the port: other programs
    /// cannot bind it, and the kernel does not answer segments to it with a reset. A shared port can be
    /// reserved again (`SO_REUSEPORT`).
    ///
    /// # Errors
    /// `EADDRINUSE` if a program, or a listener of this one that is not closed, has the port; `EACCES` for a privileged
    /// port; if no descriptors are left.
    pub fn listen(local: SocketAddr, is_shared: bool, v6_only: bool) -> io::Result<Self> {
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
        match bind(&socket, &local) {
            Err(Errno::ADDRINUSE) => {
                share_with_closed(socket.as_fd(), local.port());
                bind(&socket, &local)?;
            }
            bound => bound?,
        }
        listen(&socket, 0)?;
        Ok(Self::from(socket))
    }

    /// Port that is reserved.
    ///
    /// # Errors
    /// The kernel's, if the descriptor is not a socket.
    pub fn port(&self) -> io::Result<u16> {
        let address = SocketAddr::try_from(getsockname(self)?)?;
        Ok(address.port())
    }

    /// Lets the port be listened at anew: the listener is closed, and connections keep the reservation.
    pub fn close_listener(&self) {
        // Of another kind of socket: it reserves no port.
        let Ok(port) = self.port() else { return };
        let (mut closed, entry) = (closed(), (port, self.as_fd().as_raw_fd()));
        if !closed.contains(&entry) {
            closed.push(entry);
        }
    }

    /// Forgets that the listener was closed, before the descriptor is closed without its owner.
    pub fn forget_closed(&self) {
        closed().retain(|(_, number)| *number != self.as_fd().as_raw_fd());
    }
}

impl From<Hidden> for Reservation {
    /// The reservation by a socket that listens, and that [drops every packet](refuse_packets).
    fn from(socket: Hidden) -> Self {
        Self(ManuallyDrop::new(socket))
    }
}

impl AsFd for Reservation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let number = self.as_fd().as_raw_fd();
        let mut closed = closed();
        closed.retain(|(_, it)| *it != number);
        // With the list locked: who finds the port in use either finds the reservation there, or the port free.
        // SAFETY: it is dropped once, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.0) };
        drop(closed);
    }
}

/// Lets a socket be bound to a port that `bind` has found in use, if only connections of closed listeners have it and all
/// have `SO_REUSEADDR`: to be called once, before `bind` is called again.
pub fn share_with_closed(socket: BorrowedFd<'_>, port: u16) {
    let closed = closed();
    if !socket_reuseaddr(socket).unwrap_or(false) {
        return;
    }
    let mut is_shared = false;
    for &(_, number) in closed.iter().filter(|(it, _)| *it == port) {
        // SAFETY: a reservation is open while it is in the list, which is locked.
        let reserved = unsafe { BorrowedFd::borrow_raw(number) };
        is_shared |= socket_reuseaddr(reserved).unwrap_or(false)
            && set_socket_reuseport(reserved, true).is_ok();
    }
    if is_shared {
        // Ignored: the port is then in use, which `bind` tells again.
        let _ = set_socket_reuseport(socket, true);
    }
}

fn closed() -> MutexGuard<'static, Vec<(u16, RawFd)>> {
    CLOSED.lock().unwrap_or_else(PoisonError::into_inner)
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
