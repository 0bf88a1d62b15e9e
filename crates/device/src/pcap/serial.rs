//! Headers of serial lines, label stacks and firewalls' logs before a packet.

use std::ops::Range;

use forebay_rx::parse::Link;

use super::link::{Begin, EthernetHeader, IP_FAMILIES, behind_ethertype, ethernet};

/// Address and control field of PPP in HDLC-like framing (RFC 1662); a line may leave them out.
const ADDRESS_AND_CONTROL: [u8; 2] = [0xff, 3];

/// Addresses of Cisco's HDLC: of one station, of all.
const CISCO_ADDRESSES: [u8; 2] = [0x0f, 0x8f];

const MPLS: u16 = 0x8847;
const MPLS_MULTICAST: u16 = 0x8848;
const PPPOE_DISCOVERY: u16 = 0x8863;
const PPPOE_SESSION: u16 = 0x8864;

/// Length of the fixed part of NFLOG's header.
const NFLOG_BYTES: usize = 4;
/// Attribute of NFLOG that is the packet.
const NFULA_PAYLOAD: u16 = 9;
/// Families of Linux: `AF_INET`, `AF_INET6`.
const LINUX_IP_FAMILIES: [u8; 2] = [2, 10];

/// Looks behind PPP's protocol field at `at`, which may have one byte (RFC 1661, section 6.5).
pub(super) fn behind_ppp(bytes: &[u8], at: usize) -> Option<Begin> {
    let framed = bytes.get(at..)?.starts_with(&ADDRESS_AND_CONTROL);
    let at = if framed { at + ADDRESS_AND_CONTROL.len() } else { at };
    let (protocol, at) = match *bytes.get(at..)? {
        [short, ..] if short & 1 == 1 => (u16::from(short), at + 1),
        [high, low, ..] => (u16::from_be_bytes([high, low]), at + 2),
        _ => return None,
    };
    match protocol {
        0x0021 | 0x0057 => Some(Begin::At(at, Link::Ip)),
        0x0281 => behind_ethertype(MPLS, at),
        0x0283 => behind_ethertype(MPLS_MULTICAST, at),
        _ => None,
    }
}

/// Looks behind PPP, or behind Cisco's HDLC, which the same link type may have.
pub(super) fn behind_ppp_or_hdlc(bytes: &[u8]) -> Option<Begin> {
    let is_cisco = CISCO_ADDRESSES.contains(bytes.first()?);
    if is_cisco { behind_hdlc(bytes, 0) } else { behind_ppp(bytes, 0) }
}

/// Looks behind Cisco's HDLC header at `at`: an address, a control byte and an `EtherType`.
pub(super) fn behind_hdlc(bytes: &[u8], at: usize) -> Option<Begin> {
    let &[_, _, high, low] = bytes.get(at..)?.first_chunk()?;
    behind_ethertype(u16::from_be_bytes([high, low]), at + 4)
}

/// Ethernet header for a packet that begins with the header of PPP over Ethernet.
pub(super) fn before_pppoe(bytes: &[u8]) -> Option<Begin> {
    let is_session = *bytes.get(1)? == 0;
    let ethertype = if is_session { PPPOE_SESSION } else { PPPOE_DISCOVERY };
    Some(Begin::Rebuilt(0, ethernet(ethertype)))
}

/// Ethernet header for a packet that begins with a label stack.
pub(super) fn before_labels() -> EthernetHeader {
    ethernet(MPLS)
}

/// Looks behind the header of OpenBSD's packet filter: its length, which is padded to four bytes, then the
/// address family.
pub(super) fn behind_pflog(bytes: &[u8]) -> Option<Begin> {
    let &[len_bytes, family] = bytes.first_chunk()?;
    let at = usize::from(len_bytes).next_multiple_of(4);
    let is_ip = IP_FAMILIES.contains(&family.into()) && at <= bytes.len();
    is_ip.then_some(Begin::At(at, Link::Ip))
}

/// Looks behind the attributes of Linux's NFLOG up to the packet. Their numbers are in the byte order of
/// the capturing host, which may differ from the file's.
pub(super) fn behind_nflog(bytes: &[u8]) -> Option<Begin> {
    if !LINUX_IP_FAMILIES.contains(bytes.first()?) {
        return None;
    }
    nflog_packet(bytes).map(|packet| Begin::At(packet.start, Link::Ip))
}

/// Number of bytes behind the packet of NFLOG: the kernel pads it to four bytes.
pub(super) fn behind_nflog_packet(bytes: &[u8], wire_len: u32) -> u32 {
    let end = nflog_packet(bytes).and_then(|packet| u32::try_from(packet.end).ok());
    end.map_or(0, |end| wire_len.saturating_sub(end))
}

fn nflog_packet(bytes: &[u8]) -> Option<Range<usize>> {
    let mut orders = [u16::from_le_bytes, u16::from_be_bytes].into_iter();
    orders.find_map(|word| nflog_payload(bytes, word))
}

fn nflog_payload(bytes: &[u8], word: fn([u8; 2]) -> u16) -> Option<Range<usize>> {
    let mut at = NFLOG_BYTES;
    loop {
        let &[len0, len1, kind0, kind1] = bytes.get(at..)?.first_chunk()?;
        let len_bytes = usize::from(word([len0, len1]));
        if len_bytes < 4 {
            return None;
        }
        if word([kind0, kind1]) == NFULA_PAYLOAD {
            return Some(at + 4..at + len_bytes);
        }
        at += len_bytes.next_multiple_of(4);
    }
}
