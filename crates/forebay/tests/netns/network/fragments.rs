//! Fragmented datagrams, valid and invalid.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use forebay_sys::random::Random;

use crate::network::frames::{
    MAC, OWN_V4, OWN_V6, PEER_MAC, PORTS, UDP, byte, chance, pick, sum_up_header, udp_checksum,
};
use crate::network::options;

const PEER_V4: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const PEER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2);
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
const UNIT_BYTES: usize = 8;

/// A piece of a datagram's payload, and the fields of its fragment header.
#[derive(Clone, Debug)]
struct Piece {
    offset: usize,
    bytes: Vec<u8>,
    is_more: bool,
    id: u32,
    ecn: u8,
    protocol: u8,
    source: u8,
}

/// Frames of a few fragmented datagrams, interleaved.
pub(crate) fn frames(random: &mut Random, number: u32) -> Vec<Vec<u8>> {
    let mut trains: Vec<_> = (0..random.between(1, 3))
        .map(|id| train(random, number + u32::try_from(id).unwrap()))
        .collect();
    let mut frames = Vec::new();
    while !trains.is_empty() {
        let at = usize::try_from(random.below(trains.len() as u64)).unwrap();
        match trains[at].pop() {
            Some(frame) => frames.push(frame),
            None => drop(trains.swap_remove(at)),
        }
    }
    frames
}

/// Frames of one datagram; the last one is to be sent first.
fn train(random: &mut Random, number: u32) -> Vec<Vec<u8>> {
    let is_ipv6 = chance(random, 50);
    let whole = datagram(random, number, is_ipv6);
    let (first, whole) = if is_ipv6 && chance(random, 20) {
        // A header in the fragmentable part; one kind makes a fragment of a fragment.
        let kind = pick(random, &[DESTINATION_OPTIONS, DESTINATION_OPTIONS, FRAGMENT]);
        let header =
            if kind == FRAGMENT { [UDP, 0, 0, 0, 0, 0, 0, 1] } else { [UDP, 0, 1, 4, 0, 0, 0, 0] };
        (kind, [header.to_vec(), whole].concat())
    } else {
        (UDP, whole)
    };
    let mut pieces = cut(random, &whole, number, first);
    if chance(random, 60) {
        for _ in 0..random.between(1, 2) {
            spoil(random, &mut pieces);
        }
    }
    match random.below(4) {
        0 => {}
        1 => pieces.reverse(),
        _ => shuffle(random, &mut pieces),
    }
    let options_kind = random.below(8);
    let frames = pieces.into_iter().map(|piece| {
        let frame = if is_ipv6 { ipv6(random, &piece) } else { ipv4(random, &piece, options_kind) };
        let kind: u16 = if is_ipv6 { 0x86dd } else { 0x0800 };
        [MAC.as_slice(), &PEER_MAC, &kind.to_be_bytes(), &frame].concat()
    });
    frames.collect()
}

fn datagram(random: &mut Random, number: u32, is_ipv6: bool) -> Vec<u8> {
    let payload_len = pick(random, &[8, 9, 40, 41, 100, 1000, 1472, 1473, 3000, 5001]);
    let len = u16::try_from(8 + payload_len).unwrap();
    let mut bytes: Vec<_> = [1000, pick(random, &PORTS), len, 0]
        .into_iter()
        .flat_map(u16::to_be_bytes)
        .chain(number.to_be_bytes())
        .collect();
    bytes.resize_with(usize::from(len), || byte(random));
    let (source, destination): (IpAddr, IpAddr) = if is_ipv6 {
        (PEER_V6.into(), OWN_V6[0].0.into())
    } else {
        (PEER_V4.into(), OWN_V4[0].0.into())
    };
    let checksum = match random.below(20) {
        0 => 0,
        1 => 0x1234,
        _ => udp_checksum(&bytes, len, source, destination),
    };
    bytes[6..8].copy_from_slice(&checksum.to_be_bytes());
    if chance(random, 4) {
        // Append bytes beyond the length that the header states.
        bytes.extend([1; 5]);
    }
    bytes
}

fn cut(random: &mut Random, whole: &[u8], number: u32, protocol: u8) -> Vec<Piece> {
    let size = pick(random, &[8, 16, 24, 64, 504, 1000, 1480]);
    let size = size.max((whole.len() / 12).next_multiple_of(UNIT_BYTES));
    let ecn = pick(random, &[0, 0, 0, 1, 2, 3]);
    let offsets = (0..whole.len()).step_by(size);
    let piece = |offset: usize| {
        let bytes = whole[offset..whole.len().min(offset + size)].to_vec();
        let is_more = offset + size < whole.len();
        Piece { offset, bytes, is_more, id: number, ecn, protocol, source: 2 }
    };
    offsets.map(piece).collect()
}

