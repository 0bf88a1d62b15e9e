//! Settings of a device, as the kernel's generic netlink family `ethtool` reports them. Reading
//! them needs no privilege.

use std::collections::BTreeSet;
use std::io;

use netlink_packet_core::DefaultNla;

use super::generic_netlink::{self, Generic, ask, family, inner, nested, value, value_of};
use super::interface::InterfaceIndex;

/// Offloads and other features of a device, by the kernel's names (`ethtool -k` shows some of them
/// by older ones).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceFeatures {
    /// Features that are on.
    pub active: BTreeSet<String>,
    /// Features that can be turned on and off.
    pub changeable: BTreeSet<String>,
}

/// Assignment of received packets to the queues of a device (RSS).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RssSettings {
    /// Key of the hash.
    pub key: Vec<u8>,
    /// Queue of each entry of the indirection table.
    pub indirection: Vec<u32>,
}

/// Lengths of a device's rx rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingSettings {
    /// Present length.
    pub rx: u32,
    /// Maximum length.
    pub rx_max: u32,
}

/// Features of a device.
///
/// # Errors
/// The kernel's error; `Unsupported` if it has no such family.
pub fn features(interface: InterfaceIndex) -> io::Result<DeviceFeatures> {
    let answers = settings(interface, FEATURES_GET)?;
    let names = |kind| answers.iter().find_map(|answer| answer.value(kind)).map(|set| bits(&set));
    Ok(DeviceFeatures {
        active: names(FEATURES_ACTIVE).unwrap_or_default(),
        changeable: names(FEATURES_HW).unwrap_or_default(),
    })
}

/// Settings of RSS.
///
/// # Errors
/// The kernel's error; `Unsupported` if the device has none.
pub fn rss(interface: InterfaceIndex) -> io::Result<RssSettings> {
    let answers = settings(interface, RSS_GET)?;
    let value = |kind| answers.iter().find_map(|answer| answer.value(kind)).unwrap_or_default();
    let table = value(RSS_INDIR);
    let (entries, _) = table.as_chunks();
    let indirection: Vec<_> = entries.iter().map(|entry| u32::from_ne_bytes(*entry)).collect();
    let rss = RssSettings { key: value(RSS_HKEY), indirection };
    // A device with one queue may answer, with neither.
    let is_empty = rss.key.is_empty() && rss.indirection.is_empty();
    if is_empty { Err(io::ErrorKind::Unsupported.into()) } else { Ok(rss) }
}

/// Lengths of the rx rings.
///
/// # Errors
/// The kernel's error: `EOPNOTSUPP` if the driver does not report them.
pub fn rings(interface: InterfaceIndex) -> io::Result<RingSettings> {
    let answers = settings(interface, RINGS_GET)?;
    Ok(RingSettings { rx: count(&answers, RINGS_RX), rx_max: count(&answers, RINGS_RX_MAX) })
}

/// Largest number of rx queues that the device can have.
///
/// # Errors
/// The kernel's error: `EOPNOTSUPP` if the driver does not report it.
pub fn rx_queues_max(interface: InterfaceIndex) -> io::Result<u32> {
    let answers = settings(interface, CHANNELS_GET)?;
    Ok(count(&answers, CHANNELS_RX_MAX).saturating_add(count(&answers, CHANNELS_COMBINED_MAX)))
}

fn settings(interface: InterfaceIndex, command: u8) -> io::Result<Vec<Generic>> {
    let family = family(FAMILY)?.ok_or(io::ErrorKind::Unsupported)?;
    let index = DefaultNla::new(HEADER_DEV_INDEX, interface.0.to_ne_bytes().to_vec());
    let (kind, header) = nested(HEADER, &[index]);
    ask(Generic::new(family, command, kind, &header))
}

fn count(answers: &[Generic], kind: u16) -> u32 {
    let number = answers.iter().find_map(|answer| answer.number(kind)).unwrap_or(0);
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Names of the bits that are set in a bit set that lists them.
fn bits(set: &[u8]) -> BTreeSet<String> {
    let set = inner(set);
    // With a mask, bits that are listed may be clear.
    let has_mask = value(&set, BITSET_NOMASK).is_none();
    let bits = value(&set, BITSET_BITS).unwrap_or_default();
    let name = |bit: &DefaultNla| {
        let bit = inner(&value_of(bit));
        let is_set = !has_mask || value(&bit, BITSET_BIT_VALUE).is_some();
        let name = value(&bit, BITSET_BIT_NAME).filter(|_| is_set)?;
        Some(generic_netlink::text(&name))
    };
    inner(&bits).iter().filter_map(name).collect()
}

// linux/ethtool_netlink.h
const FAMILY: &[u8] = b"ethtool\0";
const FEATURES_GET: u8 = 11;
const RINGS_GET: u8 = 15;
const CHANNELS_GET: u8 = 17;
/// Since Linux 6.2.
const RSS_GET: u8 = 38;
/// Number of the header's attribute in every message.
const HEADER: u16 = 1;
const HEADER_DEV_INDEX: u16 = 1;
const FEATURES_HW: u16 = 2;
const FEATURES_ACTIVE: u16 = 4;
const RINGS_RX_MAX: u16 = 2;
const RINGS_RX: u16 = 6;
const CHANNELS_RX_MAX: u16 = 2;
const CHANNELS_COMBINED_MAX: u16 = 5;
const RSS_INDIR: u16 = 4;
const RSS_HKEY: u16 = 5;
const BITSET_NOMASK: u16 = 1;
const BITSET_BITS: u16 = 3;
const BITSET_BIT_NAME: u16 = 2;
const BITSET_BIT_VALUE: u16 = 3;
