//! Sysctls that a script changes: a change of the namespace's own is one of our host's settings.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU32;

use forebay_stack::tcp::{
    Algorithm, FastOpen, FastOpenKeys, MtuProbing, SynCookies, TcpConfig, TcpOptions,
};

use crate::options::SECOND_US;

const FOLDER: &str = "/proc/sys/net/ipv4";

/// Names that mean something here.
const NAMES: [&str; 42] = [
    "tcp_base_mss",
    "tcp_congestion_control",
    "tcp_dsack",
    "tcp_early_retrans",
    "tcp_ecn",
    "tcp_ecn_fallback",
    "tcp_fastopen",
    "tcp_fastopen_blackhole_timeout_sec",
    "tcp_fastopen_key",
    "tcp_fin_timeout",
    "tcp_frto",
    "tcp_invalid_ratelimit",
    "tcp_keepalive_intvl",
    "tcp_keepalive_probes",
    "tcp_keepalive_time",
    "tcp_max_orphans",
    "tcp_max_syn_backlog",
    "tcp_max_tw_buckets",
    "tcp_min_tso_segs",
    "tcp_min_snd_mss",
    "tcp_mtu_probe_floor",
    "tcp_mtu_probing",
    "tcp_notsent_lowat",
    "tcp_orphan_retries",
    "tcp_probe_interval",
    "tcp_probe_threshold",
    "tcp_reordering",
    "tcp_retries1",
    "tcp_retries2",
    "tcp_rfc1337",
    "tcp_rmem",
    "tcp_rto_max_ms",
    "tcp_sack",
    "tcp_slow_start_after_idle",
    "tcp_stdurg",
    "tcp_syn_linear_timeouts",
    "tcp_syn_retries",
    "tcp_synack_retries",
    "tcp_syncookies",
    "tcp_timestamps",
    "tcp_window_scaling",
    "tcp_wmem",
];

/// Values when the host was created, those that its flags give, and those that a script has set since.
#[derive(Debug)]
pub(crate) struct Sysctls {
    given: BTreeMap<String, String>,
    first: BTreeMap<&'static str, String>,
    changed: BTreeMap<&'static str, String>,
}

impl Sysctls {
    /// Begins with the flags of a host.
    pub(crate) fn new(flags: &str) -> Self {
        let given = flags.split_whitespace().filter_map(|flag| flag.split_once('='));
        let given = given.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Self { given, first: read(), changed: BTreeMap::new() }
    }

    /// Number that a script has set, or else that of the flags.
    fn number(&self, name: &str) -> Option<u32> {
        self.changed.get(name).or_else(|| self.given.get(name))?.parse().ok()
    }

    /// Reads the values again. Returns true if one is another.
    pub(crate) fn read_again(&mut self) -> bool {
        let mut now = read();
        now.retain(|name, value| self.first.get(name) != Some(value));
        let is_new = now != self.changed;
        self.changed = now;
        is_new
    }

    /// Settings with the changes.
    pub(crate) fn config(&self, mut config: TcpConfig) -> TcpConfig {
        probing(&mut config, |name| self.changed.get(name)?.parse().ok());
        for (name, value) in &self.changed {
            set(&mut config, name, value);
        }
        config
    }

    /// Keys of Fast Open cookies, if a script has set them.
    pub(crate) fn fast_open_keys(&self) -> Option<FastOpenKeys> {
        fast_open_keys(self.changed.get("tcp_fastopen_key")?)
    }

    /// Options that sockets begin with.
    pub(crate) fn options(&self, mut options: TcpOptions) -> TcpOptions {
        let seconds_us =
            |name: &str| self.number(name).map(|seconds| u64::from(seconds) * SECOND_US);
        if let Some(idle_us) = seconds_us("tcp_keepalive_time") {
            options.keepalive_idle_us = idle_us;
        }
        if let Some(interval_us) = seconds_us("tcp_keepalive_intvl") {
            options.keepalive_interval_us = interval_us;
        }
        if let Some(probes) = self.number("tcp_keepalive_probes") {
            options.keepalive_probes = u8::try_from(probes).unwrap_or(u8::MAX);
        }
        options
    }

    /// Bytes not sent from which on no more are taken, of sockets without an option of their own.
    pub(crate) fn unsent_limit(&self) -> Option<NonZeroU32> {
        self.number("tcp_notsent_lowat").and_then(NonZeroU32::new)
    }
}

