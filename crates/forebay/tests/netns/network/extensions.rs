//! IPv6 extension headers, valid and invalid.

use forebay_sys::random::Random;

use crate::network::frames::{byte, chance, pick};

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;

/// A chain of headers before protocol `last`: the type of the first one, and the bytes of all.
pub(crate) fn random(random: &mut Random, last: u8) -> (u8, Vec<u8>) {
    let count = if chance(random, 3) { random.between(15, 20) } else { random.between(1, 4) };
    let mut kinds = Vec::new();
    for place in 0..count {
        kinds.push(match random.below(20) {
            0..4 if place == 0 => HOP_BY_HOP,
            0 if count < 15 => HOP_BY_HOP,
            4..7 => ROUTING,
            7..9 if !kinds.contains(&FRAGMENT) || chance(random, 30) => FRAGMENT,
            9 if count < 15 => pick(random, &[AUTHENTICATION, 50, 59, 135, 139, 140, 253]),
            _ => DESTINATION_OPTIONS,
        });
    }
    kinds.push(last);
    let mut chain = Vec::new();
    for pair in kinds.windows(2) {
        let offset = 40 + chain.len();
        let mut header = header(random, pair[0], offset, count > 4);
        header[0] = pair[1];
        chain.append(&mut header);
    }
    if chance(random, 5) {
        let at = usize::try_from(random.below(chain.len() as u64)).unwrap();
        let any = byte(random);
        chain[at] = pick(random, &[0, 1, 2, 3, 4, 0xff, any]);
    }
    (kinds[0], chain)
}

/// A header, except for its first byte, which the caller fills in.
fn header(random: &mut Random, kind: u8, offset: usize, is_short: bool) -> Vec<u8> {
    match kind {
        ROUTING => {
            let addresses = random.below(3);
            let mut bytes = vec![
                0,
                u8::try_from(addresses * 2).unwrap(),
                pick(random, &[0, 1, 2, 3, 4, 5, 43, 253]),
                pick(random, &[0, 0, 0, 0, 0, 1, 2, 255]),
            ];
            bytes.resize(8 + usize::try_from(addresses).unwrap() * 16, 0);
            bytes
        }
        // An atomic fragment. Its reserved bits are ignored.
        FRAGMENT => {
            vec![0, byte(random), 0, pick(random, &[0, 0, 2, 4, 6]), 1, 2, 3, byte(random)]
        }
        AUTHENTICATION => vec![0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1],
        HOP_BY_HOP | DESTINATION_OPTIONS if is_short => vec![0, 0, 1, 4, 0, 0, 0, 0],
        HOP_BY_HOP | DESTINATION_OPTIONS => options(random, kind == HOP_BY_HOP, offset),
        _ => vec![0; 8],
    }
}

/// A header with options, mostly padded correctly.
fn options(random: &mut Random, is_hop_by_hop: bool, offset: usize) -> Vec<u8> {
    let mut bytes = vec![0, 0];
    let count = if chance(random, 8) { random.between(7, 10) } else { random.below(4) };
    for _ in 0..count {
        if chance(random, 60) {
            // Some options require alignment.
            let to = pick(random, &[(4, 0), (4, 2), (8, 0), (2, 1)]);
            while (offset + bytes.len()) % to.0 != to.1 {
                bytes.push(0);
            }
        }
        let mut option = option(random, is_hop_by_hop);
        bytes.append(&mut option);
    }
    let missing = bytes.len().next_multiple_of(8) - bytes.len();
    match (missing, random.below(12)) {
        (_, 0) => bytes.resize(bytes.len() + missing, 0xee),
        (_, 1) => bytes.resize(bytes.len() + missing + 8, 0),
        (2.., 2) => {
            // Non-zero padding.
            bytes.extend([1, u8::try_from(missing - 2).unwrap()]);
            bytes.resize(bytes.len().next_multiple_of(8), 1);
        }
        (2.., 3..10) => {
            bytes.extend([1, u8::try_from(missing - 2).unwrap()]);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        _ => bytes.resize(bytes.len() + missing, 0),
    }
    bytes[1] = u8::try_from(bytes.len() / 8 - 1).unwrap();
    bytes
}

fn option(random: &mut Random, is_hop_by_hop: bool) -> Vec<u8> {
    let len = random.below(7);
    let known: &[u8] = if is_hop_by_hop { &[5, 5, 7, 49, 194, 201] } else { &[4, 5, 194, 201, 49] };
    let any = byte(random);
    let mut option = match random.below(10) {
        0 => vec![0],
        1 | 2 => {
            return [vec![1, u8::try_from(len).unwrap()], vec![0; len.try_into().unwrap()]]
                .concat();
        }
        3..6 => vec![pick(random, known), 0],
        6 => vec![pick(random, &[0x5e, 0x9e, 0xde, any]), 0],
        _ => vec![pick(random, &[0x1e, 0x3e, 0x22]), 0],
    };
    match *option.as_slice() {
        [0] => return option,
        [5, _] => option.extend([0, 0]),
        [194, _] => option.extend(pick(random, &[0u32, 100, 65_535, 65_536, 70_000]).to_be_bytes()),
        [49, _] => option.extend([0, 0, 0, 0, 0, 0]),
        _ => option.extend((0..len).map(|_| byte(random))),
    }
    option[1] = u8::try_from(option.len() - 2).unwrap();
    if chance(random, 10) {
        option.push(byte(random));
        option[1] += 1;
    } else if chance(random, 3) {
        option[1] = byte(random);
    }
    option
}
