//! Home of pieces of shared memory: how much of each block is out, and the inbox for those that
//! are whole again.

use std::ptr::NonNull;

use crate::cache::OwnLine;
use crate::region::Claim;
use crate::sync::{AtomicI64, AtomicU32, Ordering, fence};

/// The empty inbox: no block has this number.
const NONE: u32 = u32::MAX;
/// The closed inbox: nor this.
const CLOSED: u32 = u32::MAX - 1;

/// Home of the pieces of one cache. It outlives the cache for as long as pieces are away.
pub(crate) struct FragHome {
    /// A stack of block numbers: pushed by anyone (Release), taken whole by the owner (Acquire).
    inbox: OwnLine<AtomicU32>,
    /// The first block's first byte. Offsets count from here.
    pub(super) base: NonNull<u8>,
    pub(super) block_bytes: u32,
    /// log2 of `block_bytes`.
    pub(super) shift: u32,
    pub(super) blocks: Box<[OutBlock]>,
    /// Blocks away, counted from the moment the owner closes: minus those that came back since.
    /// Written by whoever finds the inbox closed (AcqRel); 0 for the last one.
    away: AtomicI64,
    /// Keeps the memory of the pieces that are away.
    _claim: Claim,
}

/// State of one block. On a line of its own, as neighbours are given back on other CPUs.
#[repr(align(64))]
pub(super) struct OutBlock {
    /// Bytes that were not given back since the block was begun, cut or not. Written by whoever
    /// gives back (Release), and by the owner when nothing is away.
    away: AtomicU32,
    /// The block under this one in the inbox. Written before it is pushed.
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

    /// Empties the inbox onto the owner's list of free blocks, the latest last. Only the owner calls
    /// this.
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

    /// Begins the block at `offset`, nothing of which is away. Only the owner calls this.
    pub(super) fn begin(&self, offset: u32) {
        // Relaxed: whoever gets a piece gets it in a way that orders this before.
        self.block(offset).away.store(self.block_bytes, Ordering::Relaxed);
    }

    /// Bytes of the block that has the byte at `offset` which were not given back.
    pub(super) fn away_of(&self, offset: u32) -> u32 {
        // Acquire: pairs with the Release in `give_back`, so what is back is nobody else's any more.
        self.block(offset).away.load(Ordering::Acquire)
    }

    /// Takes `len_bytes` bytes of the block that has the byte at `offset` home.
    ///
    /// # Safety
    /// They are one or several pieces of this home, all of that block, or what was not cut of it.
    /// The caller gives them up, and `home` with them.
    #[inline]
    pub(crate) unsafe fn give_back(home: NonNull<Self>, offset: u32, len_bytes: u32) {
        // SAFETY: a home lives while a piece of it is away, and the caller's is.
        let this = unsafe { home.as_ref() };
        // The whole block at once: there is nobody to settle it with.
        if len_bytes != this.block_bytes {
            // Release: the owner's next use of the bytes comes after the caller's.
            let before = this.block(offset).away.fetch_sub(len_bytes, Ordering::Release);
            debug_assert!(before >= len_bytes, "{len_bytes} bytes back of {before}");
            if before != len_bytes {
                return; // the home may be gone
            }
            // Acquire: pairs with the Release of all others who gave back a part.
            fence(Ordering::Acquire);
        }
        // SAFETY: nothing of the block is away but what the caller has just brought.
        unsafe { Self::block_is_home(home, offset >> this.shift) };
    }

    /// Hands `block` to the owner, or settles it if the owner is gone.
    ///
    /// # Safety
    /// Nothing of the block is away, and the caller is the one who knows. It gives up `home`.
    unsafe fn block_is_home(home: NonNull<Self>, block: u32) {
        // SAFETY: a home lives while a block of it is away.
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
        // SAFETY: the inbox is closed, and one block is brought here.
        unsafe { Self::settle(home, -1) };
    }

    /// Closes the inbox for good, with `free` blocks in the owner's hands. The home is freed by this
    /// call or, if blocks are away, by whoever brings the last of them.
    ///
    /// # Safety
    /// Only the owner calls this, once; `home` came from [`Box::leak`] and is not used by the caller
    /// afterwards.
    pub(super) unsafe fn close(home: NonNull<Self>, free: usize) {
        // SAFETY: not freed before `away` has been settled below.
        let this = unsafe { home.as_ref() };
        let mut block = this.inbox.0.swap(CLOSED, Ordering::AcqRel);
        let mut missing = this.blocks.len() - free;
        while block != NONE {
            missing -= 1;
            block = this.blocks[block as usize].next.load(Ordering::Relaxed);
        }
        // SAFETY: closed just now, with so many blocks away.
        unsafe { Self::settle(home, i64::try_from(missing).unwrap_or(i64::MAX)) };
    }

    /// Raises the number of blocks away by `blocks`, and frees the home if none is.
    ///
    /// # Safety
    /// The home is closed. The caller has closed it, with `blocks` away, or brings `-blocks` of
    /// them; it does not use `home` afterwards.
    unsafe fn settle(home: NonNull<Self>, blocks: i64) {
        // SAFETY: not freed before the blocks that the caller speaks for are settled.
        let this = unsafe { home.as_ref() };
        if this.away.fetch_add(blocks, Ordering::AcqRel) + blocks == 0 {
            // SAFETY: all blocks are back: nobody else holds a pointer to this home.
            drop(unsafe { Box::from_raw(home.as_ptr()) });
        }
    }

    /// The block that has the byte at `offset`.
    #[inline]
    fn block(&self, offset: u32) -> &OutBlock {
        &self.blocks[(offset >> self.shift) as usize]
    }

    /// True if two bytes are of one block.
    #[inline]
    pub(crate) fn is_one_block(&self, offset: u32, other: u32) -> bool {
        (offset ^ other) >> self.shift == 0
    }

    /// The byte at `offset`.
    ///
    /// # Safety
    /// It lies within the blocks, or is the first one behind them.
    #[inline]
    pub(crate) unsafe fn at(&self, offset: u32) -> *mut u8 {
        // SAFETY: by the caller's promise.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }
}
