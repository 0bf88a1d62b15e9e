//! Home of pieces of shared memory: the count of outstanding bytes of each block, and the inbox for
//! blocks with none.

use std::ptr::NonNull;

use crate::cache::OwnLine;
use crate::region::Claim;
use crate::sync::{AtomicI64, AtomicU32, Ordering, fence};

/// Marks the end of the inbox's stack: no block has this number.
const NONE: u32 = u32::MAX;
/// Marks a closed inbox: no block has this number either.
const CLOSED: u32 = u32::MAX - 1;

/// Home of the pieces of one cache. It outlives the cache while pieces are outstanding.
pub(crate) struct FragHome {
    /// Stack of block numbers: pushed by any thread (Release), taken whole by the owner (Acquire).
    inbox: OwnLine<AtomicU32>,
    /// Address of the first block's first byte. Offsets count from here.
    pub(super) base: NonNull<u8>,
    pub(super) block_bytes: u32,
    /// log2 of `block_bytes`.
    pub(super) shift: u32,
    pub(super) blocks: Box<[OutBlock]>,
    /// Outstanding blocks when the owner closed, minus those returned since; negative until the
    /// owner's share is added. Written by threads that find the inbox closed (AcqRel); 0 frees the
    /// home.
    away: AtomicI64,
    /// Keeps the memory of outstanding pieces alive.
    _claim: Claim,
}

/// State of one block. On a cache line of its own, as neighbouring blocks are returned on other
/// CPUs.
#[repr(align(64))]
pub(super) struct OutBlock {
    /// Bytes not returned since the block was begun, cut or not. Written by the threads that return
    /// pieces (Release), and by the owner when nothing is outstanding.
    away: AtomicU32,
    /// Next block in the inbox's stack. Written before this block is pushed.
    next: AtomicU32,
}

impl OutBlock {
    fn new() -> Self {
        Self { away: AtomicU32::new(0), next: AtomicU32::new(NONE) }
    }
}

impl FragHome {
    pub(super) fn new(claim: Claim, block_bytes: u32, blocks: u32) -> Box<Self> {
        Box::new(Self {
            inbox: OwnLine(AtomicU32::new(NONE)),
            base: claim.base(),
            block_bytes,
            shift: block_bytes.trailing_zeros(),
            blocks: (0..blocks).map(|_| OutBlock::new()).collect(),
            away: AtomicI64::new(0),
            _claim: claim,
        })
    }

    /// Moves the blocks in the inbox to the owner's list of free blocks, the latest last. For the
    /// owner only.
    pub(super) fn take_in(&self, free: &mut Vec<u32>) {
        if self.inbox.0.load(Ordering::Relaxed) == NONE {
            return;
        }
        // Acquire: pairs with the Release in `block_is_home`, which orders the links and the last
        // use of the bytes.
        let mut block = self.inbox.0.swap(NONE, Ordering::Acquire);
        let before = free.len();
        while block != NONE {
            free.push(block);
            block = self.blocks[block as usize].next.load(Ordering::Relaxed);
        }
        free[before..].reverse(); // the inbox has the latest first
    }

    /// Begins the block at `offset`, none of which is outstanding. For the owner only.
    pub(super) fn begin(&self, offset: u32) {
        // Relaxed: a piece's transfer to another thread orders this store before.
        self.block(offset).away.store(self.block_bytes, Ordering::Relaxed);
    }

    /// Outstanding bytes of the block that contains `offset`.
    pub(super) fn away_of(&self, offset: u32) -> u32 {
        // Acquire: pairs with the Release in `give_back`, so no other thread uses the returned
        // bytes any more.
        self.block(offset).away.load(Ordering::Acquire)
    }

