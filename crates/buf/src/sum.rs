//! Sum of bytes for the Internet checksum (RFC 1071), vectorized for the CPU that runs it.
//!
//! Implementations return different numbers that are equal once carries are folded in. RFC 1071
//! allows two liberties, and both are taken: 16-bit words may be summed two or four at a time, and
//! from any even offset in any lane.
//!
//! The module is in this crate because instructions that not every CPU has are unsafe to call.

/// Length in bytes below which vectors cost more than they save.
const SHORT_BYTES: usize = 128;

/// Sum of the 16-bit words of `bytes` in the machine's byte order, carries not folded; padded with
/// a zero byte if their number is odd.
///
/// Exact up to 16 GiB. The sum of a packet leaves room to add many others with `+`.
#[inline]
#[must_use]
pub fn sum(bytes: &[u8]) -> u64 {
    // Fewer than 2^32 words of 32 bits: their sum fits in 64 bits.
    debug_assert!(bytes.len() / 4 < u32::MAX as usize, "{} bytes are too many", bytes.len());
    if bytes.len() < SHORT_BYTES { short(bytes) } else { long(bytes) }
}

/// Copies bytes and sums them in the same pass, which takes little longer than copying.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn copy_and_sum(to: &mut [u8], from: &[u8]) -> u64 {
    assert_eq!(to.len(), from.len(), "what is copied fits");
    #[cfg(target_arch = "x86_64")]
    if from.len() >= SHORT_BYTES {
        if avx512::is_fast() {
            // SAFETY: this CPU has AVX-512F and AVX-512BW, as was just found.
            return unsafe { avx512::copy_and_sum(to, from) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: this CPU has AVX2, as was just found.
            return unsafe { avx2::copy_and_sum(to, from) };
        }
    }
    to.copy_from_slice(from);
    sum(to)
}

fn long(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if avx512::is_fast() {
            // SAFETY: this CPU has AVX-512F and AVX-512BW, as was just found.
            return unsafe { avx512::sum(bytes) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: this CPU has AVX2, as was just found.
            return unsafe { avx2::sum(bytes) };
        }
    }
    portable(bytes)
}

/// Sums eight bytes at a time, without vectors.
#[inline]
fn short(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    // The upper half collects the carries.
    let mut sum = words.iter().map(|word| u128::from(u64::from_ne_bytes(*word))).sum::<u128>();
    if !rest.is_empty() {
        let rest = match bytes.last_chunk::<8>() {
            // Load the last eight bytes and shift out those that a word had: no branch for each
            // length.
            Some(last) => u64::from_le_bytes(*last) >> (64 - 8 * rest.len()),
            None => rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
        };
        sum += u128::from(u64::from_ne_bytes(rest.to_le_bytes()));
    }
    let (carries, low) = (sum >> 64, sum & u128::from(u64::MAX));
    let sum = carries + (low >> 32) + (low & u128::from(u32::MAX));
    u64::try_from(sum).unwrap_or(u64::MAX)
}

/// Sums on any CPU; the reference for the implementations that need certain CPUs.
fn portable(bytes: &[u8]) -> u64 {
    // Eight 64-bit lanes of 32-bit words, the even ones and the odd ones: the compiler vectorizes
    // this.
    const BLOCK_BYTES: usize = 32;
    let (mut even, mut odd) = ([0u64; BLOCK_BYTES / 8], [0u64; BLOCK_BYTES / 8]);
    let (blocks, rest) = bytes.as_chunks::<BLOCK_BYTES>();
    for block in blocks {
        let (pairs, _) = block.as_chunks::<8>();
        for ((even, odd), pair) in even.iter_mut().zip(&mut odd).zip(pairs) {
            let pair = u64::from_ne_bytes(*pair);
            *even += pair & u64::from(u32::MAX);
            *odd += pair >> 32;
        }
    }
    even.iter().chain(&odd).copied().chain([short(rest)]).sum()
}

/// Number of bytes before the first boundary of `align` bytes, if vectors from there hold whole
/// 16-bit words. From an odd address none do: 0, and all loads are unaligned, which is slower.
#[cfg(target_arch = "x86_64")]
fn head_len(bytes: &[u8], align: usize) -> usize {
    let head_len = bytes.as_ptr().addr().wrapping_neg() % align;
    if head_len.is_multiple_of(2) { head_len.min(bytes.len()) } else { 0 }
}

