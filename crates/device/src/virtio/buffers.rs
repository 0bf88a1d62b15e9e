//! Receive buffers of one queue: their size, the memory that they are cut from, and the ones posted
//! to the device.

use std::sync::Arc;

use forebay_buf::{PageFrag, PageFragCache};
use forebay_sys::virtio::{BufferId, Direction, RingDescriptor, Virtqueue};

use super::average::Average;
use crate::RxBuffers;
use crate::config::virtio::{RxBufferSizing, VirtioOptions};

/// Length of a full Ethernet frame with a VLAN tag, without frame check sequence: the kernel's
/// `GOOD_PACKET_LEN` (VIO-3).
pub(super) const GOOD_PACKET_LEN: u32 = 14 + 4 + 1500;

/// Room for the largest packet of a device that cuts none: an IP packet of 64 KiB with its Ethernet
/// and virtio headers (5.1.6.3.1).
const LARGEST_ROOM_BYTES: u32 = 65_562;

/// Page size, the kernel's `PAGE_SIZE`.
pub(super) const PAGE_BYTES: u32 = 4096;

/// Alignment of buffer lengths: a cache line (the kernel's `L1_CACHE_BYTES`).
pub(super) const BUFFER_ALIGN_BYTES: u32 = 64;

/// Two cache lines.
const LINE_PAIR_BYTES: u32 = 2 * BUFFER_ALIGN_BYTES;

/// Maximum number of bytes posted per ring entry, if buffers are larger than the minimum: the
/// memory that the device writes to then stays in its cache.
const POSTED_BYTES_A_PLACE: u32 = 1280;

/// Lower limit of the posted bytes of a queue: two of the largest packets.
const POSTED_BYTES_MIN: u32 = 128 << 10;

/// Lower limit of the posted bytes, in packets of the average length: a back end that sends bursts
/// drops the rest of a burst that does not fit, or retries all of it.
const POSTED_PACKETS_MIN: u32 = 16;

/// Gap behind a small buffer. A CPU that writes a packet also prefetches the lines behind it. The
/// gap keeps those lines apart from the first lines of the next packet, which this side reads.
const GAP_BYTES: u32 = 8 * BUFFER_ALIGN_BYTES;

/// Policy for the size of the next buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizing {
    policy: RxBufferSizing,
    /// Upper limit of `auto`, virtio header included, in bytes.
    max_bytes: u32,
    /// Lower limit of a buffer without header: more than [`GOOD_PACKET_LEN`] if a packet must fit
    /// one buffer.
    min_packet_bytes: u32,
    header_bytes: u32,
    average: Average,
}

impl Sizing {
    pub(super) fn new(policy: RxBufferSizing, max_bytes: u32) -> Self {
        let (header_bytes, average) = (super::header::HEADER_BYTES, Average::default());
        Self { policy, max_bytes, min_packet_bytes: GOOD_PACKET_LEN, header_bytes, average }
    }

    /// Sizing with the given options.
    pub(super) fn of(options: &VirtioOptions) -> Self {
        Self::new(options.rx_buffers, options.rx_buffer_max_bytes)
    }

    /// Returns the length of the largest possible buffer.
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

    /// Applies a session's needs: length of the header, and the packet length that every buffer
    /// must hold, limited by [the largest buffer](Self::largest_bytes). The average is kept, since
    /// the next session's packets are likely similar.
    pub(super) fn begin(&mut self, header_bytes: u32, min_packet_bytes: u32) {
        self.header_bytes = header_bytes;
        let most = self.largest_bytes() - header_bytes;
        self.min_packet_bytes = min_packet_bytes.clamp(GOOD_PACKET_LEN, most);
    }

    /// Adds a packet received as a whole to the average (VIO-4, SEED5).
    #[inline]
    pub(super) fn add(&mut self, packet_bytes: u32) {
        self.average.add(packet_bytes);
    }

    /// True if a ring of that many of the smallest buffers has room for the largest packet.
    pub(super) fn has_room_for_largest(&self, queue_size: u16) -> bool {
        let smallest = Self { average: Average::default(), ..*self };
        u32::from(queue_size) * smallest.buffer_bytes() >= LARGEST_ROOM_BYTES
    }

