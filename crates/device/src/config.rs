//! Configuration of a device: its name, the way in which it is opened, and what is taken of it.

pub mod virtio; // the options of vhost-user

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use forebay_rx::parse::Verify;
use forebay_sys::error::{Error, Result};
use forebay_sys::xdp::CopyMode;

use self::virtio::VirtioOptions;
use crate::rx_filter::RxFilter;

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
    /// Rx queues that are polled; the first ones. Of a vhost-user device, its queue pairs.
    pub queues: u16,
    /// Packets that are taken.
    pub take: RxFilter,
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
            take: RxFilter::default(),
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
