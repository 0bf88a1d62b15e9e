//! Captures that are invalid or damaged: refused, or read as far as possible.

use forebay_device::MAX_RECORD_BYTES;
use forebay_device::pcap::MAX_BLOCK_BYTES;

use super::*;
use crate::captures::bytes::{
    Order, block, enhanced, gzip, interface, pcap, record, section, simple,
};

const LITTLE: Order = Order::Little;

/// A classic capture: one good record, then `tail`.
fn classic(tail: &[u8]) -> Vec<u8> {
    pcap(LITTLE, 1, &[record(LITTLE, 1, 4, b"good"), tail.to_vec()].concat())
}

/// A pcapng capture: one good packet, then `tail`, then another good packet.
fn pcapng(tail: &[u8]) -> Vec<u8> {
    let good = enhanced(LITTLE, 0, 1, 4, b"good");
    let start = [section(LITTLE), interface(LITTLE, 1, 0, &[])].concat();
    [&start, &good[..], tail, &good].concat()
}

const CLASSIC_TAIL: usize = 24 + 20;
const PCAPNG_TAIL: usize = 28 + 20 + 36;

/// Bytes of a good block with the four at `at` replaced.
fn with_u32(mut bytes: Vec<u8>, at: usize, value: u32) -> Vec<u8> {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    bytes
}

fn good_block() -> Vec<u8> {
    enhanced(LITTLE, 0, 1, 4, b"lost")
}

#[test]
fn non_capture_error_says_remedy() {
    let header = pcap(LITTLE, 1, &[]);
    for (file, problem) in [
        (&[][..], "the file is empty"),
        (b"time,src,dst\n1,10.0.0.1,10.0.0.2\n", "not a capture file (it begins with 74696d65)"),
        (b"\x1f\x8b\x08\xff and so on, packed", "the gzip file is damaged"),
        (&gzip(&gzip(&header)), "this is a gzip file once more"),
        (&gzip(b""), "the file is empty"),
        (&gzip(&header[..4]), "a capture's header has 24 bytes, the file 4"),
        (&header[..10], "a capture's header has 24 bytes, the file 10"),
        (&header[..23], "a capture's header has 24 bytes, the file 23"),
    ] {
        assert_refused(&read(file), problem, 0);
    }
}

