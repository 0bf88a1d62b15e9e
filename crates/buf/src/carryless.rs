//! Toeplitz hash by multiplication without carries: one instruction for four bytes of input.
//!
//! Each bit of the hash is the parity of the input's bits under the key, shifted by the place of that bit. This is a
//! coefficient of the product of input and key as polynomials over bits, if the input's first bit is its highest
//! power and the key's first bit its lowest.
//!
//! The module is in this crate because instructions that not every CPU has are unsafe to call.

/// Bytes of two words of 32 bits, which are prepared together.
const PAIR_BYTES: usize = 8;

/// Number of pairs in the longest pair of addresses, IPv6.
const ADDRESS_PAIRS_MAX: usize = 4;

/// Factors of two words of input: for each, the 64 bits of the key from there on, the first one lowest.
type PairFactors = [u64; 2];

/// Key of a Toeplitz hash, prepared for multiplication. Exists only on a CPU that has the instruction.
#[derive(Clone, Debug)]
pub struct KeyFactors {
    /// By pair of words; those behind the longest input are there, too.
    pairs: Box<[PairFactors]>,
}

impl KeyFactors {
    /// Prepares `key` for inputs of up to `input_bytes` bytes. Bytes that the key lacks are 0. `None` if this CPU has
    /// no PCLMULQDQ or no AVX.
    #[must_use]
    pub fn new(key: &[u8], input_bytes: usize) -> Option<Self> {
        if !has_multiplication() {
            return None;
        }
        let byte = |at: usize| key.get(at).copied().unwrap_or(0);
        let factor = |at: usize| {
            u64::from_be_bytes(std::array::from_fn(|next| byte(at + next))).reverse_bits()
        };
        let pairs = 0..=input_bytes.div_ceil(PAIR_BYTES).max(ADDRESS_PAIRS_MAX);
        let starts = pairs.map(|pair| pair * PAIR_BYTES);
        Some(Self { pairs: starts.map(|start| [factor(start), factor(start + 4)]).collect() })
    }

    /// Hashes two addresses and two ports: 8 + 4 or 32 + 4 bytes.
    #[inline]
    #[must_use]
    pub fn hash_tuple<const PAIRS: usize>(
        &self,
        addresses: &[[u8; PAIR_BYTES]; PAIRS],
        ports: [u8; 4],
    ) -> u32 {
        const { assert!(PAIRS <= ADDRESS_PAIRS_MAX, "pairs of words that are always prepared") };
        match self.pairs.split_first_chunk::<PAIRS>() {
            Some((factors, &[[behind, _], ..])) => product(factors, behind, addresses, ports),
            _ => unreachable!("`new` has prepared a pair behind the longest addresses"),
        }
    }

    /// Hashes any input of at most the prepared length; bytes behind that are ignored.
    #[must_use]
    pub fn hash(&self, input: &[u8]) -> u32 {
        let (pairs, rest) = input.as_chunks::<PAIR_BYTES>();
        let mut padded = [0; PAIR_BYTES];
        padded[..rest.len()].copy_from_slice(rest);
        let all = pairs.iter().chain([&padded]).zip(&self.pairs);
        all.fold(0, |hash, (pair, factors)| hash ^ product(&[*factors], 0, &[*pair], [0; 4]))
    }
}

