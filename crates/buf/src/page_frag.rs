//! Pieces of memory shared with a peer: the kernel's `page_frag_cache`, for buffers that a device
//! writes into.
//!
//! ```text
//!  shared   │ block 0                    │ block 1        ┆ not yet cut │ block 2
//!           │ piece │ piece │ piece+hole │ piece │ piece  ┆             │   …
//!  private    away: bytes of it that are out              next           inbox ─► free
//! ```
//!
//! One owner cuts blocks into pieces of any length, one after the other. Any thread returns a piece
//! by one subtraction from its block's count. The thread that takes the count to zero pushes the
//! block to the owner's inbox: a stack of block numbers that the owner takes whole, so there is no
//! ABA. Once the owner is gone the inbox is closed, and the thread that returns the last block
//! frees the home, as with [frames](crate::pool).
//!
//! # Bytes that change
//! A peer may rewrite a block's bytes at any time, even while they are read. Rust does not define
//! the result of such a race, as for every mapping of a shared file. The code here tolerates every
//! result. Only raw bytes are read, which have no invalid values. They are either copied to private
//! memory before any decision depends on them ([`PageFrag::copy_in`]), and the source is not read
//! again for a decision; or they are data that is passed on unread ([`PageFrag::data`]), where any
//! value is valid. Nothing that this process relies on is kept in shared memory: counts, the inbox
//! and the handles are private.

use std::ptr::{self, NonNull};
use std::{fmt, mem, slice};

pub(crate) use home::FragHome;

use crate::cache::{LINE_BYTES, prefetch_to_read};
use crate::region::Region;
use crate::sync::Arc;

mod home; // home of the pieces, and their return to it

/// Alignment of pieces, and the unit of their lengths: a cache line.
pub const FRAG_ALIGN_BYTES: u32 = 64;

/// Smallest size of a block: a page.
pub const MIN_BLOCK_BYTES: u32 = 4096;

/// Allocator of pieces from one queue's blocks of shared memory.
pub struct PageFragCache {
    home: NonNull<FragHome>,
    /// Numbers of the free blocks. LIFO: the block used last is the warmest.
    free: Vec<u32>,
    /// Bytes `[next, end)` of the current block are not cut yet, as offsets from the first block's
    /// beginning. Empty if there is no current block.
    next: u32,
    end: u32,
}

// SAFETY: a cache has the only handle on the bytes that it has not cut; `FragHome` is made of
// atomics and constants.
unsafe impl Send for PageFragCache {}

impl PageFragCache {
    /// Creates an allocator for `blocks` blocks of `block_bytes` each, from `offset_bytes` of
    /// `region` on. Each piece begins at a multiple of [`FRAG_ALIGN_BYTES`] from there. The memory
    /// is claimed until the last piece is returned.
    ///
    /// # Panics
    /// If `region` is not [shared](Region::is_shared), the blocks exceed it or overlap another
    /// [claim](Region::claim), they total 4 GiB or more, or `block_bytes` is not a power of two of
    /// at least [`MIN_BLOCK_BYTES`].
    #[must_use]
    pub fn new(region: &Arc<Region>, offset_bytes: usize, block_bytes: u32, blocks: u32) -> Self {
        assert!(
            block_bytes.is_power_of_two() && block_bytes >= MIN_BLOCK_BYTES,
            "a block is a power of two of at least {MIN_BLOCK_BYTES} bytes, not {block_bytes}"
        );
        let Some(bytes) = block_bytes.checked_mul(blocks) else {
            panic!("{blocks} blocks of {block_bytes} bytes are more than handles can tell apart")
        };
        let part = offset_bytes..offset_bytes.saturating_add(bytes as usize);
        let Some(claim) = Region::claim(region, part.clone()) else {
            panic!("{part:?} is not a part of a shared region that nothing else uses: {region:?}")
        };
        let home = FragHome::new(claim, block_bytes, blocks);
        let free = (0..blocks).rev().collect(); // low addresses first
        Self { home: NonNull::from(Box::leak(home)), free, next: 0, end: 0 }
    }

    /// Cuts a piece with room for `len_bytes` bytes, from the current block or from the next free
    /// one. If another piece of this length would not fit behind it, the rest of the block (the
    /// hole) belongs to this piece, too (VIO-6), and is counted (VIO-R2). `None` if no block is
    /// free.
    ///
    /// # Panics
    /// If `len_bytes` is 0, not a multiple of [`FRAG_ALIGN_BYTES`], or more than a block.
    #[inline]
    pub fn cut(&mut self, len_bytes: u32) -> Option<PageFrag> {
        assert!(
            len_bytes > 0 && len_bytes.is_multiple_of(FRAG_ALIGN_BYTES),
            "a piece is a multiple of {FRAG_ALIGN_BYTES} bytes, not {len_bytes}"
        );
        if self.rest_bytes() < len_bytes && !self.go_to_next_block(len_bytes) {
            return None;
        }
        let hole_bytes = self.rest_bytes() - len_bytes;
        let truesize = if hole_bytes < len_bytes { self.rest_bytes() } else { len_bytes };
        let offset = self.next;
        self.next += truesize;
        Some(PageFrag { home: self.home, offset, start: 0, len_bytes: 0, truesize })
    }

