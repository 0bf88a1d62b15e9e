//! A private record of what is posted: the device cannot touch it.

/// One for each descriptor; a buffer has the slot of its first.
#[derive(Debug)]
pub(super) struct TransmitSlots {
    slots: Box<[TransmitSlot]>,
    /// Free slots, the last one first: warm. Some of them may have been posted again since; each is
    /// here at most once.
    listed: Vec<u16>,
    free: u16,
    /// Slots of further pieces. Buffers that are posted are not counted: as two halves of one word
    /// that is written whole, that count and `free` would cost more than all else here together.
    behind: u16,
    /// Batch of what is posted now, which the device does not see yet.
    batch: u64,
    /// The device may have used what is of a batch before this one: such buffers can be taken.
    shown: u64,
}

#[derive(Clone, Copy, Debug)]
struct TransmitSlot {
    /// The batch that a buffer was posted in whose first piece is here; else `FREE` or `BEHIND`, which
    /// are later than any. So one comparison says of what a device names whether it can have used it.
    batch: u64,
    /// True if `listed` has it.
    is_listed: bool,
    /// Number of pieces of the buffer that begins or began here; 0: none since the slot was last used
    /// otherwise.
    pieces: u16,
    /// The slot of the next piece, if there is one.
    next: u16,
}

/// Nothing is posted there.
const FREE: u64 = u64::MAX;
/// A further piece of a buffer that is.
const BEHIND: u64 = u64::MAX - 1;

const NEW: TransmitSlot = TransmitSlot { batch: FREE, is_listed: true, pieces: 0, next: 0 };

impl TransmitSlots {
    pub(super) fn new(size: u16) -> Self {
        let slots = vec![NEW; usize::from(size)].into();
        let listed = (0..size).rev().collect();
        Self { slots, listed, free: size, behind: 0, batch: 0, shown: 0 }
    }

    /// As new.
    pub(super) fn reset(&mut self) {
        let size = self.size();
        self.listed.clear();
        self.listed.extend((0..size).rev());
        self.slots.fill(NEW);
        self.free = size;
        self.behind = 0;
        (self.batch, self.shown) = (0, 0);
    }

    pub(super) fn size(&self) -> u16 {
        u16::try_from(self.slots.len()).unwrap_or_else(|_| unreachable!("made of as many"))
    }

    #[inline]
    pub(super) fn free(&self) -> u16 {
        self.free
    }

    /// Buffers that are posted.
    #[inline]
    pub(super) fn posted(&self) -> u16 {
        self.size() - self.free - self.behind
    }

    /// A free slot for a piece that comes before the one in `next`.
    ///
    /// # Panics
    /// When none is free: ask before.
    #[inline]
    pub(super) fn begin(&mut self, next: u16) -> u16 {
        loop {
            let Some(id) = self.listed.pop() else {
                panic!("a ring is not filled beyond its room")
            };
            let slot = &mut self.slots[usize::from(id)];
            slot.is_listed = false;
            if slot.batch == FREE {
                *slot = TransmitSlot { batch: BEHIND, is_listed: false, pieces: 0, next };
                self.free -= 1;
                return id;
            }
        }
    }

    /// The slot that was begun last is the first of a buffer of so many pieces.
    #[inline]
    pub(super) fn post(&mut self, id: u16, pieces: u16) {
        let slot = &mut self.slots[usize::from(id)];
        slot.batch = self.batch;
        slot.pieces = pieces;
        self.behind += pieces - 1;
    }

    /// Posts a buffer of one piece once more.
    ///
    /// # Panics
    /// When it is posted, never was, or is of several pieces.
    #[inline]
    pub(super) fn post_again(&mut self, id: u16) {
        let slot = &mut self.slots[usize::from(id)];
        assert!(
            slot.batch == FREE && slot.pieces == 1,
            "a buffer of one piece is posted again when it was taken, and nothing else is in its place"
        );
        slot.batch = self.batch;
        self.free -= 1;
    }

    /// The device can see what was posted until now.
    #[inline]
    pub(super) fn publish(&mut self) {
        self.batch += 1;
    }

    /// Notes that what the device says from now on can be of what it can see now.
    #[inline]
    pub(super) fn look(&mut self) {
        self.shown = self.batch;
    }

    /// Number of pieces of a buffer that the device can have used; `None` when there is no such one.
    #[inline]
    pub(super) fn pieces(&self, used_id: u32) -> Option<u16> {
        let slot = self.slots.get(usize::try_from(used_id).ok()?)?;
        (slot.batch < self.shown).then_some(slot.pieces)
    }

    /// Frees the slots of a buffer that the device can have used; `None` when there is no such one.
    #[inline(always)] // once for a packet
    pub(super) fn take(&mut self, used_id: u32) -> Option<u16> {
        let id = u16::try_from(used_id).ok()?;
        let pieces = self.pieces(used_id)?;
        self.give_back(id);
        if pieces > 1 {
            self.give_back_behind(id, pieces);
        }
        Some(id)
    }

    /// Frees the slots of the other pieces.
    #[inline(never)] // receive buffers are of one piece
    fn give_back_behind(&mut self, first: u16, pieces: u16) {
        let mut last = first;
        for _ in 1..pieces {
            last = self.slots[usize::from(last)].next;
            self.give_back(last);
            self.behind -= 1;
        }
    }

    #[inline]
    fn give_back(&mut self, id: u16) {
        let slot = &mut self.slots[usize::from(id)];
        slot.batch = FREE;
        self.free += 1;
        if !slot.is_listed {
            slot.is_listed = true;
            debug_assert!(self.listed.len() < self.slots.len(), "each slot is listed once");
            self.listed.push(id);
        }
    }
}
