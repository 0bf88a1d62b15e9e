//! Doubly linked lists of places, in the order of insertion. Nothing is allocated, and insertion
//! and removal take constant time.

/// End of a list: above any place.
const NONE: u16 = u16::MAX;

/// Neighbours of each place in its list; a place is in one list at most.
#[derive(Debug)]
pub(super) struct HashLinks(Box<[HashLink]>);

#[derive(Clone, Copy, Debug)]
struct HashLink {
    before: u16,
    behind: u16,
}

/// Both ends of a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct HashLinkEnds {
    first: u16,
    last: u16,
}

impl HashLinkEnds {
    /// Ends of an empty list.
    pub(super) const EMPTY: Self = Self { first: NONE, last: NONE };

    /// Oldest place of the list.
    pub(super) fn first(self) -> Option<usize> {
        place(self.first)
    }
}

impl HashLinks {
    /// Creates links of `places` places, none of which is in a list.
    pub(super) fn new(places: usize) -> Self {
        debug_assert!(places < usize::from(NONE), "a place has a number below that of none");
        Self(vec![HashLink { before: NONE, behind: NONE }; places].into())
    }

    /// Appends a place, which must be in no list.
    pub(super) fn push_last(&mut self, ends: &mut HashLinkEnds, at: usize) {
        let number = u16::try_from(at).unwrap_or(NONE);
        self.0[at] = HashLink { before: ends.last, behind: NONE };
        match place(ends.last) {
            Some(last) => self.0[last].behind = number,
            None => ends.first = number,
        }
        ends.last = number;
    }

    /// Removes a place from its list, which has these ends.
    pub(super) fn unlink(&mut self, ends: &mut HashLinkEnds, at: usize) {
        let HashLink { before, behind } = self.0[at];
        match place(before) {
            Some(before) => self.0[before].behind = behind,
            None => ends.first = behind,
        }
        match place(behind) {
            Some(behind) => self.0[behind].before = before,
            None => ends.last = before,
        }
    }

    /// Place that was appended to the same list after `at`.
    pub(super) fn behind(&self, at: usize) -> Option<usize> {
        place(self.0[at].behind)
    }
}

fn place(number: u16) -> Option<usize> {
    (number != NONE).then_some(usize::from(number))
}
