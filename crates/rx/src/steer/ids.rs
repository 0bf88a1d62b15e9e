//! Ids of flow-table slots, holds and fences.

/// Index of a slot in the flow table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotId(pub(super) u32);

impl SlotId {
    /// Index in the flow table and in the arrays beside it.
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a hold; valid until the hold ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HoldId(pub(super) u16);

/// Id of one of two fences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FenceId {
    A,
    B,
}

impl FenceId {
    pub(super) const fn index(self) -> usize {
        self as usize
    }

    pub(super) fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}
