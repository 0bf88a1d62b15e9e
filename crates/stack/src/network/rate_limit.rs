//! Rate limits for error messages: the kernel's `icmp_ratelimit`, `icmp_msgs_per_sec` and
//! `icmp_msgs_burst`, in a table of fixed size.

use std::net::IpAddr;

use super::NetworkConfig;

/// Burst of messages to one destination (`XRLIM_BURST_FACTOR`).
const HOST_BURST: u64 = 6;
/// Number of destinations remembered. A destination that was displaced by another starts with a
/// full burst again; the limit for all destinations still holds.
const HOSTS: usize = 256;
const SECOND_NS: u64 = 1_000_000_000;

/// Result of a rate limit check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Allowed {
    Yes,
    /// Not to this destination for now.
    NotHost,
    /// Not to any destination for now.
    NotAny,
}

/// Token buckets of all destinations.
#[derive(Debug)]
pub(super) struct RateLimit {
    config: NetworkConfig,
    all: Bucket,
    hosts: Box<[LimitedHost]>,
}

#[derive(Clone, Copy, Debug)]
struct LimitedHost {
    address: Option<IpAddr>,
    bucket: Bucket,
}

/// A token bucket; tokens are nanoseconds of saved time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bucket {
    saved_ns: u64,
    last_ns: u64,
}

impl RateLimit {
    pub(super) fn new(config: NetworkConfig) -> Self {
        let empty = LimitedHost { address: None, bucket: Bucket::default() };
        let mut limit = Self { config, all: Bucket::default(), hosts: vec![empty; HOSTS].into() };
        limit.all.saved_ns = limit.all_max_ns();
        limit
    }

    /// Checks if an error message may be sent to `host` now, and if so takes its tokens.
    pub(super) fn take(&mut self, host: IpAddr, now_ns: u64) -> Allowed {
        let (cost_ns, max_ns) = (self.all_cost_ns(), self.all_max_ns());
        self.all.save(now_ns, max_ns);
        if self.all.saved_ns < cost_ns {
            return Allowed::NotAny;
        }
        // `icmpv6_xrlim_allow` shortens the interval by the prefix length: a quarter for a /64
        // route.
        let host_cost_ns = match host {
            IpAddr::V4(_) => self.config.icmp_ratelimit_ns,
            IpAddr::V6(_) => self.config.icmp_ratelimit_ns / 4,
        };
        let host_max_ns = host_cost_ns.saturating_mul(HOST_BURST);
        let Some(place) = self.hosts.get_mut(place_of(host)) else { return Allowed::NotHost };
        if place.address != Some(host) {
            let bucket = Bucket { saved_ns: host_max_ns, last_ns: now_ns };
            *place = LimitedHost { address: Some(host), bucket };
        }
        place.bucket.save(now_ns, host_max_ns);
        if !place.bucket.spend(host_cost_ns) {
            return Allowed::NotHost;
        }
        self.all.saved_ns -= cost_ns;
        Allowed::Yes
    }

    fn all_cost_ns(&self) -> u64 {
        SECOND_NS.checked_div(self.config.icmp_msgs_per_sec.into()).unwrap_or(u64::MAX)
    }

    fn all_max_ns(&self) -> u64 {
        self.all_cost_ns().saturating_mul(self.config.icmp_msgs_burst.into())
    }
}

impl Bucket {
    /// Bucket with these tokens.
    pub(super) fn with(saved_ns: u64) -> Self {
        Self { saved_ns, last_ns: 0 }
    }

    pub(super) fn save(&mut self, now_ns: u64, max_ns: u64) {
        let elapsed_ns = now_ns.saturating_sub(self.last_ns);
        self.saved_ns = self.saved_ns.saturating_add(elapsed_ns).min(max_ns);
        self.last_ns = self.last_ns.max(now_ns);
    }

    pub(super) fn spend(&mut self, cost_ns: u64) -> bool {
        let left_ns = self.saved_ns.checked_sub(cost_ns);
        self.saved_ns = left_ns.unwrap_or(self.saved_ns);
        left_ns.is_some()
    }
}

/// Slot of a host: adjacent addresses get different slots.
fn place_of(host: IpAddr) -> usize {
    let fold = |bytes: &[u8]| {
        bytes.iter().fold(0, |place, byte| (place * 31 + usize::from(*byte)) % HOSTS)
    };
    match host {
        IpAddr::V4(address) => fold(&address.octets()),
        IpAddr::V6(address) => fold(&address.octets()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(limit: &mut RateLimit, host: &str, now_ns: u64, times: u32) -> u32 {
        let host = host.parse().unwrap();
        (0..times).map(|_| u32::from(limit.take(host, now_ns) == Allowed::Yes)).sum()
    }

    #[test]
    fn icmp_burst_six_then_one_second() {
        let mut limit = RateLimit::new(NetworkConfig::default());
        assert_eq!(taken(&mut limit, "10.0.0.1", 0, 20), 6);
        assert_eq!(taken(&mut limit, "10.0.0.2", 0, 20), 6);
        assert_eq!(taken(&mut limit, "10.0.0.1", SECOND_NS - 1, 20), 0);
        assert_eq!(taken(&mut limit, "10.0.0.1", SECOND_NS, 20), 1);
        assert_eq!(taken(&mut limit, "10.0.0.1", 100 * SECOND_NS, 20), 6);
        assert_eq!(taken(&mut limit, "fd00::1", 100 * SECOND_NS, 20), 6);
        assert_eq!(taken(&mut limit, "fd00::1", 101 * SECOND_NS, 20), 4);
    }

    #[test]
    fn host_wide_icmp_rate_is_bounded() {
        let mut limit = RateLimit::new(NetworkConfig::default());
        let host = |number: u32| IpAddr::from(number.to_be_bytes());
        let mut told = |now_ns| {
            let allowed = (1..2000).map(|number| limit.take(host(number), now_ns));
            allowed.filter(|allowed| *allowed == Allowed::Yes).count()
        };
        assert_eq!(told(0), 50);
        assert_eq!(told(10 * 1_000_000), 10);
        assert_eq!(told(60 * SECOND_NS), 50);
    }

    #[test]
    fn zero_limit_passes_none() {
        let config = NetworkConfig { icmp_msgs_per_sec: 0, ..NetworkConfig::default() };
        let mut limit = RateLimit::new(config);
        limit.all.saved_ns = 0;
        assert_eq!(limit.take(IpAddr::from([10, 0, 0, 1]), SECOND_NS), Allowed::NotAny);
    }
}
