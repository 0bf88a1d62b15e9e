//! Socket: UDP socket lookup, and the queue from any CPU to the socket's one reader.
//!
//! ```text
//!  datagram ─► table: which socket ─► Inlet (one a CPU) ─►║ rings ║─► Outlet ─► the reader
//!                                      └ charged to its account      └ by ticket: in order over all CPUs
//! ```
//!
//! A CPU creates its inlet when it delivers the socket's first datagram, so a CPU that never
//! delivers to a socket has no state for it.
//!
//! A socket holds at most `rcvbuf` bytes of packet memory, in its queue and in its reader's hands:
//! this limits the memory that a slow reader takes from others.

pub mod table; //      which socket: the kernel's rules
pub mod connection_id; // QUIC: which member of a group
pub mod queue; //      many CPUs to one reader, in order, without a lock
pub mod reader; //     the reader's end: what it has taken out, and the way home for that
pub mod account; //    how much a socket holds, and the kernel's rule what it may
pub mod reclaim; //    what becomes of a datagram's memory
pub mod copy_cache; // small datagrams of slow readers, in buffers that go round

#[cfg(test)]
mod testutil;

use std::fmt;

/// Unique id of a socket: a slot index in the lower half, and above it a generation, the number of
/// sockets that used the slot before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u64);

impl SocketId {
    /// Id of the socket that uses a slot after `generation` others.
    #[must_use]
    pub fn new(slot: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }

    /// The slot, which is reused once the socket is closed.
    #[must_use]
    pub fn index(self) -> usize {
        self.slot() as usize
    }

    #[expect(clippy::cast_possible_truncation, reason = "what is cut off is the generation")]
    fn slot(self) -> u32 {
        self.0 as u32
    }

    /// Number of sockets that used the slot before.
    #[must_use]
    pub fn generation(self) -> u32 {
        u32::try_from(self.0 >> 32).unwrap_or(u32::MAX)
    }
}

impl fmt::Display for SocketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.index().fmt(f)
    }
}

impl fmt::Debug for SocketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "socket{}.{}", self.index(), self.generation())
    }
}
