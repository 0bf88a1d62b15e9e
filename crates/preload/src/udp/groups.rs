//! Multicast groups of a UDP socket: joined and left by options of the kernel's socket, whose memberships are followed.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use forebay::net::message::DeviceIndex;
use forebay_stack::socket::shown;
use forebay_sys::interface::InterfaceIndex;
use forebay_sys::neighbour::addresses;
use rustix::io::Errno;
use rustix::net::getsockname;

use super::Udp;
use crate::abi;
use crate::option::SocketOption;
use crate::runtime::{device_of, interfaces};

/// Length of the longest value of these options: `struct group_req` of linux/in.h.
pub(crate) const VALUE_BYTES_MAX: usize = 136;

/// Offsets in `struct group_req`: a 32-bit index, then `struct sockaddr_storage`.
const GROUP_AT: usize = 8;

/// Group of all systems on a link, which each host is in.
const ALL_SYSTEMS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 1);

/// Port of a service that answers nothing (RFC 863). Nothing is sent to it.
const DISCARD_PORT: u16 = 9;

/// True once a socket of the kernel was told by which interface to send to groups. Few programs do so, and the others are spared
/// the question at each `bind`.
static IS_INTERFACE_CHOSEN: AtomicBool = AtomicBool::new(false);

// Not in the crate libc (linux/in.h).
const MCAST_JOIN_GROUP: i32 = 42;
const MCAST_LEAVE_GROUP: i32 = 45;

/// Options that join a group, each with the one that leaves it.
const JOINS: [(SocketOption, SocketOption); 4] = [
    (
        SocketOption::of_ipv4(libc::IP_ADD_MEMBERSHIP),
        SocketOption::of_ipv4(libc::IP_DROP_MEMBERSHIP),
    ),
    (
        SocketOption::of_ipv6(libc::IPV6_ADD_MEMBERSHIP),
        SocketOption::of_ipv6(libc::IPV6_DROP_MEMBERSHIP),
    ),
    (SocketOption::of_ipv4(MCAST_JOIN_GROUP), SocketOption::of_ipv4(MCAST_LEAVE_GROUP)),
    (SocketOption::of_ipv6(MCAST_JOIN_GROUP), SocketOption::of_ipv6(MCAST_LEAVE_GROUP)),
];

/// Options that name the interface which datagrams to groups leave by.
const INTERFACES: [SocketOption; 2] =
    [SocketOption::of_ipv4(libc::IP_MULTICAST_IF), SocketOption::of_ipv6(libc::IPV6_MULTICAST_IF)];

/// Options by which programs of this host hear what is sent to groups.
const LOOPS: [SocketOption; 2] = [
    SocketOption::of_ipv4(libc::IP_MULTICAST_LOOP),
    SocketOption::of_ipv6(libc::IPV6_MULTICAST_LOOP),
];

/// Interface, as an option names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Any,
    Index(u32),
    Address(Ipv4Addr),
}

/// True for an option about groups.
pub(crate) fn is_about_groups(option: SocketOption) -> bool {
    is_join(option) || is_leave(option) || names_interface(option) || LOOPS.contains(&option)
}

/// True for an option that names the interface which datagrams to groups leave by.
pub(crate) fn names_interface(option: SocketOption) -> bool {
    INTERFACES.contains(&option)
}

/// Notes that an option of a socket of the kernel is set, which a socket of ours may have at its `bind`.
pub(crate) fn note_choice(option: SocketOption) {
    if names_interface(option) {
        IS_INTERFACE_CHOSEN.store(true, Ordering::Relaxed);
    }
}

/// Option that takes back what this one does.
pub(crate) fn opposite(option: SocketOption) -> Option<SocketOption> {
    JOINS.iter().find(|(join, _)| *join == option).map(|(_, leave)| *leave)
}

fn is_join(option: SocketOption) -> bool {
    JOINS.iter().any(|(join, _)| *join == option)
}

fn is_leave(option: SocketOption) -> bool {
    JOINS.iter().any(|(_, leave)| *leave == option)
}

