//! Addresses of this host on one device: an immutable value that is replaced as a whole.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Group of all systems on a link (RFC 1112).
pub const ALL_SYSTEMS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 1);

/// Group of all nodes on a link (RFC 4291, section 2.7.1).
pub const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Addresses that this host accepts as the destination of packets received on one device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Identity {
    /// MAC address of the device; `None` if the device has no link header.
    pub mac: Option<[u8; 6]>,
    /// Unicast addresses of this device, with their subnets.
    pub addresses: Vec<Prefix>,
    /// Unicast addresses of this host on other interfaces. As in the kernel (the weak host model of RFC 1122, section
    /// 3.3.4.2), packets to them are accepted here, too. They have no subnets here, and are sources only where a socket is
    /// bound to them or the kernel's route names them.
    pub elsewhere: BTreeSet<IpAddr>,
    /// Groups joined. [`ALL_SYSTEMS`], [`ALL_NODES`] and the solicited-node groups of `addresses`
    /// need not be listed.
    pub groups: Vec<IpAddr>,
    /// Largest IP packet that may be sent on this device, in bytes.
    pub mtu: u32,
    /// True if the kernel does not answer ARP, neighbour solicitations and echo requests for this
    /// host: the addresses are ours alone (TAP, TUN, vhost-user), or AF_XDP takes all packets.
    pub is_whole_host: bool,
}

/// An address and its prefix length.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Prefix {
    /// The address, host part included.
    pub address: IpAddr,
    /// Prefix length: at most 32 for IPv4, at most 128 for IPv6.
    pub bits: u8,
}

impl Identity {
    /// True if the address is one of this host's unicast addresses.
    #[must_use]
    pub fn is_own(&self, address: IpAddr) -> bool {
        self.is_on_device(address) || self.elsewhere.contains(&address)
    }

    /// True if the address is one of this device's unicast addresses.
    #[must_use]
    pub fn is_on_device(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|prefix| prefix.address == address)
    }

    /// True for a broadcast address: 255.255.255.255, or that of one of our subnets. As in the
    /// kernel, subnets of one or two addresses have none, and the first address of a subnet is not
    /// special.
    #[must_use]
    pub fn is_broadcast(&self, address: Ipv4Addr) -> bool {
        let of_subnet = |prefix: &Prefix| prefix.broadcast() == Some(address);
        address.is_broadcast() || self.addresses.iter().any(of_subnet)
    }

    /// True if this host is in the group.
    #[must_use]
    pub fn is_joined(&self, group: IpAddr) -> bool {
        let is_everyones = match group {
            IpAddr::V4(group) => group == ALL_SYSTEMS,
            IpAddr::V6(group) => {
                group == ALL_NODES
                    || self.addresses.iter().any(|own| own.solicited_node() == Some(group))
            }
        };
        is_everyones || self.groups.contains(&group)
    }

    /// True if this host accepts packets to the address: unicast, broadcast, or a joined group.
    #[must_use]
    pub fn is_for_us(&self, address: IpAddr) -> bool {
        let is_broadcast = |address| match address {
            IpAddr::V4(address) => self.is_broadcast(address),
            IpAddr::V6(_) => false,
        };
        self.is_own(address) || is_broadcast(address) || self.is_joined(address)
    }

    /// True if several sockets may match a packet to this address: multicast, broadcast, or the
    /// unspecified address, which a host without an address sends to.
    #[must_use]
    pub fn is_to_many(&self, destination: IpAddr) -> bool {
        match destination {
            IpAddr::V4(address) => {
                address.is_multicast() || address.is_unspecified() || self.is_broadcast(address)
            }
            IpAddr::V6(address) => address.is_multicast(),
        }
    }

    /// Source address to use towards a neighbour: one in the same subnet, else any of the same
    /// family.
    #[must_use]
    pub fn source_towards(&self, neighbour: IpAddr) -> Option<IpAddr> {
        let own =
            || self.addresses.iter().filter(|own| own.address.is_ipv4() == neighbour.is_ipv4());
        let near = own().find(|own| own.contains(neighbour));
        near.or_else(|| own().next()).map(|own| own.address)
    }

    /// True if the device has any IPv6 address.
    #[must_use]
    pub fn has_ipv6(&self) -> bool {
        self.addresses.iter().any(|prefix| prefix.address.is_ipv6())
    }
}

