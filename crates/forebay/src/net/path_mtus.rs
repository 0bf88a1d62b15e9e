//! MTUs of paths that routers have told of (RFC 1191, RFC 8201), where their errors come here.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Destinations whose path is known, at most.
const KNOWN_MAX: usize = 1024;

/// Time for which a path is known (`mtu_expires`), in ns.
const EXPIRES_NS: u64 = 600_000_000_000;

/// Smallest MTU that a router can claim, of IPv4 (`min_pmtu`) and IPv6 (`IPV6_MIN_MTU`), in bytes.
const LEAST: u32 = 552;
const LEAST_V6: u32 = 1280;

/// Paths that are narrower than the devices that lead to them.
#[derive(Debug, Default)]
pub(super) struct PathMtus {
    /// Number of entries: without any, nobody locks them.
    count: AtomicUsize,
    known: Mutex<HashMap<IpAddr, PathMtu>>,
}

#[derive(Clone, Copy, Debug)]
struct PathMtu {
    mtu_bytes: u32,
    until_ns: u64,
}

impl PathMtus {
    /// Records what a router has told. A larger MTU than is known changes nothing, and neither does a smaller one than there
    /// may be of IPv6; of IPv4 it counts as the smallest.
    pub(super) fn learn(&self, destination: IpAddr, mtu_bytes: u32, now_ns: u64) {
        if destination.is_ipv6() && mtu_bytes < LEAST_V6 {
            return;
        }
        let mtu_bytes = mtu_bytes.max(LEAST);
        let mut known = self.known();
        let is_known = known.get(&destination).is_some_and(|path| path.until_ns > now_ns);
        if is_known && known[&destination].mtu_bytes < mtu_bytes {
            return;
        }
        if known.len() >= KNOWN_MAX && !known.contains_key(&destination) {
            let first = known.iter().min_by_key(|(_, path)| path.until_ns);
            if let Some(first) = first.map(|(address, _)| *address) {
                known.remove(&first);
            }
        }
        let until_ns = now_ns.saturating_add(EXPIRES_NS);
        known.insert(destination, PathMtu { mtu_bytes, until_ns });
        self.count.store(known.len(), Ordering::Relaxed);
    }

    /// MTU of the path to a destination, if a router has told of one.
    pub(super) fn find(&self, destination: IpAddr, now_ns: u64) -> Option<u32> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut known = self.known();
        let path = *known.get(&destination)?;
        if path.until_ns > now_ns {
            return Some(path.mtu_bytes);
        }
        known.remove(&destination);
        self.count.store(known.len(), Ordering::Relaxed);
        None
    }

    fn known(&self) -> MutexGuard<'_, HashMap<IpAddr, PathMtu>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u32) -> IpAddr {
        IpAddr::V4(number.into())
    }

    #[test]
    fn udp_30_path_is_forgotten_in_time() {
        let paths = PathMtus::default();
        paths.learn(address(1), 1400, 7);
        assert_eq!(paths.find(address(1), 6 + EXPIRES_NS), Some(1400));
        paths.learn(address(1), 1450, 8);
        assert_eq!(paths.find(address(1), 9), Some(1400), "no router makes it wider");
        assert_eq!(
            (paths.find(address(2), 9), paths.find(address(1), 7 + EXPIRES_NS)),
            (None, None)
        );
        paths.learn(address(1), 1450, 7 + EXPIRES_NS);
        assert_eq!(paths.find(address(1), 8 + EXPIRES_NS), Some(1450));
    }

    #[test]
    fn udp_30_claims_have_a_least_mtu() {
        let (paths, v6) = (PathMtus::default(), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]));
        paths.learn(address(1), 0, 0);
        paths.learn(v6, 1279, 0);
        assert_eq!((paths.find(address(1), 1), paths.find(v6, 1)), (Some(LEAST), None));
        paths.learn(v6, 1280, 0);
        assert_eq!(paths.find(v6, 1), Some(1280));
    }

    #[test]
    fn udp_30_known_paths_are_bounded() {
        let paths = PathMtus::default();
        for number in 0..10_000 {
            paths.learn(address(number), 1400, number.into());
        }
        let known = (0..10_000).filter(|&number| paths.find(address(number), 10_000).is_some());
        assert!(known.eq(10_000 - u32::try_from(KNOWN_MAX).unwrap()..10_000), "the last ones");
    }
}
