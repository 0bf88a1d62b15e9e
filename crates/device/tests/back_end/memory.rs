//! Memory that a front end shares, mapped here as well.
//!
//! Mapped rather than read and written as a file: a file of huge pages cannot be written to.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::back_end::messages::Message;

/// All regions; clones share them. Addresses are guest-physical ones unless named otherwise.
#[derive(Clone, Debug)]
pub(crate) struct Memory(Arc<Vec<Part>>);

/// Region of the memory table.
#[derive(Debug)]
struct Part {
    /// Guest-physical address.
    guest: u64,
    /// Address in the front end's address space.
    user: u64,
    len_bytes: u64,
    mapped: MmapRegion,
}

impl Memory {
    /// Maps the regions of a `SET_MEM_TABLE`.
    pub(crate) fn of_table(message: Message) -> Self {
        let count = usize::try_from(message.u32_at(0)).unwrap();
        assert_eq!(message.descriptors.len(), count, "as many descriptors as regions");
        let places: Vec<_> = (0..count)
            .map(|region| [0, 8, 16, 24].map(|at| message.u64_at(8 + 32 * region + at)))
            .collect();
        let parts = places.into_iter().zip(message.descriptors);
        let parts = parts.map(|([guest, len_bytes, user, offset], descriptor)| {
            let file = FileOffset::new(File::from(descriptor), offset);
            let mapped = MmapRegion::from_file(file, usize::try_from(len_bytes).unwrap()).unwrap();
            Part { guest, user, len_bytes, mapped }
        });
        Self(Arc::new(parts.collect()))
    }

    /// Converts an address of the front end to a guest-physical one.
    pub(crate) fn guest_of_user(&self, user: u64) -> u64 {
        let part = self.0.iter().find(|part| user.wrapping_sub(part.user) < part.len_bytes);
        let part = part.unwrap_or_else(|| panic!("{user:#x} is not an address of the front end"));
        part.guest + (user - part.user)
    }

    pub(crate) fn read(&self, at: u64, to: &mut [u8]) {
        let (part, offset) = self.part(at, to.len());
        part.mapped.as_volatile_slice().read_slice(to, offset).unwrap();
    }

    pub(crate) fn read_vec(&self, at: u64, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        self.read(at, &mut bytes);
        bytes
    }

    pub(crate) fn read_array<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.read(at, &mut bytes);
        bytes
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        let (part, offset) = self.part(at, bytes.len());
        part.mapped.as_volatile_slice().write_slice(bytes, offset).unwrap();
    }

    /// Loads an index or flags of the driver, and with it all that the driver wrote before.
    pub(crate) fn load(&self, at: u64) -> u16 {
        let (part, offset) = self.part(at, 2);
        part.mapped.as_volatile_slice().load(offset, Ordering::SeqCst).unwrap()
    }

    /// Stores an index or flags for the driver, behind all earlier writes.
    pub(crate) fn store(&self, at: u64, value: u16) {
        let (part, offset) = self.part(at, 2);
        part.mapped.as_volatile_slice().store(value, offset, Ordering::SeqCst).unwrap();
    }

    /// Returns the addresses and lengths of the regions.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|part| (part.guest, part.len_bytes))
    }

    /// Returns the file of each region.
    pub(crate) fn files(&self) -> impl Iterator<Item = &File> {
        self.0.iter().map(|part| part.mapped.file_offset().unwrap().file())
    }

    fn part(&self, at: u64, len: usize) -> (&Part, usize) {
        let len = u64::try_from(len).unwrap();
        let is_in = |part: &&Part| {
            let offset = at.wrapping_sub(part.guest);
            offset <= part.len_bytes && len <= part.len_bytes - offset
        };
        let part = self.0.iter().find(is_in);
        let part = part.unwrap_or_else(|| panic!("{len} bytes at {at:#x} are in no region"));
        (part, usize::try_from(at - part.guest).unwrap())
    }
}
