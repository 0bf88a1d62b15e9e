//! The receive buffers of one queue: how large they are, what memory they are cut from, and which of
//! them the device has.

use std::sync::Arc;

use forebay_buf::{PageFrag, PageFragCache};
use forebay_sys::virtio::{BufferId, Direction, RingDescriptor, Virtqueue};

use super::average::Average;
use crate::RxBuffers;
use crate::config::virtio::{RxBufferSizing, VirtioOptions};

/// A frame of an ordinary network with a VLAN tag, without the checksum at its end: the kernel's
/// `GOOD_PACKET_LEN` (VIO-3).
pub(super) const GOOD_PACKET_LEN: u32 = 14 + 4 + 1500;

/// The kernel's `PAGE_SIZE` here.
pub(super) const PAGE_BYTES: u32 = 4096;

/// Buffers are a number of cache lines long (the kernel's `L1_CACHE_BYTES`).
pub(super) const BUFFER_ALIGN_BYTES: u32 = 64;

/// Two cache lines.
const LINE_PAIR_BYTES: u32 = 2 * BUFFER_ALIGN_BYTES;

/// Part of a queue that the device has at once where buffers are larger than the least, for each place
/// of the ring: what it writes to then stays in its cache.
const POSTED_BYTES_A_PLACE: u32 = 1280;

/// The same, at least: two of the largest packets.
const POSTED_BYTES_MIN: u32 = 128 << 10;

/// And at least so many packets of the average length: a back end that sends bursts loses the rest of
/// one, or tries again with all of it.
const POSTED_PACKETS_MIN: u32 = 16;

/// Gap behind a small buffer. Whoever writes a packet asks for the lines behind it, too:
/// those should not be what this side looks at of the next packet.
const GAP_BYTES: u32 = 8 * BUFFER_ALIGN_BYTES;

/// Size of the next buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizing {
    policy: RxBufferSizing,
    /// The most that `auto` makes them.
    max_bytes: u32,
    /// The least that any is: more than [`GOOD_PACKET_LEN`] where a packet must fit into one.
    min_packet_bytes: u32,
    header_bytes: u32,
    average: Average,
}

impl Sizing {
    pub(super) fn new(policy: RxBufferSizing, max_bytes: u32) -> Self {
        let (header_bytes, average) = (super::header::HEADER_BYTES, Average::default());
        Self { policy, max_bytes, min_packet_bytes: GOOD_PACKET_LEN, header_bytes, average }
    }

    /// As the options say.
    pub(super) fn of(options: &VirtioOptions) -> Self {
        Self::new(options.rx_buffers, options.rx_buffer_max_bytes)
    }

    /// The largest buffer that there may be.
    pub(super) fn largest_bytes(&self) -> u32 {
        let header = super::header::HASH_HEADER_BYTES;
        let packet = match self.policy {
            RxBufferSizing::Auto => self.max_bytes,
            RxBufferSizing::Mtu => GOOD_PACKET_LEN,
            RxBufferSizing::Page => PAGE_BYTES,
            RxBufferSizing::Fixed(bytes) => bytes.get(),
        };
        (header + packet.max(GOOD_PACKET_LEN)).next_multiple_of(BUFFER_ALIGN_BYTES)
    }

    /// Sets what a session asks for: bytes before a packet, and the least of a packet that a buffer
    /// must hold, as far as [the largest](Self::largest_bytes) can. The average goes on: the packets
    /// are likely the same.
    pub(super) fn begin(&mut self, header_bytes: u32, min_packet_bytes: u32) {
        self.header_bytes = header_bytes;
        let most = self.largest_bytes() - header_bytes;
        self.min_packet_bytes = min_packet_bytes.clamp(GOOD_PACKET_LEN, most);
    }

    /// Adds a packet that came whole (VIO-4, SEED5).
    #[inline]
    pub(super) fn add(&mut self, packet_bytes: u32) {
        self.average.add(packet_bytes);
    }

    /// The least length of a buffer.
    fn least_bytes(&self) -> u32 {
        (self.header_bytes + self.min_packet_bytes).next_multiple_of(BUFFER_ALIGN_BYTES)
    }

    /// The length of the next buffer, header included (VIO-3).
    #[inline]
    pub(super) fn buffer_bytes(&self) -> u32 {
        let header = self.header_bytes;
        let least = self.min_packet_bytes;
        let packet = match self.policy {
            RxBufferSizing::Auto => {
                self.average.bytes().clamp(least, self.max_bytes.saturating_sub(header).max(least))
            }
            RxBufferSizing::Mtu => least,
            RxBufferSizing::Page => least.max(PAGE_BYTES - header),
            RxBufferSizing::Fixed(bytes) => least.max(bytes.get().saturating_sub(header)),
        };
        (header + packet).next_multiple_of(BUFFER_ALIGN_BYTES)
    }
}

