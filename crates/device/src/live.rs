//! Live devices: how one is named and opened, and what it tells of itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_rx::Source;
use forebay_rx::parse::Verify;
use forebay_sys::error::{Error, Result};
use forebay_sys::interface::Interface;
use forebay_sys::privilege;
use forebay_sys::xdp::CopyMode;

use super::af_packet::{self, PacketOptions, PacketSink};
use super::af_xdp::{Opened, XdpDevice};
use super::sink::Sink;
use super::take::Take;
use super::tun::{TunDevice, TunKind};
use super::virtio::{VirtioDevice, VirtioOptions};

/// By which face of the kernel, or from which other process, frames come and go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Via {
    /// `AF_XDP`: straight into packet memory, taken from the kernel.
    AfXdp,
    /// `AF_PACKET`: copies of what the kernel sees.
    AfPacket,
    /// A TAP: the kernel's side of a virtual Ethernet.
    Tap,
    /// A TUN: the same without Ethernet headers.
    Tun,
    /// virtio-net over vhost-user: from a process that stands for the device.
    VhostUser,
}

impl Via {
    /// Every way.
    pub const ALL: [Self; 5] = [Self::AfXdp, Self::AfPacket, Self::Tap, Self::Tun, Self::VhostUser];

    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AfXdp => "af_xdp",
            Self::AfPacket => "af_packet",
            Self::Tap => "tap",
            Self::Tun => "tun",
            Self::VhostUser => "vhost-user",
        }
    }

    /// True if its devices are interfaces of the kernel's, and go by the names of those. Any other
    /// goes by the path of a socket.
    #[must_use]
    pub fn is_interface(self) -> bool {
        self != Self::VhostUser
    }
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Via {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let via = Self::ALL.into_iter().find(|via| via.name() == text);
        via.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("{text:?} is no way to open a device: give one of {names}")
        })
    }
}

/// A device to be opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// The interface's name; of a vhost-user device, the path of its socket.
    pub name: String,
    /// Way in which it is opened.
    pub via: Via,
    /// Its rx queues that are polled; the first ones. Of a vhost-user device, its queue pairs.
    pub queues: u16,
    /// Packets that are taken.
    pub take: Take,
    /// Options of `AF_XDP` alone.
    pub xdp: XdpOptions,
    /// Options of vhost-user alone.
    pub virtio: VirtioOptions,
    /// True if frames for other stations are wanted too.
    pub promiscuous: bool,
    /// True if the hash that the device computed, where it did, is used in place of ours. Whoever
    /// knows the device's key can aim at a CPU.
    pub device_hash: bool,
    /// Checksum verification: then sums are taken while frames are copied.
    pub verify: Verify,
}

impl DeviceConfig {
    /// All of one queue's frames.
    #[must_use]
    pub fn new(name: impl Into<String>, via: Via) -> Self {
        Self {
            name: name.into(),
            via,
            queues: 1,
            take: Take::default(),
            xdp: XdpOptions::default(),
            virtio: VirtioOptions::default(),
            promiscuous: false,
            device_hash: false,
            verify: Verify::Checksums,
        }
    }

    /// Says which device is named more than once, by whatever way: its queues would have no names of
    /// their own, and the second opening of it would fail for a reason that blames somebody else.
    ///
    /// # Errors
    /// When one is.
    pub fn check_named_once(configs: &[Self]) -> Result<()> {
        let mut names = BTreeSet::new();
        match configs.iter().find(|config| !names.insert(&config.name)) {
            None => Ok(()),
            Some(Self { name, .. }) => Err(Error::Setting {
                what: "devices",
                value: name.clone(),
                why: "it is named twice, and a run opens a device once".to_owned(),
            }),
        }
    }
}

/// Options of `AF_XDP`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct XdpOptions {
    /// Place in the kernel where the program runs.
    pub mode: XdpMode,
    /// Copy mode: the device writes into packet memory itself, or the kernel copies.
    pub copy: CopyMode,
    /// True if polling drives the device (`SO_PREFER_BUSY_POLL`).
    pub busy_poll: bool,
    /// True if a program that is there already is replaced.
    pub replace: bool,
}

/// Places in the kernel where an XDP program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum XdpMode {
    /// In the driver if it can, else behind it.
    #[default]
    Auto,
    /// In the driver.
    Native,
    /// Behind the driver, for any interface.
    Generic,
}

