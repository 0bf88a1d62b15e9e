//! Rings that an AF_XDP socket shares with the kernel, which is either the producer or the consumer
//! (`net/xdp/xsk_queue.h`).
//!
//! Each side advances its own index with a release store, and reads the other's with an acquire
//! load. The kernel's index is checked: one that goes back, or beyond the entries it was given,
//! ends the use of the ring.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::net::xdp::XdpRingOffset;

/// Flag: the kernel must be called before it continues with a ring (`linux/if_xdp.h`).
const XDP_RING_NEED_WAKEUP: u32 = 1 << 0;

/// Ring whose indices are impossible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the kernel's {ring} ring of {entries} entries is filled up to {producer} and read up to {consumer}"
)]
pub struct RingBroken {
    /// The ring.
    pub ring: &'static str,
    /// Index of its producer.
    pub producer: u32,
    /// Index of its consumer.
    pub consumer: u32,
    /// Number of entries.
    pub entries: u32,
}

/// Location and length of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct XdpRingPlace {
    pub(super) ring: &'static str,
    /// Offset at which the kernel maps the ring (`XDP_PGOFF_…`).
    pub(super) page_offset: u64,
    pub(super) offsets: XdpRingOffset,
    /// A power of two.
    pub(super) entries: u32,
}

/// End of a ring that this process fills: the fill ring, one word an entry, or the tx ring, two.
pub(super) struct Producing<const WORDS: usize> {
    memory: Memory,
    /// Position of the next entry; ahead of `submitted` within a batch.
    tail: u32,
    /// Producer's index: end of the entries visible to the kernel.
    submitted: u32,
    /// Consumer's index as last read; never ahead of it.
    head_seen: u32,
}

/// End of a ring that this process empties: the rx ring, two words an entry, or the completion
/// ring, one.
pub(super) struct Consuming<const WORDS: usize> {
    memory: Memory,
    /// Position of the next entry to read; ahead of `released` within a batch.
    head: u32,
    /// Consumer's index: end of the entries that the kernel may refill.
    released: u32,
    /// Producer's index as last read; never ahead of it.
    tail_seen: u32,
}

impl<const WORDS: usize> Producing<WORDS> {
    /// Maps the ring of a socket.
    pub(super) fn map(socket: BorrowedFd<'_>, place: XdpRingPlace) -> io::Result<Self> {
        Ok(Self::new(Memory::map(socket, place, WORDS)?))
    }

    fn new(memory: Memory) -> Self {
        let tail = memory.producer().load(Ordering::Relaxed);
        let head_seen = memory.consumer().load(Ordering::Relaxed);
        Self { memory, tail, submitted: tail, head_seen }
    }

    /// Number of free entries; the kernel's index is read anew if there seem to be fewer than
    /// `wanted`.
    pub(super) fn room(&mut self, wanted: u32) -> Result<u32, RingBroken> {
        let entries = self.memory.entries;
        let room = entries - self.tail.wrapping_sub(self.head_seen);
        if room >= wanted {
            return Ok(room);
        }
        let head = self.consumed()?;
        Ok(entries - self.tail.wrapping_sub(head))
    }

    /// Reads the consumer's index of the kernel.
    pub(super) fn consumed(&mut self) -> Result<u32, RingBroken> {
        // Acquire: the kernel has read the entries up to there.
        let head = self.memory.consumer().load(Ordering::Acquire);
        // The index never goes back, nor beyond the submitted entries.
        let shown = self.submitted.wrapping_sub(self.head_seen);
        if head.wrapping_sub(self.head_seen) > shown {
            return Err(self.memory.broken(self.submitted, head));
        }
        self.head_seen = head;
        Ok(head)
    }

    /// Number of entries of the ring.
    pub(super) fn entries(&self) -> u32 {
        self.memory.entries
    }

    /// Number of entries that the kernel had not read, by its index as last read.
    pub(super) fn queued(&self) -> u32 {
        self.tail.wrapping_sub(self.head_seen)
    }

