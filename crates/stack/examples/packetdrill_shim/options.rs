//! Socket options and `TCP_INFO`.

use std::ops::RangeInclusive;

use forebay_stack::tcp::kernel_form::{listener_info, retransmissions_in, seconds_of, tcp_info};
use forebay_stack::tcp::{
    Algorithm, FastOpenKeys, FastOpenOptions, TcpConfig, TcpInfo, TcpOptions, Timestamping,
};

use crate::calls::Shim;
use crate::errno::Errno;
use crate::kept::BUFFER_MAX_BYTES;

pub(crate) const SECOND_US: u64 = 1_000_000;
/// Longest wait for a FIN (`TCP_FIN_TIMEOUT_MAX`).
const FIN_TIMEOUT_MAX_SECONDS: u32 = 120;
/// Hops that a packet may take at most, unless an option says so (`ip_default_ttl`).
const DEFAULT_HOPS: i32 = 64;
/// Bytes of the name of an algorithm (`TCP_CA_NAME_MAX`).
const ALGORITHM_NAME_BYTES: usize = 16;
/// Smallest clamp of a window.
const WINDOW_CLAMP_MIN_BYTES: u32 = 1152;
/// Sizes of the buffers of a socket without a connection (`tcp_rmem` and `tcp_wmem`).
const RECEIVE_BUFFER_BYTES: u32 = 131_072;
const SEND_BUFFER_BYTES: u32 = 16_384;
/// Words about the memory of a socket (`SK_MEMINFO_VARS`), and places of some of them.
const MEMORY_WORDS: usize = 9;
const MEMORY_RECEIVED: usize = 0;
const MEMORY_RECEIVE_BUFFER: usize = 1;
const MEMORY_SEND_BUFFER: usize = 3;
const SO_MEMINFO: i32 = 55;
/// Priorities by the bits of throughput and delay in `IP_TOS` (`ip_tos2prio`).
const PRIORITIES: [i32; 4] = [0, 2, 6, 4];
/// Values that the kernel takes: seconds of keep-alive, counts, segment sizes, highest time-outs.
const SECONDS: RangeInclusive<i32> = 1..=32_767;
const COUNTS: RangeInclusive<i32> = 1..=127;
const SEGMENTS: RangeInclusive<i32> = 88..=32_767;
const RTO_MAX_MS: RangeInclusive<i32> = 1000..=120_000;
const TCP_RTO_MAX_MS: i32 = 44;

impl Shim {
    /// Sets an option whose value is these bytes.
    pub(crate) fn setsockopt(
        &self,
        fd: i32,
        (level, name): (i32, i32),
        value: &[u8],
    ) -> Result<i32, Errno> {
        let number = match value {
            // One byte is enough for IP, as in the kernel.
            &[byte, ..] if level == libc::IPPROTO_IP && value.len() < 4 => Ok(byte.into()),
            _ => number(value),
        };
        match level {
            libc::SOL_SOCKET => self.set_socket_option(fd, name, value, number),
            libc::IPPROTO_TCP => self.set_tcp_option(fd, name, value, number),
            libc::IPPROTO_IP | libc::IPPROTO_IPV6 => self.set_ip_option(fd, (level, name), number),
            _ => self.keep(fd, (level, name), number?),
        }
    }

