//! Options of TCP sockets. The kernel's socket keeps them: each change is made there first, so that the kernel can refuse
//! it, and then to the connection.

use std::num::{NonZeroU8, NonZeroU32};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_stack::tcp::kernel_form::retransmissions_in;
use forebay_stack::tcp::{Algorithm, TcpOptions};
use forebay_sys::tcp_reserve::Reservation;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_linger, tcp_congestion};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};

use crate::abi;
use crate::option::SocketOption;

const SECOND_US: u64 = 1_000_000;

/// `SO_BUF_LOCK` and its bits: buffers whose size the program has set.
const SO_BUF_LOCK: i32 = 72;
pub(crate) const SNDBUF_LOCK: i32 = 1;
pub(crate) const RCVBUF_LOCK: i32 = 2;

/// Option of Linux 6.15 and later.
pub(crate) const TCP_RTO_MAX_MS: i32 = 44;

/// Largest segment of a socket that has no limit set (`TCP_MSS_DEFAULT`).
const MSS_DEFAULT: i32 = 536;

/// Options that connections inherit from their listener, and that sockets of ours have.
pub(crate) const INHERITED: [SocketOption; 26] = [
    SocketOption::of_socket(libc::SO_KEEPALIVE),
    SocketOption::of_socket(libc::SO_LINGER),
    SocketOption::of_socket(libc::SO_OOBINLINE),
    SocketOption::of_socket(libc::SO_RCVBUF),
    SocketOption::of_socket(libc::SO_SNDBUF),
    SocketOption::of_tcp(libc::TCP_NODELAY),
    SocketOption::of_tcp(libc::TCP_CORK),
    SocketOption::of_tcp(libc::TCP_KEEPIDLE),
    SocketOption::of_tcp(libc::TCP_KEEPINTVL),
    SocketOption::of_tcp(libc::TCP_KEEPCNT),
    SocketOption::of_tcp(libc::TCP_USER_TIMEOUT),
    SocketOption::of_tcp(TCP_RTO_MAX_MS),
    SocketOption::of_tcp(libc::TCP_THIN_LINEAR_TIMEOUTS),
    SocketOption::of_tcp(libc::TCP_LINGER2),
    SocketOption::of_tcp(libc::TCP_SYNCNT),
    SocketOption::of_tcp(libc::TCP_DEFER_ACCEPT),
    SocketOption::of_tcp(libc::TCP_MAXSEG),
    SocketOption::of_tcp(libc::TCP_WINDOW_CLAMP),
    SocketOption::of_tcp(libc::TCP_CONGESTION),
    SocketOption::of_tcp(libc::TCP_NOTSENT_LOWAT),
    SocketOption::of_ipv4(libc::IP_TTL),
    SocketOption::of_ipv6(libc::IPV6_UNICAST_HOPS),
    SocketOption::of_ipv4(libc::IP_TOS),
    SocketOption::of_ipv6(libc::IPV6_TCLASS),
    SocketOption::of_ipv4(libc::IP_MINTTL),
    SocketOption::of_ipv6(libc::IPV6_MINHOPCOUNT),
];

/// Options of packets of one family. A connection has those of its own.
const BY_FAMILY: [SocketOption; 6] = [
    SocketOption::of_ipv4(libc::IP_TOS),
    SocketOption::of_ipv6(libc::IPV6_TCLASS),
    SocketOption::of_ipv4(libc::IP_TTL),
    SocketOption::of_ipv6(libc::IPV6_UNICAST_HOPS),
    SocketOption::of_ipv4(libc::IP_MINTTL),
    SocketOption::of_ipv6(libc::IPV6_MINHOPCOUNT),
];

/// Packets that a socket sends and receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Packets {
    V4,
    V6,
    /// Both: those of a listener of IPv6.
    Both,
}

/// Time-outs, which connections inherit, too.
pub(crate) const TIMEOUTS: [SocketOption; 2] =
    [SocketOption::of_socket(libc::SO_RCVTIMEO), SocketOption::of_socket(libc::SO_SNDTIMEO)];

/// Options that connections inherit for `getsockopt` alone.
const SHOWN: [SocketOption; 7] = [
    SocketOption::of_ipv4(libc::IP_MTU_DISCOVER),
    SocketOption::of_ipv6(libc::IPV6_MTU_DISCOVER),
    SocketOption::of_ipv6(libc::IPV6_V6ONLY),
    SocketOption::of_socket(libc::SO_REUSEADDR),
    SocketOption::of_socket(libc::SO_BROADCAST),
    SocketOption::of_socket(libc::SO_DONTROUTE),
    SocketOption::of_socket(libc::SO_PRIORITY),
];

