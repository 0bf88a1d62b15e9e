//! All sockets by id: a CPU finds the queue of a socket here when it delivers the first packet to
//! it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use forebay_stack::socket::SocketId;
use forebay_stack::socket::counters::BLOCK_SOCKETS;
use forebay_stack::socket::queue::SocketQueue;

use super::shared::SOCKETS_MAX;

/// Entry of a socket, locked for a look-up, once per CPU that delivers packets to the socket.
type SocketPlace = Mutex<Option<Arc<SocketQueue>>>;

/// Sockets bound now.
pub(super) struct Directory {
    blocks: Box<[OnceLock<Box<[SocketPlace]>>]>,
    closed: AtomicU64,
}

impl Directory {
    /// Enters a socket, in place of a closed one.
    pub(super) fn enter(&self, queue: Arc<SocketQueue>) {
        let index = queue.id().index();
        let block = || (0..BLOCK_SOCKETS).map(|_| Mutex::default()).collect();
        let block = self.blocks[index / BLOCK_SOCKETS].get_or_init(block);
        *lock(&block[index % BLOCK_SOCKETS]) = Some(queue);
    }

    /// Removes a closed socket. Each CPU drops its producer at its next check.
    pub(super) fn remove(&self, socket: SocketId) {
        if let Some(place) = self.place(socket) {
            lock(place).take_if(|queue| queue.id() == socket);
        }
        // Release: pairs with the Acquire in `closed`. A CPU that sees the new count sees the
        // socket closed.
        self.closed.fetch_add(1, Ordering::Release);
    }

    /// Queue of a socket; `None` once the socket is closed.
    pub(super) fn find(&self, socket: SocketId) -> Option<Arc<SocketQueue>> {
        lock(self.place(socket)?).as_ref().filter(|queue| queue.id() == socket).cloned()
    }

    /// Number of sockets closed so far.
    pub(super) fn closed(&self) -> u64 {
        self.closed.load(Ordering::Acquire)
    }

    /// Queues of all sockets.
    pub(super) fn queues(&self) -> impl Iterator<Item = Arc<SocketQueue>> {
        let places = self.blocks.iter().filter_map(OnceLock::get).flatten();
        places.filter_map(|place| lock(place).clone())
    }

    fn place(&self, socket: SocketId) -> Option<&SocketPlace> {
        let index = socket.index();
        self.blocks.get(index / BLOCK_SOCKETS)?.get()?.get(index % BLOCK_SOCKETS)
    }
}

fn lock(place: &SocketPlace) -> MutexGuard<'_, Option<Arc<SocketQueue>>> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Directory {
    fn default() -> Self {
        let blocks = (0..SOCKETS_MAX.div_ceil(BLOCK_SOCKETS)).map(|_| OnceLock::new()).collect();
        Self { blocks, closed: AtomicU64::new(0) }
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({} closed)", self.closed())
    }
}
