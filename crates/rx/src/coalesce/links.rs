//! Lists of places, in the order in which they were added: nothing is allocated, and adding or
//! removing one takes a few steps, whatever else there is.

/// No place. There are fewer.
const NONE: u16 = u16::MAX;

/// Each place's neighbours in the one list that it is in.
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
    /// Links of an empty list.
    pub(super) const EMPTY: Self = Self { first: NONE, last: NONE };

    /// The entry that was added before all others.
    pub(super) fn first(self) -> Option<usize> {
        place(self.first)
    }
}

impl HashLinks {
    /// For so many places, of which none is in a list.
    pub(super) fn new(places: usize) -> Self {
        debug_assert!(places < usize::from(NONE), "a place has a number below that of none");
        Self(vec![HashLink { before: NONE, behind: NONE }; places].into())
    }

    /// Adds a place at the end of a list; it is in none.
    pub(super) fn push_last(&mut self, ends: &mut HashLinkEnds, at: usize) {
        let number = u16::try_from(at).unwrap_or(NONE);
        self.0[at] = HashLink { before: ends.last, behind: NONE };
        match place(ends.last) {
            Some(last) => self.0[last].behind = number,
            None => ends.first = number,
        }
        ends.last = number;
    }

    /// Removes a place from the list that it is in.
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

    /// The place that was added next to the same list.
    pub(super) fn behind(&self, at: usize) -> Option<usize> {
        place(self.0[at].behind)
    }
}

fn place(number: u16) -> Option<usize> {
    (number != NONE).then_some(usize::from(number))
}
