//! Options of TCP sockets. The kernel's socket stays their store: each change is made there first, so that what
//! it refuses is refused, and is then made to the connection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_stack::tcp::kernel_form::retransmissions_in;
use forebay_stack::tcp::{Algorithm, TcpOptions};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_linger, tcp_congestion};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};

use crate::abi;

/// Level and number of an option.
pub(crate) type OptionName = (i32, i32);

const SECOND_US: u64 = 1_000_000;

/// `SO_BUF_LOCK` and its bits: buffers whose size the program has set.
const SO_BUF_LOCK: i32 = 72;
pub(crate) const SNDBUF_LOCK: i32 = 1;
pub(crate) const RCVBUF_LOCK: i32 = 2;

/// Largest segment of a socket that has no limit set (`TCP_MSS_DEFAULT`).
const MSS_DEFAULT: i32 = 536;

/// Options that connections inherit from their listener, and that sockets of ours have.
pub(crate) const INHERITED: [OptionName; 19] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_CORK),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2),
    (libc::IPPROTO_TCP, libc::TCP_SYNCNT),
    (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG),
    (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP),
    (libc::IPPROTO_TCP, libc::TCP_CONGESTION),
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
];

/// Time-outs, which connections inherit, too.
const TIMEOUTS: [OptionName; 2] =
    [(libc::SOL_SOCKET, libc::SO_RCVTIMEO), (libc::SOL_SOCKET, libc::SO_SNDTIMEO)];

/// Options that `setsockopt` takes besides: those kept elsewhere, and those without effect on a socket that
/// listens or is connected.
const TAKEN: [OptionName; 26] = [
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE),
    (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_BROADCAST),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL),
    (libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET),
    // Of a listener it is without effect; connections have it themselves.
    (libc::IPPROTO_TCP, libc::TCP_QUICKACK),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
    (libc::IPPROTO_TCP, libc::TCP_FASTOPEN),
    (libc::IPPROTO_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS),
    (libc::IPPROTO_IP, libc::IP_TTL),
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
    (libc::IPPROTO_IP, libc::IP_FREEBIND),
    (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
    (libc::IPPROTO_IPV6, libc::IPV6_FREEBIND),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
];

/// Options that the program has set on a listener, of those that its connections inherit.
pub(crate) struct Inherited {
    pub(crate) kernel: Arc<OwnedFd>,
    options: Mutex<Vec<OptionName>>,
}

impl Inherited {
    /// Finds the options that differ from those of a new socket.
    pub(crate) fn of(kernel: OwnedFd) -> Result<Self, Errno> {
        let new = new_socket(abi::is_ipv6(kernel.as_fd()))?;
        let mut options = INHERITED.to_vec();
        options.extend(TIMEOUTS);
        options.retain(|option| abi::option_differs(kernel.as_fd(), new.as_fd(), *option));
        Ok(Self { kernel: Arc::new(kernel), options: Mutex::new(options) })
    }

    pub(crate) fn add(&self, option: OptionName) {
        let mut options = self.options();
        if (INHERITED.contains(&option) || TIMEOUTS.contains(&option)) && !options.contains(&option)
        {
            options.push(option);
        }
    }

    /// Options that connections of ours have. Of the two that are one to them, only those that were set.
    pub(crate) fn all(&self) -> Vec<OptionName> {
        let set = self.options();
        let is_class = |option: &OptionName| {
            let (v4, v6) = (libc::IP_TOS, libc::IPV6_TCLASS);
            matches!(*option, (libc::IPPROTO_IP, number) if number == v4)
                || matches!(*option, (libc::IPPROTO_IPV6, number) if number == v6)
        };
        let mut options = INHERITED.to_vec();
        options.retain(|option| !is_class(option) || set.contains(option));
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

    fn options(&self) -> MutexGuard<'_, Vec<OptionName>> {
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Socket of the kernel that stores options.
pub(crate) fn new_socket(is_ipv6: bool) -> Result<OwnedFd, Errno> {
    let family = if is_ipv6 { AddressFamily::INET6 } else { AddressFamily::INET };
    socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, Some(ipproto::TCP))
}

/// Options of a connection that any int is a valid value of: no socket of the kernel is made for them.
const FLAGS: [OptionName; 3] = [
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_CORK),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
];

