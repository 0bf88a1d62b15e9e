//! Virtqueues: rings in memory that a device in another process reads and writes (virtio 1.2, sections
//! 2.6 to 2.8).
//!
//! The device may write anything anywhere in that memory at any time. So all that we rely on is ours
//! alone: which buffers are posted, how they are chained, which descriptors are free, how far both
//! sides have come. Shared memory is written, and of it only what a device has to say is read: how far
//! it has used, which buffers, how many bytes, and whether it wants to be kicked. Each is looked up or
//! compared before it is believed.

mod memory; // what a device maps
mod packed; // one ring that both sides write
mod slots; //  what is posted: our own record
mod split; //  one ring for each side
mod words; //  shared memory as atomics

#[cfg(test)]
mod properties; //    what holds of any ring
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

/// The parts of a ring begin on lines of their own.
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
    /// True if each side says at which entry it wants to hear of the other
    /// (`VIRTIO_F_RING_EVENT_IDX`).
    pub event_idx: bool,
}

/// Addresses of the parts of a ring, for the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingAddresses {
    /// The descriptors; of a packed ring, the ring.
    pub descriptors: u64,
    /// Part that the driver writes: the available ring, or the driver's event suppression.
    pub driver: u64,
    /// Part that the device writes: the used ring, or the device's event suppression.
    pub device: u64,
}

/// A piece of memory that a device is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingDescriptor {
    /// The first byte, as the device knows it.
    pub address: u64,
    /// Length.
    pub len_bytes: u32,
}

/// Side that writes a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The device does: to receive.
    ToDriver,
    /// The driver writes: to transmit.
    ToDevice,
}

/// A buffer that was posted: less than the size of the ring, and not another's before it is taken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BufferId(u16);

impl BufferId {
    /// A place in a table as long as the ring.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Buffer that a device says it has used; nothing of it is known to be true.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Used {
    /// Of which buffer: see [`Virtqueue::take`].
    pub id: u32,
    /// Bytes that it has written, from the beginning of the buffer on.
    pub len_bytes: u32,
}

/// There is no room for a buffer of so many pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a buffer of {needed} pieces does not fit: {free} descriptors of the ring are free")]
pub struct Full {
    /// The pieces.
    pub needed: usize,
    /// The descriptors.
    pub free: u16,
}

/// State of a ring, as a device says, that cannot be: the ring is of no use any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRing {
    /// The device has used more than it was given, or takes back what it has said.
    #[error("the used index went from {from} to {to} with {posted} buffers posted")]
    UsedIndex {
        /// Up to where we have read.
        from: u16,
        /// Up to where there is to be something.
        to: u16,
        /// The buffers that it has.
        posted: u16,
    },
}

/// The driver's side of a ring.
///
/// A buffer is [posted](Self::post), [published](Self::publish), [used](Self::next_used) by the device,
/// [taken](Self::take), and then either [posted again](Self::post_again) or forgotten.
#[derive(Debug)]
pub struct Virtqueue(Ring);

#[derive(Debug)]
enum Ring {
    Split(SplitQueue),
    Packed(PackedQueue),
}

