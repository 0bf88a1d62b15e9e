//! AF_XDP: frames that the driver, or the kernel right behind it, puts into our memory.

mod assembler; //      eBPF, a line for each instruction
mod attach; //         the program on its interface, and the map of its sockets
mod btf; //            which number the kernel gave a function of its own
mod metadata; //       the device's hash, in front of the packet
pub mod program; //        which packets go to our sockets

pub use attach::{AttachOptions, Attached};
pub use metadata::MetadataLayout;
