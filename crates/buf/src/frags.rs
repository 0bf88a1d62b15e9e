//! Pieces behind a frame: a packet whose payload stays where a device put it.
//!
//! The frame has the packet's first bytes in its own chunk, copied there before they are parsed.
//! Behind them come [pieces](PageFrag) of shared memory: the kernel's `skb_shinfo(skb)->frags`
//! behind its linear part. Their handles need no memory of their own: they are listed at the end of
//! the frame's chunk, which no peer can access.
//!
//! ```text
//!  chunk    link │ headroom │ the packet's first bytes │ room │ table: home, count, 1 2 3 … 46
//!  shared                                                                          ▓ ▓ ▓   payload
//! ```
//!
//! A frame with pieces may follow another frame, and frames may follow it.

use std::ptr::{self, NonNull};
use std::{mem, slice};

use crate::frame::{Frame, HAS_FRAGS};
use crate::page_frag::{FragHome, PageFrag};

/// Bytes at the end of a frame's chunk that list its pieces, if there are any.
pub const FRAG_TABLE_BYTES: u32 = 576;

/// Most pieces behind a frame: 43 buffers of 1536 bytes make 64 KiB.
pub const FRAGS_MAX: usize = 46;

/// List of a frame's pieces, all of one home and each with data.
#[repr(C)]
struct FragTable {
    head: Head,
    /// Only the first `head.count` are valid.
    frags: [Listed; FRAGS_MAX],
}

const _: () =
    assert!(size_of::<FragTable>() == FRAG_TABLE_BYTES as usize, "a table fits its place");

#[repr(C)]
struct Head {
    home: NonNull<FragHome>,
    count: u32,
    /// Total length of the pieces' data.
    total_bytes: u32,
    /// Total size of the pieces' rooms.
    truesize: u32,
    /// Bytes of the first piece's room before its data that can be pushed back; 0 if not known.
    pulled: u32,
}

/// A piece: offset of its data in its home's blocks, length of the data, size of the room.
#[repr(C)]
#[derive(Clone, Copy)]
struct Listed {
    offset: u32,
    len_bytes: u32,
    truesize: u32,
}

impl FragTable {
    #[inline]
    fn listed(&self) -> &[Listed] {
        &self.frags[..self.head.count as usize]
    }

    /// Removes the first `count` pieces from the list and returns them to their home.
    fn release_first(&mut self, count: usize) {
        let (gone, left) = self.frags[..self.head.count as usize].split_at(count);
        self.head.truesize -= gone.iter().map(|frag| frag.truesize).sum::<u32>();
        // Lossless: at most FRAGS_MAX.
        self.head.count = u32::try_from(left.len()).unwrap_or(0);
        // SAFETY: the pieces were this list's, and are not counted any more.
        unsafe { PendingReturn::add(&mut None, self.head.home, gone) };
        self.frags.copy_within(count..count + self.head.count as usize, 0);
    }

    /// Truncates the data to `keep_bytes` > 0 bytes.
    fn cut_to(&mut self, keep_bytes: u32) {
        while self.head.total_bytes > keep_bytes {
            let excess = self.head.total_bytes - keep_bytes;
            let last = &mut self.frags[self.head.count as usize - 1];
            if excess < last.len_bytes {
                last.len_bytes -= excess;
                self.head.total_bytes = keep_bytes;
                return;
            }
            let last = *last;
            self.head.count -= 1;
            self.head.total_bytes -= last.len_bytes;
            self.head.truesize -= last.truesize;
            // SAFETY: the piece was this list's, and is not counted any more.
            unsafe { PendingReturn::add(&mut None, self.head.home, &[last]) };
        }
    }

    /// Adds a piece that has data. Returns false if the piece is of another home, or the list is
    /// full.
    #[inline]
    fn add(&mut self, frag: &PageFrag) -> bool {
        let (home, offset) = frag.place();
        let (len_bytes, truesize) = (frag.len_bytes(), frag.truesize());
        // The list records one home for all of its pieces.
        if home != self.head.home {
            return false;
        }
        // SAFETY: a home lives while one of its pieces is outstanding, and `frag` is.
        let home = unsafe { home.as_ref() };
        let count = self.head.count as usize;
        match self.frags[..count].last_mut() {
            // Rooms do not overlap, and neither piece is empty. So the last one's data ends where
            // its room ends, and the new one's begins where its room begins.
            Some(last)
                if last.offset + last.len_bytes == offset
                    && home.is_one_block(last.offset, offset) =>
            {
                last.len_bytes += len_bytes;
                last.truesize += truesize;
            }
            _ => {
                let Some(place) = self.frags.get_mut(count) else { return false };
                *place = Listed { offset, len_bytes, truesize };
                self.head.count += 1;
            }
        }
        // Neither sum wraps: a home has less than 4 GiB.
        self.head.total_bytes += len_bytes;
        self.head.truesize += truesize;
        true
    }
}

