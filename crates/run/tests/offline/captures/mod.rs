//! Captures: every format that is read, every kind of damage, and the files that are written.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

mod bytes; //    capture files put together byte by byte
mod damage; //   damaged files
mod formats; //  valid files of every format
mod replayed; // captures through the whole path, and written again

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_device::pcap::{CaptureReader, Damage};
use forebay_rx::parse::Link;
use forebay_sys::Error;

/// A record that was read.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Kept {
    bytes: Vec<u8>,
    wire_len: u32,
    timestamp_ns: u64,
    link: Option<Link>,
}

/// Result of reading a capture.
#[derive(Debug, Default)]
struct Reading {
    records: Vec<Kept>,
    damage: Damage,
    /// Number of records that cannot be delivered, by link type.
    unread: Vec<(String, u64)>,
    error: Option<Error>,
    /// Largest number of bytes requested in one read.
    asked_bytes: usize,
}

/// A file that comes a few bytes at a time, as from a pipe.
struct Trickle {
    rest: io::Cursor<Vec<u8>>,
    at_once: usize,
    asked_bytes: Arc<AtomicUsize>,
}

impl Read for Trickle {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.asked_bytes.fetch_max(buffer.len(), Ordering::Relaxed);
        let count = buffer.len().min(self.at_once);
        self.rest.read(&mut buffer[..count])
    }
}

fn read_by(at_once: usize, file: &[u8]) -> Reading {
    let asked_bytes = Arc::new(AtomicUsize::new(0));
    let rest = io::Cursor::new(file.to_vec());
    let trickle = Trickle { rest, at_once, asked_bytes: Arc::clone(&asked_bytes) };
    let mut reading = Reading::default();
    match CaptureReader::new("test.pcap".to_owned(), Box::new(trickle)) {
        Ok(mut reader) => {
            reading.error = read_records(&mut reader, &mut reading.records).err();
            reading.damage = reader.damage().clone();
            reading.unread = reader.unread().collect();
            assert!(reader.offset() <= file.len() as u64 || file.starts_with(&[0x1f, 0x8b]));
        }
        Err(error) => reading.error = Some(error),
    }
    reading.asked_bytes = asked_bytes.load(Ordering::Relaxed);
    reading
}

fn read_records(reader: &mut CaptureReader, records: &mut Vec<Kept>) -> Result<(), Error> {
    while let Some(record) = reader.record()? {
        records.push(Kept {
            bytes: record.bytes.to_vec(),
            wire_len: record.wire_len,
            timestamp_ns: record.timestamp_ns,
            link: record.link,
        });
        reader.advance();
    }
    assert!(reader.record()?.is_none(), "the end is the end");
    reader.verdict()
}

fn read(file: &[u8]) -> Reading {
    let whole = read_by(usize::MAX, file);
    let trickled = read_by(5, file);
    assert_eq!(whole.records, trickled.records, "it matters how the bytes come");
    assert_eq!(whole.damage, trickled.damage);
    assert_eq!(whole.unread, trickled.unread);
    assert_eq!(whole.error.is_some(), trickled.error.is_some());
    whole
}

/// Records of a capture without damage.
fn read_whole(file: &[u8]) -> Vec<Kept> {
    let reading = read(file);
    assert!(reading.error.is_none(), "{:?}", reading.error);
    assert_eq!(reading.damage, Damage::default());
    reading.records
}

fn kept(bytes: &[u8], wire_len: u32, timestamp_ns: u64, link: Link) -> Kept {
    Kept { bytes: bytes.to_vec(), wire_len, timestamp_ns, link: Some(link) }
}

const SECOND_NS: u64 = 1_000_000_000;

/// Checks that a refusal names the file and the offset, and has a remedy.
fn assert_refused(reading: &Reading, problem: &str, offset: usize) {
    let Some(error) = &reading.error else { panic!("{problem}: not refused: {reading:?}") };
    let message = error.to_string();
    assert!(message.starts_with("test.pcap") && message.contains(problem), "{message}");
    assert!(message.ends_with(&format!(" at offset {offset}")), "{message}");
    assert!(!error.help().is_empty());
}
