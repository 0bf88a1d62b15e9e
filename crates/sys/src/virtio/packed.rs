//! The packed ring (virtio 1.2, section 2.8): one ring of descriptors. The driver writes a
//! descriptor to make a buffer available. The device writes used descriptors at its own next
//! position, which need not be where the buffer was posted. Two flags, whose meaning changes with
//! each round, tell which side wrote a descriptor last.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use forebay_buf::Claim;
use virtio_bindings::virtio_ring::{
    VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_PACKED_DESC_F_AVAIL, VRING_PACKED_DESC_F_USED,
    VRING_PACKED_EVENT_F_WRAP_CTR, VRING_PACKED_EVENT_FLAG_DESC, VRING_PACKED_EVENT_FLAG_DISABLE,
    VRING_PACKED_EVENT_FLAG_ENABLE,
};

use super::slots::TransmitSlots;
use super::words::{Shared, Words};
use super::{
    BufferId, Full, InvalidRing, LINE_BYTES, RingAddresses, RingDescriptor, Used, flag, need_event,
};

const NEXT: u16 = flag(VRING_DESC_F_NEXT);
const WRITE: u16 = flag(VRING_DESC_F_WRITE);
const AVAIL: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
const USED: u16 = 1 << VRING_PACKED_DESC_F_USED;

/// `struct pvirtq_desc`. All words are little-endian.
#[repr(C)]
pub(super) struct PackedDescriptor {
    pub(super) address: AtomicU64,
    pub(super) len_bytes: AtomicU32,
    pub(super) id: AtomicU16,
    pub(super) flags: AtomicU16,
}

// SAFETY: 16 bytes of atomics.
unsafe impl Shared for PackedDescriptor {}

/// Notifications that one side wants of the other (`struct pvirtq_event_suppress`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EventSuppression {
    /// All notifications.
    Enable,
    /// No notifications.
    Disable,
    /// A notification when this position is reached.
    At(PackedPosition),
}

impl EventSuppression {
    const ENABLE: u16 = flag(VRING_PACKED_EVENT_FLAG_ENABLE);
    const DISABLE: u16 = flag(VRING_PACKED_EVENT_FLAG_DISABLE);
    const DESCRIPTOR: u16 = flag(VRING_PACKED_EVENT_FLAG_DESC);
    const WRAP: u16 = 1 << VRING_PACKED_EVENT_F_WRAP_CTR;

    /// Both halves as one word, so that one store writes them.
    pub(super) fn to_word(self) -> u32 {
        let (offset, flags) = match self {
            Self::Enable => (0, Self::ENABLE),
            Self::Disable => (0, Self::DISABLE),
            Self::At(PackedPosition { index, wrap }) => {
                (index | if wrap { Self::WRAP } else { 0 }, Self::DESCRIPTOR)
            }
        };
        (u32::from(flags) << 16 | u32::from(offset)).to_le()
    }

    /// Decodes the other side's word; invalid flags count as `Enable`.
    #[inline]
    pub(super) fn from_word(word: u32) -> Self {
        let [low, high, flags, _] = u32::from_le(word).to_le_bytes();
        let offset = u16::from_le_bytes([low, high]);
        match u16::from(flags & 3) {
            Self::DISABLE => Self::Disable,
            Self::DESCRIPTOR => Self::At(PackedPosition {
                index: offset & !Self::WRAP,
                wrap: offset & Self::WRAP != 0,
            }),
            _ => Self::Enable,
        }
    }
}

/// Position in the ring with its wrap counter, which determines the flags of its descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PackedPosition {
    pub(super) index: u16,
    /// The wrap counter: true in the first round, false in the next, and so on.
    pub(super) wrap: bool,
}

impl PackedPosition {
    #[cfg(any(test, feature = "twin"))]
    pub(super) const FIRST: Self = Self { index: 0, wrap: true };

    /// Position after `count` descriptors from the first one.
    #[inline]
    fn of(count: u16, size: u16) -> Self {
        Self { index: count & (size - 1), wrap: count & size == 0 }
    }

    /// Position `places` further on, at most one round.
    #[cfg(any(test, feature = "twin"))]
    pub(super) fn after(self, places: u16, size: u16) -> Self {
        // At most 2 * 32768 - 1.
        let index = self.index + places;
        if index < size {
            Self { index, ..self }
        } else {
            Self { index: index - size, wrap: !self.wrap }
        }
    }

    /// Flags of an available descriptor at this position.
    #[inline]
    pub(super) fn available(self) -> u16 {
        if self.wrap { AVAIL } else { USED }
    }

    /// True if these are the flags of a used descriptor at this position.
    #[inline]
    pub(super) fn is_used(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == if self.wrap { AVAIL | USED } else { 0 }
    }

    /// True if the last `places` steps to this position passed an event (section 2.8.10).
    #[inline]
    pub(super) fn reaches(self, event: Self, places: u16, size: u16) -> bool {
        // Index of the event, counted from the beginning of this round.
        let event_index =
            if event.wrap == self.wrap { event.index } else { event.index.wrapping_sub(size) };
        need_event(event_index, self.index, self.index.wrapping_sub(places))
    }
}

