//! Ethernet II, 802.3 with LLC/SNAP, and VLAN tags (IEEE 802.1Q, 802.1ad).

use super::{Flaw, Link, Seen, Stop};

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;

/// Maximum number of VLAN tags that are walked over; a third one makes the frame "other".
pub const MAX_VLAN_TAGS: usize = 2;

pub(super) const TAG_8021Q: u16 = 0x8100;
const TAG_8021AD: u16 = 0x88a8;
/// Ethertype of the outer tag before 802.1ad.
const TAG_QINQ_OLD: u16 = 0x9100;

/// Smallest EtherType; smaller values are the length of an 802.3 frame.
const FIRST_ETHERTYPE: u16 = 0x0600;
/// 802.2 LLC for SNAP with the OUI 0: an EtherType follows (RFC 1042).
const LLC_SNAP: [u8; 6] = [0xaa, 0xaa, 0x03, 0, 0, 0];

const ADDRESSES_BYTES: usize = 12;
const TYPE_BYTES: usize = 2;
const TAG_BYTES: usize = 4;
const VLAN_ID_MASK: u16 = 0x0fff;

/// Header in front of the network header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LinkLayer {
    /// Innermost EtherType; `None` for an 802.3 frame without SNAP.
    pub ethertype: Option<u16>,
    /// Offset of the network header.
    pub network_offset: u8,
    vlans: [u16; MAX_VLAN_TAGS],
    vlan_count: u8,
}

impl LinkLayer {
    /// VLAN ids, outermost first.
    #[must_use]
    pub fn vlans(&self) -> &[u16] {
        self.vlans.get(..self.vlan_count.into()).unwrap_or_default()
    }
}

/// Link layer of a captured frame, as far as it was captured.
#[must_use]
pub fn link_layer(bytes: &[u8], link: Link) -> LinkLayer {
    let mut found = LinkLayer::default();
    let seen = Seen::new(bytes, 0, link);
    // If the walk stops, `found` holds the headers before.
    let _ = fill(&seen, link, &mut found);
    found
}

#[inline]
pub(super) fn walk(seen: &Seen<'_>, link: Link) -> Result<LinkLayer, Stop> {
    let mut found = LinkLayer::default();
    fill(seen, link, &mut found)?;
    Ok(found)
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "as `ethernet`")]
fn fill(seen: &Seen<'_>, link: Link, found: &mut LinkLayer) -> Result<(), Stop> {
    match link {
        Link::Ethernet => ethernet(seen, found),
        Link::Ip => bare_ip(seen, found),
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "a call for each frame else: the flow key walks here too")]
fn ethernet(seen: &Seen<'_>, found: &mut LinkLayer) -> Result<(), Stop> {
    let mut at = ADDRESSES_BYTES;
    let mut kind = ethertype(seen, at)?;
    while let TAG_8021Q | TAG_8021AD | TAG_QINQ_OLD = kind {
        let Some(vlan) = found.vlans.get_mut(usize::from(found.vlan_count)) else { break };
        let &[tci_high, tci_low, ..] = seen.header::<TAG_BYTES>(at + TYPE_BYTES, Flaw::Runt)?;
        *vlan = u16::from_be_bytes([tci_high, tci_low]) & VLAN_ID_MASK;
        found.vlan_count += 1;
        at += TAG_BYTES;
        kind = ethertype(seen, at)?;
    }
    at += TYPE_BYTES;
    if kind < FIRST_ETHERTYPE {
        match seen.bytes.get(at..).and_then(<[u8]>::first_chunk::<8>) {
            Some(&[llc @ .., high, low]) if llc == LLC_SNAP => {
                kind = u16::from_be_bytes([high, low]);
                at += 8;
            }
            _ => return Ok(()),
        }
    }
    found.ethertype = Some(kind);
    found.network_offset = offset(at);
    Ok(())
}

/// Raw IP: only the version field distinguishes IPv4 from IPv6.
fn bare_ip(seen: &Seen<'_>, found: &mut LinkLayer) -> Result<(), Stop> {
    let &[first] = seen.header::<1>(0, Flaw::Runt)?;
    found.ethertype = match first >> 4 {
        4 => Some(ETHERTYPE_IPV4),
        6 => Some(ETHERTYPE_IPV6),
        _ => return Err(Stop::Flaw(Flaw::IpHeader)),
    };
    Ok(())
}

/// True if a link header is the same for packets of any length, with tags as in IEEE 802.1Q only:
/// SNAP has a length before it, and 0x9100 is not a tag for every receiver.
pub(crate) fn is_plain(link_header: &[u8]) -> bool {
    let Some(behind) = link_header.get(ADDRESSES_BYTES..) else { return link_header.is_empty() };
    let (tags, rest) = behind.as_chunks::<TAG_BYTES>();
    let is_tag = |tag: &[u8; TAG_BYTES]| {
        matches!(u16::from_be_bytes([tag[0], tag[1]]), TAG_8021Q | TAG_8021AD)
    };
    rest.len() == TYPE_BYTES && tags.iter().all(is_tag)
}

fn ethertype(seen: &Seen<'_>, at: usize) -> Result<u16, Stop> {
    Ok(u16::from_be_bytes(*seen.header(at, Flaw::Runt)?))
}

/// Offset behind link headers of at most 12 + 2 * 4 + 2 + 8 bytes.
fn offset(at: usize) -> u8 {
    u8::try_from(at).unwrap_or(u8::MAX)
}
