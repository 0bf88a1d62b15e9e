//! Virtqueues: rings in memory shared with a device in another process (virtio 1.2, sections 2.6 to
//! 2.8).
//!
//! The device may write anything anywhere in that memory at any time. The driver therefore keeps
//! its state in private memory: the posted buffers, their chains, the free descriptors, and the
//! progress of both sides. From shared memory it reads only the device's messages: the used index,
//! used buffers and their lengths, and the notification settings. Each is validated before use.

mod memory; // memory that a device maps
mod packed; // one ring that both sides write
mod slots; //  private record of the posted buffers
mod split; //  one ring for each side
mod words; //  shared memory as atomics

#[cfg(test)]
mod properties; //    properties of any ring
#[cfg(test)]
mod tests;
#[cfg(any(test, feature = "twin"))]
#[allow(missing_docs, clippy::unwrap_used, reason = "tests use it, and it may panic as they may")]
pub mod reference; // a device

use std::sync::Arc;

use forebay_buf::Claim;
pub use memory::SharedMemory;
use packed::PackedQueue;
use split::SplitQueue;

/// Alignment of a ring's parts: a cache line.
const LINE_BYTES: usize = 64;

/// Layout of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum VirtqueueLayout {
    /// One ring for each side (section 2.7).
    #[default]
    Split,
    /// One ring that both sides write (section 2.8).
    Packed,
}

/// Configuration of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingConfig {
    /// Layout that was negotiated (`VIRTIO_F_RING_PACKED`).
    pub layout: VirtqueueLayout,
    /// Number of descriptors: a power of two of at most 32768.
    pub size: u16,
    /// True if each side names the entry at which it wants to be notified
    /// (`VIRTIO_F_RING_EVENT_IDX`).
    pub event_idx: bool,
}

/// Addresses of a ring's parts, for the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingAddresses {
    /// Descriptor table, or the ring itself if it is packed.
    pub descriptors: u64,
    /// Part that the driver writes: available ring, or driver event suppression.
    pub driver: u64,
    /// Part that the device writes: used ring, or device event suppression.
    pub device: u64,
}

/// A piece of memory given to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingDescriptor {
    /// Address of the first byte in the device's address space.
    pub address: u64,
    /// Length.
    pub len_bytes: u32,
}

/// Side that writes a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The device writes the buffer: receive.
    ToDriver,
    /// The driver writes the buffer: transmit.
    ToDevice,
}

/// Id of a posted buffer: less than the ring's size, and unique until the buffer is taken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BufferId(u16);

impl BufferId {
    /// Index for tables as long as the ring.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Used entry as the device wrote it, not validated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Used {
    /// Id of the buffer, to be validated by [`Virtqueue::take`].
    pub id: u32,
    /// Number of bytes that the device has written, from the beginning of the buffer.
    pub len_bytes: u32,
}

/// Error: the ring has too few free descriptors for a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a buffer of {needed} pieces does not fit: {free} descriptors of the ring are free")]
pub struct Full {
    /// Number of pieces of the buffer.
    pub needed: usize,
    /// Number of free descriptors.
    pub free: u16,
}

/// Impossible state of a ring that the device wrote: the ring is unusable until a reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRing {
    /// The device used more buffers than it was given, or its index went back.
    #[error("the used index went from {from} to {to} with {posted} buffers posted")]
    UsedIndex {
        /// Index up to which the driver has read.
        from: u16,
        /// Index that the device wrote.
        to: u16,
        /// Number of buffers that the device has.
        posted: u16,
    },
}

/// Driver's side of a ring.
///
/// A buffer is [posted](Self::post), [published](Self::publish), [used](Self::next_used) by the
/// device, [taken](Self::take), and then either [posted again](Self::post_again) or forgotten.
#[derive(Debug)]
pub struct Virtqueue(Ring);

#[derive(Debug)]
enum Ring {
    Split(SplitQueue),
    Packed(PackedQueue),
}

