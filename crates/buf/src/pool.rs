//! Frames of one CPU, and the return of frames to other CPUs.

use std::fmt;
use std::ptr::NonNull;

use crate::cache::{LINE_BYTES, prefetch_to_write};
use crate::frags::PendingReturn;
use crate::frame::{BEFORE_PACKET_BYTES, Frame};
pub use crate::free_batch::FREE_BATCH_FRAMES;
use crate::free_batch::{FreeBatch, PoolId, RemoteFreeList};
use crate::region::Region;
use crate::sync::Arc;

/// Smallest chunk size: room for the bytes before a packet and a small packet, or for a batch's
/// list.
pub const MIN_CHUNK_BYTES: u32 = 512;

/// Alignment of chunks: a cache line.
pub const CHUNK_ALIGN_BYTES: u32 = 64;

/// Owner number of a pool without frames: [`carve`] numbers owners from 0, at most 65,535 of them.
const OWNS_NOTHING: u16 = u16::MAX;

/// Distance in frames at which free chunks are prefetched: a cache line arrives from another CPU in
/// the time that a few packets take.
const PREFETCH_AHEAD: usize = 4;

/// Number and size of one owner's chunks of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkClass {
    /// Size of each: a multiple of [`CHUNK_ALIGN_BYTES`], at least [`MIN_CHUNK_BYTES`].
    pub chunk_bytes: u32,
    /// Number of chunks.
    pub chunks: u32,
}

/// Error: the region is too small for the shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionTooSmall {
    /// Bytes that the shares need.
    pub need_bytes: usize,
    /// Bytes that the region has.
    pub have_bytes: usize,
}

impl fmt::Display for RegionTooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { need_bytes, have_bytes } = self;
        write!(f, "frames need {need_bytes} bytes, the region has {have_bytes}")
    }
}

impl std::error::Error for RegionTooSmall {}

/// Bytes that [`carve`] needs for these shares.
#[must_use]
pub fn region_bytes(shares: &[Vec<ChunkClass>]) -> usize {
    let class_bytes =
        |class: &ChunkClass| (class.chunk_bytes as usize).saturating_mul(class.chunks as usize);
    // A saturated sum exceeds any region.
    shares.iter().flatten().map(class_bytes).fold(0, usize::saturating_add)
}

/// Cuts a region into chunks, one share of classes for each owner, and returns the owners' pools in
/// the same order. A pool with an empty share can still return frames to their owners.
///
/// # Errors
/// If the region is smaller than [`region_bytes`].
///
/// # Panics
/// If a chunk size breaks the rules of [`ChunkClass`], there are more than 65,535 owners or classes
/// in all, or a peer shares the region.
pub fn carve(region: Region, shares: &[Vec<ChunkClass>]) -> Result<Vec<Pool>, RegionTooSmall> {
    assert!(!region.is_shared(), "a frame is never cut from memory that a peer can rewrite");
    let (need_bytes, have_bytes) = (region_bytes(shares), region.len_bytes());
    if need_bytes > have_bytes {
        return Err(RegionTooSmall { need_bytes, have_bytes });
    }
    let homes = shares.iter().map(Vec::len).sum();
    // The ids below must not wrap: a home's id is the index of its bin in every pool.
    assert!(u16::try_from(homes).is_ok() && u16::try_from(shares.len()).is_ok(), "too many shares");
    let region = Arc::new(region);
    let mut next_chunk = region.base();
    let mut next_home = 0;
    let pools = (0u16..).zip(shares).map(|(owner, share)| {
        let mut classes = share.clone();
        classes.sort_by_key(|class| class.chunk_bytes);
        let first_home = next_home;
        let classes = classes.into_iter().map(|class| {
            let home = RemoteFreeList::new(
                PoolId(next_home),
                owner,
                class.chunk_bytes,
                Arc::clone(&region),
            );
            next_home += 1;
            // SAFETY: the bounds were checked above, and chunks do not overlap as `next_chunk`
            // only moves forward.
            unsafe { SizeClass::stock(home, class, &mut next_chunk) }
        });
        Pool {
            owner,
            first_home,
            classes: classes.collect(),
            return_bins: (0..homes).map(|_| None).collect(),
            open: Vec::with_capacity(homes),
            homebound: None,
            region: Arc::clone(&region),
        }
    });
    Ok(pools.collect())
}

/// One CPU's frame allocator: hands out the frames that this CPU owns, and takes back any frame.
///
/// A frame of this CPU goes straight to its free list. A frame of another CPU goes into the bin for
/// its owner. A bin is handed over whole when it holds [`FREE_BATCH_FRAMES`], and every bin at the
/// end of a turn ([`flush`]). Handing over never waits for the owner, whatever its state.
///
/// [`flush`]: Self::flush
pub struct Pool {
    owner: u16,
    /// Id of the first class's home: homes are numbered in the order of owners, then of size classes.
    first_home: u16,
    /// Free lists of this CPU's own frames, smallest chunks first.
    classes: Vec<SizeClass>,
    /// Batch being filled for each home of the region.
    return_bins: Vec<Option<ReturnBin>>,
    /// Homes whose bins are not empty.
    open: Vec<PoolId>,
    /// Pieces that were behind freed frames, not yet returned.
    homebound: Option<PendingReturn>,
    region: Arc<Region>,
}

