//! A move-only handle on one chunk of packet memory.

use std::ptr::NonNull;
use std::{fmt, slice};

use crate::cache::prefetch_to_read;
use crate::frags::FRAG_TABLE_BYTES;
use crate::free_batch::RemoteFreeList;

/// Bytes at the beginning of a chunk, reserved for the handles of frames that
/// [follow](crate::chain) this one.
pub const CHAIN_BYTES: u32 = 128;

/// Bytes in front of a packet's first byte, for headers that are added later.
pub const HEADROOM_BYTES: u32 = 128;

/// Offset in a chunk at which a received packet begins.
pub const BEFORE_PACKET_BYTES: u32 = CHAIN_BYTES + HEADROOM_BYTES;

/// [`BEFORE_PACKET_BYTES`] in the type of [`Frame`]'s `start`.
const START: u16 = 256;
const _: () = assert!(START as u32 == BEFORE_PACKET_BYTES);

/// Flag in the follower count: the frame has [pieces](crate::frags) behind it, too.
pub(crate) const HAS_FRAGS: u16 = 1 << 15;

/// Bytes of one packet, in a chunk that belongs to the pool of one CPU.
///
/// A frame has one holder at a time; moving it moves the right to its bytes. [`Pool::put`] returns
/// it on any CPU, for the price of an array store. A frame that is merely dropped returns to its
/// owner alone, for a compare-and-swap: a forgotten `put` is slow, never a leak. Frames that were
/// [appended](Self::append), and pieces that were [attached](Self::attach), go with it.
///
/// [`Pool::put`]: crate::Pool::put
pub struct Frame {
    home: NonNull<RemoteFreeList>,
    /// First byte of the chunk; the packet begins at `start`.
    pub(crate) chunk: NonNull<u8>,
    len_bytes: u32,
    start: u16,
    /// Number of frames that follow, linked in the chain's chunks, and the flag [`HAS_FRAGS`].
    pub(crate) followers: u16,
}

// SAFETY: a frame is the only handle on its chunk, so it may move to another thread;
// `RemoteFreeList` is made of atomics and constants.
unsafe impl Send for Frame {}
// SAFETY: `&Frame` only reads the chunk and the home's constants.
unsafe impl Sync for Frame {}

impl Frame {
    /// Wraps a chunk that its owner has just taken off the free list.
    ///
    /// # Safety
    /// `chunk` belongs to `home`, which is alive, and to the caller, who gives it up.
    pub(crate) unsafe fn new(home: NonNull<RemoteFreeList>, chunk: NonNull<u8>) -> Self {
        Self { home, chunk, len_bytes: 0, start: START, followers: 0 }
    }