impl Udp {
    /// Follows the kernel's socket, for which this option was set to `value`.
    ///
    /// # Errors
    /// `ENODEV` for an interface that is not a taken device; `ENOBUFS` beyond 20 groups.
    pub(crate) fn change_groups(&self, option: SocketOption, value: &[u8]) -> Result<(), Errno> {
        if LOOPS.contains(&option) {
            // Of one byte, or of an int.
            let is_on = value.iter().take(4).any(|byte| *byte != 0);
            match option.level {
                libc::IPPROTO_IPV6 => self.udp.set_multicast_loop_v6(is_on),
                _ => self.udp.set_multicast_loop_v4(is_on),
            }
            return Ok(());
        }
        if names_interface(option) {
            let place = place_of(option, value).ok_or(Errno::INVAL)?;
            self.send_to_groups_by(option, device_at(place)?);
            if option.level == libc::IPPROTO_IP {
                self.udp.set_multicast_source_v4(address_of(value));
            }
            return Ok(());
        }
        let group = group_of(option, value).ok_or(Errno::INVAL)?;
        match self.follow_memberships(group)? {
            false if is_join(option) => Err(Errno::NODEV),
            _ => Ok(()),
        }
    }

    /// Sets the device that datagrams to groups of the option's family leave by.
    fn send_to_groups_by(&self, option: SocketOption, device: Option<DeviceIndex>) {
        match option.level {
            libc::IPPROTO_IPV6 => self.udp.set_multicast_device_v6(device),
            _ => self.udp.set_multicast_device_v4(device),
        }
    }

    /// Joins or leaves a group on each taken device, as the kernel's socket has. True if something has changed.
    fn follow_memberships(&self, group: IpAddr) -> Result<bool, Errno> {
        let mut is_changed = false;
        for &index in interfaces() {
            let Some(device) = device_of(index) else { continue };
            let changed = match is_member(self.kernel(), index, group) {
                true => self.udp.join_multicast_on(group, device),
                false => self.udp.leave_multicast_on(group, device),
            };
            match changed.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)) {
                Ok(()) => is_changed = true,
                Err(Errno::ADDRINUSE | Errno::ADDRNOTAVAIL) => {} // as it was
                Err(error) => return Err(error),
            }
        }
        Ok(is_changed)
    }

    /// Adopts the groups that the kernel's socket joined before it was bound, and the interface that it sends to groups by.
    pub(super) fn adopt_groups(&self) {
        for group in self.joined_before() {
            if let Err(error) = self.follow_memberships(group) {
                report!(
                    "forebay: the socket of {} is not in group {group}, which it joined before bind: {error}; let the \
                     program join it after bind",
                    self.local()
                );
            }
        }
        for option in INTERFACES {
            let place =
                abi::option_bytes(self.kernel(), option).and_then(|value| place_of(option, &value));
            if let Some(Ok(device @ Some(_))) = place.map(device_at) {
                self.send_to_groups_by(option, device);
            }
        }
        if self.v6_only || !IS_INTERFACE_CHOSEN.load(Ordering::Relaxed) {
            return;
        }
        let Some(source) = chosen_source(self.kernel(), self.is_ipv6) else { return };
        if let Ok(device @ Some(_)) = device_at(Place::Address(source)) {
            self.udp.set_multicast_device_v4(device);
        }
        self.udp.set_multicast_source_v4(Some(source));
    }

    /// Groups of the kernel's socket on the taken devices. The kernel lists those of all sockets.
    fn joined_before(&self) -> Vec<IpAddr> {
        let listed = |path, read: fn(&str) -> Vec<(u32, IpAddr)>| {
            fs::read_to_string(path).map(|text| read(&text)).unwrap_or_default()
        };
        let mut all = listed("/proc/thread-self/net/igmp", groups_of_v4);
        if self.is_ipv6 {
            all.extend(listed("/proc/thread-self/net/igmp6", groups_of_v6));
        }
        all.retain(|(index, group)| {
            device_of(*index).is_some() && is_member(self.kernel(), *index, *group)
        });
        all.into_iter().map(|(_, group)| group).collect()
    }
}

