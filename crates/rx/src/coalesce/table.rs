//! The descriptors: what is held, found by flow hash.

use super::CoalesceMode;
use super::between::Between;
use super::compare::HeaderMask;
use super::held::HeldPacket;
use crate::hash::{FlowHash, RETA_ENTRIES};

/// Descriptors unless somebody asks for more: as many as the generic LRO of Linux 2.6.24 (LRO-9).
pub const LRO_DESCRIPTORS: u32 = 8;

/// The most that can be asked for.
pub const LRO_DESCRIPTORS_MAX: u32 = 4096;

/// Descriptors that share a part of the hash, and are looked at together.
const WAYS: usize = 8;

/// A descriptor that got nothing out of this many packets for each that there is makes room for
/// another flow. One that did keeps its place: when twice as many flows as descriptors take turns,
/// half of them are merged, where evicting the oldest would merge none.
const IDLE_PACKETS_EACH: u32 = 2;

/// Held packets, at most one of each hash: whatever else of that hash comes is merged with
/// it or lets it go first, so that nothing of one hash overtakes anything.
#[derive(Debug)]
pub(super) struct Table {
    /// By place; [`FlowHash::NONE`] where it is free.
    hashes: Box<[u32]>,
    descriptors: Box<[LroDescriptor]>,
    between: Between,
    /// Packets after which a descriptor that got none of them is idle.
    idle_max: u32,
    /// Ways in use: fewer than all in a table of fewer.
    ways: usize,
    count: usize,
    /// Packets that have come so far, modulo 2^32.
    clock: u32,
    /// The place used last.
    latest: DescriptorPlace,
}

#[derive(Debug, Default)]
struct LroDescriptor {
    held: Option<HeldPacket>,
    /// The clock at the latest segment.
    touched: u32,
    /// For what is held. Kept from packet to packet, for their headers are mostly laid out alike.
    mask: HeaderMask,
}

/// A descriptor's place: [`WAYS`] of them for each part of the hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DescriptorPlace(usize);

/// Descriptor for something new.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Room {
    /// Here.
    Free(DescriptorPlace),
    /// Here, once that which has been idle is let go.
    Idle(DescriptorPlace),
    /// Nowhere.
    None,
}

impl Table {
    /// A table of `descriptors`, rounded up to a power of two; one at least. `seed` is secret: see
    /// [`Between`].
    pub(super) fn new(descriptors: u32, seed: u64) -> Self {
        let descriptors = descriptors.clamp(1, LRO_DESCRIPTORS_MAX).next_power_of_two();
        let idle_max = IDLE_PACKETS_EACH * descriptors.max(LRO_DESCRIPTORS);
        let descriptors = descriptors as usize;
        let ways = descriptors.min(WAYS);
        let places = descriptors / ways * WAYS;
        Self {
            hashes: vec![FlowHash::NONE.0; places].into(),
            descriptors: (0..places).map(|_| LroDescriptor::default()).collect(),
            between: Between::new(places, seed),
            idle_max,
            ways,
            count: 0,
            clock: 0,
            latest: DescriptorPlace(0),
        }
    }

    /// Number of packets that are held.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Notes that another packet has come.
    pub(super) fn tick(&mut self) {
        self.clock = self.clock.wrapping_add(1);
    }

    /// The held packet of a hash.
    #[inline(always)]
    pub(super) fn find(&self, hash: FlowHash) -> Option<DescriptorPlace> {
        if self.hashes.get(self.latest.0) == Some(&hash.0) && hash.is_some() {
            return Some(self.latest); // segments come in runs
        }
        let set = self.set_of(hash);
        // All ways at once, without a branch each.
        let mut found = 0u32;
        for (way, &at) in self.hashes[set..set + WAYS].iter().enumerate() {
            found |= u32::from(at == hash.0) << way;
        }
        (found != 0 && hash.is_some())
            .then(|| DescriptorPlace(set + found.trailing_zeros() as usize))
    }

    /// Descriptors for a packet of this hash, of which nothing is held.
    pub(super) fn room(&self, hash: FlowHash) -> Room {
        let set = self.set_of(hash);
        let mut oldest = (0, set);
        for place in set..set + self.ways {
            if self.hashes[place] == FlowHash::NONE.0 {
                return Room::Free(DescriptorPlace(place));
            }
            let idle = self.clock.wrapping_sub(self.descriptors[place].touched);
            oldest = oldest.max((idle, place));
        }
        let (idle, place) = oldest;
        if idle > self.idle_max { Room::Idle(DescriptorPlace(place)) } else { Room::None }
    }

    /// Holds a packet at a free place.
    pub(super) fn put(&mut self, place: DescriptorPlace, held: HeldPacket, mode: CoalesceMode) {
        self.hashes[place.0] = held.hash().0;
        let descriptor = &mut self.descriptors[place.0];
        descriptor.mask.fit(held.first(), held.layers(), mode);
        self.between.add(place.0, addresses_of(&held));
        descriptor.touched = self.clock;
        let before = descriptor.held.replace(held);
        debug_assert!(before.is_none(), "a place is free before it is taken");
        self.count += 1;
        self.latest = place;
    }

    /// The packet at a place, of whose flow another has come, and where their headers must agree.
    #[inline(always)]
    pub(super) fn get_mut(
        &mut self,
        place: DescriptorPlace,
    ) -> Option<(&mut HeldPacket, &HeaderMask)> {
        self.latest = place;
        let descriptor = &mut self.descriptors[place.0];
        descriptor.touched = self.clock;
        Some((descriptor.held.as_mut()?, &descriptor.mask))
    }

    /// Takes a packet off the table.
    pub(super) fn take(&mut self, place: DescriptorPlace) -> Option<HeldPacket> {
        self.hashes[place.0] = FlowHash::NONE.0;
        let held = self.descriptors[place.0].held.take()?;
        self.between.remove(place.0);
        self.count -= 1;
        Some(held)
    }

    /// The oldest packet that may be one between these addresses, source and destination.
    pub(super) fn first_between(&self, addresses: &[u8]) -> Option<DescriptorPlace> {
        self.between.first(addresses).map(DescriptorPlace)
    }

    /// The next one, behind that at `place`.
    pub(super) fn next_between(&self, place: DescriptorPlace) -> Option<DescriptorPlace> {
        self.between.next(place.0).map(DescriptorPlace)
    }

    /// True if the packet at a place is one between these addresses.
    pub(super) fn is_between(&self, place: DescriptorPlace, addresses: &[u8]) -> bool {
        let held = self.descriptors[place.0].held.as_ref();
        held.is_some_and(|held| addresses_of(held) == addresses)
    }

    /// All that is held, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (DescriptorPlace, &HeldPacket)> {
        // By the hashes, which are small: most descriptors are free most of the time.
        let taken = (0..).zip(&self.hashes).filter(|(_, hash)| **hash != FlowHash::NONE.0);
        taken.filter_map(|(place, _)| {
            Some((DescriptorPlace(place), self.descriptors[place].held.as_ref()?))
        })
    }

    /// The first of the places that a hash may have. By bits from the middle: what comes here has
    /// been dealt to this queue by the lowest ones, or to this CPU by the highest.
    fn set_of(&self, hash: FlowHash) -> usize {
        ((hash.0 >> RETA_ENTRIES.trailing_zeros()) as usize * WAYS) & (self.hashes.len() - 1)
    }
}

/// Source and destination; what is held has them.
fn addresses_of(held: &HeldPacket) -> &[u8] {
    held.addresses().unwrap_or_default()
}
