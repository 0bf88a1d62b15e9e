//! Any bytes as a capture file, read to the end (promise 5), then again in small pieces, from
//! memory, and compressed: none may make a difference.
#![no_main]

use std::io::{self, Read, Write};
use std::sync::Arc;

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use forebay_device::pcap::{CaptureReader, MAX_BLOCK_BYTES};
use forebay_rx::parse::Link;
use libfuzzer_sys::fuzz_target;

/// Smallest size of a record in a file: a simple packet block without data.
const LEAST_RECORD_BYTES: usize = 16;

/// Read sizes that hit every boundary sooner or later.
const PIECES_BYTES: [usize; 4] = [1, 13, 64, 5];

/// Magic number of a gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

fuzz_target!(|input: &[u8]| {
    let unpacked = unpack(input);
    let whole = read_all(&unpacked, in_one(input));
    let piecemeal = read_all(&unpacked, in_pieces(input));
    let in_memory = read_from(&unpacked, kept(input));
    if input.starts_with(&GZIP_MAGIC) {
        // The amount read before damage depends on the amount decompressed at once.
        let both = whole.packets.len().min(piecemeal.packets.len());
        assert_eq!(whole.packets[..both], piecemeal.packets[..both]);
        assert_eq!(whole, in_memory);
        return;
    }
    assert_eq!(whole, piecemeal);
    assert_eq!(whole, in_memory);
    let packed = pack(input);
    let streams = [in_one(&packed), in_pieces(&packed)].map(streamed);
    for reader in streams.into_iter().chain([kept(&packed)]) {
        let unpacked = read_from(input, reader);
        assert_eq!(whole.packets, unpacked.packets);
        assert_eq!((whole.damaged, &whole.unread), (unpacked.damaged, &unpacked.unread));
        assert_eq!(whole.broken.is_some(), unpacked.broken.is_some());
    }
});

/// Decompressed input: of a damaged gzip file, at least as much as any reader gets.
fn unpack(input: &[u8]) -> Vec<u8> {
    if !input.starts_with(&GZIP_MAGIC) {
        return input.to_vec();
    }
    let mut unpacked = Vec::new();
    let mut decoder = MultiGzDecoder::new(Piecemeal::of(input));
    // One byte at a time, up to the damage.
    let mut byte = [0];
    loop {
        match decoder.read(&mut byte) {
            Ok(1) => unpacked.push(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return unpacked,
        }
    }
}

fn pack(input: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(input).and_then(|()| encoder.finish()).expect("a vector takes everything")
}

fn in_one(input: &[u8]) -> Box<dyn Read + Send> {
    Box::new(io::Cursor::new(input.to_vec()))
}

fn in_pieces(input: &[u8]) -> Box<dyn Read + Send> {
    Box::new(Piecemeal::of(input))
}

/// Contents of a capture.
#[derive(PartialEq, Debug, Default)]
struct Contents {
    packets: Vec<Packet>,
    damaged: u64,
    unread: Vec<(String, u64)>,
    first_damage: Option<String>,
    /// Error that stopped the reader at its start or before the end.
    broken: Option<String>,
}

#[derive(PartialEq, Debug)]
struct Packet {
    bytes: Vec<u8>,
    wire_len: u32,
    timestamp_ns: u64,
    link: Option<Link>,
}

fn streamed(stream: Box<dyn Read + Send>) -> Result<CaptureReader, String> {
    CaptureReader::new("fuzz".to_owned(), stream).map_err(|error| error.to_string())
}

/// Reader of a capture in memory.
fn kept(input: &[u8]) -> Result<CaptureReader, String> {
    let reader = CaptureReader::of_bytes("fuzz".to_owned(), Arc::new(input.to_vec()));
    reader.map_err(|error| error.to_string())
}

fn read_all(input: &[u8], stream: Box<dyn Read + Send>) -> Contents {
    read_from(input, streamed(stream))
}

fn read_from(input: &[u8], reader: Result<CaptureReader, String>) -> Contents {
    let mut contents = Contents::default();
    match reader {
        Ok(mut reader) => {
            contents.broken = read_records(input, &mut reader, &mut contents.packets).err();
            contents.damaged = reader.damage().records;
            contents.unread = reader.unread().collect();
            contents.first_damage.clone_from(&reader.damage().first);
            assert_eq!(contents.damaged > 0, contents.first_damage.is_some());
        }
        Err(error) => contents.broken = Some(error),
    }
    contents
}

fn read_records(
    input: &[u8],
    reader: &mut CaptureReader,
    packets: &mut Vec<Packet>,
) -> Result<(), String> {
    let mut offset = reader.offset();
    while let Some(record) = reader.record().map_err(|error| error.to_string())? {
        assert!(record.bytes.len() <= input.len().min(MAX_BLOCK_BYTES as usize));
        assert!(record.bytes.len() <= record.wire_len as usize);
        packets.push(Packet {
            bytes: record.bytes.to_vec(),
            wire_len: record.wire_len,
            timestamp_ns: record.timestamp_ns,
            link: record.link,
        });
        reader.advance();
        assert!(offset < reader.offset(), "every record brings the reader on");
        offset = reader.offset();
    }
    assert!(packets.len() <= input.len() / LEAST_RECORD_BYTES);
    assert_eq!(reader.offset(), input.len() as u64, "the end is the end of the file");
    assert!(reader.record().is_ok_and(|record| record.is_none()), "and it stays the end");
    let is_read = packets.iter().any(|packet| packet.link.is_some());
    let verdict = reader.verdict().map_err(|error| error.to_string());
    assert_eq!(verdict.is_ok(), is_read || packets.is_empty() && reader.damage().records == 0);
    verdict
}

/// Stream that returns few bytes at a time, and is interrupted now and then.
struct Piecemeal {
    rest: io::Cursor<Vec<u8>>,
    reads: usize,
}

impl Piecemeal {
    fn of(input: &[u8]) -> Self {
        Self { rest: io::Cursor::new(input.to_vec()), reads: 0 }
    }
}

impl Read for Piecemeal {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reads += 1;
        if self.reads.is_multiple_of(7) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let piece = PIECES_BYTES[self.reads % PIECES_BYTES.len()].min(buffer.len());
        self.rest.read(&mut buffer[..piece])
    }
}
