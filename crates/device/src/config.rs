//! Configuration of a device: its name, its backend, and the packets taken from it.

pub mod virtio; // the options of vhost-user

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use forebay_rx::parse::Verify;
use forebay_sys::error::{Error, Result};
use forebay_sys::xdp::CopyMode;

use self::virtio::VirtioOptions;
use crate::af_packet::PacketRing;
use crate::rx_filter::RxFilter;

/// Backend of a device: an interface of the kernel, or another process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Via {
    /// `AF_XDP`: frames bypass the kernel's stack and arrive in packet memory.
    AfXdp,
    /// `AF_PACKET`: copies of the frames that the kernel receives.
    AfPacket,
    /// TAP: Ethernet frames exchanged with the kernel's stack.
    Tap,
    /// TUN: IP packets exchanged with the kernel's stack.
    Tun,
    /// virtio-net over vhost-user: another process is the device.
    VhostUser,
}

impl Via {
    /// Every backend.
    pub const ALL: [Self; 5] = [Self::AfXdp, Self::AfPacket, Self::Tap, Self::Tun, Self::VhostUser];

    /// Name on the command line and in reports.
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

    /// True if devices of this backend are interfaces of the kernel, and have their names. Other
    /// devices are named by the path of a socket.
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
            format!("{text:?} is not a way to open a device: give one of {names}")
        })
    }
}

/// Configuration of a device to be opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Name of the interface, or path of the vhost-user socket.
    pub name: String,
    /// Backend.
    pub via: Via,
    /// Number of rx queues to poll, from the first; of a vhost-user device, queue pairs.
    pub queues: u16,
    /// Packets to take.
    pub take: RxFilter,
    /// Ring of `AF_PACKET` alone.
    pub packet_ring: PacketRing,
    /// Options of `AF_XDP` alone.
    pub xdp: XdpOptions,
    /// True for packets merged inside VXLAN and GENEVE to be sent whole, if the kernel takes them so;
    /// TAP alone. A UDP socket on the tunnel's port would receive all datagrams of a packet as one.
    pub whole_tunnels: bool,
    /// Options of vhost-user alone.
    pub virtio: VirtioOptions,
    /// True for promiscuous mode: frames for other stations are received too.
    pub promiscuous: bool,
    /// True to use the device's hash where it has computed one. Senders who know the device's key
    /// can choose the CPU.
    pub device_hash: bool,
    /// Checksum verification; with it, frames are summed while they are copied.
    pub verify: Verify,
}

impl DeviceConfig {
    /// Default configuration: all frames of one queue.
    #[must_use]
    pub fn new(name: impl Into<String>, via: Via) -> Self {
        Self {
            name: name.into(),
            via,
            queues: 1,
            take: RxFilter::default(),
            packet_ring: PacketRing::default(),
            xdp: XdpOptions::default(),
            whole_tunnels: false,
            virtio: VirtioOptions::default(),
            promiscuous: false,
            device_hash: false,
            verify: Verify::Checksums,
        }
    }

    /// Checks that no device is named twice, even with different backends: its queues would share
    /// names, and the error of the second opening would mislead.
    ///
    /// # Errors
    /// If a name occurs twice.
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
    /// Place of the XDP program in the kernel.
    pub mode: XdpMode,
    /// Copy mode: zero-copy by the device, or copies by the kernel.
    pub copy: CopyMode,
    /// True for busy polling: polls of the source drive the device (`SO_PREFER_BUSY_POLL`).
    pub busy_poll: bool,
    /// True to replace an XDP program that is attached already.
    pub replace: bool,
}

/// Place in the kernel where an XDP program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum XdpMode {
    /// Native if the driver supports it, else generic.
    #[default]
    Auto,
    /// Native: in the driver.
    Native,
    /// Generic: behind the driver, on any interface.
    Generic,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn way_round_trips() {
        for via in Via::ALL {
            assert_eq!(via.name().parse(), Ok(via));
        }
        let refused = "usb".parse::<Via>().unwrap_err();
        assert!(
            refused.contains("give one of af_xdp, af_packet, tap, tun, vhost-user"),
            "{refused}"
        );
    }
}
