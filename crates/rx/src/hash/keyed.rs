//! SipHash-1-3 over addresses and ports, under a secret key.

use siphasher::sip::SipHasher13;

use crate::flow_key::QUIC_ID_BYTES_MAX;

/// Length of the secret key, in bytes.
pub const KEYED_KEY_BYTES: usize = 16;

/// Hash whose collisions only the holder of the key can find.
///
/// The kernel hashes flows with SipHash for the same reason: with a known function, an attacker
/// picks ports until all flows meet on one CPU.
#[derive(Clone, Debug)]
pub struct Keyed {
    hasher: SipHasher13,
    state: SipState,
    symmetric: bool,
}

/// Length of two IPv6 addresses and two ports.
const LONGEST_INPUT_BYTES: usize = 2 * 16 + 2 * 2;

/// Length of an ID, padded, and its length: no pair of addresses with or without ports has so many
/// bytes (8, 12, 32 or 36).
const ID_INPUT_BYTES: usize = QUIC_ID_BYTES_MAX as usize + 1;

impl Keyed {
    /// Creates a hash under `key`; if `symmetric`, both directions of a flow hash alike.
    #[must_use]
    pub fn new(key: &[u8; KEYED_KEY_BYTES], symmetric: bool) -> Self {
        Self { hasher: SipHasher13::new_with_key(key), state: SipState::new(key), symmetric }
    }

    /// True if both directions of a flow hash alike.
    pub(super) fn is_symmetric(&self) -> bool {
        self.symmetric
    }

    /// Hashes a pair of addresses (4 + 4 or 16 + 16 bytes) and optionally a pair of ports, all in
    /// network byte order.
    #[inline]
    #[must_use]
    pub fn hash(&self, addresses: &[u8], ports: Option<&[u8; 4]>) -> u32 {
        // The last word has the length in its uppermost byte, and before that the bytes that fill no word.
        let len = (addresses.len() as u64 + if ports.is_some() { 4 } else { 0 }) << 56;
        let last = len | ports.map_or(0, |ports| u32::from_le_bytes(*ports).into());
        match (self.symmetric, addresses.as_chunks()) {
            (false, (&[pair], [])) => fold(self.state.hash([u64::from_le_bytes(pair), last])),
            (false, (&[a, b, c, d], [])) => {
                let [a, b, c, d] = [a, b, c, d].map(u64::from_le_bytes);
                fold(self.state.hash([a, b, c, d, last]))
            }
            _ => self.hash_bytes(addresses, ports),
        }
    }

    /// Hashes byte by byte, and both directions alike if that is asked for.
    fn hash_bytes(&self, addresses: &[u8], ports: Option<&[u8; 4]>) -> u32 {
        let ports = ports.map_or([].as_slice(), |ports| ports.as_slice());
        let mut input = [0; LONGEST_INPUT_BYTES];
        let (len, swap) = (addresses.len() + ports.len(), self.swaps(addresses, ports));
        let (first, second) = input.split_at_mut(addresses.len());
        copy_pair(first, addresses, swap);
        copy_pair(&mut second[..ports.len()], ports, swap);
        fold(self.hasher.hash(&input[..len]))
    }

    /// Hashes a connection ID of at most 20 bytes, which has no endpoints to swap. No input is as
    /// long as one of addresses and ports: else a stranger could choose an ID that shares the hash
    /// of somebody's flow.
    #[must_use]
    pub fn hash_id(&self, id: &[u8]) -> u32 {
        let mut input = [0; ID_INPUT_BYTES];
        let len = id.len().min(QUIC_ID_BYTES_MAX.into());
        input[..len].copy_from_slice(&id[..len]);
        input[ID_INPUT_BYTES - 1] = u8::try_from(len).unwrap_or(QUIC_ID_BYTES_MAX);
        fold(self.hasher.hash(&input))
    }

    /// True if the second endpoint is hashed first, so that both directions hash alike.
    fn swaps(&self, addresses: &[u8], ports: &[u8]) -> bool {
        let (source, destination) = addresses.split_at(addresses.len() / 2);
        let (source_port, destination_port) = ports.split_at(ports.len() / 2);
        self.symmetric && (source, source_port) > (destination, destination_port)
    }
}

/// State of SipHash before the first word.
#[derive(Clone, Copy, Debug)]
struct SipState([u64; 4]);

