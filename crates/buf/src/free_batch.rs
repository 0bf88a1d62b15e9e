//! Batches of up to 32 frames on their way to their owner.
//!
//! A CPU that frees another CPU's frames collects them in a batch and hands the full batch over
//! with one compare-and-swap: returning must cost less than it saves (UDP-R6). A batch needs no
//! memory of its own: it is written into the first chunk put in it.
//!
//! The inbox is a stack of batches. Any thread pushes without waiting; the owner takes the whole
//! stack at once, so there is no ABA. Once the owner is gone the inbox is closed, and the thread
//! that returns the last frame frees the home itself.

use std::mem::MaybeUninit;
use std::ptr::NonNull;

use crate::cache::{LINE_BYTES, OwnLine, prefetch_to_write};
use crate::recycle_ring::{Freed, Marks};
use crate::region::Region;
use crate::sync::{Arc, AtomicI64, AtomicPtr, Ordering};

/// Number of frames in a full batch: the carrier and those listed in it.
pub const FREE_BATCH_FRAMES: usize = 32;

/// List of a batch, written over the first bytes of the chunk that carries it.
#[repr(C)]
pub(crate) struct FreeBatch {
    next: *mut FreeBatch,
    /// Number of `chunks` that are written.
    listed: usize,
    chunks: [MaybeUninit<NonNull<u8>>; FREE_BATCH_FRAMES - 1],
}

/// Marks a closed inbox: no batch has this address, as batches are aligned.
const CLOSED: *mut FreeBatch = std::ptr::without_provenance_mut(1);

/// Home of the frames of one owner and one chunk class. It outlives its owner while frames are
/// outstanding.
pub(crate) struct RemoteFreeList {
    /// Stack of batches: pushed by any thread (Release), taken whole by the owner (Acquire).
    inbox: OwnLine<AtomicPtr<FreeBatch>>,
    /// Outstanding frames when the owner closed, minus those returned since; negative until the
    /// owner's share is added. Written by threads that find the inbox closed (AcqRel); 0 frees the
    /// home.
    away: AtomicI64,
    pub(crate) id: PoolId,
    pub(crate) owner: u16,
    pub(crate) chunk_bytes: u32,
    /// Keeps the memory of outstanding frames alive.
    pub(crate) region: Arc<Region>,
    /// Marks of a [recycle ring](crate::recycle_ring), where holders mark its frames free. A home
    /// with marks gets no batches.
    pub(crate) marks: Option<Marks>,
}

/// Index of a home among the homes of its region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PoolId(pub(crate) u16);

impl RemoteFreeList {
    pub(crate) fn new(id: PoolId, owner: u16, chunk_bytes: u32, region: Arc<Region>) -> Box<Self> {
        Box::new(Self {
            inbox: OwnLine(AtomicPtr::new(std::ptr::null_mut())),
            away: AtomicI64::new(0),
            id,
            owner,
            chunk_bytes,
            region,
            marks: None,
        })
    }

    /// True if batches are in the inbox. A hint: more may arrive at any time.
    pub(crate) fn has_mail(&self) -> bool {
        !self.inbox.0.load(Ordering::Relaxed).is_null()
    }

    /// Moves the chunks in the inbox to the owner's free list.
    ///
    /// # Safety
    /// Only the owner calls this, and not after [`close`](Self::close).
    pub(crate) unsafe fn collect(&self, free: &mut Vec<NonNull<u8>>) {
        // Acquire: pairs with the Release in `push`, which orders the batch's contents.
        let batches = self.inbox.0.swap(std::ptr::null_mut(), Ordering::Acquire);
        // SAFETY: taken off the inbox just now, which is not closed.
        unsafe { unpack(batches, free) };
    }

    /// Closes the inbox for good; `chunks` is the number of the home's frames in all. The home is
    /// freed by this call or, if frames are outstanding, by the call that returns the last of them.
    ///
    /// # Safety
    /// Only the owner calls this, once; `home` came from [`Box::leak`] and is not used by the
    /// caller afterwards.
    pub(crate) unsafe fn close(home: NonNull<Self>, mut free: Vec<NonNull<u8>>, chunks: usize) {
        // SAFETY: not freed before `away` has been settled below.
        let this = unsafe { home.as_ref() };
        let batches = this.inbox.0.swap(CLOSED, Ordering::AcqRel);
        // SAFETY: taken off the inbox just now, by the only call that closes it.
        unsafe { unpack(batches, &mut free) };
        let missing = i64::try_from(chunks - free.len()).unwrap_or(i64::MAX);
        // SAFETY: closed just now, with `missing` frames outstanding.
        unsafe { Self::settle(home, missing) };
    }

