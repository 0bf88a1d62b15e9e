//! Socket options, which any thread may change at any time.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

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
    /// Time-out of reads (`SO_RCVTIMEO`).
    pub(super) read_timeout: Timeout,
    /// Time-out of writes (`SO_SNDTIMEO`).
    pub(super) write_timeout: Timeout,
    /// True if flows are steered to the CPU that reads them (RFS).
    pub(super) is_followed: AtomicBool,
    pub(super) ttl: AtomicU8,
    pub(super) tos: AtomicU8,
    /// True if datagrams of IPv4 larger than the MTU are sent as fragments.
    pub(super) may_fragment_v4: AtomicBool,
    /// True if those of IPv6 are.
    pub(super) may_fragment_v6: AtomicBool,
    /// True if routers may fragment datagrams of IPv4.
    pub(super) may_routers_fragment: AtomicBool,
    /// True if the MTU is the device's for datagrams of IPv4, whatever routers tell.
    pub(super) ignores_path_v4: AtomicBool,
    /// True if it is for those of IPv6.
    pub(super) ignores_path_v6: AtomicBool,
    /// True if datagrams to broadcast addresses are sent.
    pub(super) may_broadcast: AtomicBool,
    /// For datagrams to groups of IPv4.
    pub(super) groups_v4: GroupOptions,
    /// For those of IPv6.
    pub(super) groups_v6: GroupOptions,
    /// Bits of the source address that was chosen for datagrams to groups of IPv4; 0 for none.
    group_source_v4: AtomicU32,
}

/// Options for datagrams to groups of one family.
#[derive(Debug)]
pub(super) struct GroupOptions {
    pub(super) ttl: AtomicU8,
    /// True if programs of the kernel's on this host hear them.
    pub(super) is_looped: AtomicBool,
    device: AtomicU16,
}

/// Time-out of calls that wait, in ns; 0 for none.
#[derive(Default, Debug)]
pub(super) struct Timeout(AtomicU64);

impl Timeout {
    /// Sets the time-out.
    ///
    /// # Errors
    /// `InvalidInput` of a time-out of zero, as with `std`.
    pub(super) fn set(&self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            let why = "a time-out of zero would never wait: use set_nonblocking, or None to wait \
                       for ever";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let ns = timeout.map_or(0, |timeout| timeout.as_nanos());
        self.0.store(u64::try_from(ns).unwrap_or(u64::MAX), Ordering::Relaxed);
        Ok(())
    }

    /// Time-out that is set; `None` for none.
    pub(super) fn get(&self) -> Option<Duration> {
        Some(self.0.load(Ordering::Relaxed)).filter(|ns| *ns > 0).map(Duration::from_nanos)
    }
}

impl Options {
    pub(super) fn new(is_followed: bool) -> Self {
        Self {
            is_nonblocking: AtomicBool::new(false),
            read_timeout: Timeout::default(),
            write_timeout: Timeout::default(),
            is_followed: AtomicBool::new(is_followed),
            ttl: AtomicU8::new(SentMarks::default().ttl),
            tos: AtomicU8::new(0),
            may_fragment_v4: AtomicBool::new(false),
            may_fragment_v6: AtomicBool::new(false),
            may_routers_fragment: AtomicBool::new(false),
            ignores_path_v4: AtomicBool::new(false),
            ignores_path_v6: AtomicBool::new(false),
            may_broadcast: AtomicBool::new(true),
            groups_v4: GroupOptions::default(),
            groups_v6: GroupOptions::default(),
            group_source_v4: AtomicU32::new(0),
        }
    }

    /// Options for groups of the address's family.
    pub(super) fn groups(&self, to: IpAddr) -> &GroupOptions {
        if to.is_ipv4() { &self.groups_v4 } else { &self.groups_v6 }
    }

    /// Source address of datagrams to groups of IPv4 from a socket that is bound to none, if one was chosen (`imr_address` of
    /// `IP_MULTICAST_IF`).
    pub(super) fn group_source_v4(&self) -> Option<IpAddr> {
        let address = Ipv4Addr::from_bits(self.group_source_v4.load(Ordering::Relaxed));
        (!address.is_unspecified()).then_some(address.into())
    }

    pub(super) fn set_group_source_v4(&self, source: Option<Ipv4Addr>) {
        self.group_source_v4.store(source.map_or(0, Ipv4Addr::to_bits), Ordering::Relaxed);
    }
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            ttl: AtomicU8::new(MULTICAST_TTL),
            is_looped: AtomicBool::new(false),
            device: AtomicU16::new(BY_ROUTE),
        }
    }
}

impl GroupOptions {
    /// Outgoing device, if one was chosen (`IP_MULTICAST_IF`).
    pub(super) fn device(&self) -> Option<DeviceIndex> {
        u8::try_from(self.device.load(Ordering::Relaxed)).ok().map(DeviceIndex)
    }

    pub(super) fn set_device(&self, device: Option<DeviceIndex>) {
        let device = device.map_or(BY_ROUTE, |DeviceIndex(device)| device.into());
        self.device.store(device, Ordering::Relaxed);
    }
}
