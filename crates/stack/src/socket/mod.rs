//! Socket: UDP socket lookup, and the queue from any CPU to the socket's single reader.
//!
//! ```text
//!  datagram ─► table: which socket ─► producer (one per CPU) ─►║ rings ║─► consumer ─► the reader
//!                                      └ charged to its account        └ by ticket: in order over all CPUs
//! ```
//!
//! A CPU creates its producer when it delivers the first datagram to a socket. A CPU that never
//! delivers to a socket has no state for the socket.
//!
//! A socket holds at most `rcvbuf` bytes of packet memory, counting queued packets and those that
//! the reader has taken but not returned; a socket that holds nothing accepts one packet of any
//! size, as in the kernel. The limit bounds the memory that a slow reader can withhold.

pub mod table; //      UDP socket lookup by the kernel's rules
pub(crate) mod reuseport; // choice among sockets that share an address
pub mod connection_id; // member of a group, by the QUIC connection ID
pub mod queue; //      many CPUs to one reader, in order; locked only while a CPU joins
pub mod reader; //     the reader's end: packets taken out, and the return of their frames
pub mod counters; //   datagrams by socket and CPU
pub mod account; //    bytes charged to a socket, and the kernel's `rcvbuf` rule
pub mod reclaim; //    buffer policies for the memory of queued datagrams
pub mod copy_cache; // copies of small datagrams for slow readers, in recycled buffers

#[cfg(test)]
mod testutil;

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// Ports that the host chooses itself, for UDP and TCP (`ip_local_port_range`).
pub const LOCAL_PORTS: RangeInclusive<u16> = 32_768..=60_999;

/// Unique id of a socket: the slot index in the low 32 bits, the generation (number of sockets that
/// used the slot before) in the high 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u64);

/// Address in the family of the socket that shows it: an IPv6 socket shows IPv4 addresses as mapped (RFC 3493,
/// section 3.7).
#[must_use]
pub fn shown(address: SocketAddr, is_ipv6: bool) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) if is_ipv6 => {
            SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
        }
        _ => address,
    }
}

impl SocketId {
    /// Id of the socket that uses a slot after `generation` other sockets.
    #[must_use]
    pub fn new(slot: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }

    /// Slot index. A slot is reused once its socket is closed.
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
