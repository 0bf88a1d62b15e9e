//! Devices: sources of frames, and sinks of packets.
//!
//! Each backend has a folder with the same files: `open.rs`, `source.rs` (frames in), and for
//! frames out `sink.rs` if each CPU sends by itself, or `transmit.rs` if one CPU drives the
//! device's queue and the others hand packets to it over [`tx_queue`](TxQueueSink).
#![forbid(unsafe_code)]
#![cfg_attr(
    not(all(feature = "af-xdp", feature = "capture", feature = "tun", feature = "vhost-user")),
    allow(dead_code, reason = "some of what devices share is used by few of them")
)]

#[cfg(feature = "capture")]
pub mod pcap; //      capture files
pub mod synthetic; // generated flows
mod pace; //          due time of a recorded or generated frame
mod progress; //      part of a source that is done
mod queue_share; //   one rx queue's part of a source

pub mod config; //    configuration: name, backend, options
pub mod open; //      an open device: its sources and sinks
pub mod stats; //     counters, and facts about a device
mod link; //          link of an interface, or connection to a back end
pub mod rx_filter; // packets that are taken from the kernel
mod cutting; //       segments of a sink that has no packet memory
#[cfg(feature = "af-xdp")]
pub mod af_xdp; //    frames straight into packet memory
pub mod af_packet; // copies of the frames of any interface
#[cfg(feature = "tun")]
pub mod tun; //       packets exchanged with the kernel's stack
#[cfg(feature = "vhost-user")]
pub mod virtio; //    virtio-net over vhost-user: another process is the device
#[cfg(any(feature = "af-xdp", feature = "vhost-user"))]
mod tx_queue; //      from any CPU to the one that drives a device queue, in order

pub use config::{DeviceConfig, Via, XdpMode, XdpOptions};
pub use forebay_sys::xdp::CopyMode;
pub use link::{BackEndLink, BackEndNews, DeviceLink};
pub use open::Device;
pub use pace::Rate;
pub use progress::Progress;
use queue_share::LOOKS_PER_FRAME;
pub use queue_share::QueueShare;
pub use stats::{Facts, KernelCounts, RxBuffers};
#[cfg(feature = "tun")]
pub use tun::TunDevice;
#[cfg(any(feature = "af-xdp", feature = "vhost-user"))]
pub use tx_queue::TxQueueSink;

/// Maximum number of captured bytes of a record, as in tcpdump and Wireshark.
pub const MAX_RECORD_BYTES: u32 = 262_144;
