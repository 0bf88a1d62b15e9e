//! Options of a UDP socket. The kernel's socket keeps them: each change is made there first, so that the kernel can refuse
//! it, and then all are read from there.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use forebay::net::UdpSocket;
use rustix::fs::{OFlags, fcntl_getfl};

use crate::abi;
use crate::option::SocketOption;

/// Options with times of 64 bits on all machines (asm-generic/socket.h).
pub(crate) const SO_TIMESTAMP_NEW: i32 = 63;
pub(crate) const SO_TIMESTAMPNS_NEW: i32 = 64;
pub(crate) const SO_TIMESTAMPING_NEW: i32 = 65;

/// Option by which datagrams are sent together (linux/udp.h).
pub(crate) const UDP_CORK: i32 = 1;

/// Options that have the kernel put ICMP errors into the error queue of a socket, by family.
pub(crate) const RECVERR: [SocketOption; 2] =
    [SocketOption::of_ipv4(libc::IP_RECVERR), SocketOption::of_ipv6(libc::IPV6_RECVERR)];

/// Options that the kernel's socket at the same port has, too.
pub(crate) const OF_RESERVED: [SocketOption; 18] = [
    RECVERR[0],
    RECVERR[1],
    SocketOption::of_socket(libc::SO_BROADCAST),
    SocketOption::of_ipv4(libc::IP_MTU_DISCOVER),
    SocketOption::of_ipv6(libc::IPV6_MTU_DISCOVER),
    SocketOption::of_ipv6(libc::IPV6_DONTFRAG),
    // Of the control messages that come with an ICMP error.
    SocketOption::of_socket(libc::SO_TIMESTAMP),
    SocketOption::of_socket(libc::SO_TIMESTAMPNS),
    // In this order: without the unit, both are off, and with it the other answers, too (`__sock_set_timestamps`).
    SocketOption::of_socket(SO_TIMESTAMPNS_NEW),
    SocketOption::of_socket(SO_TIMESTAMP_NEW),
    SocketOption::of_ipv4(libc::IP_PKTINFO),
    SocketOption::of_ipv4(libc::IP_RECVTTL),
    SocketOption::of_ipv4(libc::IP_RECVTOS),
    SocketOption::of_ipv4(libc::IP_RECVORIGDSTADDR),
    SocketOption::of_ipv6(libc::IPV6_RECVPKTINFO),
    SocketOption::of_ipv6(libc::IPV6_RECVHOPLIMIT),
    SocketOption::of_ipv6(libc::IPV6_RECVTCLASS),
    SocketOption::of_ipv6(libc::IPV6_RECVORIGDSTADDR),
];

/// Options of `setsockopt` that hold for sockets of ours, or that change nothing of theirs.
const SUPPORTED: [SocketOption; 54] = [
    SocketOption::of_socket(libc::SO_RCVTIMEO),
    SocketOption::of_socket(libc::SO_SNDTIMEO),
    SocketOption::of_socket(libc::SO_RCVBUF),
    SocketOption::of_socket(libc::SO_RCVBUFFORCE),
    // What is sent waits in the device's queue alone.
    SocketOption::of_socket(libc::SO_SNDBUF),
    SocketOption::of_socket(libc::SO_SNDBUFFORCE),
    SocketOption::of_socket(libc::SO_REUSEADDR),
    // No effect after bind.
    SocketOption::of_socket(libc::SO_REUSEPORT),
    SocketOption::of_socket(libc::SO_INCOMING_CPU),
    SocketOption::of_socket(libc::SO_BUSY_POLL),
    SocketOption::of_socket(libc::SO_PREFER_BUSY_POLL),
    SocketOption::of_socket(libc::SO_BUSY_POLL_BUDGET),
    SocketOption::of_socket(libc::SO_PRIORITY),
    SocketOption::of_socket(libc::SO_DEBUG),
    SocketOption::of_socket(libc::SO_OOBINLINE),
    SocketOption::of_socket(libc::SO_KEEPALIVE),
    SocketOption::of_socket(libc::SO_LINGER),
    SocketOption::of_socket(libc::SO_DONTROUTE),
    SocketOption::of_socket(libc::SO_BROADCAST),
    SocketOption::of_socket(libc::SO_TIMESTAMP),
    SocketOption::of_socket(libc::SO_TIMESTAMPNS),
    SocketOption::of_socket(libc::SO_TIMESTAMPING),
    SocketOption::of_socket(SO_TIMESTAMP_NEW),
    SocketOption::of_socket(SO_TIMESTAMPNS_NEW),
    SocketOption::of_socket(SO_TIMESTAMPING_NEW),
    SocketOption::of_socket(libc::SO_RXQ_OVFL),
    SocketOption::of_udp(UDP_CORK),
    SocketOption::of_udp(libc::UDP_GRO),
    SocketOption::of_udp(libc::UDP_SEGMENT),
    SocketOption::of_ipv4(libc::IP_PKTINFO),
    SocketOption::of_ipv4(libc::IP_RECVTTL),
    SocketOption::of_ipv4(libc::IP_RECVTOS),
    SocketOption::of_ipv4(libc::IP_RECVORIGDSTADDR),
    SocketOption::of_ipv4(libc::IP_RECVERR),
    SocketOption::of_ipv4(libc::IP_TTL),
    SocketOption::of_ipv4(libc::IP_TOS),
    SocketOption::of_ipv4(libc::IP_MULTICAST_TTL),
    SocketOption::of_ipv4(libc::IP_MTU_DISCOVER),
    SocketOption::of_ipv4(libc::IP_FREEBIND),
    SocketOption::of_ipv4(libc::IP_BIND_ADDRESS_NO_PORT),
    SocketOption::of_ipv6(libc::IPV6_RECVPKTINFO),
    SocketOption::of_ipv6(libc::IPV6_RECVHOPLIMIT),
    SocketOption::of_ipv6(libc::IPV6_RECVTCLASS),
    SocketOption::of_ipv6(libc::IPV6_RECVORIGDSTADDR),
    SocketOption::of_ipv6(libc::IPV6_RECVERR),
    SocketOption::of_ipv6(libc::IPV6_UNICAST_HOPS),
    SocketOption::of_ipv6(libc::IPV6_TCLASS),
    SocketOption::of_ipv6(libc::IPV6_MULTICAST_HOPS),
    SocketOption::of_ipv6(libc::IPV6_MTU_DISCOVER),
    SocketOption::of_ipv6(libc::IPV6_V6ONLY),
    SocketOption::of_ipv6(libc::IPV6_FREEBIND),
    SocketOption::of_ipv6(libc::IPV6_DONTFRAG),
    // Of TCP.
    SocketOption::of_ipv4(libc::IP_MINTTL),
    SocketOption::of_ipv6(libc::IPV6_MINHOPCOUNT),
];

