//! Ring of reusable buffers: one owner fills them in turn, and the last holder of each marks it
//! free in place.
//!
//! ```text
//!  marks    │ free │ free │ HELD │ HELD │ HELD │ free │ …      a byte each, 64 on a cache line
//!  buffers  │      │      │ ▓▓▓▓ │ ▓▓▓▓ │ ▓▓▓▓ │      │ …
//!                          next to be freed ┘    └ next to be filled
//! ```
//!
//! Buffers are filled and mostly freed in one order, so a reader that frees a run of them writes
//! the same line of marks repeatedly: one exchange on a hot line each (UDP-2). The owner reads that
//! line a whole round later. No message is sent, so nothing waits for a flush.
//!
//! A buffer is a [`Frame`] like any other: it may be held for any time, freed by any thread in any
//! way, and outlive the recycle ring.

use std::fmt;
use std::ptr::NonNull;

use crate::frame::Frame;
use crate::free_batch::{PoolId, RemoteFreeList};
use crate::pool::MIN_CHUNK_BYTES;
use crate::region::Region;
use crate::sync::{Arc, AtomicU8, Ordering};

/// Buffers of one owner, who fills them in turn.
pub struct RecycleRing {
    home: NonNull<RemoteFreeList>,
    /// Index of the buffer to examine next.
    next: usize,
}

// SAFETY: a recycle ring has the only handle on its free buffers; `RemoteFreeList` is made of
// atomics and constants.
unsafe impl Send for RecycleRing {}

impl RecycleRing {
    /// Creates as many buffers as `region` holds, in chunks of `chunk_bytes`. `owner` is what
    /// [`Frame::owner`] will return.
    ///
    /// # Panics
    /// If `chunk_bytes` is not a power of two, or less than [`MIN_CHUNK_BYTES`], or a peer shares
    /// the region.
    #[must_use]
    pub fn new(region: Region, chunk_bytes: u32, owner: u16) -> Self {
        assert!(
            chunk_bytes.is_power_of_two() && chunk_bytes >= MIN_CHUNK_BYTES,
            "a buffer's chunk is a power of two of at least {MIN_CHUNK_BYTES} bytes, not \
             {chunk_bytes}"
        );
        assert!(!region.is_shared(), "a frame is never cut from memory that a peer can rewrite");
        let marks = Marks::of_free(region.len_bytes() >> chunk_bytes.trailing_zeros());
        let mut home = RemoteFreeList::new(PoolId(0), owner, chunk_bytes, Arc::new(region));
        home.marks = Some(marks);
        Self { home: NonNull::from(Box::leak(home)), next: 0 }
    }

    /// Number of buffers.
    #[must_use]
    pub fn buffers(&self) -> usize {
        self.marks().0.len()
    }

    /// Hands out an empty frame: the first of the next `look` buffers that is free. `None` if all
    /// of these are held. The next search begins behind them, so a holder that keeps a few for long
    /// does not block the others.
    #[inline]
    pub fn take(&mut self, look: usize) -> Option<Frame> {
        let count = self.buffers();
        for _ in 0..look.min(count) {
            let at = self.next;
            self.next = if at + 1 == count { 0 } else { at + 1 };
            if self.marks().take(at) {
                let chunk_bytes = self.home().chunk_bytes as usize;
                // SAFETY: the region has a chunk for each mark.
                let chunk = unsafe { self.home().region.base().add(at * chunk_bytes) };
                // SAFETY: free a moment ago and marked as held, so the caller's alone; the home
                // is open.
                return Some(unsafe { Frame::new(self.home, chunk) });
            }
        }
        None
    }

    /// Number of buffers that are held.
    #[must_use]
    pub fn away(&self) -> usize {
        self.marks().0.iter().filter(|mark| mark.load(Ordering::Acquire) != FREE).count()
    }

    fn home(&self) -> &RemoteFreeList {
        // SAFETY: alive until Drop closes it.
        unsafe { self.home.as_ref() }
    }

    fn marks(&self) -> &Marks {
        match &self.home().marks {
            Some(marks) => marks,
            None => unreachable!("the home of a recycle ring has marks"),
        }
    }
}

impl Drop for RecycleRing {
    fn drop(&mut self) {
        let held = self.marks().close();
        // SAFETY: closed just now, with `held` frames outstanding; the home is not used again.
        unsafe { RemoteFreeList::settle(self.home, held) };
    }
}

