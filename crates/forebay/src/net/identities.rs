//! Addresses of this host on each device.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use forebay_device::{Device, Via};
use forebay_stack::network::neighbours::Neighbours as Learned;
use forebay_stack::network::{Identity, Prefix};
use forebay_sys as sys;
use forebay_sys::error::{Error, Result};
use forebay_sys::interface::{Interface, InterfaceIndex, MacAddress};
use forebay_sys::neighbour::{self, InterfaceAddresses};

use super::routes::Gateways;
use super::shared::NetDevice;

/// Addresses of this host on a device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Addresses {
    /// The kernel's addresses, on an interface that the kernel has too.
    #[default]
    Kernels,
    /// Addresses that only this process has: ARP, neighbour solicitations and echo requests for
    /// them are answered here.
    Own {
        /// MAC address; `None`: a locally administered one, derived from the first address.
        mac: Option<[u8; 6]>,
        /// Addresses with their prefix lengths.
        addresses: Vec<(IpAddr, u8)>,
    },
}

impl Addresses {
    /// Parses an address with an optional prefix length, as `10.0.0.2/24`. Default: the full
    /// length.
    ///
    /// # Errors
    /// The reason, if the text is not an address or the prefix is too long.
    pub fn parse_prefix(text: &str) -> Result<(IpAddr, u8), String> {
        let wrong = || format!("{text:?} is not an address: give one as 10.0.0.2/24 or fd00::2/64");
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(most), |bits| bits.parse().map_err(|_| wrong()))?;
        if bits > most { Err(wrong()) } else { Ok((address, bits)) }
    }
}

/// Default MTU of devices.
const ETHERNET_MTU: u32 = 1500;

/// Destinations beyond all subnets (RFC 5737, RFC 3849), for which the kernel is asked for its default routes.
const ANYWHERE_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const ANYWHERE_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

/// Device index of each rx queue.
pub(super) fn device_by_queue(devices: &[Device]) -> Vec<usize> {
    let queues = |(index, device): (usize, &Device)| vec![index; device.sources.len()];
    devices.iter().enumerate().flat_map(queues).collect()
}

/// Creates the devices' state, with the addresses in `named`, or else the kernel's.
pub(super) fn of_devices(devices: &[Device], named: &[Addresses]) -> Result<Vec<NetDevice>> {
    let kernels = Addresses::Kernels;
    let of = |(index, device): (usize, &Device)| {
        let addresses = named.get(index).unwrap_or(&kernels);
        let mut has_tentative = false;
        let (identity, kernels) = match addresses {
            Addresses::Kernels => match device.via {
                Via::AfXdp | Via::AfPacket => {
                    let interface = Interface::named(&device.name)?;
                    let identity;
                    (identity, has_tentative) = of_kernel(&interface, device.takes_all())?;
                    (identity, Some(interface.index))
                }
                Via::Tap | Via::Tun => return Err(no_addresses(device, "the kernel")),
                Via::VhostUser => return Err(no_addresses(device, "another process")),
            },
            Addresses::Own { mac, addresses } => {
                let mac = mac.unwrap_or_else(|| made_up(addresses.first()));
                let has_link = match device.via {
                    Via::AfXdp | Via::AfPacket | Via::Tap | Via::VhostUser => true,
                    Via::Tun => false,
                };
                let interface = device.interface().and_then(Result::ok);
                let mtu = interface.map_or(ETHERNET_MTU, |found| found.mtu);
                let addresses = prefixes(addresses);
                let mac = has_link.then_some(mac);
                let is_whole_host = true;
                let identity =
                    Identity { mac, addresses, mtu, is_whole_host, ..Identity::default() };
                (identity, None)
            }
        };
        let gateways = Gateways::default();
        if let Some(interface) = kernels {
            find_gateways(interface, &gateways);
        }
        Ok(NetDevice {
            name: device.name.clone(),
            identity: ArcSwap::from_pointee(identity),
            kernels,
            gateways,
            has_tentative: AtomicBool::new(has_tentative),
            learned: Arc::new(Mutex::new(Learned::new(sys::random_key()))),
        })
    };
    devices.iter().enumerate().map(of).collect()
}