/// Four lanes of 64 bits (AVX2).
///
/// Vectors are loaded at aligned addresses, since a load that crosses cache lines counts twice. The
/// bytes before and after come from the first and the last 32 bytes, masked.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    #[allow(clippy::wildcard_imports, reason = "the names are the instructions'")]
    use std::arch::x86_64::*;

    const VECTOR_BYTES: usize = 32;

    #[target_feature(enable = "avx2")]
    pub(super) fn sum(bytes: &[u8]) -> u64 {
        // With an odd number of bytes, words of the last 32 would straddle the word boundaries.
        let (even, odd) = bytes.split_at(bytes.len() & !1);
        let (Some(first), Some(last)) = (even.first_chunk(), even.last_chunk()) else {
            return super::short(bytes);
        };
        let (head, rest) = even.split_at(super::head_len(even, VECTOR_BYTES));
        let (vectors, tail) = rest.as_chunks::<VECTOR_BYTES>();
        let (pairs, single) = vectors.as_chunks::<2>();

        // Two accumulators hide the latency of an addition; more would only have to be summed up.
        let mut one = Vectors::of(keep_first(load(first), head.len()));
        let mut two = Vectors::of(keep_last(load(last), tail.len()));
        for [first, second] in pairs {
            one.add(load(first));
            two.add(load(second));
        }
        for single in single {
            one.add(load(single));
        }
        one.add_up(two) + odd.first().map_or(0, |byte| u64::from(*byte))
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn copy_and_sum(to: &mut [u8], from: &[u8]) -> u64 {
        let (from, from_tail) = from.as_chunks::<VECTOR_BYTES>();
        let (to, to_tail) = to.as_chunks_mut::<VECTOR_BYTES>();
        to_tail.copy_from_slice(from_tail);
        let zero = _mm256_setzero_si256();
        let (mut one, mut two) = (Vectors::of(zero), Vectors::of(zero));
        let (from_pairs, from_single) = from.as_chunks::<2>();
        let (to_pairs, to_single) = to.as_chunks_mut::<2>();
        for (to, from) in to_pairs.iter_mut().zip(from_pairs) {
            let (first, second) = (load(&from[0]), load(&from[1]));
            store(&mut to[0], first);
            store(&mut to[1], second);
            one.add(first);
            two.add(second);
        }
        for (to, from) in to_single.iter_mut().zip(from_single) {
            let vector = load(from);
            store(to, vector);
            one.add(vector);
        }
        // What was copied: a peer that shares `from` may have changed it since.
        one.add_up(two) + super::short(to_tail)
    }

    /// Sums of 64-bit lanes, each a pair of 32-bit words.
    #[derive(Clone, Copy)]
    struct Vectors {
        /// Sum of the pairs, modulo 2^64 in each lane.
        pairs: __m256i,
        /// Sum of the pairs' upper words, exact; the lower words' sum follows from the two.
        uppers: __m256i,
    }

    impl Vectors {
        #[target_feature(enable = "avx2")]
        fn of(pairs: __m256i) -> Self {
            Self { pairs, uppers: _mm256_srli_epi64::<32>(pairs) }
        }

        #[target_feature(enable = "avx2")]
        fn add(&mut self, pairs: __m256i) {
            self.pairs = _mm256_add_epi64(self.pairs, pairs);
            self.uppers = _mm256_add_epi64(self.uppers, _mm256_srli_epi64::<32>(pairs));
        }

        #[target_feature(enable = "avx2")]
        fn add_up(self, other: Self) -> u64 {
            let pairs = _mm256_add_epi64(self.pairs, other.pairs);
            let uppers = _mm256_add_epi64(self.uppers, other.uppers);
            let lowers = _mm256_sub_epi64(pairs, _mm256_slli_epi64::<32>(uppers));
            let four = _mm256_add_epi64(lowers, uppers);
            let upper_two = _mm256_extracti128_si256::<1>(four);
            let two = _mm_add_epi64(_mm256_castsi256_si128(four), upper_two);
            let one = _mm_add_epi64(two, _mm_unpackhi_epi64(two, two));
            _mm_cvtsi128_si64(one).cast_unsigned()
        }
    }

    #[target_feature(enable = "avx2")]
    fn load(bytes: &[u8; VECTOR_BYTES]) -> __m256i {
        // SAFETY: only the array's bytes are read; the instruction needs no alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx2")]
    fn store(bytes: &mut [u8; VECTOR_BYTES], vector: __m256i) {
        // SAFETY: only the array's bytes are written; the instruction needs no alignment.
        unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), vector) };
    }

    /// The vector with zeros for all but its first `count` bytes, `count` < 32.
    #[target_feature(enable = "avx2")]
    fn keep_first(vector: __m256i, count: usize) -> __m256i {
        let count = _mm256_set1_epi8(count.to_le_bytes()[0].cast_signed());
        _mm256_and_si256(vector, _mm256_cmpgt_epi8(count, places()))
    }

    /// The vector with zeros for all but its last `count` bytes, `count` < 32.
    #[target_feature(enable = "avx2")]
    fn keep_last(vector: __m256i, count: usize) -> __m256i {
        let before = _mm256_set1_epi8((VECTOR_BYTES - 1 - count).to_le_bytes()[0].cast_signed());
        _mm256_and_si256(vector, _mm256_cmpgt_epi8(places(), before))
    }

    #[target_feature(enable = "avx2")]
    #[rustfmt::skip]
    fn places() -> __m256i {
        _mm256_setr_epi8(
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
            16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
        )
    }
}

