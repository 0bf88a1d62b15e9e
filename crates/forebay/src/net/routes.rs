//! Routes: the device that leads to a destination, and the source address to use on it.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::{ArcSwap, Guard};
use forebay_stack::network::{Identity, Prefix};
use forebay_sys::interface::InterfaceIndex;
use forebay_sys::neighbour;

use super::endpoint::plain;
use super::shared::NetDevice;
use super::transmit::Between;

/// Addresses on each device, which select the device for a destination.
pub(super) struct Routes<'a>(pub(super) &'a [NetDevice]);

/// Device towards a destination, and the source address to use on it.
type Route = (usize, Option<IpAddr>);

/// Rank of a device for a destination: the longest prefix with it (`fib_table_lookup`); without one, a device with a
/// gateway comes before others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct RouteRank {
    /// Length of the prefix; `None` beyond all subnets of the device.
    near_bits: Option<u8>,
    has_gateway: bool,
}

impl Routes<'_> {
    /// Finds the device that leads to a destination, and the source address to use on it.
    pub(super) fn find(&self, destination: IpAddr) -> Option<Route> {
        self.best(destination, |_| true).map(|(_, route)| route)
    }

    /// Finds the device for a packet from one of this host's addresses, such as an answer. The device that has the address is
    /// used even if another one leads to the destination, too: what came by it goes back by it. Only of the kernel's
    /// devices another one is used if it ranks higher, as the kernel's routes go by destination; and any of them for an
    /// address of the kernel on another interface. A link-local destination is on the link of its source, and what is for
    /// many of IPv4 leaves by it (`ip_route_output_key_hash_rcu`), unless it is for those of one subnet.
    pub(super) fn find_between(
        &self,
        source: Option<IpAddr>,
        destination: IpAddr,
    ) -> Option<usize> {
        let has_source =
            |device: &NetDevice| source.is_some_and(|own| device.identity.load().is_on_device(own));
        let Some((rank, (own, _))) = self.best(destination, has_source) else {
            let accepts =
                |device: &NetDevice| source.is_some_and(|own| device.identity.load().is_own(own));
            let found = self.best(destination, accepts).map(|(_, route)| route);
            return Some(found.or_else(|| self.find(destination))?.0);
        };
        if self.0[own].kernels.is_none()
            || is_link_local(destination)
            || is_for_any_link(destination)
        {
            return Some(own);
        }
        let of_kernel = self.best(destination, |device| device.kernels.is_some());
        let better = of_kernel.filter(|(other, _)| *other > rank);
        Some(better.map_or(own, |(_, (other, _))| other))
    }

    /// Finds the first device of the highest rank among those that `may` be used.
    fn best(
        &self,
        destination: IpAddr,
        may: impl Fn(&NetDevice) -> bool,
    ) -> Option<(RouteRank, Route)> {
        let mut best: Option<(RouteRank, Route)> = None;
        for (index, device) in self.0.iter().enumerate().filter(|(_, device)| may(device)) {
            let Some((rank, source)) = device.rank(destination) else { continue };
            if best.as_ref().is_none_or(|(highest, _)| rank > *highest) {
                best = Some((rank, (index, Some(source))));
            }
        }
        best
    }

    /// Finds the device and the source address for a destination as a program names it: with a scope if it is
    /// link-local.
    pub(super) fn find_named(&self, to: SocketAddr) -> Option<Route> {
        match scope_of(to) {
            Some(scope) => self.find_by(self.device_of(scope)?, to.ip()),
            None => self.find(to.ip()),
        }
    }

    /// Finds the device for a datagram from a local address, if it is given, to a destination. Both are as a program names
    /// them.
    pub(super) fn find_named_between(
        &self,
        source: Option<SocketAddr>,
        to: SocketAddr,
    ) -> Option<Route> {
        let scope = scope_of(to).or_else(|| source.and_then(scope_of));
        match (scope, source) {
            (Some(scope), _) => self.find_by(self.device_of(scope)?, plain(to).ip()),
            (None, Some(source)) => {
                let destination = plain(to).ip();
                let device = self.find_between(Some(plain(source).ip()), destination)?;
                self.find_by(device, destination)
            }
            (None, None) => self.find(plain(to).ip()),
        }
    }

    /// Finds the device for the answer to a datagram that came `by` a device. A link-local destination is on the link that
    /// it came by.
    pub(super) fn find_back(
        &self,
        Between { source, destination }: Between,
        by: usize,
    ) -> Option<Route> {
        let to = destination.ip();
        let device = match is_link_local(to) && by < self.0.len() {
            true => by,
            // A group or a broadcast address is no device's own.
            false => self.find_between(Some(source.ip()), to)?,
        };
        self.find_by(device, to)
    }

    /// Device that is this interface of the kernel.
    fn device_of(&self, scope: InterfaceIndex) -> Option<usize> {
        self.0.iter().position(|device| device.kernels == Some(scope))
    }

    /// An address with the scope that programs know it by: of a link-local one, the kernel's interface
    /// that has `ours`.
    pub(super) fn scoped(&self, address: SocketAddr, ours: IpAddr) -> SocketAddr {
        let SocketAddr::V6(mut v6) = address else { return address };
        if v6.ip().is_unicast_link_local() {
            let has_it = |device: &&NetDevice| device.identity.load().is_on_device(ours);
            let mut with_it = self.0.iter().filter(has_it);
            let InterfaceIndex(scope) =
                with_it.find_map(|device| device.kernels).unwrap_or(InterfaceIndex(0));
            v6.set_scope_id(scope);
        }
        v6.into()
    }

    /// Scope of link-local addresses on a device: the kernel's interface index, or 0 if the kernel does not have it.
    pub(super) fn scope_on(&self, device: usize) -> u32 {
        let kernels = self.0.get(device).and_then(|device| device.kernels);
        kernels.map_or(0, |InterfaceIndex(index)| index)
    }

    /// Source address for a destination that is sent to by this device, whatever leads there.
    pub(super) fn find_by(&self, device: usize, destination: IpAddr) -> Option<Route> {
        let (_, source) = self.0.get(device)?.rank(destination)?;
        Some((device, Some(source)))
    }

    /// Source address that the kernel uses by a device of its own for a destination beyond the device's subnets, which it is
    /// asked for in the namespace of the calling thread. `None` if another choice counts.
    pub(super) fn kernels_source(&self, device: usize, destination: IpAddr) -> Option<IpAddr> {
        let of = self.0.get(device)?;
        let interface = of.kernels?;
        let (rank, _) = of.rank(destination)?;
        if rank.near_bits.is_some() || is_on_link(destination) {
            return None;
        }
        let source = neighbour::source_to(destination, interface).ok().flatten();
        source.filter(|source| of.identity.load().is_own(*source))
    }

    /// True if the address is one of this host's.
    pub(super) fn is_own(&self, address: IpAddr) -> bool {
        self.0.iter().any(|device| device.identity.load().is_own(address))
    }

    /// True if the address is of this host's end of the devices: one of its addresses, unless a device leads to it at the
    /// other end, as a TAP to the kernel's.
    pub(super) fn is_this_end(&self, address: IpAddr) -> bool {
        let has_it = |device: &NetDevice| device.identity.load().is_on_device(address);
        let found = self.find(address);
        self.0.iter().any(has_it)
            || found.is_some_and(|(device, _)| self.identity(device).is_own(address))
    }

    /// Addresses of this host on a device.
    pub(super) fn identity(&self, device: usize) -> Guard<Arc<Identity>> {
        self.0[device].identity.load()
    }
}

