//! The Toeplitz hash of receive-side scaling.

use std::fmt;

use forebay_buf::carryless::KeyFactors;

/// Key that Microsoft published with RSS; the default of most network cards.
pub const STANDARD_KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// Key with a period of sixteen bits: both directions of a flow hash alike, because swapping equal
/// fields moves every bit by a multiple of the period.
pub const SYMMETRIC_KEY: [u8; 40] = {
    let mut key = [0x6d; 40];
    let mut at = 1;
    while at < key.len() {
        key[at] = 0x5a;
        at += 2;
    }
    key
};

/// Length of the longest input on the path: two IPv6 addresses and two ports.
pub const TUPLE_BYTES: usize = 36;

/// Length of the key for the longest input.
pub const TUPLE_KEY_BYTES: usize = TUPLE_BYTES + WINDOW_BYTES;

/// Part of the key that weighs one input bit: 32 bits.
const WINDOW_BYTES: usize = 4;

/// Key that is too short for its input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyTooShort {
    /// Length of the required key, in bytes.
    pub need_bytes: usize,
    /// Length of the given key, in bytes.
    pub have_bytes: usize,
}

impl fmt::Display for KeyTooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { need_bytes, have_bytes } = self;
        write!(f, "a Toeplitz key of {have_bytes} bytes is too short: {need_bytes} are needed")
    }
}

impl std::error::Error for KeyTooShort {}

/// Toeplitz under one key: multiplied where the CPU can, else by a table lookup for each byte of input.
#[derive(Clone)]
pub struct Toeplitz {
    input_bytes: usize,
    weights: KeyWeights,
}

/// Key, prepared for one of two ways to the same hash.
#[derive(Clone)]
enum KeyWeights {
    Products(KeyFactors),
    /// Contribution of each value of each input byte to the hash.
    Tables(Box<[ByteTable]>),
}

type ByteTable = [u32; 256];

impl Toeplitz {
    /// Prepares `key` for inputs of up to `input_bytes` bytes.
    ///
    /// # Errors
    /// If the key has fewer than `input_bytes + 4` bytes.
    pub fn new(key: &[u8], input_bytes: usize) -> Result<Self, KeyTooShort> {
        let (need_bytes, have_bytes) = (input_bytes + WINDOW_BYTES, key.len());
        if need_bytes > have_bytes {
            return Err(KeyTooShort { need_bytes, have_bytes });
        }
        let weights = match KeyFactors::new(&key[..need_bytes], input_bytes) {
            Some(factors) => KeyWeights::Products(factors),
            None => KeyWeights::tables(key, input_bytes),
        };
        Ok(Self { input_bytes, weights })
    }

    /// Hashes a pair of addresses and optionally a pair of ports, in network byte order.
    ///
    /// # Panics
    /// If they are longer than [`new`](Self::new) prepared for.
    #[inline]
    #[must_use]
    pub fn hash_tuple(&self, addresses: &[u8], ports: Option<&[u8; 4]>) -> u32 {
        assert!(
            addresses.len() + 4 * usize::from(ports.is_some()) <= self.input_bytes,
            "a short key"
        );
        // Ports of 0 contribute nothing, like none.
        let behind = ports.copied().unwrap_or_default();
        // By reference: of a copy, the loads of a multiplication would wait for several stores each.
        let hash = match (&self.weights, addresses.as_chunks::<8>()) {
            (KeyWeights::Products(factors), ([pair], [])) => {
                Some(factors.hash_tuple(std::array::from_ref(pair), behind))
            }
            (KeyWeights::Products(factors), (pairs @ [_, _, _, _], [])) => {
                pairs.first_chunk::<4>().map(|pairs| factors.hash_tuple(pairs, behind))
            }
            (KeyWeights::Tables(tables), ([pair], [])) => weigh_tuple(tables, pair, behind),
            _ => None,
        };
        hash.unwrap_or_else(|| self.hash_parts(addresses, ports))
    }

    /// Hashes addresses and ports of any length.
    fn hash_parts(&self, addresses: &[u8], ports: Option<&[u8; 4]>) -> u32 {
        match &self.weights {
            KeyWeights::Tables(tables) => {
                let (address_tables, port_tables) = tables.split_at(addresses.len());
                weigh(address_tables, addresses)
                    ^ ports.map_or(0, |ports| weigh(port_tables, ports))
            }
            KeyWeights::Products(factors) => match ports {
                None => factors.hash(addresses),
                Some(ports) => factors.hash(&[addresses, ports].concat()),
            },
        }
    }

    /// Hashes any input.
    ///
    /// # Errors
    /// If the input is longer than [`new`](Self::new) prepared for.
    pub fn hash(&self, input: &[u8]) -> Result<u32, KeyTooShort> {
        if input.len() > self.input_bytes {
            return Err(KeyTooShort {
                need_bytes: input.len() + WINDOW_BYTES,
                have_bytes: self.input_bytes + WINDOW_BYTES,
            });
        }
        Ok(self.hash_parts(input, None))
    }
}

impl KeyWeights {
    fn tables(key: &[u8], input_bytes: usize) -> Self {
        let windows = key.windows(WINDOW_BYTES + 1).take(input_bytes);
        Self::Tables(windows.map(byte_table).collect())
    }
}

