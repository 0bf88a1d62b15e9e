//! Layout of the memory shared with a back end.

use std::sync::Arc;

use forebay_buf::{Claim, PageFragCache, Region};
use forebay_sys::virtio::{
    RingAddresses, RingConfig, SharedMemory, Virtqueue, VirtqueueLayout, ring_bytes,
};

use super::buffers::{Sizing, pitch_bytes};
use super::control::{CONTROL_QUEUE_SIZE, ControlPlace};
use super::header::HEADER_BYTES;
use super::transmit::SLOT_BYTES;
use crate::config::virtio::VirtioOptions;

/// Receive memory of one queue beyond the posted buffers, for packets in the engine. Packets are
/// copied once three quarters of all memory are in use.
const UNDER_WAY_BYTES: usize = 16 << 20;

/// Minimum number of buffers per block, so that little of a block is wasted at its end.
const BUFFERS_A_BLOCK: u32 = 4;

/// Limits of the block size, unless a buffer is larger. Blocks are reused as wholes: large ones
/// spread the same buffers over more memory than the back end's cache has.
const BLOCK_BYTES_MIN: u32 = 128 << 10;
const BLOCK_BYTES_MAX: u32 = 1 << 20;

/// Alignment of the parts: a page.
const PAGE_BYTES: usize = 4096;

/// Offset of receive buffers from a cache line, so that the device's header ends with a line and
/// the packet begins with the next one: the back end copies whole lines. Both lines belong to one
/// pair, which is fetched together.
const BLOCKS_SHIFT: usize = 64 - HEADER_BYTES as usize;

/// Size of the block for commands: the least size of a block.
const COMMANDS_BYTES: u32 = 4096;

/// Layout of each queue pair's rings and buffers, pair by pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryPlan {
    queue_size: u16,
    block_bytes: u32,
    blocks: u32,
}

/// Offsets of the parts of a queue pair, in bytes from the beginning of the memory.
#[derive(Clone, Copy, Debug)]
struct RingPlaces {
    rx_ring: usize,
    tx_ring: usize,
    slots: usize,
    blocks: usize,
    end: usize,
}

impl MemoryPlan {
    pub(super) fn of(options: &VirtioOptions) -> Self {
        let largest = pitch_bytes(Sizing::of(options).largest_bytes());
        let block_bytes = largest
            .saturating_mul(BUFFERS_A_BLOCK)
            .next_power_of_two()
            .clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX)
            .max(largest.next_power_of_two());
        // A block may waste almost one buffer at its end.
        let whole = (block_bytes / largest).max(1) as usize;
        let posted = usize::from(options.queue_size).div_ceil(whole);
        let under_way = UNDER_WAY_BYTES / block_bytes as usize;
        let blocks = u32::try_from(posted + under_way.max(BUFFERS_A_BLOCK as usize) + 1);
        Self { queue_size: options.queue_size, block_bytes, blocks: blocks.unwrap_or(u32::MAX) }
    }

    /// Returns the length of the memory for `pairs` queue pairs and the control queue.
    pub(super) fn len_bytes(&self, pairs: usize) -> usize {
        let control = control_ring_bytes() + COMMANDS_BYTES as usize;
        self.control_offset_bytes(pairs).saturating_add(control)
    }

    /// Returns the offset of the control queue, behind all pairs.
    fn control_offset_bytes(&self, pairs: usize) -> usize {
        self.places(0).end.saturating_mul(pairs)
    }

    fn places(&self, pair: usize) -> RingPlaces {
        let ring = ring_bytes_max(self.queue_size).next_multiple_of(PAGE_BYTES);
        let slots = usize::from(self.queue_size) * SLOT_BYTES as usize;
        let blocks = self.blocks as usize * self.block_bytes as usize + BLOCKS_SHIFT;
        let blocks = blocks.next_multiple_of(PAGE_BYTES);
        let len = 2 * ring + slots.next_multiple_of(PAGE_BYTES) + blocks;
        let begin = pair.saturating_mul(len);
        let places = [begin, begin + ring, begin + 2 * ring];
        let [rx_ring, tx_ring, slots] = places;
        let end = begin + len;
        RingPlaces { rx_ring, tx_ring, slots, blocks: end - blocks, end }
    }

    /// Returns the places of a pair's rings: receive, transmit.
    pub(super) fn rings(&self, memory: &SharedMemory, pair: usize) -> [RingPlace; 2] {
        let at = self.places(pair);
        [at.rx_ring, at.tx_ring].map(|at| RingPlace::new(memory.region(), at, self.queue_size))
    }

    /// Returns the memory of a pair's transmit slots: one of [`SLOT_BYTES`] for each ring entry.
    pub(super) fn slots(&self, memory: &SharedMemory, pair: usize) -> PageFragCache {
        let len_bytes = u32::from(self.queue_size) * SLOT_BYTES;
        PageFragCache::new(memory.region(), self.places(pair).slots, len_bytes, 1)
    }

    /// Returns the memory of a pair's receive buffers.
    pub(super) fn cache(&self, memory: &SharedMemory, pair: usize) -> PageFragCache {
        let at = self.places(pair).blocks + BLOCKS_SHIFT;
        PageFragCache::new(memory.region(), at, self.block_bytes, self.blocks)
    }

    /// Returns the place of the control queue, behind `pairs` pairs.
    pub(super) fn control(&self, memory: &SharedMemory, pairs: usize) -> ControlPlace {
        let at = self.control_offset_bytes(pairs);
        let ring = RingPlace::new(memory.region(), at, CONTROL_QUEUE_SIZE);
        let commands = at + control_ring_bytes();
        ControlPlace::new(ring, PageFragCache::new(memory.region(), commands, COMMANDS_BYTES, 1))
    }
}