impl NetDevice {
    /// Rank for a destination, and the source address to use. `None` without an address of the family.
    fn rank(&self, destination: IpAddr) -> Option<(RouteRank, IpAddr)> {
        let identity = self.identity.load();
        let is_of_family = |own: &&Prefix| own.address.is_ipv4() == destination.is_ipv4();
        let own = identity.addresses.iter().filter(is_of_family);
        let mut near: Option<&Prefix> = None;
        for prefix in own.clone().filter(|own| own.contains(destination)) {
            if near.is_none_or(|longest| prefix.bits > longest.bits) {
                near = Some(prefix);
            }
        }
        let source = match near {
            Some(near) => near.address,
            None => self.source_beyond(own, destination)?,
        };
        let near_bits = near.map(|near| near.bits);
        let has_gateway = near.is_none() && self.gateways.is_any_to(destination);
        Some((RouteRank { near_bits, has_gateway }, source))
    }

    /// The one of the device's addresses to use for a destination beyond all subnets: as the kernel's default route says; else for
    /// IPv6 the one with the longest prefix in common (RFC 6724, section 5, rule 8), and the first of several. A link-local
    /// address is for its link alone (rule 2).
    fn source_beyond<'a>(
        &self,
        own: impl Iterator<Item = &'a Prefix> + Clone,
        destination: IpAddr,
    ) -> Option<IpAddr> {
        let is_on_link = is_on_link(destination);
        let kernels = self.gateways.source_to(destination).filter(|_| !is_on_link);
        if let Some(source) = kernels
            && self.identity.load().is_own(source)
        {
            return Some(source);
        }
        let preference = |own: &&Prefix| {
            let is_of_scope = is_link_local(own.address) == is_on_link;
            (Reverse(is_of_scope), Reverse(common_bits(own, destination)))
        };
        own.min_by_key(preference).map(|own| own.address)
    }
}

