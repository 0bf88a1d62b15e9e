//! The descriptors: what is held, found by flow hash.

use crate::hash::FlowHash;

use super::held::Held;

/// Descriptors unless somebody asks for more: as many as the generic LRO of Linux 2.6.24 (LRO-9).
pub const LRO_DESCRIPTORS: u32 = 8;

/// The most that can be asked for.
pub const LRO_DESCRIPTORS_MAX: u32 = 4096;

/// Descriptors that share a part of the hash, and are looked at together.
const WAYS: usize = 8;

/// A descriptor that got nothing out of this many packets makes room for another flow. One that
/// did keeps its place: when more flows than there are descriptors take turns, some of them are
/// merged, where evicting the oldest would merge none.
const IDLE_PACKETS: u32 = 64;

/// What is held, at most one packet of each hash: whatever else of that hash comes is merged with
/// it or lets it go first, so that nothing of one hash overtakes anything.
#[derive(Debug)]
pub(super) struct Table {
    sets: Box<[Set]>,
    held: Box<[Option<Held>]>,
    /// Ways in use: fewer than all in a table of fewer.
    ways: usize,
    count: usize,
    /// Packets that have come so far, modulo 2^32.
    clock: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Set {
    /// [`FlowHash::NONE`] where a way is free.
    hashes: [u32; WAYS],
    /// The clock at the latest segment.
    touched: [u32; WAYS],
}

/// A descriptor's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    set: usize,
    way: usize,
}

/// Where something new may be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Room {
    /// Here.
    Free(Place),
    /// Here, once that which has been idle is let go.
    Idle(Place),
    /// Nowhere.
    None,
}

impl Table {
    /// A table of `descriptors`, rounded up to a power of two; one at least.
    pub(super) fn new(descriptors: u32) -> Self {
        let descriptors = descriptors.clamp(1, LRO_DESCRIPTORS_MAX).next_power_of_two() as usize;
        let ways = descriptors.min(WAYS);
        let sets = descriptors / ways;
        Self {
            sets: vec![Set::default(); sets].into(),
            held: (0..sets * WAYS).map(|_| None).collect(),
            ways,
            count: 0,
            clock: 0,
        }
    }

    /// How many packets are held.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Notes that another packet has come.
    pub(super) fn tick(&mut self) {
        self.clock = self.clock.wrapping_add(1);
    }

    /// What is held of a hash.
    pub(super) fn find(&self, hash: FlowHash) -> Option<Place> {
        let set = self.set_of(hash);
        // All ways at once, without a branch each.
        let mut found = 0u32;
        for (way, &at) in self.sets[set].hashes.iter().enumerate() {
            found |= u32::from(at == hash.0) << way;
        }
        (found != 0 && hash.is_some()).then(|| Place { set, way: found.trailing_zeros() as usize })
    }

    /// Where a packet of this hash, of which nothing is held, could be.
    pub(super) fn room(&self, hash: FlowHash) -> Room {
        let set = self.set_of(hash);
        let Set { hashes, touched } = &self.sets[set];
        let ways = hashes.iter().zip(touched).take(self.ways).enumerate();
        let mut oldest = (0, 0);
        for (way, (&at, &touched)) in ways {
            if at == FlowHash::NONE.0 {
                return Room::Free(Place { set, way });
            }
            oldest = oldest.max((self.clock.wrapping_sub(touched), way));
        }
        let (idle, way) = oldest;
        if idle > IDLE_PACKETS { Room::Idle(Place { set, way }) } else { Room::None }
    }

    /// Holds a packet at a free place.
    pub(super) fn put(&mut self, place: Place, held: Held) {
        let set = &mut self.sets[place.set];
        set.hashes[place.way] = held.hash().0;
        set.touched[place.way] = self.clock;
        let before = self.held[place.index()].replace(held);
        debug_assert!(before.is_none(), "a place is free before it is taken");
        self.count += 1;
    }

    /// The packet at a place, about to get another segment.
    pub(super) fn get_mut(&mut self, place: Place) -> Option<&mut Held> {
        self.sets[place.set].touched[place.way] = self.clock;
        self.held[place.index()].as_mut()
    }

    /// Takes a packet off the table.
    pub(super) fn take(&mut self, place: Place) -> Option<Held> {
        self.sets[place.set].hashes[place.way] = FlowHash::NONE.0;
        let held = self.held[place.index()].take();
        self.count -= usize::from(held.is_some());
        held
    }

    /// All that is held, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Place, &Held)> {
        let held = self.held.iter().enumerate();
        held.filter_map(|(index, held)| Some((Place::of_index(index), held.as_ref()?)))
    }

    fn set_of(&self, hash: FlowHash) -> usize {
        hash.0 as usize & (self.sets.len() - 1)
    }
}

impl Place {
    fn index(self) -> usize {
        self.set * WAYS + self.way
    }

    fn of_index(index: usize) -> Self {
        Self { set: index / WAYS, way: index % WAYS }
    }
}