/// Pieces of one block that are being returned. One subtraction returns all of them, on drop or
/// when a piece of another block is added.
pub(crate) struct PendingReturn {
    home: NonNull<FragHome>,
    /// Offset of the first piece.
    offset: u32,
    truesize: u32,
}

impl PendingReturn {
    /// Adds pieces to those being returned.
    ///
    /// # Safety
    /// The pieces are of `home`, and the caller gives them up.
    #[inline]
    unsafe fn add(this: &mut Option<Self>, home: NonNull<FragHome>, frags: &[Listed]) {
        for &Listed { offset, truesize, .. } in frags {
            match this {
                Some(those) if those.is_one_block(home, offset) => those.truesize += truesize,
                _ => *this = Some(Self { home, offset, truesize }),
            }
        }
    }

    #[inline]
    fn is_one_block(&self, home: NonNull<FragHome>, offset: u32) -> bool {
        // SAFETY: a home lives while its pieces are outstanding, and these are.
        self.home == home && unsafe { home.as_ref() }.is_one_block(self.offset, offset)
    }
}

impl Drop for PendingReturn {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the pieces are of this home and one block, and `add` took them over.
        unsafe { FragHome::give_back(self.home, self.offset, self.truesize) };
    }
}

impl Frame {
    /// Attaches a piece behind this frame's bytes and pieces. A piece that is adjacent to the last
    /// one is merged with it (VIO-7); an empty one is returned to its home.
    ///
    /// # Errors
    /// Returns the piece if [`FRAGS_MAX`] are attached already, they are of another home, or the
    /// frame's own bytes leave less than [`FRAG_TABLE_BYTES`] of its chunk.
    #[inline]
    pub fn attach(&mut self, frag: PageFrag) -> Result<(), PageFrag> {
        if frag.len_bytes() == 0 {
            return Ok(());
        }
        if !self.has_frags() && !self.begin_table(&frag) {
            return Err(frag);
        }
        let Some(table) = self.table_mut() else { return Err(frag) };
        if !table.add(&frag) {
            return Err(frag);
        }
        mem::forget(frag); // the table has it now
        Ok(())
    }

    /// Makes an empty table for pieces of the home of `first`. Returns false if there is no room
    /// for it.
    #[inline]
    fn begin_table(&mut self, first: &PageFrag) -> bool {
        let own_end = u32::from(self.start()) + self.len_bytes();
        let fits = own_end + FRAG_TABLE_BYTES <= self.home().chunk_bytes;
        if fits {
            let ((home, _), pulled) = (first.place(), first.pulled());
            let head = Head { home, count: 0, total_bytes: 0, truesize: 0, pulled };
            // SAFETY: the table's place is in this frame's chunk, aligned to a cache line as chunks
            // are, and no bytes of the packet are there.
            unsafe { self.table_place().cast::<Head>().write(head) };
            self.followers |= HAS_FRAGS;
        }
        fits
    }

    /// Number of pieces behind this frame's own bytes.
    #[must_use]
    #[inline]
    pub fn frag_count(&self) -> usize {
        self.table().map_or(0, |table| table.head.count as usize)
    }

