//! Device's side of both rings, by sections 2.7 and 2.8, for tests. The device is honest and
//! asserts the driver's duties.

use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::packed::{self, EventSuppression, PackedPosition};
#[cfg(test)]
use super::words::Words;
use super::{Ring, Virtqueue, need_event, split};

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Buffer as the device received it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Got {
    pub id: u16,
    /// Address and length of each piece, and true if the device is to write it.
    pub pieces: Vec<(u64, u32, bool)>,
}

pub enum ReferenceDevice {
    Split(SplitTwin),
    Packed(PackedTwin),
}

pub struct SplitTwin {
    pub(super) shown: split::SplitShown,
    size: u16,
    event_idx: bool,
    avail_next: u16,
    used_next: u16,
    /// Used index up to which the driver was called, or needed no call.
    called: u16,
}

pub struct PackedTwin {
    pub(super) shown: packed::PackedShown,
    size: u16,
    event_idx: bool,
    avail_next: PackedPosition,
    used_next: PackedPosition,
    /// Number of descriptors used since the last decision to call the driver or not.
    uncalled: u16,
    /// Number of descriptors of each buffer that the device has.
    places: Vec<u16>,
}

impl ReferenceDevice {
    /// Creates the device of a queue that is as new.
    pub fn of(queue: &Virtqueue) -> Self {
        let size = queue.size();
        match &queue.0 {
            Ring::Split(ring) => Self::Split(SplitTwin {
                shown: ring.shown.clone(),
                size,
                event_idx: ring.event_idx,
                avail_next: 0,
                used_next: 0,
                called: 0,
            }),
            Ring::Packed(ring) => Self::Packed(PackedTwin {
                shown: ring.shown.clone(),
                size,
                event_idx: ring.event_idx,
                avail_next: PackedPosition::FIRST,
                used_next: PackedPosition::FIRST,
                uncalled: 0,
                places: vec![0; usize::from(size)],
            }),
        }
    }

    /// Takes the next available buffer.
    pub fn take(&mut self) -> Option<Got> {
        let got = match self {
            Self::Split(twin) => twin.take(),
            Self::Packed(twin) => twin.take(),
        }?;
        let writable = got.pieces.iter().map(|piece| piece.2);
        assert!(writable.is_sorted(), "VQ2: what is written comes behind what is read");
        Some(got)
    }

    /// Reports a buffer as used.
    pub fn give(&mut self, id: u16, len_bytes: u32) {
        match self {
            Self::Split(twin) => twin.give(id, len_bytes),
            Self::Packed(twin) => twin.give(id, len_bytes),
        }
    }

    /// Reports 7 bytes of a buffer that the device does not have as used.
    pub fn give_bad(&mut self, id: u16) {
        match self {
            Self::Split(twin) => twin.give(id, 7),
            Self::Packed(twin) => twin.put(id, 7, 1),
        }
    }

    /// True if the driver wants a call for the buffers used since the last call of this method.
    pub fn calls(&mut self) -> bool {
        fence(Ordering::SeqCst);
        match self {
            Self::Split(twin) => twin.calls(),
            Self::Packed(twin) => twin.calls(),
        }
    }

    /// Requests kicks or none. Returns true if a buffer is available already.
    pub fn ask_for_kick(&mut self, wanted: bool) -> bool {
        match self {
            Self::Split(twin) => twin.ask_for_kick(wanted),
            Self::Packed(twin) => twin.ask_for_kick(wanted),
        }
        fence(Ordering::SeqCst);
        wanted && self.has_more()
    }

    /// Memory of the ring, to write anything to.
    #[cfg(test)]
    pub(super) fn overlay(&self) -> Words<AtomicU16> {
        match self {
            Self::Split(twin) => twin.shown.descriptors.overlay(),
            Self::Packed(twin) => twin.shown.ring.overlay(),
        }
    }

    /// True if another buffer is available.
    pub fn has_more(&self) -> bool {
        match self {
            Self::Split(twin) => twin.available() != twin.avail_next,
            Self::Packed(twin) => twin.is_available(),
        }
    }
}

impl SplitTwin {
    fn available(&self) -> u16 {
        self.shown.avail.all()[1].load(Ordering::Acquire)
    }

    fn take(&mut self) -> Option<Got> {
        let waiting = self.available().wrapping_sub(self.avail_next);
        assert!(waiting <= self.size, "VQ5: the available index went back, or too far");
        if waiting == 0 {
            return None;
        }
        let at = usize::from(self.avail_next & (self.size - 1));
        let id = self.shown.avail.all()[2 + at].load(Ordering::Relaxed);
        self.avail_next = self.avail_next.wrapping_add(1);
        let mut pieces = Vec::new();
        let mut next = id;
        loop {
            let descriptor = &self.shown.descriptors.all()[usize::from(next)];
            let flags = descriptor.flags.load(Ordering::Relaxed);
            assert_eq!(flags & !(NEXT | WRITE), 0, "VQ4");
            let address = descriptor.address.load(Ordering::Relaxed);
            let len_bytes = descriptor.len_bytes.load(Ordering::Relaxed);
            pieces.push((address, len_bytes, flags & WRITE != 0));
            assert!(pieces.len() <= usize::from(self.size), "VQ3: a chain that does not end");
            if flags & NEXT == 0 {
                return Some(Got { id, pieces });
            }
            next = descriptor.next.load(Ordering::Relaxed);
        }
    }