/// Offsets of the parts, in bytes from the beginning of the ring.
#[derive(Clone, Copy)]
pub(super) struct PackedPlaces {
    driver: usize,
    device: usize,
    /// A whole number of cache lines.
    pub(super) end: usize,
}

impl PackedPlaces {
    pub(super) fn of(size: u16) -> Self {
        let ring_bytes = usize::from(size) * size_of::<PackedDescriptor>();
        let driver = ring_bytes.next_multiple_of(LINE_BYTES);
        Self { driver, device: driver + LINE_BYTES, end: driver + 2 * LINE_BYTES }
    }
}

/// The ring in shared memory.
#[derive(Clone)]
pub(super) struct PackedShown {
    /// Descriptors. Written alternately by driver and device.
    pub(super) ring: Words<PackedDescriptor>,
    /// Driver event suppression. Written by the driver.
    pub(super) driver: Words<AtomicU32>,
    /// Device event suppression. Written by the device.
    pub(super) device: Words<AtomicU32>,
}

impl PackedShown {
    pub(super) fn new(memory: &Arc<Claim>, size: u16) -> Self {
        let PackedPlaces { driver, device, .. } = PackedPlaces::of(size);
        Self {
            ring: Words::new(memory, 0, usize::from(size)),
            driver: Words::new(memory, driver, 1),
            device: Words::new(memory, device, 1),
        }
    }
}

/// Buffer posted under an id.
#[derive(Clone, Copy)]
struct PostedBuffer {
    /// Number of descriptors that it occupies.
    places: u16,
    /// Descriptor flags: `WRITE` if the device writes it.
    flags: u16,
    /// First piece.
    piece: RingDescriptor,
}

const NOTHING: PostedBuffer =
    PostedBuffer { places: 0, flags: 0, piece: RingDescriptor { address: 0, len_bytes: 0 } };

/// Driver's side of the ring.
pub(super) struct PackedQueue {
    pub(super) shown: PackedShown,
    slots: TransmitSlots,
    posted: Box<[PostedBuffer]>,
    pub(super) event_idx: bool,
    /// Position of the next descriptor to fill; ahead of `published` within a batch. A count, as
    /// the other two: see [`PackedPosition::of`].
    avail_next: u16,
    /// End of the descriptors visible to the device.
    published: u16,
    /// Position of the next used descriptor; never ahead of `published`.
    used_next: u16,
    /// Number of descriptors of posted buffers: the distance from `used_next` to `avail_next`,
    /// unless the device has lied.
    held: u16,
    /// Flags of the first descriptor of the batch, written last. Until then the device sees
    /// no descriptor of the batch.
    withheld: u16,
}

impl PackedQueue {
    pub(super) fn new(memory: &Arc<Claim>, size: u16) -> Self {
        Self {
            shown: PackedShown::new(memory, size),
            slots: TransmitSlots::new(size),
            posted: vec![NOTHING; usize::from(size)].into(),
            event_idx: false,
            avail_next: 0,
            published: 0,
            used_next: 0,
            held: 0,
            withheld: 0,
        }
    }

    pub(super) fn reset(&mut self, event_idx: bool) {
        self.shown.ring.clear_all();
        self.slots.reset();
        self.posted.fill(NOTHING);
        self.event_idx = event_idx;
        (self.avail_next, self.published, self.used_next) = (0, 0, 0);
        (self.held, self.withheld) = (0, 0);
    }

    pub(super) fn addresses(&self) -> RingAddresses {
        RingAddresses {
            descriptors: self.shown.ring.address(),
            driver: self.shown.driver.address(),
            device: self.shown.device.address(),
        }
    }

    pub(super) fn size(&self) -> u16 {
        self.slots.size()
    }

    pub(super) fn free(&self) -> u16 {
        self.size() - self.taken().max(self.held)
    }

    /// Number of descriptors between `used_next` and `avail_next`, which the driver cannot fill.
    #[inline]
    fn taken(&self) -> u16 {
        self.avail_next.wrapping_sub(self.used_next)
    }

    /// Number of descriptors visible to the device.
    #[inline]
    fn seen(&self) -> u16 {
        self.published.wrapping_sub(self.used_next)
    }

    #[inline]
    pub(super) fn post(
        &mut self,
        to_device: &[RingDescriptor],
        to_driver: &[RingDescriptor],
    ) -> Result<BufferId, Full> {
        let needed = to_device.len() + to_driver.len();
        let Some(&piece) = to_device.first().or(to_driver.first()) else {
            panic!("a buffer has at least one piece");
        };
        let free = self.free();
        let places = u16::try_from(needed).ok().filter(|&places| places <= free);
        let places = places.ok_or(Full { needed, free })?;
        let id = self.slots.begin(0);
        self.slots.post(id, 1);
        self.held += places;
        let flags = if to_device.is_empty() { WRITE } else { 0 };
        self.posted[usize::from(id)] = PostedBuffer { places, flags, piece };
        let pieces = to_device.iter().map(|piece| (piece, 0));
        let pieces = pieces.chain(to_driver.iter().map(|piece| (piece, WRITE)));
        for (at, (piece, flags)) in (1..=needed).zip(pieces) {
            self.describe(*piece, id, flags | if at < needed { NEXT } else { 0 });
        }
        Ok(BufferId(id))
    }