struct SizeClass {
    home: NonNull<RemoteFreeList>,
    /// LIFO: the chunk used last is the warmest.
    free: Vec<NonNull<u8>>,
    chunks: usize,
}

struct ReturnBin {
    home: NonNull<RemoteFreeList>,
    batch: NonNull<FreeBatch>,
}

// SAFETY: a pool holds free chunks and batches that nobody else has a handle on.
unsafe impl Send for Pool {}

impl Pool {
    /// Allocates an empty frame with room for `len_bytes`, from the smallest chunks that have it,
    /// or from larger ones when those are exhausted. `None` if no chunk that is large enough is
    /// free.
    #[inline] // keeps the frame in registers
    pub fn allocate(&mut self, len_bytes: u32) -> Option<Frame> {
        let chunk_bytes = len_bytes.checked_add(BEFORE_PACKET_BYTES)?;
        self.classes
            .iter_mut()
            .filter(|class| class.home().chunk_bytes >= chunk_bytes)
            .find_map(SizeClass::take)
    }

    /// Size of this pool's smallest chunks; 0 if it has none.
    #[must_use]
    pub fn smallest_chunk_bytes(&self) -> u32 {
        self.classes.first().map_or(0, |class| class.home().chunk_bytes)
    }

    /// Most bytes that a frame of this pool can hold.
    #[must_use]
    pub fn largest_frame_bytes(&self) -> u32 {
        self.classes.last().map_or(0, |class| class.home().chunk_bytes - BEFORE_PACKET_BYTES)
    }

    /// Most bytes that a frame can hold which is free now; 0 if none is free.
    #[must_use]
    pub fn largest_free_bytes(&mut self) -> u32 {
        let largest =
            self.classes.iter_mut().rev().find_map(|class| class.has_free().then_some(class));
        largest.map_or(0, |class| class.home().chunk_bytes - BEFORE_PACKET_BYTES)
    }

    /// Number of this pool's frames, free or not, that have room for `len_bytes`.
    #[must_use]
    pub fn frames_for(&self, len_bytes: u32) -> usize {
        let has_room = |class: &&SizeClass| {
            class.home().chunk_bytes.saturating_sub(BEFORE_PACKET_BYTES) >= len_bytes
        };
        self.classes.iter().filter(has_room).map(|class| class.chunks).sum()
    }

    /// Region that this pool's frames, and those of the other pools carved from it, are part of.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Creates a pool without frames of its own, for another thread to return frames with.
    #[must_use]
    pub fn return_handle(&self) -> Pool {
        let homes = self.return_bins.len();
        Pool {
            owner: OWNS_NOTHING,
            first_home: 0,
            classes: Vec::new(),
            return_bins: (0..homes).map(|_| None).collect(),
            open: Vec::with_capacity(homes),
            homebound: None,
            region: Arc::clone(&self.region),
        }
    }

    /// Takes a frame back, whatever its owner, with the frames and pieces behind it. Pieces are
    /// kept until the next [`flush`](Self::flush) or a piece of another block, so that one
    /// subtraction returns several of them.
    pub fn put(&mut self, mut frame: Frame) {
        if frame.has_more() {
            frame.release_frags(&mut self.homebound);
            if frame.follower_count() > 0 {
                self.put_followers(&mut frame);
            }
        }
        self.put_alone(frame);
    }

    fn put_followers(&mut self, frame: &mut Frame) {
        for mut follower in frame.take_followers() {
            if follower.has_more() {
                follower.release_frags(&mut self.homebound);
            }
            self.put_alone(follower);
        }
    }

    #[inline]
    fn put_alone(&mut self, frame: Frame) {
        let home = frame.home();
        if home.owner != self.owner || !Arc::ptr_eq(&home.region, &self.region) {
            return self.put_foreign(frame);
        }
        let class = usize::from(home.id.0 - self.first_home);
        let (_, chunk) = frame.into_parts();
        self.classes[class].free.push(chunk);
    }

    /// Takes back a frame of another owner.
    #[inline(never)] // keeps its registers out of the loop over a chain
    fn put_foreign(&mut self, frame: Frame) {
        let home = frame.home();
        if !Arc::ptr_eq(&home.region, &self.region) {
            return drop(frame); // of a recycle ring or another engine: no bin is its home's
        }
        let id = home.id;
        let (home, chunk) = frame.into_parts();
        self.bin(id, home, chunk);
    }