/// True if `setsockopt` of this option on a UDP socket of ours has the effect that it has on one of the kernel's.
pub(crate) fn has_effect(option: SocketOption) -> bool {
    SUPPORTED.contains(&option)
}

/// Forms in which the time of a datagram's arrival is told: the kinds of the control messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ArrivalTime {
    /// `SO_TIMESTAMP` or `SO_TIMESTAMPNS`.
    pub(crate) unit: Option<(i32, TimeUnit)>,
    /// `SO_TIMESTAMPING` with the times of software.
    pub(crate) structured: Option<i32>,
}

/// Unit of the time's second part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TimeUnit {
    Micros,
    Nanos,
}

impl ArrivalTime {
    fn adopt(value: impl Fn(SocketOption) -> i32) -> Self {
        let is_on = |kind| value(SocketOption::of_socket(kind)) != 0;
        let units = [
            (SO_TIMESTAMPNS_NEW, TimeUnit::Nanos),
            (libc::SO_TIMESTAMPNS, TimeUnit::Nanos),
            (SO_TIMESTAMP_NEW, TimeUnit::Micros),
            (libc::SO_TIMESTAMP, TimeUnit::Micros),
        ];
        let unit = units.into_iter().find(|(kind, _)| is_on(*kind));
        // The older option answers for the newer, too, but not the other way round.
        let kind =
            if is_on(SO_TIMESTAMPING_NEW) { SO_TIMESTAMPING_NEW } else { libc::SO_TIMESTAMPING };
        let flags = u32::try_from(value(SocketOption::of_socket(kind))).unwrap_or_default();
        let has = |flag| flags & flag != 0;
        let is_told = has(libc::SOF_TIMESTAMPING_SOFTWARE)
            && (has(libc::SOF_TIMESTAMPING_RX_SOFTWARE) || unit.is_some());
        Self { unit, structured: is_told.then_some(kind) }
    }
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
    pub(crate) v4_destination: bool,
    pub(crate) v6_destination: bool,
    /// TOS and TTL of datagrams that an IPv6 socket sends over IPv4.
    pub(crate) v4_marks: Option<(u8, u8)>,
    pub(crate) arrival_time: ArrivalTime,
    pub(crate) counts_dropped: bool,
    pub(crate) reuses_address: bool,
    pub(crate) write_timeout: Option<Duration>,
}