/// [Weighs](weigh) the input of IPv4 without a loop; `None` if the key is too short for ports.
fn weigh_tuple(tables: &[ByteTable], addresses: &[u8; 8], ports: [u8; 4]) -> Option<u32> {
    let (address_tables, rest) = tables.split_first_chunk::<8>()?;
    let port_tables = rest.first_chunk::<4>()?;
    Some(weigh(address_tables, addresses) ^ weigh(port_tables, &ports))
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "without a loop where the length is known")]
fn weigh(tables: &[ByteTable], input: &[u8]) -> u32 {
    tables.iter().zip(input).fold(0, |hash, (table, &byte)| hash ^ table[usize::from(byte)])
}

/// Contribution of each value of the byte at the start of `window`: five bytes of key contain the
/// 32-bit windows of all its eight bits.
fn byte_table(window: &[u8]) -> ByteTable {
    let mut bits = [0u32; 8];
    let key = window.iter().fold(0u64, |key, &byte| key << 8 | u64::from(byte));
    for (bit, weight) in bits.iter_mut().enumerate() {
        #[expect(clippy::cast_possible_truncation, reason = "the low 32 bits are the window")]
        let window = (key >> (8 - bit)) as u32;
        *weight = window;
    }
    std::array::from_fn(|value| {
        let set = |bit: &usize| value >> (7 - bit) & 1 == 1;
        (0..8).filter(set).fold(0, |hash, bit| hash ^ bits[bit])
    })
}

impl fmt::Debug for Toeplitz {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Toeplitz(inputs of up to {} bytes)", self.input_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Slow twin: one bit of input at a time, with the key shifted along.
    fn slow_toeplitz(key: &[u8], input: &[u8]) -> u32 {
        let key_bit = |bit: usize| u32::from(key[bit / 8] >> (7 - bit % 8) & 1);
        let mut hash = 0;
        for bit in 0..input.len() * 8 {
            if input[bit / 8] >> (7 - bit % 8) & 1 == 1 {
                hash ^= (0..32).fold(0, |window, at| window << 1 | key_bit(bit + at));
            }
        }
        hash
    }

    /// As chosen for this CPU, and by tables.
    fn both(key: &[u8], input_bytes: usize) -> [Toeplitz; 2] {
        let chosen = Toeplitz::new(key, input_bytes).unwrap();
        [chosen, Toeplitz { input_bytes, weights: KeyWeights::tables(key, input_bytes) }]
    }

    fn hash_v4(key: &[u8], source: ([u8; 4], u16), destination: ([u8; 4], u16)) -> [u32; 2] {
        let toeplitz = Toeplitz::new(key, TUPLE_BYTES).unwrap();
        let addresses = [source.0, destination.0].concat();
        let ports = [source.1.to_be_bytes(), destination.1.to_be_bytes()];
        let ports: [u8; 4] = ports.as_flattened().try_into().unwrap();
        [toeplitz.hash_tuple(&addresses, None), toeplitz.hash_tuple(&addresses, Some(&ports))]
    }

    #[test]
    fn rps_5_microsofts_verification_suite() {
        let (source, destination) = (([66, 9, 149, 187], 2794), ([161, 142, 100, 80], 1766));
        assert_eq!(hash_v4(&STANDARD_KEY, source, destination), [0x323e_8fc2, 0x51cc_c178]);
    }

    #[test]
    fn symmetric_key_hashes_both_ways() {
        let (one, other) = (([66, 9, 149, 187], 2794), ([161, 142, 100, 80], 1766));
        assert_eq!(hash_v4(&SYMMETRIC_KEY, one, other), hash_v4(&SYMMETRIC_KEY, other, one));
        assert_ne!(hash_v4(&STANDARD_KEY, one, other), hash_v4(&STANDARD_KEY, other, one));
    }

    #[test]
    fn short_key_is_refused() {
        let refused = Toeplitz::new(&STANDARD_KEY[..39], TUPLE_BYTES).unwrap_err();
        assert_eq!(refused, KeyTooShort { need_bytes: 40, have_bytes: 39 });
        let toeplitz = Toeplitz::new(&STANDARD_KEY, 12).unwrap();
        assert!(toeplitz.hash(&[0; 13]).is_err());
    }

    proptest! {
        #[test]
        fn lookup_tables_equal_shifted_key(
            key in proptest::collection::vec(any::<u8>(), 5..60),
            input in proptest::collection::vec(any::<u8>(), 0..56),
        ) {
            let input = &input[..input.len().min(key.len() - WINDOW_BYTES)];
            let hash = slow_toeplitz(&key, input);
            for toeplitz in both(&key, input.len()) {
                prop_assert_eq!(toeplitz.hash(input).unwrap(), hash);
                let ports_at = input.len().saturating_sub(4);
                if let (addresses, Some(ports)) = (&input[..ports_at], input.last_chunk::<4>()) {
                    prop_assert_eq!(toeplitz.hash_tuple(addresses, Some(ports)), hash);
                }
                prop_assert_eq!(toeplitz.hash_tuple(input, None), hash);
            }
        }

        /// Whatever way this CPU takes, the other one has the same hash.
        #[test]
        fn rps_5_both_ways_hash_tuples_alike(
            key in proptest::collection::vec(any::<u8>(), 40..60),
            v4: [u8; 8],
            v6: [u8; 32],
            ports: Option<[u8; 4]>,
        ) {
            for addresses in [v4.as_slice(), &v6] {
                let input = [addresses, ports.as_ref().map_or(&[], |ports| ports)].concat();
                for toeplitz in both(&key, TUPLE_BYTES) {
                    let hash = toeplitz.hash_tuple(addresses, ports.as_ref());
                    prop_assert_eq!(hash, slow_toeplitz(&key, &input));
                }
            }
        }
    }
}