/// Error of a device whose other end has the kernel's addresses, or none.
fn no_addresses(device: &Device, other_end: &str) -> Error {
    let why = format!("{other_end} is at the other end of it: say who is at this one");
    Error::Setting { what: "addresses", value: device.name.clone(), why }
}

/// Reads the kernel's addresses again.
pub(super) fn refresh(devices: &[NetDevice]) -> Result<()> {
    devices.iter().try_for_each(refresh_one)
}

/// Reads the kernel's addresses again where some were tentative. True if some have changed.
pub(super) fn refresh_tentative(devices: &[NetDevice]) -> bool {
    let mut has_changed = false;
    for device in devices.iter().filter(|device| device.has_tentative.load(Ordering::Relaxed)) {
        let before = device.identity.load_full();
        // Ignored: it is tried again.
        let _ = refresh_one(device);
        has_changed |= *device.identity.load_full() != *before;
    }
    has_changed
}

/// True if a device has addresses that may not be used yet.
pub(super) fn has_tentative(devices: &[NetDevice]) -> bool {
    devices.iter().any(|device| device.has_tentative.load(Ordering::Relaxed))
}

fn refresh_one(device: &NetDevice) -> Result<()> {
    let Some(index) = device.kernels else { return Ok(()) };
    let interface = Interface::named(&device.name)?;
    if interface.index != index {
        device.has_tentative.store(false, Ordering::Relaxed);
        return Ok(()); // another one, such as that of another namespace
    }
    let takes_all = device.identity.load().is_whole_host;
    let (found, has_tentative) = of_kernel(&interface, takes_all)?;
    device.identity.rcu(|identity| {
        let groups = identity.groups.clone();
        Identity { groups, ..found.clone() }
    });
    device.has_tentative.store(has_tentative, Ordering::Relaxed);
    find_gateways(index, &device.gateways);
    Ok(())
}

/// Reads the kernel's addresses on an interface, and those elsewhere. `is_whole_host` is true if the kernel receives
/// nothing there, so that ARP and echo are answered here. The second value is true if addresses may follow, which are
/// tentative now, of this interface or of others.
fn of_kernel(interface: &Interface, is_whole_host: bool) -> Result<(Identity, bool)> {
    let refused = |source| Error::Device {
        name: interface.name.clone(),
        what: "read its addresses".to_owned(),
        source,
        help: "check that this process may use netlink sockets".to_owned(),
    };
    let found = InterfaceAddresses::of(interface.index).map_err(refused)?;
    let identity = Identity {
        mac: interface.mac.filter(|_| interface.is_ethernet).map(|MacAddress(mac)| mac),
        addresses: prefixes(&found.usable),
        elsewhere: found.elsewhere,
        groups: Vec::new(),
        mtu: interface.mtu,
        is_whole_host,
    };
    Ok((identity, found.has_tentative))
}

/// Asks the kernel for gateways on an interface, and for its source addresses beyond the subnets. Without an answer there are
/// none: the first device leads everywhere.
fn find_gateways(interface: InterfaceIndex, gateways: &Gateways) {
    let has = |anywhere| neighbour::has_gateway(anywhere, interface).unwrap_or(false);
    gateways.set(has(ANYWHERE_V4), has(ANYWHERE_V6));
    let source = |anywhere| neighbour::source_to(anywhere, interface).ok().flatten();
    gateways.set_sources([ANYWHERE_V4, ANYWHERE_V6].map(source));
}

fn prefixes(addresses: &[(IpAddr, u8)]) -> Vec<Prefix> {
    addresses.iter().map(|&(address, bits)| Prefix { address, bits }).collect()
}

/// A locally administered MAC address, always the same for an address.
fn made_up(address: Option<&(IpAddr, u8)>) -> [u8; 6] {
    let [a, b, c, d] = match address {
        Some((IpAddr::V4(address), _)) => address.octets(),
        Some((IpAddr::V6(address), _)) => {
            let [.., a, b, c, d] = address.octets();
            [a, b, c, d]
        }
        None => [0, 0, 0, 1],
    };
    [0x02, 0xfb, a, b, c, d]
}
