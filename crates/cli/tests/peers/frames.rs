//! Frames of every kind that the parser walks over, drawn from a seed. Their headers are valid,
//! except for checksums; some frames are cut by a snap length.

use etherparse::{
    EtherType, Ethernet2Header, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options, Ipv6FlowLabel,
    Ipv6Header, SingleVlanHeader, TcpHeader, UdpHeader, VlanId,
};
use forebay_sys::random::Random;

/// A frame as it is captured.
pub(crate) struct Frame {
    pub(crate) bytes: Vec<u8>,
    pub(crate) wire_len: u32,
}

const TAG_8021Q: u16 = 0x8100;
const TAG_8021AD: u16 = 0x88a8;
const LEAST_FRAME_BYTES: usize = 60;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

pub(crate) fn draw(random: &mut Random) -> Frame {
    let (ethertype, packet) = match random.below(10) {
        0 => (EtherType::ARP.0, arp(random)),
        1 => (0, llc(random)),
        2..6 => (EtherType::IPV4.0, ipv4(random)),
        _ => (EtherType::IPV6.0, ipv6(random)),
    };
    let mut bytes = ethernet(random, ethertype, &packet);
    if random.below(2) == 0 {
        bytes.resize(bytes.len().max(LEAST_FRAME_BYTES), 0);
    }
    let wire_len = u32::try_from(bytes.len()).unwrap();
    if random.below(3) == 0 {
        bytes.truncate(index(random, 1, bytes.len()));
    }
    Frame { bytes, wire_len }
}

/// An Ethernet frame. `ethertype` 0 stands for the length of an 802.3 frame.
fn ethernet(random: &mut Random, ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let tags: &[u16] = match random.below(6) {
        0 => &[TAG_8021Q],
        1 => &[TAG_8021AD, TAG_8021Q],
        2 => &[TAG_8021Q, TAG_8021Q],
        _ => &[],
    };
    let ethertype = if ethertype == 0 { len(packet) } else { ethertype };
    let mut kinds = tags.iter().copied().chain([ethertype]);
    let first = Ethernet2Header {
        source: [2, 0, 0, 0, 0, 1],
        destination: [2, 0, 0, 0, 0, 2],
        ether_type: EtherType(kinds.next().unwrap()),
    };
    let mut bytes = first.to_bytes().to_vec();
    for kind in kinds {
        let tag = SingleVlanHeader {
            vlan_id: VlanId::try_new(number(random, 1, 4094)).unwrap(),
            ether_type: EtherType(kind),
            ..SingleVlanHeader::default()
        };
        bytes.extend(tag.to_bytes());
    }
    bytes.extend(packet);
    bytes
}

fn arp(random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0, 1, 8, 0, 6, 4, 0, 1];
    bytes.extend(some_bytes(random, 20));
    bytes
}

/// Contents of 802.3 frames: spanning tree, or IPv4 over SNAP.
fn llc(random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0xaa, 0xaa, 3, 0, 0, 0, 8, 0];
    if random.below(2) == 0 {
        bytes = vec![0x42, 0x42, 3];
        bytes.extend(some_bytes(random, 35));
    } else {
        bytes.extend(ipv4(random));
    }
    bytes
}

fn ipv4(random: &mut Random) -> Vec<u8> {
    let [source, destination] = [(); 2].map(|()| address::<4>(random));
    let (protocol, segment) = transport(random, &Ends::V4(source, destination));
    let piece = piece(random, segment);
    let options = [&[][..], &[1; 4], &[7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]][index(random, 0, 2)];
    let mut header = Ipv4Header {
        time_to_live: number(random, 1, 255).to_le_bytes()[0],
        protocol: IpNumber(protocol),
        more_fragments: piece.more,
        fragment_offset: IpFragOffset::try_new(piece.offset / 8).unwrap(),
        identification: number(random, 0, u16::MAX),
        source,
        destination,
        options: Ipv4Options::try_from(options).unwrap(),
        ..Ipv4Header::default()
    };
    header.set_payload_len(piece.bytes.len()).unwrap();
    header.header_checksum = header.calc_header_checksum() ^ spoiling(random);
    [header.to_bytes().as_slice(), &piece.bytes].concat()
}

