//! Socket: which UDP socket a datagram is for, and its way from any CPU to the socket's one reader.
//!
//! ```text
//!  datagram ─► table: which socket ─► Inlet (one a CPU) ─►║ rings ║─► Outlet ─► the reader
//!                                      └ charged to its account      └ by ticket: in order over all CPUs
//! ```
//!
//! A socket holds at most `rcvbuf` bytes of packet memory, in its queue and in its reader's hands:
//! what a slow reader keeps from others has that limit.

pub mod table; //   which socket: the kernel's rules
pub mod queue; //   many CPUs to one reader, in order, without a lock
pub mod account; // how much a socket holds, and the kernel's rule what it may
pub mod policy; //  what becomes of a datagram's memory
pub mod copy_cache; // small datagrams of slow readers, in buffers that go round

#[cfg(test)]
mod made_up;

use std::fmt;

/// A socket's place among all: a slot, used again after the socket is closed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u16);

impl SocketId {
    /// Where this socket stands in a table of all sockets.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl fmt::Display for SocketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for SocketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "socket{}", self.0)
    }
}
