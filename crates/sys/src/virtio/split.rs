//! The split ring (virtio 1.2, section 2.7): descriptors, an available ring that the driver writes,
//! and a used ring that the device writes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use forebay_buf::Claim;
use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};

use super::slots::TransmitSlots;
use super::words::{Shared, Words};
use super::{
    BufferId, Full, InvalidRing, LINE_BYTES, RingAddresses, RingDescriptor, Used, flag, need_event,
};

const NEXT: u16 = flag(VRING_DESC_F_NEXT);
const WRITE: u16 = flag(VRING_DESC_F_WRITE);
const NO_INTERRUPT: u16 = flag(VRING_AVAIL_F_NO_INTERRUPT);
const NO_NOTIFY: u16 = flag(VRING_USED_F_NO_NOTIFY);

/// `struct vring_desc`. All words are little-endian.
#[repr(C)]
pub(super) struct SplitDescriptor {
    pub(super) address: AtomicU64,
    pub(super) len_bytes: AtomicU32,
    pub(super) flags: AtomicU16,
    pub(super) next: AtomicU16,
}

// SAFETY: 16 bytes of atomics.
unsafe impl Shared for SplitDescriptor {}

/// `struct vring_used_elem`.
#[repr(C)]
pub(super) struct UsedEntry {
    pub(super) id: AtomicU32,
    pub(super) len_bytes: AtomicU32,
}

// SAFETY: 8 bytes of atomics.
unsafe impl Shared for UsedEntry {}

/// Size of the flags and the index, two bytes each, in front of the entries of either ring.
const HEAD_BYTES: usize = 4;
const FLAGS: usize = 0;
const INDEX: usize = 1;
/// Offset of the entries of the available ring, in words.
const ENTRIES: usize = 2;

/// Offsets of the parts, in bytes from the beginning of the ring.
#[derive(Clone, Copy)]
pub(super) struct SplitPlaces {
    avail: usize,
    /// Ends its head just before a cache line, so that each line has eight entries and none spans
    /// two. The index is on a line without entries: the device writes it while the driver reads
    /// entries.
    used: usize,
    /// A whole number of cache lines.
    pub(super) end: usize,
}

impl SplitPlaces {
    pub(super) fn of(size: u16) -> Self {
        let size = usize::from(size);
        let avail = (size * size_of::<SplitDescriptor>()).next_multiple_of(LINE_BYTES);
        let avail_bytes = HEAD_BYTES + size_of::<u16>() * (size + 1);
        let entries = (avail + avail_bytes).next_multiple_of(LINE_BYTES) + LINE_BYTES;
        let used_bytes = size_of::<UsedEntry>() * size + size_of::<u16>();
        let end = (entries + used_bytes).next_multiple_of(LINE_BYTES);
        Self { avail, used: entries - HEAD_BYTES, end }
    }
}

/// The ring in shared memory.
#[derive(Clone)]
pub(super) struct SplitShown {
    pub(super) descriptors: Words<SplitDescriptor>,
    /// Flags, index, entries, and the used event index. Written by the driver.
    pub(super) avail: Words<AtomicU16>,
    /// Flags and index. Written by the device.
    pub(super) used_head: Words<AtomicU16>,
    /// Entries. Written by the device.
    pub(super) used: Words<UsedEntry>,
    /// Available event index: the entry that the device wants to be kicked for. Written by the
    /// device.
    pub(super) avail_event: Words<AtomicU16>,
}

impl SplitShown {
    pub(super) fn new(memory: &Arc<Claim>, size: u16) -> Self {
        let SplitPlaces { avail, used, .. } = SplitPlaces::of(size);
        let size = usize::from(size);
        let entries = used + HEAD_BYTES;
        Self {
            descriptors: Words::new(memory, 0, size),
            avail: Words::new(memory, avail, ENTRIES + size + 1),
            used_head: Words::new(memory, used, ENTRIES),
            used: Words::new(memory, entries, size),
            avail_event: Words::new(memory, entries + size * size_of::<UsedEntry>(), 1),
        }
    }

    pub(super) fn used_event(&self) -> &AtomicU16 {
        let avail = self.avail.all();
        &avail[avail.len() - 1]
    }
}

