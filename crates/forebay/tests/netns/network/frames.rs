//! Hostile frames: a valid datagram with any of its fields changed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::checksum::Sum16BitWords;
use etherparse::{Ipv4Header, Ipv4Options, Ipv6FlowLabel, Ipv6Header};
use forebay_sys::random::Random;

use crate::network::addresses::{DESTINATIONS_V4, DESTINATIONS_V6, SOURCES_V4, SOURCES_V6};
use crate::network::{extensions, options};

pub(crate) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
pub(crate) const OWN_V4: [(Ipv4Addr, u8); 2] =
    [(Ipv4Addr::new(10, 9, 0, 1), 24), (Ipv4Addr::new(10, 10, 0, 5), 31)];
pub(crate) const OWN_V6: [(Ipv6Addr, u8); 2] = [
    (Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 1), 64),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), 64),
];
pub(crate) const JOINED_V4: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);
pub(crate) const JOINED_V6: Ipv6Addr = Ipv6Addr::new(0xff05, 0, 0, 0, 0, 0, 0, 0x1234);
/// Ports with sockets.
pub(crate) const PORTS: [u16; 3] = [53, 4433, 65_535];

pub(crate) const UDP: u8 = 17;
pub(crate) const ETHERNET_BYTES: usize = 14;

/// Next of the frames that a seed determines.
pub(crate) fn frame(random: &mut Random, number: u64) -> Vec<u8> {
    let is_ipv6 = chance(random, 50);
    let mut packet = if is_ipv6 { ipv6(random, number) } else { ipv4(random, number) };
    if chance(random, 15) {
        let padding = random.between(1, 46);
        packet.extend((0..padding).map(|_| byte(random)));
    } else if chance(random, 4) {
        let len = usize::try_from(random.below(packet.len() as u64 + 1)).unwrap();
        packet.truncate(len);
    }
    if chance(random, 8) {
        for _ in 0..random.between(1, 3) {
            let at = usize::try_from(random.below(packet.len().min(80) as u64)).unwrap();
            if let Some(byte) = packet.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        if !is_ipv6 && chance(random, 50) {
            sum_up_header(&mut packet);
        }
    }
    let mut frame = link(random, is_ipv6);
    frame.append(&mut packet);
    // A TAP accepts no shorter frames.
    frame.resize(frame.len().max(ETHERNET_BYTES), 0);
    frame
}

/// The link header.
fn link(random: &mut Random, is_ipv6: bool) -> Vec<u8> {
    let destination = match random.below(40) {
        0 => [0xff; 6],
        1 => [1, 0, 0x5e, 1, 2, 3],
        2 => [0x33, 0x33, 0, 0, 0, 1],
        3 => [2, 0, 0, 0, 0, 9],
        4 => [0; 6],
        _ => MAC,
    };
    let mut header = [destination, PEER_MAC].concat();
    if chance(random, 10) {
        for _ in 0..random.between(1, 4) {
            let kind = pick(random, &[0x8100u16, 0x8100, 0x8100, 0x88a8, 0x9100]);
            let tci = pick(random, &[0, 0, 0, 0, 0xe000, 0x1000, 5, 0x0fff, 0x2100]);
            header.extend([kind, tci].into_iter().flat_map(u16::to_be_bytes));
        }
    }
    let right = if is_ipv6 { 0x86dd } else { 0x0800 };
    let kind: u16 = match random.below(80) {
        0 => 0x0800,
        1 => 0x86dd,
        2 => 0x0806,
        3 => {
            // IP over SNAP.
            header.extend([0, 64, 0xaa, 0xaa, 3, 0, 0, 0]);
            right
        }
        4 => 64,
        5 => 0x88cc,
        _ => right,
    };
    header.extend(kind.to_be_bytes());
    header
}

fn ipv4(random: &mut Random, number: u64) -> Vec<u8> {
    let source = source_v4(random);
    let destination = destination_v4(random);
    let mut udp = udp(random, number, source.into(), destination.into());
    let options = if chance(random, 25) { options::random(random) } else { Vec::new() };
    let protocol = protocol(random);
    let payload_len = u16::try_from(udp.len()).unwrap();
    let mut header =
        Ipv4Header::new(payload_len, 64, protocol.into(), source.octets(), destination.octets())
            .unwrap();
    header.options = Ipv4Options::try_from(options.as_slice()).unwrap();
    header.total_len = payload_len + u16::try_from(20 + options.len()).unwrap();
    header.identification = u16::try_from(random.below(1 << 16)).unwrap();
    header.time_to_live = pick(random, &[64, 64, 255, 1, 0]);
    header.dont_fragment = chance(random, 50);
    let mut packet = Vec::new();
    header.write_raw(&mut packet).unwrap();
    match random.below(60) {
        0 => packet[0] = byte(random),
        1 => packet[0] = 0x40 | u8::try_from(random.below(16)).unwrap(),
        2 | 3 => shift_u16(random, &mut packet, 2),
        4 => packet[2..4].copy_from_slice(&pick(random, &[[0; 2], [0, 19], [0, 20], [0xff; 2]])),
        5 => packet[1] = byte(random),
        6 => packet[6] |= 0x80,
        _ => {}
    }
    if !chance(random, 5) {
        packet.append(&mut udp);
        sum_up_header(&mut packet);
    } else {
        packet[10] ^= 1 << random.below(8);
        packet.append(&mut udp);
    }
    packet
}

fn ipv6(random: &mut Random, number: u64) -> Vec<u8> {
    let source = source_v6(random);
    let destination = destination_v6(random);
    let mut udp = udp(random, number, source.into(), destination.into());
    let last = protocol(random);
    let (next, mut chain) =
        if chance(random, 50) { extensions::random(random, last) } else { (last, Vec::new()) };
    let header = Ipv6Header {
        traffic_class: byte(random),
        flow_label: Ipv6FlowLabel::try_new(u32::try_from(random.below(1 << 20)).unwrap()).unwrap(),
        payload_length: u16::try_from(chain.len() + udp.len()).unwrap(),
        next_header: next.into(),
        hop_limit: pick(random, &[64, 64, 255, 1, 0]),
        source: source.octets(),
        destination: destination.octets(),
    };
    let mut packet = header.to_bytes().to_vec();
    match random.below(60) {
        0 => packet[0] = byte(random),
        1 | 2 => shift_u16(random, &mut packet, 4),
        3..6 => packet[4..6].copy_from_slice(&pick(random, &[[0; 2], [0; 2], [0, 8], [0xff; 2]])),
        _ => {}
    }
    packet.append(&mut chain);
    packet.append(&mut udp);
    packet
}

/// A UDP header and its payload, which begins with the frame's number.
fn udp(random: &mut Random, number: u64, source: IpAddr, destination: IpAddr) -> Vec<u8> {
    let payload_len = match random.below(20) {
        0 => 0,
        1 => random.between(1, 7),
        2 => random.between(1300, 1400),
        3..6 => random.between(60, 80), // around the kernel's CHECKSUM_BREAK
        _ => random.between(8, 200),
    };
    let number = number.to_be_bytes().into_iter();
    let filled = number.chain(std::iter::repeat_with(|| byte(random)));
    let mut payload: Vec<_> = filled.take(usize::try_from(payload_len).unwrap()).collect();
    let source_port = pick(random, &[1000, 53, 0, 65_535, 7]);
    let port = match random.below(20) {
        0 => 0,
        1 => 9,
        _ => pick(random, &PORTS),
    };
    let mut len = u16::try_from(8 + payload_len).unwrap();
    match random.below(30) {
        0 => len = len.wrapping_add(u16::try_from(random.between(1, 4)).unwrap()),
        1..4 => len = len.wrapping_sub(u16::try_from(random.between(1, 9)).unwrap()),
        4 | 5 => len = pick(random, &[0, 0, 1, 7, 8, 0xffff]),
        _ => {}
    }
    let fields = [source_port, port, len, 0];
    let mut bytes: Vec<_> = fields.into_iter().flat_map(u16::to_be_bytes).collect();
    bytes.append(&mut payload);
    let checksum = match random.below(20) {
        0 | 1 => 0,
        2 => u16::try_from(random.below(1 << 16)).unwrap(),
        3 => !udp_checksum(&bytes, len, source, destination),
        _ => udp_checksum(&bytes, len, source, destination),
    };
    bytes[6..8].copy_from_slice(&checksum.to_be_bytes());
    if chance(random, 3) {
        let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
        bytes[at] ^= 1 << random.below(8);
    }
    bytes
}

/// Checksum of a datagram of length `len` as in its header; 0 means the whole datagram.
pub(crate) fn udp_checksum(bytes: &[u8], len: u16, source: IpAddr, destination: IpAddr) -> u16 {
    let covered = match usize::from(len) {
        0 => bytes,
        len => &bytes[..len.min(bytes.len())],
    };
    let sum = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            Sum16BitWords::new().add_4bytes(source.octets()).add_4bytes(destination.octets())
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            Sum16BitWords::new().add_16bytes(source.octets()).add_16bytes(destination.octets())
        }
        _ => unreachable!("of one family"),
    };
    let covered_len = u16::try_from(covered.len()).unwrap();
    let sum = sum.add_2bytes([0, UDP]).add_2bytes(covered_len.to_be_bytes()).add_slice(covered);
    match sum.ones_complement().to_be() {
        0 => u16::MAX,
        checksum => checksum,
    }
}

