//! Options that sockets of ours lack. Those that the program has set before they were taken are named on standard error.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forebay_sys::drop_filter::is_filtered;
use forebay_sys::hidden::Hidden;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_protocol, socket_type};
use rustix::net::{SocketFlags, socket_with};

use crate::abi;
use crate::option::SocketOption;
use crate::udp_options::{SO_TIMESTAMP_NEW, SO_TIMESTAMPING_NEW, SO_TIMESTAMPNS_NEW};

/// Options of all sockets, and their names. A kind of sockets may have some of them.
const OF_SOCKETS: [(i32, &str); 23] = [
    (libc::SO_MARK, "SO_MARK"),
    (libc::SO_RCVLOWAT, "SO_RCVLOWAT"),
    (libc::SO_PEEK_OFF, "SO_PEEK_OFF"),
    (libc::SO_NO_CHECK, "SO_NO_CHECK"),
    (libc::SO_WIFI_STATUS, "SO_WIFI_STATUS"),
    (libc::SO_NOFCS, "SO_NOFCS"),
    (libc::SO_LOCK_FILTER, "SO_LOCK_FILTER"),
    (libc::SO_SELECT_ERR_QUEUE, "SO_SELECT_ERR_QUEUE"),
    (libc::SO_MAX_PACING_RATE, "SO_MAX_PACING_RATE"),
    (libc::SO_ZEROCOPY, "SO_ZEROCOPY"),
    (libc::SO_TXTIME, "SO_TXTIME"),
    (libc::SO_TIMESTAMP, "SO_TIMESTAMP"),
    (SO_TIMESTAMP_NEW, "SO_TIMESTAMP"),
    (libc::SO_TIMESTAMPNS, "SO_TIMESTAMPNS"),
    (SO_TIMESTAMPNS_NEW, "SO_TIMESTAMPNS"),
    (libc::SO_TIMESTAMPING, "SO_TIMESTAMPING"),
    (SO_TIMESTAMPING_NEW, "SO_TIMESTAMPING"),
    // Not in the crate libc (asm-generic/socket.h).
    (73, "SO_RESERVE_MEM"),
    (74, "SO_TXREHASH"),
    (75, "SO_RCVMARK"),
    (82, "SO_RCVPRIORITY"),
    (libc::SO_PASSCRED, "SO_PASSCRED"),
    (libc::SO_PASSSEC, "SO_PASSSEC"),
];

/// Options of IPv4.
const OF_IPV4: [(i32, &str); 12] = [
    (libc::IP_TRANSPARENT, "IP_TRANSPARENT"),
    (libc::IP_OPTIONS, "IP_OPTIONS"),
    (libc::IP_RECVOPTS, "IP_RECVOPTS"),
    (libc::IP_RETOPTS, "IP_RETOPTS"),
    (libc::IP_RECVERR, "IP_RECVERR"),
    (libc::IP_PASSSEC, "IP_PASSSEC"),
    (libc::IP_CHECKSUM, "IP_CHECKSUM"),
    (libc::IP_RECVFRAGSIZE, "IP_RECVFRAGSIZE"),
    (libc::IP_MULTICAST_ALL, "IP_MULTICAST_ALL"),
    (libc::IP_UNICAST_IF, "IP_UNICAST_IF"),
    // Not in the crate libc (linux/in.h).
    (26, "IP_RECVERR_RFC4884"),
    (51, "IP_LOCAL_PORT_RANGE"),
];