/// Counters of the kernel for one queue, by its own names: what it dropped. Of a device that is no interface
/// it is what our driver counts, drops and others. Written by the source, read by anyone.
#[derive(Debug)]
pub struct KernelCounts {
    counts: Box<[(&'static str, AtomicU64)]>,
}

impl KernelCounts {
    /// Zeros.
    #[must_use]
    pub fn new(names: &[&'static str]) -> Arc<Self> {
        Arc::new(Self { counts: names.iter().map(|&name| (name, AtomicU64::new(0))).collect() })
    }

    /// Sets the count at `index`, in the order of the names, to what the kernel says now. Only the
    /// source calls this.
    pub fn set(&self, index: usize, count: u64) {
        self.counts[index].1.store(count, Ordering::Relaxed);
    }

    /// Counts on, where nobody but the source knows the count. Only the source calls this.
    pub fn add(&self, index: usize, count: u64) {
        let (_, so_far) = &self.counts[index];
        so_far.store(so_far.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    /// All counts, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.counts.iter().map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
    }
}

/// Receive buffers of one queue of a virtio device, for reports. Written by its source, read by
/// anyone.
#[derive(Default, Debug)]
pub struct RxBuffers {
    size_bytes: AtomicU32,
    used: AtomicU64,
}

impl RxBuffers {
    /// The size of the buffers that are posted now, virtio header included, in bytes; 0 before the
    /// first one (`mergeable_rx_buffer_size`).
    #[must_use]
    pub fn size_bytes(&self) -> u32 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Number of buffers that the device has given back so far.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Says how large the buffers are that are posted from now on. Only the source calls this.
    pub fn set_size_bytes(&self, size_bytes: u32) {
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
    }

    /// Counts buffers that the device has given back, once a burst. Only the source calls this.
    pub fn add_used(&self, buffers: u64) {
        self.used.store(self.used() + buffers, Ordering::Relaxed);
    }
}

/// Facts found out about a device, by name: `("mode", "native")`. Some of it is known only once an
/// engine has the device's queues; each copy tells of it.
#[derive(Clone, Default, Debug)]
pub struct Facts(Arc<Mutex<BTreeMap<&'static str, String>>>);

impl Facts {
    /// Facts that are known from the beginning.
    #[must_use]
    pub fn of(facts: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        Self(Arc::new(Mutex::new(facts.into_iter().collect())))
    }

    /// Adds one, or what is different now.
    pub fn set(&self, name: &'static str, value: String) {
        self.map().insert(name, value);
    }

    /// Facts that are known now.
    #[must_use]
    pub fn all(&self) -> BTreeMap<&'static str, String> {
        self.map().clone()
    }

    fn map(&self) -> MutexGuard<'_, BTreeMap<&'static str, String>> {
        // A map that is kept whole at every step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open device.
pub struct Device {
    /// The interface's name; of a vhost-user device, the path of its socket.
    pub name: String,
    /// Way in which it was opened.
    pub via: Via,
    /// One for each queue: what an engine polls.
    pub sources: Vec<Box<dyn Source>>,
    /// Counters of the kernel, or of our driver, for each queue.
    pub counts: Vec<Arc<KernelCounts>>,
    /// Receive buffers of each queue of a virtio device; any other device has none.
    pub rx_buffers: Vec<Arc<RxBuffers>>,
    /// Facts found out about it, for reports.
    pub facts: Facts,
    /// None for frames from elsewhere.
    way_out: Option<WayOut>,
    /// True if the kernel has the interface too, and hears nothing of what comes by it.
    takes_all: bool,
}

/// Parts that sinks are made of.
enum WayOut {
    Xdp(XdpDevice),
    Packet(Interface),
    Tun(TunDevice),
    Virtio(VirtioDevice),
}

impl Device {
    /// Opens a device, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// When there is none of that name, this process may not, or the kernel cannot.
    pub fn open(config: &DeviceConfig) -> Result<Self> {
        match config.via {
            Via::AfXdp => Self::open_af_xdp(config),
            Via::AfPacket => Self::open_af_packet(config),
            Via::Tap => Self::open_tun(config, TunKind::Tap),
            Via::Tun => Self::open_tun(config, TunKind::Tun),
            Via::VhostUser => Self::open_vhost_user(config),
        }
    }

    /// Frames from elsewhere, in place of those of a device: a queue for each source.
    #[must_use]
    pub fn of_sources(name: &str, via: Via, sources: Vec<Box<dyn Source>>) -> Self {
        let counts = sources.iter().map(|_| KernelCounts::new(&[])).collect();
        let name = name.to_owned();
        let (rx_buffers, facts) = (Vec::new(), Facts::default());
        Self { name, via, sources, counts, rx_buffers, facts, way_out: None, takes_all: false }
    }

    /// True if this is the device that somebody calls so: by its name, or as on the command line
    /// with how it is opened in front, as in `vhost-user:/run/switch.sock`.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        let opened_so = name.strip_prefix(self.via.name()).and_then(|name| name.strip_prefix(':'));
        self.name == name || opened_so == Some(&self.name)
    }

    /// The interface that it is, looked up now; none if it is no interface.
    pub fn interface(&self) -> Option<Result<Interface>> {
        self.via.is_interface().then(|| Interface::named(&self.name))
    }

    /// True if it takes from the kernel all that comes by an interface, ARP too.
    pub fn takes_all(&self) -> bool {
        self.takes_all
    }

    /// Opens a way into the device for one CPU: what is sent to it leaves by the interface, or, of a
    /// TAP or TUN, reaches the kernel's stack.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn sink(&self) -> Result<Box<dyn Sink>> {
        Ok(match &self.way_out {
            Some(WayOut::Xdp(device)) => Box::new(device.sink()),
            Some(WayOut::Packet(interface)) => Box::new(PacketSink::open(interface)?),
            Some(WayOut::Tun(device)) => Box::new(device.sink()),
            Some(WayOut::Virtio(device)) => Box::new(device.sink()),
            None => Box::new(PacketSink::open(&Interface::named(&self.name)?)?),
        })
    }

    fn open_af_xdp(config: &DeviceConfig) -> Result<Self> {
        let interface = Interface::named(&config.name)?;
        privilege::for_af_xdp(&config.name)?;
        let (device, sources) = XdpDevice::open(&interface, config, Opened::Both)?;
        let counts = sources.iter().map(|source| Arc::clone(source.counts())).collect();
        Ok(Self {
            name: config.name.clone(),
            via: config.via,
            sources: sources.into_iter().map(boxed).collect(),
            counts,
            rx_buffers: Vec::new(),
            facts: device.facts().clone(),
            way_out: Some(WayOut::Xdp(device)),
            takes_all: config.take == Take::All,
        })
    }

    fn open_af_packet(config: &DeviceConfig) -> Result<Self> {
        let interface = Interface::named(&config.name)?;
        privilege::for_af_packet(&config.name, config.promiscuous)?;
        let options = PacketOptions {
            queues: config.queues,
            take: config.take.clone(),
            promiscuous: config.promiscuous,
            device_hash: config.device_hash,
            verify: config.verify,
        };
        let sources = af_packet::open(&interface, &options)?;
        let counts = sources.iter().map(|source| Arc::clone(source.counts())).collect();
        Ok(Self {
            name: config.name.clone(),
            via: config.via,
            sources: sources.into_iter().map(boxed).collect(),
            counts,
            rx_buffers: Vec::new(),
            facts: Facts::default(),
            way_out: Some(WayOut::Packet(interface)),
            takes_all: false,
        })
    }

    fn open_tun(config: &DeviceConfig, kind: TunKind) -> Result<Self> {
        let device = TunDevice::open(&config.name, kind, config.queues)?;
        Ok(Self {
            name: config.name.clone(),
            via: config.via,
            sources: device.sources(config.verify).into_iter().map(boxed).collect(),
            counts: device.counts(),
            rx_buffers: Vec::new(),
            facts: Facts::of(device.facts()),
            way_out: Some(WayOut::Tun(device)),
            takes_all: false,
        })
    }

    fn open_vhost_user(config: &DeviceConfig) -> Result<Self> {
        let (device, sources) = VirtioDevice::open(config)?;
        Ok(Self {
            name: config.name.clone(),
            via: config.via,
            sources: sources.into_iter().map(boxed).collect(),
            counts: device.counts(),
            rx_buffers: device.rx_buffers(),
            facts: device.facts().clone(),
            way_out: Some(WayOut::Virtio(device)),
            takes_all: false,
        })
    }
}

fn boxed<'a>(source: impl Source + 'a) -> Box<dyn Source + 'a> {
    Box::new(source)
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, via, sources, .. } = self;
        write!(f, "Device({name} via {via}, {} queues)", sources.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_read_as_it_is_written() {
        for via in Via::ALL {
            assert_eq!(via.name().parse(), Ok(via));
        }
        let refused = "usb".parse::<Via>().unwrap_err();
        assert!(
            refused.contains("give one of af_xdp, af_packet, tap, tun, vhost-user"),
            "{refused}"
        );
    }

    #[test]
    fn a_device_is_called_by_its_name_and_by_how_it_was_opened() {
        let socket = Device::of_sources("/run/a.sock", Via::VhostUser, Vec::new());
        for (name, expected) in [
            ("/run/a.sock", true),
            ("vhost-user:/run/a.sock", true),
            ("tun:/run/a.sock", false),
            ("vhost-user/run/a.sock", false),
            ("a.sock", false),
            ("", false),
        ] {
            assert_eq!(socket.is_called(name), expected, "{name:?}");
        }
    }

    #[test]
    fn a_socket_is_no_interface_even_if_one_is_called_so() {
        assert!(Device::of_sources("lo", Via::AfPacket, Vec::new()).interface().is_some());
        assert!(Device::of_sources("lo", Via::VhostUser, Vec::new()).interface().is_none());
    }
}
