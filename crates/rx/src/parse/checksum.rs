//! The Internet checksum (RFC 1071).

use super::Checksum;

/// A ones' complement sum of 16-bit words, not yet folded.
///
/// Words are summed in memory order. The sum is the same in either byte order except for a swap
/// (RFC 1071, section 2B), and a correct checksum makes it all ones, so no byte is swapped.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum(u64);

impl Sum {
    /// Sum of `bytes`, padded with a zero byte if their number is odd.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(forebay_buf::sum::sum(bytes))
    }

    /// Wraps a sum already computed by [`forebay_buf::sum`].
    #[must_use]
    pub fn taken(sum: u64) -> Self {
        Self(sum)
    }

    /// Sum of the bytes of consecutive pieces of any lengths.
    #[must_use]
    pub fn of_pieces<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Self {
        let (mut sum, mut is_odd) = (Self::default(), false);
        for piece in pieces {
            sum = sum.plus(Self::of(piece).behind(is_odd));
            is_odd ^= !piece.len().is_multiple_of(2);
        }
        sum
    }

    /// Sum as it counts behind other bytes: behind an odd number of them, each byte is the other
    /// half of its word.
    #[must_use]
    pub(crate) fn behind(self, is_odd: bool) -> Self {
        if is_odd { Self::default().plus_word(self.fold().swap_bytes()) } else { self }
    }

    /// Sum of the few words of a header, whose number is known to the compiler.
    #[inline]
    #[must_use]
    pub fn of_words(words: &[[u8; 4]]) -> Self {
        Self(words.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).sum())
    }

    /// Sum of a pair of IP addresses: of 8 or 32 bytes, as they are nearly always.
    #[inline]
    #[must_use]
    pub(crate) fn of_addresses(addresses: &[u8]) -> Self {
        match addresses.as_chunks() {
            (&[a, b], []) => Self::of_words(&[a, b]),
            (&[a, b, c, d, e, f, g, h], []) => Self::of_words(&[a, b, c, d, e, f, g, h]),
            _ => Self::of(addresses),
        }
    }

    /// Sum of an Ethernet header without tags.
    #[inline]
    #[must_use]
    pub(super) fn of_ethernet(header: &[u8; 14]) -> Self {
        let (words, rest) = header.as_chunks::<4>();
        let rest = rest.first_chunk().map_or(0, |&rest| u16::from_ne_bytes(rest));
        Self(Self::of_words(words).0 + u64::from(rest))
    }

    /// Sum of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// Adds a word, given by its value.
    #[must_use]
    pub fn plus_word(self, word: u16) -> Self {
        Self(self.0 + u64::from(u16::from_ne_bytes(word.to_be_bytes())))
    }

    /// Adds the length field of a pseudo header.
    #[must_use]
    pub fn plus_len(self, len: usize) -> Self {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Self(self.0 + u64::from(u32::from_ne_bytes(len.to_be_bytes())))
    }

    /// Value of the sum as a 16-bit word, carries added in.
    #[must_use]
    pub fn fold(self) -> u16 {
        // A number plus itself with its halves swapped has the sum of the halves in the upper half,
        // and the carry of that sum, too, from the lower half. No branch depends on the bytes.
        let sum = self.0.wrapping_add(self.0.rotate_left(32)) >> 32;
        let sum = u32::try_from(sum).unwrap_or(u32::MAX);
        let sum = sum.wrapping_add(sum.rotate_left(16)) >> 16;
        u16::from_be(u16::try_from(sum).unwrap_or(u16::MAX))
    }
}

/// Judges a sum that covers the checksum field itself.
#[must_use]
pub fn judge(sum: Sum) -> Checksum {
    if sum.fold() == u16::MAX { Checksum::Good } else { Checksum::Bad }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Slow twin: RFC 1071, section 4.1, to the letter.
    fn slow_sum(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        u16::try_from(sum).unwrap()
    }

    #[test]
    fn rfc_1071_example() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Sum::of(&bytes).fold(), 0xddf2);
    }

    #[test]
    fn only_all_ones_is_good() {
        assert_eq!(judge(Sum::of(&[0xff; 65_535 / 2 * 2])), Checksum::Good);
        assert_eq!(judge(Sum::of(&[0; 40])), Checksum::Bad);
        assert_eq!(judge(Sum::default().plus_word(0xfffe)), Checksum::Bad);
    }

    proptest! {
        #[test]
        fn fast_sum_is_the_slow_sum(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(Sum::of(&bytes).fold(), slow_sum(&bytes));
        }

        #[test]
        fn pieces_sum_to_whole(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..9), 0..9),
        ) {
            let sum = Sum::of_pieces(pieces.iter().map(Vec::as_slice));
            prop_assert_eq!(sum.fold(), slow_sum(&pieces.concat()));
        }

        #[test]
        fn sums_of_parts_add_up(
            parts in proptest::collection::vec(any::<[u8; 6]>(), 0..20),
            word: u16,
            len in 0usize..70_000,
        ) {
            let sum = parts.iter().fold(Sum::default(), |sum, part| sum.plus(Sum::of(part)));
            let len_bytes = u32::try_from(len).unwrap().to_be_bytes();
            let whole = [parts.concat(), word.to_be_bytes().to_vec(), len_bytes.to_vec()].concat();
            prop_assert_eq!(sum.plus_word(word).plus_len(len).fold(), slow_sum(&whole));
        }
    }
}
