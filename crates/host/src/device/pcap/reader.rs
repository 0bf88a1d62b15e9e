//! Capture files: records of classic pcap and packet blocks of pcapng, whatever their byte order
//! and time resolution, and damage told apart from the end.

use std::io::{self, Read};
use std::sync::Arc;

use path::parse::Link;
use pcap_parser::nom::{Err as NomErr, IResult};
use pcap_parser::{
    Block, PcapError, PcapHeader, parse_block_be, parse_block_le, parse_pcap_frame,
    parse_pcap_frame_be, parse_pcap_frame_modified, parse_pcap_header,
};

use super::interface::{Interface, link_name, link_of};
use super::window::Window;
use crate::error::{Error, Result};

/// The most that a record may hold, as in tcpdump and Wireshark.
pub const MAX_RECORD_BYTES: u32 = 262_144;

/// The most that a pcapng block may hold, as in Wireshark.
pub const MAX_BLOCK_BYTES: u32 = 16 << 20;

/// Interfaces in one section of a pcapng file.
const MAX_INTERFACES: usize = 65_536;

/// How far ahead of the current record bytes are asked for: they come from the machine's last cache,
/// or from memory, in the time that a few packets take.
const PREFETCH_BYTES: usize = 2048;

const PCAP_HEADER_BYTES: usize = 24;
const RECORD_HEADER_BYTES: usize = 16;
const MODIFIED_RECORD_HEADER_BYTES: usize = 24;
const BLOCK_HEADER_BYTES: usize = 12;
const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
const INTERFACE_BLOCK: u32 = 1;
/// The type of the obsolete packet block.
const PACKET_BLOCK: u32 = 2;
const BYTE_ORDER_MAGIC_LE: [u8; 4] = [0x4d, 0x3c, 0x2b, 0x1a];

/// A packet as it stands in a capture file.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The captured bytes.
    pub bytes: &'a [u8],
    /// The packet's length on the wire, at least that of the captured bytes.
    pub wire_len: u32,
    /// When it was captured, in nanoseconds since 1970; 0 if the file does not say.
    pub timestamp_ns: u64,
    /// What the packet begins with; none if the path cannot read it.
    pub link: Option<Link>,
}

/// What was wrong with a capture without ending it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Damage {
    /// Records that were passed over.
    pub records: u64,
    /// The first of them: where and what.
    pub first: Option<String>,
}

/// A capture file being read, record by record.
pub struct Reader {
    name: String,
    window: Window,
    format: Format,
    /// Bytes of the current record, passed over when the next is asked for.
    current: usize,
    /// The offset up to which bytes have been prefetched.
    prefetched: u64,
    damage: Damage,
}

enum Format {
    Pcap(Pcap),
    PcapNg { big_endian: bool, interfaces: Vec<Interface> },
}

#[derive(Clone, Copy)]
struct Pcap {
    big_endian: bool,
    modified: bool,
    nanoseconds: bool,
    link: Link,
}

/// Where the parts of a record lie in the window.
struct Located {
    total: usize,
    bytes: std::ops::Range<usize>,
    wire_len: u32,
    timestamp_ns: u64,
    link: Option<Link>,
}

impl Reader {
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

    fn begin(name: String, mut window: Window) -> Result<Self> {
        let start = window.at_least(PCAP_HEADER_BYTES).map_err(Error::file("read", &name))?;
        let format = if start.starts_with(&SECTION_HEADER) {
            Format::PcapNg { big_endian: false, interfaces: Vec::new() }
        } else {
            let pcap = recognise(start, &name)?;
            window.consume(PCAP_HEADER_BYTES);
            Format::Pcap(pcap)
        };
        Ok(Self { name, window, format, current: 0, prefetched: 0, damage: Damage::default() })
    }

