//! AF_XDP: frames that the driver, or generic XDP behind it, puts into packet memory.

mod open; //        an interface, its program, and a socket for each queue
mod assembler; //   eBPF, a line for each instruction
mod attach; //      the program on its interface, and the map of its sockets
mod btf; //         BTF id of a kernel function
mod metadata; //    the device's hash, in front of the packet
pub mod program; // XDP program: redirects the filter's packets to the sockets

mod look; //        times of looks at what no ring reports
mod source; //      one queue: frames received, frames sent
mod transmit; //    transmit half of a queue: cut, count, return frames

pub use attach::{AttachOptions, Attached};
pub use metadata::MetadataLayout;
pub use open::{Opened, XdpDevice};
pub use source::XdpSource;
