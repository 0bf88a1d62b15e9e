//! MTUs of paths that routers have told of (RFC 1191, RFC 8201), by errors that come here, or to the kernel.

use std::array;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;

/// Sets of destinations, each of which is replaced as a whole. A hash with a secret selects one.
const SETS: usize = 64;

/// Destinations in a set whose path is known, at most.
const WAYS: usize = 16;

/// Time for which a path is known (`mtu_expires`), in ns.
const EXPIRES_NS: u64 = 600_000_000_000;

/// Minimum interval between renewals of a known path, in ns.
const RENEW_NS: u64 = 1_000_000_000;

/// Smallest MTU that a router can claim, of IPv4 (`min_pmtu`) and IPv6 (`IPV6_MIN_MTU`), in bytes.
const MTU_MIN_BYTES: u32 = 552;
const MTU_MIN_V6_BYTES: u32 = 1280;

/// Paths that are narrower than the devices that lead to them. No sender waits for another one here.
#[derive(Debug)]
pub(super) struct PathMtus {
    /// Time until which any path is known, in ns: from then on, nobody looks into the sets.
    until_ns: AtomicU64,
    hasher: RandomState,
    sets: [ArcSwap<Vec<PathMtu>>; SETS],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PathMtu {
    destination: IpAddr,
    mtu_bytes: u32,
    until_ns: u64,
}

impl Default for PathMtus {
    fn default() -> Self {
        let empty = Arc::default();
        Self {
            until_ns: AtomicU64::new(0),
            hasher: RandomState::new(),
            sets: array::from_fn(|_| ArcSwap::new(Arc::clone(&empty))),
        }
    }
}

impl PathMtus {
    /// Records what a router has told. A larger MTU than is known changes nothing, and neither does a smaller one than there
    /// may be of IPv6; of IPv4 it counts as the smallest.
    pub(super) fn learn(&self, destination: IpAddr, mtu_bytes: u32, now_ns: u64) {
        self.learn_until(destination, mtu_bytes, now_ns.saturating_add(EXPIRES_NS), now_ns);
    }

    /// Records what a router has told, as [`learn`](Self::learn), until a time.
    pub(super) fn learn_until(
        &self,
        destination: IpAddr,
        mtu_bytes: u32,
        until_ns: u64,
        now_ns: u64,
    ) {
        if destination.is_ipv6() && mtu_bytes < MTU_MIN_V6_BYTES {
            return;
        }
        let told = PathMtu { destination, mtu_bytes: mtu_bytes.max(MTU_MIN_BYTES), until_ns };
        let set = self.set_of(destination);
        if is_news(&set.load(), told, now_ns) {
            set.rcu(|known| with(known, told, now_ns));
            self.until_ns.fetch_max(until_ns, Ordering::Relaxed);
        }
    }

    /// MTU of the path to a destination, if a router has told of one.
    pub(super) fn find(&self, destination: IpAddr, now_ns: u64) -> Option<u32> {
        if self.until_ns.load(Ordering::Relaxed) <= now_ns {
            return None;
        }
        let known = self.set_of(destination).load();
        let path = known.iter().find(|path| path.destination == destination)?;
        (path.until_ns > now_ns).then_some(path.mtu_bytes)
    }

    fn set_of(&self, destination: IpAddr) -> &ArcSwap<Vec<PathMtu>> {
        let hash = self.hasher.hash_one(destination) % SETS as u64;
        &self.sets[usize::try_from(hash).unwrap_or(0)]
    }
}

/// True if this is to be recorded: routers repeat what they tell for each datagram.
fn is_news(known: &[PathMtu], told: PathMtu, now_ns: u64) -> bool {
    let mut others = known.iter().filter(|path| path.until_ns > now_ns);
    others.find(|path| path.destination == told.destination).is_none_or(|path| {
        let is_old = told.until_ns.saturating_sub(path.until_ns) >= RENEW_NS;
        told.mtu_bytes < path.mtu_bytes || told.mtu_bytes == path.mtu_bytes && is_old
    })
}

/// A set with one more path, in the place of those that are no longer known. If there are none, the first one leaves.
fn with(known: &[PathMtu], told: PathMtu, now_ns: u64) -> Vec<PathMtu> {
    let stays = |path: &&PathMtu| path.until_ns > now_ns && path.destination != told.destination;
    let mut paths: Vec<_> = known.iter().filter(stays).copied().collect();
    if paths.len() >= WAYS {
        paths.remove(0);
    }
    paths.push(told);
    paths
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
        assert_eq!((paths.find(address(1), 1), paths.find(v6, 1)), (Some(MTU_MIN_BYTES), None));
        paths.learn(v6, 1280, 0);
        assert_eq!(paths.find(v6, 1), Some(1280));
    }

    #[test]
    fn udp_30_known_paths_are_bounded() {
        let paths = PathMtus::default();
        for number in 0..10_000 {
            paths.learn(address(number), 1400, number.into());
        }
        let known: Vec<_> =
            (0..10_000).filter(|&number| paths.find(address(number), 10_000).is_some()).collect();
        assert!(known.len() <= SETS * WAYS, "{}", known.len());
        assert!(known.ends_with(&[9_998, 9_999]), "the last ones");
    }

    #[test]
    fn udp_30_repeated_claims_cost_nothing() {
        let paths = PathMtus::default();
        paths.learn(address(1), 1400, 7);
        let set = paths.set_of(address(1));
        let before = set.load_full();
        for now_ns in 8..1000 {
            paths.learn(address(1), 1400, now_ns);
            paths.learn(address(1), 1450, now_ns);
        }
        assert!(Arc::ptr_eq(&before, &set.load_full()), "what is known is not published again");
        paths.learn(address(1), 1400, 7 + RENEW_NS);
        assert_eq!(paths.find(address(1), 8 + EXPIRES_NS), Some(1400), "it is renewed");
        paths.learn(address(1), 1300, 8 + RENEW_NS);
        assert_eq!((before[0].mtu_bytes, paths.find(address(1), 9)), (1400, Some(1300)));
    }
}
