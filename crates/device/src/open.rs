//! An open device: the sources of its queues, and its sinks.

use std::fmt;
use std::sync::Arc;

use forebay_rx::Source;
use forebay_rx::sink::Sink;
use forebay_sys::error::Result;
use forebay_sys::interface::Interface;
use forebay_sys::privilege;

use crate::af_packet::{self, PacketOptions, PacketSink};
#[cfg(feature = "af-xdp")]
use crate::af_xdp::{Opened, XdpDevice};
use crate::config::{DeviceConfig, Via};
use crate::link::DeviceLink;
#[cfg(feature = "af-xdp")]
use crate::rx_filter::RxFilter;
use crate::stats::{Facts, KernelCounts, RxBuffers};
#[cfg(feature = "tun")]
use crate::tun::{TunDevice, TunKind};
#[cfg(feature = "vhost-user")]
use crate::virtio::VirtioDevice;

/// An open device.
pub struct Device {
    /// Name of the interface, or path of the vhost-user socket.
    pub name: String,
    /// Backend.
    pub via: Via,
    /// Sources that an engine polls, one per queue; over `AF_XDP` another one if fragments are taken.
    pub sources: Vec<Box<dyn Source>>,
    /// Counters of the kernel or of the user-space driver, per queue.
    pub counts: Vec<Arc<KernelCounts>>,
    /// Receive buffers per queue; virtio devices only.
    pub rx_buffers: Vec<Arc<RxBuffers>>,
    /// True if packets have the device's hash, which does not follow from their addresses.
    pub device_hash: bool,
    /// Facts about the device, for reports.
    pub facts: Facts,
    /// Factory of sinks; `None` if frames come from sources of the caller.
    way_out: Option<WayOut>,
    /// True if the kernel has the interface too but receives nothing from it.
    takes_all: bool,
}

/// Backend-specific state to make sinks from.
enum WayOut {
    #[cfg(feature = "af-xdp")]
    Xdp(XdpDevice),
    Packet(Interface),
    #[cfg(feature = "tun")]
    Tun(TunDevice),
    #[cfg(feature = "vhost-user")]
    Virtio(VirtioDevice),
}

impl Device {
    /// Opens a device, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// If there is no such device, the process lacks a privilege, or the kernel lacks a feature.
    pub fn open(config: &DeviceConfig) -> Result<Self> {
        match config.via {
            Via::AfPacket => Self::open_af_packet(config),
            #[cfg(feature = "af-xdp")]
            Via::AfXdp => Self::open_af_xdp(config),
            #[cfg(feature = "tun")]
            Via::Tap => Self::open_tun(config, TunKind::Tap),
            #[cfg(feature = "tun")]
            Via::Tun => Self::open_tun(config, TunKind::Tun),
            #[cfg(feature = "vhost-user")]
            Via::VhostUser => Self::open_vhost_user(config),
            #[cfg(not(all(feature = "af-xdp", feature = "tun", feature = "vhost-user")))]
            via => Err(not_built_in(via)),
        }
    }

    /// Returns a device made of sources of the caller, one per queue.
    #[must_use]
    pub fn of_sources(name: &str, via: Via, sources: Vec<Box<dyn Source>>) -> Self {
        let counts = sources.iter().map(|_| KernelCounts::new(&[])).collect();
        let name = name.to_owned();
        Self {
            name,
            via,
            sources,
            counts,
            rx_buffers: Vec::new(),
            device_hash: false,
            facts: Facts::default(),
            way_out: None,
            takes_all: false,
        }
    }