/// Eight lanes of 64 bits (AVX-512), a cache line; see [`avx2`]. Masked loads read the rest.
#[cfg(target_arch = "x86_64")]
mod avx512 {
    #[allow(clippy::wildcard_imports, reason = "the names are the instructions'")]
    use std::arch::x86_64::*;

    const VECTOR_BYTES: usize = 64;

    /// True if AVX-512 pays off. VBMI is not used, but CPUs that have AVX-512 without it lower
    /// their clock for it.
    pub(super) fn is_fast() -> bool {
        use std::arch::is_x86_feature_detected as has;
        has!("avx512f") && has!("avx512bw") && has!("avx512vbmi")
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn sum(bytes: &[u8]) -> u64 {
        let (head, rest) = bytes.split_at(super::head_len(bytes, VECTOR_BYTES));
        let (vectors, tail) = rest.as_chunks::<VECTOR_BYTES>();
        let (pairs, single) = vectors.as_chunks::<2>();

        let mut one = PairSums::of(load_part(head));
        let mut two = PairSums::of(load_part(tail));
        for [first, second] in pairs {
            one.add(load(first));
            two.add(load(second));
        }
        for single in single {
            one.add(load(single));
        }
        one.add_up(two)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn copy_and_sum(to: &mut [u8], from: &[u8]) -> u64 {
        let (from, from_tail) = from.as_chunks::<VECTOR_BYTES>();
        let (to, to_tail) = to.as_chunks_mut::<VECTOR_BYTES>();
        to_tail.copy_from_slice(from_tail);
        // What was copied: a peer that shares `from` may have changed it since.
        let mut one = PairSums::of(load_part(to_tail));
        let mut two = PairSums::of(_mm512_setzero_si512());
        let (from_pairs, from_single) = from.as_chunks::<2>();
        let (to_pairs, to_single) = to.as_chunks_mut::<2>();
        for (to, from) in to_pairs.iter_mut().zip(from_pairs) {
            let (first, second) = (load(&from[0]), load(&from[1]));
            store(&mut to[0], first);
            store(&mut to[1], second);
            one.add(first);
            two.add(second);
        }
        for (to, from) in to_single.iter_mut().zip(from_single) {
            let vector = load(from);
            store(to, vector);
            one.add(vector);
        }
        one.add_up(two)
    }

    /// Sums of pairs of 32-bit words, as in [`super::avx2`].
    #[derive(Clone, Copy)]
    struct PairSums {
        pairs: __m512i,
        uppers: __m512i,
    }

    impl PairSums {
        #[target_feature(enable = "avx512f")]
        fn of(pairs: __m512i) -> Self {
            Self { pairs, uppers: _mm512_srli_epi64::<32>(pairs) }
        }

        #[target_feature(enable = "avx512f")]
        fn add(&mut self, pairs: __m512i) {
            self.pairs = _mm512_add_epi64(self.pairs, pairs);
            self.uppers = _mm512_add_epi64(self.uppers, _mm512_srli_epi64::<32>(pairs));
        }

        #[target_feature(enable = "avx512f")]
        fn add_up(self, other: Self) -> u64 {
            let pairs = _mm512_add_epi64(self.pairs, other.pairs);
            let uppers = _mm512_add_epi64(self.uppers, other.uppers);
            let lowers = _mm512_sub_epi64(pairs, _mm512_slli_epi64::<32>(uppers));
            _mm512_reduce_add_epi64(_mm512_add_epi64(lowers, uppers)).cast_unsigned()
        }
    }

    #[target_feature(enable = "avx512f")]
    fn load(bytes: &[u8; VECTOR_BYTES]) -> __m512i {
        // SAFETY: only the array's bytes are read; the instruction needs no alignment.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx512f")]
    fn store(bytes: &mut [u8; VECTOR_BYTES], vector: __m512i) {
        // SAFETY: only the array's bytes are written; the instruction needs no alignment.
        unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), vector) };
    }