/// Source address of what a socket of the kernel that is not bound sends to groups of IPv4, if `IP_MULTICAST_IF` has chosen it or its
/// interface, whose index the kernel does not tell.
fn chosen_source(kernel: BorrowedFd<'_>, is_ipv6: bool) -> Option<Ipv4Addr> {
    let chosen = of_group(kernel, is_ipv6)?;
    let other = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    let by_route = of_group(other.as_fd(), false);
    (Some(chosen) != by_route).then_some(chosen)
}

/// Source address that the kernel has for the group of all systems, from a socket without a peer.
fn of_group(socket: BorrowedFd<'_>, is_ipv6: bool) -> Option<Ipv4Addr> {
    let group = SocketAddr::from((ALL_SYSTEMS, DISCARD_PORT));
    rustix::net::connect(socket, &shown(group, is_ipv6)).ok()?;
    let local = getsockname(socket).ok().and_then(|local| SocketAddr::try_from(local).ok());
    let _ = rustix::net::connect_unspec(socket); // does not fail
    match local?.ip().to_canonical() {
        IpAddr::V4(source) => Some(source),
        IpAddr::V6(_) => None,
    }
}

/// Device at an interface; `None` for any.
fn device_at(place: Place) -> Result<Option<DeviceIndex>, Errno> {
    let device = match place {
        Place::Any => return Ok(None),
        Place::Index(index) => device_of(index),
        Place::Address(address) => {
            let has = |index: &&u32| {
                let all = addresses(InterfaceIndex(**index)).unwrap_or_default();
                all.iter().any(|(ip, _)| *ip == IpAddr::V4(address))
            };
            interfaces().iter().find(has).and_then(|index| device_of(*index))
        }
    };
    device.map(Some).ok_or(Errno::NODEV)
}

fn is_member(socket: BorrowedFd<'_>, index: u32, group: IpAddr) -> bool {
    let level = if group.is_ipv4() { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 };
    abi::is_in_group(socket, level, index, group)
}

/// Groups of /proc/net/igmp: a line of an interface begins with its index, those of its groups with a blank.
fn groups_of_v4(text: &str) -> Vec<(u32, IpAddr)> {
    let mut index = None;
    let group = |line: &str| {
        let word = line.split_whitespace().next()?;
        if !line.starts_with(char::is_whitespace) {
            index = word.parse().ok();
            return None;
        }
        let group = u32::from_str_radix(word, 16).ok()?;
        Some((index?, Ipv4Addr::from(group.to_ne_bytes()).into()))
    };
    text.lines().filter_map(group).collect()
}

/// Groups of /proc/net/igmp6: the index of the interface, its name, the group.
fn groups_of_v6(text: &str) -> Vec<(u32, IpAddr)> {
    let group = |line: &str| {
        let mut words = line.split_whitespace();
        let index = words.next()?.parse().ok()?;
        let group = u128::from_str_radix(words.nth(1)?, 16).ok()?;
        Some((index, Ipv6Addr::from_bits(group).into()))
    };
    text.lines().filter_map(group).collect()
}

/// Group that the value of an option names, as the kernel has read it.
fn group_of(option: SocketOption, value: &[u8]) -> Option<IpAddr> {
    match (option.level, option.name) {
        (_, MCAST_JOIN_GROUP | MCAST_LEAVE_GROUP) => group_at(value.get(GROUP_AT..)?),
        (libc::IPPROTO_IPV6, _) => Some(Ipv6Addr::from(bytes_at::<16>(value, 0)?).into()),
        _ => Some(Ipv4Addr::from(bytes_at(value, 0)?).into()),
    }
}

/// Interface that the value of an option names: `struct in_addr`, `ip_mreq` or `ip_mreqn`, or an index for IPv6.
fn place_of(option: SocketOption, value: &[u8]) -> Option<Place> {
    match (option.level, value.len()) {
        (libc::IPPROTO_IPV6, _) => place_of_index(value, 0),
        (_, 0..8) => place_of_v4(value),
        _ => place_of_v4(value.get(4..)?),
    }
}

