//! Reader of capture files: records of classic pcap and packet blocks of pcapng, in either byte
//! order and any time resolution. Damage is told apart from the end of the file.

use std::io::{self, Read};
use std::sync::Arc;

use forebay_rx::parse::Link;
use forebay_sys::error::{Error, Result};
use pcap_parser::{parse_pcap_frame, parse_pcap_frame_be, parse_pcap_frame_modified};

use super::block::read_block;
use super::interface::CaptureInterface;
use super::link::{Begin, EthernetHeader, LinkType};
use super::recognise::{Pcap, hex, recognise_pcap};
use super::tally::{Damage, Tally};
use super::window::{GZIP_MAGIC, Window};
use crate::MAX_RECORD_BYTES;

/// Maximum size of a pcapng block, as in Wireshark.
pub const MAX_BLOCK_BYTES: u32 = 16 << 20;

/// Distance ahead of the current record at which bytes are prefetched: they arrive from the
/// last-level cache, or from memory, within the time of a few packets.
const PREFETCH_BYTES: usize = 2048;

const PCAP_HEADER_BYTES: usize = 24;
const RECORD_HEADER_BYTES: usize = 16;
const MODIFIED_RECORD_HEADER_BYTES: usize = 24;
const BLOCK_HEADER_BYTES: usize = 12;
const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
const BYTE_ORDER_MAGIC_LE: [u8; 4] = [0x4d, 0x3c, 0x2b, 0x1a];
const BYTE_ORDER_MAGIC_BE: [u8; 4] = [0x1a, 0x2b, 0x3c, 0x4d];

/// Packet of a capture file.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Captured bytes, from the link header of type [`link`](Self::link) on: without a cooked
    /// header or an address family, behind a rebuilt Ethernet header where one replaces the cooked
    /// header.
    pub bytes: &'a [u8],
    /// Length on the wire, headers replaced as in `bytes`; at least the number of captured bytes.
    pub wire_len: u32,
    /// Time of capture, in nanoseconds since 1970; 0 if not recorded.
    pub timestamp_ns: u64,
    /// Link type of `bytes`; `None` if the path cannot read it: then `bytes` is as in the file.
    pub link: Option<Link>,
}

/// Reader of a capture file, record by record.
pub struct CaptureReader {
    name: String,
    window: Window,
    format: Format,
    /// Length of the current record, skipped by [`advance`](Self::advance).
    current: usize,
    /// Link type of the current record, if it cannot be read.
    current_unread: Option<LinkType>,
    /// Packet with a rebuilt link header.
    rebuilt: Vec<u8>,
    tally: Tally,
    /// Offset up to which bytes have been prefetched.
    prefetched: u64,
}

enum Format {
    /// Not detected yet.
    Unknown,
    Pcap(Pcap),
    PcapNg {
        big_endian: bool,
        interfaces: Vec<CaptureInterface>,
    },
}

/// Positions of a record's parts in the window.
pub(super) struct Located {
    pub(super) total: usize,
    pub(super) bytes: std::ops::Range<usize>,
    pub(super) wire_len: u32,
    pub(super) timestamp_ns: u64,
    pub(super) link_type: LinkType,
}

impl CaptureReader {
    /// Opens a capture; `name` is for messages.
    ///
    /// # Errors
    /// If it is not a capture, or its link type cannot be read.
    pub fn new(name: String, reader: Box<dyn Read + Send>) -> Result<Self> {
        Self::begin(name, Window::new(reader))
    }