/// Driver's side of the ring.
pub(super) struct SplitQueue {
    pub(super) shown: SplitShown,
    slots: TransmitSlots,
    mask: u16,
    pub(super) event_idx: bool,
    /// Position of the next available entry; ahead of `published` within a batch.
    avail_next: u16,
    /// Available index: end of the entries visible to the device.
    published: u16,
    /// Used index up to which the driver has read.
    used_next: u16,
    /// Used index of the device as last read.
    used_seen: u16,
    /// Violation that ended the use of the ring.
    lie: Option<InvalidRing>,
}

impl SplitQueue {
    pub(super) fn new(memory: &Arc<Claim>, size: u16) -> Self {
        Self {
            shown: SplitShown::new(memory, size),
            slots: TransmitSlots::new(size),
            mask: size - 1,
            event_idx: false,
            avail_next: 0,
            published: 0,
            used_next: 0,
            used_seen: 0,
            lie: None,
        }
    }

    pub(super) fn reset(&mut self, event_idx: bool) {
        self.shown.descriptors.clear_all();
        self.slots.reset();
        self.event_idx = event_idx;
        (self.avail_next, self.published, self.used_next, self.used_seen) = (0, 0, 0, 0);
        self.lie = None;
    }

    pub(super) fn addresses(&self) -> RingAddresses {
        RingAddresses {
            descriptors: self.shown.descriptors.address(),
            driver: self.shown.avail.address(),
            device: self.shown.used_head.address(),
        }
    }

    pub(super) fn size(&self) -> u16 {
        self.slots.size()
    }

    pub(super) fn free(&self) -> u16 {
        self.slots.free()
    }

    #[inline]
    pub(super) fn post(
        &mut self,
        to_device: &[RingDescriptor],
        to_driver: &[RingDescriptor],
    ) -> Result<BufferId, Full> {
        match (to_device, to_driver) {
            ([], [piece]) => self.post_one(piece),
            _ => self.post_chain(to_device, to_driver),
        }
    }

    /// Posts a buffer of one piece for receiving.
    #[inline(always)] // once for a packet
    fn post_one(&mut self, piece: &RingDescriptor) -> Result<BufferId, Full> {
        let free = self.slots.free();
        if free == 0 {
            return Err(Full { needed: 1, free });
        }
        let id = self.describe(piece, WRITE, 0);
        self.slots.post(id, 1);
        self.offer(id);
        Ok(BufferId(id))
    }

    #[inline(never)]
    fn post_chain(
        &mut self,
        to_device: &[RingDescriptor],
        to_driver: &[RingDescriptor],
    ) -> Result<BufferId, Full> {
        let needed = to_device.len() + to_driver.len();
        assert!(needed > 0, "a buffer has at least one piece");
        let free = self.slots.free();
        let pieces = u16::try_from(needed).ok().filter(|&pieces| pieces <= free);
        let pieces = pieces.ok_or(Full { needed, free })?;
        // From the last piece to the first, since each descriptor holds the index of the next.
        let (mut flags, mut next) = (0, 0);
        for piece in to_driver.iter().rev() {
            next = self.describe(piece, flags | WRITE, next);
            flags = NEXT;
        }
        for piece in to_device.iter().rev() {
            next = self.describe(piece, flags, next);
            flags = NEXT;
        }
        self.slots.post(next, pieces);
        self.offer(next);
        Ok(BufferId(next))
    }

    /// Fills a free descriptor, and returns its index.
    #[inline]
    fn describe(&mut self, piece: &RingDescriptor, flags: u16, next: u16) -> u16 {
        let id = self.slots.begin(next);
        let descriptor = &self.shown.descriptors.all()[usize::from(id)];
        descriptor.address.store(piece.address.to_le(), Ordering::Relaxed);
        descriptor.len_bytes.store(piece.len_bytes.to_le(), Ordering::Relaxed);
        descriptor.flags.store(flags.to_le(), Ordering::Relaxed);
        descriptor.next.store(next.to_le(), Ordering::Relaxed);
        id
    }

    #[inline]
    pub(super) fn post_again(&mut self, id: BufferId) {
        self.slots.post_again(id.0);
        self.offer(id.0);
    }