/// Options that `setsockopt` takes besides: those kept elsewhere, and those without effect on a socket that
/// listens or is connected.
const TAKEN: [SocketOption; 32] = [
    SocketOption::of_socket(libc::SO_RCVTIMEO),
    SocketOption::of_socket(libc::SO_SNDTIMEO),
    SocketOption::of_socket(libc::SO_RCVBUFFORCE),
    SocketOption::of_socket(libc::SO_SNDBUFFORCE),
    SocketOption::of_socket(libc::SO_REUSEADDR),
    SocketOption::of_socket(libc::SO_REUSEPORT),
    SocketOption::of_socket(libc::SO_BROADCAST),
    SocketOption::of_socket(libc::SO_DONTROUTE),
    SocketOption::of_socket(libc::SO_PRIORITY),
    SocketOption::of_socket(libc::SO_INCOMING_CPU),
    SocketOption::of_socket(libc::SO_BUSY_POLL),
    SocketOption::of_socket(libc::SO_PREFER_BUSY_POLL),
    SocketOption::of_socket(libc::SO_BUSY_POLL_BUDGET),
    // Of a listener it is without effect; connections have it themselves.
    SocketOption::of_tcp(libc::TCP_QUICKACK),
    SocketOption::of_tcp(libc::TCP_FASTOPEN),
    SocketOption::of_tcp(libc::TCP_FASTOPEN_KEY),
    SocketOption::of_tcp(libc::TCP_FASTOPEN_NO_COOKIE),
    SocketOption::of_ipv4(libc::IP_MTU_DISCOVER),
    SocketOption::of_ipv4(libc::IP_FREEBIND),
    SocketOption::of_ipv4(libc::IP_BIND_ADDRESS_NO_PORT),
    SocketOption::of_ipv6(libc::IPV6_MTU_DISCOVER),
    SocketOption::of_ipv6(libc::IPV6_V6ONLY),
    SocketOption::of_ipv6(libc::IPV6_FREEBIND),
    SocketOption::of_ipv6(libc::IPV6_DONTFRAG),
    // Control messages of datagrams, which connections have not.
    SocketOption::of_socket(libc::SO_RXQ_OVFL),
    SocketOption::of_ipv4(libc::IP_PKTINFO),
    SocketOption::of_ipv4(libc::IP_RECVTTL),
    SocketOption::of_ipv4(libc::IP_RECVTOS),
    SocketOption::of_ipv6(libc::IPV6_RECVPKTINFO),
    SocketOption::of_ipv6(libc::IPV6_RECVHOPLIMIT),
    SocketOption::of_ipv6(libc::IPV6_RECVTCLASS),
    SocketOption::of_socket(libc::SO_DEBUG),
];

/// Options that the program has set on a listener, of those that its connections inherit.
pub(crate) struct Inherited {
    pub(crate) kernel: Arc<Reservation>,
    options: Mutex<Vec<SocketOption>>,
}

impl Inherited {
    /// Finds the options that differ from those of a new socket.
    pub(crate) fn of(kernel: Reservation) -> Result<Self, Errno> {
        let new = new_socket(abi::is_ipv6(kernel.as_fd()))?;
        let mut options = INHERITED.to_vec();
        options.extend(TIMEOUTS.iter().chain(&SHOWN));
        options.retain(|option| abi::option_differs(kernel.as_fd(), new.as_fd(), *option));
        Ok(Self { kernel: Arc::new(kernel), options: Mutex::new(options) })
    }

    pub(crate) fn add(&self, option: SocketOption) {
        let mut options = self.options();
        let mut kept = INHERITED.iter().chain(&TIMEOUTS).chain(&SHOWN);
        if kept.any(|it| *it == option) && !options.contains(&option) {
            options.push(option);
        }
    }

    /// Options that connections of ours have. Those of one family, such as `IP_TOS` and `IPV6_TCLASS`, and `TCP_RTO_MAX_MS` are left out
    /// unless the program has set them.
    pub(crate) fn all(&self) -> Vec<SocketOption> {
        let set = self.options();
        let mut options = INHERITED.to_vec();
        let is_optional = |option: &SocketOption| {
            BY_FAMILY.contains(option) || *option == SocketOption::of_tcp(TCP_RTO_MAX_MS)
        };
        options.retain(|option| !is_optional(option) || set.contains(option));
        options
    }

    /// Gives them to a socket of the kernel.
    pub(crate) fn copy_to(&self, to: BorrowedFd<'_>) {
        self.options().iter().for_each(|option| abi::copy_option(self.kernel.as_fd(), to, *option));
    }

