//! Detection of classic captures, and of files that are none.

use forebay_sys::error::{Error, Result};
use pcap_parser::nom::Err as NomErr;
use pcap_parser::{PcapHeader, parse_pcap_header};

use super::link::{LinkType, READ};
use super::window::GZIP_MAGIC;

const PCAP_MAGIC_BE: [u8; 4] = [0xa1, 0xb2, 0xc3, 0xd4];
/// Magic of the modified format in big-endian, whose records have longer headers (Alexey Kuznetsov's patches
/// of libpcap).
const MODIFIED_MAGIC_BE: [u8; 4] = [0xa1, 0xb2, 0xcd, 0x34];

/// Format of a classic capture.
#[derive(Clone, Copy)]
pub(super) struct Pcap {
    pub(super) big_endian: bool,
    pub(super) modified: bool,
    pub(super) nanoseconds: bool,
    pub(super) link_type: LinkType,
}

/// Detects a classic capture by its first bytes.
pub(super) fn recognise_pcap(start: &[u8], name: &str) -> Result<Pcap> {
    let not_a_capture = |problem: String, help: &str| Error::Capture {
        name: name.to_owned(),
        offset: 0,
        problem,
        help: help.to_owned(),
    };
    // The parser knows this format in little-endian only; what differs is in the records.
    let is_modified_be = start.starts_with(&MODIFIED_MAGIC_BE);
    let plain =
        is_modified_be.then(|| [&PCAP_MAGIC_BE, &start[MODIFIED_MAGIC_BE.len()..]].concat());
    let header = match parse_pcap_header(plain.as_deref().unwrap_or(start)) {
        Ok((_, header)) => header,
        Err(_) if start.is_empty() => {
            return Err(not_a_capture("the file is empty".into(), "give a pcap or pcapng file"));
        }
        Err(_) if let Some((name, help)) = other_format(start) => {
            return Err(not_a_capture(format!("this is a {name} file"), help));
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
            let magic = hex(start.get(..4).unwrap_or(start));
            let problem = format!("not a capture file (it begins with {magic})");
            return Err(not_a_capture(problem, "give a pcap or pcapng file"));
        }
    };
    // The upper bits describe the frame check sequence.
    let link_type = LinkType::of(header.network.0 & 0x03ff_ffff);
    if !link_type.is_read() {
        let help = format!("give a capture of a link type that is read: {READ}");
        return Err(not_a_capture(format!("link type {link_type} is not read"), &help));
    }
    let pcap = pcap_of(&header, link_type);
    Ok(Pcap { modified: pcap.modified || is_modified_be, ..pcap })
}

/// First bytes of files that capture programs write or people keep captures in, their names, and what
/// makes captures of them.
const OTHER_FORMATS: [(&[u8], &str, &str); 7] = [
    (b"\x28\xb5\x2f\xfd", "zstd", "unpack it: zstd -d FILE"),
    (b"\xfd7zXZ\0", "xz", "unpack it: xz -d FILE"),
    (b"BZh", "bzip2", "unpack it: bunzip2 FILE"),
    (b"\x04\x22\x4d\x18", "lz4", "unpack it: lz4 -d FILE"),
    (b"PK\x03\x04", "zip", "unpack it: unzip FILE"),
    (b"snoop\0\0\0", "snoop", "convert it: editcap -F pcap FILE FILE.pcap"),
    (b"GMBU", "Network Monitor", "convert it: editcap -F pcap FILE FILE.pcap"),
];

/// Name and remedy of a file of another known format.
fn other_format(start: &[u8]) -> Option<(&'static str, &'static str)> {
    let (_, name, help) = OTHER_FORMATS.iter().find(|(magic, ..)| start.starts_with(magic))?;
    Some((name, help))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn pcap_of(header: &PcapHeader, link_type: LinkType) -> Pcap {
    Pcap {
        big_endian: header.is_bigendian(),
        modified: header.is_modified_format(),
        nanoseconds: header.is_nanosecond_precision(),
        link_type,
    }
}
