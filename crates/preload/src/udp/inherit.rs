//! UDP sockets that a process has from its parent. In place of each that it uses, the process opens one of its own engine.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use forebay::net::SocketOptions;
use forebay_sys::hidden::Hidden;
use rustix::io::Errno;
use rustix::net::getpeername;

use super::{Udp, place};
use crate::abi;
use crate::epoll_sets::Registered;
use crate::option::SocketOption;
use crate::runtime::{has_just_failed, may_be_beside, note_use, running};
use crate::socket::Socket;
use crate::udp_options::RECVERR;
use crate::{fork_locks, table};

/// Sockets that this process has, its parent's among them, and those that it has not used.
static SOCKETS: AtomicUsize = AtomicUsize::new(0);
static UNUSED: AtomicUsize = AtomicUsize::new(0);

/// Sockets of this process by which it has not sent, either: its children may be to use them.
static UNTOUCHED: AtomicUsize = AtomicUsize::new(0);

/// Taken while a socket is opened in place of the parent's.
static ADOPTING: Mutex<()> = Mutex::new(());

/// True if a call that waits may wait for a socket that this process has not used yet.
pub(crate) fn any_unused() -> bool {
    UNUSED.load(Ordering::Relaxed) > 0
}

/// True if this process has a socket that may be for its children.
pub(crate) fn any_untouched() -> bool {
    UNTOUCHED.load(Ordering::Relaxed) > 0
}

/// Keeps the lock of this module until the process has forked.
pub(crate) fn keep_locks() {
    fork_locks::lock(&ADOPTING).into_iter().for_each(fork_locks::keep);
}

/// Begins anew in a child, which has used none of the sockets.
pub(crate) fn forked() {
    UNUSED.store(SOCKETS.load(Ordering::Relaxed), Ordering::Relaxed);
    UNTOUCHED.store(0, Ordering::Relaxed);
}

/// Opens a socket of this process's engine in place of its parent's. If that fails, calls on the parent's are refused.
pub(crate) fn adopt(socket: &Arc<Socket>) {
    let _adopting = ADOPTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Socket::Udp(parents) = &**socket
        && may_be_beside()
        && !has_just_failed()
        && parents.open_own(socket).is_ok()
    {
        parents.close_copy();
    }
}

impl Udp {
    /// Opens a socket like this one in its place. Once another thread has done so it has no numbers.
    fn open_own(&self, socket: &Arc<Socket>) -> Result<(), Errno> {
        if table::numbers_of(socket).is_empty() {
            return Ok(());
        }
        let runtime = running()?;
        let kept = self.reserved().map(Hidden::duplicate).transpose()?;
        let of_kernel = (Hidden::duplicate(self.kernel())?, self.bound_to, self.v6_only);
        let bind = |options: SocketOptions| options.bind_reserved(self.bound_to, kept);
        // Another thread may close a number, and open a file there: what takes long is done before.
        let registered = Registered::of(table::numbers_of(socket));
        let mut numbers = Vec::new();
        let place_all = |readiness: BorrowedFd<'_>, kernel: BorrowedFd<'_>| {
            numbers = table::numbers_of(socket);
            numbers.retain(|number| place(*number, readiness, kernel, &registered).is_ok());
            Ok(())
        };
        let mut own = Self::open(runtime, of_kernel, bind, place_all)?;
        own.was_used = self.is_used.load(Ordering::Relaxed) || self.was_used;
        own.ended.store(self.ended.load(Ordering::Acquire), Ordering::Release);
        own.follow_kernels();
        let own = Arc::new(Socket::Udp(own));
        // Never dropped: threads of the parent may have held its locks.
        std::mem::forget(Arc::clone(socket));
        numbers.iter().for_each(|number| table::exchange(*number, socket, &own));
        Ok(())
    }

    /// Follows the kernel's socket at the port, which the parent may have connected, or may have had told of errors.
    fn follow_kernels(&self) {
        let Some(reserved) = self.reserved() else { return };
        let is_on = |option: &SocketOption| abi::is_on(self.kernel(), *option);
        if RECVERR.iter().any(is_on) {
            self.watch_errors(reserved);
        }
        if let Some(peer) = peer_of(reserved) {
            let _ = self.follow_peer(reserved, peer); // the parent was connected to it
        }
    }

    /// Takes a part of the datagrams to the address, as the program waits for one.
    ///
    /// # Errors
    /// `EBADF` as long as the parent, or another child of it, receives by the socket, as it did when this process was forked:
    /// what has come is in its queue.
    pub(crate) fn begin_use(&self) -> Result<(), Errno> {
        if self.is_used.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.was_used && self.part.has_other_users() {
            return Err(self.origin.refuse(
                "a UDP socket was read",
                "read it in one process, or bind one in each (SO_REUSEPORT)",
            ));
        }
        if self.is_used.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        self.touch();
        UNUSED.fetch_sub(1, Ordering::Relaxed);
        note_use();
        self.part.begin_use();
        Ok(())
    }

    /// Notes that this process sends by the socket, or waits for datagrams.
    pub(super) fn touch(&self) {
        if !self.is_touched.load(Ordering::Relaxed)
            && !self.is_touched.swap(true, Ordering::Relaxed)
        {
            UNTOUCHED.fetch_sub(1, Ordering::Relaxed);
            self.path_error.begin();
        }
    }

    /// Counts a socket that is opened.
    pub(super) fn count() {
        SOCKETS.fetch_add(1, Ordering::Relaxed);
        UNUSED.fetch_add(1, Ordering::Relaxed);
        UNTOUCHED.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a socket, or a copy of the parent's, that is closed.
    pub(super) fn count_closed(is_used: bool, is_touched: bool) {
        SOCKETS.fetch_sub(1, Ordering::Relaxed);
        UNUSED.fetch_sub(usize::from(!is_used), Ordering::Relaxed);
        UNTOUCHED.fetch_sub(usize::from(!is_touched), Ordering::Relaxed);
    }
}

fn peer_of(reserved: BorrowedFd<'_>) -> Option<std::net::SocketAddr> {
    getpeername(reserved).ok().flatten()?.try_into().ok()
}
