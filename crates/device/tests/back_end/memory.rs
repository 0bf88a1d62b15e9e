//! The memory that a front end shares, mapped here as well.
//!
//! Not by reads and writes of its file: what is made of huge pages takes no writes.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::back_end::messages::Message;

/// All of it; a copy sees the same bytes. Addresses are the front end's physical ones, unless they
/// are said to be its own.
#[derive(Clone, Debug)]
pub(crate) struct Memory(Arc<Vec<Part>>);

/// A region of the table.
#[derive(Debug)]
struct Part {
    /// Address for the driver.
    guest: u64,
    /// Address in the front end's address space.
    user: u64,
    len_bytes: u64,
    mapped: MmapRegion,
}

impl Memory {
    /// Table of a `SET_MEM_TABLE`.
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

    /// Address by which the driver calls an address of the front end.
    pub(crate) fn guest_of_user(&self, user: u64) -> u64 {
        let part = self.0.iter().find(|part| user.wrapping_sub(part.user) < part.len_bytes);
        let part = part.unwrap_or_else(|| panic!("{user:#x} is no address of the front end"));
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

    /// Reads an index or flags that the driver writes, and sees what it wrote before.
    pub(crate) fn load(&self, at: u64) -> u16 {
        let (part, offset) = self.part(at, 2);
        part.mapped.as_volatile_slice().load(offset, Ordering::SeqCst).unwrap()
    }

    /// Writes one that the driver reads, behind what was written before.
    pub(crate) fn store(&self, at: u64, value: u16) {
        let (part, offset) = self.part(at, 2);
        part.mapped.as_volatile_slice().store(value, offset, Ordering::SeqCst).unwrap();
    }

    /// Beginnings and lengths of the regions.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|part| (part.guest, part.len_bytes))
    }

    /// The file of each.
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