    /// Gives the time-outs to a readiness descriptor, which calls wait on.
    pub(crate) fn copy_timeouts_to(&self, to: BorrowedFd<'_>) {
        let options = self.options();
        let timeouts = options.iter().filter(|option| TIMEOUTS.contains(option));
        timeouts.for_each(|option| abi::copy_option(self.kernel.as_fd(), to, *option));
    }

    fn options(&self) -> MutexGuard<'_, Vec<SocketOption>> {
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Socket of the kernel that stores options.
pub(crate) fn new_socket(is_ipv6: bool) -> Result<OwnedFd, Errno> {
    let family = if is_ipv6 { AddressFamily::INET6 } else { AddressFamily::INET };
    socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, Some(ipproto::TCP))
}

/// Options of a connection that any int is a valid value of: no socket of the kernel is made for them.
const FLAGS: [SocketOption; 3] = [
    SocketOption::of_tcp(libc::TCP_NODELAY),
    SocketOption::of_tcp(libc::TCP_CORK),
    SocketOption::of_socket(libc::SO_KEEPALIVE),
];

/// True for an option that the connection itself stores.
pub(crate) fn is_flag(option: SocketOption) -> bool {
    FLAGS.contains(&option)
}

/// Value of such an option.
pub(crate) fn flag_of(option: SocketOption, options: &TcpOptions) -> Option<bool> {
    match (option.level, option.name) {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => Some(options.nodelay),
        (libc::IPPROTO_TCP, libc::TCP_CORK) => Some(options.cork),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => Some(options.keepalive),
        _ => None,
    }
}

/// True if `setsockopt` of this option on a TCP socket of ours is not refused.
pub(crate) fn is_accepted(option: SocketOption) -> bool {
    INHERITED.contains(&option) || TAKEN.contains(&option)
}

/// True if the program has set the size of a buffer of the kernel's socket.
pub(crate) fn is_buffer_set(kernel: BorrowedFd<'_>, bit: i32) -> bool {
    let set = abi::option_value(kernel, SocketOption::of_socket(SO_BUF_LOCK));
    set.is_ok_and(|set| set & bit != 0)
}

/// Value of an option, for a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TcpSetting {
    option: SocketOption,
    value: i64,
}

impl TcpSetting {
    /// A [flag](is_flag).
    pub(crate) fn flag(option: SocketOption, is_on: bool) -> Self {
        Self { option, value: is_on.into() }
    }

