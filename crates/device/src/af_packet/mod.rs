//! AF_PACKET: frames of any interface, by a ring into which the kernel copies them. The kernel's
//! own stack receives them as well.

mod open; //   an interface, and a ring for each queue
mod block; //  parser of a block of the ring, and of a slot
mod slots; //  frames of a ring of slots
mod source; // frames in
mod sink; //   packets out

pub use open::{PacketOptions, PacketRing, open, open_for_fragments};
pub use sink::PacketSink;
pub use source::PacketSource;
