//! The split ring from the device's side (virtio 1.2, section 2.7).

use crate::back_end::ring::{Chain, INDIRECT, NEXT, Part, Place, Used, WRITE};

/// Size of a descriptor, and of an entry of the used ring.
const DESCRIPTOR_BYTES: u64 = 16;
const USED_BYTES: u64 = 8;

/// Offsets in the available and the used ring; the flags come first.
const INDEX: u64 = 2;
const ENTRIES: u64 = 4;

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const NO_INTERRUPT: u16 = 1;

#[derive(Debug)]
pub(crate) struct Split {
    pub(crate) place: Place,
    /// Number of available entries taken, and of used entries written, modulo 2^16.
    taken: u16,
    pub(crate) given: u16,
}

impl Split {
    pub(crate) fn new(place: Place) -> Self {
        let base = u16::try_from(place.base).unwrap();
        assert!(place.size.is_power_of_two(), "a ring of {} entries", place.size);
        let [descriptors, driver, device] = place.areas;
        assert_eq!([descriptors % 16, driver % 2, device % 4], [0; 3], "VQ1: {:x?}", place.areas);
        Self { place, taken: base, given: base }
    }

    pub(crate) fn base(&self) -> u32 {
        self.taken.into()
    }

    fn driver(&self) -> u64 {
        self.place.areas[1]
    }

    pub(crate) fn device(&self) -> u64 {
        self.place.areas[2]
    }

    /// Returns the address of an entry of the used ring.
    pub(crate) fn used_entry(&self, number: u16) -> u64 {
        self.device() + ENTRIES + USED_BYTES * u64::from(number % self.place.size)
    }

    /// Returns the number of buffers available and not taken.
    pub(crate) fn available(&self) -> u16 {
        let flags = self.place.memory.load(self.driver());
        assert!(flags <= NO_INTERRUPT, "VQ9: avail.flags are {flags:#x}");
        let count = self.place.memory.load(self.driver() + INDEX).wrapping_sub(self.taken);
        assert!(count <= self.place.size, "VQ5: {count} buffers more, or some less");
        count
    }

    pub(crate) fn take(&mut self) -> Option<Chain> {
        if self.available() == 0 {
            return None;
        }
        let entry = self.driver() + ENTRIES + 2 * u64::from(self.taken % self.place.size);
        let id = self.place.memory.load(entry);
        self.taken = self.taken.wrapping_add(1);
        Some(Chain { id, parts: self.parts(id) })
    }

    /// Returns the ids that became available behind the last used entry. For a device that
    /// continues when it must not; empty for a ring that is not in use any more.
    pub(crate) fn not_given(&self) -> Vec<u16> {
        let Place { memory, size, .. } = &self.place;
        let count = memory.load(self.driver() + INDEX).wrapping_sub(self.given);
        let entries = (0..if count <= *size { count } else { 0 }).map(|further| {
            let index = self.given.wrapping_add(further) % size;
            memory.load(self.driver() + ENTRIES + 2 * u64::from(index))
        });
        entries.collect()
    }

    fn parts(&self, id: u16) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        let mut next = Some(id);
        while let Some(index) = next {
            assert!(index < self.place.size, "VQ3: descriptor {index}");
            assert!(parts.len() < self.place.size.into(), "VQ3: a chain that does not end");
            let at = self.place.areas[0] + DESCRIPTOR_BYTES * u64::from(index);
            let descriptor: [u8; 16] = self.place.memory.read_array(at);
            let short = |at| u16::from_le_bytes([descriptor[at], descriptor[at + 1]]);
            let flags = short(12);
            assert_eq!(flags & INDIRECT, 0, "VQ4: indirect");
            let is_writable = flags & WRITE > 0;
            parts.push(Part {
                address: u64::from_le_bytes(descriptor[..8].try_into().unwrap()),
                len_bytes: u32::from_le_bytes(descriptor[8..12].try_into().unwrap()),
                is_writable,
            });
            next = (flags & NEXT > 0).then(|| short(14));
        }
        self.place.carries.judge(&parts);
        parts
    }

    /// Writes a used entry without publishing it, `further` entries behind those published.
    pub(crate) fn write_used(&self, further: u16, used: Used) {
        let words = [used.id, used.len_bytes].map(u32::to_le_bytes);
        let at = self.used_entry(self.given.wrapping_add(further));
        self.place.memory.write(at, &words.concat());
    }

    /// Publishes any used index.
    pub(crate) fn store_index(&self, index: u16) {
        self.place.memory.store(self.device() + INDEX, index);
    }

    /// Writes used entries and publishes them. Returns whether the driver wants a call.
    pub(crate) fn give(&mut self, used: &[Used]) -> bool {
        for (further, &used) in (0..).zip(used) {
            self.write_used(further, used);
        }
        let before = self.given;
        self.given = before.wrapping_add(used.len().try_into().unwrap());
        self.store_index(self.given);
        if !self.place.event_idx {
            return self.place.memory.load(self.driver()) & NO_INTERRUPT == 0;
        }
        let event = self.driver() + ENTRIES + 2 * u64::from(self.place.size);
        let behind = self.given.wrapping_sub(self.place.memory.load(event)).wrapping_sub(1);
        behind < self.given.wrapping_sub(before)
    }

    /// Enables the kick for the next buffer. Returns true if there is a buffer already.
    pub(crate) fn ask_for_kick(&mut self) -> bool {
        if self.place.event_idx {
            let event = self.used_entry(0) + USED_BYTES * u64::from(self.place.size);
            self.place.memory.store(event, self.taken);
        }
        self.available() > 0
    }
}