    fn set_socket_option(
        &self,
        fd: i32,
        name: i32,
        value: &[u8],
        number: Result<i32, Errno>,
    ) -> Result<i32, Errno> {
        match name {
            libc::SO_RCVTIMEO => {
                self.lock().entry(fd)?.receive_timeout_us = timeout(value)?;
                Ok(0)
            }
            libc::SO_SNDTIMEO => {
                self.lock().entry(fd)?.send_timeout_us = timeout(value)?;
                Ok(0)
            }
            libc::SO_RCVLOWAT => {
                // A negative number is a large one.
                let bytes = number?.cast_unsigned();
                self.set_options(fd, |options| {
                    let most = options.rcvbuf.unwrap_or(TcpConfig::KERNELS.rmem.1) / 2;
                    options.low_water_bytes = bytes.min(most).max(1);
                })
            }
            libc::SO_LINGER => {
                let (on, linger) = (number?, self::number(value.get(4..).unwrap_or_default())?);
                let linger_s = (on != 0).then_some(linger.cast_unsigned());
                self.set_options(fd, |options| options.linger_s = linger_s)
            }
            libc::SO_KEEPALIVE => {
                let on = number? != 0;
                self.set_options(fd, |options| options.keepalive = on)
            }
            libc::SO_OOBINLINE => {
                let on = number? != 0;
                self.set_options(fd, |options| options.oob_inline = on)
            }
            libc::SO_RCVBUF => {
                // Doubled, as the kernel does.
                let bytes = (number?.cast_unsigned().min(BUFFER_MAX_BYTES) * 2).max(2304);
                self.set_options(fd, |options| options.rcvbuf = Some(bytes))
            }
            libc::SO_SNDBUF => {
                let bytes = (number?.cast_unsigned().min(BUFFER_MAX_BYTES) * 2).max(4608);
                self.set_options(fd, |options| options.sndbuf = Some(bytes))
            }
            libc::SO_REUSEADDR => {
                self.lock().entry(fd)?.reuses_address = number? != 0;
                Ok(0)
            }
            libc::SO_ZEROCOPY => {
                let on = within(number, 0..=1)? != 0;
                self.set_options(fd, |options| options.zero_copy = on)
            }
            libc::SO_TIMESTAMPING => {
                let timestamping = Timestamping(number?.cast_unsigned());
                let mut state = self.lock();
                let socket = state.entry(fd)?.socket;
                state.host.call(|tcp, out| tcp.set_timestamping(socket, timestamping, out))?;
                Ok(0)
            }
            libc::SO_PASSCRED => Err(Errno(libc::EOPNOTSUPP)),
            libc::SO_BINDTODEVICE => Ok(0),
            _ => self.keep(fd, (libc::SOL_SOCKET, name), number?),
        }
    }

    fn set_tcp_option(
        &self,
        fd: i32,
        name: i32,
        value: &[u8],
        number: Result<i32, Errno>,
    ) -> Result<i32, Errno> {
        match name {
            libc::TCP_NODELAY => {
                let on = number? != 0;
                let mut state = self.lock();
                let socket = state.entry(fd)?.socket;
                state.host.call(|tcp, out| tcp.set_nodelay(socket, on, out))?;
                Ok(0)
            }
            libc::TCP_CORK => {
                let on = number? != 0;
                let mut state = self.lock();
                let socket = state.entry(fd)?.socket;
                state.host.call(|tcp, out| tcp.set_cork(socket, on, out))?;
                Ok(0)
            }
            libc::TCP_MAXSEG => {
                let largest = match number? {
                    0 => None,
                    _ => u16::try_from(within(number, SEGMENTS)?).ok(),
                };
                self.set_options(fd, |options| options.max_segment = largest)
            }
            libc::TCP_CONGESTION => {
                let algorithm = match value.trim_ascii_end() {
                    b"" => return Err(Errno(libc::EINVAL)),
                    b"reno" | b"reno\0" => Algorithm::NewReno,
                    b"cubic" | b"cubic\0" => Algorithm::Cubic,
                    _ => return Err(Errno(libc::ENOENT)),
                };
                self.set_options(fd, |options| options.congestion = Some(algorithm))
            }
            libc::TCP_WINDOW_CLAMP => {
                let clamp = number?;
                if clamp == 0 && !self.is_closed(fd)? {
                    return Err(Errno(libc::EINVAL));
                }
                let least = u32::try_from(clamp).unwrap_or(0).max(WINDOW_CLAMP_MIN_BYTES);
                let clamp = std::num::NonZeroU32::new(least).filter(|_| clamp != 0);
                self.set_options(fd, |options| options.window_clamp = clamp)
            }
            libc::TCP_QUICKACK => {
                let on = number? != 0;
                let mut state = self.lock();
                let socket = state.entry(fd)?.socket;
                state.host.call(|tcp, out| tcp.set_quick_acks(socket, on, out))?;
                Ok(0)
            }
            libc::TCP_FASTOPEN if self.is_connected(fd)? => Err(Errno(libc::EINVAL)),
            libc::TCP_FASTOPEN_CONNECT if !self.is_closed(fd)? => Err(Errno(libc::EINVAL)),
            libc::TCP_NOTSENT_LOWAT => {
                let bytes = number?;
                let of_host = self.lock().host.sysctls.unsent_limit();
                let limit = std::num::NonZeroU32::new(bytes.cast_unsigned()).or(of_host);
                self.keep(fd, (libc::IPPROTO_TCP, name), bytes)?;
                self.set_options(fd, |options| options.unsent_limit = limit)
            }
            libc::TCP_TIMESTAMP => Err(Errno(libc::EPERM)),
            libc::TCP_FASTOPEN => {
                let queue = within(number, 0..=i32::MAX)?;
                self.set_fast_open(fd, |options| options.queue = queue)
            }
            libc::TCP_FASTOPEN_NO_COOKIE => {
                let on = within(number, 0..=1)? != 0;
                self.set_fast_open(fd, |options| options.no_cookie = on)
            }
            libc::TCP_FASTOPEN_CONNECT => {
                let on = within(number, 0..=1)? != 0;
                self.set_fast_open(fd, |options| options.waits_for_data = on)
            }
            libc::TCP_FASTOPEN_KEY => {
                let keys = match value.as_chunks::<16>() {
                    ([primary], []) => FastOpenKeys { primary: *primary, backup: None },
                    ([primary, backup], []) => {
                        FastOpenKeys { primary: *primary, backup: Some(*backup) }
                    }
                    _ => return Err(Errno(libc::EINVAL)),
                };
                self.set_fast_open(fd, |options| options.keys = Some(keys))
            }
            _ => self.set_tcp_time(fd, name, number),
        }
    }

