//! Private record of the posted buffers, which the device cannot access.

/// One slot for each descriptor; a buffer is recorded in the slot of its first one.
#[derive(Debug)]
pub(super) struct TransmitSlots {
    slots: Box<[TransmitSlot]>,
    /// Slots that may be free, LIFO so that warm ones are reused first. Some may have been posted
    /// again since; each is listed at most once.
    listed: Vec<u16>,
    free: u16,
    /// Number of slots for further pieces. The number of posted buffers is derived and not stored.
    /// If it were stored next to `free`, both halves of one word would be written for each packet,
    /// which costs more than anything else here.
    behind: u16,
    /// Number of the current batch: buffers posted now, not yet visible to the device.
    batch: u64,
    /// Batches before this one were visible to the device at the last look: their buffers can be
    /// used.
    shown: u64,
}

#[derive(Clone, Copy, Debug)]
struct TransmitSlot {
    /// Batch of the buffer whose first piece is here, else `FREE` or `BEHIND`, which exceed any
    /// batch. So one comparison tells if the device can have used the buffer it names.
    batch: u64,
    /// True if `listed` contains this slot.
    is_listed: bool,
    /// Number of pieces of the buffer that begins, or began last, here; 0 if the slot was used for
    /// a further piece since, or never.
    pieces: u16,
    /// The slot of the next piece, if there is one.
    next: u16,
}

/// Batch of a free slot.
const FREE: u64 = u64::MAX;
/// Batch of a slot with a further piece of a posted buffer.
const BEHIND: u64 = u64::MAX - 1;

const NEW: TransmitSlot = TransmitSlot { batch: FREE, is_listed: true, pieces: 0, next: 0 };

impl TransmitSlots {
    pub(super) fn new(size: u16) -> Self {
        let slots = vec![NEW; usize::from(size)].into();
        let listed = (0..size).rev().collect();
        Self { slots, listed, free: size, behind: 0, batch: 0, shown: 0 }
    }

    /// Resets to nothing posted.
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

    /// Number of posted buffers.
    #[inline]
    pub(super) fn posted(&self) -> u16 {
        self.size() - self.free - self.behind
    }

    /// Takes a free slot for a piece in front of the one in `next`.
    ///
    /// # Panics
    /// If no slot is free; see [`free`](Self::free).
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

    /// Records slot `id`, taken last, as the first one of a buffer of `pieces` pieces.
    #[inline]
    pub(super) fn post(&mut self, id: u16, pieces: u16) {
        let slot = &mut self.slots[usize::from(id)];
        slot.batch = self.batch;
        slot.pieces = pieces;
        self.behind += pieces - 1;
    }

    /// Posts a buffer of one piece again.
    ///
    /// # Panics
    /// If the buffer is posted, never was, or has several pieces.
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

    /// Notes that the device can see all buffers posted until now.
    #[inline]
    pub(super) fn publish(&mut self) {
        self.batch += 1;
    }

    /// Notes that used entries read from now on may name all buffers visible now.
    #[inline]
    pub(super) fn look(&mut self) {
        self.shown = self.batch;
    }

    /// Number of pieces of a buffer that the device can have used; `None` for any other id.
    #[inline]
    pub(super) fn pieces(&self, used_id: u32) -> Option<u16> {
        let slot = self.slots.get(usize::try_from(used_id).ok()?)?;
        (slot.batch < self.shown).then_some(slot.pieces)
    }

    /// Frees the slots of a buffer that the device can have used; `None` for any other id.
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

    /// Frees the slots of the pieces behind the first.
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