    /// Data of the pieces, in packet order. A peer may rewrite these bytes while they are read: see
    /// [`PageFrag::data`].
    #[must_use]
    pub fn frags(&self) -> Frags<'_> {
        Frags(self.table().map(|table| (table.head.home, table.listed().iter())))
    }

    /// Length of this frame's own bytes and of its pieces; frames that follow are not counted.
    #[must_use]
    #[inline]
    pub fn total_len_bytes(&self) -> u32 {
        self.len_bytes() + self.table().map_or(0, |table| table.head.total_bytes)
    }

    /// Copies the first `len_bytes` bytes of the pieces behind the frame's own, as the kernel's
    /// `__pskb_pull_tail`; pieces that are used up return to their home. Returns false, and changes
    /// nothing, if the pieces have fewer bytes or the chunk has less room.
    #[must_use]
    pub fn pull_from_frags(&mut self, len_bytes: u32) -> bool {
        let (room, own) = (self.room_bytes() - self.len_bytes(), self.end_of_bytes());
        let Some(table) = self.table_mut() else { return len_bytes == 0 };
        if len_bytes > table.head.total_bytes || len_bytes > room {
            return false;
        }
        // SAFETY: the home lives while one of its pieces is outstanding.
        let home = unsafe { table.head.home.as_ref() };
        let (mut done, mut used_up) = (0, 0);
        for frag in &mut table.frags[..table.head.count as usize] {
            let part = (len_bytes - done).min(frag.len_bytes);
            // SAFETY: the piece's data lies within the blocks.
            let from = unsafe { home.at(frag.offset) };
            // SAFETY: within the room, which was checked above.
            let to = unsafe { own.add(done as usize) };
            // SAFETY: the source is a piece's data, the destination private memory that nobody else
            // uses. Concurrent writes of a peer: see the module documentation of `page_frag`.
            unsafe { ptr::copy_nonoverlapping(from, to, part as usize) };
            done += part;
            if part < frag.len_bytes {
                let before = if used_up == 0 { table.head.pulled } else { 0 };
                table.head.pulled = before + part;
                frag.offset += part;
                frag.len_bytes -= part;
                break;
            }
            used_up += 1;
        }
        table.head.total_bytes -= len_bytes;
        if used_up == table.head.count as usize {
            self.release_frags(&mut None);
        } else if used_up > 0 {
            table.release_first(used_up);
        }
        self.set_len(self.len_bytes() + len_bytes);
        true
    }

    /// Reverts [`pull_from_frags`](Self::pull_from_frags) and a piece's [`pull`](PageFrag::pull):
    /// the last `len_bytes` of the frame's own bytes are also in the first piece's room before its
    /// data, and become that piece's data again. Returns false, and changes nothing, if fewer bytes
    /// were pulled off the piece, or the frame has fewer of its own.
    #[must_use]
    pub fn push_to_frags(&mut self, len_bytes: u32) -> bool {
        let Some(own_bytes) = self.len_bytes().checked_sub(len_bytes) else { return false };
        let Some(table) = self.table_mut() else { return len_bytes == 0 };
        if len_bytes > table.head.pulled {
            return false;
        }
        table.frags[0].offset -= len_bytes;
        table.frags[0].len_bytes += len_bytes;
        table.head.pulled -= len_bytes;
        table.head.total_bytes += len_bytes;
        self.set_len(own_bytes);
        true
    }

    /// Truncates the frame's own bytes and its pieces to `len_bytes`, to remove padding; pieces
    /// that become empty return to their home. A frame that is not longer stays unchanged.
    pub fn cut_to(&mut self, len_bytes: u32) {
        let own_bytes = self.len_bytes();
        if len_bytes <= own_bytes {
            self.set_len(len_bytes);
            self.release_frags(&mut None);
        } else if let Some(table) = self.table_mut() {
            table.cut_to(len_bytes - own_bytes);
        }
    }

    /// Returns the pieces to their home, together with those in `homebound`.
    #[inline]
    pub(crate) fn release_frags(&mut self, homebound: &mut Option<PendingReturn>) {
        if let Some(table) = self.table() {
            // SAFETY: the pieces are this frame's, which has no table any more from here on.
            unsafe { PendingReturn::add(homebound, table.head.home, table.listed()) };
            self.followers &= !HAS_FRAGS;
        }
    }

    /// Total size of the pieces' rooms.
    pub(crate) fn frags_truesize(&self) -> u32 {
        self.table().map_or(0, |table| table.head.truesize)
    }

    #[inline]
    pub(crate) fn has_frags(&self) -> bool {
        self.followers & HAS_FRAGS != 0
    }

    #[inline]
    fn table(&self) -> Option<&FragTable> {
        let place = self.has_frags().then(|| self.table_place())?;
        // SAFETY: the table's head was written when the flag was set, the rest are plain numbers,
        // initialised with the chunk; nothing else is written there while the flag is set.
        Some(unsafe { place.as_ref() })
    }

    #[inline]
    fn table_mut(&mut self) -> Option<&mut FragTable> {
        let mut place = self.has_frags().then(|| self.table_place())?;
        // SAFETY: as in `table`; `&mut self` excludes other users of the handle.
        Some(unsafe { place.as_mut() })
    }

    /// Address of the table. Called only if the chunk is larger than [`FRAG_TABLE_BYTES`].
    #[inline]
    fn table_place(&self) -> NonNull<FragTable> {
        let offset = self.home().chunk_bytes - FRAG_TABLE_BYTES;
        // SAFETY: within the chunk.
        unsafe { self.chunk.add(offset as usize) }.cast()
    }
}

/// Iterator over the data of a frame's pieces.
pub struct Frags<'a>(Option<(NonNull<FragHome>, slice::Iter<'a, Listed>)>);

impl<'a> Iterator for Frags<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        let (home, listed) = self.0.as_mut()?;
        let frag = listed.next()?;
        // SAFETY: the home lives while one of its pieces is outstanding, and the frame that has it
        // is borrowed.
        let home = unsafe { home.as_ref() };
        // SAFETY: the piece's data lies within the blocks.
        let first = unsafe { home.at(frag.offset) };
        // SAFETY: initialised with its region; this process does not write there while the frame is
        // borrowed. For the peer see the module documentation of `page_frag`.
        Some(unsafe { slice::from_raw_parts(first, frag.len_bytes as usize) })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.0.as_ref().map_or(0, |(_, listed)| listed.len());
        (left, Some(left))
    }
}

impl ExactSizeIterator for Frags<'_> {}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