    /// Undoes the last cut (VIO-R3): its space is cut next. Any other piece is just returned.
    pub fn roll_back(&mut self, frag: PageFrag) {
        let is_last = frag.home == self.home
            && frag.offset + frag.truesize == self.next
            && frag.offset >= self.end - self.home().block_bytes;
        if is_last {
            self.next = frag.offset;
            mem::forget(frag);
        }
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.home().blocks.len()
    }

    /// Number of blocks with outstanding pieces.
    pub fn away_blocks(&mut self) -> usize {
        self.collect();
        self.blocks() - self.free.len() - usize::from(self.is_current_whole())
    }

    /// Takes in the blocks that were returned. Costs one read of a shared cache line if there are
    /// none.
    pub fn collect(&mut self) {
        let home = self.home;
        // SAFETY: alive until Drop closes it.
        let home = unsafe { home.as_ref() };
        home.take_in(&mut self.free);
    }

    /// Begins the next block, for a piece of `len_bytes`; the rest of the current block is returned
    /// uncut. Returns false if no block is free.
    #[inline(never)]
    fn go_to_next_block(&mut self, len_bytes: u32) -> bool {
        let block_bytes = self.home().block_bytes;
        assert!(
            len_bytes <= block_bytes,
            "{len_bytes} bytes do not fit in a block of {block_bytes}"
        );
        if self.is_current_whole() {
            self.begin(self.end - block_bytes);
            return true;
        }
        self.collect();
        let Some(block) = self.free.pop() else { return false };
        self.give_back_rest();
        self.begin(block << self.home().shift);
        true
    }

    /// Makes the block at `offset`, which has no outstanding pieces, the current one.
    fn begin(&mut self, offset: u32) {
        let home = self.home();
        home.begin(offset);
        (self.next, self.end) = (offset, offset + home.block_bytes);
    }

    /// True if there is a current block, and none of its pieces are outstanding.
    fn is_current_whole(&self) -> bool {
        self.rest_bytes() > 0 && self.home().away_of(self.next) == self.rest_bytes()
    }

    fn give_back_rest(&mut self) {
        let (offset, rest_bytes) = (self.next, self.rest_bytes());
        self.next = self.end;
        if rest_bytes > 0 {
            // SAFETY: the bytes were not cut, and from now on they are not this cache's.
            unsafe { FragHome::give_back(self.home, offset, rest_bytes) };
        }
    }

    #[inline]
    fn rest_bytes(&self) -> u32 {
        self.end - self.next
    }

    fn home(&self) -> &FragHome {
        // SAFETY: alive until Drop closes it.
        unsafe { self.home.as_ref() }
    }
}

impl Drop for PageFragCache {
    fn drop(&mut self) {
        self.give_back_rest();
        // SAFETY: this cache is the owner, closes the home once and does not use it afterwards.
        unsafe { FragHome::close(self.home, self.free.len()) };
    }
}

impl fmt::Debug for PageFragCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { home: _, free, next, end } = self;
        let (blocks, block_bytes) = (self.blocks(), self.home().block_bytes);
        write!(f, "PageFragCache({blocks} blocks of {block_bytes} bytes, {} free, ", free.len())?;
        write!(f, "{} bytes of one not cut)", end - next)
    }
}

/// Piece of a block: a buffer that a device writes a packet into, or a part of one. A drop on any
/// thread returns the piece to its home.
///
/// ```text
///  address()                                                 address() + room_bytes()
///  │ pulled off │ data: len_bytes() bytes │ room behind it … hole │
/// ```
pub struct PageFrag {
    home: NonNull<FragHome>,
    /// Offset of the room's first byte from the first block's beginning.
    offset: u32,
    /// Offset of the data in the room.
    start: u32,
    len_bytes: u32,
    /// Size of the room.
    truesize: u32,
}

const _: () = assert!(size_of::<PageFrag>() == 24, "a piece is moved in three registers");

// SAFETY: a piece is the only handle on its bytes in this process, so it may move to another
// thread; `FragHome` is made of atomics and constants.
unsafe impl Send for PageFrag {}
// SAFETY: `&PageFrag` only reads the bytes and the home's constants.
unsafe impl Sync for PageFrag {}

impl PageFrag {
    /// Address of the room's first byte in this process, for a descriptor.
    #[must_use]
    #[inline]
    pub fn address(&self) -> u64 {
        self.home().base.addr().get() as u64 + u64::from(self.offset)
    }

    /// Number of bytes that a device may write, the hole at the block's end included if this piece
    /// has it.
    #[must_use]
    #[inline]
    pub fn room_bytes(&self) -> u32 {
        self.truesize
    }

