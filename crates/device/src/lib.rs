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

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

pub use config::{DeviceConfig, Via, XdpMode, XdpOptions};
use forebay_rx::RxQueue;
use forebay_rx::hash::{FlowHash, Hasher, Indirection};
use forebay_rx::parse::{Link, Verify, View, parse};
pub use forebay_sys::xdp::CopyMode;
pub use link::{BackEndLink, BackEndNews, DeviceLink};
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

/// Frames of a source examined for each that a poll may take, so that it ends even if all belong to other queues.
const LOOKS_PER_FRAME: usize = 8;

/// One rx queue's part of a source, as distributed by receive-side scaling. As with a device whose hash
/// is not used, frames do not carry it: the path computes its own.
#[derive(Clone, Debug)]
pub struct QueueShare {
    /// The queue.
    pub queue: RxQueue,
    /// The device's indirection table.
    pub indirection: Indirection,
    /// The device's hash function, which no change of a run changes.
    pub hasher: Arc<Hasher>,
}

impl QueueShare {
    /// True if a frame belongs to this queue. One that the device cannot parse belongs to the first.
    fn has(&self, bytes: &[u8], wire_len: u32, link: Option<Link>) -> bool {
        let hash = link.map_or(FlowHash::NONE, |link| {
            let headers = parse(bytes, wire_len, link, Verify::Nothing);
            self.hasher.hash_of(&View::new(bytes, &headers), wire_len, FlowHash::NONE)
        });
        self.indirection.queue(hash) == self.queue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment in IPv6 behind an MPLS label, with this payload.
    fn labelled(payload_bytes: usize) -> Vec<u8> {
        let tcp = [&[0x13, 0x88, 0, 80][..], &[0; 8], &[0x50, 0x10, 1, 0, 0, 0, 0, 0]].concat();
        let len_bytes = u16::try_from(tcp.len() + payload_bytes).unwrap().to_be_bytes();
        let addresses = [[0x20; 16], [0x30; 16]].concat();
        let ipv6 = [&[0x60, 0, 0, 0][..], &len_bytes, &[6, 64], &addresses].concat();
        let ethernet = [&[2; 12][..], &[0x88, 0x47], &[0, 1, 1, 64]].concat();
        [ethernet, ipv6, tcp, vec![7; payload_bytes]].concat()
    }

    #[test]
    fn flk_2_frame_cut_short_keeps_queue() {
        let hasher = Hasher::keyed(&[7; 16], false).with_rules("inner".parse().unwrap());
        let share = |queue| QueueShare {
            queue: RxQueue(queue),
            indirection: Indirection::new(64),
            hasher: Arc::new(hasher.clone()),
        };
        let queue_of = |frame: &[u8], captured: usize| {
            let wire_len = u32::try_from(frame.len()).unwrap();
            let has =
                |queue: &u16| share(*queue).has(&frame[..captured], wire_len, Some(Link::Ethernet));
            (0..64).find(has).unwrap()
        };
        let (short, long) = (labelled(10), labelled(1000));
        let queue = queue_of(&short, short.len());
        assert_ne!(queue, 0, "the queue of frames without a hash");
        for captured in [120, 500, long.len()] {
            assert_eq!(queue_of(&long, captured), queue, "{captured} bytes captured");
        }
    }
}