/// Length of the prefix that an IPv6 destination has in common with an own address, at most that of its subnet.
fn common_bits(own: &Prefix, destination: IpAddr) -> u32 {
    match (own.address, destination) {
        (IpAddr::V6(address), IpAddr::V6(to)) if !to.is_multicast() => {
            let differ = u128::from(address) ^ u128::from(to);
            differ.leading_zeros().min(own.bits.into())
        }
        _ => 0,
    }
}

/// Gateways of the kernel on a device, by IP version.
#[derive(Debug, Default)]
pub(super) struct Gateways {
    v4: AtomicBool,
    v6: AtomicBool,
    /// Source addresses of the kernel's default routes, for IPv4 and IPv6.
    sources: ArcSwap<[Option<IpAddr>; 2]>,
}

impl Gateways {
    pub(super) fn set(&self, has_v4: bool, has_v6: bool) {
        self.v4.store(has_v4, Ordering::Relaxed);
        self.v6.store(has_v6, Ordering::Relaxed);
    }

    pub(super) fn set_sources(&self, sources: [Option<IpAddr>; 2]) {
        self.sources.store(Arc::new(sources));
    }

    /// Source address of the kernel's default route for destinations of this IP version.
    fn source_to(&self, destination: IpAddr) -> Option<IpAddr> {
        let [v4, v6] = **self.sources.load();
        if destination.is_ipv4() { v4 } else { v6 }
    }

    /// True if there is one for destinations of this IP version beyond the device's subnets.
    fn is_any_to(&self, destination: IpAddr) -> bool {
        let of_version = if destination.is_ipv4() { &self.v4 } else { &self.v6 };
        of_version.load(Ordering::Relaxed)
    }
}

/// Scope of an address that needs one, if it was named.
pub(super) fn scope_of(address: SocketAddr) -> Option<InterfaceIndex> {
    match address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 && needs_scope(*v6.ip()) => {
            Some(InterfaceIndex(v6.scope_id()))
        }
        _ => None,
    }
}

/// True of a link-local address, and of a group of the link or the interface (`__ipv6_addr_needs_scope_id`).
fn needs_scope(address: Ipv6Addr) -> bool {
    let [first, ..] = address.segments();
    address.is_unicast_link_local() || matches!(first & 0xff0f, 0xff01 | 0xff02)
}

/// True of an IPv6 destination that is on its own link.
pub(super) fn is_on_link(destination: IpAddr) -> bool {
    match destination {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => needs_scope(address),
    }
}

/// True of a group of IPv4 and of 255.255.255.255, which are on each link.
fn is_for_any_link(destination: IpAddr) -> bool {
    match destination {
        IpAddr::V4(address) => address.is_multicast() || address.is_broadcast(),
        IpAddr::V6(_) => false,
    }
}

