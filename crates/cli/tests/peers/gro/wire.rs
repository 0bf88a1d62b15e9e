//! Naive parsing and checksumming of frames, without a library.

use crate::gro::segment::Family;

const TCP: u8 = 6;
const UDP: u8 = 17;

/// Bits of the TCP flags, as the trace's letters.
const FLAGS: &str = "FSRPAUEC";
pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 1 << 1;
pub(crate) const RST: u8 = 1 << 2;
pub(crate) const PSH: u8 = 1 << 3;
pub(crate) const URG: u8 = 1 << 5;
pub(crate) const CWR: u8 = 1 << 7;

/// Offsets in a frame with a whole TCP segment, UDP datagram or fragment.
#[derive(Debug)]
pub(crate) struct Wire<'a> {
    bytes: &'a [u8],
    pub(crate) family: Family,
    pub(crate) ip_at: usize,
    pub(crate) transport_at: usize,
    pub(crate) payload_at: usize,
    /// End of the packet; padding follows.
    pub(crate) end: usize,
    pub(crate) is_tcp: bool,
    is_fragment: bool,
}

impl<'a> Wire<'a> {
    /// Parses a frame. `None` if malformed, truncated, or neither TCP nor UDP.
    pub(crate) fn read(bytes: &'a [u8]) -> Option<Self> {
        let mut ip_at = 14;
        while [0x8100, 0x88a8].contains(&be16(bytes, ip_at - 2)?) {
            ip_at += 4;
        }
        let (family, protocol, is_fragment, transport_at, end) = match be16(bytes, ip_at - 2)? {
            0x0800 => ipv4(bytes, ip_at)?,
            0x86dd => ipv6(bytes, ip_at)?,
            _ => return None,
        };
        let header_bytes = match protocol {
            _ if is_fragment => 0,
            TCP => usize::from(*bytes.get(transport_at + 12)? >> 4) * 4,
            UDP => 8,
            _ => return None,
        };
        let payload_at = transport_at + header_bytes;
        let udp_end = || Some(transport_at + usize::from(be16(bytes, transport_at + 4)?));
        let is_whole = match protocol {
            _ if is_fragment => true,
            TCP => header_bytes >= 20,
            _ => udp_end()? == end,
        };
        let is_tcp = protocol == TCP;
        (is_whole && payload_at <= end && end <= bytes.len()).then_some(Self {
            bytes,
            family,
            ip_at,
            transport_at,
            payload_at,
            end,
            is_tcp,
            is_fragment,
        })
    }

    /// True if the frame may be merged at all.
    pub(crate) fn is_mergeable(&self) -> bool {
        !self.is_fragment && self.has_good_checksums()
    }

    /// Flow key: packets with equal keys are of one flow. Fragments belong to no flow with ports.
    pub(crate) fn flow(&self) -> Vec<u8> {
        let addresses = match self.family {
            Family::Ipv4 => self.ip_at + 12..self.ip_at + 20,
            Family::Ipv6 => self.ip_at + 8..self.ip_at + 40,
        };
        let ports = self.transport_at..self.transport_at + if self.is_fragment { 0 } else { 4 };
        let tags = 12..self.ip_at;
        [&[u8::from(self.is_tcp)], &self.bytes[tags], &self.bytes[addresses], &self.bytes[ports]]
            .concat()
    }

    /// Last octets of the source address, which identify the case.
    pub(crate) fn case(&self) -> u8 {
        match self.family {
            Family::Ipv4 => self.bytes[self.ip_at + 14],
            Family::Ipv6 => self.bytes[self.ip_at + 21],
        }
    }

    pub(crate) fn source_port(&self) -> u16 {
        be16(self.bytes, self.transport_at).unwrap_or(0)
    }

    pub(crate) fn sequence(&self) -> u32 {
        let at = self.transport_at + 4;
        u32::from_be_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    pub(crate) fn flags(&self) -> u8 {
        if self.is_tcp && !self.is_fragment { self.bytes[self.transport_at + 13] } else { 0 }
    }

    pub(crate) fn flag_letters(&self) -> String {
        let flags = self.flags();
        let set = FLAGS.chars().enumerate().filter(|(bit, _)| flags >> bit & 1 == 1);
        set.map(|(_, letter)| letter).collect()
    }

    pub(crate) fn payload(&self) -> &'a [u8] {
        &self.bytes[self.payload_at..self.end]
    }