    /// True if `name` names this device: by its plain name, or with the backend in front, as in
    /// `vhost-user:/run/switch.sock`.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        let opened_so = name.strip_prefix(self.via.name()).and_then(|name| name.strip_prefix(':'));
        self.name == name || opened_so == Some(&self.name)
    }

    /// Looks up the device's interface; `None` if the device is not an interface.
    pub fn interface(&self) -> Option<Result<Interface>> {
        self.via.is_interface().then(|| Interface::named(&self.name))
    }

    /// Link of the device; `None` if its interface is gone, or frames come from sources of the caller.
    pub fn link(&self) -> Option<DeviceLink> {
        #[cfg(feature = "vhost-user")]
        if let Some(WayOut::Virtio(device)) = &self.way_out {
            return Some(DeviceLink::BackEnd(device.back_end()));
        }
        self.interface().and_then(Result::ok).map(DeviceLink::Interface)
    }

    /// True if the device takes all packets of an interface from the kernel, ARP too.
    pub fn takes_all(&self) -> bool {
        self.takes_all
    }

    /// Largest MTU whose frames fit in the memory that the sources take; `None` if those of any MTU do.
    pub fn mtu_max(&self) -> Option<u32> {
        match &self.way_out {
            #[cfg(feature = "af-xdp")]
            Some(WayOut::Xdp(device)) => Some(device.mtu()),
            _ => None,
        }
    }

    /// Opens a sink for one CPU. Packets sent leave through the interface; those sent to a TAP or
    /// TUN are received by the kernel's stack.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn sink(&self) -> Result<Box<dyn Sink>> {
        Ok(match &self.way_out {
            #[cfg(feature = "af-xdp")]
            Some(WayOut::Xdp(device)) => Box::new(device.sink()),
            Some(WayOut::Packet(interface)) => Box::new(PacketSink::open(interface)?),
            #[cfg(feature = "tun")]
            Some(WayOut::Tun(device)) => Box::new(device.sink()),
            #[cfg(feature = "vhost-user")]
            Some(WayOut::Virtio(device)) => Box::new(device.sink()),
            None => Box::new(PacketSink::open(&Interface::named(&self.name)?)?),
        })
    }

    /// Device of these sources, which says nothing else about itself yet.
    fn with<S: Source + 'static>(config: &DeviceConfig, sources: Vec<S>) -> Self {
        let boxed = |source: S| -> Box<dyn Source> { Box::new(source) };
        let sources = sources.into_iter().map(boxed).collect();
        let device_hash = config.device_hash;
        Self { device_hash, ..Self::of_sources(&config.name, config.via, sources) }
    }

    #[cfg(feature = "af-xdp")]
    fn open_af_xdp(config: &DeviceConfig) -> Result<Self> {
        let interface = Interface::named(&config.name)?;
        privilege::for_af_xdp(&config.name, config.take != RxFilter::All)?;
        let (device, sources) = XdpDevice::open(&interface, config, Opened::Both)?;
        let counts = sources.iter().map(|source| Arc::clone(source.counts())).collect();
        let mut opened = Self {
            counts,
            facts: device.facts().clone(),
            way_out: Some(WayOut::Xdp(device)),
            takes_all: config.take == RxFilter::All,
            ..Self::with(config, sources)
        };
        // The program cannot know whose port a later fragment is for.
        if let Some(take) = config.take.fragments_alone() {
            let source = af_packet::open_for_fragments(&interface, take, config.verify)?;
            opened.counts.push(Arc::clone(source.counts()));
            opened.sources.push(Box::new(source));
        }
        Ok(opened)
    }

    fn open_af_packet(config: &DeviceConfig) -> Result<Self> {
        let interface = Interface::named(&config.name)?;
        privilege::for_af_packet(&config.name, config.promiscuous)?;
        let options = PacketOptions {
            queues: config.queues,
            take: config.take.clone(),
            promiscuous: config.promiscuous,
            ring: config.packet_ring,
            device_hash: config.device_hash,
            verify: config.verify,
        };
        let sources = af_packet::open(&interface, &options)?;
        let counts = sources.iter().map(|source| Arc::clone(source.counts())).collect();
        Ok(Self { counts, way_out: Some(WayOut::Packet(interface)), ..Self::with(config, sources) })
    }

    #[cfg(feature = "tun")]
    fn open_tun(config: &DeviceConfig, kind: TunKind) -> Result<Self> {
        let device = match kind {
            TunKind::Tap if config.whole_tunnels => {
                TunDevice::open_for_whole_tunnels(&config.name, config.queues)?
            }
            TunKind::Tap | TunKind::Tun => TunDevice::open(&config.name, kind, config.queues)?,
        };
        let sources = device.sources(config.verify);
        Ok(Self {
            counts: device.counts(),
            facts: Facts::of(device.facts()),
            way_out: Some(WayOut::Tun(device)),
            ..Self::with(config, sources)
        })
    }

    #[cfg(feature = "vhost-user")]
    fn open_vhost_user(config: &DeviceConfig) -> Result<Self> {
        let (device, sources) = VirtioDevice::open(config)?;
        Ok(Self {
            counts: device.counts(),
            rx_buffers: device.rx_buffers(),
            facts: device.facts().clone(),
            way_out: Some(WayOut::Virtio(device)),
            ..Self::with(config, sources)
        })
    }
}

/// Error of a backend whose feature this build lacks.
#[cfg(not(all(feature = "af-xdp", feature = "tun", feature = "vhost-user")))]
fn not_built_in(via: Via) -> forebay_sys::Error {
    let feature = match via {
        Via::AfXdp => "af-xdp",
        Via::Tap | Via::Tun => "tun",
        Via::VhostUser => "vhost-user",
        Via::AfPacket => "default",
    };
    forebay_sys::Error::Setting {
        what: "via",
        value: via.name().to_owned(),
        why: format!("this program was built without the feature `{feature}` of forebay"),
    }
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
    fn device_label_has_name_and_driver() {
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
    fn socket_path_is_no_interface() {
        assert!(Device::of_sources("lo", Via::AfPacket, Vec::new()).interface().is_some());
        assert!(Device::of_sources("lo", Via::VhostUser, Vec::new()).interface().is_none());
    }
}
