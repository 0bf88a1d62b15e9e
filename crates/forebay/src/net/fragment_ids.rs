//! Identifications of datagrams that leave in fragments.

use std::fmt;
use std::hash::Hasher;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use siphasher::sip::SipHasher13;

/// Source of identifications (RFC 7739): each pair of addresses has a secret start of its own, and all count
/// on together, so none comes twice until the numbers are through.
pub(super) struct FragmentIds {
    key: SipHasher13,
    next: AtomicU32,
}

impl FragmentIds {
    pub(super) fn new(key: [u8; 16]) -> Self {
        Self { key: SipHasher13::new_with_key(&key), next: AtomicU32::new(0) }
    }

    /// Identification of the next datagram between two addresses.
    pub(super) fn next(&self, source: IpAddr, destination: IpAddr) -> u32 {
        let mut hasher = self.key;
        for address in [source, destination] {
            match address {
                IpAddr::V4(address) => hasher.write(&address.octets()),
                IpAddr::V6(address) => hasher.write(&address.octets()),
            }
        }
        let [a, b, c, d, ..] = hasher.finish().to_le_bytes();
        let count = self.next.fetch_add(1, Ordering::Relaxed);
        u32::from_le_bytes([a, b, c, d]).wrapping_add(count)
    }
}

impl fmt::Debug for FragmentIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FragmentIds")
    }
}
