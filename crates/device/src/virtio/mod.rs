//! virtio-net over vhost-user: a driver in user space that does not trust its device.
//!
//! ```text
//!  back end ══ used ring ══► receive ─► head in a private frame, payload where the device put it
//!     ▲                        │ ▲
//!     ╚════ avail ring ════ buffers ◄── average of packet lengths
//! ```
//!
//! The back end may write anything anywhere in the shared memory at any time: rings, receive
//! buffers and packets to send. All state that the driver relies on is private: which buffers the
//! device has, their addresses and lengths. Packet headers are parsed from a private copy.

mod open; //     a device over its socket, and a source for each queue pair
mod memory; //   layout of the shared memory
mod connect; //  connecting the socket
mod frontend; // vhost-user messages
mod config; //   configuration space of a device
mod features; // feature negotiation
mod commands; // commands to a device
mod control; //  control queue
mod session; //  thread that connects to back ends, session after session
mod port; //     a queue's handle of the session
mod ends; //     reasons why sessions ended

mod average; //   average packet length
mod buffers; //   receive buffers, sized by the average
mod header; //    virtio-net header
mod copybreak; // number of bytes copied of a packet
mod receive; //   from used buffers to packets
mod transmit; //  from packets to buffers
mod source; //    one queue pair, as an engine polls it

pub use average::Average;
pub use open::VirtioDevice;
pub use session::QUEUE_PAIRS_MAX;
pub use source::VirtioSource;
