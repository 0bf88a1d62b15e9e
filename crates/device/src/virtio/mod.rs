//! virtio-net over vhost-user: a driver in user space, safe against a device that lies.
//!
//! ```text
//!  back end ══ used ring ══► receive ─► head in a private frame, pieces where the device put them
//!     ▲                        │ ▲
//!     ╚════ avail ring ════ buffers ◄── average of packet lengths
//! ```
//!
//! Memory is shared with the back end, which may write anything anywhere in it at any time: rings,
//! receive buffers and what is to be sent. All that the driver goes by is private: which buffers the
//! device has, where they are, how long; and what is parsed was copied in before.

mod open; //     a device over its socket, and a source for each queue pair
mod memory; //   what is shared with it
mod connect; //  the socket that it is reached by
mod frontend; // what is said there
mod config; //   what a device says of itself
mod features; // what is agreed on
mod commands; // what a device is told beyond that
mod control; //  the ring that it is told by
mod session; //  that there is one, time and again
mod port; //     what a queue knows of it
mod ends; //     why it went

mod average; //   how long packets are
mod buffers; //   receive buffers as large as those
mod header; //    what the device says before a packet
mod copybreak; // how much of a packet is copied in
mod receive; //   from used buffers to packets
mod transmit; //  from packets to buffers
mod source; //    one queue pair, as an engine polls it

pub use average::Average;
pub use open::VirtioDevice;
pub use session::QUEUE_PAIRS_MAX;
pub use source::VirtioSource;
