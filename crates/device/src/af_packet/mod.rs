//! AF_PACKET: frames of any interface, over a ring that the kernel copies them into. The kernel's own
//! stack sees them as well.

mod open; //   an interface, and a ring for each queue
mod block; //  what lies in a block of the ring
mod source; // frames in
mod sink; //   packets out

pub use open::{PacketOptions, open};
pub use sink::PacketSink;
pub use source::PacketSource;