    /// Returns `len_bytes` bytes of the block that contains `offset`.
    ///
    /// # Safety
    /// The bytes are one or several pieces of this home, all of that block, or the part of it that
    /// was not cut. The caller gives up the bytes and `home`.
    #[inline]
    pub(crate) unsafe fn give_back(home: NonNull<Self>, offset: u32, len_bytes: u32) {
        // SAFETY: a home lives while one of its pieces is outstanding, and the caller's is.
        let this = unsafe { home.as_ref() };
        // A whole block has no other holder, so its count needs no subtraction.
        if len_bytes != this.block_bytes {
            // Release: the owner's next use of the bytes comes after the caller's.
            let before = this.block(offset).away.fetch_sub(len_bytes, Ordering::Release);
            debug_assert!(before >= len_bytes, "{len_bytes} bytes back of {before}");
            if before != len_bytes {
                return; // the home may be gone
            }
            // Acquire: pairs with the Release of all other threads that returned a part.
            fence(Ordering::Acquire);
        }
        // SAFETY: nothing of the block is outstanding but the bytes that the caller returns.
        unsafe { Self::block_is_home(home, offset >> this.shift) };
    }

    /// Hands `block` to the owner, or settles it if the owner is gone.
    ///
    /// # Safety
    /// Nothing of the block is outstanding, and only the caller has found that. It gives up `home`.
    unsafe fn block_is_home(home: NonNull<Self>, block: u32) {
        // SAFETY: a home lives while one of its blocks is outstanding.
        let this = unsafe { home.as_ref() };
        let mut head = this.inbox.0.load(Ordering::Relaxed);
        while head != CLOSED {
            this.blocks[block as usize].next.store(head, Ordering::Relaxed);
            let pushed = this.inbox.0.compare_exchange_weak(
                head,
                block,
                Ordering::Release,
                Ordering::Relaxed,
            );
            match pushed {
                // From here on the owner may close and free the home: no more access.
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
        // SAFETY: the inbox is closed, and one block is returned here.
        unsafe { Self::settle(home, -1) };
    }

    /// Closes the inbox for good; the owner has `free` blocks. The home is freed by this call or,
    /// if blocks are outstanding, by the return of the last of them.
    ///
    /// # Safety
    /// Only the owner calls this, once; `home` came from [`Box::leak`] and the caller does not use
    /// it afterwards.
    pub(super) unsafe fn close(home: NonNull<Self>, free: usize) {
        // SAFETY: not freed before `away` has been settled below.
        let this = unsafe { home.as_ref() };
        let mut block = this.inbox.0.swap(CLOSED, Ordering::AcqRel);
        let mut missing = this.blocks.len() - free;
        while block != NONE {
            missing -= 1;
            block = this.blocks[block as usize].next.load(Ordering::Relaxed);
        }
        // SAFETY: closed just now, with `missing` blocks outstanding.
        unsafe { Self::settle(home, i64::try_from(missing).unwrap_or(i64::MAX)) };
    }

    /// Adds `blocks` to the number of outstanding blocks, and frees the home if none is left.
    ///
    /// # Safety
    /// The home is closed. The caller has closed it, with `blocks` outstanding, or returns
    /// `-blocks` of them; it does not use `home` afterwards.
    unsafe fn settle(home: NonNull<Self>, blocks: i64) {
        // SAFETY: not freed before the blocks that the caller accounts for are settled.
        let this = unsafe { home.as_ref() };
        if this.away.fetch_add(blocks, Ordering::AcqRel) + blocks == 0 {
            // SAFETY: all blocks are back: nobody else holds a pointer to this home.
            drop(unsafe { Box::from_raw(home.as_ptr()) });
        }
    }

    /// State of the block that contains `offset`.
    #[inline]
    fn block(&self, offset: u32) -> &OutBlock {
        &self.blocks[(offset >> self.shift) as usize]
    }

    /// True if both offsets are in one block.
    #[inline]
    pub(crate) fn is_one_block(&self, offset: u32, other: u32) -> bool {
        (offset ^ other) >> self.shift == 0
    }

    /// Address of the byte at `offset`.
    ///
    /// # Safety
    /// The offset is within the blocks, or at their end.
    #[inline]
    pub(crate) unsafe fn at(&self, offset: u32) -> *mut u8 {
        // SAFETY: by the caller's promise.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }
}
