//! Vectors of buffers (`struct iovec`).

use std::borrow::Cow;
use std::ffi::c_int;

use libc::iovec;
use rustix::io::Errno;

use super::{is_beyond, is_kernels, is_nowhere};

/// Most buffers, or messages, of one call (`UIO_MAXIOV`).
pub(super) const VECTORS_MAX: usize = 1024;

/// Bytes of one call at most, of which the rest is left (`MAX_RW_COUNT`).
const BYTES_MAX: usize = 0x7fff_f000;

/// Flags of `preadv2` and `pwritev2` that sockets have (linux/fs.h). The others are those of files.
const RWF_NOAPPEND: c_int = 0x20;
const BOTH_APPEND: c_int = libc::RWF_APPEND | RWF_NOAPPEND;
const RWF_NOSIGNAL: c_int = 0x100;
const KNOWN_FLAGS: c_int = libc::RWF_HIPRI
    | libc::RWF_DSYNC
    | libc::RWF_SYNC
    | libc::RWF_NOWAIT
    | BOTH_APPEND
    | RWF_NOSIGNAL;

/// Buffers of the program.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a>(&'a [iovec]);

/// Position in buffers that are filled piece by piece.
pub(super) struct Filler<'a> {
    rest: &'a [iovec],
    /// Bytes filled of the first of `rest`.
    filled: usize,
    /// Bytes filled in all.
    len: usize,
    /// Bytes of the pieces in all, filled or not.
    whole: usize,
    /// True if a buffer could not be accessed.
    has_failed: bool,
}

impl<'a> Vectors<'a> {
    /// # Safety
    /// `count` vectors at `vectors` can be read, and the bytes of each can be read, or be written, by what is
    /// done with the value, as long as it lives.
    pub(super) unsafe fn new(vectors: *const iovec, count: usize) -> Result<Self, Errno> {
        match count {
            0 => Ok(Self(&[])),
            1..=VECTORS_MAX if is_nowhere(vectors) => Err(Errno::FAULT),
            1..=VECTORS_MAX => {
                // SAFETY: the caller's promise; not null.
                let vectors = unsafe { std::slice::from_raw_parts(vectors, count) };
                if vectors.iter().any(|vector| isize::try_from(vector.iov_len).is_err()) {
                    return Err(Errno::INVAL);
                }
                Self(vectors).checked()
            }
            _ => Err(Errno::MSGSIZE),
        }
    }

    /// # Errors
    /// `EFAULT` if a buffer has an address that is none of a program's.
    fn checked(self) -> Result<Self, Errno> {
        // Of a single one as many bytes as fit are used.
        let is_single = self.0.len() == 1;
        let is_refused = self.0.iter().any(|vector| {
            is_kernels(vector.iov_base) || !is_single && is_beyond(vector.iov_base, vector.iov_len)
        });
        if is_refused { Err(Errno::FAULT) } else { Ok(self) }
    }

    /// Buffers of `readv` and `writev`, which refuse a wrong number of them by other errors than `recvmsg`.
    ///
    /// # Safety
    /// As [`Self::new`].
    pub(super) unsafe fn counted(vectors: *const iovec, count: c_int) -> Result<Self, Errno> {
        match usize::try_from(count) {
            // SAFETY: the caller's promise.
            Ok(count @ ..=VECTORS_MAX) => unsafe { Self::new(vectors, count) },
            _ => Err(Errno::INVAL),
        }
    }

    /// Flags of `recvmsg` and `sendmsg` for those of `preadv2` and `pwritev2`, which are not looked at without a byte.
    ///
    /// # Errors
    /// As `kiocb_set_rw_flags` (include/linux/fs.h).
    pub(super) fn with_flags(self, flags: c_int) -> Result<(Self, c_int), Errno> {
        if self.len_bytes() == 0 {
            return Ok((self, 0));
        }
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if flags & BOTH_APPEND == BOTH_APPEND {
            return Err(Errno::INVAL);
        }
        let flag = |flag, of| if flags & flag != 0 { of } else { 0 };
        let dont_wait = flag(libc::RWF_NOWAIT, libc::MSG_DONTWAIT);
        Ok((self, dont_wait | flag(RWF_NOSIGNAL, libc::MSG_NOSIGNAL)))
    }

    /// One buffer.
    ///
    /// # Safety
    /// As [`Self::new`].
    pub(super) unsafe fn one(vector: &'a iovec) -> Result<Self, Errno> {
        Self(std::slice::from_ref(vector)).checked()
    }

    pub(super) fn all_accessible(self) -> bool {
        !self.0.iter().any(is_inaccessible)
    }

    /// Buffers before the first one that cannot be accessed; an error if there are none.
    ///
    /// # Errors
    /// `EFAULT`.
    pub(super) fn accessible(self) -> Result<Self, Errno> {
        let Some(wrong) = self.0.iter().position(is_inaccessible) else { return Ok(self) };
        let before = Self(&self.0[..wrong]);
        if before.0.iter().all(|vector| vector.iov_len == 0) {
            Err(Errno::FAULT)
        } else {
            Ok(before)
        }
    }

    /// Length of all buffers.
    pub(super) fn len_bytes(self) -> usize {
        self.0.iter().fold(0, |len, vector| len.saturating_add(vector.iov_len))
    }

