//! Multicast groups of a UDP socket: joined and left by options, which the kernel's socket checks first.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;

use forebay::net::message::DeviceIndex;
use forebay_sys::interface::InterfaceIndex;
use forebay_sys::neighbour::addresses;
use rustix::io::Errno;

use super::Udp;
use crate::abi;
use crate::option::SocketOption;
use crate::runtime::{device_of, interfaces};

/// Length of the longest value of these options: `struct group_req` of linux/in.h.
pub(crate) const VALUE_BYTES_MAX: usize = 136;

/// Offsets in `struct group_req`: a 32-bit index, then `struct sockaddr_storage`.
const GROUP_AT: usize = 8;

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

/// Change that an option makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Join(IpAddr, Place),
    Leave(IpAddr, Place),
    /// Device that datagrams to groups leave by.
    SendBy(Place),
    /// Programs of this host hear what is sent to groups.
    Loop(bool),
}

/// Interface, as an option names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Any,
    Index(u32),
    Address(Ipv4Addr),
}

/// True for an option about groups.
pub(crate) fn is_about_groups(option: SocketOption) -> bool {
    let of_sending = [
        SocketOption::of_ipv4(libc::IP_MULTICAST_IF),
        SocketOption::of_ipv6(libc::IPV6_MULTICAST_IF),
        SocketOption::of_ipv4(libc::IP_MULTICAST_LOOP),
        SocketOption::of_ipv6(libc::IPV6_MULTICAST_LOOP),
    ];
    JOINS.iter().any(|(join, leave)| [*join, *leave].contains(&option))
        || of_sending.contains(&option)
}

/// Option that takes back what this one does.
pub(crate) fn opposite(option: SocketOption) -> Option<SocketOption> {
    JOINS.iter().find(|(join, _)| *join == option).map(|(_, leave)| *leave)
}

impl Udp {
    /// Follows the kernel's socket, for which this option was set to `value`.
    ///
    /// # Errors
    /// `ENODEV` for an interface that is not a taken device; `ENOBUFS` beyond 20 groups.
    pub(crate) fn change_groups(&self, option: SocketOption, value: &[u8]) -> Result<(), Errno> {
        let Some(change) = Change::of(option, value) else { return Ok(()) };
        let changed = match change {
            Change::Join(group, place) => match device_at(place)? {
                Some(device) => self.udp.join_multicast_on(group, device),
                None => self.udp.join_multicast(group),
            },
            Change::Leave(group, place) => match device_at(place)? {
                Some(device) => self.udp.leave_multicast_on(group, device),
                None => self.udp.leave_multicast(group),
            },
            Change::SendBy(place) => {
                self.udp.set_multicast_device(device_at(place)?);
                return Ok(());
            }
            Change::Loop(is_on) => {
                self.udp.set_multicast_loop(is_on);
                return Ok(());
            }
        };
        match changed.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)) {
            // Joined or left on all devices before: the kernel's socket knows better.
            Err(Errno::ADDRINUSE | Errno::ADDRNOTAVAIL) => Ok(()),
            changed => changed,
        }
    }

    /// Joins the groups that the kernel's socket joined before it was bound.
    pub(super) fn adopt_groups(&self) {
        for (index, group) in self.joined_before() {
            let joined = device_of(index).map(|device| self.udp.join_multicast_on(group, device));
            if let Some(Err(error)) = joined {
                report!(
                    "forebay: the socket of {} is not in group {group}, which it joined before bind: {error}; let the \
                     program join it after bind",
                    self.local()
                );
            }
        }
    }

    /// Groups of the kernel's socket on the taken devices, with their interfaces. The kernel lists those of all sockets.
    fn joined_before(&self) -> Vec<(u32, IpAddr)> {
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
        all
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
    let (level, address) = match group {
        IpAddr::V4(_) => (libc::IPPROTO_IP, group),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, group),
    };
    abi::is_in_group(socket, level, index, address)
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

impl Change {
    /// Change that the value of an option, as the kernel has read it, asks for. `None` of one without effect here.
    fn of(option: SocketOption, value: &[u8]) -> Option<Self> {
        let joins = JOINS.iter().any(|(join, _)| *join == option);
        let (group, place) = match (option.level, option.name) {
            (libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP | libc::IP_DROP_MEMBERSHIP) => {
                (Ipv4Addr::from(bytes_at(value, 0)?).into(), place_of_v4(value.get(4..)?)?)
            }
            (libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP | libc::IPV6_DROP_MEMBERSHIP) => {
                (Ipv6Addr::from(bytes_at::<16>(value, 0)?).into(), place_of_index(value, 16)?)
            }
            (_, MCAST_JOIN_GROUP | MCAST_LEAVE_GROUP) => {
                (group_at(value.get(GROUP_AT..)?)?, place_of_index(value, 0)?)
            }
            (libc::IPPROTO_IP, libc::IP_MULTICAST_IF) => {
                return Some(Self::SendBy(match value.len() {
                    0..8 => place_of_v4(value)?,
                    _ => place_of_v4(value.get(4..)?)?,
                }));
            }
            (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF) => {
                return Some(Self::SendBy(place_of_index(value, 0)?));
            }
            // Of one byte, or of an int.
            _ => return Some(Self::Loop(value.iter().take(4).any(|byte| *byte != 0))),
        };
        Some(if joins { Self::Join(group, place) } else { Self::Leave(group, place) })
    }
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

    fn change(option: SocketOption, parts: &[&[u8]]) -> Option<Change> {
        Change::of(option, &parts.concat())
    }

    #[test]
    fn exe_3_group_requests_are_read() {
        let (join, leave) = JOINS[0];
        let (group, own, index) = (GROUP.octets(), [10, 9, 0, 1], 7u32.to_ne_bytes());
        let at = Place::Address(own.into());
        assert_eq!(change(join, &[&group, &own]), Some(Change::Join(GROUP.into(), at)));
        assert_eq!(
            change(leave, &[&group, &[0; 4]]),
            Some(Change::Leave(GROUP.into(), Place::Any))
        );
        let by_index = change(join, &[&group, &own, &index]);
        assert_eq!(by_index, Some(Change::Join(GROUP.into(), Place::Index(7))));
        let by_address = change(join, &[&group, &own, &[0; 4]]);
        assert_eq!(by_address, Some(Change::Join(GROUP.into(), at)));
        let family = 2u16.to_ne_bytes();
        let asked: [&[u8]; 6] = [&index, &[0; 4], &family, &[0; 2], &group, &[0; 120]];
        assert_eq!(change(JOINS[2].0, &asked), Some(Change::Join(GROUP.into(), Place::Index(7))));
        assert_eq!(change(join, &[&group]), None, "cut off");
        let interface = SocketOption::of_ipv4(libc::IP_MULTICAST_IF);
        assert_eq!(change(interface, &[&own]), Some(Change::SendBy(at)));
        assert_eq!(
            change(interface, &[&group, &own, &index]),
            Some(Change::SendBy(Place::Index(7)))
        );
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