/// Takes a setting by the sysctl's name and value. Those of other names are not TCP's, or taken elsewhere.
pub(crate) fn set(config: &mut TcpConfig, name: &str, value: &str) {
    let words: Vec<u64> = value.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let first = words.first().copied().unwrap_or(0);
    let last = u32::try_from(words.last().copied().unwrap_or(0)).unwrap_or(u32::MAX);
    let middle = u32::try_from(words.get(1).copied().unwrap_or(0)).unwrap_or(u32::MAX);
    let byte = u8::try_from(first).unwrap_or(u8::MAX);
    let number = u32::try_from(first).unwrap_or(u32::MAX);
    match name {
        "tcp_congestion_control" => match value {
            "reno" => config.congestion = Algorithm::NewReno,
            "cubic" => config.congestion = Algorithm::Cubic,
            _ => {}
        },
        "tcp_ecn" => (config.asks_ecn, config.accepts_ecn) = (first == 1, first != 0),
        "tcp_fastopen" => config.fast_open = FastOpen(number),
        "tcp_fastopen_blackhole_timeout_sec" => {
            config.fast_open_blackhole_timeout_us = first * SECOND_US;
        }
        "tcp_fin_timeout" => config.fin_timeout_us = first * SECOND_US,
        "tcp_invalid_ratelimit" => config.invalid_ratelimit_us = first * 1000,
        "tcp_max_orphans" => config.max_orphans = number,
        "tcp_max_syn_backlog" => config.max_syn_backlog = number,
        "tcp_max_tw_buckets" => config.max_time_wait = number,
        "tcp_min_tso_segs" => config.min_gso_segments = number,
        "tcp_orphan_retries" => config.orphan_retries = byte,
        "tcp_reordering" => config.reordering = number,
        "tcp_retries2" => config.retries2 = byte,
        "tcp_rto_max_ms" => config.rto_max_us = number.saturating_mul(1000),
        "tcp_rmem" => config.rmem = (middle, last),
        "tcp_syn_linear_timeouts" => config.syn_linear_timeouts = byte,
        "tcp_syn_retries" => config.syn_retries = byte,
        "tcp_synack_retries" => config.synack_retries = byte,
        "tcp_syncookies" => {
            config.syncookies = match first {
                0 => SynCookies::Off,
                1 => SynCookies::WhenFull,
                _ => SynCookies::Always,
            };
        }
        "tcp_wmem" => config.wmem = (middle, last),
        _ => switch(config, name, first),
    }
}

/// Takes a setting that is on or off.
fn switch(config: &mut TcpConfig, name: &str, value: u64) {
    let on = value != 0;
    match name {
        "tcp_dsack" => config.dsack = on,
        // The others once were of early retransmission, which the kernel has no longer.
        "tcp_early_retrans" => config.loss_probes = matches!(value, 3 | 4),
        "tcp_ecn_fallback" => config.ecn_fallback = on,
        "tcp_frto" => config.frto = on,
        "tcp_rfc1337" => config.ignores_time_wait_resets = on,
        "tcp_sack" => config.sack = on,
        "tcp_slow_start_after_idle" => config.restarts_after_idle = on,
        "tcp_stdurg" => config.urgent_at_pointer = on,
        "tcp_timestamps" => config.timestamps = on,
        "tcp_window_scaling" => config.window_scaling = on,
        _ => {}
    }
}

/// Takes the settings of path MTU probing.
pub(crate) fn probing(config: &mut TcpConfig, value: impl Fn(&str) -> Option<u32>) {
    config.mtu_probing = match value("tcp_mtu_probing") {
        None => config.mtu_probing,
        Some(0) => MtuProbing::Off,
        Some(1) => MtuProbing::AfterBlackHole,
        Some(_) => MtuProbing::Always,
    };
    config.base_mss = value("tcp_base_mss").unwrap_or(config.base_mss);
    config.min_snd_mss = value("tcp_min_snd_mss").unwrap_or(config.min_snd_mss);
    config.mtu_probe_floor = value("tcp_mtu_probe_floor").unwrap_or(config.mtu_probe_floor);
    config.probe_threshold = value("tcp_probe_threshold").unwrap_or(config.probe_threshold);
    let interval_us = value("tcp_probe_interval").map(|seconds| u64::from(seconds) * SECOND_US);
    config.probe_interval_us = interval_us.unwrap_or(config.probe_interval_us);
    let retries1 = value("tcp_retries1").and_then(|count| u8::try_from(count).ok());
    config.retries1 = retries1.unwrap_or(config.retries1);
}

/// Keys as the kernel writes them: words in hexadecimal digits, and a comma before the second key.
pub(crate) fn fast_open_keys(text: &str) -> Option<FastOpenKeys> {
    let key = |text: &str| {
        let mut key = [0; 16];
        let mut words = text.split('-');
        for place in key.chunks_exact_mut(4) {
            place.copy_from_slice(&u32::from_str_radix(words.next()?, 16).ok()?.to_le_bytes());
        }
        words.next().is_none().then_some(key)
    };
    let mut keys = text.split(',');
    let primary = key(keys.next()?)?;
    let backup = match keys.next() {
        Some(text) => Some(key(text)?),
        None => None,
    };
    Some(FastOpenKeys { primary, backup })
}

/// Values as they are now; none where there is no such file.
fn read() -> BTreeMap<&'static str, String> {
    let value = |name: &'static str| {
        let value = fs::read_to_string(format!("{FOLDER}/{name}")).ok()?;
        Some((name, value.trim().to_owned()))
    };
    NAMES.into_iter().filter_map(value).collect()
}