    /// Bytes of all buffers, copied if there are several.
    ///
    /// # Errors
    /// `EFAULT` if one cannot be accessed.
    pub(super) fn gather(self) -> Result<Cow<'a, [u8]>, Errno> {
        if !self.all_accessible() {
            return Err(Errno::FAULT);
        }
        Ok(match self.0 {
            [] => Cow::Borrowed(&[]),
            [_] => Cow::Borrowed(self.pieces().next().unwrap_or_default()),
            _ => Cow::Owned(self.pieces().flatten().copied().collect()),
        })
    }

    /// Buffers, to be written to. To be called once.
    pub(super) fn rooms(self) -> impl Iterator<Item = &'a mut [u8]> {
        self.0.iter().map(|vector| -> &'a mut [u8] {
            if is_nowhere(vector.iov_base) || vector.iov_len == 0 {
                return &mut [];
            }
            // SAFETY: the promise to `new`; not null. The program uses the buffer for nothing else during the call.
            unsafe { std::slice::from_raw_parts_mut(vector.iov_base.cast(), len_bytes(vector)) }
        })
    }

    /// Bytes of each buffer.
    pub(super) fn pieces(self) -> impl Iterator<Item = &'a [u8]> {
        self.0.iter().map(|vector| -> &'a [u8] {
            if is_nowhere(vector.iov_base) || vector.iov_len == 0 {
                return &[];
            }
            // SAFETY: the promise to `new`; not null.
            unsafe { std::slice::from_raw_parts(vector.iov_base.cast(), len_bytes(vector)) }
        })
    }

    pub(super) fn filler(self) -> Filler<'a> {
        Filler { rest: self.0, filled: 0, len: 0, whole: 0, has_failed: false }
    }
}

/// Length of a buffer, as far as one call uses it.
fn len_bytes(vector: &iovec) -> usize {
    vector.iov_len.min(BYTES_MAX)
}

impl Filler<'_> {
    /// Copies as much of a piece as there is room for.
    pub(super) fn put(&mut self, mut piece: &[u8]) {
        self.whole += piece.len();
        while let ([first, rest @ ..], false) = (self.rest, piece.is_empty()) {
            let count = piece.len().min(first.iov_len - self.filled);
            let Some((now, later)) = piece.split_at_checked(count) else { return };
            if count > 0 && is_nowhere(first.iov_base) {
                self.has_failed = true;
                return;
            }
            let to = first.iov_base.cast::<u8>().wrapping_add(self.filled);
            // SAFETY: the promise to `Vectors::new`: `filled + count` is at most the buffer's length. The piece
            // lies in packet memory, of which the program has no pointer.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), to, count) };
            (piece, self.filled, self.len) = (later, self.filled + count, self.len + count);
            if self.filled == first.iov_len {
                (self.rest, self.filled) = (rest, 0);
            }
        }
    }

    /// Bytes in the buffers, and bytes that there were.
    ///
    /// # Errors
    /// `EFAULT` if a buffer could not be accessed.
    pub(super) fn lens(&self) -> Result<(usize, usize), Errno> {
        if self.has_failed { Err(Errno::FAULT) } else { Ok((self.len, self.whole)) }
    }
}

fn is_inaccessible(vector: &iovec) -> bool {
    vector.iov_len > 0 && is_nowhere(vector.iov_base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_2_vectors_fill_and_gather() {
        let (mut first, mut second) = ([0u8; 3], [0u8; 4]);
        let vectors = [
            iovec { iov_base: first.as_mut_ptr().cast(), iov_len: 3 },
            iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
            iovec { iov_base: second.as_mut_ptr().cast(), iov_len: 4 },
        ];
        // SAFETY: the vectors describe the arrays above, which live to the end.
        let vectors = unsafe { Vectors::new(vectors.as_ptr(), 3) }.unwrap();
        let mut filler = vectors.filler();
        filler.put(b"ab");
        filler.put(b"cdefgh");
        assert_eq!(filler.lens(), Ok((7, 8)));
        assert_eq!(vectors.gather().as_deref(), Ok(&b"abcdefg"[..]));
        // SAFETY: nothing is read from the null pointer.
        assert!(unsafe { Vectors::new(std::ptr::null(), 1) }.is_err());
    }

    #[test]
    fn exe_2_vectors_without_memory_fault() {
        let mut room = [0u8; 3];
        let vectors = [
            iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
            iovec { iov_base: room.as_mut_ptr().cast(), iov_len: 3 },
            iovec { iov_base: std::ptr::null_mut(), iov_len: 5 },
        ];
        // SAFETY: the vectors describe the array above, and no memory.
        let all = unsafe { Vectors::new(vectors.as_ptr(), 3) }.unwrap();
        let mut filler = all.filler();
        filler.put(b"abc");
        assert_eq!(filler.lens(), Ok((3, 3)));
        filler.put(b"d");
        assert_eq!(filler.lens(), Err(Errno::FAULT));
        assert_eq!(all.gather(), Err(Errno::FAULT));
        assert_eq!(all.accessible().unwrap().pieces().map(<[u8]>::len).sum::<usize>(), 3);
        // SAFETY: as above.
        let last = unsafe { Vectors::one(&vectors[2]) }.unwrap();
        assert_eq!(last.accessible().err(), Some(Errno::FAULT));
        let kernels = iovec { iov_base: std::ptr::without_provenance_mut(usize::MAX), iov_len: 1 };
        // SAFETY: as above.
        assert_eq!(unsafe { Vectors::one(&kernels) }.err(), Some(Errno::FAULT));
    }
}