fn spoil(random: &mut Random, pieces: &mut Vec<Piece>) {
    let at = usize::try_from(random.below(pieces.len().max(1) as u64)).unwrap();
    let Some(mut piece) = pieces.get(at).cloned() else { return };
    let last = pieces.len() - 1;
    match random.below(18) {
        0 => pieces.push(piece),
        1 => drop(pieces.remove(at)),
        2 => {
            piece.offset = piece.offset.saturating_sub(UNIT_BYTES);
            pieces.push(piece);
        }
        3 => {
            piece.bytes.extend([7; 16]);
            pieces.push(piece);
        }
        4 => {
            piece.bytes.truncate(UNIT_BYTES);
            piece.is_more = true;
            pieces.push(piece);
        }
        5 => pieces[at].bytes.push(9),
        6 => pieces[at].bytes.truncate(piece.bytes.len().saturating_sub(3)),
        7 => pieces[last].is_more = true,
        8 => pieces[at].is_more = false,
        9 => pieces[at].bytes.clear(),
        10 => {
            piece.offset = pick(random, &[0xfff8, 0xfff0, 65_528 - 1480, 64_000]);
            pieces.push(piece);
        }
        11 => {
            piece.bytes.clear();
            pieces.push(piece);
        }
        12 => pieces[at].ecn = pick(random, &[0, 1, 2, 3]),
        13 => pieces[at].protocol = pick(random, &[UDP, 6, 1, 59, 60]),
        14 => pieces[at].id ^= 0x8000,
        15 => pieces[at].source = 3,
        16 => {
            piece.bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
            pieces.push(piece);
        }
        _ => {
            let more: Vec<_> = pieces.clone();
            pieces.extend(more);
        }
    }
}

fn shuffle(random: &mut Random, pieces: &mut [Piece]) {
    for at in (1..pieces.len()).rev() {
        pieces.swap(at, usize::try_from(random.below(at as u64 + 1)).unwrap());
    }
}

fn ipv4(random: &mut Random, piece: &Piece, options_kind: u64) -> Vec<u8> {
    let options = match (options_kind, piece.offset) {
        (0, _) => options::random(random),
        (1, 0) => vec![1, 1, 1, 0],
        (2, 1..) => vec![148, 4, 0, 0],
        _ => Vec::new(),
    };
    let header_len = 20 + options.len();
    let field = u16::try_from(piece.offset / UNIT_BYTES).unwrap()
        | if piece.is_more { 0x2000 } else { 0 }
        | if chance(random, 5) { 0x4000 } else { 0 }
        | if chance(random, 5) { 0x8000 } else { 0 };
    let id = u16::try_from(piece.id & 0xffff).unwrap();
    let total_len = u16::try_from(header_len + piece.bytes.len()).unwrap();
    let mut packet = vec![0x40 | u8::try_from(header_len / 4).unwrap(), piece.ecn];
    packet.extend([total_len, id, field].into_iter().flat_map(u16::to_be_bytes));
    packet.extend([pick(random, &[64, 1]), piece.protocol, 0, 0, 10, 9, 0, piece.source]);
    packet.extend(OWN_V4[0].0.octets());
    packet.extend(options);
    sum_up_header(&mut packet);
    packet.extend(&piece.bytes);
    if chance(random, 5) {
        packet.extend([0xee; 6]);
    }
    packet
}

fn ipv6(random: &mut Random, piece: &Piece) -> Vec<u8> {
    let options = [FRAGMENT, 0, 1, 4, 0, 0, 0, 0];
    let (next, before): (u8, Vec<u8>) = match random.below(20) {
        0 => (0, options.to_vec()),
        1 => (60, options.to_vec()),
        2 => (43, vec![FRAGMENT, 0, 0, 0, 0, 0, 0, 0]),
        // A fragment header before the fragment header.
        3 if chance(random, 20) => (FRAGMENT, vec![FRAGMENT, 0, 0, 0, 0, 0, 0, 9]),
        _ => (FRAGMENT, Vec::new()),
    };
    let mut len = u16::try_from(before.len() + 8 + piece.bytes.len()).unwrap();
    if chance(random, 2) {
        len = len.wrapping_sub(pick(random, &[1, 3, 8]));
    }
    let mut packet = vec![0x60, piece.ecn << 4, 0, 0];
    packet.extend(len.to_be_bytes());
    packet.extend([next, pick(random, &[64, 1])]);
    let mut source = PEER_V6.octets();
    source[15] = piece.source;
    packet.extend(source);
    packet.extend(OWN_V6[0].0.octets());
    packet.extend(before);
    let reserved = pick(random, &[0, 0, 2, 6]);
    let field = u16::try_from(piece.offset).unwrap() | u16::from(piece.is_more) | reserved;
    packet.extend([piece.protocol, byte(random)]);
    packet.extend(field.to_be_bytes());
    packet.extend(piece.id.to_be_bytes());
    packet.extend(&piece.bytes);
    packet
}
