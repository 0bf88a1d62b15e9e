//! The host's network stack: carries packets from delivery on a CPU to the readers of sockets.
//!
//! ```text
//!  Delivery ─► ingress ─► link ─► IP ─► reassembly ─► transport ─► socket table ─► queue ─► reader
//!              └── Network: what is for us, and whole ──────┘
//! ```
//!
//! Nothing here does I/O, reads a clock, starts a thread or draws a random number: times, seeds and
//! CPU ids are arguments.
#![forbid(unsafe_code)]

pub mod counter; // counters, each written by one CPU alone
pub mod host; //    the operating system's part: clock, sockets, devices
pub mod ingress; // the third spine: from the delivery's batch to the sockets
pub mod network; // IP receive processing: local address check, validation, reassembly
mod division; //     processes that have sockets at the same ports
pub mod socket; //  UDP socket lookup, and the queue to the socket's reader
pub mod tcp; //     TCP of one shard of a host: connections, listeners, timers

pub use division::Division;
pub use host::Host;
pub use ingress::Stack;