    /// Opens a capture in memory.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_bytes(name: String, bytes: Arc<Vec<u8>>) -> Result<Self> {
        Self::begin(name, Window::whole(bytes))
    }

    /// Opens a capture without reading from it before its first record is needed: data may arrive
    /// later.
    pub(super) fn begun_later(name: String, reader: Box<dyn Read + Send>) -> Self {
        Self::on(name, Window::new(reader))
    }

    fn begin(name: String, window: Window) -> Result<Self> {
        let mut reader = Self::on(name, window);
        reader.recognise()?;
        Ok(reader)
    }

    fn on(name: String, window: Window) -> Self {
        Self {
            name,
            window,
            format: Format::Unknown,
            current: 0,
            current_unread: None,
            rebuilt: Vec::new(),
            tally: Tally::default(),
            prefetched: 0,
        }
    }

    /// Detects the format, unless that was done.
    pub(super) fn begin_now(&mut self) -> Result<()> {
        if matches!(self.format, Format::Unknown) { self.recognise() } else { Ok(()) }
    }

    /// Detects the format by the first bytes; a gzip file is unpacked from here on.
    fn recognise(&mut self) -> Result<()> {
        self.seen(PCAP_HEADER_BYTES)?;
        let start = self.window.unread();
        if start.starts_with(&GZIP_MAGIC) && !self.window.is_unpacked() {
            let packed = std::mem::replace(&mut self.window, Window::new(Box::new(io::empty())));
            self.window = packed.unpacked();
            self.name += " (unpacked)";
            return self.recognise();
        }
        self.format = if start.starts_with(&SECTION_HEADER) {
            Format::PcapNg { big_endian: false, interfaces: Vec::new() }
        } else {
            let pcap = recognise_pcap(start, &self.name)?;
            self.window.consume(PCAP_HEADER_BYTES);
            Format::Pcap(pcap)
        };
        Ok(())
    }

    /// Returns the unread bytes, at least `count` of them unless the stream ends before.
    #[inline]
    fn seen(&mut self, count: usize) -> Result<&[u8]> {
        if let Err(error) = self.window.at_least(count) {
            self.stop_reading(error)?;
        }
        Ok(self.window.unread())
    }

    /// Treats a truncated gzip file as any other truncated capture; other errors are returned.
    #[cold]
    fn stop_reading(&mut self, error: io::Error) -> Result<()> {
        use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
        match error.kind() {
            UnexpectedEof if self.window.is_unpacked() => {
                self.note_damage("the gzip file ends before its data does");
                self.window.end();
                Ok(())
            }
            InvalidData | InvalidInput if self.window.is_unpacked() => Err(self.broken(
                format!("the gzip file is damaged ({error}) behind what is"),
                "get it again; `gzip -dc` may unpack more of it",
            )),
            _ => Err(Error::file("read", &self.name)(error)),
        }
    }

    /// Returns the current record: the same one until [`advance`](Self::advance). `None` at the
    /// end.
    ///
    /// # Errors
    /// If the file cannot be read any further.
    pub fn record(&mut self) -> Result<Option<Record<'_>>> {
        self.begin_now()?;
        let located = match &self.format {
            Format::Unknown => None,
            Format::Pcap(pcap) => self.locate_in_pcap(*pcap)?,
            Format::PcapNg { .. } => self.locate_in_pcapng()?,
        };
        let Some(Located { total, bytes, wire_len, timestamp_ns, link_type }) = located else {
            return Ok(None);
        };
        self.current = total;
        let bytes = &self.window.unread()[bytes];
        let wire_len = wire_len.max(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        let wire_len = wire_len.saturating_sub(link_type.tail(bytes, wire_len));
        let bytes = &bytes[..bytes.len().min(wire_len as usize)];
        let begin = link_type.begin(bytes, wire_len);
        self.current_unread = (begin == Begin::Unread).then_some(link_type);
        Ok(Some(match begin {
            Begin::At(0, link) => Record { bytes, wire_len, timestamp_ns, link: Some(link) },
            Begin::At(header_bytes, link) => {
                let bytes = bytes.get(header_bytes..).unwrap_or_default();
                let wire_len = wire_len.saturating_sub(u32::try_from(header_bytes).unwrap_or(0));
                Record { bytes, wire_len, timestamp_ns, link: Some(link) }
            }
            Begin::Rebuilt(header_bytes, header) => {
                let payload = bytes.get(header_bytes..).unwrap_or_default();
                rebuild(&mut self.rebuilt, header, payload);
                let beyond = u32::try_from(wire_len as usize - bytes.len()).unwrap_or(0);
                let captured = u32::try_from(self.rebuilt.len()).unwrap_or(u32::MAX);
                let wire_len = captured.saturating_add(beyond);
                Record { bytes: &self.rebuilt, wire_len, timestamp_ns, link: Some(Link::Ethernet) }
            }
            Begin::Unread => Record { bytes, wire_len, timestamp_ns, link: None },
        }))
    }

    /// Prefetches the cache lines behind the current record, as far as they are in memory.
    pub fn prefetch(&mut self) {
        let (unread, offset) = (self.window.unread(), self.window.offset());
        let end = (self.current + PREFETCH_BYTES).min(unread.len());
        let start = usize::try_from(self.prefetched.saturating_sub(offset)).unwrap_or(end);
        forebay_buf::prefetch(unread.get(start..end).unwrap_or_default());
        self.prefetched = offset + end as u64;
    }

    /// Skips the current record.
    pub fn advance(&mut self) {
        let current = std::mem::take(&mut self.current);
        if current > 0 {
            match self.current_unread.take() {
                None => self.tally.read += 1,
                Some(link_type) => self.tally.count_unread(link_type, self.window.offset()),
            }
        }
        self.window.consume(current);
    }

    /// Reads up to the first record that can be delivered.
    ///
    /// # Errors
    /// If there are records but none can be delivered, or the file cannot be read that far.
    pub fn judge(mut self) -> Result<()> {
        while let Some(record) = self.record()? {
            if record.link.is_some() {
                return Ok(());
            }
            self.advance();
        }
        self.verdict()
    }

    /// Checks, at the end of the capture, that any of its records could be delivered. A capture
    /// without records passes.
    ///
    /// # Errors
    /// If none could be.
    pub fn verdict(&self) -> Result<()> {
        self.tally.verdict(&self.name)
    }

    /// Returns the number of unreadable records passed so far, by the name of their link type.
    pub fn unread(&self) -> impl Iterator<Item = (String, u64)> {
        self.tally.unread()
    }

    /// Returns the number of unreadable records passed so far.
    pub(super) fn unread_records(&self) -> u64 {
        self.tally.unread_records()
    }

    /// Returns the damage met so far.
    #[must_use]
    pub fn damage(&self) -> &Damage {
        self.tally.damage()
    }

    /// Returns the number of bytes of the file processed so far.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.window.offset()
    }

    fn locate_in_pcap(&mut self, pcap: Pcap) -> Result<Option<Located>> {
        let header_bytes =
            if pcap.modified { MODIFIED_RECORD_HEADER_BYTES } else { RECORD_HEADER_BYTES };
        let Some(caplen) = self.peek_u32(8, header_bytes, pcap.big_endian)? else {
            return Ok(None);
        };
        // The record's length is the only way to the next record.
        if caplen > MAX_RECORD_BYTES {
            return Err(self.broken(
                format!("a record claims {caplen} bytes, more than the {MAX_RECORD_BYTES} allowed"),
                "the file is damaged from there on: cut it before that offset, or repair it",
            ));
        }
        let total = header_bytes + caplen as usize;
        let seen = self.seen(total)?;
        let parse = match pcap {
            Pcap { modified: true, big_endian: false, .. } => parse_pcap_frame_modified,
            // The fields that are read stand where those of a plain header do.
            Pcap { big_endian: true, .. } => parse_pcap_frame_be,
            Pcap { big_endian: false, .. } => parse_pcap_frame,
        };
        let frame = parse(seen).ok().filter(|_| seen.len() >= total);
        let Some((_, frame)) = frame else {
            self.damaged_end("a record is cut off by the end of the file");
            return Ok(None);
        };
        let fraction_ns = u64::from(frame.ts_usec) * if pcap.nanoseconds { 1 } else { 1000 };
        Ok(Some(Located {
            total,
            bytes: header_bytes..total,
            wire_len: frame.origlen,
            timestamp_ns: u64::from(frame.ts_sec) * 1_000_000_000 + fraction_ns,
            link_type: pcap.link_type,
        }))
    }

    fn locate_in_pcapng(&mut self) -> Result<Option<Located>> {
        loop {
            let Some(total) = self.next_block()? else { return Ok(None) };
            let (Format::PcapNg { big_endian, interfaces }, Some(block)) =
                (&mut self.format, self.window.unread().get(..total))
            else {
                return Ok(None);
            };
            match read_block(block, big_endian, interfaces) {
                Ok(Some(located)) => return Ok(Some(located)),
                Ok(None) => {}
                Err(problem) => self.note_damage(problem),
            }
            self.window.consume(total);
        }
    }

    /// Brings the next block into the window and returns its length. The length is valid, and the
    /// whole block is in the window.
    fn next_block(&mut self) -> Result<Option<usize>> {
        let seen = self.seen(BLOCK_HEADER_BYTES)?;
        if seen.starts_with(&SECTION_HEADER) && seen.len() >= BLOCK_HEADER_BYTES {
            let magic = seen.get(8..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
            // Without its byte order, no length in the section can be read.
            if ![BYTE_ORDER_MAGIC_LE, BYTE_ORDER_MAGIC_BE].contains(&magic) {
                let magic = hex(&magic);
                return Err(self.broken(
                    format!("a section's byte-order magic is {magic}, not 4d3c2b1a or 1a2b3c4d"),
                    "the file is damaged from there on: cut it before that offset, or repair it",
                ));
            }
            let big_endian = magic == BYTE_ORDER_MAGIC_BE;
            self.format = Format::PcapNg { big_endian, interfaces: Vec::new() };
        }
        let Format::PcapNg { big_endian, .. } = self.format else { return Ok(None) };
        let Some(total) = self.peek_u32(4, BLOCK_HEADER_BYTES, big_endian)? else {
            return Ok(None);
        };
        // Blocks have at least 12 bytes; the length is the only way to the next block.
        if !(12..=MAX_BLOCK_BYTES).contains(&total) {
            return Err(self.broken(
                format!("a block claims {total} bytes, which cannot be"),
                "the file is damaged from there on: cut it before that offset, or repair it",
            ));
        }
        // Blocks are padded to 32 bits, also those of writers that leave the padding out of the length.
        let total = total.next_multiple_of(4) as usize;
        let seen = self.seen(total)?;
        if seen.len() < total {
            self.damaged_end("a block is cut off by the end of the file");
            return Ok(None);
        }
        Ok(Some(total))
    }

    /// Reads a field of the next header; `None` at the end of the file, or if the header is
    /// truncated.
    fn peek_u32(&mut self, at: usize, header: usize, big_endian: bool) -> Result<Option<u32>> {
        let seen = self.seen(header)?;
        if seen.len() < header {
            if !seen.is_empty() {
                self.damaged_end("a header is cut off by the end of the file");
            }
            return Ok(None);
        }
        let field = seen.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
        Ok(Some(if big_endian { u32::from_be_bytes(field) } else { u32::from_le_bytes(field) }))
    }

    fn damaged_end(&mut self, problem: &str) {
        // Truncation of a gzip file was already noted by `stop_reading`.
        if !self.window.unread().is_empty() {
            self.note_damage(problem);
        }
        self.window.end();
    }

    fn note_damage(&mut self, problem: &str) {
        self.tally.count_damaged(&self.name, problem, self.window.offset());
    }

    fn broken(&self, problem: String, help: &str) -> Error {
        let (name, offset) = (self.name.clone(), self.window.offset());
        Error::Capture { name, offset, problem, help: help.to_owned() }
    }
}

/// Builds a packet from a link header and a payload.
fn rebuild(rebuilt: &mut Vec<u8>, header: EthernetHeader, payload: &[u8]) {
    rebuilt.clear();
    rebuilt.extend_from_slice(&header);
    rebuilt.extend_from_slice(payload);
}
