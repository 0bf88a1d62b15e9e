//! The sum that a device took while it received a frame.

use std::num::NonZeroU16;

use super::checksum::Sum;
use super::{Link, Seen};

/// Bytes that devices leave out: the untagged Ethernet header.
const ETHERNET_BYTES: usize = 14;

/// A ones' complement sum of all that came behind the Ethernet header, VLAN tags, padding and all:
/// the kernel's `CHECKSUM_COMPLETE`. Of a frame without link header, of all of it.
///
/// Never 0, for no IP packet is all zeros; so a packet that has none is told apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSum(NonZeroU16);

impl DeviceSum {
    /// A device's sum, by its value in network byte order; a 0 is no sum.
    #[must_use]
    pub fn new(sum: u16) -> Option<Self> {
        NonZeroU16::new(sum).map(Self)
    }

    /// The sum that a device takes of a frame: what a driver's `CHECKSUM_COMPLETE` would say.
    #[must_use]
    pub fn of_frame(bytes: &[u8], link: Link) -> Option<Self> {
        Self::of_sum(Sum::of(bytes), bytes, link)
    }

    /// The same of a frame that was summed up whole while it was copied.
    #[must_use]
    #[inline]
    pub fn of_sum(sum: Sum, bytes: &[u8], link: Link) -> Option<Self> {
        let left_out = Sum::of(bytes.get(..skipped(link))?);
        Self::new(sum.plus_word(!left_out.fold()).fold())
    }

    /// The sum of what stands behind the first bytes, an even number with this sum.
    #[inline]
    pub(super) fn without(self, before: Sum) -> Sum {
        Sum::default().plus_word(self.0.get()).plus_word(!before.fold())
    }

    /// The sum of all that stands behind `start`, an even number of bytes behind those left out. Of a frame that
    /// was captured whole.
    pub(crate) fn from(self, bytes: &[u8], link: Link, start: usize) -> Option<Sum> {
        let before = bytes.get(skipped(link)..start)?;
        before.len().is_multiple_of(2).then(|| self.without(Sum::of(before)))
    }

    /// The part of the sum that is of the transport's `len` bytes from `start`: what stands before
    /// and behind is taken out again (LRO-2, LRO-3). `None` where the frame was cut short, so that
    /// this cannot be told.
    #[inline]
    pub(super) fn of_segment(self, seen: &Seen<'_>, start: usize, len: usize) -> Option<Sum> {
        if !seen.is_whole() {
            return None;
        }
        let first = skipped(seen.link);
        let before = Sum::of(seen.bytes.get(first..start)?);
        let sum = self.without(before);
        let end = start + len;
        if end == seen.wire_len {
            return Some(sum);
        }
        let behind = seen.sum(end..seen.wire_len)?;
        let is_odd = !(end - first).is_multiple_of(2);
        Some(sum.plus_word(!behind.behind(is_odd).fold()))
    }
}

/// Bytes that devices leave out.
pub(super) fn skipped(link: Link) -> usize {
    match link {
        Link::Ethernet => ETHERNET_BYTES,
        Link::Ip => 0,
    }
}