    /// Memory that the piece occupies, the hole included (VIO-R2).
    #[must_use]
    #[inline]
    pub fn truesize(&self) -> u32 {
        self.truesize
    }

    /// Length of the data; 0 until [`set_len`](Self::set_len).
    #[must_use]
    #[inline]
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Declares `len_bytes` bytes to be data, from the room's beginning or from behind the bytes
    /// that were pulled.
    ///
    /// # Panics
    /// If the room is smaller.
    #[inline]
    pub fn set_len(&mut self, len_bytes: u32) {
        let room = self.truesize - self.start;
        assert!(len_bytes <= room, "{len_bytes} bytes do not fit in a piece's room of {room}");
        self.len_bytes = len_bytes;
    }

    /// Removes `len_bytes` bytes from the data's front. The piece keeps their memory.
    ///
    /// # Panics
    /// If the data is shorter.
    #[inline]
    pub fn pull(&mut self, len_bytes: u32) {
        assert!(len_bytes <= self.len_bytes, "{len_bytes} bytes of a piece of {}", self.len_bytes);
        self.start += len_bytes;
        self.len_bytes -= len_bytes;
    }

    /// Copies bytes from `at` of the room into private memory, which a peer cannot change.
    ///
    /// # Panics
    /// If the bytes exceed the room.
    #[inline]
    pub fn copy_in(&self, at: u32, to: &mut [u8]) {
        let from = self.span(at, to.len());
        // SAFETY: the span lies within this piece's room, which nothing private overlaps. What a
        // peer does to it meanwhile: see the module documentation.
        unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }

    /// Copies `from` to `at` of the room, for a device to read.
    ///
    /// # Panics
    /// If the bytes exceed the room.
    #[inline]
    pub fn copy_out(&mut self, at: u32, from: &[u8]) {
        let to = self.span(at, from.len());
        // SAFETY: as in `copy_in`; `&mut self` excludes readers in this process.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    /// The data, where the device wrote it. The peer may rewrite these bytes while they are read:
    /// they may only be passed on. Decisions need a [copy](Self::copy_in) first (see the module
    /// documentation).
    #[must_use]
    pub fn data(&self) -> &[u8] {
        let first = self.span(self.start, self.len_bytes as usize);
        // SAFETY: the data lies within the room, initialised with its region; this process does
        // not write there while the handle is borrowed. For the peer see the module documentation.
        unsafe { slice::from_raw_parts(first, self.len_bytes as usize) }
    }

    /// Merges `next` into this piece, if it begins where this one's data and room end (VIO-7).
    ///
    /// # Errors
    /// Returns `next` if it is not adjacent, or of another block.
    pub fn join(&mut self, next: PageFrag) -> Result<(), PageFrag> {
        let is_adjacent = next.home == self.home
            && self.home().is_one_block(self.offset, next.offset)
            && self.start + self.len_bytes == self.truesize
            && self.offset + self.truesize == next.offset
            && next.start == 0;
        if !is_adjacent {
            return Err(next);
        }
        self.len_bytes += next.len_bytes;
        self.truesize += next.truesize;
        mem::forget(next);
        Ok(())
    }

    /// Prefetches the cache lines of the room's first `len_bytes` bytes: at least two lines, at
    /// most three.
    #[inline]
    pub fn prefetch(&self, len_bytes: u32) {
        let first_byte = self.span(0, LINE_BYTES);
        prefetch_to_read(first_byte);
        prefetch_to_read(first_byte.wrapping_add(LINE_BYTES));
        if len_bytes as usize > 2 * LINE_BYTES {
            prefetch_to_read(first_byte.wrapping_add(2 * LINE_BYTES));
        }
    }

    /// Address of the `len` bytes at `at` of the room.
    #[inline]
    fn span(&self, at: u32, len: usize) -> *mut u8 {
        let room = self.truesize;
        assert!(
            at <= room && len <= (room - at) as usize,
            "{len} bytes at {at} are not all in a piece's room of {room}"
        );
        // SAFETY: within the room, by the check above, and so within the blocks.
        unsafe { self.home().at(self.offset + at) }
    }

    fn home(&self) -> &FragHome {
        // SAFETY: a home lives while one of its pieces is outstanding.
        unsafe { self.home.as_ref() }
    }

    /// The home, and the offset of the data from its first block.
    #[inline]
    pub(crate) fn place(&self) -> (NonNull<FragHome>, u32) {
        (self.home, self.offset + self.start)
    }

    /// Number of bytes in the room before the data.
    pub(crate) fn pulled(&self) -> u32 {
        self.start
    }
}

impl Drop for PageFrag {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the piece is this handle's, which ends here.
        unsafe { FragHome::give_back(self.home, self.offset, self.truesize) };
    }
}

impl fmt::Debug for PageFrag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { home: _, offset, start, len_bytes, truesize } = self;
        write!(f, "PageFrag({len_bytes} bytes at {offset}+{start}, room {truesize})")
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
mod models;