/// Corrects an IPv4 header's checksum, for the length that the header states.
pub(crate) fn sum_up_header(packet: &mut [u8]) {
    let Some(first) = packet.first() else { return };
    let header_len = usize::from(first & 0x0f) * 4;
    let Some(header) = packet.get_mut(..header_len).filter(|header| header.len() >= 20) else {
        return;
    };
    header[10..12].fill(0);
    let sum = Sum16BitWords::new().add_slice(header).ones_complement().to_be();
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}

fn protocol(random: &mut Random) -> u8 {
    match random.below(60) {
        0 => byte(random),
        1 => pick(random, &[0, 50, 51, 58, 59, 132, 136, 4, 41, 47, 255]),
        _ => UDP,
    }
}

fn source_v4(random: &mut Random) -> Ipv4Addr {
    if chance(random, 75) { [10, 9, 0, 2].into() } else { pick(random, SOURCES_V4).into() }
}

fn destination_v4(random: &mut Random) -> Ipv4Addr {
    if chance(random, 70) { OWN_V4[0].0 } else { pick(random, DESTINATIONS_V4).into() }
}

fn source_v6(random: &mut Random) -> Ipv6Addr {
    if chance(random, 75) { parsed("fd00:9::2") } else { parsed(pick(random, SOURCES_V6)) }
}

fn destination_v6(random: &mut Random) -> Ipv6Addr {
    if chance(random, 70) { OWN_V6[0].0 } else { parsed(pick(random, DESTINATIONS_V6)) }
}

pub(crate) fn parsed(address: &str) -> Ipv6Addr {
    address.parse().unwrap()
}

/// Adds a small positive or negative number to a big-endian field.
fn shift_u16(random: &mut Random, bytes: &mut [u8], at: usize) {
    let value = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let by = u16::try_from(random.between(1, 12)).unwrap();
    let value = if chance(random, 50) { value.wrapping_add(by) } else { value.wrapping_sub(by) };
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

pub(crate) fn chance(random: &mut Random, percent: u64) -> bool {
    random.below(100) < percent
}

pub(crate) fn pick<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[usize::try_from(random.below(of.len() as u64)).unwrap()]
}

pub(crate) fn byte(random: &mut Random) -> u8 {
    u8::try_from(random.below(256)).unwrap()
}