impl Settings {
    /// Reads the options of the kernel's socket, and sets those that the library keeps.
    pub(crate) fn adopt(kernel: BorrowedFd<'_>, udp: &UdpSocket, is_ipv6: bool) -> Self {
        let value = |option| abi::option_value(kernel, option).unwrap_or_default();
        let is_on = |option| value(option) != 0;
        let v6 = |number| is_ipv6 && is_on(SocketOption::of_ipv6(number));
        let [ttl, class] = if is_ipv6 {
            [libc::IPV6_UNICAST_HOPS, libc::IPV6_TCLASS].map(SocketOption::of_ipv6)
        } else {
            [libc::IP_TTL, libc::IP_TOS].map(SocketOption::of_ipv4)
        };
        if let Ok(ttl) = u8::try_from(value(ttl)) {
            let _ = udp.set_ttl(ttl); // 0 only of IPv6, where it is valid
        }
        if let Ok(ttl) = u8::try_from(value(SocketOption::of_ipv4(libc::IP_MULTICAST_TTL))) {
            let _ = udp.set_multicast_ttl_v4(ttl); // the kernel's socket has taken it
        }
        if let Ok(ttl) = u8::try_from(value(SocketOption::of_ipv6(libc::IPV6_MULTICAST_HOPS)))
            && is_ipv6
        {
            udp.set_multicast_ttl_v6(ttl);
        }
        udp.set_traffic_class(u8::try_from(value(class)).unwrap_or_default());
        let over_v4 = value(SocketOption::of_ipv4(libc::IP_MTU_DISCOVER));
        udp.set_fragment_v4(host_fragments(over_v4));
        udp.set_fragment_by_routers(routers_fragment(over_v4));
        udp.set_path_ignored_v4(ignores_path(over_v4));
        let over_v6 = value(SocketOption::of_ipv6(libc::IPV6_MTU_DISCOVER));
        udp.set_fragment_v6(host_fragments(over_v6) && !v6(libc::IPV6_DONTFRAG));
        udp.set_path_ignored_v6(ignores_path(over_v6));
        udp.set_broadcast(is_on(SocketOption::of_socket(libc::SO_BROADCAST)));
        let gro = is_on(SocketOption::of_udp(libc::UDP_GRO));
        udp.set_gro(gro);
        let flags = fcntl_getfl(kernel).unwrap_or(OFlags::empty());
        Self {
            is_nonblocking: flags.contains(OFlags::NONBLOCK),
            gro,
            gso_size: u16::try_from(value(SocketOption::of_udp(libc::UDP_SEGMENT)))
                .unwrap_or_default(),
            v4_pktinfo: is_on(SocketOption::of_ipv4(libc::IP_PKTINFO)),
            v4_ttl: is_on(SocketOption::of_ipv4(libc::IP_RECVTTL)),
            v4_tos: is_on(SocketOption::of_ipv4(libc::IP_RECVTOS)),
            v6_pktinfo: v6(libc::IPV6_RECVPKTINFO),
            v6_hop_limit: v6(libc::IPV6_RECVHOPLIMIT),
            v6_traffic_class: v6(libc::IPV6_RECVTCLASS),
            v4_destination: is_on(SocketOption::of_ipv4(libc::IP_RECVORIGDSTADDR)),
            v6_destination: v6(libc::IPV6_RECVORIGDSTADDR),
            v4_marks: is_ipv6.then(|| {
                let octet = |name| u8::try_from(value(SocketOption::of_ipv4(name))).unwrap_or(0);
                (octet(libc::IP_TOS), octet(libc::IP_TTL).max(1))
            }),
            arrival_time: ArrivalTime::adopt(value),
            counts_dropped: is_on(SocketOption::of_socket(libc::SO_RXQ_OVFL)),
            reuses_address: is_on(SocketOption::of_socket(libc::SO_REUSEADDR)),
            write_timeout: timeout(kernel, libc::SO_SNDTIMEO),
        }
    }
}

/// True for a value of `IP_MTU_DISCOVER` or `IPV6_MTU_DISCOVER` with which datagrams above the MTU leave in fragments
/// (`ip_sk_ignore_df`). Both families have the same values.
fn host_fragments(discover: i32) -> bool {
    matches!(discover, libc::IP_PMTUDISC_DONT | libc::IP_PMTUDISC_WANT | libc::IP_PMTUDISC_OMIT)
}

/// True for a value with which the MTU of the path does not matter (`ip_sk_accept_pmtu`).
fn ignores_path(discover: i32) -> bool {
    matches!(
        discover,
        libc::IP_PMTUDISC_PROBE | libc::IP_PMTUDISC_INTERFACE | libc::IP_PMTUDISC_OMIT
    )
}

/// True for a value with which routers may fragment a datagram of IPv4 (`ip_dont_fragment`).
fn routers_fragment(discover: i32) -> bool {
    matches!(
        discover,
        libc::IP_PMTUDISC_DONT | libc::IP_PMTUDISC_INTERFACE | libc::IP_PMTUDISC_OMIT
    )
}

impl Settings {
    /// True if the program asks for control messages with each datagram.
    pub(crate) fn asks_control(&self) -> bool {
        let of_v4 = self.v4_pktinfo || self.v4_ttl || self.v4_tos || self.v4_destination;
        let of_v6 = self.v6_pktinfo || self.v6_hop_limit || self.v6_traffic_class;
        let is_timed = self.arrival_time != ArrivalTime::default();
        of_v4 || of_v6 || self.v6_destination || self.gro || is_timed || self.counts_dropped
    }
}

/// Time-out that the program set.
pub(crate) fn timeout(kernel: BorrowedFd<'_>, number: i32) -> Option<Duration> {
    use rustix::net::sockopt::{Timeout, socket_timeout};
    let which = if number == libc::SO_RCVTIMEO { Timeout::Recv } else { Timeout::Send };
    socket_timeout(kernel.as_fd(), which).ok().flatten()
}
