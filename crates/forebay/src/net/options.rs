//! Socket options, which any thread may change at any time.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};

use super::message::DeviceIndex;
use super::transmit::SentMarks;

/// Value for no chosen device: the route decides.
const BY_ROUTE: u16 = u16::MAX;

/// Default TTL of multicast datagrams (`IP_DEFAULT_MULTICAST_TTL`).
const MULTICAST_TTL: u8 = 1;

/// Options of a socket.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) is_nonblocking: AtomicBool,
    /// Timeout of reads (`SO_RCVTIMEO`); 0 means none.
    pub(super) read_timeout_ns: AtomicU64,
    /// Timeout of writes (`SO_SNDTIMEO`); 0 means none.
    pub(super) write_timeout_ns: AtomicU64,
    /// True if flows are steered to the CPU that reads them (RFS).
    pub(super) is_followed: AtomicBool,
    pub(super) ttl: AtomicU8,
    pub(super) tos: AtomicU8,
    /// True if datagrams larger than the MTU are sent as fragments.
    pub(super) may_fragment: AtomicBool,
    /// True if datagrams to broadcast addresses are sent.
    pub(super) may_broadcast: AtomicBool,
    pub(super) multicast_ttl: AtomicU8,
    pub(super) multicast_loop: AtomicBool,
    multicast_device: AtomicU16,
}

impl Options {
    pub(super) fn new(is_followed: bool) -> Self {
        Self {
            is_nonblocking: AtomicBool::new(false),
            read_timeout_ns: AtomicU64::new(0),
            write_timeout_ns: AtomicU64::new(0),
            is_followed: AtomicBool::new(is_followed),
            ttl: AtomicU8::new(SentMarks::default().ttl),
            tos: AtomicU8::new(0),
            may_fragment: AtomicBool::new(false),
            may_broadcast: AtomicBool::new(true),
            multicast_ttl: AtomicU8::new(MULTICAST_TTL),
            multicast_loop: AtomicBool::new(false),
            multicast_device: AtomicU16::new(BY_ROUTE),
        }
    }

    /// Outgoing device of multicast datagrams, if one was chosen (`IP_MULTICAST_IF`).
    pub(super) fn multicast_device(&self) -> Option<DeviceIndex> {
        u8::try_from(self.multicast_device.load(Ordering::Relaxed)).ok().map(DeviceIndex)
    }

    pub(super) fn set_multicast_device(&self, device: Option<DeviceIndex>) {
        let device = device.map_or(BY_ROUTE, |DeviceIndex(device)| device.into());
        self.multicast_device.store(device, Ordering::Relaxed);
    }
}