/// Bytes cut for a buffer of so many bytes, which it all gets: an odd number of pairs of cache lines,
/// with a gap where buffers are smaller than a page, and packets begin often. Pairs, because the
/// neighbouring line is fetched along, and should not be another buffer's. Odd, because otherwise the
/// first lines of all buffers would fall into a few sets of a cache, and with them what both sides look
/// at of every packet.
#[inline]
pub(super) fn pitch_bytes(len_bytes: u32) -> u32 {
    let gap_bytes = if len_bytes < PAGE_BYTES { GAP_BYTES } else { 0 };
    (len_bytes + gap_bytes).next_multiple_of(LINE_PAIR_BYTES) | LINE_PAIR_BYTES
}

/// The buffers of one receive queue.
pub(super) struct Buffers {
    pub(super) sizing: Sizing,
    cache: PageFragCache,
    /// By the number that the ring gave each buffer: what the device has. Our own record, in private
    /// memory; a place is filled once the ring has taken the buffer, and not before (VIO-R4).
    posted: Box<[Option<PageFrag>]>,
    /// The room of all these.
    posted_bytes: u32,
    /// Bytes that the device has at most, where packets are not so long that it needs more.
    posted_max_bytes: u32,
    /// For whoever asks: how large the latest are (`mergeable_rx_buffer_size`), how many were used.
    shown: Arc<RxBuffers>,
    /// Blocks, at most, that may be away before packets are copied out of them.
    away_max: usize,
    /// True if more are.
    is_short: bool,
}

impl Buffers {
    pub(super) fn new(
        sizing: Sizing,
        cache: PageFragCache,
        queue_size: u16,
        shown: Arc<RxBuffers>,
    ) -> Self {
        let posted = (0..queue_size).map(|_| None).collect();
        let posted_max_bytes = u32::from(queue_size) * POSTED_BYTES_A_PLACE;
        let posted_max_bytes = posted_max_bytes.max(POSTED_BYTES_MIN);
        let away_max = cache.blocks() / 4 * 3;
        let (posted_bytes, is_short) = (0, false);
        Self { sizing, cache, posted, posted_bytes, posted_max_bytes, shown, away_max, is_short }
    }

    /// Posts buffers until the device has enough: the ring is full, or they come to the most that is
    /// posted. Returns whether it has; if not, the memory is all away.
    pub(super) fn refill(&mut self, ring: &mut Virtqueue) -> bool {
        let len_bytes = self.sizing.buffer_bytes();
        if len_bytes != self.shown.size_bytes() {
            self.shown.set_size_bytes(len_bytes);
        }
        let most_bytes = self.most_bytes(len_bytes);
        if !self.has_room(ring, most_bytes) {
            return true;
        }
        self.is_short = self.cache.away_blocks() > self.away_max;
        while self.has_room(ring, most_bytes) {
            let Some(frag) = self.cache.cut(pitch_bytes(len_bytes)) else { return false };
            let buffer = RingDescriptor { address: frag.address(), len_bytes: frag.room_bytes() };
            match ring.post(&[buffer], Direction::ToDriver) {
                Ok(id) => {
                    self.posted_bytes += frag.room_bytes();
                    self.posted[id.index()] = Some(frag);
                }
                Err(_full) => {
                    self.cache.roll_back(frag); // VIO-R3
                    return true;
                }
            }
        }
        true
    }

    /// While the device has as much, no more buffers of that length are posted.
    #[inline]
    fn most_bytes(&self, len_bytes: u32) -> u32 {
        if len_bytes == self.sizing.least_bytes() {
            return u32::MAX; // as many as there are places
        }
        let packets_bytes = POSTED_PACKETS_MIN.saturating_mul(self.sizing.average.bytes());
        self.posted_max_bytes.max(packets_bytes)
    }

    #[inline]
    fn has_room(&self, ring: &Virtqueue, most_bytes: u32) -> bool {
        ring.free() > 0 && self.posted_bytes < most_bytes
    }

    /// True if a buffer is not to be posted again: two would be cut from its room now.
    #[inline]
    pub(super) fn is_outgrown(&self, frag: &PageFrag) -> bool {
        frag.room_bytes() >= 2 * pitch_bytes(self.shown.size_bytes())
    }

