//! Bytes of a frame and of the pieces behind it, as one sequence.
//!
//! A device with shared memory leaves a payload in place ([`forebay_buf::PageFrag`]) and may write
//! there at any time. Decisions therefore use only the frame's own bytes, which nobody else can
//! reach. Pieces are summed, copied and sent; whatever they contain at that time is the payload.

use std::fmt;
use std::ops::Range;

use forebay_buf::Frame;
use forebay_buf::frags::Frags;

use crate::parse::checksum::Sum;

/// Bytes of a range, as far as they exist: the frame's own, then those of its pieces.
pub(crate) fn bytes_in(frame: &Frame, place: Range<usize>) -> Stretches<'_> {
    Stretches {
        own: Some(frame.data()),
        frags: frame.frags(),
        skip: place.start,
        left: place.len(),
    }
}

/// Contiguous stretches of [`bytes_in`], none of them empty.
pub(crate) struct Stretches<'a> {
    own: Option<&'a [u8]>,
    frags: Frags<'a>,
    /// Number of bytes to skip before the next wanted one.
    skip: usize,
    /// Number of wanted bytes left.
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

/// Sum of the bytes of a range, as far as they exist.
pub(crate) fn sum_in(frame: &Frame, place: Range<usize>) -> Sum {
    match frame.data().get(place.clone()) {
        Some(bytes) => Sum::of(bytes),
        None => Sum::of_pieces(bytes_in(frame, place)),
    }
}

/// Sequential reader of a frame's bytes and those of its pieces.
pub struct PieceReader<'a> {
    stretches: Stretches<'a>,
    /// Rest of the current stretch.
    left: &'a [u8],
}

impl<'a> PieceReader<'a> {
    /// Begins `place` bytes behind the frame's first byte.
    #[must_use]
    pub fn at(frame: &'a Frame, place: usize) -> Self {
        Self { stretches: bytes_in(frame, place..usize::MAX), left: &[] }
    }

    /// Fills `to` with the next bytes; `None` if there are fewer.
    #[must_use]
    pub fn read(&mut self, to: &mut [u8]) -> Option<()> {
        self.read_with(to, <[u8]>::copy_from_slice)
    }

    /// Fills `to` with the next bytes, by a `copy` of each stretch; `None` if there are fewer.
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