    /// Returns every frame in a bin, and the pieces kept, to their owners. Called at the end of a
    /// turn, so that nothing is held back while this CPU idles.
    pub fn flush(&mut self) {
        self.homebound = None;
        for id in self.open.drain(..) {
            if let Some(bin) = self.return_bins[usize::from(id.0)].take() {
                bin.send();
            }
        }
    }

    /// Moves the frames that were returned to the free lists, where they are used first, being
    /// warm. Costs one read of a shared cache line if there are none.
    pub fn collect(&mut self) {
        for class in &mut self.classes {
            if class.home().has_mail() {
                class.collect();
            }
        }
    }

    /// Number of outstanding frames of this pool: in use, queued, or in other CPUs' bins.
    pub fn in_use(&mut self) -> usize {
        self.collect();
        self.classes.iter().map(|class| class.chunks - class.free.len()).sum()
    }

    fn bin(&mut self, id: PoolId, home: NonNull<RemoteFreeList>, chunk: NonNull<u8>) {
        let slot = &mut self.return_bins[usize::from(id.0)];
        let Some(bin) = slot else {
            // SAFETY: `put` took the chunk from a frame: free, and ours.
            let batch = unsafe { FreeBatch::begin(chunk) };
            FreeBatch::prefetch(batch);
            *slot = Some(ReturnBin { home, batch });
            self.open.push(id);
            return;
        };
        // SAFETY: a batch in a bin is this pool's alone until it is sent.
        let batch = unsafe { bin.batch.as_mut() };
        if batch.add(chunk) {
            self.open.retain(|&open| open != id);
            if let Some(bin) = slot.take() {
                bin.send();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.flush();
        for class in self.classes.drain(..) {
            // SAFETY: this pool is the owner; it closes each home once and does not use it
            // afterwards.
            unsafe { RemoteFreeList::close(class.home, class.free, class.chunks) };
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free: usize = self.classes.iter().map(|class| class.free.len()).sum();
        write!(f, "Pool(cpu slot {}, {free} free)", self.owner)
    }
}

impl SizeClass {
    /// Fills a new size class with chunks cut from `next_chunk` onwards.
    ///
    /// # Safety
    /// The region has room for the class's chunks at `next_chunk`, and nobody else uses them.
    unsafe fn stock(
        home: Box<RemoteFreeList>,
        class: ChunkClass,
        next_chunk: &mut NonNull<u8>,
    ) -> Self {
        let ChunkClass { chunk_bytes, chunks } = class;
        assert!(
            chunk_bytes >= MIN_CHUNK_BYTES && chunk_bytes.is_multiple_of(CHUNK_ALIGN_BYTES),
            "a chunk is a multiple of {CHUNK_ALIGN_BYTES} bytes and at least {MIN_CHUNK_BYTES}, \
             not {chunk_bytes}"
        );
        let mut free = Vec::with_capacity(chunks as usize);
        for _ in 0..chunks {
            free.push(*next_chunk);
            // SAFETY: at most one past the end of the region, by the caller's promise.
            *next_chunk = unsafe { next_chunk.add(chunk_bytes as usize) };
        }
        free.reverse(); // low addresses first
        Self { home: NonNull::from(Box::leak(home)), free, chunks: chunks as usize }
    }

    #[inline]
    fn take(&mut self) -> Option<Frame> {
        if self.free.is_empty() {
            self.collect();
        }
        let chunk = self.free.pop()?;
        if let Some(ahead) = self.free.len().checked_sub(PREFETCH_AHEAD) {
            prefetch_free(self.free[ahead]);
        }
        // SAFETY: the chunk was free, on this home's list; the home is open.
        Some(unsafe { Frame::new(self.home, chunk) })
    }

    fn has_free(&mut self) -> bool {
        if self.free.is_empty() && self.home().has_mail() {
            self.collect();
        }
        !self.free.is_empty()
    }

    #[cold]
    fn collect(&mut self) {
        // SAFETY: alive until the pool's Drop closes it.
        let home = unsafe { self.home.as_ref() };
        // SAFETY: the class's pool is the owner, and closes the home only in Drop.
        unsafe { home.collect(&mut self.free) };
        self.free.iter().rev().take(PREFETCH_AHEAD).copied().for_each(prefetch_free);
    }

    fn home(&self) -> &RemoteFreeList {
        // SAFETY: alive until the pool's Drop closes it.
        unsafe { self.home.as_ref() }
    }
}

/// Prefetches a free chunk's first packet lines for writing: another CPU read them last.
fn prefetch_free(chunk: NonNull<u8>) {
    let first_byte = chunk.as_ptr().wrapping_add(BEFORE_PACKET_BYTES as usize);
    prefetch_to_write(first_byte);
    prefetch_to_write(first_byte.wrapping_add(LINE_BYTES));
}

impl ReturnBin {
    fn send(self) {
        // SAFETY: the batch and all chunks in it are of this home, and given up here.
        unsafe { RemoteFreeList::push(self.home, self.batch) };
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
