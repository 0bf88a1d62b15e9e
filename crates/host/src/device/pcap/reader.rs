//! Capture files: records of classic pcap and packet blocks of pcapng, whatever their byte order
//! and time resolution, and damage told apart from the end.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::Arc;

use path::parse::Link;
use pcap_parser::nom::{Err as NomErr, IResult};
use pcap_parser::{
    Block, PcapError, PcapHeader, parse_block_be, parse_block_le, parse_pcap_frame,
    parse_pcap_frame_be, parse_pcap_frame_modified, parse_pcap_header,
};

use super::interface::Interface;
use super::link::{Begin, EthernetHeader, LinkType, READ};
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

/// A packet of a capture file.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The captured bytes, from the link header on that [`link`](Self::link) names: without a cooked
    /// header or an address family, behind an Ethernet header that was made anew where it takes one.
    pub bytes: &'a [u8],
    /// The length on the wire of the same, at least that of the captured bytes.
    pub wire_len: u32,
    /// When it was captured, in nanoseconds since 1970; 0 if the file does not say.
    pub timestamp_ns: u64,
    /// What the bytes begin with; none if the path cannot read that: then they are as in the file.
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
    /// Its link type, if it cannot be read.
    current_unread: Option<LinkType>,
    /// A packet with a link header that was made anew.
    rebuilt: Vec<u8>,
    /// Records that could be read, and were passed.
    read: u64,
    /// Those that could not be, and were passed, by link type.
    unread: BTreeMap<LinkType, u64>,
    /// Where the first is that could not be read, or is damaged.
    first_bad: Option<u64>,
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
    link_type: LinkType,
}

/// Where the parts of a record lie in the window.
struct Located {
    total: usize,
    bytes: std::ops::Range<usize>,
    wire_len: u32,
    timestamp_ns: u64,
    link_type: LinkType,
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
        Ok(Self {
            name,
            window,
            format,
            current: 0,
            current_unread: None,
            rebuilt: Vec::new(),
            read: 0,
            unread: BTreeMap::new(),
            first_bad: None,
            prefetched: 0,
            damage: Damage::default(),
        })
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
        mem::prefetch(unread.get(start..end).unwrap_or_default());
        self.prefetched = offset + end as u64;
    }

    /// Passes over the current record.
    pub fn advance(&mut self) {
        let current = std::mem::take(&mut self.current);
        if current > 0 {
            match self.current_unread.take() {
                None => self.read += 1,
                Some(link_type) => self.count_unread(link_type),
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

    /// Says at the end whether any of the records could be read, if there were any.
    ///
    /// # Errors
    /// When none could.
    pub fn verdict(&self) -> Result<()> {
        let Some(offset) = self.first_bad.filter(|_| self.read == 0) else { return Ok(()) };
        let unread =
            self.unread().map(|(link_type, count)| format!("{count} of link type {link_type}"));
        let damaged = Some(self.damage.records).filter(|&count| count > 0);
        let damaged = damaged.map(|count| format!("{count} damaged"));
        let bad: Vec<_> = unread.chain(damaged).collect();
        let help = if self.unread.is_empty() {
            "the file is damaged: repair it, or give another".to_owned()
        } else {
            format!("give a capture of a link type that is read: {READ}")
        };
        let problem = format!("none of its records can be read ({}), the first", shown(&bad));
        Err(Error::Capture { name: self.name.clone(), offset, problem, help })
    }

    /// Records passed so far that could not be read, by the name of their link type.
    pub fn unread(&self) -> impl Iterator<Item = (String, u64)> {
        self.unread.iter().map(|(link_type, count)| (link_type.to_string(), *count))
    }

    /// How many these are.
    pub(super) fn unread_records(&self) -> u64 {
        self.unread.values().sum()
    }

    #[cold]
    fn count_unread(&mut self, link_type: LinkType) {
        *self.unread.entry(link_type).or_default() += 1;
        let offset = self.window.offset();
        self.first_bad.get_or_insert(offset);
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
        self.first_bad.get_or_insert(offset);
        self.damage.first.get_or_insert_with(|| format!("{}: {problem} at {offset}", self.name));
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

/// As many as a person reads.
fn shown(parts: &[String]) -> String {
    const SHOWN_MAX: usize = 8;
    let shown = parts.iter().take(SHOWN_MAX).cloned().collect::<Vec<_>>().join(", ");
    if parts.len() > SHOWN_MAX { format!("{shown}, …") } else { shown }
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
                link_type: interface.link_type,
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
                link_type: interface.link_type,
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
