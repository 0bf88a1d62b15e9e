//! Identifications of datagrams that leave in fragments.

use std::fmt;
use std::hash::Hasher;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use siphasher::sip::SipHasher13;

/// Number of counters (`IP_IDENTS_SZ` of a small host). Pairs of addresses that share one see each
/// other's steps, and cannot know which pairs share.
const COUNTERS: usize = 2048;

/// Source of identifications (RFC 7739, section 5.3): each pair of addresses has a secret start, and
/// counts on with one of many counters, so no host learns how much is sent to others.
pub(super) struct FragmentIds {
    key: SipHasher13,
    counters: Box<[AtomicU32]>,
}

impl FragmentIds {
    pub(super) fn new(key: [u8; 16]) -> Self {
        let counters = (0..COUNTERS).map(|_| AtomicU32::new(0)).collect();
        Self { key: SipHasher13::new_with_key(&key), counters }
    }

    /// Identification of the next datagram between two addresses.
    pub(super) fn next(&self, source: IpAddr, destination: IpAddr) -> u32 {
        self.take(source, destination, 1)
    }

    /// Identification of the first of several datagrams, whose others follow it.
    pub(super) fn take(&self, source: IpAddr, destination: IpAddr, count: u32) -> u32 {
        let mut hasher = self.key;
        for address in [source, destination] {
            match address {
                IpAddr::V4(address) => hasher.write(&address.octets()),
                IpAddr::V6(address) => hasher.write(&address.octets()),
            }
        }
        let [a, b, c, d, e, f, ..] = hasher.finish().to_le_bytes();
        let counter = usize::from(u16::from_le_bytes([e, f])) % COUNTERS;
        let before = self.counters[counter].fetch_add(count, Ordering::Relaxed);
        u32::from_le_bytes([a, b, c, d]).wrapping_add(before)
    }
}

impl fmt::Debug for FragmentIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FragmentIds")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(address: &str) -> IpAddr {
        address.parse().unwrap()
    }

    #[test]
    fn udp_18_ids_tell_nothing_of_others() {
        let ids = FragmentIds::new([5; 16]);
        let (own, watcher) = (ip("10.9.0.1"), ip("10.9.0.2"));
        let mut before = ids.next(own, watcher);
        let mut shared = 0;
        for last in 3..=202 {
            let other = ip(&format!("10.9.0.{last}"));
            ids.next(own, other);
            let next = ids.next(own, watcher);
            shared += next.wrapping_sub(before) - 1;
            before = next;
        }
        assert!(shared <= 2, "{shared} of 200 others share the counter");
    }

    #[test]
    fn udp_18_ids_of_pair_never_repeat() {
        for key in 0..16 {
            let ids = FragmentIds::new([key; 16]);
            let (from, to) = (ip("fd00::1"), ip("fd00::2"));
            let mut seen: Vec<_> = (0..65_536).map(|_| ids.next(from, to) & 0xffff).collect();
            seen.sort_unstable();
            assert!(seen.iter().copied().eq(0..65_536));
        }
    }
}
