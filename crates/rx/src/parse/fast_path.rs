//! Fast path: the headers of nearly every packet, found without a loop.
//!
//! Ethernet with at most one 802.1Q tag, or bare IP; a whole IPv4 datagram without options, or IPv6
//! without extension headers; TCP, or UDP with a checksum. Headers are captured and consistent. All
//! other frames are left to the general [walk](super::parse_by_walk), which finds the same in these.

use super::checksum::Sum;
use super::device_sum::skipped;
use super::ethernet::TAG_8021Q;
use super::ipv4::{MORE_FRAGMENTS, OFFSET_MASK};
use super::transport::{self, TCP, TransportFields, UDP};
use super::{Checksum, DeviceSum, Headers, Link, Network, Seen, Transport, Verify, checksum};

const IPV4_BYTES: u8 = 20;
const IPV6_BYTES: u8 = 40;
const TCP_BYTES: u8 = 20;
const UDP_BYTES: u8 = 8;

/// Version 4, and a header of five words.
const IPV4_WITHOUT_OPTIONS: u8 = 0x45;

/// Ethertype, version and header length of IPv4 without options, and the bits that they have.
const IPV4_START: u32 = u32::from_be_bytes([0x08, 0x00, IPV4_WITHOUT_OPTIONS, 0]);
const IPV4_MASK: u32 = 0xffff_ff00;

/// Ethertype and version of IPv6.
const IPV6_START: u32 = u32::from_be_bytes([0x86, 0xdd, 0x60, 0]);
const IPV6_MASK: u32 = 0xffff_f000;