/// Calls a method of the ring in its layout.
macro_rules! ring {
    ($queue:expr, $ring:ident => $call:expr) => {
        match &mut $queue.0 {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

/// Memory that a ring needs in bytes, in whole cache lines.
///
/// # Panics
/// If `size` is not a power of two.
#[must_use]
pub fn ring_bytes(layout: VirtqueueLayout, size: u16) -> usize {
    assert!(size.is_power_of_two(), "a ring has a power of two of descriptors, not {size}");
    match layout {
        VirtqueueLayout::Split => split::SplitPlaces::of(size).end,
        VirtqueueLayout::Packed => packed::PackedPlaces::of(size).end,
    }
}

impl Virtqueue {
    /// Creates a ring at the beginning of the memory, zeroed as a device expects a new one (VQ10).
    /// An earlier ring in the same memory becomes unusable.
    ///
    /// # Panics
    /// If the size is not a power of two, or the memory has fewer than [`ring_bytes`] or does not
    /// begin on a cache line.
    #[must_use]
    pub fn new(memory: &Arc<Claim>, config: RingConfig) -> Self {
        let mut queue = Self::adopt(memory, config);
        queue.reset(config.event_idx);
        queue
    }

    /// Creates the driver's side of a ring in memory that was zeroed before the device saw it.
    /// Writes nothing there: the device may have written its wish for notifications.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[must_use]
    pub fn adopt(memory: &Arc<Claim>, config: RingConfig) -> Self {
        let RingConfig { layout, size, event_idx } = config;
        let part = memory.part();
        assert!(part.start.is_multiple_of(LINE_BYTES), "a ring begins on a cache line");
        assert!(part.len() >= ring_bytes(layout, size), "a ring takes more than {part:?}");
        let mut queue = Self(match layout {
            VirtqueueLayout::Split => Ring::Split(SplitQueue::new(memory, size)),
            VirtqueueLayout::Packed => Ring::Packed(PackedQueue::new(memory, size)),
        });
        ring!(queue, ring => ring.event_idx = event_idx);
        queue
    }

    /// Addresses to give to the device.
    #[must_use]
    pub fn addresses(&self) -> RingAddresses {
        match &self.0 {
            Ring::Split(ring) => ring.addresses(),
            Ring::Packed(ring) => ring.addresses(),
        }
    }

    /// Resets the ring: all zero, and nothing posted. Only while no device uses it.
    pub fn reset(&mut self, event_idx: bool) {
        ring!(self, ring => ring.reset(event_idx));
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        match &self.0 {
            Ring::Split(ring) => ring.size(),
            Ring::Packed(ring) => ring.size(),
        }
    }

    /// Number of free descriptors.
    #[must_use]
    pub fn free(&self) -> u16 {
        match &self.0 {
            Ring::Split(ring) => ring.free(),
            Ring::Packed(ring) => ring.free(),
        }
    }

    /// Posts a buffer of one or more pieces. The device does not see it until
    /// [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`Full`], and nothing is posted.
    ///
    /// # Panics
    /// If there is no piece.
    #[inline]
    pub fn post(
        &mut self,
        buffers: &[RingDescriptor],
        direction: Direction,
    ) -> Result<BufferId, Full> {
        match direction {
            Direction::ToDriver => ring!(self, ring => ring.post(&[], buffers)),
            Direction::ToDevice => ring!(self, ring => ring.post(buffers, &[])),
        }
    }

    /// Posts a request: pieces that the device reads, followed by pieces for its answer (VQ2).
    ///
    /// # Errors
    /// [`Full`], and nothing is posted.
    ///
    /// # Panics
    /// If there is no piece.
    pub fn post_request(
        &mut self,
        request: &[RingDescriptor],
        answer: &[RingDescriptor],
    ) -> Result<BufferId, Full> {
        ring!(self, ring => ring.post(request, answer))
    }

    /// Posts a buffer of one piece again, unchanged, after it was [taken](Self::take) and before
    /// another post could take its descriptor: the fast path of receive queues.
    ///
    /// # Panics
    /// If the buffer is posted, never was, or has several pieces.
    #[inline]
    pub fn post_again(&mut self, id: BufferId) {
        ring!(self, ring => ring.post_again(id));
    }

    /// Makes all posted buffers visible to the device, with one store. Returns true if the device
    /// wants to be kicked.
    #[inline]
    #[must_use = "a device that is not kicked may sleep for ever"]
    pub fn publish(&mut self) -> bool {
        ring!(self, ring => ring.publish())
    }

    /// Returns the next buffer that the device has used, or `None` if there is none. Shared memory
    /// is read again only after all entries found by the last read have been returned.
    ///
    /// # Errors
    /// [`InvalidRing`], then and on every later call until a [reset](Self::reset).
    #[inline]
    pub fn next_used(&mut self) -> Result<Option<Used>, InvalidRing> {
        ring!(self, ring => ring.next_used())
    }

    /// Result that [`next_used`](Self::next_used) will return after `ahead` further calls, as far
    /// as it is known. A hint, for prefetching buffers only.
    #[inline]
    #[must_use]
    pub fn peek_used(&self, ahead: u16) -> Option<Used> {
        match &self.0 {
            Ring::Split(ring) => ring.peek_used(ahead),
            Ring::Packed(ring) => ring.peek_used(ahead),
        }
    }

    /// Prefetches, for writing, the descriptor that the next post in place of this buffer will
    /// write. The device has read that descriptor, so another CPU has its cache line. A packed ring
    /// does not need this, because its used entries are on the same lines.
    #[inline]
    pub fn prefetch_place(&self, used_id: u32) {
        match &self.0 {
            Ring::Split(ring) => ring.prefetch_place(used_id),
            Ring::Packed(_) => {}
        }
    }

    /// Takes back a buffer that the device reports as used. `None` if it has no such buffer: the id
    /// is out of range, reported twice, or was not visible to the device when it reported. The ring
    /// stays usable.
    #[inline]
    pub fn take(&mut self, used_id: u32) -> Option<BufferId> {
        ring!(self, ring => ring.take(used_id))
    }

    /// Requests a call from the device when it has used more buffers, or no calls. Returns true if
    /// buffers were used meanwhile, for which no call may come: the caller must look again before
    /// it sleeps.
    #[must_use = "what came meanwhile is not called for"]
    pub fn ask_for_call(&mut self, wanted: bool) -> bool {
        ring!(self, ring => ring.ask_for_call(wanted))
    }
}

/// True if the other side wants a notification: its event index is one of the entries from `old`
/// (inclusive) to `new` (exclusive), all modulo 2^16 (section 2.7.10, `vring_need_event`).
#[inline]
fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Converts a flag of virtio-bindings, where all have 32 bits.
const fn flag(bits: u32) -> u16 {
    let [first, second, 0, 0] = bits.to_le_bytes() else { panic!("a flag of 16 bits") };
    u16::from_le_bytes([first, second])
}
