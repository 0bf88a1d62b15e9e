//! Sum that a device computed while it received a frame.

use std::num::NonZeroU16;

use super::checksum::Sum;
use super::{Link, Seen};

/// Length of the part that devices leave out: the untagged Ethernet header.
const ETHERNET_BYTES: usize = 14;

/// Ones' complement sum of all bytes behind the Ethernet header, including VLAN tags and padding:
/// the kernel's `CHECKSUM_COMPLETE`. Without link header, the sum of the whole frame.
///
/// Never 0, because no IP packet is all zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSum(NonZeroU16);

impl DeviceSum {
    /// Sum of a device, by its value in network byte order; `None` for 0, which means that there is none.
    #[must_use]
    pub fn new(sum: u16) -> Option<Self> {
        NonZeroU16::new(sum).map(Self)
    }

    /// Sum that a device computes over a frame, as a driver reports it in `CHECKSUM_COMPLETE`.
    #[must_use]
    pub fn of_frame(bytes: &[u8], link: Link) -> Option<Self> {
        Self::of_sum(Sum::of(bytes), bytes, link)
    }

    /// Sum that a device computes over a frame that was summed as a whole while it was copied.
    #[must_use]
    #[inline]
    pub fn of_sum(sum: Sum, bytes: &[u8], link: Link) -> Option<Self> {
        let left_out = match link {
            Link::Ethernet => Sum::of_ethernet(bytes.first_chunk::<ETHERNET_BYTES>()?),
            Link::Ip => Sum::default(),
        };
        Self::new(sum.plus_word(!left_out.fold()).fold())
    }

    /// Sum of the bytes behind the first ones, which are even in number and have the sum `before`.
    #[inline]
    pub(super) fn without(self, before: Sum) -> Sum {
        Sum::default().plus_word(self.0.get()).plus_word(!before.fold())
    }

    /// Sum of all bytes from `start`, which is an even number of bytes behind those left out. For a frame
    /// that was captured whole.
    pub(crate) fn from(self, bytes: &[u8], link: Link, start: usize) -> Option<Sum> {
        let before = bytes.get(skipped(link)..start)?;
        before.len().is_multiple_of(2).then(|| self.without(Sum::of(before)))
    }

    /// Sum of the transport's `len` bytes from `start`: the bytes before and behind are subtracted
    /// (LRO-2, LRO-3). `None` if the frame was truncated, because those behind are unknown then.
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

/// Number of bytes at the start that devices leave out of the sum.
pub(super) fn skipped(link: Link) -> usize {
    match link {
        Link::Ethernet => ETHERNET_BYTES,
        Link::Ip => 0,
    }
}
