//! Addresses of this host on each device.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use forebay_device::{Device, Via};
use forebay_stack::network::neighbours::Neighbours as Learned;
use forebay_stack::network::{Identity, Prefix};
use forebay_sys as sys;
use forebay_sys::error::{Error, Result};
use forebay_sys::host_facts::{HostAddresses, HostFacts, LinkFacts};
use forebay_sys::interface::{Interface, InterfaceIndex, MacAddress};

use super::following::Following;
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
pub(super) fn of_devices(
    devices: &[Device],
    named: &[Addresses],
    following: Option<&Following>,
) -> Result<Vec<NetDevice>> {
    let kernels = Addresses::Kernels;
    let of = |(index, device): (usize, &Device)| {
        let addresses = named.get(index).unwrap_or(&kernels);
        let interface = device.interface().and_then(Result::ok);
        let mtu_max = device.mtu_max().unwrap_or(u32::MAX);
        let (identity, kernels) = match addresses {
            Addresses::Kernels => match device.via {
                Via::AfXdp | Via::AfPacket => {
                    let interface = Interface::named(&device.name)?;
                    let gone = || Error::DeviceGone { name: device.name.clone() };
                    let (name, limits) = (&device.name, (device.takes_all(), mtu_max));
                    let read = following.ok_or_else(gone)?.with_facts(|facts| {
                        let all = facts.addresses().map_err(refused(name))?;
                        of_kernel(name, interface.index, limits, &all, facts)
                    });
                    (read?.ok_or_else(gone)?, Some(interface.index))
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
                let mtu = interface.as_ref().map_or(ETHERNET_MTU, |found| found.mtu.min(mtu_max));
                let addresses = prefixes(addresses);
                let mac = has_link.then_some(mac);
                let is_whole_host = true;
                let identity =
                    Identity { mac, addresses, mtu, is_whole_host, ..Identity::default() };
                (identity, None)
            }
        };
        let gateways = Gateways::default();
        if let (Some(interface), Some(following)) = (kernels, following) {
            following.with_facts(|facts| find_gateways(interface, &gateways, facts));
        }
        Ok(NetDevice {
            name: device.name.clone(),
            identity: ArcSwap::from_pointee(identity),
            kernels,
            interface: interface.map(|found| found.index),
            mtu_max,
            gateways,
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

/// Reads the kernel's addresses again, and the MTUs of all interfaces.
///
/// # Errors
/// If the kernel does not tell the addresses, or the properties of a device; the other devices' are read then.
pub(super) fn refresh(devices: &[NetDevice], facts: &mut HostFacts) -> Result<()> {
    let kernels = devices.iter().find(|device| device.kernels.is_some());
    let all = kernels.map(|first| facts.addresses().map_err(refused(&first.name))).transpose()?;
    devices.iter().map(|device| refresh_one(device, all.as_ref(), facts)).fold(Ok(()), Result::and)
}

/// Reads those of a device. One that is gone keeps what it had.
fn refresh_one(
    device: &NetDevice,
    all: Option<&HostAddresses>,
    facts: &mut HostFacts,
) -> Result<()> {
    if let (Some(index), Some(all)) = (device.kernels, all) {
        let limits = (device.identity.load().is_whole_host, device.mtu_max);
        if let Some(found) = of_kernel(&device.name, index, limits, all, facts)? {
            device.identity.rcu(|identity| {
                let groups = identity.groups.clone();
                Identity { groups, ..found.clone() }
            });
            find_gateways(index, &device.gateways, facts);
        }
    } else if let Some(index) = device.interface
        && let Some(LinkFacts { mtu, .. }) = facts.link(index).map_err(refused(&device.name))?
    {
        let mtu = mtu.min(device.mtu_max);
        device.identity.rcu(|identity| Identity { mtu, ..Identity::clone(identity) });
    }
    Ok(())
}

/// Reads the kernel's addresses on an interface, and those elsewhere; `None` if it is gone. `is_whole_host` is true if the
/// kernel receives nothing there, so that ARP and echo are answered here; the MTU is `mtu_max` at most.
fn of_kernel(
    name: &str,
    index: InterfaceIndex,
    (is_whole_host, mtu_max): (bool, u32),
    all: &HostAddresses,
    facts: &mut HostFacts,
) -> Result<Option<Identity>> {
    let found = all.on(index);
    let link = facts.link(index).map_err(refused(name))?;
    Ok(link.map(|LinkFacts { mtu, mac }| Identity {
        mac: mac.map(|MacAddress(mac)| mac),
        addresses: prefixes(&found.usable),
        elsewhere: found.elsewhere,
        groups: Vec::new(),
        mtu: mtu.min(mtu_max),
        is_whole_host,
    }))
}

fn refused(name: &str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Device {
        name: name.to_owned(),
        what: "read its addresses".to_owned(),
        source,
        help: "check that this process may use netlink sockets".to_owned(),
    }
}

/// Asks the kernel for gateways on an interface, and for its source addresses beyond the subnets. Without an answer there are
/// none: the first device leads everywhere.
fn find_gateways(interface: InterfaceIndex, gateways: &Gateways, facts: &mut HostFacts) {
    let routes = [ANYWHERE_V4, ANYWHERE_V6]
        .map(|anywhere| facts.route(anywhere, interface).ok().flatten().unwrap_or_default());
    let [v4, v6] = routes.map(|route| route.gateway.is_some());
    gateways.set(v4, v6);
    gateways.set_sources(routes.map(|route| route.source));
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
