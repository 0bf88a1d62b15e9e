//! Devices: where frames come from, and where packets go.
//!
//! The folder of a backend has the same files as any other: `open.rs`, `source.rs` (frames in), and the
//! way out: `sink.rs` where each CPU sends by itself, `transmit.rs` where one CPU drives the device's queue
//! and the others hand packets to it over [`tx_queue`](TxQueueSink).
#![forbid(unsafe_code)]
#![cfg_attr(
    not(all(feature = "af-xdp", feature = "capture", feature = "tun", feature = "vhost-user")),
    allow(dead_code, reason = "some of what devices share is used by few of them")
)]

#[cfg(feature = "capture")]
pub mod pcap; //      capture files
pub mod synthetic; // made-up flows
mod pace; //          when a recorded or made-up frame is due

pub mod config; //    a device to be opened: its name, its way, its options
pub mod open; //      an open one: its queues, and the ways into it
pub mod stats; //     what is counted and found out about it
pub mod rx_filter; // which packets are taken from the kernel
#[cfg(feature = "af-xdp")]
pub mod af_xdp; //    straight into packet memory
pub mod af_packet; // copies of what any interface sees
#[cfg(feature = "tun")]
pub mod tun; //       the kernel's stack on the other side
#[cfg(feature = "vhost-user")]
pub mod virtio; //    a device that another process is, over vhost-user
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
pub use open::Device;
pub use pace::Rate;
pub use stats::{Facts, KernelCounts, RxBuffers};
#[cfg(feature = "tun")]
pub use tun::TunDevice;
#[cfg(any(feature = "af-xdp", feature = "vhost-user"))]
pub use tx_queue::TxQueueSink;

/// Captured bytes of a record at most, as in tcpdump and Wireshark.
pub const MAX_RECORD_BYTES: u32 = 262_144;

/// Progress that a source tells while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Part that is done, in the source's unit.
    pub done: AtomicU64,
    /// The whole, if it is known.
    pub total: Option<u64>,
    /// Records that were passed over as damaged.
    pub damaged: AtomicU64,
    /// The first of them.
    pub first_damage: OnceLock<String>,
    /// Records that were dropped because their link type, or what stands behind its header, is not
    /// read, by the name of the link type. Locked only when there is one more.
    pub unread: Mutex<BTreeMap<String, u64>>,
}

/// One rx queue's part of a source, as a device with receive-side scaling deals it out.
#[derive(Clone, Debug)]
pub struct QueueShare {
    /// The queue.
    pub queue: RxQueue,
    /// The device's indirection table.
    pub indirection: Indirection,
    /// The device's hash; its frames carry it.
    pub hasher: Arc<Hasher>,
}

impl QueueShare {
    /// The hash of a frame, if the frame is this queue's. Frames that the device cannot read are
    /// the first queue's.
    fn claim(&self, bytes: &[u8], wire_len: u32, link: Option<Link>) -> Option<FlowHash> {
        let hash = link.map_or(FlowHash::NONE, |link| {
            let headers = parse(bytes, wire_len, link, Verify::Nothing);
            self.hasher.hash(&View::new(bytes, &headers))
        });
        (self.indirection.queue(hash) == self.queue).then_some(hash)
    }
}