impl fmt::Debug for RecycleRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecycleRing(cpu slot {}, {} buffers)", self.home().owner, self.buffers())
    }
}

/// Mark of a buffer that nobody holds. Written by its last holder (Release), read by the owner
/// (Acquire).
const FREE: u8 = 0;
/// Mark of a buffer whose frame is outstanding. Written by the owner, who has read [`FREE`].
const HELD: u8 = 1;
/// As [`HELD`], but the owner is gone: the last holder settles the buffer with the home. Written by
/// the owner when it ends.
const LEFT: u8 = 2;

/// One mark for each of a home's chunks.
pub(crate) struct Marks(Box<[AtomicU8]>);

/// Outcome of freeing a buffer.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Freed {
    /// The owner finds the buffer, or already has: the home may be gone.
    ForItsOwner,
    /// The owner is gone: the caller settles the buffer with the home.
    OwnerIsGone,
}

impl Marks {
    fn of_free(count: usize) -> Self {
        Self((0..count).map(|_| AtomicU8::new(FREE)).collect())
    }

    /// Mark of a chunk of `region`, all of whose chunks are of `chunk_bytes`.
    pub(crate) fn of(&self, chunk: NonNull<u8>, region: &Region, chunk_bytes: u32) -> &AtomicU8 {
        let offset = chunk.addr().get() - region.base().addr().get();
        &self.0[offset >> chunk_bytes.trailing_zeros()]
    }

    /// Marks a buffer as free. Takes the mark alone, because once it is free the owner may end and
    /// free the rest.
    pub(crate) fn free(mark: &AtomicU8) -> Freed {
        // Release: the owner's next use comes after this one. Acquire: a holder that finds the
        // owner gone sees all that the owner has written.
        match mark.swap(FREE, Ordering::AcqRel) {
            LEFT => Freed::OwnerIsGone,
            _ => Freed::ForItsOwner,
        }
    }

    /// Marks a buffer as held, if it is free. For the owner only.
    fn take(&self, at: usize) -> bool {
        // Acquire: pairs with the Release in `free`.
        let is_free = self.0[at].load(Ordering::Acquire) == FREE;
        if is_free {
            // Relaxed: the frame's transfer to another thread orders this store before.
            self.0[at].store(HELD, Ordering::Relaxed);
        }
        is_free
    }

