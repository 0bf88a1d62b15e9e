//! Rest of a packet: its bytes from some header on, and the number of those that are missing.

/// Bytes from some header on. More may belong to the packet: those that were not captured, or that are beyond the walk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest<'a> {
    pub(super) bytes: &'a [u8],
    /// Number of bytes that follow.
    pub(super) missing: usize,
}

impl<'a> Rest<'a> {
    /// Length with the missing bytes.
    pub(super) fn len(self) -> usize {
        self.bytes.len().saturating_add(self.missing)
    }

    /// Rest behind a header of this length, if all of it is there.
    pub(super) fn behind(self, header_len: usize) -> Option<Self> {
        Some(Self { bytes: self.bytes.get(header_len..)?, ..self })
    }

    /// Header of this length, and the rest behind it.
    pub(super) fn split<const N: usize>(self) -> Option<(&'a [u8; N], Self)> {
        let (header, bytes) = self.bytes.split_first_chunk()?;
        Some((header, Self { bytes, ..self }))
    }

    /// First `len` bytes, or all if there are fewer.
    pub(super) fn first(self, len: usize) -> Self {
        let bytes = self.bytes.get(..len).unwrap_or(self.bytes);
        Self { bytes, missing: self.missing.min(len - bytes.len().min(len)) }
    }

    /// Rest of which at most `len` bytes are there: those beyond count as missing.
    pub(super) fn seen(self, len: usize) -> Self {
        let bytes = self.bytes.get(..len).unwrap_or(self.bytes);
        Self { bytes, missing: self.len() - bytes.len() }
    }
}