    /// The frame without padding.
    pub(crate) fn trimmed(&self) -> &'a [u8] {
        &self.bytes[..self.end]
    }

    pub(crate) fn ip_packet_bytes(&self) -> usize {
        self.end - self.ip_at
    }

    pub(crate) fn has_good_checksums(&self) -> bool {
        let header = &self.bytes[self.ip_at..self.ip_at + self.ip_header_bytes()];
        let ip_is_good = self.family == Family::Ipv6 || sum(header) == 0xffff;
        let segment = &self.bytes[self.transport_at..self.end];
        let is_unsummed = !self.is_tcp && segment[6..8] == [0, 0];
        ip_is_good && !is_unsummed && sum(&[&self.pseudo_header(), segment].concat()) == 0xffff
    }

    /// A copy with both checksums corrected.
    pub(crate) fn mended(bytes: &[u8]) -> Option<Vec<u8>> {
        let wire = Wire::read(bytes)?;
        Some(wire.mend(bytes.to_vec()))
    }

    /// Corrects the checksums of `bytes`, which have this frame's layout.
    pub(crate) fn mend(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        if self.family == Family::Ipv4 {
            let header = self.ip_at..self.ip_at + self.ip_header_bytes();
            put16(&mut bytes, self.ip_at + 10, 0);
            let checksum = !sum(&bytes[header]);
            put16(&mut bytes, self.ip_at + 10, checksum);
        }
        let at = self.transport_at + if self.is_tcp { 16 } else { 6 };
        put16(&mut bytes, at, 0);
        let segment = [&self.pseudo_header(), &bytes[self.transport_at..self.end]].concat();
        let checksum = match !sum(&segment) {
            0 if !self.is_tcp => 0xffff,
            checksum => checksum,
        };
        put16(&mut bytes, at, checksum);
        bytes
    }

    fn ip_header_bytes(&self) -> usize {
        match self.family {
            Family::Ipv4 => usize::from(self.bytes[self.ip_at] & 15) * 4,
            Family::Ipv6 => self.transport_at - self.ip_at,
        }
    }

    /// Addresses, protocol and length. The sums of both families' pseudo-headers agree with it.
    fn pseudo_header(&self) -> Vec<u8> {
        let addresses = match self.family {
            Family::Ipv4 => self.ip_at + 12..self.ip_at + 20,
            Family::Ipv6 => self.ip_at + 8..self.ip_at + 40,
        };
        let len = u32::try_from(self.end - self.transport_at).unwrap();
        let protocol = if self.is_tcp { TCP } else { UDP };
        [&self.bytes[addresses], &len.to_be_bytes(), &[0, protocol]].concat()
    }
}

/// Family, protocol, true for a fragment, offset of the transport header, and end of the packet.
type Network = (Family, u8, bool, usize, usize);

fn ipv4(bytes: &[u8], at: usize) -> Option<Network> {
    let header_bytes = usize::from(bytes.get(at)? & 15) * 4;
    let end = at + usize::from(be16(bytes, at + 2)?);
    let is_fragment = be16(bytes, at + 6)? & 0x3fff != 0;
    (bytes[at] >> 4 == 4 && header_bytes >= 20 && at + header_bytes <= end).then_some(())?;
    Some((Family::Ipv4, *bytes.get(at + 9)?, is_fragment, at + header_bytes, end))
}

fn ipv6(bytes: &[u8], at: usize) -> Option<Network> {
    let end = at + 40 + usize::from(be16(bytes, at + 4)?);
    let (mut protocol, mut next_at) = (*bytes.get(at + 6)?, at + 40);
    while [0, 43, 60].contains(&protocol) {
        protocol = *bytes.get(next_at)?;
        next_at += (usize::from(*bytes.get(next_at + 1)?) + 1) * 8;
    }
    let is_fragment = protocol == 44;
    if is_fragment {
        protocol = *bytes.get(next_at)?;
        next_at += 8;
    }
    (bytes[at] >> 4 == 6 && next_at <= end).then_some(())?;
    Some((Family::Ipv6, protocol, is_fragment, next_at, end))
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    let [high, low] = bytes.get(at..at + 2)?.try_into().ok()?;
    Some(u16::from_be_bytes([high, low]))
}

pub(crate) fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

pub(crate) fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

/// RFC 1071, word by word; an odd byte is the upper half of a word.
pub(crate) fn sum(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap()
}
