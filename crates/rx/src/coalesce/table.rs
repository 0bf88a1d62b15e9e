//! Descriptors: held packets by flow hash.

use super::CoalesceMode;
use super::between::Between;
use super::compare::HeaderMask;
use super::held::HeldPacket;
use crate::hash::{FlowHash, RETA_ENTRIES};

/// Default number of descriptors, as in the generic LRO of Linux 2.6.24 (LRO-9).
pub const LRO_DESCRIPTORS: u32 = 8;

/// Maximum number of descriptors.
pub const LRO_DESCRIPTORS_MAX: u32 = 4096;

/// Number of descriptors in a set: they share a part of the hash, and are searched together.
const WAYS: usize = 8;

/// A descriptor that got none of this many packets per descriptor is idle, and may be reused for
/// another flow. An active one is kept: when twice as many flows as descriptors alternate, half of
/// them are merged, while evicting the oldest would merge none.
const IDLE_PACKETS_EACH: u32 = 2;

const _: () = assert!(WAYS.is_power_of_two() && LRO_DESCRIPTORS_MAX.is_power_of_two());
const _: () = assert!(LRO_DESCRIPTORS_MAX < u16::MAX as u32, "links number places in 16 bits");

/// Held packets, at most one per hash. Any further packet of the hash is merged with it or flushes
/// it first, so packets of one hash never overtake each other.
#[derive(Debug)]
pub(super) struct Table {
    /// By place; [`FlowHash::NONE`] for a free descriptor.
    hashes: Box<[u32]>,
    descriptors: Box<[LroDescriptor]>,
    between: Between,
    /// Number of packets after which a descriptor that got none of them is idle.
    idle_max: u32,
    /// Number of ways in use: fewer than [`WAYS`] in a table of fewer descriptors.
    ways: usize,
    count: usize,
    /// Number of packets so far, modulo 2^32.
    clock: u32,
    /// Place used last.
    latest: DescriptorPlace,
}

#[derive(Debug, Default)]
struct LroDescriptor {
    held: Option<HeldPacket>,
    /// Clock at the latest segment.
    touched: u32,
    /// Mask for the held packet. Reused for the next one if its headers have the same layout, as
    /// most do.
    mask: HeaderMask,
}

/// Index of a descriptor; [`WAYS`] adjacent places form a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DescriptorPlace(usize);

/// Descriptor for a new packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Room {
    /// Free descriptor.
    Free(DescriptorPlace),
    /// Idle descriptor, free once its packet is flushed.
    Idle(DescriptorPlace),
    /// No descriptor of the set is free or idle.
    None,
}

impl Table {
    /// Creates a table of `descriptors` descriptors, rounded up to a power of two, at least 1.
    /// `seed` is secret: see [`Between`].
    pub(super) fn new(descriptors: u32, seed: u64) -> Self {
        let descriptors = descriptors.clamp(1, LRO_DESCRIPTORS_MAX).next_power_of_two();
        let idle_max = IDLE_PACKETS_EACH * descriptors.max(LRO_DESCRIPTORS);
        let descriptors = descriptors as usize;
        let ways = descriptors.min(WAYS);
        let places = descriptors / ways * WAYS;
        debug_assert!(places.is_power_of_two(), "a mask selects the set of a hash");
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

    /// Number of held packets.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Advances the clock by a packet.
    pub(super) fn tick(&mut self) {
        self.clock = self.clock.wrapping_add(1);
    }

    /// Place of the held packet of a hash.
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
        debug_assert!(
            found.count_ones() <= 1 || !hash.is_some(),
            "two packets of one hash could overtake each other"
        );
        (found != 0 && hash.is_some())
            .then(|| DescriptorPlace(set + found.trailing_zeros() as usize))
    }

    /// Descriptor for a packet of a hash without a held packet.
    pub(super) fn room(&self, hash: FlowHash) -> Room {
        debug_assert!(self.find(hash).is_none(), "a packet of this hash is held");
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
        debug_assert!(held.hash().is_some(), "no hash marks a free place");
        debug_assert!(self.find(held.hash()).is_none(), "one packet is held of each hash");
        debug_assert_eq!(
            self.set_of(held.hash()),
            place.0 & !(WAYS - 1),
            "a place of another hash"
        );
        self.hashes[place.0] = held.hash().0;
        let descriptor = &mut self.descriptors[place.0];
        descriptor.mask.fit(held.first(), held.layers(), mode);
        self.between.add(place.0, addresses_of(&held));
        descriptor.touched = self.clock;
        let before = descriptor.held.replace(held);
        debug_assert!(before.is_none(), "a place is free before it is taken");
        self.count += 1;
        debug_assert!(self.count <= self.hashes.len() / WAYS * self.ways, "more than descriptors");
        self.latest = place;
    }

    /// Held packet at a place, for another packet of its flow, and the mask of header bits that
    /// must agree.
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

    /// Removes the packet at a place.
    pub(super) fn take(&mut self, place: DescriptorPlace) -> Option<HeldPacket> {
        self.hashes[place.0] = FlowHash::NONE.0;
        let held = self.descriptors[place.0].held.take()?;
        debug_assert!(self.count > 0, "a held packet that was not counted");
        self.between.remove(place.0);
        self.count -= 1;
        Some(held)
    }

    /// Place of the oldest packet that may be between these addresses, source and destination.
    pub(super) fn first_between(&self, addresses: &[u8]) -> Option<DescriptorPlace> {
        self.between.first(addresses).map(DescriptorPlace)
    }

    /// Next such place, after `place`.
    pub(super) fn next_between(&self, place: DescriptorPlace) -> Option<DescriptorPlace> {
        self.between.next(place.0).map(DescriptorPlace)
    }

    /// True if the packet at a place is between these addresses.
    pub(super) fn is_between(&self, place: DescriptorPlace, addresses: &[u8]) -> bool {
        let held = self.descriptors[place.0].held.as_ref();
        held.is_some_and(|held| addresses_of(held) == addresses)
    }

    /// All held packets, in arbitrary order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (DescriptorPlace, &HeldPacket)> {
        // Scans the hashes, which are compact, because most descriptors are free most of the time.
        let taken = (0..).zip(&self.hashes).filter(|(_, hash)| **hash != FlowHash::NONE.0);
        taken.filter_map(|(place, _)| {
            Some((DescriptorPlace(place), self.descriptors[place].held.as_ref()?))
        })
    }

    /// First place of a hash's set. Middle bits are used: the lowest ones have selected this queue
    /// (RSS), or the highest ones this CPU (RPS).
    fn set_of(&self, hash: FlowHash) -> usize {
        ((hash.0 >> RETA_ENTRIES.trailing_zeros()) as usize * WAYS) & (self.hashes.len() - 1)
    }
}

/// Source and destination address, which every held packet has.
fn addresses_of(held: &HeldPacket) -> &[u8] {
    held.addresses().unwrap_or_default()
}
