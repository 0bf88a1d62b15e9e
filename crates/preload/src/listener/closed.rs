//! Ports that connections of closed listeners still have.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError, Weak};

use forebay_device::rx_filter::FilterProtocol;
use forebay_sys::hidden::Hidden;
use rustix::net::sockopt::{set_socket_reuseport, socket_reuseaddr};

use crate::runtime::is_taken;
use crate::{abi, passing};

/// Sockets of listeners that are closed, by port. Connections that they have accepted keep them, so that the
/// kernel does not answer for those.
pub(super) static CLOSED: Mutex<Vec<(u16, Weak<Hidden>)>> = Mutex::new(Vec::new());

/// Lets a socket be bound to a port that connections of a closed listener still have, as the kernel permits
/// with `SO_REUSEADDR`. False if that is not why `bind` has failed.
pub(crate) fn share_with_closed(descriptor: BorrowedFd<'_>, local: SocketAddr) -> bool {
    if !is_taken(FilterProtocol::Tcp, local) || !abi::is_plain(descriptor, FilterProtocol::Tcp) {
        return false;
    }
    let has_stopped = passing::stop_leaving(local);
    if !socket_reuseaddr(descriptor).unwrap_or(false) {
        return has_stopped;
    }
    let mut closed = CLOSED.lock().unwrap_or_else(PoisonError::into_inner);
    closed.retain(|(_, socket)| socket.strong_count() > 0);
    let is_same = |(port, _): &&(u16, Weak<Hidden>)| *port == local.port();
    let sockets = closed.iter().filter(is_same).filter_map(|(_, socket)| socket.upgrade());
    let mut is_shared = false;
    for socket in sockets {
        is_shared |= set_socket_reuseport(&socket, true).is_ok();
    }
    is_shared && set_socket_reuseport(descriptor, true).is_ok() || has_stopped
}