/// True for an option that the connection itself stores.
pub(crate) fn is_flag(option: OptionName) -> bool {
    FLAGS.contains(&option)
}

/// Value of such an option.
pub(crate) fn flag_of(option: OptionName, options: &TcpOptions) -> Option<bool> {
    match option {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => Some(options.nodelay),
        (libc::IPPROTO_TCP, libc::TCP_CORK) => Some(options.cork),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => Some(options.keepalive),
        _ => None,
    }
}

/// True if `setsockopt` of this option on a TCP socket of ours is not refused.
pub(crate) fn is_supported(option: OptionName) -> bool {
    INHERITED.contains(&option) || TAKEN.contains(&option)
}

/// True if the program has set the size of a buffer of the kernel's socket.
pub(crate) fn is_buffer_set(kernel: BorrowedFd<'_>, bit: i32) -> bool {
    let set = abi::option_value(kernel, (libc::SOL_SOCKET, SO_BUF_LOCK));
    set.is_ok_and(|set| set & bit != 0)
}

/// Value of an option, for a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TcpSetting {
    option: OptionName,
    value: i64,
}

impl TcpSetting {
    /// A [flag](is_flag).
    pub(crate) fn flag(option: OptionName, is_on: bool) -> Self {
        Self { option, value: is_on.into() }
    }

    /// Reads an option of the kernel's socket. `None` if the connection's need not be changed.
    pub(crate) fn of((level, number): OptionName, kernel: BorrowedFd<'_>) -> Option<Self> {
        let number = match (level, number) {
            (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE) => libc::SO_RCVBUF,
            (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE) => libc::SO_SNDBUF,
            _ => number,
        };
        let option = (level, number);
        let value = || abi::option_value(kernel, option).ok().map(i64::from);
        let value = match option {
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

    /// Changes the option of a connection.
    pub(crate) fn apply(&self, options: &mut TcpOptions) {
        let Self { option: (level, number), value } = *self;
        let micros = |unit_us: u64| u64::try_from(value).unwrap_or(0).saturating_mul(unit_us);
        let is_on = value != 0;
        match (level, number) {
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => options.keepalive = is_on,
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                options.linger_us = (value >= 0).then(|| micros(SECOND_US));
            }
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
            (libc::IPPROTO_TCP, libc::TCP_LINGER2) => {
                // 0 is the kernel's own, and less is none.
                let wait_us = u32::try_from(micros(SECOND_US)).unwrap_or(u32::MAX);
                options.fin_timeout_us = (value != 0).then_some(wait_us);
            }
            (libc::IPPROTO_TCP, libc::TCP_SYNCNT) => options.syn_retries = u8::try_from(value).ok(),
            (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT) => {
                options.defer_retries = retransmissions_in(u32::try_from(value).unwrap_or(0));
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                options.max_segment = u16::try_from(value).ok();
            }
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) => {
                options.window_clamp = u32::try_from(value).ok().filter(|bytes| *bytes > 0);
            }
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                let algorithm = if is_on { Algorithm::NewReno } else { Algorithm::Cubic };
                options.congestion = Some(algorithm);
            }
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                options.tos = u8::try_from(value).unwrap_or(0);
            }
            _ => {}
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
    use super::*;

    #[test]
    fn exe_4_service_type_is_replaced() {
        let mut options = TcpOptions::default();
        for option in [(libc::IPPROTO_IP, libc::IP_TOS), (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)] {
            for value in [0x10, 0x88, 0] {
                TcpSetting { option, value }.apply(&mut options);
                assert_eq!(i64::from(options.tos), value);
            }
        }
    }
}
