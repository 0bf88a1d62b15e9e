//! A bounded window on a stream of bytes, with the offset of everything in it.

use std::io::{self, Read};

/// Bytes asked of the reader at once.
const READ_BYTES: usize = 256 << 10;

/// A buffer that slides over what a reader gives.
pub(super) struct Window {
    reader: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    /// The unread bytes are `buffer[start..end]`.
    start: usize,
    end: usize,
    /// The offset in the stream of `buffer[start]`.
    offset: u64,
    at_end: bool,
}

impl Window {
    pub(super) fn new(reader: Box<dyn Read + Send>) -> Self {
        Self { reader, buffer: Vec::new(), start: 0, end: 0, offset: 0, at_end: false }
    }

    /// The unread bytes, at least `count` of them unless the stream ends before. The caller bounds
    /// `count`, and with it the window.
    pub(super) fn at_least(&mut self, count: usize) -> io::Result<&[u8]> {
        while self.end - self.start < count && !self.at_end {
            self.read_more(count)?;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// The unread bytes that are here already.
    pub(super) fn unread(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Passes over `count` unread bytes.
    pub(super) fn consume(&mut self, count: usize) {
        let count = count.min(self.end - self.start);
        self.start += count;
        self.offset += count as u64;
    }

    /// The offset of the first unread byte.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    fn read_more(&mut self, count: usize) -> io::Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let wanted = count.max(READ_BYTES);
        if self.buffer.len() < wanted {
            self.buffer.resize(wanted, 0);
        }
        let read = loop {
            match self.reader.read(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.end += read;
        self.at_end = read == 0;
        Ok(())
    }
}
