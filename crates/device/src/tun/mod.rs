//! TUN and TAP: the kernel's stack is on the other side. What it sends comes out of a [`TunSource`],
//! what a [`TunSink`] sends it receives.
//!
//! Packets come and go with a `virtio_net_hdr` before them: checksums that are still to be
//! completed, and TCP and UDP packets whole that are to be cut into segments (GSO), both ways.

mod open; //     a device that is there, or a new one
mod stats; //    what the kernel had to drop
mod sink; //     what is written to it
mod source; //   what is read from it
mod steering; // which queue a packet comes out of

pub use forebay_sys::tun::TunKind;
pub use open::TunDevice;
pub use sink::TunSink;
pub use source::TunSource;
