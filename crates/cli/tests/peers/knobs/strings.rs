//! Valid and invalid strings for knobs: chosen ones, and random ones.

use forebay_engine::knobs::{Knob, Machine};
use forebay_sys::random::Random;

/// Number of random strings per knob.
const DRAWN: usize = 500;
const DRAWN_CHARS_MAX: u64 = 12;

const BLANKS: &[&[u8]] = &[
    b"",
    b"\n",
    b" ",
    b"\0",
    b"3\n",
    b"\n3",
    b"3\n\n",
    b"3 \n",
    b" 3",
    b"3 ",
    b"\t3",
    b"3\t",
    b"\r3",
    b"3\r",
    b"\x0b3",
    b"3\x0c",
    b"\xa03",
    b"3\xa0",
    b"3\0",
    b"\x003",
    b"3\n\0",
    b"3\0\n",
    b"3\x004",
    b"3\xc3\xa4",
];

const NUMBERS: &[&str] = &[
    "0 1 2 3 4 5 7 8 64 67 68 100 1000 1024 1025 1500 4096 8192 20000 65535 65536 16777217",
    "0x10 0X1F 0x 0xg 0x5dc 010 08 00 0b1 0o7 x5 5x 5, 5,7 1e3 5.0 5k five _5 0x1x 0-1 1-2",
    "+5 ++5 +-5 + +0x10 +010 -0 -1 -5 -8 --5 - -0x10 -2147483648 -2147483649 -18446744073709551615",
    "268435456 268435457 536870911 536870912 536870913 1073741823 1073741824 1073741825 2147483647",
    "2147483648 2147483649 4294967295 4294967296 4294967297 4294967363 4294967364 4294968796",
    "9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616",
    "18446744073709551616x 0xffffffffffffffff 0x10000000000000000 0xffffffff 0x80000000 -0x80000000",
    "00000000000000000064 000000000000000000064 0000000000000000000064 -0000000000000000008",
];

const SEVERAL_NUMBERS: &[&str] = &[
    "5 7", "5\n7", "7 8", "8 x", "4096 3", "5 -", "+ 5", "- 5", "1 500", "64\n\n3", "64 \t\n",
    "0x10\n",
];

const MASKS: &[&str] = &[
    "0 1 2 3 4 7 8 f F A a 10 80000000 ffffffff 7fffffff 03 0003 00000003 00000000 000000000",
    "000000003 100000003 123456789 0x3 0X3 0x00000003 x00000003 g00000003 g00000004 gg00000001",
    "-00000003 +00000003 0x000000003 -1 +3 g 3g g3 1.5 3; N all 3.",
    ",3 3, , ,, ,3, ,,,,,1 1,,5 1,0 1,00000000 0,0 0,3 00000000,00000003 3,g g,3 g,7 7,g 1,2,3,4,5",
    "00000000,00000000,00000000,0003fffe 8,00000000,00000000,00000000 f,0,0,0 10,0,0,0 1,0,0,0,0",
    "0-1 0-0 1-0 0- - 0-1:1/2 0-9999 a-b 0,0-1 0-99999999999999999999",
];

const SEVERAL_MASKS: &[&str] =
    &["3 4", "0 0", " , 3 , ", "3\n4", "1 \t,\x0b 1", "1 g", "g 1", "3,\n", "0-1\n", "1 00000003"];

/// Strings longer than a page, longer than a sysctl accepts, and at these limits.
fn long(core: &str) -> Vec<Vec<u8>> {
    let blanks = |len_bytes: usize| " ".repeat(len_bytes - core.len());
    let behind = [4094, 4095, 4096, 4097, 5000, (4 << 20) - 1, 4 << 20];
    let ahead = [4095, 4096, 4097, 5000];
    let cut = [4094, 4095, 4096];
    let digits = [format!("{}3", "0".repeat(40)), "3".repeat(40), format!("{}3", "0".repeat(4096))];
    let behind = behind.map(|len| format!("{core}{}", blanks(len)));
    let ahead = ahead.map(|len| format!("{}{core}", blanks(len)));
    let cut = cut.map(|len| format!("{core}{}x", blanks(len)));
    digits.into_iter().chain(behind).chain(ahead).chain(cut).map(String::into_bytes).collect()
}

/// All strings written to a knob.
pub(super) fn to_write(knob: Knob, machine: &Machine) -> Vec<Vec<u8>> {
    let (single, several, core, alphabet) = if knob.is_mask() {
        (MASKS, SEVERAL_MASKS, "1", &b"01137f,, \n\tgx\0+\x0b\xa0"[..])
    } else {
        (NUMBERS, SEVERAL_NUMBERS, "16384", &b"0012345678xXf+- \n\t\0\r,\xa0"[..])
    };
    let mut strings: Vec<Vec<u8>> = BLANKS.iter().map(|text| text.to_vec()).collect();
    strings.extend(single.iter().flat_map(|line| line.split(' ')).map(|text| text.into()));
    strings.extend(several.iter().map(|text| (*text).into()));
    strings.extend(long(core));
    let least = machine.netdev_budget_usecs_min();
    strings.extend([least - 1, least, least + 1].map(|usecs| usecs.to_string().into()));
    assert!(strings.len() >= 60, "{knob}: {}", strings.len());

    let mut random = Random::new(u64::try_from(strings.len()).unwrap());
    strings.extend((0..DRAWN).map(|_| draw(&mut random, alphabet)));
    strings
}

fn draw(random: &mut Random, alphabet: &[u8]) -> Vec<u8> {
    let len = random.between(1, DRAWN_CHARS_MAX);
    let last = u64::try_from(alphabet.len()).unwrap() - 1;
    let letter = |_| alphabet[usize::try_from(random.between(0, last)).unwrap()];
    (0..len).map(letter).collect()
}