#[cfg(target_arch = "x86_64")]
fn has_multiplication() -> bool {
    std::arch::is_x86_feature_detected!("pclmulqdq") && std::arch::is_x86_feature_detected!("avx")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_multiplication() -> bool {
    false
}

/// Hash of pairs of words, and of one word behind them. For [`KeyFactors`] only.
#[cfg(target_arch = "x86_64")]
#[inline]
fn product<const PAIRS: usize>(
    factors: &[PairFactors; PAIRS],
    behind_factor: u64,
    pairs: &[[u8; PAIR_BYTES]; PAIRS],
    behind: [u8; 4],
) -> u32 {
    // SAFETY: `KeyFactors::new`, without which there are no factors, has found both instruction sets on this CPU.
    unsafe { x86::product(factors, behind_factor, pairs, behind) }
}

#[cfg(not(target_arch = "x86_64"))]
fn product<const PAIRS: usize>(
    _: &[PairFactors; PAIRS],
    _: u64,
    _: &[[u8; PAIR_BYTES]; PAIRS],
    _: [u8; 4],
) -> u32 {
    unreachable!("there are no factors on this CPU")
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #[allow(clippy::wildcard_imports, reason = "the names are the instructions'")]
    use std::arch::x86_64::*;

    use super::{PAIR_BYTES, PairFactors};

    /// Power of the hash's first bit in a product: that of the input's first bit.
    const FIRST_BIT: i32 = 31;

    #[target_feature(enable = "avx,pclmulqdq")]
    pub(super) fn product<const PAIRS: usize>(
        factors: &[PairFactors; PAIRS],
        behind_factor: u64,
        pairs: &[[u8; PAIR_BYTES]; PAIRS],
        behind: [u8; 4],
    ) -> u32 {
        // Only the lower half of each product is used, where all bits of the hash are.
        let behind = _mm_cvtsi64_si128(u32::from_be_bytes(behind).into());
        let factor = _mm_cvtsi64_si128(behind_factor.cast_signed());
        let mut sum = _mm_clmulepi64_si128::<0x00>(behind, factor);
        for (factors, pair) in factors.iter().zip(pairs) {
            let [first, second] = factors.map(u64::cast_signed);
            let (words, factors) = (words(pair), _mm_set_epi64x(second, first));
            let products = _mm_xor_si128(
                _mm_clmulepi64_si128::<0x00>(words, factors),
                _mm_clmulepi64_si128::<0x11>(words, factors),
            );
            sum = _mm_xor_si128(sum, products);
        }
        let hash = _mm_cvtsi128_si32(reversed(_mm_srli_epi64::<FIRST_BIT>(sum)));
        hash.cast_unsigned().swap_bytes()
    }

    /// Each byte with its bits in reverse order: those of its halves by a table of 16.
    #[target_feature(enable = "avx")]
    fn reversed(bytes: __m128i) -> __m128i {
        let upper = _mm_setr_epi8(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
        let lower = _mm_slli_epi16::<4>(upper);
        let half = _mm_set1_epi8(0x0f);
        let from_upper = _mm_and_si128(_mm_srli_epi16::<4>(bytes), half);
        let from_lower = _mm_and_si128(bytes, half);
        _mm_or_si128(_mm_shuffle_epi8(upper, from_upper), _mm_shuffle_epi8(lower, from_lower))
    }

    /// The two words of a pair, each in a half of its own, with the value that it has in network byte order.
    #[target_feature(enable = "avx")]
    fn words(pair: &[u8; PAIR_BYTES]) -> __m128i {
        let places = _mm_setr_epi8(3, 2, 1, 0, -1, -1, -1, -1, 7, 6, 5, 4, -1, -1, -1, -1);
        let pair = _mm_cvtsi64_si128(u64::from_le_bytes(*pair).cast_signed());
        _mm_shuffle_epi8(pair, places)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Slow twin: one bit of input at a time, with the key shifted along.
    fn slow_toeplitz(key: &[u8], input: &[u8]) -> u32 {
        let key_bit =
            |bit: usize| u32::from(key.get(bit / 8).copied().unwrap_or(0) >> (7 - bit % 8) & 1);
        let is_set = |bit: &usize| input[bit / 8] >> (7 - bit % 8) & 1 == 1;
        let window = |bit: usize| (0..32).fold(0, |window, at| window << 1 | key_bit(bit + at));
        (0..input.len() * 8).filter(is_set).fold(0, |hash, bit| hash ^ window(bit))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 512 }))]

        #[test]
        fn rps_5_products_equal_shifted_key(
            key in proptest::collection::vec(any::<u8>(), 0..60),
            input in proptest::collection::vec(any::<u8>(), 0..56),
        ) {
            let Some(factors) = KeyFactors::new(&key, input.len()) else { return Ok(()) };
            prop_assert_eq!(factors.hash(&input), slow_toeplitz(&key, &input));
            let (pairs, ports) = ([[1, 2, 3, 4, 5, 6, 7, 8]; 4], [9, 10, 11, 12]);
            for bytes in input.as_chunks::<12>().0 {
                let (addresses, ports) = bytes.split_at(8);
                let addresses: [u8; 8] = addresses.try_into().unwrap();
                let hash = factors.hash_tuple(&[addresses], ports.try_into().unwrap());
                prop_assert_eq!(hash, slow_toeplitz(&key, bytes));
            }
            let long = [pairs.as_flattened(), &ports].concat();
            prop_assert_eq!(factors.hash_tuple(&pairs, ports), slow_toeplitz(&key, &long));
            for bytes in input.as_chunks::<36>().0 {
                let (addresses, ports) = bytes.split_at(32);
                let pairs: &[[u8; 8]; 4] = addresses.as_chunks().0.try_into().unwrap();
                let hash = factors.hash_tuple(pairs, ports.try_into().unwrap());
                prop_assert_eq!(hash, slow_toeplitz(&key, bytes));
            }
        }
    }
}