    pub(super) fn give(&mut self, id: u16, len_bytes: u32) {
        let entry = &self.shown.used.all()[usize::from(self.used_next & (self.size - 1))];
        entry.id.store(u32::from(id), Ordering::Relaxed);
        entry.len_bytes.store(len_bytes, Ordering::Relaxed);
        self.used_next = self.used_next.wrapping_add(1);
        self.used_index().store(self.used_next, Ordering::Release);
    }

    pub(super) fn used_index(&self) -> &AtomicU16 {
        &self.shown.used_head.all()[1]
    }

    fn calls(&mut self) -> bool {
        let (old, new) = (self.called, self.used_next);
        self.called = new;
        let flags = self.shown.avail.all()[0].load(Ordering::Relaxed);
        assert!(flags <= u16::from(!self.event_idx), "VQ9");
        if self.event_idx {
            need_event(self.shown.used_event().load(Ordering::Relaxed), new, old)
        } else {
            old != new && flags == 0
        }
    }

    fn ask_for_kick(&mut self, wanted: bool) {
        if self.event_idx {
            let event =
                if wanted { self.avail_next } else { self.avail_next.wrapping_sub(self.size) };
            self.shown.avail_event.all()[0].store(event, Ordering::Relaxed);
        } else {
            self.shown.used_head.all()[0].store(u16::from(!wanted), Ordering::Relaxed);
        }
    }
}

impl PackedTwin {
    fn is_available(&self) -> bool {
        let descriptor = &self.shown.ring.all()[usize::from(self.avail_next.index)];
        let flags = descriptor.flags.load(Ordering::Acquire);
        (flags & 1 << 7 != 0) == self.avail_next.wrap
            && (flags & 1 << 15 != 0) != self.avail_next.wrap
    }

    fn take(&mut self) -> Option<Got> {
        if !self.is_available() {
            return None;
        }
        let mut pieces = Vec::new();
        loop {
            assert!(self.is_available(), "a chain is available as a whole");
            let descriptor = &self.shown.ring.all()[usize::from(self.avail_next.index)];
            let flags = descriptor.flags.load(Ordering::Relaxed);
            assert_eq!(flags & !(NEXT | WRITE | 1 << 7 | 1 << 15), 0, "VQ4");
            let address = descriptor.address.load(Ordering::Relaxed);
            let len_bytes = descriptor.len_bytes.load(Ordering::Relaxed);
            pieces.push((address, len_bytes, flags & WRITE != 0));
            assert!(pieces.len() <= usize::from(self.size), "VQ3: a chain that does not end");
            self.avail_next = self.avail_next.after(1, self.size);
            if flags & NEXT == 0 {
                let id = descriptor.id.load(Ordering::Relaxed);
                self.places[usize::from(id)] = u16::try_from(pieces.len()).unwrap();
                return Some(Got { id, pieces });
            }
        }
    }

    fn give(&mut self, id: u16, len_bytes: u32) {
        self.put(id, len_bytes, self.places[usize::from(id)]);
    }

    fn put(&mut self, id: u16, len_bytes: u32, places: u16) {
        let descriptor = &self.shown.ring.all()[usize::from(self.used_next.index)];
        descriptor.id.store(id, Ordering::Relaxed);
        descriptor.len_bytes.store(len_bytes, Ordering::Relaxed);
        let flags = if self.used_next.wrap { 1 << 7 | 1 << 15 } else { 0 };
        descriptor.flags.store(flags, Ordering::Release);
        self.used_next = self.used_next.after(places, self.size);
        self.uncalled += places;
    }

    fn calls(&mut self) -> bool {
        let places = std::mem::take(&mut self.uncalled);
        match EventSuppression::from_word(self.shown.driver.all()[0].load(Ordering::Relaxed)) {
            EventSuppression::Disable => false,
            EventSuppression::Enable => places != 0,
            EventSuppression::At(event) => {
                assert!(self.event_idx, "VQ9");
                self.used_next.reaches(event, places, self.size)
            }
        }
    }

    fn ask_for_kick(&mut self, wanted: bool) {
        let event = match (wanted, self.event_idx) {
            (false, _) => EventSuppression::Disable,
            (true, false) => EventSuppression::Enable,
            (true, true) => EventSuppression::At(self.avail_next),
        };
        self.shown.device.all()[0].store(event.to_word(), Ordering::Relaxed);
    }
}