    /// The packet's bytes.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        // SAFETY: start + len_bytes <= chunk_bytes, see `set_len`, and the chunk
        // was initialised with its region and is this frame's alone.
        unsafe { slice::from_raw_parts(self.first_byte(), self.len_bytes as usize) }
    }

    /// The packet's bytes, mutable.
    #[must_use]
    pub fn data_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `data`; `&mut self` excludes other users of the handle.
        unsafe { slice::from_raw_parts_mut(self.first_byte(), self.len_bytes as usize) }
    }

    /// Room behind the headroom, up to the end of the chunk or to the list of pieces, for a device
    /// to write into. The caller then declares with [`set_len`] how much of it is packet. The room
    /// still holds bytes of earlier packets.
    ///
    /// [`set_len`]: Self::set_len
    #[must_use]
    pub fn room_mut(&mut self) -> &mut [u8] {
        let room = self.room_bytes() as usize;
        // SAFETY: as in `data_mut`, up to the end of the chunk or the list of pieces.
        unsafe { slice::from_raw_parts_mut(self.first_byte(), room) }
    }

    /// Declares the first `len_bytes` bytes of the room to be the packet.
    ///
    /// # Panics
    /// If the room is smaller.
    pub fn set_len(&mut self, len_bytes: u32) {
        let room = self.room_bytes();
        assert!(len_bytes <= room, "{len_bytes} bytes do not fit in a frame's room of {room}");
        self.len_bytes = len_bytes;
    }

    /// Makes `bytes` the packet.
    ///
    /// # Panics
    /// If the room is smaller.
    pub fn copy_from(&mut self, bytes: &[u8]) {
        self.set_len(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.data_mut().copy_from_slice(bytes);
    }

    /// Makes `bytes` the packet, and returns their [sum](crate::sum::sum), computed while copying.
    ///
    /// # Panics
    /// If the room is smaller.
    #[must_use]
    pub fn copy_summing(&mut self, bytes: &[u8]) -> u64 {
        self.set_len(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        crate::sum::copy_and_sum(self.data_mut(), bytes)
    }

    /// Removes `len_bytes` bytes from the packet's front, as the kernel's `skb_pull`. The bytes
    /// stay in the headroom.
    ///
    /// # Panics
    /// If the packet is shorter.
    #[inline]
    pub fn pull(&mut self, len_bytes: u32) {
        assert!(len_bytes <= self.len_bytes, "{len_bytes} bytes of a packet of {}", self.len_bytes);
        self.start = u16::try_from(u32::from(self.start) + len_bytes)
            .unwrap_or_else(|_| panic!("a packet begins within a chunk's first 64 KiB"));
        self.len_bytes -= len_bytes;
    }

    /// Adds the last `len_bytes` bytes of the headroom to the packet's front, as the kernel's
    /// `skb_push`. These are bytes that were pulled, or leftovers of an earlier packet.
    ///
    /// # Panics
    /// If the headroom is smaller.
    pub fn push(&mut self, len_bytes: u32) {
        let headroom = u32::from(self.start) - CHAIN_BYTES;
        assert!(len_bytes <= headroom, "{len_bytes} bytes do not fit in a headroom of {headroom}");
        // Lossless: at most `start`.
        self.start -= u16::try_from(len_bytes).unwrap_or(self.start);
        self.len_bytes += len_bytes;
    }

    /// Declares `len_bytes` bytes at `offset` of the region to be the packet, where a device has
    /// written it. Returns false, and changes nothing, unless the bytes lie within this frame's
    /// chunk, behind the chain's link and before the list of pieces.
    #[must_use]
    pub fn place(&mut self, offset: u64, len_bytes: u32) -> bool {
        let (region, _) = self.home().region.span();
        let chunk = self.chunk.addr().get() - region.addr().get();
        let Some(start) = offset.checked_sub(chunk as u64) else { return false };
        let end = start.saturating_add(len_bytes.into());
        let fits = start >= u64::from(CHAIN_BYTES) && end <= self.room_end().into();
        match u16::try_from(start) {
            Ok(start) if fits => {
                (self.start, self.len_bytes) = (start, len_bytes);
                true
            }
            _ => false,
        }
    }

    /// Offset of the packet in its chunk.
    pub(crate) fn start(&self) -> u16 {
        self.start
    }

    /// Bytes in front of the packet: those that were pulled, or leftovers.
    #[must_use]
    pub fn headroom(&self) -> &[u8] {
        let (before, headroom) = (CHAIN_BYTES as usize, usize::from(self.start));
        // SAFETY: start lies within the chunk, which was initialised with its region.
        let first = unsafe { self.chunk.as_ptr().add(before) };
        // SAFETY: from the end of the chain's link to the packet's start; nothing else is written
        // there while this handle is borrowed.
        unsafe { slice::from_raw_parts(first, headroom - before) }
    }

    /// Length of the packet's bytes in this frame's own chunk: the whole packet, unless
    /// [pieces](Self::frag_count) or [frames](Self::follower_count) follow.
    #[must_use]
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Memory that the packet occupies, unused bytes included: the whole chunk, the pieces, and
    /// those of the frames that follow.
    #[must_use]
    #[inline]
    pub fn truesize(&self) -> u32 {
        let alone = |frame: &Self| frame.home().chunk_bytes + frame.frags_truesize();
        match self.follower_count() {
            0 => alone(self),
            _ => self.followers().map(alone).sum::<u32>() + alone(self),
        }
    }

    /// CPU slot whose pool this frame belongs to.
    #[must_use]
    pub fn owner(&self) -> u16 {
        self.home().owner
    }

    /// Prefetches the packet's first cache line.
    pub fn prefetch(&self) {
        prefetch_to_read(self.first_byte());
    }

    /// True if frames or pieces follow.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.followers != 0
    }

    pub(crate) fn room_bytes(&self) -> u32 {
        self.room_end() - u32::from(self.start)
    }

    /// End of the packet's room, as an offset in the chunk.
    fn room_end(&self) -> u32 {
        let listed = if self.has_frags() { FRAG_TABLE_BYTES } else { 0 };
        self.home().chunk_bytes - listed
    }

    /// Address behind the last of the frame's own bytes.
    pub(crate) fn end_of_bytes(&self) -> *mut u8 {
        // SAFETY: start + len_bytes <= chunk_bytes.
        unsafe { self.first_byte().add(self.len_bytes as usize) }
    }

    fn first_byte(&self) -> *mut u8 {
        // SAFETY: start lies within the chunk.
        unsafe { self.chunk.as_ptr().add(self.start.into()) }
    }

    pub(crate) fn home(&self) -> &RemoteFreeList {
        // SAFETY: a home lives while one of its frames is outstanding.
        unsafe { self.home.as_ref() }
    }

    /// Decomposes the handle of a frame without followers or pieces, without returning the frame.
    pub(crate) fn into_parts(self) -> (NonNull<RemoteFreeList>, NonNull<u8>) {
        debug_assert!(!self.has_more(), "what is behind a frame goes home first");
        let parts = (self.home, self.chunk);
        std::mem::forget(self);
        parts
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if self.has_more() {
            self.release_frags(&mut None);
            drop(self.take_followers());
        }
        // SAFETY: the chunk is this frame's, and the frame ends here.
        unsafe { RemoteFreeList::take_in(self.home, self.chunk) };
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({} bytes of cpu slot {})", self.len_bytes, self.owner())
    }
}