/// Options of IPv6.
const OF_IPV6: [(i32, &str); 23] = [
    (libc::IPV6_RECVRTHDR, "IPV6_RECVRTHDR"),
    (libc::IPV6_RECVHOPOPTS, "IPV6_RECVHOPOPTS"),
    (libc::IPV6_RECVDSTOPTS, "IPV6_RECVDSTOPTS"),
    (libc::IPV6_RECVPATHMTU, "IPV6_RECVPATHMTU"),
    (libc::IPV6_RECVFRAGSIZE, "IPV6_RECVFRAGSIZE"),
    (libc::IPV6_RECVERR, "IPV6_RECVERR"),
    (libc::IPV6_HOPOPTS, "IPV6_HOPOPTS"),
    (libc::IPV6_DSTOPTS, "IPV6_DSTOPTS"),
    (libc::IPV6_RTHDR, "IPV6_RTHDR"),
    (libc::IPV6_RTHDRDSTOPTS, "IPV6_RTHDRDSTOPTS"),
    (libc::IPV6_FLOWINFO, "IPV6_FLOWINFO"),
    (libc::IPV6_FLOWINFO_SEND, "IPV6_FLOWINFO_SEND"),
    (libc::IPV6_AUTOFLOWLABEL, "IPV6_AUTOFLOWLABEL"),
    (libc::IPV6_ADDR_PREFERENCES, "IPV6_ADDR_PREFERENCES"),
    (libc::IPV6_TRANSPARENT, "IPV6_TRANSPARENT"),
    (libc::IPV6_UNICAST_IF, "IPV6_UNICAST_IF"),
    (libc::IPV6_MULTICAST_ALL, "IPV6_MULTICAST_ALL"),
    // Not in the crate libc (linux/in6.h).
    (2, "IPV6_2292PKTINFO"),
    (3, "IPV6_2292HOPOPTS"),
    (4, "IPV6_2292DSTOPTS"),
    (5, "IPV6_2292RTHDR"),
    (8, "IPV6_2292HOPLIMIT"),
    (31, "IPV6_RECVERR_RFC4884"),
];

/// Options of TCP.
const OF_TCP: [(i32, &str); 7] = [
    (libc::TCP_THIN_DUPACK, "TCP_THIN_DUPACK"),
    (libc::TCP_SAVE_SYN, "TCP_SAVE_SYN"),
    (libc::TCP_INQ, "TCP_INQ"),
    (libc::TCP_REPAIR, "TCP_REPAIR"),
    // Not in the crate libc (linux/tcp.h).
    (37, "TCP_TX_DELAY"),
    (45, "TCP_RTO_MIN_US"),
    (46, "TCP_DELACK_MAX_US"),
];

/// Options of UDP.
const OF_UDP: [(i32, &str); 3] = [
    (libc::UDP_ENCAP, "UDP_ENCAP"),
    (libc::UDP_NO_CHECK6_TX, "UDP_NO_CHECK6_TX"),
    (libc::UDP_NO_CHECK6_RX, "UDP_NO_CHECK6_RX"),
];

/// Names the options that are set on a socket of the kernel, and that ours at an address will not have. `has` is true for
/// those that it has.
pub(crate) fn report(
    kernel: BorrowedFd<'_>,
    local: SocketAddr,
    has: impl Fn(SocketOption) -> bool,
) {
    for option in lacking(kernel, has) {
        report!(
            "forebay: {option} has no effect on the socket of {local}: if the program needs it, leave that port out of \
             --take"
        );
    }
}

/// Names of options that differ from those of a new socket. None if no socket can be made.
fn lacking(kernel: BorrowedFd<'_>, has: impl Fn(SocketOption) -> bool) -> Vec<&'static str> {
    let new = new_like(kernel);
    let is_set = |option: &(SocketOption, &str)| {
        !has(option.0)
            && new.as_ref().is_ok_and(|new| abi::option_differs(kernel, new.as_fd(), option.0))
    };
    let mut names: Vec<_> = options().filter(is_set).map(|(_, name)| name).collect();
    names.dedup();
    names.extend(is_filtered(kernel).then_some("SO_ATTACH_FILTER"));
    names
}

fn options() -> impl Iterator<Item = (SocketOption, &'static str)> {
    let at =
        |level| move |&(name, text): &(i32, &'static str)| (SocketOption { level, name }, text);
    OF_SOCKETS
        .iter()
        .map(at(libc::SOL_SOCKET))
        .chain(OF_IPV4.iter().map(at(libc::IPPROTO_IP)))
        .chain(OF_IPV6.iter().map(at(libc::IPPROTO_IPV6)))
        .chain(OF_TCP.iter().map(at(libc::IPPROTO_TCP)))
        .chain(OF_UDP.iter().map(at(libc::SOL_UDP)))
}

/// New socket of the kernel, of the same type.
pub(crate) fn new_like(kernel: BorrowedFd<'_>) -> Result<Hidden<OwnedFd>, Errno> {
    let (family, kind) = (socket_domain(kernel)?, socket_type(kernel)?);
    Hidden::new(socket_with(family, kind, SocketFlags::CLOEXEC, socket_protocol(kernel)?)?)
}