fn ipv6(random: &mut Random) -> Vec<u8> {
    let [source, mut destination] = [(); 2].map(|()| address::<16>(random));
    let header_destination = destination;
    let mut extensions: Vec<(u8, Vec<u8>)> = Vec::new();
    if random.below(4) == 0 {
        extensions.push((HOP_BY_HOP, padding_options(random)));
    }
    if random.below(4) == 0 {
        extensions.push((DESTINATION_OPTIONS, padding_options(random)));
    }
    if random.below(4) == 0 {
        let (body, routed_to) = routing(random);
        destination = routed_to.unwrap_or(destination);
        extensions.push((ROUTING, body));
    }
    let (protocol, mut payload) = transport(random, &Ends::V6(source, destination));
    if random.below(3) == 0 {
        let Piece { offset, more, bytes } = piece(random, payload);
        let [high, low] = (offset | u16::from(more)).to_be_bytes();
        extensions.push((FRAGMENT, [&[0, high, low][..], &some_bytes(random, 4)].concat()));
        payload = bytes;
    } else if random.below(4) == 0 {
        extensions.push((DESTINATION_OPTIONS, padding_options(random)));
    }
    let kinds: Vec<u8> = extensions.iter().map(|(kind, _)| *kind).chain([protocol]).collect();
    let mut chain = Vec::new();
    for ((_, body), next) in extensions.iter().zip(&kinds[1..]) {
        chain.push(*next);
        chain.extend(body);
    }
    chain.extend(payload);
    let header = Ipv6Header {
        traffic_class: 0,
        flow_label: Ipv6FlowLabel::ZERO,
        payload_length: len(&chain),
        next_header: IpNumber(kinds[0]),
        hop_limit: number(random, 1, 255).to_le_bytes()[0],
        source,
        destination: header_destination,
    };
    [&header.to_bytes()[..], &chain].concat()
}

/// Hop-by-hop or destination options without their first byte: one PadN option.
fn padding_options(random: &mut Random) -> Vec<u8> {
    let units = number(random, 0, 2).to_le_bytes()[0];
    let option = 4 + units * 8;
    [&[units, 1, option][..], &vec![0; option.into()]].concat()
}

/// A routing header without its first byte, and its final destination if segments are left.
fn routing(random: &mut Random) -> (Vec<u8>, Option<[u8; 16]>) {
    let kind = [0, 2, 4][index(random, 0, 2)];
    let count = if kind == 2 { 1 } else { index(random, 1, 3) };
    let hops: Vec<_> = (0..count).map(|_| address::<16>(random)).collect();
    let units = u8::try_from(count).unwrap();
    let left = if random.below(2) == 0 { units } else { 0 };
    let last_entry = if kind == 4 { units - 1 } else { 0 };
    let body = [&[units * 2, kind, left, last_entry, 0, 0, 0][..], hops.as_flattened()].concat();
    let last = if kind == 4 { hops.first() } else { hops.last() };
    (body, last.copied().filter(|_| left > 0))
}

/// Addresses of a pseudo-header.
enum Ends {
    V4([u8; 4], [u8; 4]),
    V6([u8; 16], [u8; 16]),
}

/// A protocol number and a segment of that protocol.
fn transport(random: &mut Random, ends: &Ends) -> (u8, Vec<u8>) {
    let payload_bytes = index(random, 0, 64);
    let payload = some_bytes(random, payload_bytes);
    match random.below(8) {
        0 => (if matches!(ends, Ends::V4(..)) { 1 } else { 58 }, icmp(random, &payload)),
        1 => (89, payload), // OSPF: a transport that is not walked into
        2..5 => (6, tcp(random, ends, &payload)),
        _ => (17, udp(random, ends, &payload)),
    }
}