    /// Loads fewer bytes than a vector has; the rest is zero.
    #[target_feature(enable = "avx512f,avx512bw")]
    fn load_part(bytes: &[u8]) -> __m512i {
        debug_assert!(bytes.len() < VECTOR_BYTES);
        let mask = (1u64 << (bytes.len() % VECTOR_BYTES)) - 1;
        // SAFETY: only bytes whose bit is set are read, and no more bits are set than `bytes` has
        // bytes; the instruction needs no alignment.
        unsafe { _mm512_maskz_loadu_epi8(mask, bytes.as_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Implementation = (&'static str, fn(&[u8]) -> u64);

    /// All implementations that this CPU can run.
    fn implementations() -> Vec<Implementation> {
        let mut all: Vec<Implementation> =
            vec![("sum", sum), ("long", long), ("short", short), ("portable", portable)];
        all.push(("copy_and_sum", |bytes| copied(bytes, copy_and_sum)));
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") {
                // SAFETY: this CPU has AVX2, as was just found.
                all.push(("avx2", |bytes| unsafe { avx2::sum(bytes) }));
                all.push(("avx2, copying", |bytes| {
                    // SAFETY: as above.
                    copied(bytes, |to, from| unsafe { avx2::copy_and_sum(to, from) })
                }));
            }
            if has!("avx512f") && has!("avx512bw") {
                // SAFETY: this CPU has AVX-512F and AVX-512BW, as was just found.
                all.push(("avx512", |bytes| unsafe { avx512::sum(bytes) }));
                all.push(("avx512, copying", |bytes| {
                    // SAFETY: as above.
                    copied(bytes, |to, from| unsafe { avx512::copy_and_sum(to, from) })
                }));
            }
        }
        all
    }

    /// Sum that a copying implementation returns; checks the copy.
    fn copied(bytes: &[u8], copy_and_sum: fn(&mut [u8], &[u8]) -> u64) -> u64 {
        let mut to = vec![0x55; bytes.len()];
        let sum = copy_and_sum(&mut to, bytes);
        assert_eq!(to, bytes, "{} bytes are copied", bytes.len());
        sum
    }

    /// Reference model: RFC 1071, section 4.1, in the byte order of this machine.
    fn slow_sum(bytes: &[u8]) -> u64 {
        let words = bytes.chunks(2).map(|word| [word[0], *word.get(1).unwrap_or(&0)]);
        fold(words.map(|word| u64::from(u16::from_ne_bytes(word))).sum())
    }

    fn fold(mut sum: u64) -> u64 {
        while sum > u64::from(u16::MAX) {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum
    }

    #[track_caller]
    fn check(bytes: &[u8]) {
        let expected = slow_sum(bytes);
        for (name, sum) in implementations() {
            let place = bytes.as_ptr().addr() % 64;
            assert_eq!(fold(sum(bytes)), expected, "{name} of {} bytes at {place}", bytes.len());
        }
    }

    #[test]
    fn every_short_length_at_every_place() {
        let (place_step, len_step) = if cfg!(miri) { (13, 37) } else { (1, 1) };
        let counted: Vec<u8> = (0..600usize).map(|place| place.to_le_bytes()[0] | 1).collect();
        for bytes in [counted, vec![0xff; 600], vec![0; 600]] {
            for place in (0..64).step_by(place_step) {
                for len in (0..=4 * 128).step_by(len_step) {
                    check(&bytes[place..place + len]);
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "too many bytes for an interpreter")]
    fn no_carry_is_lost() {
        for len in [65_535, 65_536, 262_144, 262_145, 1 << 24] {
            let ones = vec![0xff; len + 3];
            let upper_ones: Vec<u8> = [0, 0xff].repeat(len / 2 + 2);
            for place in 0..3 {
                check(&ones[place..place + len]);
                check(&upper_ones[place..place + len]);
            }
        }
    }

    #[test]
    fn sums_leave_room_for_others() {
        for (name, sum) in implementations() {
            let sum = sum(&[0xff; if cfg!(miri) { 1_500 } else { 65_535 }]);
            assert!(sum < 1 << 48, "{name}: {sum:#x}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 512 }))]

        #[test]
        fn all_sums_are_the_slow_sum(
            bytes in proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 500 } else { 4096 + 64 }),
            place in 0usize..64,
        ) {
            check(bytes.get(place..).unwrap_or(&[]));
        }

        #[test]
        fn sum_of_ones_matches_reference(len in 0usize..4096, place in 0usize..64) {
            check(&[0xff; 4096 + 64][place..place + len]);
        }
    }
}