impl SipState {
    fn new(key: &[u8; KEYED_KEY_BYTES]) -> Self {
        let key: &[[u8; 8]] = key.as_chunks().0;
        let [k0, k1] = [key[0], key[1]].map(u64::from_le_bytes);
        Self([
            k0 ^ 0x736f_6d65_7073_6575,
            k1 ^ 0x646f_7261_6e64_6f6d,
            k0 ^ 0x6c79_6765_6e65_7261,
            k1 ^ 0x7465_6462_7974_6573,
        ])
    }

    /// SipHash-1-3 of whole words, of which the last one has the length in its uppermost byte.
    #[inline]
    fn hash<const WORDS: usize>(mut self, words: [u64; WORDS]) -> u64 {
        for word in words {
            self.0[3] ^= word;
            self = self.round();
            self.0[0] ^= word;
        }
        self.0[2] ^= 0xff;
        let [a, b, c, d] = self.round().round().round().0;
        a ^ b ^ c ^ d
    }

    #[inline]
    fn round(self) -> Self {
        let Self([mut a, mut b, mut c, mut d]) = self;
        a = a.wrapping_add(b);
        c = c.wrapping_add(d);
        b = b.rotate_left(13) ^ a;
        d = d.rotate_left(16) ^ c;
        a = a.rotate_left(32);
        c = c.wrapping_add(b);
        a = a.wrapping_add(d);
        b = b.rotate_left(17) ^ c;
        d = d.rotate_left(21) ^ a;
        Self([a, b, c.rotate_left(32), d])
    }
}

fn copy_pair(to: &mut [u8], pair: &[u8], swap: bool) {
    let half = pair.len() / 2;
    to.copy_from_slice(pair);
    if swap {
        to.rotate_left(half);
    }
}

/// XOR of both halves of a 64-bit hash.
fn fold(hash: u64) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "the halves are what is wanted")]
    let (high, low) = ((hash >> 32) as u32, hash as u32);
    high ^ low
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: [u8; 16] = [7; 16];
    const SOURCE: [u8; 4] = [10, 0, 0, 1];
    const DESTINATION: [u8; 4] = [10, 0, 0, 2];

    fn both_ways(keyed: &Keyed, source_port: [u8; 2], destination_port: [u8; 2]) -> [u32; 2] {
        let ports = [source_port, destination_port];
        let there = [SOURCE, DESTINATION].concat();
        let back = [DESTINATION, SOURCE].concat();
        let ports_there: [u8; 4] = ports.as_flattened().try_into().unwrap();
        let ports_back = [ports_there[2], ports_there[3], ports_there[0], ports_there[1]];
        [keyed.hash(&there, Some(&ports_there)), keyed.hash(&back, Some(&ports_back))]
    }

    #[test]
    fn symmetric_hash_ignores_direction() {
        for (source_port, destination_port) in [([0, 53], [200, 1]), ([200, 1], [0, 53])] {
            let [there, back] = both_ways(&Keyed::new(&KEY, true), source_port, destination_port);
            assert_eq!(there, back);
            let [there, back] = both_ways(&Keyed::new(&KEY, false), source_port, destination_port);
            assert_ne!(there, back);
        }
    }

    #[test]
    fn another_key_gives_another_hash() {
        let [first, second] =
            [KEY, [8; 16]].map(|key| Keyed::new(&key, false).hash(&[1; 32], None));
        assert_ne!(first, second);
    }

    #[test]
    fn ports_and_absence_both_count() {
        let keyed = Keyed::new(&KEY, false);
        let hashes =
            [None, Some(&[0; 4]), Some(&[0, 0, 0, 1])].map(|ports| keyed.hash(&[1; 8], ports));
        assert!(hashes[0] != hashes[1] && hashes[1] != hashes[2]);
    }

    proptest! {
        /// Slow twin: the same hash, of bytes.
        #[test]
        fn rps_5_words_hash_like_bytes(
            key: [u8; 16],
            v4: [u8; 8],
            v6: [u8; 32],
            ports: Option<[u8; 4]>,
        ) {
            let keyed = Keyed::new(&key, false);
            for addresses in [v4.as_slice(), &v6] {
                let hash = keyed.hash(addresses, ports.as_ref());
                prop_assert_eq!(hash, keyed.hash_bytes(addresses, ports.as_ref()));
            }
        }
    }
}