    /// Marks all buffers as left to their holders, and returns the number of those held. For the
    /// owner only, once.
    fn close(&self) -> i64 {
        // AcqRel: as in `free`.
        let leave = |mark: &&AtomicU8| mark.swap(LEFT, Ordering::AcqRel) == HELD;
        i64::try_from(self.0.iter().filter(leave).count()).unwrap_or(i64::MAX)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::pool::{ChunkClass, Pool, carve, region_bytes};

    fn carousel(buffers: usize) -> RecycleRing {
        RecycleRing::new(Region::allocate(buffers * 512), 512, 3)
    }

    fn pool() -> Pool {
        let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 4 }]];
        carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
    }

    fn filled(carousel: &mut RecycleRing, mark: u32) -> Option<Frame> {
        let mut frame = carousel.take(1)?;
        frame.copy_from(&mark.to_ne_bytes());
        Some(frame)
    }

    #[test]
    fn udp_2_buffer_free_once_put_or_dropped() {
        let (mut carousel, mut pool) = (carousel(2), pool());
        let (first, second) =
            (filled(&mut carousel, 1).unwrap(), filled(&mut carousel, 2).unwrap());
        assert_eq!((first.owner(), first.truesize()), (3, 512));
        assert!(carousel.take(2).is_none());
        pool.return_handle().put(second);
        assert_eq!(carousel.away(), 1);
        let second = filled(&mut carousel, 3);
        assert!(second.is_none(), "the first is next");
        let second = filled(&mut carousel, 3).unwrap();
        drop(first);
        let mut head = pool.allocate(1).unwrap();
        head.append(second);
        pool.put(head);
        assert_eq!((carousel.away(), pool.in_use()), (0, 0));
    }

    #[test]
    fn odd_region_uses_whole_buffers() {
        let carousel = RecycleRing::new(Region::allocate(5 * 1024 + 1023), 1024, 0);
        assert_eq!(carousel.buffers(), 5);
        let mut none = RecycleRing::new(Region::allocate(511), 512, 0);
        assert!(none.take(8).is_none());
    }

    #[test]
    fn frames_outlive_their_carousel() {
        let mut carousel = carousel(4);
        let kept: Vec<_> = (0..3).map(|mark| filled(&mut carousel, mark).unwrap()).collect();
        drop(carousel);
        for (mark, frame) in (0u32..).zip(kept) {
            assert_eq!(frame.data(), mark.to_ne_bytes());
        }
        // The last drop freed the home; miri and the leak check watch.
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 256 }))]
        /// For any pattern of holding: held buffers keep their bytes, no buffer has two holders,
        /// and a free one is found within a round of looks.
        #[test]
        fn udp_4_buffer_reused_only_when_free(
            buffers in 1usize..12,
            look in 1usize..5,
            steps in proptest::collection::vec((any::<bool>(), any::<usize>()), 0..60),
        ) {
            let mut carousel = carousel(buffers);
            let mut held: Vec<(Frame, u32)> = Vec::new();
            let mut stamp = 0u32;
            for (is_take, which) in steps {
                if is_take {
                    let looks = buffers.div_ceil(look);
                    let taken = (0..looks).find_map(|_| carousel.take(look));
                    prop_assert_eq!(taken.is_some(), held.len() < buffers);
                    held.extend(taken.map(|mut frame| {
                        stamp += 1;
                        frame.copy_from(&stamp.to_ne_bytes());
                        (frame, stamp)
                    }));
                } else if !held.is_empty() {
                    let (frame, stamp) = held.swap_remove(which % held.len());
                    prop_assert_eq!(frame.data(), stamp.to_ne_bytes());
                }
                prop_assert_eq!(carousel.away(), held.len());
            }
            for (frame, stamp) in held {
                prop_assert_eq!(frame.data(), stamp.to_ne_bytes());
            }
            prop_assert_eq!(carousel.away(), 0);
        }
    }

    /// Two threads free the buffers that one owner fills; held bytes never change.
    #[test]
    fn udp_2_cpu_move_remote_buffers_return_once() {
        let rounds: u32 = if cfg!(miri) { 60 } else { 50_000 };
        let mut carousel = carousel(8);
        let (senders, readers): (Vec<_>, Vec<_>) = (0..2)
            .map(|lag| {
                let (sender, receiver) = std::sync::mpsc::channel::<(Frame, u32)>();
                let reader = std::thread::spawn(move || {
                    let mut late = VecDeque::new();
                    for (frame, stamp) in receiver {
                        late.push_back((frame, stamp));
                        if late.len() > lag * 3
                            && let Some((frame, stamp)) = late.pop_front()
                        {
                            assert_eq!(frame.data(), stamp.to_ne_bytes());
                        }
                    }
                });
                (sender, reader)
            })
            .unzip();
        for stamp in 0..rounds {
            let frame = loop {
                match filled(&mut carousel, stamp) {
                    Some(frame) => break frame,
                    None => std::thread::yield_now(),
                }
            };
            senders[stamp as usize % 2].send((frame, stamp)).unwrap();
        }
        drop(senders);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(carousel.away(), 0);
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    fn carousel(buffers: usize) -> RecycleRing {
        RecycleRing::new(Region::allocate(buffers * 512), 512, 0)
    }

    /// The owner refills a buffer only after its reader's last access.
    #[test]
    fn refilled_buffer_is_the_owners() {
        loom::model(|| {
            let mut carousel = carousel(1);
            let bytes = Arc::new(UnsafeCell::new(0));
            let frame = carousel.take(1).unwrap();
            let read = bytes.clone();
            let reader = thread::spawn(move || {
                // SAFETY: stands for the buffer's bytes, which are the frame holder's until the
                // frame is freed.
                read.with_mut(|bytes| unsafe { *bytes += 1 });
                drop(frame);
            });
            if let Some(again) = carousel.take(1) {
                // SAFETY: as above.
                bytes.with_mut(|bytes| unsafe { *bytes += 1 });
                drop(again);
            }
            reader.join().unwrap();
            assert_eq!(carousel.away(), 0);
        });
    }

    /// The owner is dropped while readers free its buffers: the last one frees the region, once.
    #[test]
    fn last_reader_frees_dead_ring() {
        loom::model(|| {
            let mut carousel = carousel(2);
            let (first, second) = (carousel.take(1).unwrap(), carousel.take(1).unwrap());
            let readers = [first, second].map(|frame| thread::spawn(move || drop(frame)));
            drop(carousel);
            for reader in readers {
                reader.join().unwrap();
            }
        });
    }
}