    /// Writes an entry, not yet visible to the kernel.
    ///
    /// # Panics
    /// If there is no room; see [`room`](Self::room).
    #[inline]
    pub(super) fn push(&mut self, entry: [u64; WORDS]) {
        assert!(self.queued() < self.memory.entries, "a ring is not filled beyond its room");
        let words = self.memory.entry(self.tail, WORDS);
        for (word, value) in words.iter().zip(entry) {
            word.store(value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    /// Makes all entries written visible to the kernel, with one store.
    #[inline]
    pub(super) fn submit(&mut self) {
        if self.submitted != self.tail {
            self.submitted = self.tail;
            // Release: the entries are written before.
            self.memory.producer().store(self.tail, Ordering::Release);
        }
    }

    /// True if the kernel must be called before it continues.
    pub(super) fn needs_wakeup(&self) -> bool {
        self.memory.flags().load(Ordering::Relaxed) & XDP_RING_NEED_WAKEUP != 0
    }
}

impl<const WORDS: usize> Consuming<WORDS> {
    /// Maps the ring of a socket.
    pub(super) fn map(socket: BorrowedFd<'_>, place: XdpRingPlace) -> io::Result<Self> {
        Ok(Self::new(Memory::map(socket, place, WORDS)?))
    }

    fn new(memory: Memory) -> Self {
        let head = memory.consumer().load(Ordering::Relaxed);
        Self { memory, head, released: head, tail_seen: head }
    }

    /// Number of entries to read; the kernel's index is read anew if there seem to be fewer than
    /// `wanted`.
    pub(super) fn ready(&mut self, wanted: u32) -> Result<u32, RingBroken> {
        let ready = self.tail_seen.wrapping_sub(self.head);
        if ready >= wanted {
            return Ok(ready);
        }
        // Acquire: the kernel has written the entries up to there.
        let tail = self.memory.producer().load(Ordering::Acquire);
        // The index never goes back, nor beyond a full ring.
        let full = self.released.wrapping_add(self.memory.entries);
        if tail.wrapping_sub(self.tail_seen) > full.wrapping_sub(self.tail_seen) {
            return Err(self.memory.broken(tail, self.released));
        }
        self.tail_seen = tail;
        Ok(tail.wrapping_sub(self.head))
    }

    /// Reads the next entry.
    ///
    /// # Panics
    /// If no entry is ready; see [`ready`](Self::ready).
    #[inline]
    pub(super) fn next(&mut self) -> [u64; WORDS] {
        assert!(self.head != self.tail_seen, "a ring is not read beyond its end");
        let words = self.memory.entry(self.head, WORDS);
        let mut entry = [0; WORDS];
        for (value, word) in entry.iter_mut().zip(words) {
            *value = word.load(Ordering::Relaxed);
        }
        self.head = self.head.wrapping_add(1);
        entry
    }

    /// Lets the kernel refill the entries that were read, with one store.
    #[inline]
    pub(super) fn release(&mut self) {
        if self.released != self.head {
            self.released = self.head;
            // Release: the entries are read before.
            self.memory.consumer().store(self.head, Ordering::Release);
        }
    }
}

/// Memory of a ring: two indices, flags and entries, all of them atomic words.
struct Memory {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    words: NonNull<[AtomicU64]>,
    ring: &'static str,
    entries: u32,
    /// Mapping that the pointers above point into. It keeps the socket open, too.
    _mapping: XdpMapping,
}

// SAFETY: atomics in a mapping that this value owns and that is not tied to a thread.
unsafe impl Send for Memory {}

impl Memory {
    fn map(socket: BorrowedFd<'_>, place: XdpRingPlace, words: usize) -> io::Result<Self> {
        let entries_bytes = place.entries as usize * words * size_of::<u64>();
        let before_bytes = usize::try_from(place.offsets.desc).unwrap_or(usize::MAX);
        let len_bytes =
            before_bytes.checked_add(entries_bytes).ok_or(io::ErrorKind::InvalidData)?;
        let mapping = XdpMapping::of_ring(socket, place.page_offset, len_bytes)?;
        Self::new(mapping, place, words).ok_or_else(|| {
            let what = format!("the kernel's {} ring is laid out in an unknown way", place.ring);
            io::Error::new(io::ErrorKind::Unsupported, what)
        })
    }

    /// Locates the words in the mapping. `None` if they exceed it or are not aligned, or if the
    /// kernel is too old to have flags.
    fn new(mapping: XdpMapping, place: XdpRingPlace, words: usize) -> Option<Self> {
        let XdpRingPlace { ring, offsets, entries, .. } = place;
        let count = entries as usize * words;
        let first = mapping.at(offsets.desc, count * size_of::<u64>(), align_of::<AtomicU64>())?;
        let index = |offset| {
            let place = mapping.at(offset, size_of::<u32>(), align_of::<AtomicU32>())?;
            Some(place.cast::<AtomicU32>())
        };
        Some(Self {
            producer: index(offsets.producer)?,
            consumer: index(offsets.consumer)?,
            flags: index(offsets.flags?)?,
            words: NonNull::slice_from_raw_parts(first.cast(), count),
            ring,
            entries,
            _mapping: mapping,
        })
    }

    fn broken(&self, producer: u32, consumer: u32) -> RingBroken {
        RingBroken { ring: self.ring, producer, consumer, entries: self.entries }
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: within the mapping and aligned, see `new`; accessed as an atomic only.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as in `producer`.
        unsafe { self.consumer.as_ref() }
    }

    fn flags(&self) -> &AtomicU32 {
        // SAFETY: as in `producer`.
        unsafe { self.flags.as_ref() }
    }

    #[inline]
    fn entry(&self, index: u32, words: usize) -> &[AtomicU64] {
        // SAFETY: as in `producer`.
        let all = unsafe { self.words.as_ref() };
        let at = (index & (self.entries - 1)) as usize * words;
        &all[at..at + words]
    }
}

/// Memory shared with the kernel, unmapped when this is dropped.
struct XdpMapping {
    base: NonNull<u8>,
    len_bytes: usize,
}

impl XdpMapping {
    fn of_ring(socket: BorrowedFd<'_>, page_offset: u64, len_bytes: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice; it replaces no memory.
        let mapped = unsafe { mm::mmap(anywhere, len_bytes, access, flags, socket, page_offset) }?;
        let base = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::Other)?;
        Ok(Self { base, len_bytes })
    }

    /// Address of `len_bytes` bytes at `offset`, if they are within the mapping and aligned.
    fn at(&self, offset: u64, len_bytes: usize, align_bytes: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        let is_within = offset.checked_add(len_bytes)? <= self.len_bytes;
        // SAFETY: within the mapping; not evaluated otherwise.
        let place = is_within.then(|| unsafe { self.base.add(offset) })?;
        place.addr().get().is_multiple_of(align_bytes).then_some(place)
    }
}

impl Drop for XdpMapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `of_ring` with this length; the pointers into it are dropped with it.
        let unmapped = unsafe { mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours cannot be unmapped: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Private memory laid out like a ring.
    fn memory(entries: u32, words: usize, start: u32) -> (Memory, Kernel) {
        let offsets = XdpRingOffset { producer: 0, consumer: 64, flags: Some(128), desc: 192 };
        let place = XdpRingPlace { ring: "test", page_offset: 0, offsets, entries };
        let len_bytes = 192 + entries as usize * words * size_of::<u64>();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: a fresh mapping.
        let mapped =
            unsafe { mm::mmap_anonymous(anywhere, len_bytes, access, MapFlags::SHARED) }.unwrap();
        let base = NonNull::new(mapped.cast()).unwrap();
        let memory = Memory::new(XdpMapping { base, len_bytes }, place, words).unwrap();
        memory.producer().store(start, Ordering::Relaxed);
        memory.consumer().store(start, Ordering::Relaxed);
        let kernel = Kernel { producer: memory.producer, consumer: memory.consumer };
        (memory, kernel)
    }

    /// The kernel's end of a ring; the ring must outlive it.
    struct Kernel {
        producer: NonNull<AtomicU32>,
        consumer: NonNull<AtomicU32>,
    }

    impl Kernel {
        fn producer(&self) -> &AtomicU32 {
            // SAFETY: the tests keep the ring alive longer.
            unsafe { self.producer.as_ref() }
        }

        fn consumer(&self) -> &AtomicU32 {
            // SAFETY: the tests keep the ring alive longer.
            unsafe { self.consumer.as_ref() }
        }
    }

    proptest! {
        /// Entries come out in the order in which they were pushed, from any start index. None is
        /// visible before it is submitted. Room is available again when entries are released.
        #[test]
        fn ring_round_trips(
            start in prop_oneof![Just(0), u32::MAX - 40..=u32::MAX, any::<u32>()],
            bits in 0u32..5,
            steps in proptest::collection::vec((0u32..20, 0u32..20), 1..60),
        ) {
            let entries = 1 << bits;
            let (fill, _) = memory(entries, 2, start);
            let (read, kernel) = memory(entries, 2, start);
            let (mut producing, mut consuming) =
                (Producing::<2>::new(fill), Consuming::<2>::new(read));
            let mut queued = VecDeque::new();
            let mut number = 0u64;
            for (push, take) in steps {
                let room = producing.room(entries).unwrap();
                prop_assert_eq!(room, entries - u32::try_from(queued.len()).unwrap());
                for _ in 0..push.min(room) {
                    producing.push([number, !number]);
                    queued.push_back([number, !number]);
                    number += 1;
                }
                let before = producing.memory.producer().load(Ordering::Relaxed);
                producing.submit();
                let shown = producing.memory.producer().load(Ordering::Relaxed);
                prop_assert_eq!(shown.wrapping_sub(before), push.min(room), "all at once");
                // The kernel's part: entries and indices are copied from one ring to the other.
                for (to, from) in
                    consuming.memory.entry_words().iter().zip(producing.memory.entry_words())
                {
                    to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                kernel.producer().store(shown, Ordering::Relaxed);
                let ready = consuming.ready(u32::MAX).unwrap();
                prop_assert_eq!(ready as usize, queued.len());
                for _ in 0..take.min(ready) {
                    prop_assert_eq!(Some(consuming.next()), queued.pop_front());
                }
                consuming.release();
                let read = kernel.consumer().load(Ordering::Relaxed);
                producing.memory.consumer().store(read, Ordering::Relaxed);
            }
        }
    }

    impl Memory {
        fn entry_words(&self) -> &[AtomicU64] {
            // SAFETY: as in `producer`.
            unsafe { self.words.as_ref() }
        }
    }

    #[test]
    fn promise_5_impossible_indices_break_only_ring() {
        let (fill, kernel) = memory(8, 1, 5);
        let mut producing = Producing::<1>::new(fill);
        (0..3).for_each(|word| producing.push([word]));
        producing.submit();
        for consumer in [9, 4, 5u32.wrapping_sub(6), u32::MAX / 2] {
            kernel.consumer().store(consumer, Ordering::Relaxed);
            let broken = producing.room(8).unwrap_err();
            assert_eq!((broken.producer, broken.consumer, broken.entries), (8, consumer, 8));
        }
        kernel.consumer().store(7, Ordering::Relaxed);
        assert_eq!(producing.room(8), Ok(7));

        let (read, kernel) = memory(8, 1, 5);
        let mut consuming = Consuming::<1>::new(read);
        for producer in [14, 4, u32::MAX] {
            kernel.producer().store(producer, Ordering::Relaxed);
            assert!(consuming.ready(1).is_err(), "{producer}");
        }
        kernel.producer().store(7, Ordering::Relaxed);
        assert_eq!(consuming.ready(1), Ok(2));
        consuming.next();
        kernel.producer().store(5, Ordering::Relaxed);
        assert!(consuming.ready(2).is_err(), "it takes back what was read");
    }

    #[test]
    fn layout_outside_mapping_is_refused() {
        let (whole, _) = memory(8, 1, 0);
        let Memory { _mapping: mapping, .. } = whole;
        let offsets = XdpRingOffset { producer: 0, consumer: 64, flags: Some(128), desc: 200 };
        let place = XdpRingPlace { ring: "test", page_offset: 0, offsets, entries: 8 };
        assert!(Memory::new(mapping, place, 1).is_none());
    }
}