    fn set_fast_open(
        &self,
        fd: i32,
        change: impl FnOnce(&mut FastOpenOptions),
    ) -> Result<i32, Errno> {
        let mut state = self.lock();
        state.host.follow_sysctls();
        let socket = state.entry(fd)?.socket;
        let mut options = state.host.tcp.fast_open(socket)?;
        change(&mut options);
        state.host.tcp.set_fast_open(socket, options)?;
        Ok(0)
    }

    /// Sets an option of TCP about times and retransmissions.
    fn set_tcp_time(&self, fd: i32, name: i32, number: Result<i32, Errno>) -> Result<i32, Errno> {
        let seconds = || within(number, SECONDS).map(|value| u64::from(value) * SECOND_US);
        match name {
            libc::TCP_KEEPIDLE => {
                let idle_us = seconds()?;
                self.set_options(fd, |options| options.keepalive_idle_us = idle_us)
            }
            libc::TCP_KEEPINTVL => {
                let interval_us = seconds()?;
                self.set_options(fd, |options| options.keepalive_interval_us = interval_us)
            }
            libc::TCP_KEEPCNT => {
                let probes = u8::try_from(within(number, COUNTS)?).unwrap_or(u8::MAX);
                self.set_options(fd, |options| options.keepalive_probes = probes)
            }
            libc::TCP_USER_TIMEOUT => {
                let timeout_us = u64::from(within(number, 0..=i32::MAX)?) * 1000;
                self.set_options(fd, |options| options.user_timeout_us = timeout_us)
            }
            libc::TCP_SYNCNT => {
                let retries = u8::try_from(within(number, COUNTS)?).unwrap_or(u8::MAX);
                let retries = std::num::NonZeroU8::new(retries);
                self.set_options(fd, |options| options.syn_retries = retries)
            }
            libc::TCP_LINGER2 => {
                let linger = number?;
                let seconds = u32::try_from(linger).unwrap_or(0).min(FIN_TIMEOUT_MAX_SECONDS);
                let wait_us = (linger != 0).then_some(seconds * 1_000_000);
                self.set_options(fd, |options| options.fin_timeout_us = wait_us)
            }
            TCP_RTO_MAX_MS => {
                let max_us = within(number, RTO_MAX_MS)? * 1000;
                let rto_max_us = std::num::NonZeroU32::new(max_us);
                self.set_options(fd, |options| options.rto_max_us = rto_max_us)
            }
            libc::TCP_THIN_LINEAR_TIMEOUTS => {
                let number = number?;
                self.keep(fd, (libc::IPPROTO_TCP, name), number)?;
                self.set_options(fd, |options| options.thin_linear_timeouts = number != 0)
            }
            libc::TCP_DEFER_ACCEPT => {
                let retries = retransmissions_in(number?.max(0).cast_unsigned());
                self.set_options(fd, |options| options.defer_retries = retries)
            }
            _ => self.keep(fd, (libc::IPPROTO_TCP, name), number?),
        }
    }

