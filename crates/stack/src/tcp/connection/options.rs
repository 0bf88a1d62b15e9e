//! A connection's options in few bytes: those that most connections do not set take no memory.

use std::num::{NonZeroU8, NonZeroU32};

use super::super::config::{Algorithm, TcpOptions, Timestamping};
use super::super::on_demand::{Initial, OnDemand};

/// Options of a connection; see [`TcpOptions`].
#[derive(Debug)]
pub(in crate::tcp) struct ConnectionOptions {
    pub(super) nodelay: bool,
    pub(super) cork: bool,
    pub(super) keepalive: bool,
    pub(super) oob_inline: bool,
    pub(super) tells_path_errors: bool,
    pub(super) tos: u8,
    pub(super) ttl: u8,
    congestion: Option<Algorithm>,
    pub(super) rare: OnDemand<RareOptions>,
}

/// Options that most connections have as they are by default.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct RareOptions {
    pub(super) keepalive_idle_us: u64,
    pub(super) keepalive_interval_us: u64,
    pub(super) keepalive_probes: u8,
    pub(super) user_timeout_us: u64,
    pub(super) linger_s: Option<u32>,
    pub(super) rcvbuf: Option<u32>,
    pub(super) low_water_bytes: u32,
    pub(super) sndbuf: Option<u32>,
    pub(super) max_segment: Option<u16>,
    pub(super) window_clamp: Option<NonZeroU32>,
    pub(super) fin_timeout_us: Option<u32>,
    pub(super) syn_retries: Option<NonZeroU8>,
    pub(super) defer_retries: u8,
    rto_max_us: Option<NonZeroU32>,
    pub(super) unsent_limit: Option<NonZeroU32>,
    pub(super) min_ttl: u8,
    pub(super) zero_copy: bool,
    pub(super) timestamping: Timestamping,
    quick_acks: bool,
    pub(super) thin_linear_timeouts: bool,
}

impl RareOptions {
    const fn of(options: &TcpOptions) -> Self {
        Self {
            keepalive_idle_us: options.keepalive_idle_us,
            keepalive_interval_us: options.keepalive_interval_us,
            keepalive_probes: options.keepalive_probes,
            user_timeout_us: options.user_timeout_us,
            linger_s: options.linger_s,
            rcvbuf: options.rcvbuf,
            low_water_bytes: options.low_water_bytes,
            sndbuf: options.sndbuf,
            max_segment: options.max_segment,
            window_clamp: options.window_clamp,
            fin_timeout_us: options.fin_timeout_us,
            syn_retries: options.syn_retries,
            defer_retries: options.defer_retries,
            rto_max_us: options.rto_max_us,
            unsent_limit: options.unsent_limit,
            min_ttl: options.min_ttl,
            zero_copy: options.zero_copy,
            timestamping: options.timestamping,
            quick_acks: options.quick_acks,
            thin_linear_timeouts: options.thin_linear_timeouts,
        }
    }
}

impl Initial for RareOptions {
    const INITIAL: Self = Self::of(&TcpOptions::DEFAULT);

    fn initial() -> &'static Self {
        static DEFAULT: RareOptions = RareOptions::INITIAL;
        &DEFAULT
    }
}

impl ConnectionOptions {
    pub(super) fn of(options: &TcpOptions) -> Self {
        let &TcpOptions {
            nodelay,
            cork,
            keepalive,
            oob_inline,
            tells_path_errors,
            tos,
            ttl,
            congestion,
            ..
        } = options;
        let mut this = Self {
            nodelay,
            cork,
            keepalive,
            oob_inline,
            tells_path_errors,
            tos,
            ttl,
            congestion,
            rare: OnDemand::default(),
        };
        let rare = RareOptions::of(options);
        if rare != RareOptions::INITIAL {
            *this.rare = rare;
        }
        this
    }

    /// All options, as the application sees them.
    pub(in crate::tcp) fn get(&self) -> TcpOptions {
        let rare = &*self.rare;
        TcpOptions {
            nodelay: self.nodelay,
            cork: self.cork,
            keepalive: self.keepalive,
            keepalive_idle_us: rare.keepalive_idle_us,
            keepalive_interval_us: rare.keepalive_interval_us,
            keepalive_probes: rare.keepalive_probes,
            user_timeout_us: rare.user_timeout_us,
            linger_s: rare.linger_s,
            oob_inline: self.oob_inline,
            rcvbuf: rare.rcvbuf,
            low_water_bytes: rare.low_water_bytes,
            sndbuf: rare.sndbuf,
            max_segment: rare.max_segment,
            window_clamp: rare.window_clamp,
            fin_timeout_us: rare.fin_timeout_us,
            syn_retries: rare.syn_retries,
            defer_retries: rare.defer_retries,
            rto_max_us: rare.rto_max_us,
            congestion: self.congestion,
            quick_acks: rare.quick_acks,
            thin_linear_timeouts: rare.thin_linear_timeouts,
            tos: self.tos,
            ttl: self.ttl,
            tells_path_errors: self.tells_path_errors,
            unsent_limit: rare.unsent_limit,
            min_ttl: rare.min_ttl,
            zero_copy: rare.zero_copy,
            timestamping: rare.timestamping,
            v4: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_12_default_options_take_no_memory() {
        let default = TcpOptions::default();
        let often = TcpOptions { nodelay: true, keepalive: true, tos: 8, ..default };
        for options in [default, often] {
            let kept = ConnectionOptions::of(&options);
            assert!(!kept.rare.is_allocated(), "{options:?}");
            assert_eq!(kept.get(), options);
        }
        let rare = TcpOptions { user_timeout_us: 1, syn_retries: NonZeroU8::new(2), ..often };
        assert_eq!(ConnectionOptions::of(&rare).get(), rare);
    }
}
