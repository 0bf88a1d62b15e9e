//! Sequence numbers: positions in a stream of bytes, modulo 2^32 (RFC 9293, section 3.4).

use std::ops::{Add, AddAssign, Sub};

/// A sequence number. Two are compared on the assumption that they are less than 2^31 apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Seq(pub u32);

impl Seq {
    /// True if this number comes before `other` (`before` in the kernel).
    #[must_use]
    pub fn is_before(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() < 0
    }

    /// True if this number comes after `other` (`after` in the kernel).
    #[must_use]
    pub fn is_after(self, other: Self) -> bool {
        other.is_before(self)
    }

    /// The later of two numbers.
    #[must_use]
    pub fn later(self, other: Self) -> Self {
        if self.is_before(other) { other } else { self }
    }

    /// The earlier of two numbers.
    #[must_use]
    pub fn earlier(self, other: Self) -> Self {
        if other.is_before(self) { other } else { self }
    }

    /// Number of bytes from `earlier` to here; 0 if this number is before it.
    #[must_use]
    pub fn bytes_since(self, earlier: Self) -> u32 {
        if self.is_before(earlier) { 0 } else { self - earlier }
    }
}

impl Add<u32> for Seq {
    type Output = Self;

    fn add(self, bytes: u32) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl AddAssign<u32> for Seq {
    fn add_assign(&mut self, bytes: u32) {
        *self = *self + bytes;
    }
}

impl Sub<u32> for Seq {
    type Output = Self;

    fn sub(self, bytes: u32) -> Self {
        Self(self.0.wrapping_sub(bytes))
    }
}

impl Sub for Seq {
    type Output = u32;

    /// Distance from `earlier` to here, modulo 2^32.
    fn sub(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

/// A length as a difference of sequence numbers. Lengths here are bounded by buffers, far below 4 GiB.
#[must_use]
pub(super) fn len_u32(len_bytes: usize) -> u32 {
    u32::try_from(len_bytes).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn tcp_1_order_survives_the_wrap(start: u32, ahead in 1_u32..1 << 31) {
            let (first, second) = (Seq(start), Seq(start) + ahead);
            prop_assert!(first.is_before(second) && second.is_after(first));
            prop_assert!(!second.is_before(first) && !first.is_after(second));
            prop_assert_eq!(second - first, ahead);
            prop_assert_eq!((first.later(second), first.earlier(second)), (second, first));
            prop_assert_eq!((second.bytes_since(first), first.bytes_since(second)), (ahead, 0));
        }
    }
}