/// An echo message, or another type.
fn icmp(random: &mut Random, payload: &[u8]) -> Vec<u8> {
    let kind = [0, 3, 8, 11, 128, 129, 1][index(random, 0, 6)];
    [&[kind, 0, 0x12, 0x34, 0, 0, 0, 0][..], payload].concat()
}

fn tcp(random: &mut Random, ends: &Ends, payload: &[u8]) -> Vec<u8> {
    let [source_port, destination_port] = ports(random);
    let sequence = u32::try_from(random.below(1 << 32)).unwrap();
    let mut header =
        TcpHeader::new(source_port, destination_port, sequence, number(random, 0, 999));
    let flags = random.bits();
    let flag = |bit: u32| flags >> bit & 1 == 1;
    (header.fin, header.syn, header.rst, header.psh) = (flag(0), flag(1), flag(2), flag(3));
    (header.ack, header.urg, header.ece, header.cwr) = (flag(4), flag(5), flag(6), flag(7));
    header.ns = flag(8);
    let options = [&[][..], &[2, 4, 5, 180], &[1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]];
    header.set_options_raw(options[index(random, 0, 2)]).unwrap();
    let checksum = match *ends {
        Ends::V4(from, to) => header.calc_checksum_ipv4_raw(from, to, payload).unwrap(),
        Ends::V6(from, to) => header.calc_checksum_ipv6_raw(from, to, payload).unwrap(),
    };
    header.checksum = checksum ^ spoiling(random);
    [header.to_bytes().as_slice(), payload].concat()
}

fn udp(random: &mut Random, ends: &Ends, payload: &[u8]) -> Vec<u8> {
    let [source_port, destination_port] = ports(random);
    let length = 8 + len(payload);
    let mut header = UdpHeader { source_port, destination_port, length, checksum: 0 };
    if random.below(4) > 0 {
        let checksum = match *ends {
            Ends::V4(from, to) => header.calc_checksum_ipv4_raw(from, to, payload).unwrap(),
            Ends::V6(from, to) => header.calc_checksum_ipv6_raw(from, to, payload).unwrap(),
        };
        header.checksum = checksum ^ spoiling(random);
    }
    [&header.to_bytes()[..], payload].concat()
}

/// A fragment, or a whole segment.
struct Piece {
    /// Offset in bytes, a multiple of eight.
    offset: u16,
    more: bool,
    bytes: Vec<u8>,
}

fn piece(random: &mut Random, segment: Vec<u8>) -> Piece {
    let units = segment.len().saturating_sub(1) / 8;
    let cut = index(random, 1, units.max(1)) * 8;
    match random.below(6) {
        0 if units > 0 => Piece { offset: 0, more: true, bytes: segment[..cut].to_vec() },
        1 if units > 0 => {
            Piece { offset: u16::try_from(cut).unwrap(), more: false, bytes: segment[cut..].into() }
        }
        _ => Piece { offset: 0, more: false, bytes: segment },
    }
}

/// Mask that falsifies one checksum in four. A single flipped bit never cancels out in the sum.
fn spoiling(random: &mut Random) -> u16 {
    if random.below(4) == 0 { 1 << random.below(16) } else { 0 }
}

/// Ports that no tunnel dissector listens on.
fn ports(random: &mut Random) -> [u16; 2] {
    [(); 2].map(|()| number(random, 50_000, 60_000))
}

fn address<const N: usize>(random: &mut Random) -> [u8; N] {
    some_bytes(random, N).try_into().unwrap()
}

fn some_bytes(random: &mut Random, count: usize) -> Vec<u8> {
    (0..count).map(|_| random.bits().to_le_bytes()[0]).collect()
}

fn number(random: &mut Random, first: u16, last: u16) -> u16 {
    u16::try_from(random.between(first.into(), last.into())).unwrap()
}

fn index(random: &mut Random, first: usize, last: usize) -> usize {
    usize::try_from(random.between(first as u64, last as u64)).unwrap()
}

fn len(bytes: &[u8]) -> u16 {
    u16::try_from(bytes.len()).unwrap()
}
