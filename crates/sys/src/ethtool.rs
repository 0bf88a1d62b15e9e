//! Facts that a driver reports by ethtool ioctls, in the network namespace of the calling thread.

use std::ffi::c_void;
use std::io;

use rustix::ioctl::{self, Updater};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

/// `SIOCETHTOOL` of include/uapi/linux/sockios.h.
const SIOCETHTOOL: ioctl::Opcode = 0x8946;
/// `ETHTOOL_GDRVINFO` of include/uapi/linux/ethtool.h.
const ETHTOOL_GDRVINFO: u32 = 0x3;
/// `ETHTOOL_GCHANNELS` of include/uapi/linux/ethtool.h.
const ETHTOOL_GCHANNELS: u32 = 0x3c;
/// `IFNAMSIZ` of include/uapi/linux/if.h.
const IFNAMSIZ: usize = 16;

/// `struct ethtool_drvinfo`; fields that are not used here are left as bytes.
#[repr(C)]
struct DriverInfo {
    cmd: u32,
    driver: [u8; 32],
    others: [u8; 160],
}

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    cmd: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx_count: u32,
    tx_count: u32,
    other_count: u32,
    combined_count: u32,
}

/// `struct ifreq`, with `ifr_data`.
#[repr(C)]
struct EthtoolRequest {
    name: [u8; IFNAMSIZ],
    data: *mut c_void,
    /// The union holds a `struct ifmap`, which is longer than a pointer.
    rest: [u64; 2],
}

/// Numbers of queues in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChannelCounts {
    pub(super) rx: u32,
    pub(super) tx: u32,
}

/// Numbers of queues that the driver uses.
///
/// # Errors
/// `EOPNOTSUPP` if the driver does not report them.
pub(super) fn queues(name: &str) -> io::Result<ChannelCounts> {
    let mut channels = Channels { cmd: ETHTOOL_GCHANNELS, ..Channels::default() };
    let data = (&raw mut channels).cast();
    // SAFETY: `data` is a `struct ethtool_channels`, as this command writes it, and outlives the
    // call.
    unsafe { request(name, data) }?;
    let Channels { rx_count, tx_count, combined_count, .. } = channels;
    Ok(ChannelCounts {
        rx: rx_count.saturating_add(combined_count),
        tx: tx_count.saturating_add(combined_count),
    })
}

/// Name of the driver.
///
/// # Errors
/// The kernel's error.
pub(super) fn driver(name: &str) -> io::Result<String> {
    let mut info = DriverInfo { cmd: ETHTOOL_GDRVINFO, driver: [0; 32], others: [0; 160] };
    let data = (&raw mut info).cast();
    // SAFETY: `data` is a `struct ethtool_drvinfo`, as this command writes it, and outlives the
    // call.
    unsafe { request(name, data) }?;
    let bytes = info.driver.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(bytes).into_owned())
}

/// Sends an ethtool command; the kernel answers at `data`.
///
/// # Safety
/// `data` points to the structure of the command in its first word, writable, and nothing else
/// accesses it during the call.
unsafe fn request(name: &str, data: *mut c_void) -> io::Result<()> {
    let mut interface = EthtoolRequest { name: [0; IFNAMSIZ], data, rest: [0; 2] };
    // The last byte stays 0.
    let room = interface.name.get_mut(..name.len()).filter(|room| room.len() < IFNAMSIZ);
    room.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(name.as_bytes());
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: this opcode takes a `struct ifreq`.
    let update = unsafe { Updater::<SIOCETHTOOL, EthtoolRequest>::new(&mut interface) };
    // SAFETY: the opcode is the kernel's; what `data` points to is the caller's promise.
    unsafe { ioctl::ioctl(&socket, update) }?;
    Ok(())
}

const _: () = assert!(size_of::<EthtoolRequest>() == 40 || size_of::<usize>() == 4);
const _: () = assert!(size_of::<DriverInfo>() == 196);