    /// Reads an option of the kernel's socket. `None` if the connection's need not be changed.
    pub(crate) fn of(option: SocketOption, kernel: BorrowedFd<'_>) -> Option<Self> {
        let option = match (option.level, option.name) {
            (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE) => SocketOption::of_socket(libc::SO_RCVBUF),
            (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE) => SocketOption::of_socket(libc::SO_SNDBUF),
            _ => option,
        };
        let value = || abi::option_value(kernel, option).ok().map(i64::from);
        let value = match (option.level, option.name) {
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let linger = socket_linger(kernel).ok()?;
                linger.map_or(-1, |linger| i64::try_from(linger.as_secs()).unwrap_or(i64::MAX))
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                value().filter(|_| is_buffer_set(kernel, RCVBUF_LOCK))?
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
                value().filter(|_| is_buffer_set(kernel, SNDBUF_LOCK))?
            }
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                i64::from(tcp_congestion(kernel).ok()? == congestion_name(Algorithm::NewReno))
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                value().filter(|bytes| *bytes != i64::from(MSS_DEFAULT))?
            }
            _ if INHERITED.contains(&option) => value()?,
            _ => return None,
        };
        Some(Self { option, value })
    }

    /// Changes the option of a connection or a listener, by its packets.
    pub(crate) fn apply(&self, packets: Packets, options: &mut TcpOptions) {
        let Self { option, value } = *self;
        if BY_FAMILY.contains(&option) {
            return self.apply_by_family(packets, options);
        }
        let micros = |unit_us: u64| u64::try_from(value).unwrap_or(0).saturating_mul(unit_us);
        let is_on = value != 0;
        match (option.level, option.name) {
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => options.keepalive = is_on,
            (libc::SOL_SOCKET, libc::SO_LINGER) => options.linger_s = u32::try_from(value).ok(),
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => options.oob_inline = is_on,
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => options.rcvbuf = u32::try_from(value).ok(),
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => options.sndbuf = u32::try_from(value).ok(),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => options.nodelay = is_on,
            (libc::IPPROTO_TCP, libc::TCP_CORK) => options.cork = is_on,
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
                options.keepalive_idle_us = micros(SECOND_US);
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => {
                options.keepalive_interval_us = micros(SECOND_US);
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => {
                options.keepalive_probes = u8::try_from(value).unwrap_or(u8::MAX);
            }
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => options.user_timeout_us = micros(1000),
            (libc::IPPROTO_TCP, TCP_RTO_MAX_MS) => {
                let max_us = u32::try_from(micros(1000)).unwrap_or(u32::MAX);
                options.rto_max_us = NonZeroU32::new(max_us);
            }
            (libc::IPPROTO_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS) => {
                options.thin_linear_timeouts = is_on;
            }
            (libc::IPPROTO_TCP, libc::TCP_LINGER2) => {
                // 0 is the kernel's own, and less is none.
                let wait_us = u32::try_from(micros(SECOND_US)).unwrap_or(u32::MAX);
                options.fin_timeout_us = (value != 0).then_some(wait_us);
            }
            (libc::IPPROTO_TCP, libc::TCP_SYNCNT) => {
                options.syn_retries = u8::try_from(value).ok().and_then(NonZeroU8::new);
            }
            (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT) => {
                options.defer_retries = retransmissions_in(u32::try_from(value).unwrap_or(0));
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                options.max_segment = u16::try_from(value).ok();
            }
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) => {
                options.window_clamp = u32::try_from(value).ok().and_then(NonZeroU32::new);
            }
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                let algorithm = if is_on { Algorithm::NewReno } else { Algorithm::Cubic };
                options.congestion = Some(algorithm);
            }
            (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT) => {
                // 0 stands for the sysctl's value, which is no limit. So does one above `i32::MAX`.
                options.unsent_limit = u32::try_from(value).ok().and_then(NonZeroU32::new);
            }
            _ => {}
        }
    }

    fn apply_by_family(&self, packets: Packets, options: &mut TcpOptions) {
        let is_v4 = self.option.level == libc::IPPROTO_IP;
        let (tos, ttl, min_ttl) = match packets {
            Packets::Both => {
                let v4 = options.v4.get_or_insert_default();
                match is_v4 {
                    true => (&mut v4.tos, &mut v4.ttl, &mut v4.min_ttl),
                    false => (&mut options.tos, &mut options.ttl, &mut options.min_ttl),
                }
            }
            _ if is_v4 == (packets == Packets::V4) => {
                (&mut options.tos, &mut options.ttl, &mut options.min_ttl)
            }
            Packets::V4 | Packets::V6 => return,
        };
        let value = u8::try_from(self.value);
        match (self.option.level, self.option.name) {
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                *tos = value.unwrap_or(0);
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) => {
                *ttl = value.unwrap_or(*ttl);
            }
            _ => *min_ttl = value.unwrap_or(0),
        }
    }
}

/// Name that the kernel has for a congestion control.
pub(crate) fn congestion_name(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::NewReno => "reno",
        Algorithm::Cubic => "cubic",
    }
}

#[cfg(test)]
mod tests {
    use forebay_stack::tcp::FamilyOptions;

    use super::*;

    #[test]
    fn exe_4_service_type_is_replaced() {
        let mut options = TcpOptions::default();
        for (option, packets) in BY_FAMILY.into_iter().zip([Packets::V4, Packets::V6]) {
            for value in [0x10, 0x88, 0] {
                TcpSetting { option, value }.apply(packets, &mut options);
                assert_eq!(i64::from(options.tos), value);
            }
        }
    }

    #[test]
    fn exe_4_thin_option_reaches_connections() {
        let option = SocketOption::of_tcp(libc::TCP_THIN_LINEAR_TIMEOUTS);
        let kernel = new_socket(false).unwrap();
        assert!(TcpSetting::of(option, kernel.as_fd()).is_some());
        let mut options = TcpOptions::default();
        for value in [1, 0] {
            TcpSetting { option, value }.apply(Packets::V4, &mut options);
            assert_eq!(options.thin_linear_timeouts, value != 0);
        }
    }

    #[test]
    fn exe_4_families_have_own_options() {
        let set = |packets, values: [i64; 6]| {
            let mut options = TcpOptions::default();
            for (option, value) in BY_FAMILY.into_iter().zip(values) {
                TcpSetting { option, value }.apply(packets, &mut options);
            }
            options
        };
        let values = [0x10, 0x20, 30, 40, 50, 60];
        let fields = |options: TcpOptions| (options.tos, options.ttl, options.min_ttl);
        let over_v4 = set(Packets::V4, values);
        assert_eq!((fields(over_v4), over_v4.v4), ((0x10, 30, 50), None));
        let over_v6 = set(Packets::V6, values);
        assert_eq!((fields(over_v6), over_v6.v4), ((0x20, 40, 60), None));
        let of_both = set(Packets::Both, values);
        let v4 = FamilyOptions { tos: 0x10, ttl: 30, min_ttl: 50 };
        assert_eq!((fields(of_both), of_both.v4), ((0x20, 40, 60), Some(v4)));
    }
}