    fn set_ip_option(
        &self,
        fd: i32,
        (level, name): (i32, i32),
        number: Result<i32, Errno>,
    ) -> Result<i32, Errno> {
        match (level, name) {
            (libc::IPPROTO_IPV6, _) if !self.lock().host.has_ipv6_sockets() => {
                Err(Errno(libc::ENOPROTOOPT))
            }
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                let tos = number?;
                let tos = match level {
                    libc::IPPROTO_IPV6 if tos == -1 => 0,
                    libc::IPPROTO_IPV6 => u8::try_from(tos).map_err(|_| Errno(libc::EINVAL))?,
                    _ => tos.to_le_bytes()[0],
                };
                if level == libc::IPPROTO_IP {
                    let priority = PRIORITIES[usize::from(tos >> 3 & 3)];
                    let option = (libc::SOL_SOCKET, libc::SO_PRIORITY);
                    self.lock().entry(fd)?.kept.set(option, priority)?;
                }
                self.set_options(fd, |options| options.tos = tos & !3)
            }
            (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR) => {
                let on = number? != 0;
                if (level == libc::IPPROTO_IPV6) == self.lock().host.is_ipv6() {
                    self.set_options(fd, |options| options.tells_path_errors = on)?;
                }
                self.keep(fd, (level, name), on.into())
            }
            (libc::IPPROTO_IP, libc::IP_MINTTL) | (libc::IPPROTO_IPV6, libc::IPV6_MINHOPCOUNT) => {
                let least = number?;
                self.keep(fd, (level, name), least)?;
                let min_ttl = u8::try_from(least).unwrap_or(u8::MAX);
                let is_meant = (level == libc::IPPROTO_IPV6) == self.lock().host.is_ipv6();
                self.set_options(fd, |options| {
                    options.min_ttl = if is_meant { min_ttl } else { options.min_ttl }
                })
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) => {
                let hops = if number? == -1 { DEFAULT_HOPS } else { number? };
                self.keep(fd, (level, name), hops)?;
                let ttl = u8::try_from(hops).unwrap_or(u8::MAX);
                let is_meant = (level == libc::IPPROTO_IPV6) == self.lock().host.is_ipv6();
                self.set_options(fd, |options| {
                    options.ttl = if is_meant { ttl } else { options.ttl }
                })
            }
            _ => self.keep(fd, (level, name), number?),
        }
    }

    fn keep(&self, fd: i32, option: (i32, i32), value: i32) -> Result<i32, Errno> {
        self.lock().entry(fd)?.kept.set(option, value)?;
        Ok(0)
    }

    fn is_connected(&self, fd: i32) -> Result<bool, Errno> {
        let mut state = self.lock();
        let socket = state.entry(fd)?.socket;
        Ok(state.host.tcp.info(socket)?.is_some())
    }

    /// True of a socket that neither listens nor has a connection.
    fn is_closed(&self, fd: i32) -> Result<bool, Errno> {
        Ok(!self.lock().entry(fd)?.listens && !self.is_connected(fd)?)
    }

    /// Value of an option as bytes.
    pub(crate) fn getsockopt(&self, fd: i32, (level, name): (i32, i32)) -> Result<Vec<u8>, Errno> {
        let mut state = self.lock();
        let entry = state.entry(fd)?.clone();
        let socket = entry.socket;
        let options = state.host.tcp.options(socket)?;
        let int = |value: u64| Ok(i32::try_from(value).unwrap_or(i32::MAX).to_ne_bytes().to_vec());
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                let error = state.host.tcp.take_error(socket)?;
                int(error.map_or(0, |error| u64::from(Errno::from(error).0.cast_unsigned())))
            }
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => int(options.keepalive.into()),
            (libc::SOL_SOCKET, libc::SO_ZEROCOPY) => int(options.zero_copy.into()),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMPING) => int(options.timestamping.0.into()),
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => int(entry.reuses_address.into()),
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => int(entry.listens.into()),
            (libc::SOL_SOCKET, libc::SO_TYPE) => int(1),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => int(6),
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => {
                int(if state.host.has_ipv6_sockets() { 10 } else { 2 })
            }
            (libc::SOL_SOCKET, libc::SO_PASSCRED) => Err(Errno(libc::EOPNOTSUPP)),
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => int(options.low_water_bytes.into()),
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => int(options.oob_inline.into()),
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let mut pair = int(options.linger_s.is_some().into())?;
                pair.extend(int(options.linger_s.unwrap_or(0).into())?);
                Ok(pair)
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => Ok(timeval(entry.receive_timeout_us)),
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => Ok(timeval(entry.send_timeout_us)),
            (libc::IPPROTO_IPV6, _) if !state.host.has_ipv6_sockets() => {
                Err(Errno(libc::EOPNOTSUPP))
            }
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                int(options.tos.into())
            }
            (libc::IPPROTO_IP, libc::IP_MTU) | (libc::IPPROTO_IPV6, libc::IPV6_MTU) => {
                let info = state.host.tcp.info(socket)?.ok_or(Errno(libc::ENOTCONN))?;
                int(info.path_mtu_bytes.into())
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                let info = state.host.tcp.info(socket)?;
                let bytes = info.map(|info| info.receive_buffer_bytes).or(options.rcvbuf);
                int(bytes.unwrap_or(RECEIVE_BUFFER_BYTES).into())
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
                let info = state.host.tcp.info(socket)?;
                let bytes = info.map(|info| info.send_buffer_bytes).or(options.sndbuf);
                int(bytes.unwrap_or(SEND_BUFFER_BYTES).into())
            }
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => int(options.nodelay.into()),
            (libc::IPPROTO_TCP, libc::TCP_CORK) => int(options.cork.into()),
            (libc::IPPROTO_TCP, libc::TCP_QUICKACK) => {
                int(state.host.tcp.has_quick_acks(socket)?.into())
            }
            (libc::IPPROTO_TCP, TCP_RTO_MAX_MS) => {
                let of_host = state.host.tcp.config().rto_max_us;
                let max_us = options.rto_max_us.map_or(of_host, std::num::NonZeroU32::get);
                int((max_us / 1000).into())
            }
            (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT) => int(seconds_of(options.defer_retries)),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => int(options.keepalive_idle_us / SECOND_US),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => {
                int(options.keepalive_interval_us / SECOND_US)
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => int(options.keepalive_probes.into()),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => int(options.user_timeout_us / 1000),
            (libc::IPPROTO_TCP, libc::TCP_SYNCNT) => {
                int(options.syn_retries.map_or(6, std::num::NonZeroU8::get).into())
            }
            (libc::IPPROTO_TCP, libc::TCP_LINGER2) => match options.fin_timeout_us {
                Some(0) => Ok((-1_i32).to_ne_bytes().to_vec()),
                wait_us => int(wait_us.map_or(60, |us| u64::from(us) / SECOND_US)),
            },
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) => {
                let info = state.host.tcp.info(socket)?;
                let wanted = options.window_clamp.map_or(0, std::num::NonZeroU32::get);
                int(info.map_or(wanted, |info| info.window_clamp_bytes).into())
            }
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                let name: &[u8] = match options.congestion.unwrap_or_default() {
                    Algorithm::NewReno => b"reno",
                    Algorithm::Cubic => b"cubic",
                };
                let mut padded = name.to_vec();
                padded.resize(ALGORITHM_NAME_BYTES, 0);
                Ok(padded)
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                let info = state.host.tcp.info(socket)?;
                let before = options.max_segment.map_or(536, u32::from);
                int(info.map_or(before, |info| info.mss_bytes).into())
            }
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN) => {
                int(state.host.tcp.fast_open(socket)?.queue.into())
            }
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_NO_COOKIE) => {
                int(state.host.tcp.fast_open(socket)?.no_cookie.into())
            }
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT) => {
                int(state.host.tcp.fast_open(socket)?.waits_for_data.into())
            }
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_KEY) => {
                let FastOpenKeys { primary, backup } = state.host.tcp.fast_open_keys(socket)?;
                Ok([primary.as_slice(), backup.as_ref().map_or(&[], <[u8; 16]>::as_slice)].concat())
            }
            (libc::IPPROTO_TCP, libc::TCP_INFO) => {
                let info = state.host.tcp.info(socket)?;
                let listening = state.host.tcp.listening().find(|one| one.socket == socket);
                Ok(match listening {
                    Some(listening) => listener_info(&listening).to_vec(),
                    None => tcp_info(info.as_ref(), Some(state.host.now_us)).to_vec(),
                })
            }
            // Neither of our algorithms tells something, as the kernel's of their names.
            (libc::IPPROTO_TCP, libc::TCP_CC_INFO) => Ok(Vec::new()),
            (libc::SOL_SOCKET, SO_MEMINFO) => {
                let info = state.host.tcp.info(socket)?;
                Ok(memory_info(info.as_ref(), &options))
            }
            _ => Ok(entry.kept.value((level, name))?.to_ne_bytes().to_vec()),
        }
    }
}

