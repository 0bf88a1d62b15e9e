//! Our own record of what is posted: the device cannot touch it.

/// One for each descriptor; a buffer has the slot of its first.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Box<[Slot]>,
    /// Free slots, the last one first: warm. Some of them may have been posted again since; each is
    /// here at most once.
    listed: Vec<u16>,
    free: u16,
    /// Slots of further pieces. Buffers that are posted are not counted: as two halves of one word
    /// that is written whole, that count and `free` would cost more than all else here together.
    behind: u16,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    /// Whether `listed` has it.
    is_listed: bool,
    /// How many pieces the buffer has or had that began here; 0: none since the slot was last used
    /// otherwise.
    pieces: u16,
    /// The slot of the next piece, if there is one.
    next: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    /// The first piece of a buffer that is posted.
    Posted,
    /// A further one.
    Behind,
}

impl Slots {
    pub(super) fn new(size: u16) -> Self {
        let free = Slot { state: State::Free, is_listed: true, pieces: 0, next: 0 };
        let slots = vec![free; usize::from(size)].into();
        Self { slots, listed: (0..size).rev().collect(), free: size, behind: 0 }
    }

    /// As new.
    pub(super) fn reset(&mut self) {
        let size = self.size();
        self.listed.clear();
        self.listed.extend((0..size).rev());
        self.slots.fill(Slot { state: State::Free, is_listed: true, pieces: 0, next: 0 });
        self.free = size;
        self.behind = 0;
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
            if slot.state == State::Free {
                *slot = Slot { state: State::Behind, is_listed: false, pieces: 0, next };
                self.free -= 1;
                return id;
            }
        }
    }

    /// The slot that was begun last is the first of a buffer of so many pieces.
    #[inline]
    pub(super) fn post(&mut self, id: u16, pieces: u16) {
        let slot = &mut self.slots[usize::from(id)];
        slot.state = State::Posted;
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
            slot.state == State::Free && slot.pieces == 1,
            "a buffer of one piece is posted again when it was taken, and nothing else is in its place"
        );
        slot.state = State::Posted;
        self.free -= 1;
    }

    /// How many pieces a posted buffer has; `None` when no such buffer is posted.
    #[inline]
    pub(super) fn pieces(&self, used_id: u32) -> Option<u16> {
        let slot = self.slots.get(usize::try_from(used_id).ok()?)?;
        (slot.state == State::Posted).then_some(slot.pieces)
    }

    /// Frees the slots of a posted buffer; `None` when no such buffer is posted.
    #[inline]
    pub(super) fn take(&mut self, used_id: u32) -> Option<u16> {
        let id = u16::try_from(used_id).ok()?;
        let pieces = self.pieces(used_id)?;
        self.give_back(id);
        let mut last = id;
        for _ in 1..pieces {
            last = self.slots[usize::from(last)].next;
            self.give_back(last);
            self.behind -= 1;
        }
        Some(id)
    }

    #[inline]
    fn give_back(&mut self, id: u16) {
        let slot = &mut self.slots[usize::from(id)];
        slot.state = State::Free;
        self.free += 1;
        if !slot.is_listed {
            slot.is_listed = true;
            debug_assert!(self.listed.len() < self.slots.len(), "each slot is listed once");
            self.listed.push(id);
        }
    }
}
