//! Pieces of memory that a peer shares: the kernel's `page_frag_cache`, for buffers that a device
//! writes into.
//!
//! ```text
//!  shared   │ block 0                    │ block 1        ┆ not yet cut │ block 2
//!           │ piece │ piece │ piece+hole │ piece │ piece  ┆             │   …
//!  private    away: bytes of it that are out              next           inbox ─► free
//! ```
//!
//! One owner cuts blocks into pieces of any length, one after the other; any thread gives a piece
//! back, by one subtraction from its block's count. Whoever takes the count to zero puts the block
//! in the owner's inbox: a stack of numbers that anyone pushes to and the owner takes whole, so no
//! block is seen twice (no ABA). When the owner is gone the inbox is closed, and whoever brings the
//! last block home frees the home, as with [frames](crate::pool).
//!
//! # Bytes that change
//! A peer may rewrite a block's bytes at any time, while they are read, too. What such a race comes
//! to is outside of what Rust defines, as it is for every file mapping. It is all right here, for
//! these reasons. Only raw bytes are read, which have no invalid values. They go into private
//! memory before anything is decided by them ([`PageFrag::copy_in`]), and nothing is decided by the
//! source twice; or they are data that is passed on unread ([`PageFrag::data`]), where any value is
//! as good as another. Nothing that this process relies on is kept in shared memory: counts, the
//! inbox and the handles are private.

use std::ptr::{self, NonNull};
use std::{fmt, mem, slice};

pub(crate) use home::FragHome;

use crate::cache::{LINE_BYTES, prefetch_to_read};
use crate::region::Region;
use crate::sync::Arc;

mod home; // where pieces belong, and the way there

/// A cache line: lengths of pieces are multiples of it.
pub const FRAG_ALIGN_BYTES: u32 = 64;

/// The least size of a block: a page.
pub const MIN_BLOCK_BYTES: u32 = 4096;

/// A queue's blocks of shared memory, and its end of them: it cuts pieces.
pub struct PageFragCache {
    home: NonNull<FragHome>,
    /// Numbers of blocks that are home. Last in, first out: the block used last is the warmest.
    free: Vec<u32>,
    /// The current block's bytes that were not cut yet, from the first block's beginning. Empty:
    /// there is no current block.
    next: u32,
    end: u32,
}

// SAFETY: a cache has the only handle on the bytes that it has not cut; `FragHome` is made of
// atomics and constants.
unsafe impl Send for PageFragCache {}

impl PageFragCache {
    /// Cuts pieces from `blocks` blocks of `block_bytes` each, which lie in `region` from
    /// `offset_bytes` on; each piece begins a multiple of [`FRAG_ALIGN_BYTES`] from there. The memory is claimed until the last piece is home.
    ///
    /// # Panics
    /// When `region` is not [shared](Region::is_shared), the blocks are not all in it or something
    /// else has a [claim](Region::claim) there, they come to 4 GiB or more, or `block_bytes` is not a
    /// power of two of at least [`MIN_BLOCK_BYTES`].
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
            panic!("{part:?} is no part of a shared region that nothing else uses: {region:?}")
        };
        let home = FragHome::new(claim, block_bytes, blocks);
        let free = (0..blocks).rev().collect(); // low addresses first
        Self { home: NonNull::from(Box::leak(home)), free, next: 0, end: 0 }
    }

    /// Cuts a piece with room for `len_bytes` bytes: from the current block, or from the next one
    /// that is free. When another piece of this length would not fit behind it, the rest of the
    /// block (the hole) is this piece's, too (VIO-6), and counted (VIO-R2). `None`: all blocks are
    /// away.
    ///
    /// # Panics
    /// When `len_bytes` is 0, no multiple of [`FRAG_ALIGN_BYTES`], or more than a block.
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

    /// Undoes the last cut (VIO-R3): its space is what is cut next. A piece that was cut before just
    /// goes home.
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

    /// Number of blocks of which pieces are away.
    pub fn away_blocks(&mut self) -> usize {
        self.collect();
        self.blocks() - self.free.len() - usize::from(self.is_current_whole())
    }

    /// Takes in the blocks that came home. Costs one read of a shared cache line when there are
    /// none.
    pub fn collect(&mut self) {
        let home = self.home;
        // SAFETY: alive until Drop closes it.
        let home = unsafe { home.as_ref() };
        home.take_in(&mut self.free);
    }

    /// Begins the next block, for a piece of `len_bytes`; what is left of the current one goes home
    /// uncut.
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

    /// Makes the block at `offset`, nothing of which is away, the current one.
    fn begin(&mut self, offset: u32) {
        let home = self.home();
        home.begin(offset);
        (self.next, self.end) = (offset, offset + home.block_bytes);
    }

    /// True if there is a current block, and nothing of it is away.
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
        // SAFETY: this cache is the owner, closes the home once and forgets it.
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

