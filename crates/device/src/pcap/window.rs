//! A bounded window on a stream of bytes, with the offset of everything in it.

use std::io::{self, Read};
use std::sync::Arc;

use super::gzip::Gunzip;

/// First bytes of a gzip file.
pub(super) const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Size of the read buffer, unless a record needs more.
const READ_BYTES: usize = 256 << 10;

/// Buffer that slides over a reader's stream, or a whole capture in memory.
pub(super) struct Window {
    reader: Box<dyn Read + Send>,
    buffer: Buffer,
    /// The unread bytes are `buffer[start..end]`.
    start: usize,
    end: usize,
    /// Offset of `buffer[start]` in the stream.
    offset: u64,
    at_end: bool,
    /// True if the reader unpacks gzip.
    is_unpacked: bool,
}

enum Buffer {
    Sliding(Vec<u8>),
    Whole(Arc<Vec<u8>>),
}

impl Window {
    pub(super) fn new(reader: Box<dyn Read + Send>) -> Self {
        let buffer = Buffer::Sliding(Vec::new());
        Self { reader, buffer, start: 0, end: 0, offset: 0, at_end: false, is_unpacked: false }
    }

    /// Returns a window on a capture in memory.
    pub(super) fn whole(bytes: Arc<Vec<u8>>) -> Self {
        let end = bytes.len();
        let (reader, buffer) = (Box::new(io::empty()), Buffer::Whole(bytes));
        Self { reader, buffer, start: 0, end, offset: 0, at_end: true, is_unpacked: false }
    }

    /// Unpacks the rest of the stream as gzip: one member after another. The unpacked length has no
    /// bound; the window holds no more of it than of any other stream.
    pub(super) fn unpacked(self) -> Self {
        let start = io::Cursor::new(self.unread().to_vec());
        let packed = Gunzip::new(start.chain(self.reader));
        Self { is_unpacked: true, ..Self::new(Box::new(packed)) }
    }

    pub(super) fn is_unpacked(&self) -> bool {
        self.is_unpacked
    }

    /// Skips the unread bytes, and treats the stream as ended.
    pub(super) fn end(&mut self) {
        self.consume(usize::MAX);
        self.at_end = true;
    }

    /// Returns the unread bytes, at least `count` of them unless the stream ends before. The caller
    /// bounds `count`, and with it the window.
    #[inline]
    pub(super) fn at_least(&mut self, count: usize) -> io::Result<&[u8]> {
        while self.end - self.start < count && !self.at_end {
            self.read_more(count)?;
        }
        Ok(self.unread())
    }

    /// Returns the unread bytes that are in the window already.
    #[inline]
    pub(super) fn unread(&self) -> &[u8] {
        let bytes = match &self.buffer {
            Buffer::Sliding(bytes) => bytes.as_slice(),
            Buffer::Whole(bytes) => bytes,
        };
        &bytes[self.start..self.end]
    }

    /// Skips `count` unread bytes.
    #[inline]
    pub(super) fn consume(&mut self, count: usize) {
        let count = count.min(self.end - self.start);
        self.start += count;
        self.offset += count as u64;
    }

    /// Returns the offset of the first unread byte.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    #[cold]
    fn read_more(&mut self, count: usize) -> io::Result<()> {
        let Buffer::Sliding(buffer) = &mut self.buffer else { return Ok(()) };
        buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let wanted = count.max(READ_BYTES);
        if buffer.len() < wanted {
            buffer.resize(wanted, 0);
        }
        let read = loop {
            match self.reader.read(&mut buffer[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.end += read;
        self.at_end = read == 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    #[test]
    fn promise_5_a_gzip_bomb_takes_no_memory() {
        const UNPACKED_BYTES: u64 = 64 << 20;
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        let mebibyte = vec![0; 1 << 20];
        (0..UNPACKED_BYTES >> 20).for_each(|_| encoder.write_all(&mebibyte).unwrap());
        let packed = encoder.finish().unwrap();
        assert!(packed.len() < 1 << 20);
        let mut window = Window::new(Box::new(io::Cursor::new(packed))).unpacked();
        while !window.at_least(16).unwrap().is_empty() {
            window.consume(1000);
            let Buffer::Sliding(buffer) = &window.buffer else { panic!("it slides") };
            assert!(buffer.capacity() <= 2 * READ_BYTES);
        }
        assert_eq!(window.offset(), UNPACKED_BYTES);
    }
}