/// Memory of a ring in either layout: a session decides which.
#[derive(Clone, Debug)]
pub(super) struct RingPlace {
    memory: Arc<Claim>,
    size: u16,
}

impl RingPlace {
    fn new(memory: &Arc<Region>, offset_bytes: usize, size: u16) -> Self {
        let part = offset_bytes..offset_bytes + ring_bytes_max(size);
        let Some(memory) = Region::claim(memory, part) else {
            unreachable!("the parts of the plan lie one behind the other")
        };
        Self { memory: Arc::new(memory), size }
    }

    /// Returns the number of entries.
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Creates the driver's side of a ring in this memory, which was [cleared](Self::clear) before a
    /// device saw it.
    pub(super) fn ring(&self, layout: VirtqueueLayout, event_idx: bool) -> Virtqueue {
        let config = RingConfig { layout, size: self.size, event_idx };
        Virtqueue::adopt(&self.memory, config)
    }

    /// Zeroes the memory, in which no ring is in use, by no device and by no source.
    pub(super) fn clear(&self) {
        let config =
            RingConfig { layout: VirtqueueLayout::Split, size: self.size, event_idx: false };
        drop(Virtqueue::new(&self.memory, config));
    }

    /// Returns the ring's addresses for the device.
    pub(super) fn addresses(&self, layout: VirtqueueLayout) -> RingAddresses {
        self.ring(layout, false).addresses()
    }
}

/// Returns the memory that a ring takes in the larger layout.
fn ring_bytes_max(size: u16) -> usize {
    ring_bytes(VirtqueueLayout::Split, size).max(ring_bytes(VirtqueueLayout::Packed, size))
}

fn control_ring_bytes() -> usize {
    ring_bytes_max(CONTROL_QUEUE_SIZE).next_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::virtio::RxBufferSizing;

    #[test]
    fn pair_memory_is_contiguous() {
        for (queue_size, max_bytes) in [(16, 1536), (256, 16 << 10), (1024, 65_600), (32_768, 4096)]
        {
            let options =
                VirtioOptions { queue_size, rx_buffer_max_bytes: max_bytes, ..Default::default() };
            let plan = MemoryPlan::of(&options);
            let mut last = 0;
            for pair in 0..3 {
                let RingPlaces { rx_ring, tx_ring, slots, blocks, end } = plan.places(pair);
                let parts = [last, rx_ring, tx_ring, slots, blocks, end];
                assert!(parts.is_sorted(), "{parts:?}");
                assert!(parts.iter().all(|part| part.is_multiple_of(PAGE_BYTES)));
                assert!(tx_ring - rx_ring >= ring_bytes_max(queue_size));
                last = end;
            }
            assert_eq!(plan.len_bytes(3), last + 4096 + 4096);
        }
    }

    /// No part overlaps another one: see [`Region::claim`].
    #[test]
    fn all_parts_coexist_in_memory() {
        let plan = MemoryPlan::of(&VirtioOptions::default());
        let memory = SharedMemory::new(plan.len_bytes(2)).unwrap();
        let of_pair = |pair| {
            (plan.rings(&memory, pair), plan.slots(&memory, pair), plan.cache(&memory, pair))
        };
        let _pairs = [0, 1].map(of_pair);
        let _control = plan.control(&memory, 2);
    }

    #[test]
    fn memory_covers_full_ring_in_flight() {
        for max_bytes in [1536, 4096, 9216, 16 << 10, 65_600, 1 << 20] {
            let options = VirtioOptions {
                rx_buffers: RxBufferSizing::Auto,
                rx_buffer_max_bytes: max_bytes,
                ..Default::default()
            };
            let plan = MemoryPlan::of(&options);
            let in_ring = u64::from(options.queue_size) * u64::from(max_bytes);
            let all = u64::from(plan.blocks) * u64::from(plan.block_bytes);
            assert!(plan.block_bytes >= max_bytes, "{max_bytes}");
            assert!(all >= in_ring + UNDER_WAY_BYTES as u64, "{max_bytes}: {all}");
        }
    }
}
