//! TUN and TAP: packets exchanged with the kernel's stack. A [`TunSource`] receives what the stack
//! sends, and the stack receives what a [`TunSink`] sends.
//!
//! In both directions a `virtio_net_hdr` precedes each packet: its checksum may be partial, and TCP
//! and UDP packets may be whole, to be cut into segments (GSO).

mod open; //     an existing device, or a new one
mod stats; //    packets that the kernel dropped
mod sink; //     packets written to the device
mod source; //   packets read from the device
mod steering; // eBPF programs that choose a packet's queue

pub use forebay_sys::tun::TunKind;
pub use open::TunDevice;
pub use sink::TunSink;
pub use source::TunSource;
