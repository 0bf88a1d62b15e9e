//! Capture files: records of classic pcap and packet blocks of pcapng, whatever their byte order
//! and time resolution, and damage told apart from the end.

use std::io::{self, Read};
use std::sync::Arc;

use forebay_rx::parse::Link;
use forebay_sys::error::{Error, Result};
use pcap_parser::nom::Err as NomErr;
use pcap_parser::{
    PcapHeader, parse_pcap_frame, parse_pcap_frame_be, parse_pcap_frame_modified, parse_pcap_header,
};

use super::block::read_block;
use super::interface::CaptureInterface;
use super::link::{Begin, EthernetHeader, LinkType, READ};
use super::tally::{Damage, Tally};
use super::window::{GZIP_MAGIC, Window};
use crate::MAX_RECORD_BYTES;

/// The most that a pcapng block may hold, as in Wireshark.
pub const MAX_BLOCK_BYTES: u32 = 16 << 20;

/// Distance ahead of the current record at which bytes are asked for: they come from the machine's last cache,
/// or from memory, in the time that a few packets take.
const PREFETCH_BYTES: usize = 2048;

const PCAP_HEADER_BYTES: usize = 24;
const RECORD_HEADER_BYTES: usize = 16;
const MODIFIED_RECORD_HEADER_BYTES: usize = 24;
const BLOCK_HEADER_BYTES: usize = 12;
const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
const BYTE_ORDER_MAGIC_LE: [u8; 4] = [0x4d, 0x3c, 0x2b, 0x1a];

/// A packet of a capture file.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The captured bytes, from the link header on that [`link`](Self::link) names: without a cooked
    /// header or an address family, behind an Ethernet header that was made anew where it takes one.
    pub bytes: &'a [u8],
    /// The length on the wire of the same, at least that of the captured bytes.
    pub wire_len: u32,
    /// Time of capture, in nanoseconds since 1970; 0 if the file does not say.
    pub timestamp_ns: u64,
    /// Link that the bytes begin with; none if the path cannot read that: then they are as in the file.
    pub link: Option<Link>,
}

/// A capture file being read, record by record.
pub struct CaptureReader {
    name: String,
    window: Window,
    format: Format,
    /// Bytes of the current record, passed over when the next is asked for.
    current: usize,
    /// Link type of the interface, if it cannot be read.
    current_unread: Option<LinkType>,
    /// A packet with a link header that was made anew.
    rebuilt: Vec<u8>,
    tally: Tally,
    /// The offset up to which bytes have been prefetched.
    prefetched: u64,
}

enum Format {
    /// Nothing of the capture was looked at.
    Unknown,
    Pcap(Pcap),
    PcapNg {
        big_endian: bool,
        interfaces: Vec<CaptureInterface>,
    },
}

#[derive(Clone, Copy)]
struct Pcap {
    big_endian: bool,
    modified: bool,
    nanoseconds: bool,
    link_type: LinkType,
}

/// Places of a record's parts in the window.
pub(super) struct Located {
    pub(super) total: usize,
    pub(super) bytes: std::ops::Range<usize>,
    pub(super) wire_len: u32,
    pub(super) timestamp_ns: u64,
    pub(super) link_type: LinkType,
}

impl CaptureReader {
    /// Begins to read a capture; `name` is for messages.
    ///
    /// # Errors
    /// When it is no capture, or of a link type that the path cannot read.
    pub fn new(name: String, reader: Box<dyn Read + Send>) -> Result<Self> {
        Self::begin(name, Window::new(reader))
    }