    #[inline]
    pub(super) fn post_again(&mut self, id: BufferId) {
        let PostedBuffer { places, flags, piece } = self.posted[id.index()];
        assert!(places == 1 && self.taken() < self.size(), "a buffer of one piece is posted again");
        self.slots.post_again(id.0);
        self.held += 1;
        self.describe(piece, id.0, flags);
    }

    /// Fills the next descriptor.
    #[inline]
    fn describe(&mut self, piece: RingDescriptor, id: u16, flags: u16) {
        let at = PackedPosition::of(self.avail_next, self.size());
        let flags = flags | at.available();
        let descriptor = &self.shown.ring.all()[usize::from(at.index)];
        descriptor.address.store(piece.address.to_le(), Ordering::Relaxed);
        descriptor.len_bytes.store(piece.len_bytes.to_le(), Ordering::Relaxed);
        descriptor.id.store(id.to_le(), Ordering::Relaxed);
        if self.avail_next == self.published {
            self.withheld = flags;
        } else {
            // The device reaches this one only behind the batch's first, whose flags are written
            // last.
            descriptor.flags.store(flags.to_le(), Ordering::Relaxed);
        }
        self.avail_next = self.avail_next.wrapping_add(1);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new, size) = (self.published, self.avail_next, self.size());
        if old == new {
            return false;
        }
        self.published = new;
        // Each used descriptor is read on its turn, so all of them count as seen.
        self.slots.publish();
        self.slots.look();
        let first = &self.shown.ring.all()[usize::from(PackedPosition::of(old, size).index)];
        // Release: the rest of the descriptor and all behind it are written before (VQ6).
        first.flags.store(self.withheld.to_le(), Ordering::Release);
        // The device writes its event setting, then reads the descriptor; the driver does the
        // reverse. This pairs with the device's barrier between the two: at least one side sees the
        // other's write (VQ7).
        fence(Ordering::SeqCst);
        match EventSuppression::from_word(self.shown.device.all()[0].load(Ordering::Relaxed)) {
            EventSuppression::At(event) if self.event_idx => {
                PackedPosition::of(new, size).reaches(event, new.wrapping_sub(old), size)
            }
            EventSuppression::At(_) | EventSuppression::Enable => true,
            EventSuppression::Disable => false,
        }
    }

    /// Used descriptor `ahead` places after the next one, if the device can have written it, and
    /// has.
    #[inline]
    fn used_at(&self, ahead: u16) -> Option<Used> {
        if ahead >= self.seen() {
            // Not visible to the device: its flags are the driver's own.
            return None;
        }
        let at = PackedPosition::of(self.used_next.wrapping_add(ahead), self.size());
        let descriptor = &self.shown.ring.all()[usize::from(at.index)];
        if !at.is_used(u16::from_le(descriptor.flags.load(Ordering::Relaxed))) {
            return None;
        }
        // Acquire: the rest of the descriptor, and its buffer, were written before.
        fence(Ordering::Acquire);
        Some(Used {
            id: u32::from(u16::from_le(descriptor.id.load(Ordering::Relaxed))),
            len_bytes: u32::from_le(descriptor.len_bytes.load(Ordering::Relaxed)),
        })
    }

    #[inline]
    pub(super) fn next_used(&mut self) -> Result<Option<Used>, InvalidRing> {
        let Some(used) = self.used_at(0) else { return Ok(None) };
        // The device skips the buffer's other descriptors. An id that is not posted counts as one.
        let places = self.slots.pieces(used.id).and_then(|_| {
            let posted = self.posted.get(usize::try_from(used.id).ok()?)?;
            // Never beyond the visible descriptors, whatever the device wrote before.
            Some(posted.places.min(self.seen()))
        });
        let places = places.unwrap_or(1);
        self.used_next = self.used_next.wrapping_add(places);
        Ok(Some(used))
    }

    /// Exact as long as buffers have one piece.
    #[inline]
    pub(super) fn peek_used(&self, ahead: u16) -> Option<Used> {
        self.used_at(ahead)
    }

    #[inline]
    pub(super) fn take(&mut self, used_id: u32) -> Option<BufferId> {
        let id = self.slots.take(used_id)?;
        self.held -= self.posted[usize::from(id)].places;
        Some(BufferId(id))
    }

    pub(super) fn ask_for_call(&mut self, wanted: bool) -> bool {
        let event = match (wanted, self.event_idx) {
            (false, _) => EventSuppression::Disable,
            (true, false) => EventSuppression::Enable,
            (true, true) => EventSuppression::At(PackedPosition::of(self.used_next, self.size())),
        };
        self.shown.driver.all()[0].store(event.to_word(), Ordering::Relaxed);
        // As in `publish`, with the roles exchanged.
        fence(Ordering::SeqCst);
        wanted && self.used_at(0).is_some()
    }
}

impl fmt::Debug for PackedQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let posted = self.slots.posted();
        write!(f, "Packed({} descriptors, {posted} buffers posted)", self.size())
    }
}
