//! A disk with limited room.

use std::io::{Error, ErrorKind, Result, Write};

/// Disk that takes a few bytes at a time, until it is full.
#[derive(Debug)]
pub struct Disk {
    /// Room that is left, in bytes.
    pub room_bytes: usize,
    /// Bytes that it takes at a time.
    pub at_once: usize,
    /// Bytes that it has.
    pub has: Vec<u8>,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let count = bytes.len().min(self.at_once).min(self.room_bytes);
        if count == 0 {
            return Err(Error::from(ErrorKind::StorageFull));
        }
        self.room_bytes -= count;
        self.has.extend(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}
