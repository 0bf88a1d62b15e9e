//! Ids by which a flow table's slot, a hold and a fence know each other.

/// A place in the flow table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotId(pub(super) u32);

impl SlotId {
    /// The slot's place in the flow table, and in tables beside it.
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A hold's place in the arena; valid while the hold lasts.
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