/// Address in the value of `IP_MULTICAST_IF`: `struct in_addr`, or behind the group in the others.
fn address_of(value: &[u8]) -> Option<Ipv4Addr> {
    let at = if value.len() < 8 { 0 } else { 4 };
    bytes_at(value, at).map(Ipv4Addr::from).filter(|address| !address.is_unspecified())
}

/// Address of an interface, and its index if there is room for it (`struct ip_mreqn`, behind the group).
fn place_of_v4(value: &[u8]) -> Option<Place> {
    match (place_of_index(value, 4), Ipv4Addr::from(bytes_at(value, 0)?)) {
        (Some(Place::Index(index)), _) => Some(Place::Index(index)),
        (_, Ipv4Addr::UNSPECIFIED) => Some(Place::Any),
        (_, address) => Some(Place::Address(address)),
    }
}

fn place_of_index(value: &[u8], at: usize) -> Option<Place> {
    let index = u32::from_ne_bytes(bytes_at(value, at)?);
    Some(if index == 0 { Place::Any } else { Place::Index(index) })
}

/// Group in a socket address.
fn group_at(address: &[u8]) -> Option<IpAddr> {
    match i32::from(u16::from_ne_bytes(bytes_at(address, 0)?)) {
        libc::AF_INET => Some(Ipv4Addr::from(bytes_at(address, 4)?).into()),
        libc::AF_INET6 => Some(Ipv6Addr::from(bytes_at::<16>(address, 8)?).into()),
        _ => None,
    }
}

fn bytes_at<const N: usize>(value: &[u8], at: usize) -> Option<[u8; N]> {
    value.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);

    #[test]
    fn exe_3_group_requests_are_read() {
        let (group, own, index) = (GROUP.octets(), [10, 9, 0, 1], 7u32.to_ne_bytes());
        let group_of = |option, parts: &[&[u8]]| super::group_of(option, &parts.concat());
        assert_eq!(group_of(JOINS[0].0, &[&group, &own]), Some(GROUP.into()));
        assert_eq!(group_of(JOINS[0].1, &[&group, &own, &index]), Some(GROUP.into()));
        let family = 2u16.to_ne_bytes();
        let asked: [&[u8]; 6] = [&index, &[0; 4], &family, &[0; 2], &group, &[0; 120]];
        assert_eq!(group_of(JOINS[2].0, &asked), Some(GROUP.into()));
        assert_eq!(group_of(JOINS[0].0, &[&group[..3]]), None, "cut off");
        let place_of = |option, parts: &[&[u8]]| super::place_of(option, &parts.concat());
        let [of_v4, of_v6] = INTERFACES;
        assert_eq!(place_of(of_v4, &[&own]), Some(Place::Address(own.into())));
        assert_eq!(place_of(of_v4, &[&group, &own]), Some(Place::Address(own.into())));
        assert_eq!(place_of(of_v4, &[&group, &own, &[0; 4]]), Some(Place::Address(own.into())));
        assert_eq!(place_of(of_v4, &[&group, &own, &index]), Some(Place::Index(7)));
        assert_eq!(place_of(of_v4, &[&[0; 4]]), Some(Place::Any));
        assert_eq!(place_of(of_v6, &[&index]), Some(Place::Index(7)));
        assert_eq!(place_of(of_v6, &[]), None);
    }

    #[test]
    fn exe_3_kernels_groups_are_listed() {
        let text = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                    7\texa       :     2      V3\n\t\t\t\t030201EF     1 0:00000000\t\t0\n\
                    \t\t\t\t010000E0     1 0:00000000\t\t0\n";
        let all_systems = Ipv4Addr::new(224, 0, 0, 1);
        let expected = [(7, IpAddr::V4(GROUP)), (7, all_systems.into())];
        if cfg!(target_endian = "little") {
            assert_eq!(groups_of_v4(text), expected);
        }
        let text = "7    exa             ff020000000000000000000000000001     1 0000000C 0\n";
        assert_eq!(groups_of_v6(text), [(7, "ff02::1".parse().unwrap())]);
    }
}