    /// The buffer of a number that the ring has just given back.
    #[inline]
    pub(super) fn posted(&self, id: BufferId) -> Option<&PageFrag> {
        self.posted.get(id.index())?.as_ref()
    }

    /// Takes that buffer away from the ring.
    #[inline]
    pub(super) fn take(&mut self, id: BufferId) -> Option<PageFrag> {
        let frag = self.posted.get_mut(id.index())?.take()?;
        self.posted_bytes -= frag.room_bytes();
        Some(frag)
    }

    /// Asks for the beginning of a buffer that will be looked at soon.
    #[inline]
    pub(super) fn prefetch(&self, id: u32, len_bytes: u32) {
        if let Some(Some(frag)) = self.posted.get(id as usize) {
            frag.prefetch(len_bytes);
        }
    }

    /// True if so little memory is left that none should leave with packets.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        self.is_short
    }

    /// Buffers for reports.
    pub(super) fn shown(&self) -> &RxBuffers {
        &self.shown
    }

    /// Takes back all that the device had: it is gone, or has stopped.
    pub(super) fn take_back(&mut self) {
        self.posted.iter_mut().for_each(|place| *place = None);
        self.posted_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;

    fn sizing(policy: RxBufferSizing, packets: impl IntoIterator<Item = u32>) -> u32 {
        let mut sizing = Sizing::new(policy, 16 << 10);
        packets.into_iter().for_each(|len| sizing.add(len));
        sizing.buffer_bytes()
    }

    fn fixed(bytes: u32) -> RxBufferSizing {
        RxBufferSizing::Fixed(NonZeroU32::new(bytes).unwrap())
    }

    #[test]
    fn vio_3_buffer_between_ethernet_and_clamp() {
        let auto = |len| sizing(RxBufferSizing::Auto, [len]);
        assert_eq!(sizing(RxBufferSizing::Auto, []), 1536);
        assert_eq!([60, 1514, 1518, 1524].map(auto), [1536; 4]);
        assert_eq!([1525, 3000, 4084, 9000].map(auto), [1600, 3072, 4096, 9024]);
        assert_eq!([16_372, 16_373, 65_549].map(auto), [16 << 10; 3]);
    }

    #[test]
    fn buffers_are_odd_cache_lines_apart() {
        let cut = [1536, 1600, 4096, 9024, 16 << 10].map(pitch_bytes);
        assert_eq!(cut, [2176, 2176, 4224, 9088, (16 << 10) + 128]);
    }

    #[test]
    fn vio_1_other_policies_ignore_lengths() {
        for packets in [[60; 100], [65_549; 100]] {
            assert_eq!(sizing(RxBufferSizing::Mtu, packets), 1536);
            assert_eq!(sizing(RxBufferSizing::Page, packets), 4096);
            assert_eq!(sizing(fixed(9216), packets), 9216);
            assert_eq!(sizing(fixed(2000), packets), 2048);
            assert_eq!(sizing(fixed(1), packets), 1536);
        }
    }

    #[test]
    fn net_2_single_buffer_holds_whole_packet() {
        let sized = |policy, packet_bytes| {
            let mut sizing = Sizing::new(policy, 16 << 10);
            sizing.begin(20, packet_bytes);
            sizing.buffer_bytes()
        };
        assert!(sized(RxBufferSizing::Auto, 9018) >= 9038);
        assert!(sized(fixed(9216), 9018) >= 9038);
        // As far as there is memory for such.
        assert_eq!(sized(RxBufferSizing::Page, 9018), 4160);
    }

    proptest! {
        /// Whatever comes, a buffer is of whole cache lines, within the bounds, and as large as the
        /// average where that is within them.
        #[test]
        fn vio_3_buffers_stay_within_their_bounds(
            lens in proptest::collection::vec(0u32..70_000, 0..300),
            max_bytes in 0u32..70_000,
            header_bytes in prop_oneof![Just(12u32), Just(20)],
        ) {
            let mut sizing = Sizing::new(RxBufferSizing::Auto, max_bytes);
            sizing.begin(header_bytes, 0);
            lens.iter().for_each(|&len| sizing.add(len));
            let buffer = sizing.buffer_bytes();
            let least = header_bytes + GOOD_PACKET_LEN;
            prop_assert_eq!(buffer % BUFFER_ALIGN_BYTES, 0);
            prop_assert!(buffer >= least);
            prop_assert!(buffer < max_bytes.max(least) + BUFFER_ALIGN_BYTES);
            let average = sizing.average.bytes();
            prop_assert!(buffer >= (header_bytes + average).min(max_bytes));
        }
    }
}
