//! UDP sockets that a process has from its parent. In place of each that it uses, the process opens one of its own engine.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_sys::hidden::Hidden;
use rustix::io::Errno;
use rustix::net::getpeername;

use super::Udp;
use crate::membership::Membership;
use crate::runtime::{may_be_beside, note_use, running};
use crate::socket::Socket;
use crate::{fork_locks, table};

/// Sockets that this process has, its parent's among them, and those that it has not used.
static SOCKETS: AtomicUsize = AtomicUsize::new(0);
static UNUSED: AtomicUsize = AtomicUsize::new(0);

/// Taken while a socket is opened in place of the parent's.
static ADOPTING: Mutex<()> = Mutex::new(());

/// True if a call that waits may wait for a socket that this process has not used yet.
pub(crate) fn are_some_unused() -> bool {
    UNUSED.load(Ordering::Relaxed) > 0
}

/// Keeps the lock of this module until the process has forked.
pub(crate) fn keep_locks() {
    fork_locks::lock(&ADOPTING).into_iter().for_each(fork_locks::keep);
}

/// Begins anew in a child, which has used none of the sockets.
pub(crate) fn forked() {
    UNUSED.store(SOCKETS.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Opens a socket of this process's engine in place of its parent's. If that fails, calls on the parent's are refused.
pub(crate) fn adopt(socket: &Arc<Socket>) {
    let _adopting = ADOPTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Socket::Udp(parents) = &**socket
        && may_be_beside()
        && parents.open_own(socket).is_ok()
    {
        // It stays as it is: threads of the parent may have held its locks.
        std::mem::forget(Arc::clone(socket));
        parents.close_copy();
    }
}

impl Udp {
    /// Opens a socket like this one at the same numbers. Once another thread has done so there are none.
    fn open_own(&self, socket: &Arc<Socket>) -> Result<(), Errno> {
        let numbers = table::numbers_of(socket);
        if numbers.is_empty() {
            return Ok(());
        }
        let runtime = running()?;
        let kept = self.reserved().map(Hidden::duplicate).transpose()?;
        let peer = self.reserved().and_then(peer_of);
        let mut own = Self::open(
            runtime,
            (Hidden::duplicate(self.kernel())?, self.bound_to, self.v6_only),
            |options| options.bind_reserved(self.bound_to, kept),
            &numbers,
        )?;
        own.was_used = self.is_used.load(Ordering::Relaxed) || self.was_used;
        own.ended.store(self.ended.load(Ordering::Acquire), Ordering::Release);
        if let Some(peer) = peer {
            own.connect(peer)?;
        }
        let own = Arc::new(Socket::Udp(own));
        std::mem::forget(Arc::clone(socket));
        numbers.iter().for_each(|number| table::insert(*number, Arc::clone(&own)));
        Ok(())
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
        let has_others =
            |membership: &Arc<Membership>| self.divided().any(|at| membership.has_other_users(at));
        if self.was_used && self.membership.as_ref().is_some_and(has_others) {
            return Err(self.origin.refuse(
                "a UDP socket was read",
                "read it in one process, or bind one in each (SO_REUSEPORT)",
            ));
        }
        if self.is_used.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        UNUSED.fetch_sub(1, Ordering::Relaxed);
        note_use();
        if let Some(membership) = &self.membership {
            self.divided().for_each(|at| membership.begin_use(at));
        }
        Ok(())
    }

    /// Counts a socket that is opened.
    pub(super) fn count() {
        SOCKETS.fetch_add(1, Ordering::Relaxed);
        UNUSED.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a socket, or a copy of the parent's, that is closed.
    pub(super) fn count_closed(is_used: bool) {
        SOCKETS.fetch_sub(1, Ordering::Relaxed);
        UNUSED.fetch_sub(usize::from(!is_used), Ordering::Relaxed);
    }
}

fn peer_of(reserved: BorrowedFd<'_>) -> Option<std::net::SocketAddr> {
    getpeername(reserved).ok().flatten()?.try_into().ok()
}