    /// Returns the least length of a buffer.
    fn least_bytes(&self) -> u32 {
        (self.header_bytes + self.min_packet_bytes).next_multiple_of(BUFFER_ALIGN_BYTES)
    }

    /// Returns the length of the next buffer, header included (VIO-3).
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

/// Returns the number of bytes to cut for a buffer of this length, all of which it may use: an odd
/// number of pairs of cache lines, with a gap if buffers are smaller than a page, where packets are
/// frequent. Pairs, because the adjacent line is prefetched, and should not belong to another
/// buffer. Odd, because otherwise the first lines of all buffers, which both sides read for every
/// packet, would map to a few sets of a cache.
#[inline]
pub(super) fn pitch_bytes(len_bytes: u32) -> u32 {
    let gap_bytes = if len_bytes < PAGE_BYTES { GAP_BYTES } else { 0 };
    (len_bytes + gap_bytes).next_multiple_of(LINE_PAIR_BYTES) | LINE_PAIR_BYTES
}

/// Buffers of one receive queue.
pub(super) struct Buffers {
    pub(super) sizing: Sizing,
    cache: PageFragCache,
    /// Buffers posted to the device, by buffer id. A record in private memory; an entry is filled
    /// only after the ring has accepted the buffer (VIO-R4).
    posted: Box<[Option<PageFrag>]>,
    /// Total length of the posted buffers.
    posted_bytes: u32,
    /// Maximum number of posted bytes, unless [`POSTED_PACKETS_MIN`] long packets need more.
    posted_max_bytes: u32,
    /// Statistics for reports: size of the latest buffers (`mergeable_rx_buffer_size`), number
    /// used.
    shown: Arc<RxBuffers>,
    /// Maximum number of blocks in use before packets are copied out of them.
    away_max: usize,
    /// True if more than `away_max` blocks are in use.
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

    /// Posts buffers until the ring is full or the limit of posted bytes is reached. Returns false
    /// if memory ran out before.
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

    /// Returns the number of posted bytes from which no more buffers of that length are posted.
    #[inline]
    fn most_bytes(&self, len_bytes: u32) -> u32 {
        if len_bytes == self.sizing.least_bytes() {
            return u32::MAX; // limited by the ring's entries only
        }
        let packets_bytes = POSTED_PACKETS_MIN.saturating_mul(self.sizing.average.bytes());
        self.posted_max_bytes.max(packets_bytes)
    }

    #[inline]
    fn has_room(&self, ring: &Virtqueue, most_bytes: u32) -> bool {
        ring.free() > 0 && self.posted_bytes < most_bytes
    }

    /// True if a buffer is not to be posted again, because its memory has room for two of today's
    /// size.
    #[inline]
    pub(super) fn is_outgrown(&self, frag: &PageFrag) -> bool {
        frag.room_bytes() >= 2 * pitch_bytes(self.shown.size_bytes())
    }

    /// Returns the posted buffer of an id that the ring has just returned.
    #[inline]
    pub(super) fn posted(&self, id: BufferId) -> Option<&PageFrag> {
        self.posted.get(id.index())?.as_ref()
    }

    /// Takes the buffer of an id out of the record.
    #[inline]
    pub(super) fn take(&mut self, id: BufferId) -> Option<PageFrag> {
        let frag = self.posted.get_mut(id.index())?.take()?;
        self.posted_bytes -= frag.room_bytes();
        Some(frag)
    }

    /// Prefetches the beginning of a buffer that will be read soon.
    #[inline]
    pub(super) fn prefetch(&self, id: u32, len_bytes: u32) {
        if let Some(Some(frag)) = self.posted.get(id as usize) {
            frag.prefetch(len_bytes);
        }
    }

    /// True if so little memory is left that packets should be copied out of it.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        self.is_short
    }

    /// Returns the statistics for reports.
    pub(super) fn shown(&self) -> &RxBuffers {
        &self.shown
    }

    /// Takes back all posted buffers, after the device has gone or stopped.
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
        // Limited by the largest buffer of the policy.
        assert_eq!(sized(RxBufferSizing::Page, 9018), 4160);
    }

    proptest! {
        /// For any packets, a buffer is a multiple of cache lines, within its limits, and as large
        /// as the average if that is within them.
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
