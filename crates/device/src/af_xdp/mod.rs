//! AF_XDP: frames that the driver, or the kernel right behind it, puts into our memory.

mod open; //        an interface, its program, and a socket for each queue
mod assembler; //   eBPF, a line for each instruction
mod attach; //      the program on its interface, and the map of its sockets
mod btf; //         which number the kernel gave a function of its own
mod metadata; //    the device's hash, in front of the packet
pub mod program; // which packets go to our sockets

mod source; //      one queue: what is received, and what is sent
mod transmit; //    packets out of it: cut, counted, and back to where they belong

pub use attach::{AttachOptions, Attached};
pub use metadata::MetadataLayout;
pub use open::{Opened, XdpDevice};
pub use source::XdpSource;
