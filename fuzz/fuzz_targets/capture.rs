//! Any bytes as a capture file, read to the end (promise 5), and once more in small pieces: how a
//! stream is cut must not matter.
#![no_main]

use std::io::{self, Read};

use forebay::device::pcap::{MAX_BLOCK_BYTES, Reader};
use libfuzzer_sys::fuzz_target;
use path::parse::Link;

/// The least that a record takes in a file: a simple packet block without data.
const LEAST_RECORD_BYTES: usize = 16;

/// Read sizes that meet every boundary sooner or later.
const PIECES_BYTES: [usize; 4] = [1, 13, 64, 5];

fuzz_target!(|input: &[u8]| {
    let whole = read_all(input, Box::new(io::Cursor::new(input.to_vec())));
    let piecemeal = Piecemeal { rest: io::Cursor::new(input.to_vec()), reads: 0 };
    assert_eq!(whole, read_all(input, Box::new(piecemeal)));
});

/// What there was in a capture.
#[derive(PartialEq, Debug, Default)]
struct Contents {
    packets: Vec<Packet>,
    damaged: u64,
    first_damage: Option<String>,
    /// What stopped the reader before the end, or before the start.
    broken: Option<String>,
}

#[derive(PartialEq, Debug)]
struct Packet {
    bytes: Vec<u8>,
    wire_len: u32,
    timestamp_ns: u64,
    link: Option<Link>,
}

fn read_all(input: &[u8], stream: Box<dyn Read + Send>) -> Contents {
    let mut contents = Contents::default();
    match Reader::new("fuzz".to_owned(), stream) {
        Ok(mut reader) => {
            contents.broken = read_records(input, &mut reader, &mut contents.packets).err();
            contents.damaged = reader.damage().records;
            contents.first_damage.clone_from(&reader.damage().first);
            assert_eq!(contents.damaged > 0, contents.first_damage.is_some());
        }
        Err(error) => contents.broken = Some(error.to_string()),
    }
    contents
}

fn read_records(
    input: &[u8],
    reader: &mut Reader,
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
    Ok(())
}

/// A stream that gives little at a time, and is interrupted now and then.
struct Piecemeal {
    rest: io::Cursor<Vec<u8>>,
    reads: usize,
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
