//! IPv4 options, valid and invalid.

use forebay_sys::random::Random;

use crate::network::frames::{byte, chance, pick};

/// Upper bound on option bytes in a header.
const BYTES_MAX: usize = 40;

/// Some options, padded to whole words.
pub(crate) fn random(random: &mut Random) -> Vec<u8> {
    let mut options = Vec::new();
    for _ in 0..random.between(1, 4) {
        let mut option = one(random);
        if chance(random, 20) && !option.is_empty() {
            let at = usize::try_from(random.below(option.len().min(4) as u64)).unwrap();
            let any = byte(random);
            option[at] = pick(random, &[0, 1, 2, 3, 4, 5, 8, 9, 12, 0x10, 0xf0, 0xff, any]);
        }
        options.append(&mut option);
    }
    options.truncate(BYTES_MAX);
    options.resize(options.len().next_multiple_of(4), pick(random, &[0, 0, 1, 0xff]));
    options
}

fn one(random: &mut Random) -> Vec<u8> {
    let room = usize::try_from(random.below(4)).unwrap() * 4;
    let mut filled = |head: &[u8], room: usize| {
        let mut option = head.to_vec();
        option.extend((0..room).map(|_| byte(random)));
        option[1] = u8::try_from(option.len()).unwrap();
        option
    };
    let mut route = filled(&[7, 0, 4], room);
    let mut times = filled(&[68, 0, 5, 0], room);
    let security = filled(&[130, 0], 9);
    let cipso = filled(&[134, 0, 0, 0, 0, 1], 4);
    let unknown = filled(&[94, 0], room);
    route[2] = pick(random, &[4, 4, 8, 12, 16, 5, 3, 255]);
    times[2] = pick(random, &[5, 5, 9, 13, 17, 6, 4, 255]);
    times[3] = pick(random, &[0, 1, 3, 2, 0xe0, 0xf0, 0xf1, 0xf3, 0x33]);
    match random.below(12) {
        0 => vec![1],
        1 => vec![0],
        2 | 3 => route,
        4..7 => times,
        7 => {
            route[0] = pick(random, &[131, 137]);
            route
        }
        8 => security,
        9 => cipso,
        10 => unknown,
        _ => vec![148, 4, 0, pick(random, &[0, 0, 1])],
    }
}