/// Finds the headers of a linear frame. Returns false, with `headers` unchanged, if they are not
/// those of the fast path. To be followed by [`judge`], if checksums are to be judged.
#[inline(never)] // inlined, it leaves its caller's loop without registers
#[must_use]
pub(super) fn find(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> bool {
    match headers.link {
        Link::Ethernet => behind_ethernet(headers, bytes, wire_len),
        Link::Ip => behind_nothing(headers, bytes, wire_len),
    }
    .is_some()
}

#[inline]
fn behind_ethernet(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> Option<()> {
    let &[e0, e1, i0, i1, t0, t1, j0, j1] = header(bytes, 12)?;
    // The type and the first byte behind it in one comparison.
    let start = u32::from_be_bytes([e0, e1, i0, i1]);
    if start & IPV4_MASK == IPV4_START {
        ipv4::<14>(headers, bytes, wire_len)
    } else if start & IPV6_MASK == IPV6_START {
        ipv6::<14>(headers, bytes, wire_len)
    } else if u16::from_be_bytes([e0, e1]) == TAG_8021Q {
        let start = u32::from_be_bytes([t0, t1, j0, j1]);
        if start & IPV4_MASK == IPV4_START {
            ipv4::<18>(headers, bytes, wire_len)
        } else if start & IPV6_MASK == IPV6_START {
            ipv6::<18>(headers, bytes, wire_len)
        } else {
            None
        }
    } else {
        None
    }
}

#[inline]
fn behind_nothing(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> Option<()> {
    match *bytes.first()? {
        IPV4_WITHOUT_OPTIONS => ipv4::<0>(headers, bytes, wire_len),
        0x60..=0x6f => ipv6::<0>(headers, bytes, wire_len),
        _ => None,
    }
}

/// IPv4 at offset `AT`: a parameter of the function, so that every offset up to the ports is a
/// constant.
#[inline]
fn ipv4<const AT: u8>(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> Option<()> {
    let &[_, _, l0, l1, _, _, f0, f1, _, protocol, ..] = header::<28>(bytes, AT)?;
    if u16::from_ne_bytes([f0, f1]) & (MORE_FRAGMENTS | OFFSET_MASK).to_be() != 0 {
        return None;
    }
    let len = u16::from_be_bytes([l0, l1]).checked_sub(IPV4_BYTES.into())?;
    let (network, transport_offset) = (Network::Ipv4, AT + IPV4_BYTES);
    Datagram { network, protocol, network_offset: AT, transport_offset, len }
        .record(headers, bytes, wire_len)
}

/// IPv6 at offset `AT`.
#[inline]
fn ipv6<const AT: u8>(headers: &mut Headers, bytes: &[u8], wire_len: u32) -> Option<()> {
    let &[_, _, _, _, l0, l1, protocol, ..] = header::<48>(bytes, AT)?;
    let len = u16::from_be_bytes([l0, l1]);
    let (network, transport_offset) = (Network::Ipv6, AT + IPV6_BYTES);
    Datagram { network, protocol, network_offset: AT, transport_offset, len }
        .record(headers, bytes, wire_len)
}

/// Datagram by its IP header.
struct Datagram {
    network: Network,
    protocol: u8,
    network_offset: u8,
    transport_offset: u8,
    /// Length behind the IP header.
    len: u16,
}

impl Datagram {
    /// Records all headers, if they are consistent and captured.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "its fields are constants then")]
    fn record(&self, headers: &mut Headers, bytes: &[u8], wire_len: u32) -> Option<()> {
        let end = usize::from(self.transport_offset) + usize::from(self.len);
        if end > bytes.len() && is_beyond(end, wire_len) {
            return None;
        }
        match self.protocol {
            TCP => {
                let header_len = header::<20>(bytes, self.transport_offset)?[12] >> 4 << 2;
                if header_len < TCP_BYTES {
                    return None;
                }
                let payload_len = self.len.checked_sub(header_len.into())?;
                self.set(headers, Transport::Tcp, header_len, payload_len);
            }
            UDP => {
                let &[.., l0, l1, sum0, sum1] = header::<8>(bytes, self.transport_offset)?;
                let len = u16::from_be_bytes([l0, l1]);
                if [sum0, sum1] == [0; 2] || len > self.len {
                    return None;
                }
                let payload_len = len.checked_sub(UDP_BYTES.into())?;
                self.set(headers, Transport::Udp, UDP_BYTES, payload_len);
            }
            _ => return None,
        }
        Some(())
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as `record`")]
    fn set(&self, headers: &mut Headers, transport: Transport, header_len: u8, payload_len: u16) {
        headers.network = self.network;
        headers.transport = transport;
        headers.protocol = self.protocol;
        headers.network_offset = self.network_offset;
        headers.transport_offset = self.transport_offset.into();
        headers.payload_offset = u16::from(self.transport_offset) + u16::from(header_len);
        headers.payload_len = payload_len;
    }
}

/// True if a frame is shorter on the wire.
#[cold] // only of truncated frames is this asked
fn is_beyond(end: usize, wire_len: u32) -> bool {
    end > wire_len as usize
}

#[inline]
fn header<const BYTES: usize>(bytes: &[u8], at: u8) -> Option<&[u8; BYTES]> {
    bytes.get(usize::from(at)..)?.first_chunk()
}

/// Judges the checksums of the headers that were found.
#[inline(never)]
pub(super) fn judge(
    headers: &mut Headers,
    bytes: &[u8],
    wire_len: u32,
    device_sum: Option<DeviceSum>,
    verify: Verify,
) {
    let start = usize::from(headers.transport_offset);
    let ip_header = bytes.get(usize::from(headers.network_offset)..start).unwrap_or_default();
    let (before, addresses) = match ip_header.as_chunks::<4>().0 {
        &[a, b, c, d, e] => {
            let (first, addresses) = (Sum::of_words(&[a, b, c]), Sum::of_words(&[d, e]));
            let whole = first.plus(addresses);
            if verify == Verify::Checksums {
                headers.ip_checksum = checksum::judge(whole);
            }
            (whole, addresses)
        }
        [first @ .., a, b, c, d, e, f, g, h] => {
            let addresses = Sum::of_words(&[*a, *b, *c, *d, *e, *f, *g, *h]);
            (Sum::of_words(first).plus(addresses), addresses)
        }
        _ => return, // not one that `find` has found
    };
    let len = usize::from(headers.payload_offset) - start + usize::from(headers.payload_len);
    let end = start + len;
    let pseudo_sum = addresses.plus_word(u16::from(headers.protocol));
    // Most frames are whole, end with their IP packet, and have nothing else that the device has summed up.
    let is_plain = bytes.len() == end && wire_len as usize <= end;
    if headers.l4_checksum == Checksum::Unknown
        && is_plain
        && usize::from(headers.network_offset) == skipped(headers.link)
        && let Some(sum) = device_sum
    {
        let sum = pseudo_sum.plus_len(len).plus(sum.without(before));
        headers.l4_checksum = checksum::judge(sum);
        return;
    }
    let seen = Seen { device_sum, ..Seen::new(bytes, wire_len, headers.link) };
    let segment = TransportFields { start, end, pseudo_sum: Some(pseudo_sum) };
    headers.l4_checksum = transport::judge(&seen, &segment, len, verify, headers);
}
