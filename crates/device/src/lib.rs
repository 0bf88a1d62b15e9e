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

pub mod config; //    configuration: name, backend, options
pub mod open; //      an open device: its sources and sinks
pub mod stats; //     counters, and facts about a device
mod link; //          link of an interface, or connection to a back end
pub mod rx_filter; // packets that are taken from the kernel
#[cfg(feature = "af-xdp")]
pub mod af_xdp; //    frames straight into packet memory
pub mod af_packet; // copies of the frames of any interface
#[cfg(feature = "tun")]
pub mod tun; //       packets exchanged with the kernel's stack
#[cfg(feature = "vhost-user")]
pub mod virtio; //    virtio-net over vhost-user: another process is the device
#[cfg(any(feature = "af-xdp", feature = "vhost-user"))]
mod tx_queue; //      from any CPU to the one that drives a device queue, in order

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

pub use config::{DeviceConfig, Via, XdpMode, XdpOptions};
use forebay_rx::RxQueue;
use forebay_rx::hash::{FlowHash, Hasher, Indirection};
use forebay_rx::parse::{Link, Verify, View, parse};
pub use forebay_sys::xdp::CopyMode;
pub use link::{BackEndLink, DeviceLink};
pub use open::Device;
pub use pace::Rate;
pub use stats::{Facts, KernelCounts, RxBuffers};
#[cfg(feature = "tun")]
pub use tun::TunDevice;
#[cfg(any(feature = "af-xdp", feature = "vhost-user"))]
pub use tx_queue::TxQueueSink;

/// Maximum number of captured bytes of a record, as in tcpdump and Wireshark.
pub const MAX_RECORD_BYTES: u32 = 262_144;

/// Progress of a source, updated while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Part that is done, in the source's unit (bytes or frames).
    pub done: AtomicU64,
    /// Total in the same unit, if known.
    pub total: Option<u64>,
    /// Number of records skipped as damaged.
    pub damaged: AtomicU64,
    /// Description of the first damaged record.
    pub first_damage: OnceLock<String>,
    /// Number of unreadable records by the name of their link type: neither that type nor the
    /// protocol behind its header can be read. Locked only when another record is added.
    pub unread: Mutex<BTreeMap<String, u64>>,
}

/// One rx queue's part of a source, as distributed by receive-side scaling.
#[derive(Clone, Debug)]
pub struct QueueShare {
    /// The queue.
    pub queue: RxQueue,
    /// The device's indirection table.
    pub indirection: Indirection,
    /// The device's hash function; its frames carry the hash.
    pub hasher: Arc<Hasher>,
}

impl QueueShare {
    /// Returns the hash of a frame that belongs to this queue. A frame that the device cannot parse
    /// belongs to the first queue.
    fn claim(&self, bytes: &[u8], wire_len: u32, link: Option<Link>) -> Option<FlowHash> {
        let hash = link.map_or(FlowHash::NONE, |link| {
            let headers = parse(bytes, wire_len, link, Verify::Nothing);
            self.hasher.hash(&View::new(bytes, &headers))
        });
        (self.indirection.queue(hash) == self.queue).then_some(hash)
    }
}
