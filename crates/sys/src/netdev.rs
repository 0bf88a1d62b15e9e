//! XDP features of an interface, as the kernel's generic netlink family `netdev` reports them.

use std::io;

use super::generic_netlink::{Generic, ask, family};
use super::interface::InterfaceIndex;

/// XDP abilities of an interface's driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct XdpFeatures {
    /// True if a program can run in the driver, and redirect frames to sockets.
    pub is_native: bool,
    /// True if the device can write frames into packet memory itself.
    pub is_zero_copy: bool,
    /// True if a program in the driver can get frames larger than a buffer.
    pub is_multi_buffer: bool,
    /// True if a program can read the receive hash.
    pub has_rx_hash: bool,
}

/// XDP abilities of an interface. `None` if the kernel does not report them: before Linux 6.3.
///
/// # Errors
/// If the netlink request fails: `ENODEV` if there is no such interface.
pub fn xdp_features(interface: InterfaceIndex) -> io::Result<Option<XdpFeatures>> {
    let answers = device(interface)?;
    let number = |kind| answers.iter().find_map(|answer| answer.number(kind));
    let Some(features) = number(DEV_XDP_FEATURES) else { return Ok(None) };
    let has = |bits: u64| features & bits == bits;
    Ok(Some(XdpFeatures {
        is_native: has(XDP_ACT_BASIC | XDP_ACT_REDIRECT),
        is_zero_copy: has(XDP_ACT_XSK_ZEROCOPY),
        is_multi_buffer: has(XDP_ACT_RX_SG),
        has_rx_hash: number(DEV_XDP_RX_METADATA_FEATURES).unwrap_or(0) & RX_METADATA_HASH != 0,
    }))
}

/// True if XDP programs can read an interface's receive hash from its driver. `None` if the kernel
/// does not report it: before Linux 6.3.
///
/// # Errors
/// If the netlink request fails: `ENODEV` if there is no such interface.
pub fn has_rx_hash(interface: InterfaceIndex) -> io::Result<Option<bool>> {
    let answers = device(interface)?;
    let metadata = answers.iter().find_map(|answer| answer.number(DEV_XDP_RX_METADATA_FEATURES));
    Ok(metadata.map(|metadata| metadata & RX_METADATA_HASH != 0))
}

/// Answers about an interface; none if the kernel has no such family.
fn device(interface: InterfaceIndex) -> io::Result<Vec<Generic>> {
    let Some(family) = family(FAMILY)? else { return Ok(Vec::new()) };
    ask(Generic::new(family, DEV_GET, DEV_IFINDEX, &interface.0.to_ne_bytes()))
}

// linux/netdev.h
const FAMILY: &[u8] = b"netdev\0";
const DEV_GET: u8 = 1;
const DEV_IFINDEX: u16 = 1;
const DEV_XDP_FEATURES: u16 = 3;
const DEV_XDP_RX_METADATA_FEATURES: u16 = 5;
// Bits of `enum netdev_xdp_act`.
const XDP_ACT_BASIC: u64 = 1 << 0;
const XDP_ACT_REDIRECT: u64 = 1 << 1;
const XDP_ACT_XSK_ZEROCOPY: u64 = 1 << 3;
const XDP_ACT_RX_SG: u64 = 1 << 5;
/// Bit of `enum netdev_xdp_rx_metadata`.
const RX_METADATA_HASH: u64 = 1 << 1;
