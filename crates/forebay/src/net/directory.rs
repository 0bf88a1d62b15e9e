//! All sockets by id: a CPU finds the queue of a socket here when it delivers the first packet to
//! it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use forebay_stack::socket::SocketId;
use forebay_stack::socket::queue::SocketQueue;

use super::shared::SOCKETS_MAX;

/// Number of sockets in a block of the directory; a block is allocated as a whole.
const SHELF: usize = 256;

/// Entry of a socket, locked for a look-up, once per CPU that delivers packets to the socket.
type SocketPlace = Mutex<Option<Arc<SocketQueue>>>;

/// Sockets bound now.
pub(super) struct Directory {
    shelves: Box<[OnceLock<Box<[SocketPlace]>>]>,
    closed: AtomicU64,
}

impl Directory {
    /// Enters a socket, in place of a closed one.
    pub(super) fn enter(&self, hub: Arc<SocketQueue>) {
        let index = hub.id().index();
        let shelf = || (0..SHELF).map(|_| Mutex::default()).collect();
        let shelf = self.shelves[index / SHELF].get_or_init(shelf);
        *lock(&shelf[index % SHELF]) = Some(hub);
    }

    /// Removes a closed socket. Each CPU drops its inlet at its next check.
    pub(super) fn remove(&self, socket: SocketId) {
        if let Some(place) = self.place(socket) {
            lock(place).take_if(|hub| hub.id() == socket);
        }
        // Release: pairs with the Acquire in `closed`. A CPU that sees the new count sees the
        // socket closed.
        self.closed.fetch_add(1, Ordering::Release);
    }

    /// Queue of a socket; `None` once the socket is closed.
    pub(super) fn find(&self, socket: SocketId) -> Option<Arc<SocketQueue>> {
        lock(self.place(socket)?).as_ref().filter(|hub| hub.id() == socket).cloned()
    }

    /// Number of sockets closed so far.
    pub(super) fn closed(&self) -> u64 {
        self.closed.load(Ordering::Acquire)
    }

    /// Queues of all sockets.
    pub(super) fn hubs(&self) -> impl Iterator<Item = Arc<SocketQueue>> {
        let places = self.shelves.iter().filter_map(OnceLock::get).flatten();
        places.filter_map(|place| lock(place).clone())
    }

    fn place(&self, socket: SocketId) -> Option<&SocketPlace> {
        let index = socket.index();
        self.shelves.get(index / SHELF)?.get()?.get(index % SHELF)
    }
}

fn lock(place: &SocketPlace) -> MutexGuard<'_, Option<Arc<SocketQueue>>> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Directory {
    fn default() -> Self {
        let shelves = (0..SOCKETS_MAX.div_ceil(SHELF)).map(|_| OnceLock::new()).collect();
        Self { shelves, closed: AtomicU64::new(0) }
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({} closed)", self.closed())
    }
}
