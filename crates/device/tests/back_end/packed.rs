//! The packed ring from the device's side (virtio 1.2, section 2.8).

use crate::back_end::ring::{Carries, Chain, INDIRECT, NEXT, Part, Place, Used, WRITE};

/// Size of a descriptor, and the offsets of its id and flags.
const DESCRIPTOR_BYTES: u64 = 16;
const ID: u64 = 12;
const FLAGS: u64 = 14;

/// Descriptor flags: the driver's and the device's wrap counter.
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// Offset and values of the flags in an event suppression structure.
const EVENT_FLAGS: u64 = 2;
const ENABLE: u16 = 0;
const DISABLE: u16 = 1;
const AT_DESCRIPTOR: u16 = 2;

#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) place: Place,
    taken: Cursor,
    given: Cursor,
}

/// Position in the ring, and its wrap counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cursor {
    at: u16,
    wraps: bool,
}

impl Cursor {
    fn of_base(base: u16) -> Self {
        Self { at: base & 0x7fff, wraps: base & 0x8000 > 0 }
    }

    fn to_base(self) -> u16 {
        self.at | if self.wraps { 0x8000 } else { 0 }
    }

    /// Returns the position `entries` further.
    fn plus(self, entries: u16, size: u16) -> Self {
        let at = u32::from(self.at) + u32::from(entries);
        let at_start = at >= u32::from(size);
        let at = u16::try_from(if at_start { at - u32::from(size) } else { at }).unwrap();
        Self { at, wraps: self.wraps != at_start }
    }

    fn flags(self) -> u16 {
        if self.wraps { AVAILABLE | USED } else { 0 }
    }
}

impl Packed {
    pub(crate) fn new(place: Place) -> Self {
        let [descriptors, driver, device] = place.areas;
        assert_eq!([descriptors % 16, driver % 4, device % 4], [0; 3], "VQ1: {:x?}", place.areas);
        // The lower half is the position of available descriptors, the upper half of used ones.
        // DPDK's driver sends the lower half only, and means the same position by that.
        let low = u16::try_from(place.base & 0xffff).unwrap();
        let high = u16::try_from(place.base >> 16).unwrap();
        let taken = Cursor::of_base(low);
        let given = Cursor::of_base(if high == 0 { low } else { high });
        Self { place, taken, given }
    }

    pub(crate) fn base(&self) -> u32 {
        u32::from(self.taken.to_base()) | u32::from(self.given.to_base()) << 16
    }

    fn entry(&self, at: u16) -> u64 {
        self.place.areas[0] + DESCRIPTOR_BYTES * u64::from(at)
    }

    pub(crate) fn is_available(&self) -> bool {
        let flags = self.place.memory.load(self.entry(self.taken.at) + FLAGS);
        (flags & AVAILABLE > 0) == self.taken.wraps && (flags & USED > 0) != self.taken.wraps
    }

    pub(crate) fn take(&mut self) -> Option<Chain> {
        if !self.is_available() {
            return None;
        }
        let mut parts: Vec<Part> = Vec::new();
        loop {
            assert!(parts.len() < self.place.size.into(), "VQ3: a chain that does not end");
            let descriptor: [u8; 16] = self.place.memory.read_array(self.entry(self.taken.at));
            let short = |at| u16::from_le_bytes([descriptor[at], descriptor[at + 1]]);
            let [id, flags] = [short(12), short(14)];
            assert_eq!(flags & INDIRECT, 0, "VQ4: indirect");
            let is_writable = flags & WRITE > 0;
            parts.push(Part {
                address: u64::from_le_bytes(descriptor[..8].try_into().unwrap()),
                len_bytes: u32::from_le_bytes(descriptor[8..12].try_into().unwrap()),
                is_writable,
            });
            self.taken = self.taken.plus(1, self.place.size);
            if flags & NEXT == 0 {
                self.place.carries.judge(&parts);
                return Some(Chain { id, parts });
            }
        }
    }

    /// Writes used entries, the first one last, so that the driver sees all or none. Returns
    /// whether the driver wants a call.
    pub(crate) fn give(&mut self, used: &[Used]) -> bool {
        let before = self.given;
        let mut places = Vec::new();
        for used in used {
            let at = self.entry(self.given.at);
            self.place.memory.write(at + 8, &used.len_bytes.to_le_bytes());
            let [low, high, ..] = used.id.to_le_bytes();
            self.place.memory.write(at + ID, &[low, high]);
            let writable = if self.place.carries == Carries::Sent { 0 } else { WRITE };
            places.push((at + FLAGS, self.given.flags() | writable));
            self.given = self.given.plus(used.descriptors, self.place.size);
        }
        for (at, flags) in places.into_iter().rev() {
            self.place.memory.store(at, flags);
        }
        self.is_wanted(before)
    }

    /// Marks the next entries as used with the wrap counter of another round.
    pub(crate) fn give_in_another_round(&self, entries: u16) {
        let mut cursor = self.given;
        for _ in 0..entries {
            let other = Cursor { wraps: !cursor.wraps, ..cursor };
            self.place.memory.store(self.entry(cursor.at) + FLAGS, other.flags() | WRITE);
            cursor = cursor.plus(1, self.place.size);
        }
    }

    /// True if the driver wants a call for the entries used since `before`.
    fn is_wanted(&self, before: Cursor) -> bool {
        let driver = self.place.areas[1];
        match self.place.memory.load(driver + EVENT_FLAGS) {
            ENABLE => true,
            DISABLE => false,
            AT_DESCRIPTOR => {
                assert!(self.place.event_idx, "EVENT_IDX was not negotiated");
                let event = Cursor::of_base(self.place.memory.load(driver));
                assert!(event.at < self.place.size, "an event at descriptor {}", event.at);
                let mut cursor = before;
                while cursor != self.given {
                    if cursor == event {
                        return true;
                    }
                    cursor = cursor.plus(1, self.place.size);
                }
                false
            }
            flags => panic!("the driver's event flags are {flags:#x}"),
        }
    }

    /// Enables the kick for the next buffer. Returns true if there is a buffer already.
    pub(crate) fn ask_for_kick(&mut self) -> bool {
        let device = self.place.areas[2];
        if self.place.event_idx {
            self.place.memory.store(device, self.taken.to_base());
            self.place.memory.store(device + EVENT_FLAGS, AT_DESCRIPTOR);
        }
        self.is_available()
    }
}