#[test]
fn other_formats_are_told_by_name() {
    for (start, name, remedy) in [
        (&[0x28, 0xb5, 0x2f, 0xfd][..], "zstd", "zstd -d"),
        (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz", "xz -d"),
        (b"BZh9", "bzip2", "bunzip2"),
        (&[0x04, 0x22, 0x4d, 0x18], "lz4", "lz4 -d"),
        (b"PK\x03\x04", "zip", "unzip"),
        (b"snoop\0\0\0", "snoop", "editcap"),
        (b"GMBU", "Network Monitor", "editcap"),
    ] {
        let reading = read(&[start, &[7; 60]].concat());
        assert_refused(&reading, &format!("this is a {name} file"), 0);
        let help = reading.error.unwrap().help();
        assert!(help.contains(remedy), "{name}: {help}");
        let packed = read(&gzip(&[start, &[7; 60]].concat()));
        assert_refused(&packed, &format!("this is a {name} file"), 0);
    }
}

#[test]
fn unfollowable_header_ends_the_walk() {
    let claim = |bytes| with_u32(good_block(), 4, bytes);
    for (name, file, good, problem, offset) in [
        (
            "a record of 2 GB",
            classic(&with_u32(record(LITTLE, 0, 4, b"lost"), 8, 2 << 30)),
            1,
            "a record claims 2147483648 bytes",
            CLASSIC_TAIL,
        ),
        (
            "a record one too large",
            classic(&with_u32(record(LITTLE, 0, 4, b"lost"), 8, MAX_RECORD_BYTES + 1)),
            1,
            "a record claims 262145 bytes",
            CLASSIC_TAIL,
        ),
        ("a block of nothing", pcapng(&claim(0)), 1, "a block claims 0 bytes", PCAPNG_TAIL),
        ("a block too short", pcapng(&claim(8)), 1, "a block claims 8 bytes", PCAPNG_TAIL),
        (
            "a block of 2 GB",
            pcapng(&claim(2 << 30)),
            1,
            "a block claims 2147483648 bytes",
            PCAPNG_TAIL,
        ),
        (
            "a section of no byte order",
            pcapng(&with_u32(section(LITTLE), 8, 0x1234_5678)),
            1,
            "a section's byte-order magic is 78563412, not 4d3c2b1a or 1a2b3c4d",
            PCAPNG_TAIL,
        ),
    ] {
        let reading = read(&file);
        assert_eq!(reading.records.len(), good, "{name}");
        assert_refused(&reading, problem, offset);
        assert!(reading.asked_bytes < 1 << 20, "{name}: {} bytes", reading.asked_bytes);
    }
}

#[test]
fn truncated_gzip_is_read_until_cut() {
    let packed = gzip(&pcapng(&[]));
    for end in packed.len() - 12..packed.len() {
        let reading = read(&packed[..end]);
        let Some(first) = &reading.damage.first else { panic!("{end}: {reading:?}") };
        assert!(first.contains("ends before its data does"), "{first}");
        assert_eq!(reading.damage.records, 1);
        assert!(reading.records.len() <= 2);
    }
    let (seen, cut) = (gzip(&pcapng(&[])), &gzip(&[0; 99])[..15]);
    let reading = read(&[&seen, cut].concat());
    assert_eq!((reading.records.len(), reading.damage.records), (2, 1), "of the second member");
}

#[test]
fn damaged_gzip_reports_after_data() {
    let mut packed = gzip(&pcapng(&[]));
    let checksum = packed.len() - 8;
    packed[checksum] ^= 1;
    let reading = read(&packed);
    assert_eq!(reading.records.len(), 2);
    assert_refused(&reading, "the gzip file is damaged", pcapng(&[]).len());
    for tail in [&b"and a tail"[..], b"\0\0and a tail"] {
        let behind = [&gzip(&pcapng(&[])), tail].concat();
        assert_refused(&read(&behind), "the gzip file is damaged", pcapng(&[]).len());
    }
    let padded = read(&[&gzip(&pcapng(&[])), &[0; 512][..]].concat());
    assert_eq!((padded.records.len(), padded.damage.records), (2, 0), "gzip(1) ignores zeros");
}

/// A name, the file, the number of its good records, the message about the damage, and its offset.
type Damaged = (&'static str, Vec<u8>, usize, &'static str, usize);

#[test]
fn what_is_cut_off_is_counted() {
    let record_cut = record(LITTLE, 0, 4, b"lost");
    let beyond = with_u32(good_block(), 4, MAX_BLOCK_BYTES);
    assert_counted([
        ("a header cut off", classic(&record_cut[..15]), 1, "header is cut", CLASSIC_TAIL),
        ("a record cut off", classic(&record_cut[..19]), 1, "record is cut", CLASSIC_TAIL),
        (
            "a block header cut off",
            pcapng(&[])[..PCAPNG_TAIL + 11].to_vec(),
            1,
            "header is cut",
            PCAPNG_TAIL,
        ),
        (
            "a block cut off",
            pcapng(&[])[..PCAPNG_TAIL + 35].to_vec(),
            1,
            "block is cut",
            PCAPNG_TAIL,
        ),
        ("a block beyond the file", pcapng(&beyond), 1, "block is cut", PCAPNG_TAIL),
    ]);
}

#[test]
fn damage_counted_rest_read() {
    assert_counted([
        (
            "an uneven block whose lengths differ",
            pcapng(&with_u32(good_block(), 4, 35)),
            2,
            "a block is damaged",
            PCAPNG_TAIL,
        ),
        (
            "lengths that differ",
            pcapng(&with_u32(good_block(), 32, 40)),
            2,
            "a block is damaged",
            PCAPNG_TAIL,
        ),
        (
            "a packet longer than its block",
            pcapng(&with_u32(good_block(), 20, 5)),
            2,
            "damaged",
            PCAPNG_TAIL,
        ),
        (
            "a packet that claims all bytes there can be",
            pcapng(&with_u32(good_block(), 20, u32::MAX)),
            2,
            "damaged",
            PCAPNG_TAIL,
        ),
        (
            "an interface nobody described",
            pcapng(&with_u32(good_block(), 8, 1)),
            2,
            "an interface that was not described",
            PCAPNG_TAIL,
        ),
        (
            "an obsolete block of an interface nobody described",
            pcapng(&with_u32(with_u32(good_block(), 0, 2), 8, 1)),
            2,
            "an interface that was not described",
            PCAPNG_TAIL,
        ),
        (
            "an obsolete block that ends before its packet",
            [section(Order::Big), block(Order::Big, 2, &[0; 8]), pcapng(&[])].concat(),
            2,
            "a block is damaged",
            28,
        ),
        (
            "a packet before any interface",
            pcapng(
                &[section(LITTLE), simple(LITTLE, 4, b"lost"), interface(LITTLE, 1, 0, &[])]
                    .concat(),
            ),
            2,
            "before any interface",
            PCAPNG_TAIL + 28,
        ),
    ]);
}

fn assert_counted<const N: usize>(files: [Damaged; N]) {
    for (name, file, good, problem, offset) in files {
        let reading = read(&file);
        assert!(reading.error.is_none(), "{name}: {:?}", reading.error);
        assert!(reading.records.iter().all(|record| record.bytes == b"good"), "{name}");
        assert_eq!((reading.records.len(), reading.damage.records), (good, 1), "{name}");
        let first = reading.damage.first.unwrap();
        assert!(first.starts_with("test.pcap: ") && first.contains(problem), "{name}: {first}");
        assert!(first.ends_with(&format!(" at {offset}")), "{name}: {first}");
        assert!(reading.asked_bytes <= MAX_BLOCK_BYTES as usize, "{name}");
    }
}

#[test]
fn a_damaged_interface_keeps_its_number() {
    for order in [LITTLE, Order::Big] {
        let damaged = with_u32(interface(order, 1, 0, &[]), 16, 24);
        let file = [
            section(order),
            interface(order, 1, 0, &[]),
            damaged,
            interface(order, 101, 0, &[]),
            enhanced(order, 1, 0, 4, b"lost"),
            enhanced(order, 2, 0, 4, b"good"),
        ];
        let reading = read(&file.concat());
        let links: Vec<_> = reading.records.iter().map(|record| record.link).collect();
        assert_eq!(links, [None, Some(Link::Ip)]);
        assert_eq!(reading.damage.records, 1);
    }
}