    #[inline]
    fn offer(&mut self, id: u16) {
        let at = usize::from(self.avail_next & self.mask);
        self.shown.avail.all()[ENTRIES + at].store(id.to_le(), Ordering::Relaxed);
        self.avail_next = self.avail_next.wrapping_add(1);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.avail_next);
        if old == new {
            return false;
        }
        self.published = new;
        self.slots.publish();
        // Release: descriptors and entries are written before (VQ6).
        self.shown.avail.all()[INDEX].store(new.to_le(), Ordering::Release);
        // The device writes its event setting, then reads the index; the driver does the reverse.
        // This pairs with the device's barrier between the two: at least one side sees the other's
        // write (VQ7).
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = u16::from_le(self.shown.avail_event.all()[0].load(Ordering::Relaxed));
            need_event(event, new, old)
        } else {
            let flags = u16::from_le(self.shown.used_head.all()[FLAGS].load(Ordering::Relaxed));
            flags & NO_NOTIFY == 0
        }
    }

    #[inline(always)] // once for a packet
    pub(super) fn next_used(&mut self) -> Result<Option<Used>, InvalidRing> {
        if self.used_next == self.used_seen && !self.look()? {
            return Ok(None);
        }
        let used = self.used_at(self.used_next);
        self.used_next = self.used_next.wrapping_add(1);
        Ok(Some(used))
    }

    /// Reads the used index. Returns true if there are new entries.
    #[inline(never)] // once for a batch
    fn look(&mut self) -> Result<bool, InvalidRing> {
        if let Some(lie) = self.lie {
            return Err(lie);
        }
        let from = self.used_next;
        let to = self.used_index();
        let came = to.wrapping_sub(from);
        if came == 0 {
            return Ok(false);
        }
        let unseen = self.avail_next.wrapping_sub(self.published);
        let posted = self.slots.posted().saturating_sub(unseen);
        // The device can only use buffers that were visible to it.
        if came > posted {
            return Err(*self.lie.insert(InvalidRing::UsedIndex { from, to, posted }));
        }
        // Acquire: the entries up to there, and their buffers, were written before.
        fence(Ordering::Acquire);
        self.used_seen = to;
        self.slots.look();
        Ok(true)
    }

    #[inline]
    fn used_index(&self) -> u16 {
        u16::from_le(self.shown.used_head.all()[INDEX].load(Ordering::Relaxed))
    }

    #[inline]
    fn used_at(&self, index: u16) -> Used {
        let entry = &self.shown.used.all()[usize::from(index & self.mask)];
        Used {
            id: u32::from_le(entry.id.load(Ordering::Relaxed)),
            len_bytes: u32::from_le(entry.len_bytes.load(Ordering::Relaxed)),
        }
    }

    #[inline]
    pub(super) fn peek_used(&self, ahead: u16) -> Option<Used> {
        let known = self.used_seen.wrapping_sub(self.used_next);
        (ahead < known).then(|| self.used_at(self.used_next.wrapping_add(ahead)))
    }

    #[inline]
    pub(super) fn prefetch_place(&self, used_id: u32) {
        if let Some(descriptor) = self.shown.descriptors.all().get(used_id as usize) {
            forebay_buf::prefetch_value_to_write(descriptor);
        }
    }

    #[inline]
    pub(super) fn take(&mut self, used_id: u32) -> Option<BufferId> {
        self.slots.take(used_id).map(BufferId)
    }

    pub(super) fn ask_for_call(&mut self, wanted: bool) -> bool {
        if self.event_idx {
            // No calls: an event index behind the used index is reached only after a whole round
            // (VQ9).
            let event = if wanted { self.used_next } else { self.used_next.wrapping_sub(1) };
            self.shown.used_event().store(event.to_le(), Ordering::Relaxed);
        } else {
            let flags = if wanted { 0 } else { NO_INTERRUPT };
            self.shown.avail.all()[FLAGS].store(flags.to_le(), Ordering::Relaxed);
        }
        // As in `publish`, with the roles exchanged.
        fence(Ordering::SeqCst);
        wanted && self.used_index() != self.used_next
    }
}

impl fmt::Debug for SplitQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let posted = self.slots.posted();
        write!(f, "Split({} descriptors, {posted} buffers posted)", self.slots.size())
    }
}
