//! The bytes of a frame and of what lies in pieces behind it, as if they were one.
//!
//! A device that shares memory leaves a payload where it put it ([`forebay_buf::PageFrag`]) and may
//! write there at any time. So what is decided here is decided by the frame's own bytes, which
//! nobody else can reach; pieces are summed up, copied and sent, and whatever they hold then is the
//! payload.

use std::fmt;
use std::ops::Range;

use forebay_buf::Frame;
use forebay_buf::frags::Frags;

use crate::parse::checksum::Sum;

/// The bytes at a place, as far as there are any there: the frame's own, then those of its pieces.
pub(crate) fn bytes_in(frame: &Frame, place: Range<usize>) -> Stretches<'_> {
    Stretches {
        own: Some(frame.data()),
        frags: frame.frags(),
        skip: place.start,
        left: place.len(),
    }
}

/// See [`bytes_in`]. None is empty.
pub(crate) struct Stretches<'a> {
    own: Option<&'a [u8]>,
    frags: Frags<'a>,
    /// Bytes before the next one that is wanted.
    skip: usize,
    /// Bytes that are wanted still.
    left: usize,
}

impl<'a> Iterator for Stretches<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        while self.left > 0 {
            let bytes = self.own.take().or_else(|| self.frags.next())?;
            let (before, bytes) = bytes.split_at(self.skip.min(bytes.len()));
            let (bytes, _) = bytes.split_at(self.left.min(bytes.len()));
            self.skip -= before.len();
            self.left -= bytes.len();
            if !bytes.is_empty() {
                return Some(bytes);
            }
        }
        None
    }
}

/// The sum of the bytes at a place, as far as there are any there.
pub(crate) fn sum_in(frame: &Frame, place: Range<usize>) -> Sum {
    match frame.data().get(place.clone()) {
        Some(bytes) => Sum::of(bytes),
        None => Sum::of_pieces(bytes_in(frame, place)),
    }
}

/// Reads the bytes of a frame and of its pieces one after the other.
pub struct PieceReader<'a> {
    stretches: Stretches<'a>,
    /// Rest of the latest one.
    left: &'a [u8],
}

impl<'a> PieceReader<'a> {
    /// Begins at a place: so many bytes behind the frame's first.
    #[must_use]
    pub fn at(frame: &'a Frame, place: usize) -> Self {
        Self { stretches: bytes_in(frame, place..usize::MAX), left: &[] }
    }

    /// Fills `to` with the next bytes; `None` where there are fewer.
    #[must_use]
    pub fn read(&mut self, to: &mut [u8]) -> Option<()> {
        self.read_with(to, <[u8]>::copy_from_slice)
    }

    /// The same, by `copy` from each stretch.
    pub(crate) fn read_with(
        &mut self,
        mut to: &mut [u8],
        mut copy: impl FnMut(&mut [u8], &[u8]),
    ) -> Option<()> {
        while !to.is_empty() {
            if self.left.is_empty() {
                self.left = self.stretches.next()?;
                continue;
            }
            let len = self.left.len().min(to.len());
            let (here, behind) = to.split_at_mut(len);
            let (bytes, left) = self.left.split_at(len);
            copy(here, bytes);
            (to, self.left) = (behind, left);
        }
        Some(())
    }
}

impl fmt::Debug for PieceReader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reader({} bytes of this stretch left)", self.left.len())
    }
}