    /// Begins with a capture that is in memory.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_bytes(name: String, bytes: Arc<Vec<u8>>) -> Result<Self> {
        Self::begin(name, Window::whole(bytes))
    }

    /// Looks at nothing of a capture before its first record is asked for: it may not be there yet.
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

    /// Sees whether it is a capture, if that was not looked at.
    pub(super) fn begin_now(&mut self) -> Result<()> {
        if matches!(self.format, Format::Unknown) { self.recognise() } else { Ok(()) }
    }

    /// Tells the format by the first bytes; a gzip file is unpacked on the way.
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

    /// The unread bytes, at least `count` of them unless the stream ends before.
    #[inline]
    fn seen(&mut self, count: usize) -> Result<&[u8]> {
        if let Err(error) = self.window.at_least(count) {
            self.stop_reading(error)?;
        }
        Ok(self.window.unread())
    }

    /// Takes a packed file that is cut off as any other that is; all else is an error.
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

    /// The current record: the same one until [`advance`](Self::advance). `None` at the end.
    ///
    /// # Errors
    /// When the file cannot be read any further.
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
        let captured = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let wire_len = wire_len.max(captured);
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
                let beyond = wire_len - captured;
                let captured = u32::try_from(self.rebuilt.len()).unwrap_or(u32::MAX);
                let wire_len = captured.saturating_add(beyond);
                Record { bytes: &self.rebuilt, wire_len, timestamp_ns, link: Some(Link::Ethernet) }
            }
            Begin::Unread => Record { bytes, wire_len, timestamp_ns, link: None },
        }))
    }

    /// Asks for the cache lines behind the current record, as far as they are in memory.
    pub fn prefetch(&mut self) {
        let (unread, offset) = (self.window.unread(), self.window.offset());
        let end = (self.current + PREFETCH_BYTES).min(unread.len());
        let start = usize::try_from(self.prefetched.saturating_sub(offset)).unwrap_or(end);
        forebay_buf::prefetch(unread.get(start..end).unwrap_or_default());
        self.prefetched = offset + end as u64;
    }

    /// Passes over the current record.
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

    /// Reads as far as the first record that can be delivered.
    ///
    /// # Errors
    /// When there is none, though there are records, or the file cannot be read as far.
    pub fn judge(mut self) -> Result<()> {
        while let Some(record) = self.record()? {
            if record.link.is_some() {
                return Ok(());
            }
            self.advance();
        }
        self.verdict()
    }

    /// Says at the end whether any of the records could be delivered, if there were any.
    ///
    /// # Errors
    /// When none could.
    pub fn verdict(&self) -> Result<()> {
        self.tally.verdict(&self.name)
    }

    /// Records passed so far that could not be read, by the name of their link type.
    pub fn unread(&self) -> impl Iterator<Item = (String, u64)> {
        self.tally.unread()
    }

    /// Number of these.
    pub(super) fn unread_records(&self) -> u64 {
        self.tally.unread_records()
    }

    /// Damage met so far.
    #[must_use]
    pub fn damage(&self) -> &Damage {
        self.tally.damage()
    }

    /// Bytes of the file that have been dealt with.
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
        if caplen > MAX_RECORD_BYTES {
            return Err(self.broken(
                format!("a record claims {caplen} bytes, more than the {MAX_RECORD_BYTES} allowed"),
                "the file is damaged from there on: cut it before that offset, or repair it",
            ));
        }
        let total = header_bytes + caplen as usize;
        let seen = self.seen(total)?;
        let parse = match pcap {
            Pcap { modified: true, .. } => parse_pcap_frame_modified,
            Pcap { big_endian: true, .. } => parse_pcap_frame_be,
            Pcap { big_endian: false, .. } => parse_pcap_frame,
        };
        let Ok((_, frame)) = parse(seen) else {
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

    /// Brings the next block into the window and returns its length: a length that can be, with
    /// that many bytes behind it.
    fn next_block(&mut self) -> Result<Option<usize>> {
        let seen = self.seen(BLOCK_HEADER_BYTES)?;
        if seen.starts_with(&SECTION_HEADER) && seen.len() >= BLOCK_HEADER_BYTES {
            let big_endian = seen[8..12] != BYTE_ORDER_MAGIC_LE;
            self.format = Format::PcapNg { big_endian, interfaces: Vec::new() };
        }
        let Format::PcapNg { big_endian, .. } = self.format else { return Ok(None) };
        let Some(total) = self.peek_u32(4, BLOCK_HEADER_BYTES, big_endian)? else {
            return Ok(None);
        };
        if !(12..=MAX_BLOCK_BYTES).contains(&total) || !total.is_multiple_of(4) {
            return Err(self.broken(
                format!("a block claims {total} bytes, which cannot be"),
                "the file is damaged from there on: cut it before that offset, or repair it",
            ));
        }
        let total = total as usize;
        let seen = self.seen(total)?;
        if seen.len() < total {
            self.damaged_end("a block is cut off by the end of the file");
            return Ok(None);
        }
        Ok(Some(total))
    }

    /// A field of the header that comes next; `None` at the end of the file, or when the header
    /// itself is cut off.
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
        // What a gzip file lacks at its end is told already.
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

/// Puts a link header before a payload.
fn rebuild(rebuilt: &mut Vec<u8>, header: EthernetHeader, payload: &[u8]) {
    rebuilt.clear();
    rebuilt.extend_from_slice(&header);
    rebuilt.extend_from_slice(payload);
}

/// Tells a classic capture by its first bytes.
fn recognise_pcap(start: &[u8], name: &str) -> Result<Pcap> {
    let not_a_capture = |problem: String, help: &str| Error::Capture {
        name: name.to_owned(),
        offset: 0,
        problem,
        help: help.to_owned(),
    };
    let header = match parse_pcap_header(start) {
        Ok((_, header)) => header,
        Err(_) if start.is_empty() => {
            return Err(not_a_capture("the file is empty".into(), "give a pcap or pcapng file"));
        }
        Err(NomErr::Incomplete(_)) => {
            let problem = format!("a capture's header has 24 bytes, the file {}", start.len());
            return Err(not_a_capture(problem, "give a pcap or pcapng file that is whole"));
        }
        Err(_) if start.starts_with(&GZIP_MAGIC) => {
            let problem = "this is a gzip file once more".into();
            return Err(not_a_capture(problem, "unpack it: gunzip FILE"));
        }
        Err(_) => {
            let magic: String = start.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
            let problem = format!("not a capture file (it begins with {magic})");
            return Err(not_a_capture(problem, "give a pcap or pcapng file"));
        }
    };
    // The bits above are about the frame check sequence.
    let link_type = LinkType::of(header.network.0 & 0x03ff_ffff);
    if !link_type.is_read() {
        let help = format!("give a capture of a link type that is read: {READ}");
        return Err(not_a_capture(format!("link type {link_type} is not read"), &help));
    }
    Ok(pcap_of(&header, link_type))
}

fn pcap_of(header: &PcapHeader, link_type: LinkType) -> Pcap {
    Pcap {
        big_endian: header.is_bigendian(),
        modified: header.is_modified_format(),
        nanoseconds: header.is_nanosecond_precision(),
        link_type,
    }
}