pub(super) fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Devices with these addresses; those of the kernel have the interfaces 1, 2 and so on.
    fn devices(are_kernels: bool, own: &[&[&str]]) -> Vec<NetDevice> {
        let prefix = |text: &&str| {
            let (address, bits) = text.split_once('/').unwrap();
            Prefix { address: ip(address), bits: bits.parse().unwrap() }
        };
        let device = |(index, own): (u32, &&[&str])| {
            let addresses = own.iter().map(prefix).collect();
            NetDevice {
                name: format!("test{index}"),
                identity: ArcSwap::from_pointee(Identity { addresses, ..Identity::default() }),
                kernels: are_kernels.then_some(InterfaceIndex(index)),
                interface: None,
                mtu_max: u32::MAX,
                gateways: Gateways::default(),
                learned: Arc::default(),
            }
        };
        (1..).zip(own).map(device).collect()
    }

    fn ip(address: &str) -> IpAddr {
        address.parse().unwrap()
    }

    fn socket(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn udp_21_longest_prefix_leads_to_destination() {
        let own = [
            &["10.0.0.1/8", "fd00::1/16"][..],
            &["10.9.0.1/16", "10.9.8.1/24", "fd00:9::1/32"],
            &["10.9.8.2/24", "fe80::1/64", "fd00:8::1/32"],
        ];
        for are_kernels in [false, true] {
            let devices = devices(are_kernels, &own);
            let found = |to| Routes(&devices).find(ip(to)).map(|(at, own)| (at, own.unwrap()));
            for (to, device, source) in [
                ("10.1.0.9", 0, "10.0.0.1"),
                ("10.9.7.9", 1, "10.9.0.1"),
                // Of equal prefixes the first.
                ("10.9.8.9", 1, "10.9.8.1"),
                ("192.0.2.9", 0, "10.0.0.1"),
                ("fd00:8::9", 2, "fd00:8::1"),
                ("fd00:9::9", 1, "fd00:9::1"),
                ("fe80::9", 2, "fe80::1"),
                ("2001:db8::9", 0, "fd00::1"),
            ] {
                assert_eq!(found(to), Some((device, ip(source))), "{to}");
            }
        }
    }

    /// Hosts behind a router are in no prefix: what they are answered leaves as they came.
    #[test]
    fn udp_21_local_address_decides_the_device() {
        let own = [&["10.0.0.1/24", "10.7.0.1/32"][..], &["10.0.1.1/24"], &["10.7.0.1/24"]];
        let devices = devices(false, &own);
        let found = |from, to| Routes(&devices).find_between(Some(ip(from)), ip(to));
        for (from, to, device) in [
            ("10.0.0.1", "192.0.2.9", 0),
            ("10.0.1.1", "192.0.2.9", 1),
            // Even if another device leads there.
            ("10.0.1.1", "10.0.0.9", 1),
            // On two devices: the longer prefix.
            ("10.7.0.1", "10.7.0.9", 2),
            ("10.7.0.1", "10.0.0.9", 0),
            ("10.7.0.1", "192.0.2.9", 0),
            // On none.
            ("224.0.0.251", "10.0.1.9", 1),
        ] {
            assert_eq!(found(from, to), Some(device), "{from} to {to}");
        }
        let back = |source, destination, by| {
            let between = Between { source: socket(source), destination: socket(destination) };
            Routes(&devices).find_back(between, by)
        };
        assert_eq!(back("10.0.1.1:1", "192.0.2.9:2", 1), Some((1, Some(ip("10.0.1.1")))));
        assert_eq!(back("224.0.0.251:1", "10.0.1.9:2", 0), Some((1, Some(ip("10.0.1.1")))));
    }

    /// Of several devices the one with the source, wherever the default route leads. Another subnet's broadcast address is on its
    /// link alone.
    #[test]
    fn udp_21_groups_leave_by_their_source() {
        let devices = devices(true, &[&["10.0.0.1/24"], &["10.0.1.1/24", "10.0.1.2/24"]]);
        devices[0].gateways.set(true, true);
        for (from, to, device) in [
            ("10.0.1.2", "239.1.2.3", 1),
            ("10.0.1.2", "255.255.255.255", 1),
            ("10.0.1.2", "10.0.0.255", 0),
            ("10.0.1.2", "192.0.2.9", 0),
            ("10.0.0.1", "239.1.2.3", 0),
        ] {
            let found = Routes(&devices).find_between(Some(ip(from)), ip(to));
            assert_eq!(found, Some(device), "{from} to {to}");
        }
    }

    /// The kernel's address on another interface may be used by any of its devices, and only if it is named.
    #[test]
    fn udp_21_address_elsewhere_leaves_routes() {
        let own = [&["10.0.0.1/24"][..], &["10.0.1.1/24"]];
        let mut devices = devices(true, &own);
        devices.push(self::devices(false, &[&["10.0.2.1/24"]]).remove(0));
        for (device, elsewhere) in [(0, "10.0.1.1"), (1, "10.0.0.1")] {
            let elsewhere = BTreeSet::from(["192.0.2.53", "10.0.2.2", elsewhere].map(ip));
            devices[device].identity.rcu(|on| {
                let elsewhere = elsewhere.clone();
                Identity { elsewhere, ..Identity::clone(on) }
            });
        }
        let routes = Routes(&devices);
        for (from, to, device) in [
            ("192.0.2.53", "10.0.0.9", 0),
            ("192.0.2.53", "10.0.1.9", 1),
            ("192.0.2.53", "192.0.2.9", 0),
            // The kernel's, though another device is nearer.
            ("192.0.2.53", "10.0.2.9", 0),
            ("10.0.1.1", "203.0.113.9", 1),
        ] {
            assert_eq!(routes.find_between(Some(ip(from)), ip(to)), Some(device), "{from} to {to}");
        }
        assert_eq!(routes.find(ip("192.0.2.9")), Some((0, Some(ip("10.0.0.1")))));
        assert_eq!(routes.find(ip("10.0.1.9")), Some((1, Some(ip("10.0.1.1")))));
        for (address, is_own, is_this_end) in [
            ("192.0.2.53", true, true),
            ("10.0.1.1", true, true),
            ("10.0.2.1", true, true),
            ("10.0.2.2", true, false),
            ("10.0.0.9", false, false),
        ] {
            assert_eq!(routes.is_own(ip(address)), is_own, "{address}");
            assert_eq!(routes.is_this_end(ip(address)), is_this_end, "{address}");
        }
    }

    #[test]
    fn udp_21_gateway_leads_beyond_all_subnets() {
        let own = [&["10.0.0.1/24", "fd00::1/64"][..], &["10.0.1.1/24", "fd01::1/64"]];
        let devices = devices(true, &own);
        let routes = Routes(&devices);
        let between = |from, to| routes.find_between(Some(ip(from)), ip(to));
        assert_eq!(between("10.0.1.1", "192.0.2.9"), Some(1), "without gateways");
        devices[1].gateways.set(true, false);
        assert_eq!(routes.find(ip("192.0.2.9")), Some((1, Some(ip("10.0.1.1")))));
        assert_eq!(routes.find(ip("10.0.0.9")), Some((0, Some(ip("10.0.0.1")))));
        assert_eq!(routes.find(ip("2001:db8::9")), Some((0, Some(ip("fd00::1")))));
        // The kernel's routes go by destination.
        assert_eq!(between("10.0.0.1", "192.0.2.9"), Some(1));
        assert_eq!(between("10.0.1.1", "10.0.0.9"), Some(0));
        devices[0].gateways.set(true, false);
        assert_eq!(between("10.0.0.1", "192.0.2.9"), Some(0));
        assert_eq!(between("10.0.1.1", "192.0.2.9"), Some(1));
    }

    #[test]
    fn udp_27_source_beyond_subnets_is_chosen() {
        let own = [
            "10.8.0.1/24",
            "10.9.0.1/24",
            "fd00::1/64",
            "fe80::1/64",
            "2001:db8:1::1/48",
            "2001:db8:2::1/48",
        ];
        let devices = devices(true, &[&own]);
        let source = |to: &str| Routes(&devices).find(ip(to)).unwrap().1.unwrap();
        for (to, expected) in [
            ("192.0.2.9", "10.8.0.1"),
            ("2001:db8:2:1::9", "2001:db8:2::1"),
            ("2001:db8:3::9", "2001:db8:2::1"),
            ("2001:db8::9", "2001:db8:1::1"),
            ("2a00::9", "2001:db8:1::1"),
            ("fd01::9", "fd00::1"),
            ("ff02::fb", "fe80::1"),
            ("ff05::fb", "fd00::1"),
        ] {
            assert_eq!(source(to), ip(expected), "{to}");
        }
        devices[0].gateways.set_sources(["10.9.0.1", "2001:db8:2::1"].map(|own| Some(ip(own))));
        for (to, expected) in [
            ("192.0.2.9", "10.9.0.1"),
            ("10.8.0.9", "10.8.0.1"),
            ("2a00::9", "2001:db8:2::1"),
            ("ff02::fb", "fe80::1"),
        ] {
            assert_eq!(source(to), ip(expected), "as the kernel says: {to}");
        }
        // An address that this host has no longer.
        devices[0].gateways.set_sources([Some(ip("10.7.0.1")), None]);
        assert_eq!(source("192.0.2.9"), ip("10.8.0.1"));
    }

    #[test]
    fn udp_22_link_local_peers_have_scopes() {
        let devices =
            devices(true, &[&["fe80::1/64", "10.0.0.1/24"], &["fe80::1/64", "fd00::1/64"]]);
        let routes = Routes(&devices);
        let between = |source: Option<&str>, to| {
            let source = source.map(socket);
            routes.find_named_between(source, socket(to)).map(|(device, _)| device)
        };
        assert_eq!(between(None, "[fe80::9%2]:1"), Some(1));
        assert_eq!(between(Some("[fe80::1%2]:1"), "[fe80::9]:1"), Some(1));
        assert_eq!(between(Some("[::ffff:10.0.0.1]:1"), "[fe80::9%2]:1"), Some(1));
        assert_eq!(between(Some("[fe80::1%2]:1"), "[fe80::9%1]:1"), Some(0));
        assert_eq!(between(None, "[fe80::9%3]:1"), None);
        assert_eq!(between(None, "[ff02::fb%2]:1"), Some(1));
        assert_eq!(between(None, "[ff05::fb%2]:1"), Some(0));
        assert_eq!(between(None, "[::ffff:10.0.0.9]:1"), Some(0));
        let between = Between { source: socket("[fe80::1]:1"), destination: socket("[fe80::9]:2") };
        assert_eq!(routes.find_back(between, 1), Some((1, Some(ip("fe80::1")))));
    }
}
