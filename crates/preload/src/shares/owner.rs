//! Owner of a bucket: the process that takes its new connections.

/// Owner of a bucket: the process that takes its new connections, and the one before that still takes them, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Owner {
    pub(super) current: Option<usize>,
    pub(super) before: Option<usize>,
}

/// Member that is to own a bucket: each one as many as the others, but for one.
pub(super) fn heir(members: u64, bucket: usize) -> Option<usize> {
    let rank = bucket.checked_rem(members.count_ones() as usize)?;
    let behind = (0..rank).fold(members, |members, _| members & (members - 1));
    Some(behind.trailing_zeros() as usize)
}

impl Owner {
    pub(super) fn of(word: u64) -> Self {
        let slot = |part: u64| usize::try_from(part & 0xff).ok()?.checked_sub(1);
        Self { current: slot(word), before: slot(word >> 8) }
    }

    pub(super) fn word(self) -> u64 {
        let part = |slot: Option<usize>| slot.map_or(0, |slot| slot as u64 + 1);
        part(self.current) | part(self.before) << 8
    }

    pub(super) fn without(self, slot: usize) -> Self {
        let before = self.before.filter(|before| *before != slot);
        match self.current {
            Some(current) if current == slot => Self { current: before, before: None },
            current => Self { current, before },
        }
    }

    pub(super) fn has(self, slot: usize) -> bool {
        self.current == Some(slot) || self.before == Some(slot)
    }
}
