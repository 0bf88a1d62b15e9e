//! Notifications of the kernel that links, addresses or routes have changed. They concern the network namespace of the
//! thread that opens the socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType};

use super::hidden::Hidden;
use super::interface::InterfaceIndex;

/// Groups of notifications (linux/rtnetlink.h): `RTMGRP_LINK`, `RTMGRP_IPV4_IFADDR`, `RTMGRP_IPV4_ROUTE`,
/// `RTMGRP_IPV6_IFADDR`, `RTMGRP_IPV6_ROUTE`.
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x100 | 0x400;

/// Notifications taken at a time: of a route for each of many destinations, the rest waits.
const TAKEN_MAX: usize = 16;

/// Beginning of a notification that tells what it is about: the header, and the place of the interface or prefix length.
const TOLD_BYTES: usize = 24;

/// Types of notifications (linux/rtnetlink.h).
const LINKS: [u16; 2] = [16, 17];
const ADDRESSES: [u16; 2] = [20, 21];
const ROUTES: [u16; 2] = [24, 25];

/// Longest prefixes of routes that count as leading beyond a network, of IPv4 and of IPv6.
const BEYOND_BITS: u8 = 8;
const BEYOND_BITS_V6: u8 = 32;

/// Result of a look for notifications.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ChangesSeen {
    /// True if addresses, the links of the given interfaces, or routes that lead beyond a network have changed, or may
    /// have, as notifications were lost.
    pub has_changed: bool,
    /// True if more notifications wait.
    pub has_more: bool,
}

/// Socket that the kernel notifies of changes.
#[derive(Debug)]
pub struct NetworkChanges {
    socket: Hidden,
    /// True from a loss on until none wait: the kernel tells of the first loss only, and adds none meanwhile
    /// (`netlink_overrun`).
    is_losing: AtomicBool,
}

impl NetworkChanges {
    /// Opens the socket: changes from now on are notified.
    ///
    /// # Errors
    /// If the process has no descriptor or memory left.
    pub fn open() -> io::Result<Self> {
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        let socket = Hidden::new(net::socket_with(family, SocketType::RAW, flags, None)?)?;
        net::bind(&socket, &SocketAddrNetlink::new(0, GROUPS))?;
        Ok(Self { socket, is_losing: AtomicBool::new(false) })
    }

    /// Takes notifications that wait, a limited number, without waiting for any.
    ///
    /// # Errors
    /// If the descriptor is no longer that of the socket.
    pub fn look(&self, at: &[InterfaceIndex]) -> io::Result<ChangesSeen> {
        let mut seen = ChangesSeen { has_changed: false, has_more: true };
        for _ in 0..TAKEN_MAX {
            let mut told = [0; TOLD_BYTES];
            // The rest of each is cut off.
            match net::recv(&self.socket, &mut told[..], RecvFlags::DONTWAIT) {
                Ok(_) => seen.has_changed |= is_about(&told, at),
                Err(Errno::NOBUFS) => {
                    seen.has_changed = true;
                    self.is_losing.store(true, Ordering::Relaxed);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    seen.has_changed |= self.is_losing.swap(false, Ordering::Relaxed);
                    seen.has_more = false;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(seen)
    }

    /// Descriptor that is readable while notifications wait.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// True if a notification is about one of these interfaces, about an address, or about a route beyond a network.
fn is_about(told: &[u8; TOLD_BYTES], interfaces: &[InterfaceIndex]) -> bool {
    let &[_, _, _, _, t0, t1, _, _, _, _, _, _, _, _, _, _, family, bits, _, _, i0, i1, i2, i3] =
        told;
    let kind = u16::from_ne_bytes([t0, t1]);
    if LINKS.contains(&kind) {
        return interfaces.contains(&InterfaceIndex(u32::from_ne_bytes([i0, i1, i2, i3])));
    }
    let is_ipv6 = u16::from(family) == AddressFamily::INET6.as_raw();
    let most = if is_ipv6 { BEYOND_BITS_V6 } else { BEYOND_BITS };
    ADDRESSES.contains(&kind) || ROUTES.contains(&kind) && bits <= most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(kind: u16, family: u8, bits: u8, index: u32) -> [u8; TOLD_BYTES] {
        let mut told = [0; TOLD_BYTES];
        told[4..6].copy_from_slice(&kind.to_ne_bytes());
        told[16..18].copy_from_slice(&[family, bits]);
        told[20..].copy_from_slice(&index.to_ne_bytes());
        told
    }

    #[test]
    fn changes_of_others_count_for_nothing() {
        let ours = [InterfaceIndex(3), InterfaceIndex(7)];
        for (kind, family, bits, index, expected) in [
            (16, 0, 0, 7, true),
            (17, 0, 0, 3, true),
            (16, 0, 0, 4, false),
            (20, 2, 24, 4, true),
            (21, 10, 64, 3, true),
            (24, 2, 0, 0, true),
            (25, 2, 1, 0, true),
            (24, 2, 24, 3, false),
            (24, 10, 32, 0, true),
            (25, 10, 64, 0, false),
            (28, 2, 0, 3, false),
        ] {
            let told = told(kind, family, bits, index);
            assert_eq!(is_about(&told, &ours), expected, "{kind} {family} {bits} {index}");
        }
    }
}
