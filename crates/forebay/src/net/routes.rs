//! Routes: the device that leads to a destination, and the source address to use on it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::Guard;
use forebay_stack::network::{Identity, Prefix};
use forebay_sys::interface::InterfaceIndex;

use super::shared::NetDevice;

/// Addresses on each device, which select the device for a destination.
pub(super) struct Routes<'a>(pub(super) &'a [NetDevice]);

impl Routes<'_> {
    /// Finds the device that leads to a destination, and the source address to use on it.
    pub(super) fn find(&self, destination: IpAddr) -> Option<(usize, Option<IpAddr>)> {
        let mut by_default = None;
        for (index, device) in self.0.iter().enumerate() {
            let identity = device.identity.load();
            let same_family = |own: &&Prefix| own.address.is_ipv4() == destination.is_ipv4();
            let mut own = identity.addresses.iter().filter(same_family);
            if let Some(near) = own.clone().find(|own| own.contains(destination)) {
                return Some((index, Some(near.address)));
            }
            // A link-local IPv6 address cannot be the source for destinations beyond the link.
            let is_far = |own: &&Prefix| match own.address {
                IpAddr::V6(own) => !own.is_unicast_link_local(),
                IpAddr::V4(_) => false,
            };
            let far = own.clone().find(is_far).or_else(|| own.next());
            if by_default.is_none() && far.is_some() {
                by_default = Some((index, far.map(|own| own.address)));
            }
        }
        by_default
    }

    /// Finds the device and the source address for a destination as a program names it: with a scope if it is
    /// link-local.
    pub(super) fn find_named(&self, to: SocketAddr) -> Option<(usize, Option<IpAddr>)> {
        match to {
            SocketAddr::V6(v6) if v6.scope_id() != 0 && v6.ip().is_unicast_link_local() => {
                let scope = InterfaceIndex(v6.scope_id());
                let device = self.0.iter().position(|device| device.kernels == Some(scope))?;
                self.find_by(device, to.ip())
            }
            _ => self.find(to.ip()),
        }
    }

    /// Finds the device for a packet from one of this host's addresses. A link-local destination is on
    /// the link of its source.
    pub(super) fn find_between(
        &self,
        source: Option<IpAddr>,
        destination: IpAddr,
    ) -> Option<usize> {
        let is_of = |device: &NetDevice| source.is_some_and(|it| device.identity.load().is_own(it));
        let of_source = match destination {
            IpAddr::V6(to) if to.is_unicast_link_local() => self.0.iter().position(is_of),
            _ => None,
        };
        of_source.or_else(|| Some(self.find(destination)?.0))
    }

    /// An address with the scope that programs know it by: of a link-local one, the kernel's interface
    /// that has `ours`.
    pub(super) fn scoped(&self, address: SocketAddr, ours: IpAddr) -> SocketAddr {
        let SocketAddr::V6(mut v6) = address else { return address };
        if v6.ip().is_unicast_link_local() {
            let mut with_it = self.0.iter().filter(|device| device.identity.load().is_own(ours));
            let InterfaceIndex(scope) =
                with_it.find_map(|device| device.kernels).unwrap_or(InterfaceIndex(0));
            v6.set_scope_id(scope);
        }
        v6.into()
    }

    /// Source address for a destination that is sent to by this device, whatever leads there.
    pub(super) fn find_by(
        &self,
        device: usize,
        destination: IpAddr,
    ) -> Option<(usize, Option<IpAddr>)> {
        let identity = self.0.get(device)?.identity.load();
        Some((device, Some(identity.source_towards(destination)?)))
    }

    /// True if the address is one of this host's.
    pub(super) fn is_own(&self, address: IpAddr) -> bool {
        self.0.iter().any(|device| device.identity.load().is_own(address))
    }

    /// Addresses of this host on a device.
    pub(super) fn identity(&self, device: usize) -> Guard<Arc<Identity>> {
        self.0[device].identity.load()
    }
}
