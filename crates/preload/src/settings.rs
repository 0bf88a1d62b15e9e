//! Options of a socket. The kernel's socket stays their store: each change is made there first, so that what it
//! refuses is refused, and all are read again from there.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use forebay::net::UdpSocket;
use rustix::fs::{OFlags, fcntl_getfl};

use crate::abi;

/// Level and number of an option.
type OptionName = (i32, i32);

/// Options of `setsockopt` that hold for sockets of ours, or that change nothing of theirs.
const SUPPORTED: [OptionName; 35] = [
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE),
    // What is sent waits in the device's queue alone.
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE),
    // No effect after bind, as in the kernel.
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL),
    (libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE),
    (libc::SOL_SOCKET, libc::SO_BROADCAST),
    (libc::SOL_UDP, libc::UDP_GRO),
    (libc::SOL_UDP, libc::UDP_SEGMENT),
    (libc::IPPROTO_IP, libc::IP_PKTINFO),
    (libc::IPPROTO_IP, libc::IP_RECVTTL),
    (libc::IPPROTO_IP, libc::IP_RECVTOS),
    (libc::IPPROTO_IP, libc::IP_TTL),
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
    (libc::IPPROTO_IP, libc::IP_FREEBIND),
    (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
    (libc::IPPROTO_IPV6, libc::IPV6_FREEBIND),
];

/// True if `setsockopt` of this option on a socket of ours tells no lie.
pub(crate) fn is_supported(level: i32, number: i32) -> bool {
    SUPPORTED.contains(&(level, number))
}

/// Values of a socket's options.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) is_nonblocking: bool,
    pub(crate) gro: bool,
    pub(crate) gso_size: u16,
    pub(crate) v4_pktinfo: bool,
    pub(crate) v4_ttl: bool,
    pub(crate) v4_tos: bool,
    pub(crate) v6_pktinfo: bool,
    pub(crate) v6_hop_limit: bool,
    pub(crate) v6_traffic_class: bool,
    pub(crate) write_timeout: Option<Duration>,
}

impl Settings {
    /// Reads the options of the kernel's socket, and sets those that the library keeps.
    pub(crate) fn adopt(kernel: BorrowedFd<'_>, udp: &UdpSocket, is_ipv6: bool) -> Self {
        let value = |option| abi::option_value(kernel, option).unwrap_or_default();
        let is_on = |option| value(option) != 0;
        let v6 = |number| is_ipv6 && is_on((libc::IPPROTO_IPV6, number));
        let (ttl, class, discover) = if is_ipv6 {
            let level = libc::IPPROTO_IPV6;
            let discover = (level, libc::IPV6_MTU_DISCOVER);
            ((level, libc::IPV6_UNICAST_HOPS), (level, libc::IPV6_TCLASS), discover)
        } else {
            let level = libc::IPPROTO_IP;
            ((level, libc::IP_TTL), (level, libc::IP_TOS), (level, libc::IP_MTU_DISCOVER))
        };
        if let Ok(ttl) = u8::try_from(value(ttl)) {
            let _ = udp.set_ttl(ttl); // 0 only of IPv6, where it is valid
        }
        udp.set_traffic_class(u8::try_from(value(class)).unwrap_or_default());
        // Of both families the same numbers.
        let discover = value(discover);
        udp.set_fragment(discover != libc::IP_PMTUDISC_DO && discover != libc::IP_PMTUDISC_PROBE);
        let gro = is_on((libc::SOL_UDP, libc::UDP_GRO));
        udp.set_gro(gro);
        let flags = fcntl_getfl(kernel).unwrap_or(OFlags::empty());
        Self {
            is_nonblocking: flags.contains(OFlags::NONBLOCK),
            gro,
            gso_size: u16::try_from(value((libc::SOL_UDP, libc::UDP_SEGMENT))).unwrap_or_default(),
            v4_pktinfo: is_on((libc::IPPROTO_IP, libc::IP_PKTINFO)),
            v4_ttl: is_on((libc::IPPROTO_IP, libc::IP_RECVTTL)),
            v4_tos: is_on((libc::IPPROTO_IP, libc::IP_RECVTOS)),
            v6_pktinfo: v6(libc::IPV6_RECVPKTINFO),
            v6_hop_limit: v6(libc::IPV6_RECVHOPLIMIT),
            v6_traffic_class: v6(libc::IPV6_RECVTCLASS),
            write_timeout: timeout(kernel, libc::SO_SNDTIMEO),
        }
    }
}

/// Time-out that the program set.
pub(crate) fn timeout(kernel: BorrowedFd<'_>, number: i32) -> Option<Duration> {
    use rustix::net::sockopt::{Timeout, socket_timeout};
    let which = if number == libc::SO_RCVTIMEO { Timeout::Recv } else { Timeout::Send };
    socket_timeout(kernel.as_fd(), which).ok().flatten()
}

/// Options that sockets of ours lack, and their names, for those set before the socket was bound.
const LACKING: [(OptionName, &str); 10] = [
    ((libc::SOL_SOCKET, libc::SO_TIMESTAMP), "SO_TIMESTAMP"),
    ((libc::SOL_SOCKET, libc::SO_TIMESTAMPNS), "SO_TIMESTAMPNS"),
    ((libc::SOL_SOCKET, libc::SO_RXQ_OVFL), "SO_RXQ_OVFL"),
    ((libc::SOL_SOCKET, libc::SO_MARK), "SO_MARK"),
    ((libc::IPPROTO_IP, libc::IP_RECVERR), "IP_RECVERR"),
    ((libc::IPPROTO_IP, libc::IP_TRANSPARENT), "IP_TRANSPARENT"),
    ((libc::IPPROTO_IP, libc::IP_RECVORIGDSTADDR), "IP_RECVORIGDSTADDR"),
    ((libc::IPPROTO_IP, libc::IP_RECVOPTS), "IP_RECVOPTS"),
    ((libc::IPPROTO_IPV6, libc::IPV6_RECVERR), "IPV6_RECVERR"),
    ((libc::IPPROTO_IPV6, libc::IPV6_RECVRTHDR), "IPV6_RECVRTHDR"),
];

/// Names of the options that are set on the kernel's socket, and that ours will not have.
pub(crate) fn lacking(kernel: BorrowedFd<'_>) -> impl Iterator<Item = &'static str> {
    let is_on = move |option| abi::option_value(kernel, option).is_ok_and(|value| value != 0);
    LACKING.iter().filter(move |(option, _)| is_on(*option)).map(|(_, name)| *name)
}
