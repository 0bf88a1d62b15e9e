//! Frames of one flow, and a device that cuts a merged packet by nothing but the header before it.

use etherparse::{IpHeaders, Ipv4Header, Ipv6Header, PacketBuilder, ip_number};
use forebay_rx::coalesce::gso::{GSO_ECN, GSO_NONE, GSO_UDP_L4, NEEDS_CSUM, VirtioNetHdr};

pub(super) const CWR: u8 = 0x80;
const PSH: u8 = 0x08;
const FIN: u8 = 0x01;
const ACK: u8 = 0x10;

/// Offset of TCP's flags over IPv4.
pub(super) const TCP_FLAGS: usize = 14 + 20 + 13;

pub(super) fn says_cwr(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0] && frame[23] == 6 && frame[TCP_FLAGS] & CWR != 0
}

pub(super) fn len(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap()
}

/// Frame of an unknown protocol, between two arbitrary stations.
pub(super) fn frame(len: usize) -> Vec<u8> {
    let mut bytes: Vec<_> = (0..len).map(|at| (at * 7 + at / 251).to_le_bytes()[0]).collect();
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]); // local experimental EtherType (IEEE 802)
    bytes
}

/// Frames that coalesce into one packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Flow {
    Tcp4,
    Tcp6,
    /// First segment with CWR: the sender has reduced its congestion window (RFC 3168).
    Tcp4Cwr,
    Udp4,
    Udp6,
}

pub(super) const FLOWS: [Flow; 5] = [Flow::Tcp4, Flow::Tcp6, Flow::Tcp4Cwr, Flow::Udp4, Flow::Udp6];

/// Builds frames of one flow, by etherparse: `size` bytes of payload each, fewer in the last one.
pub(super) fn segments(flow: Flow, count: u16, size: usize) -> Vec<Vec<u8>> {
    let segment = |number: u16| {
        let is_last = number + 1 == count;
        let is_v6 = matches!(flow, Flow::Tcp6 | Flow::Udp6);
        let ip = if is_v6 {
            let ends =
                Ipv6Header { source: [0x20; 16], destination: [0xfd; 16], ..Default::default() };
            IpHeaders::Ipv6(Ipv6Header { hop_limit: 64, ..ends }, Default::default())
        } else {
            let (from, to) = ([10, 0, 0, 1], [10, 0, 0, 2]);
            let mut header = Ipv4Header::new(0, 64, ip_number::UDP, from, to).unwrap();
            header.identification = number.wrapping_sub(2);
            header.dont_fragment = true;
            IpHeaders::Ipv4(header, Default::default())
        };
        let step = PacketBuilder::ethernet2([2; 6], [4; 6]).ip(ip);
        let len = if is_last { size / 3 + 1 } else { size };
        let payload: Vec<_> =
            (0..len).map(|at| (at * 5 + usize::from(number)).to_le_bytes()[0]).collect();
        let mut bytes = Vec::new();
        match flow {
            Flow::Udp4 | Flow::Udp6 => step.udp(1000, 443).write(&mut bytes, &payload),
            _ => {
                let ahead = u32::from(number) * u32::try_from(size).unwrap();
                let step = step.tcp(1000, 443, 0xffff_ff00_u32.wrapping_add(ahead), 512).ack(9);
                let step = if is_last { step.psh() } else { step };
                let is_cwr = flow == Flow::Tcp4Cwr && number == 0;
                if is_cwr { step.cwr() } else { step }.write(&mut bytes, &payload)
            }
        }
        .unwrap();
        bytes
    };
    (0..count).map(segment).collect()
}

/// Internet checksum of bytes, not folded.
fn sum(bytes: &[u8]) -> u32 {
    let words = bytes
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | word.get(1).map_or(0, |&low| u32::from(low)));
    words.sum()
}

fn folded(mut sum: u32) -> [u8; 2] {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap().to_be_bytes()
}

pub(super) fn add(bytes: &mut [u8], at: usize, ahead: u32) {
    let field: &mut [u8; 2] = bytes[at..].first_chunk_mut().unwrap();
    let sum = u32::from(u16::from_be_bytes(*field)).wrapping_add(ahead) & 0xffff;
    *field = u16::try_from(sum).unwrap().to_be_bytes();
}

/// Cuts a packet as a device does: by the header, and by section 5.1.6.2.
pub(super) fn cut_by_header(header: VirtioNetHdr, bytes: &[u8]) -> Vec<Vec<u8>> {
    if header.gso_type == GSO_NONE {
        assert_eq!(header, VirtioNetHdr::default());
        return vec![bytes.to_vec()];
    }
    assert_eq!(header.flags, NEEDS_CSUM);
    let start = usize::from(header.csum_start);
    let field = start + usize::from(header.csum_offset);
    let (head, payload) = bytes.split_at(header.hdr_len.into());
    let is_v4 = bytes[12..14] == [8, 0];
    let (is_udp, is_ecn) = (header.gso_type == GSO_UDP_L4, header.gso_type & GSO_ECN != 0);
    assert_eq!(is_ecn, !is_udp && head[start + 13] & CWR != 0);
    let parts: Vec<_> = payload.chunks(header.gso_size.into()).collect();
    let last = parts.len() - 1;
    let segments = parts.iter().enumerate().map(|(number, part)| {
        let mut segment = [head, part].concat();
        let shorter = (len(payload) - len(part)).wrapping_neg();
        add(&mut segment, if is_v4 { 16 } else { 18 }, shorter);
        if is_v4 {
            add(&mut segment, 18, u32::try_from(number).unwrap());
            segment[24..26].fill(0);
            let sum = folded(sum(&segment[14..34])).map(|byte| !byte);
            segment[24..26].copy_from_slice(&sum);
        }
        if is_udp {
            add(&mut segment, start + 4, shorter);
        } else {
            let sequence = u32::from_be_bytes(*segment[start + 4..].first_chunk().unwrap());
            let ahead = u32::try_from(number * usize::from(header.gso_size)).unwrap();
            segment[start + 4..start + 8]
                .copy_from_slice(&sequence.wrapping_add(ahead).to_be_bytes());
            segment[start + 13] &= if number < last { !(PSH | FIN) } else { !0 };
            segment[start + 13] &= if number > 0 { !CWR } else { !0 };
            assert_ne!(segment[start + 13] & ACK, 0);
        }
        // The field holds the pseudo header's sum, with the length of the whole packet.
        let before = u32::from(u16::from_be_bytes(*segment[field..].first_chunk().unwrap()));
        let pseudo =
            before + 0xffff - u32::from(u16::from_be_bytes(folded(len(payload) - len(part))));
        segment[field..field + 2].fill(0);
        let sum = folded(pseudo + sum(&segment[start..])).map(|byte| !byte);
        segment[field..field + 2].copy_from_slice(&sum);
        segment
    });
    segments.collect()
}
