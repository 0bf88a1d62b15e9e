//! Numbered slots for values that come and go, reused in constant time.

/// Values by index. An index is valid until its value is removed.
#[derive(Debug)]
pub(super) struct Slots<T> {
    slots: Vec<Slot<T>>,
    /// First free index; the others are linked. `NONE` if there is none.
    free: u32,
    len: u32,
}

#[derive(Debug)]
enum Slot<T> {
    Used(T),
    Free { next: u32 },
}

const NONE: u32 = u32::MAX;

/// Part by which a full table grows: places that are not used take at most an eighth more.
const GROWTH_PART: usize = 8;
/// Places that it grows by at least.
const GROWTH_MIN: usize = 8;

/// Adds a value to a table whose memory grows by a part of it at a time, and does not double.
pub(super) fn push<T>(table: &mut Vec<T>, value: T) {
    reserve(table, 1);
    table.push(value);
}

/// Makes room for more values in such a table.
pub(super) fn reserve<T>(table: &mut Vec<T>, more: usize) {
    if table.capacity() - table.len() < more {
        table.reserve_exact(more.max(GROWTH_MIN).max(table.len() / GROWTH_PART));
    }
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: NONE, len: 0 }
    }
}

impl<T> Slots<T> {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Upper bound of the indices.
    pub(super) fn end(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(NONE)
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        let index = self.free;
        if let Some(slot) = self.slots.get_mut(index as usize)
            && let Slot::Free { next } = *slot
        {
            self.free = next;
            *slot = Slot::Used(value);
            return index;
        }
        push(&mut self.slots, Slot::Used(value));
        u32::try_from(self.slots.len() - 1).unwrap_or(NONE)
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<T> {
        let slot = self.slots.get_mut(index as usize)?;
        if matches!(slot, Slot::Free { .. }) {
            return None;
        }
        let used = std::mem::replace(slot, Slot::Free { next: self.free });
        self.free = index;
        self.len -= 1;
        match used {
            Slot::Used(value) => Some(value),
            Slot::Free { .. } => None,
        }
    }

    pub(super) fn at(&self, index: u32) -> Option<&T> {
        match self.slots.get(index as usize)? {
            Slot::Used(value) => Some(value),
            Slot::Free { .. } => None,
        }
    }

    pub(super) fn at_mut(&mut self, index: u32) -> Option<&mut T> {
        match self.slots.get_mut(index as usize)? {
            Slot::Used(value) => Some(value),
            Slot::Free { .. } => None,
        }
    }

    pub(super) fn indices(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.slots).filter(|(_, slot)| matches!(slot, Slot::Used(_))).map(|(at, _)| at)
    }
}