/// A piece of a block: a buffer that a device writes a packet into, or a part of one. It goes home
/// when it is dropped, on any thread.
///
/// ```text
///  address()                                                 address() + room_bytes()
///  │ pulled off │ data: len_bytes() bytes │ room behind it … hole │
/// ```
pub struct PageFrag {
    home: NonNull<FragHome>,
    /// The room's first byte, from the first block's beginning.
    offset: u32,
    /// Offset of the data in the room.
    start: u32,
    len_bytes: u32,
    /// The room's size.
    truesize: u32,
}

const _: () = assert!(size_of::<PageFrag>() == 24, "a piece is moved in three registers");

// SAFETY: a piece is the only handle on its bytes in this process, so it may move to another
// thread; `FragHome` is made of atomics and constants.
unsafe impl Send for PageFrag {}
// SAFETY: `&PageFrag` only reads the bytes and the home's constants.
unsafe impl Sync for PageFrag {}

impl PageFrag {
    /// The address of the room's first byte, in this process: for a descriptor.
    #[must_use]
    #[inline]
    pub fn address(&self) -> u64 {
        self.home().base.addr().get() as u64 + u64::from(self.offset)
    }

    /// Number of bytes that a device may write: the hole at the block's end included, if this piece got
    /// it.
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

    /// The length of its data; 0 until [`set_len`](Self::set_len) says more.
    #[must_use]
    #[inline]
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Declares `len_bytes` bytes to be data, from the room's beginning or from behind what was
    /// pulled off.
    ///
    /// # Panics
    /// When there is less room than that.
    #[inline]
    pub fn set_len(&mut self, len_bytes: u32) {
        let room = self.truesize - self.start;
        assert!(len_bytes <= room, "{len_bytes} bytes do not fit in a piece's room of {room}");
        self.len_bytes = len_bytes;
    }

    /// Takes `len_bytes` bytes off the data's front. They stay this piece's.
    ///
    /// # Panics
    /// When there are fewer.
    #[inline]
    pub fn pull(&mut self, len_bytes: u32) {
        assert!(len_bytes <= self.len_bytes, "{len_bytes} bytes of a piece of {}", self.len_bytes);
        self.start += len_bytes;
        self.len_bytes -= len_bytes;
    }

    /// Copies bytes out of shared memory, from `at` bytes behind the room's beginning on, into
    /// private memory, where they do not change any more.
    ///
    /// # Panics
    /// When the room ends before that many.
    #[inline]
    pub fn copy_in(&self, at: u32, to: &mut [u8]) {
        let from = self.span(at, to.len());
        // SAFETY: the span lies within this piece's room, which nothing private overlaps. What a
        // peer does to it meanwhile: see the module's head.
        unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }

    /// Copies `from` into shared memory, to `at` bytes behind the room's beginning: for a device
    /// to read.
    ///
    /// # Panics
    /// When the room ends before that.
    #[inline]
    pub fn copy_out(&mut self, at: u32, from: &[u8]) {
        let to = self.span(at, from.len());
        // SAFETY: as in `copy_in`; `&mut self` excludes readers in this process.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    /// The data, where the device put it. The peer may rewrite these bytes while they are looked
    /// at: they are data to be passed on, and nothing else. Whoever decides anything by them takes
    /// a [copy](Self::copy_in) first (see the module's head).
    #[must_use]
    pub fn data(&self) -> &[u8] {
        let first = self.span(self.start, self.len_bytes as usize);
        // SAFETY: the data lies within the room, initialised with its region; this process does
        // not write there while the handle is borrowed. For the peer see the module's head.
        unsafe { slice::from_raw_parts(first, self.len_bytes as usize) }
    }

    /// Makes `next` a part of this piece, if it begins where this one's data and room end (VIO-7).
    ///
    /// # Errors
    /// With `next`, when it does not, or is of another block.
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

    /// Asks for the cache lines of the room's first `len_bytes` bytes ahead of their use: for two at
    /// least, and for three at most.
    #[inline]
    pub fn prefetch(&self, len_bytes: u32) {
        let first_byte = self.span(0, LINE_BYTES);
        prefetch_to_read(first_byte);
        prefetch_to_read(first_byte.wrapping_add(LINE_BYTES));
        if len_bytes as usize > 2 * LINE_BYTES {
            prefetch_to_read(first_byte.wrapping_add(2 * LINE_BYTES));
        }
    }

    /// The first of `len` bytes, `at` bytes behind the room's beginning, all of which are the
    /// room's.
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
        // SAFETY: a home lives while a piece of it is away.
        unsafe { self.home.as_ref() }
    }

    /// The home, and where in it the data begins.
    #[inline]
    pub(crate) fn place(&self) -> (NonNull<FragHome>, u32) {
        (self.home, self.offset + self.start)
    }

    /// Bytes of the room before the data.
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