    /// The current record: the same one until [`advance`](Self::advance). `None` at the end.
    ///
    /// # Errors
    /// When the file cannot be read any further.
    pub fn record(&mut self) -> Result<Option<Record<'_>>> {
        let located = match &self.format {
            Format::Pcap(pcap) => self.locate_in_pcap(*pcap)?,
            Format::PcapNg { .. } => self.locate_in_pcapng()?,
        };
        Ok(located.map(|Located { total, bytes, wire_len, timestamp_ns, link }| {
            self.current = total;
            let bytes = &self.window.unread()[bytes];
            let captured = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            Record { bytes, wire_len: wire_len.max(captured), timestamp_ns, link }
        }))
    }

    /// Asks for the cache lines behind the current record, as far as they are in memory.
    pub fn prefetch(&mut self) {
        let (unread, offset) = (self.window.unread(), self.window.offset());
        let end = (self.current + PREFETCH_BYTES).min(unread.len());
        let start = usize::try_from(self.prefetched.saturating_sub(offset)).unwrap_or(end);
        mem::prefetch(unread.get(start..end).unwrap_or_default());
        self.prefetched = offset + end as u64;
    }

    /// Passes over the current record.
    pub fn advance(&mut self) {
        self.window.consume(std::mem::take(&mut self.current));
    }

    /// Damage met so far.
    #[must_use]
    pub fn damage(&self) -> &Damage {
        &self.damage
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
        let seen = self.window.at_least(total).map_err(|error| unreadable(&self.name, error))?;
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
            link: Some(pcap.link),
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
        let seen = self.window.at_least(BLOCK_HEADER_BYTES);
        let seen = seen.map_err(|error| unreadable(&self.name, error))?;
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
        let seen = self.window.at_least(total).map_err(|error| unreadable(&self.name, error))?;
        if seen.len() < total {
            self.damaged_end("a block is cut off by the end of the file");
            return Ok(None);
        }
        Ok(Some(total))
    }

    /// A field of the header that comes next; `None` at the end of the file, or when the header
    /// itself is cut off.
    fn peek_u32(&mut self, at: usize, header: usize, big_endian: bool) -> Result<Option<u32>> {
        let seen = self.window.at_least(header).map_err(|error| unreadable(&self.name, error))?;
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
        self.note_damage(problem);
        self.window.consume(usize::MAX);
    }

    fn note_damage(&mut self, problem: &str) {
        self.damage.records += 1;
        let offset = self.window.offset();
        self.damage.first.get_or_insert_with(|| format!("{}: {problem} at {offset}", self.name));
    }

    fn broken(&self, problem: String, help: &str) -> Error {
        let (name, offset) = (self.name.clone(), self.window.offset());
        Error::Capture { name, offset, problem, help: help.to_owned() }
    }
}

fn unreadable(name: &str, error: io::Error) -> Error {
    Error::file("read", name)(error)
}

/// Tells a classic capture by its first bytes.
fn recognise(start: &[u8], name: &str) -> Result<Pcap> {
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
        Err(_) if start.starts_with(&[0x1f, 0x8b]) => {
            let problem = "this is a gzip file".into();
            return Err(not_a_capture(problem, "decompress it first: gunzip FILE"));
        }
        Err(_) => {
            let magic: String = start.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
            let problem = format!("not a capture file (it begins with {magic})");
            return Err(not_a_capture(problem, "give a pcap or pcapng file"));
        }
    };
    let link_type = header.network.0 & 0x03ff_ffff; // above: about the frame check sequence
    let Some(link) = link_of(link_type) else {
        let problem = format!("link type {link_type}{} is not read", link_name(link_type));
        let help = "capture on an Ethernet or raw IP interface";
        return Err(not_a_capture(problem, help));
    };
    Ok(pcap_of(&header, link))
}

fn pcap_of(header: &PcapHeader, link: Link) -> Pcap {
    Pcap {
        big_endian: header.is_bigendian(),
        modified: header.is_modified_format(),
        nanoseconds: header.is_nanosecond_precision(),
        link,
    }
}

/// Reads one whole block: a packet's place in it, or nothing if it is of another kind.
fn read_block(
    block: &[u8],
    big_endian: &bool,
    interfaces: &mut Vec<Interface>,
) -> Result<Option<Located>, &'static str> {
    type Parse = fn(&[u8]) -> IResult<&[u8], Block<'_>, PcapError<&[u8]>>;
    let parse: Parse = if *big_endian { parse_block_be } else { parse_block_le };
    let is_interface = block_type(block, *big_endian) == Some(INTERFACE_BLOCK);
    if is_interface && interfaces.len() == MAX_INTERFACES {
        return Err("a section has too many interfaces");
    }
    let Ok((_, parsed)) = parse(block) else {
        if is_interface {
            interfaces.push(Interface::DAMAGED); // those after it keep their numbers
        }
        return Err("a block is damaged");
    };
    match parsed {
        Block::InterfaceDescription(description) => {
            interfaces.push(Interface::of(&description, *big_endian));
            Ok(None)
        }
        Block::EnhancedPacket(packet) => {
            let interface = interfaces
                .get(packet.if_id as usize)
                .ok_or("a packet is of an interface that was not described")?;
            let end = 28 + packet.caplen as usize;
            if end + 4 > block.len() {
                return Err("a packet is longer than its block");
            }
            let ticks = u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low);
            Ok(Some(Located {
                total: block.len(),
                bytes: 28..end,
                wire_len: packet.origlen,
                timestamp_ns: interface.timestamp_ns(ticks),
                link: interface.link,
            }))
        }
        Block::SimplePacket(packet) => {
            let interface = interfaces.first().ok_or("a packet comes before any interface")?;
            let caplen = interface.captured(packet.origlen).min(packet.data.len());
            Ok(Some(Located {
                total: block.len(),
                bytes: 12..12 + caplen,
                wire_len: packet.origlen,
                timestamp_ns: 0,
                link: interface.link,
            }))
        }
        Block::Unknown(_) if block_type(block, *big_endian) == Some(PACKET_BLOCK) => {
            Err("an obsolete packet block, which is not read")
        }
        _ => Ok(None),
    }
}

fn block_type(block: &[u8], big_endian: bool) -> Option<u32> {
    let bytes = block.first_chunk().copied()?;
    Some(if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
}