/// Value of an option that must be in a range.
fn within(number: Result<i32, Errno>, range: RangeInclusive<i32>) -> Result<u32, Errno> {
    let value = number?;
    range.contains(&value).then_some(value.cast_unsigned()).ok_or(Errno(libc::EINVAL))
}

fn number(value: &[u8]) -> Result<i32, Errno> {
    value.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes)).ok_or(Errno(libc::EINVAL))
}

/// A `struct timeval`; `None` of zero, which is not a limit.
fn timeout(value: &[u8]) -> Result<Option<u64>, Errno> {
    let word = |at: usize| -> Option<u64> {
        let bytes = value.get(at..)?.first_chunk()?;
        u64::try_from(i64::from_ne_bytes(*bytes)).ok()
    };
    let (Some(seconds), Some(us)) = (word(0), word(8)) else { return Err(Errno(libc::EINVAL)) };
    Ok(Some(seconds * SECOND_US + us).filter(|&us| us > 0))
}

/// Memory of a socket in the kernel's order, in bytes. What is not counted here is 0 (`sk_get_meminfo`).
fn memory_info(info: Option<&TcpInfo>, options: &TcpOptions) -> Vec<u8> {
    let mut words = [0_u32; MEMORY_WORDS];
    words[MEMORY_RECEIVED] = info.map_or(0, |info| info.receive_memory_bytes);
    let receive_bytes = info.map(|info| info.receive_buffer_bytes).or(options.rcvbuf);
    words[MEMORY_RECEIVE_BUFFER] = receive_bytes.unwrap_or(RECEIVE_BUFFER_BYTES);
    let send_bytes = info.map(|info| info.send_buffer_bytes).or(options.sndbuf);
    words[MEMORY_SEND_BUFFER] = send_bytes.unwrap_or(SEND_BUFFER_BYTES);
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn timeval(timeout_us: Option<u64>) -> Vec<u8> {
    let us = timeout_us.unwrap_or(0);
    [us / SECOND_US, us % SECOND_US].iter().flat_map(|word| word.to_ne_bytes()).collect()
}
