//! Multicast memberships: the groups that sockets have joined, and those that each device receives.
//!
//! On an interface that the kernel also has, the kernel joins too, through the socket that reserves
//! the port and receives nothing. It sends membership reports (IGMP, MLD), answers queries, and
//! programs the NIC's multicast filter. On a device that only this process has, no reports are
//! sent: multicast frames arrive only if the peer floods them.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_stack::network::Identity;
use forebay_stack::socket::table::Membership;
use forebay_sys::interface::InterfaceIndex;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::endpoint::Endpoint;
use super::message::DeviceIndex;
use super::shared::NetState;

/// Maximum number of memberships of a socket; each device counts (`igmp_max_memberships`).
const MEMBERSHIPS_MAX: usize = 20;

/// Number of sockets in each group on each device.
#[derive(Debug, Default)]
pub(super) struct Groups(Mutex<BTreeMap<Membership, usize>>);

impl Endpoint {
    /// Joins a group on one device, or on all devices.
    pub(super) fn join(&self, group: IpAddr, device: Option<DeviceIndex>) -> io::Result<()> {
        let group = self.group(group)?;
        let mut joined = self.joined();
        let wanted = self.shared.memberships(group, device)?;
        if wanted.iter().any(|membership| joined.contains(membership)) {
            return Err(Errno::ADDRINUSE.into());
        }
        if joined.len() + wanted.len() > MEMBERSHIPS_MAX {
            return Err(Errno::NOBUFS.into());
        }
        for (number, &membership) in wanted.iter().enumerate() {
            if let Err(refused) = self.change_at_kernel(membership, Change::Join) {
                for &before in wanted.iter().take(number) {
                    let _ = self.change_at_kernel(before, Change::Leave); // roll back
                }
                return Err(refused);
            }
        }
        wanted.iter().for_each(|&membership| self.shared.count_member(membership, Change::Join));
        joined.extend(wanted);
        self.publish(&joined);
        Ok(())
    }

    /// Leaves a group on one device, or on every device on which it was joined.
    pub(super) fn leave(&self, group: IpAddr, device: Option<DeviceIndex>) -> io::Result<()> {
        let group = self.group(group)?;
        let mut joined = self.joined();
        let left = |membership: &Membership| {
            membership.group == group && device.is_none_or(|of| of.0 == membership.device)
        };
        let leaving: Vec<_> = joined.extract_if(.., |membership| left(membership)).collect();
        if leaving.is_empty() {
            return Err(Errno::ADDRNOTAVAIL.into());
        }
        self.publish(&joined);
        // A device that is gone keeps the socket in no group of the others.
        let leave = |membership| {
            self.shared.count_member(membership, Change::Leave);
            self.change_at_kernel(membership, Change::Leave)
        };
        leaving.into_iter().map(leave).fold(Ok(()), Result::and)
    }

    /// Leaves all groups when the socket is closed. The kernel drops its own memberships when the
    /// reserving socket closes.
    pub(super) fn leave_all(&self) {
        for membership in self.joined().drain(..) {
            self.shared.count_member(membership, Change::Leave);
        }
    }

    /// Validates a group address: multicast, and of a family that the socket supports.
    fn group(&self, group: IpAddr) -> io::Result<IpAddr> {
        let group = group.to_canonical();
        if !group.is_multicast() || self.is_ipv4() && group.is_ipv6() {
            return Err(Errno::INVAL.into());
        }
        Ok(group)
    }

    fn publish(&self, joined: &[Membership]) {
        self.shared.set_groups(self.id, joined);
    }

    /// Makes the kernel join or leave the group, if it has the device too.
    fn change_at_kernel(&self, membership: Membership, change: Change) -> io::Result<()> {
        let device = &self.shared.devices[usize::from(membership.device)];
        let (Some(interface), Some(reserved)) = (device.kernels, &self.reserved) else {
            return Ok(());
        };
        change_membership(reserved, membership.group, interface, change)
    }

    fn joined(&self) -> MutexGuard<'_, Vec<Membership>> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Join,
    Leave,
}

fn change_membership(
    socket: &UdpSocket,
    group: IpAddr,
    InterfaceIndex(index): InterfaceIndex,
    change: Change,
) -> io::Result<()> {
    let any = &Ipv4Addr::UNSPECIFIED;
    match (group, change) {
        (IpAddr::V4(group), Change::Join) => {
            sockopt::set_ip_add_membership_with_ifindex(socket, &group, any, index)?;
        }
        (IpAddr::V4(group), Change::Leave) => {
            sockopt::set_ip_drop_membership_with_ifindex(socket, &group, any, index)?;
        }
        (IpAddr::V6(group), Change::Join) => {
            sockopt::set_ipv6_add_membership(socket, &group, index)?;
        }
        (IpAddr::V6(group), Change::Leave) => {
            sockopt::set_ipv6_drop_membership(socket, &group, index)?;
        }
    }
    Ok(())
}

impl NetState {
    /// Memberships of a group on one device, or on every device.
    fn memberships(
        &self,
        group: IpAddr,
        device: Option<DeviceIndex>,
    ) -> io::Result<Vec<Membership>> {
        let devices = 0..u8::try_from(self.devices.len()).unwrap_or(u8::MAX);
        let on = |device| Membership { group, device };
        match device {
            None => Ok(devices.map(on).collect()),
            Some(DeviceIndex(device)) if devices.contains(&device) => Ok(vec![on(device)]),
            Some(_) => Err(Errno::NODEV.into()),
        }
    }

    /// Adds or removes a member. A device receives the groups that have at least one member.
    fn count_member(&self, membership: Membership, change: Change) {
        let mut groups = self.groups.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = groups.entry(membership).or_default();
        *count = match change {
            Change::Join => *count + 1,
            Change::Leave => count.saturating_sub(1),
        };
        groups.retain(|_, count| *count > 0);
        let of_device = |of: &&Membership| of.device == membership.device;
        let heard: Vec<_> = groups.keys().filter(of_device).map(|of| of.group).collect();
        self.devices[usize::from(membership.device)]
            .identity
            .rcu(|identity| Identity { groups: heard.clone(), ..Identity::clone(identity) });
    }
}