impl Prefix {
    /// Broadcast address of the subnet, if it has one.
    #[must_use]
    pub fn broadcast(&self) -> Option<Ipv4Addr> {
        let IpAddr::V4(address) = self.address else { return None };
        let host_bits = u32::MAX.checked_shr(self.bits.into()).unwrap_or(0);
        (self.bits < 31).then(|| Ipv4Addr::from(u32::from(address) | host_bits))
    }

    /// True if the address is in the subnet.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let differ = u32::from(own) ^ u32::from(other);
                differ.leading_zeros() >= self.bits.into()
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let differ = u128::from(own) ^ u128::from(other);
                differ.leading_zeros() >= self.bits.into()
            }
            _ => false,
        }
    }

    /// Solicited-node group of this address (RFC 4291, section 2.7.1).
    #[must_use]
    pub fn solicited_node(&self) -> Option<Ipv6Addr> {
        const SOLICITED_NODE: u128 = 0xff02_0000_0000_0000_0000_0001_ff00_0000;
        let IpAddr::V6(address) = self.address else { return None };
        Some(Ipv6Addr::from(SOLICITED_NODE | u128::from(address) & 0x00ff_ffff))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(addresses: &[(&str, u8)]) -> Identity {
        let prefix =
            |&(address, bits): &(&str, u8)| Prefix { address: address.parse().unwrap(), bits };
        Identity { addresses: addresses.iter().map(prefix).collect(), ..Identity::default() }
    }

    #[test]
    fn subnet_broadcast_needs_room() {
        let broadcasts = [
            ("10.9.0.1", 24, "10.9.0.255", true),
            ("10.9.0.1", 24, "10.9.0.0", false),
            ("10.9.0.1", 0, "255.255.255.255", true),
            ("10.9.0.1", 30, "10.9.0.3", true),
            ("10.9.0.1", 31, "10.9.0.1", false),
            ("10.9.0.1", 32, "10.9.0.1", false),
        ];
        for (own, bits, address, expected) in broadcasts {
            let us = identity(&[(own, bits)]);
            assert_eq!(us.is_broadcast(address.parse().unwrap()), expected, "{address} of /{bits}");
        }
    }

    #[test]
    fn promise_13_address_elsewhere_is_own_without_subnet() {
        let vip: IpAddr = "192.0.2.53".parse().unwrap();
        let us = Identity { elsewhere: [vip].into(), ..identity(&[("10.9.0.1", 24)]) };
        assert!(us.is_own(vip) && us.is_for_us(vip) && !us.is_on_device(vip));
        assert!(!us.is_to_many("192.0.2.255".parse().unwrap()));
        assert_eq!(us.source_towards("192.0.2.9".parse().unwrap()), "10.9.0.1".parse().ok());
    }

    #[test]
    fn node_joins_solicited_node_groups() {
        let us = identity(&[("fd00::12:3456", 64)]);
        for (group, expected) in
            [("ff02::1", true), ("ff02::1:ff12:3456", true), ("ff02::1:ff12:3457", false)]
        {
            assert_eq!(us.is_for_us(group.parse().unwrap()), expected, "{group}");
        }
        assert!(us.is_joined(ALL_SYSTEMS.into()));
        assert!(us.has_ipv6() && !identity(&[("10.0.0.1", 8)]).has_ipv6());
    }

    #[test]
    fn subnet_contains_its_addresses() {
        let subnet = |address: &str, bits| Prefix { address: address.parse().unwrap(), bits };
        for (subnet, address, expected) in [
            (subnet("10.9.0.1", 24), "10.9.0.255", true),
            (subnet("10.9.0.1", 24), "10.9.1.1", false),
            (subnet("10.9.0.1", 0), "1.2.3.4", true),
            (subnet("10.9.0.1", 32), "10.9.0.1", true),
            (subnet("fe80::1", 64), "fe80::ffff:0:0:1", true),
            (subnet("fe80::1", 64), "fe80:0:0:1::1", false),
            (subnet("10.9.0.1", 0), "::1", false),
        ] {
            assert_eq!(subnet.contains(address.parse().unwrap()), expected, "{address}");
        }
    }
}
