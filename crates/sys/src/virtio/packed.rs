//! The packed ring (virtio 1.2, section 2.8): one ring of descriptors. We write one to make it
//! available, and the device writes it anew when its buffer is used: at the place where it next wants
//! to say so, which need not be where the buffer was posted. Two flags say whose turn a place is; what
//! they mean changes with each round.

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

/// Events that one side wants to hear of the other (`struct pvirtq_event_suppress`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EventSuppression {
    /// Everything.
    Enable,
    /// Nothing.
    Disable,
    /// The descriptor there.
    At(PackedPosition),
}

impl EventSuppression {
    const ENABLE: u16 = flag(VRING_PACKED_EVENT_FLAG_ENABLE);
    const DISABLE: u16 = flag(VRING_PACKED_EVENT_FLAG_DISABLE);
    const DESCRIPTOR: u16 = flag(VRING_PACKED_EVENT_FLAG_DESC);
    const WRAP: u16 = 1 << VRING_PACKED_EVENT_F_WRAP_CTR;

    /// As both halves are written, with one store.
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

    /// Reads what the other side has written; what has no meaning asks for everything.
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

/// A place in the ring, and the round: what the flags of its descriptor are to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PackedPosition {
    pub(super) index: u16,
    /// The wrap counter: true in the first round, false in the next, and so on.
    pub(super) wrap: bool,
}

impl PackedPosition {
    #[cfg(any(test, feature = "twin"))]
    pub(super) const FIRST: Self = Self { index: 0, wrap: true };

    /// Position of a count of places that began at the first one.
    #[inline]
    fn of(count: u16, size: u16) -> Self {
        Self { index: count & (size - 1), wrap: count & size == 0 }
    }

    /// So many places on, at most one round.
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

    /// Flags that make a descriptor there available.
    #[inline]
    pub(super) fn available(self) -> u16 {
        if self.wrap { AVAIL } else { USED }
    }

    /// True if these are the flags of a used descriptor there.
    #[inline]
    pub(super) fn is_used(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == if self.wrap { AVAIL | USED } else { 0 }
    }

    /// True if an event is reached by going on to here by `places` (section 2.8.10).
    #[inline]
    pub(super) fn reaches(self, event: Self, places: u16, size: u16) -> bool {
        // In the count that begins with this round.
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

/// The ring as it lies in shared memory.
#[derive(Clone)]
pub(super) struct PackedShown {
    /// Written in turn by us and by the device.
    pub(super) ring: Words<PackedDescriptor>,
    /// Event suppression of the driver. We write it.
    pub(super) driver: Words<AtomicU32>,
    /// Event suppression of the device. It writes it.
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

/// Buffer that was posted under an id.
#[derive(Clone, Copy)]
struct PostedBuffer {
    /// Places of the ring that it takes.
    places: u16,
    /// Side that writes it, as flags.
    flags: u16,
    /// The first piece.
    piece: RingDescriptor,
}

const NOTHING: PostedBuffer =
    PostedBuffer { places: 0, flags: 0, piece: RingDescriptor { address: 0, len_bytes: 0 } };

/// The driver's side.
pub(super) struct PackedQueue {
    pub(super) shown: PackedShown,
    slots: TransmitSlots,
    posted: Box<[PostedBuffer]>,
    pub(super) event_idx: bool,
    /// Position of the next descriptor; ahead of `published` within a batch. A count, as the other two:
    /// see [`PackedPosition::of`].
    avail_next: u16,
    /// End of what the device may see.
    published: u16,
    /// Position of the next used one; never ahead of `published`.
    used_next: u16,
    /// Places of the buffers that are posted: as many as from there to `avail_next`, unless the device
    /// has lied.
    held: u16,
    /// The flags of the first descriptor that the device cannot see yet: without them it does not see
    /// the others either.
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

    /// Places that are not ours to fill.
    #[inline]
    fn taken(&self) -> u16 {
        self.avail_next.wrapping_sub(self.used_next)
    }

    /// Descriptors that the device may see.
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
            // The device comes to it only behind the first, whose flags release it.
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
        // Each used descriptor is looked at when its turn comes.
        self.slots.publish();
        self.slots.look();
        let first = &self.shown.ring.all()[usize::from(PackedPosition::of(old, size).index)];
        // Release: the rest of the descriptor and all behind it come before it (VQ6).
        first.flags.store(self.withheld.to_le(), Ordering::Release);
        // The device says that it wants to be kicked, then looks at the descriptor; we the other way
        // round. Pairs with the barrier between these two of the device: one sees the other (VQ7).
        fence(Ordering::SeqCst);
        match EventSuppression::from_word(self.shown.device.all()[0].load(Ordering::Relaxed)) {
            EventSuppression::At(event) if self.event_idx => {
                PackedPosition::of(new, size).reaches(event, new.wrapping_sub(old), size)
            }
            EventSuppression::At(_) | EventSuppression::Enable => true,
            EventSuppression::Disable => false,
        }
    }

    /// The descriptor that many used ones on, if the device can have used it and says so.
    #[inline]
    fn used_at(&self, ahead: u16) -> Option<Used> {
        if ahead >= self.seen() {
            return None;
        }
        let at = PackedPosition::of(self.used_next.wrapping_add(ahead), self.size());
        let descriptor = &self.shown.ring.all()[usize::from(at.index)];
        if !at.is_used(u16::from_le(descriptor.flags.load(Ordering::Relaxed))) {
            return None;
        }
        // Acquire: the rest of the descriptor, and what is in its buffer, were written before.
        fence(Ordering::Acquire);
        Some(Used {
            id: u32::from(u16::from_le(descriptor.id.load(Ordering::Relaxed))),
            len_bytes: u32::from_le(descriptor.len_bytes.load(Ordering::Relaxed)),
        })
    }

    #[inline]
    pub(super) fn next_used(&mut self) -> Result<Option<Used>, InvalidRing> {
        let Some(used) = self.used_at(0) else { return Ok(None) };
        // The device leaves out the other places of the buffer. An id that is not posted has one.
        let places = self.slots.pieces(used.id).and_then(|_| {
            let posted = self.posted.get(usize::try_from(used.id).ok()?)?;
            // Never beyond what is posted, whatever it has said before.
            Some(posted.places.min(self.seen()))
        });
        let places = places.unwrap_or(1);
        self.used_next = self.used_next.wrapping_add(places);
        Ok(Some(used))
    }

    /// Right as long as buffers are of one piece.
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