/// Calls a method of the ring that there is.
macro_rules! ring {
    ($queue:expr, $ring:ident => $call:expr) => {
        match &mut $queue.0 {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

/// Memory that a ring takes, in whole cache lines.
///
/// # Panics
/// When `size` is not a power of two.
#[must_use]
pub fn ring_bytes(layout: VirtqueueLayout, size: u16) -> usize {
    assert!(size.is_power_of_two(), "a ring has a power of two of descriptors, not {size}");
    match layout {
        VirtqueueLayout::Split => split::SplitPlaces::of(size).end,
        VirtqueueLayout::Packed => packed::PackedPlaces::of(size).end,
    }
}

impl Virtqueue {
    /// Makes a ring at the beginning of that memory, all zero as a device expects a new one (VQ10). One
    /// that was there before is of no use any more.
    ///
    /// # Panics
    /// When the size is not a power of two, or the memory has fewer than [`ring_bytes`] or does not begin
    /// on a cache line.
    #[must_use]
    pub fn new(memory: &Arc<Claim>, config: RingConfig) -> Self {
        let RingConfig { layout, size, event_idx } = config;
        let part = memory.part();
        assert!(part.start.is_multiple_of(LINE_BYTES), "a ring begins on a cache line");
        assert!(part.len() >= ring_bytes(layout, size), "a ring takes more than {part:?}");
        let mut queue = Self(match layout {
            VirtqueueLayout::Split => Ring::Split(SplitQueue::new(memory, size)),
            VirtqueueLayout::Packed => Ring::Packed(PackedQueue::new(memory, size)),
        });
        queue.reset(event_idx);
        queue
    }

    /// Addresses that the device is told.
    #[must_use]
    pub fn addresses(&self) -> RingAddresses {
        match &self.0 {
            Ring::Split(ring) => ring.addresses(),
            Ring::Packed(ring) => ring.addresses(),
        }
    }

    /// As new: all zero, and nothing posted. Only while no device uses it.
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

    /// Descriptors that are free.
    #[must_use]
    pub fn free(&self) -> u16 {
        match &self.0 {
            Ring::Split(ring) => ring.free(),
            Ring::Packed(ring) => ring.free(),
        }
    }

    /// Posts a buffer of one or more pieces. The device does not see it before
    /// [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`Full`], and nothing is posted.
    ///
    /// # Panics
    /// When there is no piece.
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

    /// Posts a request: pieces that the device reads, and behind them those that it answers in (VQ2).
    ///
    /// # Errors
    /// [`Full`], and nothing is posted.
    ///
    /// # Panics
    /// When there is no piece.
    pub fn post_request(
        &mut self,
        request: &[RingDescriptor],
        answer: &[RingDescriptor],
    ) -> Result<BufferId, Full> {
        ring!(self, ring => ring.post(request, answer))
    }

    /// Posts a buffer unchanged that was [taken](Self::take), with nothing posted since that may have
    /// got its descriptor: the shortest way of the receive side.
    ///
    /// # Panics
    /// When it is posted, never was, or is of several pieces.
    #[inline]
    pub fn post_again(&mut self, id: BufferId) {
        ring!(self, ring => ring.post_again(id));
    }

    /// Shows the device all that was posted, with one store; whether it wants to be kicked.
    #[inline]
    #[must_use = "a device that is not kicked may sleep for ever"]
    pub fn publish(&mut self) -> bool {
        ring!(self, ring => ring.publish())
    }

    /// Buffer that the device has used next; `None` when there is no more. Shared memory is looked at anew only
    /// when what was seen is used up.
    ///
    /// # Errors
    /// A lie. From then on there is nothing but this error, until a [reset](Self::reset).
    #[inline]
    pub fn next_used(&mut self) -> Result<Option<Used>, InvalidRing> {
        ring!(self, ring => ring.next_used())
    }

    /// Answer that [`next_used`](Self::next_used) will give `ahead` calls after the next, as far as that is
    /// known: to fetch buffers ahead, and for nothing else.
    #[inline]
    #[must_use]
    pub fn peek_used(&self, ahead: u16) -> Option<Used> {
        match &self.0 {
            Ring::Split(ring) => ring.peek_used(ahead),
            Ring::Packed(ring) => ring.peek_used(ahead),
        }
    }

    /// Asks for what is written when another buffer is posted in the place of that one, ahead of it:
    /// a device has read it, so its line is elsewhere. A packed ring has such on the lines that it is
    /// read from.
    #[inline]
    pub fn prefetch_place(&self, used_id: u32) {
        match &self.0 {
            Ring::Split(ring) => ring.prefetch_place(used_id),
            Ring::Packed(_) => {}
        }
    }

    /// Takes back a buffer that the device says it has used. `None`: it has no such buffer (out of range,
    /// said twice, or posted since and not to be seen when it said so); the ring goes on.
    #[inline]
    pub fn take(&mut self, used_id: u32) -> Option<BufferId> {
        ring!(self, ring => ring.take(used_id))
    }

    /// Asks the device to call when it has used more, or not to. True: something came meanwhile for which
    /// no call may come, so look again before sleeping.
    #[must_use = "what came meanwhile is not called for"]
    pub fn ask_for_call(&mut self, wanted: bool) -> bool {
        ring!(self, ring => ring.ask_for_call(wanted))
    }
}

/// True if the other side wants to hear of something: its event lies within what was done from `old`
/// (inclusive) to `new` (exclusive); all of them wrap around (section 2.7.10, `vring_need_event`).
#[inline]
fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A flag of virtio-bindings, which has them all as 32 bits.
const fn flag(bits: u32) -> u16 {
    let [first, second, 0, 0] = bits.to_le_bytes() else { panic!("a flag of 16 bits") };
    u16::from_le_bytes([first, second])
}