    /// Adds `frames` to the number of outstanding frames, and frees the home if none is left.
    ///
    /// # Safety
    /// The home is closed. The caller has closed it, with `frames` outstanding, or returns
    /// `-frames` of them; it does not use `home` afterwards.
    pub(crate) unsafe fn settle(home: NonNull<Self>, frames: i64) {
        // SAFETY: not freed before the frames that the caller accounts for are settled.
        let this = unsafe { home.as_ref() };
        if this.away.fetch_add(frames, Ordering::AcqRel) + frames == 0 {
            // SAFETY: all frames are back: nobody else holds a pointer to this home.
            drop(unsafe { Box::from_raw(home.as_ptr()) });
        }
    }

    /// Returns one frame to this home, from its last holder.
    ///
    /// # Safety
    /// `chunk` belongs to this home and to the caller, who gives up both `chunk` and `home`.
    pub(crate) unsafe fn take_in(home: NonNull<Self>, chunk: NonNull<u8>) {
        // SAFETY: a home lives while one of its frames is outstanding, and the caller's is.
        let this = unsafe { home.as_ref() };
        let Some(marks) = &this.marks else {
            // SAFETY: by the caller's promise.
            let batch = unsafe { FreeBatch::begin(chunk) };
            // SAFETY: a batch of one, of this home; neither is used again.
            return unsafe { Self::push(home, batch) };
        };
        let mark = marks.of(chunk, &this.region, this.chunk_bytes);
        if Marks::free(mark) == Freed::OwnerIsGone {
            // SAFETY: the owner closed the home before it marked this frame.
            unsafe { Self::settle(home, -1) };
        }
    }

    /// Hands `batch` to the owner, or settles its frames if the owner is gone.
    ///
    /// # Safety
    /// `batch` and every chunk listed in it belong to this home and to the caller, who gives up all
    /// of them and `home`.
    pub(crate) unsafe fn push(home: NonNull<Self>, batch: NonNull<FreeBatch>) {
        // SAFETY: a home lives while one of its frames is outstanding, and the batch's are.
        let this = unsafe { home.as_ref() };
        let mut head = this.inbox.0.load(Ordering::Relaxed);
        while head != CLOSED {
            // SAFETY: the batch is the caller's until the exchange below succeeds.
            unsafe { (*batch.as_ptr()).next = head };
            let pushed = this.inbox.0.compare_exchange_weak(
                head,
                batch.as_ptr(),
                Ordering::Release,
                Ordering::Relaxed,
            );
            match pushed {
                // From here on the owner may close and free the home: no more access.
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
        // SAFETY: the caller's batch, see above.
        let frames = unsafe { (*batch.as_ptr()).listed } + 1;
        let frames = i64::try_from(frames).unwrap_or(i64::MAX);
        // SAFETY: the inbox is closed, and the batch's frames are returned here.
        unsafe { Self::settle(home, -frames) };
    }
}

/// Moves the chunks of a chain of batches to a free list, carriers too.
///
/// # Safety
/// `batches` is null or heads a chain that the caller has taken off an inbox.
unsafe fn unpack(mut batches: *mut FreeBatch, free: &mut Vec<NonNull<u8>>) {
    while let Some(carrier) = NonNull::new(batches) {
        // SAFETY: a batch in the chain was initialised by `FreeBatch::begin`.
        let batch = unsafe { carrier.as_ref() };
        free.extend(batch.chunks[..batch.listed].iter().map(|chunk| {
            // SAFETY: the first `listed` were written.
            unsafe { chunk.assume_init() }
        }));
        batches = batch.next;
        free.push(carrier.cast());
    }
}

impl FreeBatch {
    /// Makes a batch of one frame, carried by `chunk`.
    ///
    /// # Safety
    /// `chunk` is a free chunk that the caller owns, of at least [`MIN_CHUNK_BYTES`] and aligned
    /// to a cache line.
    ///
    /// [`MIN_CHUNK_BYTES`]: crate::pool::MIN_CHUNK_BYTES
    pub(crate) unsafe fn begin(chunk: NonNull<u8>) -> NonNull<Self> {
        let batch = chunk.cast::<Self>();
        // The list is left unwritten: a frame that goes alone costs one cache line, not five.
        // SAFETY: a chunk is large enough and aligned for a batch, and the caller's.
        unsafe { (*batch.as_ptr()).next = std::ptr::null_mut() };
        // SAFETY: as above.
        unsafe { (*batch.as_ptr()).listed = 0 };
        batch
    }

    /// Prefetches the lines that the list will fill: they are in the owner's cache, and arrive
    /// before they are written.
    pub(crate) fn prefetch(batch: NonNull<Self>) {
        let first_byte = batch.cast::<u8>().as_ptr();
        for line in (0..size_of::<Self>()).step_by(LINE_BYTES) {
            prefetch_to_write(first_byte.wrapping_add(line));
        }
    }

    /// Adds a frame. Returns true if the batch is full now.
    pub(crate) fn add(&mut self, chunk: NonNull<u8>) -> bool {
        self.chunks[self.listed].write(chunk);
        self.listed += 1;
        self.listed == self.chunks.len()
    }
}
