//! Frames of 802.11: those with one whole, readable packet, as the Ethernet frames that Linux makes of them
//! (`ieee80211_data_to_8023_exthdr` in net/wireless/util.c).

use super::link::{Begin, ETHERTYPE_MIN, LENGTH_MAX};

/// Version 0, of type data, with data: bits of the first byte, and their value.
const DATA_MASK: u8 = 0x4f;
const DATA: u8 = 0x08;
/// Quality of service: two bytes more, in the first byte.
const QOS: u8 = 0x80;

/// To and from the distribution system, in the second byte: these determine what the addresses mean.
const DISTRIBUTION: u8 = 3;
const MORE_FRAGMENTS: u8 = 0x04;
const PROTECTED: u8 = 0x40;
/// With quality of service: four bytes of HT control.
const ORDER: u8 = 0x80;
/// In the first byte of the quality of service: several packets in one.
const AGGREGATE: u8 = 0x80;

const ADDRESSES: usize = 4;
const SEQUENCE: usize = 22;
const FOURTH_ADDRESS: usize = 24;

/// LLC and SNAP up to the last byte of the organization: 0 (RFC 1042), or 0xf8 (a bridge's tunnel).
const SNAP: [u8; 5] = [0xaa, 0xaa, 3, 0, 0];
const SNAP_BYTES: usize = 8;
const RFC_1042: u8 = 0;
const BRIDGE_TUNNEL: u8 = 0xf8;
/// AARP and IPX: before them, the header of RFC 1042 stays.
const KEPT_BEHIND_SNAP: [u16; 2] = [0x80f3, 0x8137];

/// Flag of radiotap: a check sequence is behind the frame.
const CHECKED: u8 = 0x10;
/// Flag of radiotap: the header of the frame is padded to four bytes.
const PADDED: u8 = 0x20;
/// Flag of radiotap: the check sequence was wrong.
const BAD: u8 = 0x40;
const CHECK_SEQUENCE_BYTES: u32 = 4;

/// Looks behind radiotap's header.
pub(super) fn behind_radiotap(bytes: &[u8], wire_len: u32) -> Option<Begin> {
    let (at, flags) = radiotap(bytes)?;
    // Linux drops a damaged frame, too.
    let is_good = flags & BAD == 0;
    is_good.then(|| behind_wireless(bytes, at, flags & PADDED != 0, wire_len)).flatten()
}

/// Number of bytes behind a frame with radiotap's header.
pub(super) fn behind_frame(bytes: &[u8]) -> u32 {
    let is_checked = radiotap(bytes).is_some_and(|(_, flags)| flags & CHECKED != 0);
    if is_checked { CHECK_SEQUENCE_BYTES } else { 0 }
}

/// Length of a radiotap header, and its flags.
fn radiotap(bytes: &[u8]) -> Option<(usize, u8)> {
    let &[version, _, len0, len1] = bytes.first_chunk()?;
    let at = usize::from(u16::from_le_bytes([len0, len1]));
    let flags = radiotap_flags(bytes.get(..at)?)?;
    (version == 0).then_some((at, flags))
}

/// Flags in a radiotap header; 0 if it has none.
fn radiotap_flags(header: &[u8]) -> Option<u8> {
    let bitmap = |at: usize| header.get(at..)?.first_chunk().copied().map(u32::from_le_bytes);
    let mut at = 4;
    let present = bitmap(at)?;
    while bitmap(at)? & 1 << 31 != 0 {
        at += 4;
    }
    at += 4;
    if present & 1 != 0 {
        at = at.next_multiple_of(8) + 8; // a time, aligned
    }
    if present & 2 == 0 { Some(0) } else { header.get(at).copied() }
}

/// Looks behind the header of the frame at `at`, which may be padded.
pub(super) fn behind_wireless(
    bytes: &[u8],
    at: usize,
    is_padded: bool,
    wire_len: u32,
) -> Option<Begin> {
    let frame = bytes.get(at..)?;
    let &[kind, flags] = frame.first_chunk()?;
    let fragment = frame.get(SEQUENCE)? & 0x0f;
    if kind & DATA_MASK != DATA || flags & (PROTECTED | MORE_FRAGMENTS) != 0 || fragment != 0 {
        return None;
    }
    let mut header_bytes = FOURTH_ADDRESS;
    if flags & DISTRIBUTION == DISTRIBUTION {
        header_bytes += 6;
    }
    if kind & QOS != 0 {
        if frame.get(header_bytes)? & AGGREGATE != 0 {
            return None;
        }
        header_bytes += if flags & ORDER != 0 { 6 } else { 2 };
    }
    if is_padded {
        header_bytes = header_bytes.next_multiple_of(4);
    }
    let address = |at: usize| frame.get(at..)?.first_chunk::<6>();
    let [first, second, third] = [0, 6, 12].map(|place| address(ADDRESSES + place));
    let (destination, source) = match flags & DISTRIBUTION {
        0 => (first?, second?),
        1 => (third?, second?),
        2 => (first?, third?),
        _ => (third?, address(FOURTH_ADDRESS)?),
    };
    let (skipped, ethertype) = payload(frame.get(header_bytes..)?, || {
        (wire_len as usize).saturating_sub(at + header_bytes)
    })?;
    let header = [&destination[..], source, &ethertype.to_be_bytes()].concat();
    Some(Begin::Rebuilt(at + header_bytes + skipped, header.try_into().ok()?))
}

/// Number of bytes before the packet in a frame's payload of `len_bytes`, and its `EtherType`: a length, and
/// no bytes, if there is only LLC.
fn payload(payload: &[u8], len_bytes: impl FnOnce() -> usize) -> Option<(usize, u16)> {
    if payload.starts_with(&SNAP[..SNAP.len().min(payload.len())]) {
        let &[_, _, _, _, _, organization, high, low] = payload.first_chunk::<SNAP_BYTES>()?;
        let ethertype = u16::from_be_bytes([high, low]);
        let is_replaced = match organization {
            RFC_1042 => !KEPT_BEHIND_SNAP.contains(&ethertype),
            organization => organization == BRIDGE_TUNNEL,
        };
        if is_replaced && ethertype >= ETHERTYPE_MIN {
            return Some((SNAP_BYTES, ethertype));
        }
    }
    let length = u16::try_from(len_bytes()).ok().filter(|length| *length <= LENGTH_MAX)?;
    Some((0, length))
}
