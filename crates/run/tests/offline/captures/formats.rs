//! Valid captures of every format that is read.

use std::collections::BTreeMap;
use std::time::Duration;

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::{DataLink, Endianness, TsResolution};

use super::*;
use crate::captures::bytes::{
    Order, SLL, SLL2, block, enhanced, interface, pcap, record, section, simple, tsresol,
};

const ORDERS: [Endianness; 2] = [Endianness::Little, Endianness::Big];

#[test]
fn classic_captures_any_order_and_precision() {
    for endianness in ORDERS {
        for (ts_resolution, tick_ns) in
            [(TsResolution::MicroSecond, 1000), (TsResolution::NanoSecond, 1)]
        {
            let header = PcapHeader { endianness, ts_resolution, ..PcapHeader::default() };
            let mut writer = PcapWriter::with_header(Vec::new(), header).unwrap();
            let time = Duration::new(1_700_000_000, 123_456_789);
            for (bytes, wire_len) in [(&[7; 60][..], 60), (&[8; 5], 9000), (&[], 0)] {
                writer.write_packet(&PcapPacket::new(time, wire_len, bytes)).unwrap();
            }
            let time_ns = 1_700_000_000 * SECOND_NS + 123_456_789 / tick_ns * tick_ns;
            let expected = [
                kept(&[7; 60], 60, time_ns, Link::Ethernet),
                kept(&[8; 5], 9000, time_ns, Link::Ethernet),
                kept(&[], 0, time_ns, Link::Ethernet),
            ];
            assert_eq!(read_whole(&writer.into_writer()), expected);
        }
    }
}

/// A record of the modified format has eight bytes more in its header.
#[test]
fn modified_captures_in_both_orders() {
    for order in [Order::Little, Order::Big] {
        let more = [&[0, 0, 0, 3][..], &[8, 0, 1, 0]].concat();
        let records = [1, 2].map(|seconds| {
            let mut record = record(order, seconds, 90, &[0x45; 41]);
            record.splice(16..16, more.clone());
            record
        });
        let mut file = pcap(order, 101, &records.concat());
        file[..4].copy_from_slice(&match order {
            Order::Little => 0xa1b2_cd34_u32.to_le_bytes(),
            Order::Big => 0xa1b2_cd34_u32.to_be_bytes(),
        });
        let expected = [1, 2].map(|seconds| kept(&[0x45; 41], 90, seconds * SECOND_NS, Link::Ip));
        assert_eq!(read_whole(&file), expected, "{order:?}");
        let cut = read(&file[..file.len() - 1]);
        assert_eq!((cut.records.len(), cut.damage.records), (1, 1), "{order:?}");
    }
}

#[test]
fn pcapng_read_in_any_byte_order() {
    for endianness in ORDERS {
        let mut writer = PcapNgWriter::with_endianness(Vec::new(), endianness).unwrap();
        let mut interface = InterfaceDescriptionBlock::new(DataLink::RAW, 0);
        interface.options.push(InterfaceDescriptionOption::IfTsResol(9));
        writer.write_pcapng_block(interface).unwrap();
        writer
            .write_pcapng_block(EnhancedPacketBlock {
                interface_id: 0,
                timestamp: Duration::from_nanos(5 * SECOND_NS + 7),
                original_len: 90,
                data: (&[0x45; 41][..]).into(),
                options: Vec::new(),
            })
            .unwrap();
        let expected = [kept(&[0x45; 41], 90, 5 * SECOND_NS + 7, Link::Ip)];
        assert_eq!(read_whole(&writer.into_inner()), expected);
    }
}

/// Wireshark writes the same times and lengths into both blocks.
#[test]
fn obsolete_packet_blocks_are_read() {
    for order in [Order::Little, Order::Big] {
        let link_types = [1, 101].map(|link| interface(order, link, 0, &[]));
        let [number, drops] = [1, 7].map(|field| order.u16(field));
        let obsolete =
            [&number[..], &drops, &enhanced(order, 1, 5, 90, &[0x45; 41])[12..]].concat();
        let packet = block(order, 2, &obsolete[..obsolete.len() - 4]);
        let file = [section(order), link_types.concat(), packet].concat();
        assert_eq!(read_whole(&file), [kept(&[0x45; 41], 90, 5_000, Link::Ip)], "{order:?}");
    }
}

/// Some writers leave the padding out of the length (Wireshark's issue 11324).
#[test]
fn uneven_block_lengths_are_rounded_up() {
    for order in [Order::Little, Order::Big] {
        let packet = enhanced(order, 0, 5, 90, b"uneven bytes.");
        let claimed = u32::try_from(packet.len()).unwrap() - 3;
        let claimed = match order {
            Order::Little => claimed.to_le_bytes(),
            Order::Big => claimed.to_be_bytes(),
        };
        let mut uneven = packet.clone();
        uneven[4..8].copy_from_slice(&claimed);
        let end = uneven.len() - 4;
        uneven[end..].copy_from_slice(&claimed);
        let file = [section(order), interface(order, 1, 0, &[]), uneven, packet].concat();
        let expected = kept(b"uneven bytes.", 90, 5_000, Link::Ethernet);
        assert_eq!(read_whole(&file), [expected.clone(), expected], "{order:?}");
    }
}

#[test]
fn link_types_known_by_name() {
    for (link_type, link) in [
        (1, Some(Link::Ethernet)),
        (12, Some(Link::Ip)),
        (14, Some(Link::Ip)),
        (101, Some(Link::Ip)),
        (228, Some(Link::Ip)),
        (229, Some(Link::Ip)),
        (0x2400_0001, Some(Link::Ethernet)), // with four bytes of frame check sequence
        (195, None),
        (147, None), // a private link type without a name
    ] {
        let file = pcap(Order::Little, link_type, &record(Order::Little, 0, 3, b"abc"));
        let reading = read(&file);
        match link {
            Some(link) => assert_eq!(reading.records, [kept(b"abc", 3, 0, link)]),
            None => {
                assert_refused(&reading, &format!("link type {link_type}"), 0);
                let help = reading.error.unwrap().help();
                assert!(help.contains("LINUX_SLL (113)") && help.contains("NULL (0)"), "{help}");
            }
        }
    }
}

/// Headers before an IPv4 packet, link type by link type.
fn before_ip() -> Vec<(u16, Vec<u8>)> {
    let mut all = vec![(113, SLL.to_vec()), (276, SLL2.to_vec())];
    for family in [2u32, 10, 24, 28, 30] {
        all.push((0, family.to_le_bytes().to_vec()));
        all.push((0, family.to_be_bytes().to_vec()));
        all.push((108, family.to_be_bytes().to_vec()));
        all.push((109, [&family.to_le_bytes()[..], &[7; 8]].concat()));
    }
    for (link_type, header) in [
        (9, &[0xff, 3, 0, 0x21][..]),
        (9, &[0, 0x21]),
        (9, &[0xff, 3, 0x21]),
        (50, &[0xff, 3, 0, 0x57]),
        (50, &[0x0f, 0, 8, 0]),
        (204, &[1, 0xff, 3, 0, 0x21]),
        (104, &[0x0f, 0, 8, 0]),
        (104, &[0x8f, 0, 0x86, 0xdd]),
        (205, &[0, 0x0f, 0, 8, 0]),
        (117, &[61, 2, 0, 0, 5]),
        (239, &[2, 0, 0, 7, 5, 0, 10, 0, b'x', 0, 0, 0, 16, 0, 1, 0]),
        (239, &[10, 0, 0, 7, 0, 16, 0, 1]),
    ] {
        let len = match header {
            [_, 2, ..] if link_type == 117 => 64,
            [_, _, _, _, 5, ..] if link_type == 239 => 28,
            _ if link_type == 239 => 20,
            _ => header.len(),
        };
        let mut header = header.to_vec();
        header.resize(len, 0);
        if link_type == 239 {
            // The attribute of the payload: itself and the 90 bytes of the packet.
            let attribute = if header[4] == 5 { [94, 0, 9, 0] } else { [0, 94, 0, 9] };
            header.extend(attribute);
        }
        all.push((link_type, header));
    }
    all
}

#[test]
fn bytes_before_ip_are_skipped() {
    for (link_type, header) in before_ip() {
        let bytes = [&header, &b"E, the rest."[..]].concat();
        let wire_len = u32::try_from(header.len()).unwrap() + 90;
        for order in [Order::Little, Order::Big] {
            let classic = pcap(order, link_type.into(), &record(order, 1, wire_len, &bytes));
            let expected = kept(b"E, the rest.", 90, SECOND_NS, Link::Ip);
            assert_eq!(read_whole(&classic), [expected], "{link_type}");
            let pcapng = [
                section(order),
                interface(order, link_type, 0, &[]),
                enhanced(order, 0, 0, wire_len, &bytes),
            ];
            let expected = kept(b"E, the rest.", 90, 0, Link::Ip);
            assert_eq!(read_whole(&pcapng.concat()), [expected], "{link_type}");
        }
    }
}

/// The kernel pads the attribute that is the packet to four bytes.
#[test]
fn padding_behind_nflog_is_cut() {
    let packet = b"E, the rest..";
    for header in [&[2, 0, 0, 7, 17, 0, 9, 0], &[2, 0, 0, 7, 0, 17, 0, 9]] {
        let whole = [&header[..], packet, &[0; 3]].concat();
        for captured in 8..=whole.len() {
            let bytes = &whole[..captured];
            let file = pcap(Order::Little, 239, &record(Order::Little, 0, 24, bytes));
            let expected = kept(&packet[..(captured - 8).min(13)], 13, 0, Link::Ip);
            assert_eq!(read_whole(&file), [expected], "{captured}");
        }
    }
}

#[test]
fn non_ip_cooked_gets_ethernet_header() {
    let order = Order::Little;
    let ethernet = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 9, 0x08, 0x06]].concat();
    for (link_type, header) in [(113, &with(&SLL, 14, 0x0806)), (276, &with(&SLL2, 0, 0x0806))] {
        let mut header = header.clone();
        header[if link_type == 113 { 1 } else { 10 }] = 1; // broadcast
        let bytes = [&header, &b"who has"[..]].concat();
        let wire_len = u32::try_from(header.len()).unwrap() + 28;
        let file = pcap(order, link_type, &record(order, 0, wire_len, &bytes));
        let expected = [&ethernet[..], b"who has"].concat();
        assert_eq!(read_whole(&file), [kept(&expected, 14 + 28, 0, Link::Ethernet)]);
    }
}

/// Each row has a header, the `EtherType` of the frame that it becomes, and how many bytes that replaces.
#[test]
fn other_payloads_get_ethernet_header() {
    for (link_type, header, ethertype, replaced) in [
        (51, &[0x11, 0, 0, 9, 0, 9][..], [0x88, 0x64], 0),
        (51, &[0x11, 0x09, 0, 0, 0, 9], [0x88, 0x63], 0),
        (104, &[0x0f, 0, 0x88, 0x47], [0x88, 0x47], 4),
        (9, &[0xff, 3, 0x02, 0x81], [0x88, 0x47], 4),
        (219, &[0, 2, 1, 64], [0x88, 0x47], 0),
    ] {
        let bytes = [header, b"the rest"].concat();
        let wire_len = u32::try_from(bytes.len()).unwrap() + 30;
        let file = pcap(Order::Big, link_type, &record(Order::Big, 0, wire_len, &bytes));
        let expected = [&[0; 12][..], &ethertype, &bytes[replaced..]].concat();
        let wire_len = u32::try_from(expected.len()).unwrap() + 30;
        assert_eq!(
            read_whole(&file),
            [kept(&expected, wire_len, 0, Link::Ethernet)],
            "{link_type}"
        );
    }
    for (link_type, bytes) in [
        (9, &[0xff, 3, 0xc0, 0x21, 1, 1][..]), // LCP
        (9, &[0xff]),
        (50, &[]),
        (104, &[0x0f, 0, 0x00, 0x04]),
        (109, &[2, 0, 0, 0, 0, 0, 0, 0]),
        (117, &[61]),
        (117, &[61, 7, 0, 0]),
        (239, &[2, 0, 0, 7, 0, 0, 9, 0]),
        (239, &[2, 0, 0, 7]),
        (239, &[0, 0, 0, 7, 0, 8, 0, 9, 1, 2, 3, 4]),
    ] {
        let file = pcap(Order::Big, link_type, &record(Order::Big, 0, 60, bytes));
        assert_refused(&read(&file), "of a protocol that is not read), the first", 24);
    }
}

const BSSID: [u8; 6] = [2, 0, 0, 0, 0, 1];
const FROM: [u8; 6] = [2, 0, 0, 0, 0, 2];
const TO: [u8; 6] = [2, 0, 0, 0, 0, 3];
const SNAP: [u8; 8] = [0xaa, 0xaa, 3, 0, 0, 0, 0x08, 0];

/// A data frame of 802.11 from `FROM` to `TO`, up to its payload.
fn wireless(control: [u8; 2], more: &[u8]) -> Vec<u8> {
    let addresses = match control[1] & 3 {
        0 => [TO, FROM, BSSID],
        1 => [BSSID, FROM, TO],
        2 => [TO, BSSID, FROM],
        _ => [BSSID, [9; 6], TO],
    };
    let fourth = if control[1] & 3 == 3 { &FROM[..] } else { &[] };
    [&control[..], &[0; 2], addresses.as_flattened(), &[0x10, 0], fourth, more].concat()
}

#[test]
fn wireless_data_frames_become_ethernet() {
    let ethernet = [&TO[..], &FROM, &[8, 0], b"E, the rest."].concat();
    for (name, link_type, header) in [
        ("within a cell", 105, wireless([0x08, 0], &[])),
        ("to the access point", 105, wireless([0x08, 1], &[])),
        ("from the access point", 105, wireless([0x08, 2], &[])),
        ("between access points", 105, wireless([0x08, 3], &[])),
        ("QoS", 105, wireless([0x88, 2], &[5, 0])),
        ("QoS and HT control", 105, wireless([0x88, 0x82], &[5, 0, 1, 2, 3, 4])),
        ("radiotap", 127, [radiotap(0), wireless([0x88, 1], &[5, 0])].concat()),
        ("radiotap, padded", 127, [radiotap(0x20), wireless([0x88, 1], &[5, 0, 0, 0])].concat()),
        (
            "radiotap, two bitmaps and a time",
            127,
            [&[0, 0, 25, 0, 3, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0][..], &[7; 8], &[0]]
                .into_iter()
                .map(<[u8]>::to_vec)
                .chain([wireless([0x08, 1], &[])])
                .collect::<Vec<_>>()
                .concat(),
        ),
    ] {
        let bytes = [&header, &SNAP[..], b"E, the rest."].concat();
        let wire_len = u32::try_from(bytes.len()).unwrap() + 40;
        let file = pcap(Order::Little, link_type, &record(Order::Little, 0, wire_len, &bytes));
        let expected = kept(&ethernet, 26 + 40, 0, Link::Ethernet);
        assert_eq!(read_whole(&file), [expected], "{name}");
        for cut in 0..header.len() + SNAP.len() {
            let file = pcap(Order::Little, link_type, &record(Order::Little, 0, 99, &bytes[..cut]));
            assert_refused(&read(&file), "of a protocol that is not read", 24);
        }
    }
    let llc = [&wireless([0x08, 1], &[])[..], &[0x42, 0x42, 3], &[1; 35]].concat();
    let file = pcap(Order::Little, 105, &record(Order::Little, 0, 62, &llc));
    let expected = [&TO[..], &FROM, &[0, 38], &llc[24..]].concat();
    assert_eq!(read_whole(&file), [kept(&expected, 52, 0, Link::Ethernet)], "without SNAP");
    for (name, header) in [
        ("a beacon", wireless([0x80, 0], &[])),
        ("an acknowledgement", wireless([0xd4, 0], &[])),
        ("no data", wireless([0x48, 1], &[])),
        ("encrypted", wireless([0x08, 0x41], &[])),
        ("one of several fragments", wireless([0x08, 0x05], &[])),
        ("several packets in one", wireless([0x88, 1], &[0x85, 0])),
    ] {
        let bytes = [&header, &SNAP[..], b"E, the rest."].concat();
        let file = pcap(Order::Little, 105, &record(Order::Little, 0, 99, &bytes));
        let reading = read(&file);
        assert!(reading.records.iter().all(|record| record.link.is_none()), "{name}");
        assert_refused(&reading, "of a protocol that is not read", 24);
    }
}

/// Radiotap's header with flags.
fn radiotap(flags: u8) -> Vec<u8> {
    vec![0, 0, 9, 0, 2, 0, 0, 0, flags]
}

#[test]
fn wireless_check_sequence_is_cut() {
    let snap = [&SNAP[..], b"E, the rest."].concat();
    let llc = [&[0x42, 0x42, 3][..], &[1; 35]].concat();
    for (payload, ethertype, frame) in [(&snap, [8, 0], &snap[8..]), (&llc, [0, 38], &llc[..])] {
        let header = [radiotap(0x10), wireless([0x08, 1], &[])].concat();
        let whole = [&header[..], payload, b"SUM!"].concat();
        let wire_len = u32::try_from(whole.len()).unwrap();
        for cut in 0..=6 {
            let bytes = &whole[..whole.len() - cut];
            let file = pcap(Order::Little, 127, &record(Order::Little, 0, wire_len, bytes));
            let captured = &frame[..frame.len() - cut.saturating_sub(4)];
            let expected = [&TO[..], &FROM, &ethertype, captured].concat();
            let frame_len = u32::try_from(14 + frame.len()).unwrap();
            assert_eq!(read_whole(&file), [kept(&expected, frame_len, 0, Link::Ethernet)], "{cut}");
        }
    }
    let failed = [&radiotap(0x50)[..], &wireless([0x08, 1], &[]), &snap, b"SUM?"].concat();
    let reading = read(&pcap(Order::Little, 127, &record(Order::Little, 0, 99, &failed)));
    assert_refused(&reading, "of a protocol that is not read", 24);
    let help = reading.error.unwrap().help();
    assert!(help.contains("encrypted") && help.contains("IP packets"), "{help}");
}

/// Linux leaves the header of RFC 1042 before two protocols, whose frames then have a length.
#[test]
fn appletalk_and_ipx_keep_snap() {
    for (organization, protocol, replaced) in
        [(0, 0x80f3_u16, 0), (0, 0x8137, 0), (0xf8, 0x80f3, 8), (0xf8, 0x8137, 8), (0, 0x809b, 8)]
    {
        let ethertype = protocol.to_be_bytes();
        let payload = [&[0xaa, 0xaa, 3, 0, 0, organization][..], &ethertype, b"text"].concat();
        let bytes = [wireless([0x08, 1], &[]), payload.clone()].concat();
        let wire_len = u32::try_from(bytes.len()).unwrap();
        let file = pcap(Order::Little, 105, &record(Order::Little, 0, wire_len, &bytes));
        let field = if replaced == 0 { [0, 12] } else { ethertype };
        let expected = [&TO[..], &FROM, &field, &payload[replaced..]].concat();
        let frame_len = u32::try_from(expected.len()).unwrap();
        let expected = kept(&expected, frame_len, 0, Link::Ethernet);
        assert_eq!(read_whole(&file), [expected], "{organization:#x} {protocol:#x}");
    }
}

fn with(header: &[u8], at: usize, protocol: u16) -> Vec<u8> {
    let mut header = header.to_vec();
    header[at..at + 2].copy_from_slice(&protocol.to_be_bytes());
    header
}

#[test]
fn unread_records_counted_by_link() {
    let order = Order::Big;
    let interfaces = [195, 113, 0].map(|link| interface(order, link, 0, &[]));
    let packet = |interface, bytes: &[u8]| enhanced(order, interface, 0, 60, bytes);
    let unread = [
        section(order),
        interfaces.concat(),
        packet(0, b"a beacon"),
        packet(1, &SLL[..15]),
        packet(2, &[7, 0, 0, 0]),
        packet(0, b"a beacon"),
    ];
    let reading = read(&unread.concat());
    assert_eq!(reading.records.iter().filter(|record| record.link.is_some()).count(), 0);
    assert_refused(
        &reading,
        "none of its records can be read (1 of link type 0 (NULL), of a protocol that is not read, \
         1 of link type 113 (LINUX_SLL), of a protocol that is not read, 2 of link type 195 \
         (IEEE802_15_4)), the first",
        28 + 3 * 20,
    );
    let mixed = [&unread.concat(), &packet(1, &SLL)[..]].concat();
    let reading = read(&mixed);
    assert!(reading.error.is_none(), "{:?}", reading.error);
    assert_eq!(reading.records.iter().filter(|record| record.link.is_some()).count(), 1);
    assert_eq!(reading.unread.iter().map(|(_, count)| count).sum::<u64>(), 4);
}

/// Each poll of a source counts them all.
#[test]
fn promise_3_unread_types_have_a_limit() {
    let order = Order::Little;
    let (first, types) = (300, 100_u32);
    let interfaces = (0..types).map(|number| {
        let link = u16::try_from(first + number).unwrap();
        [interface(order, link, 0, &[]), enhanced(order, number, 0, 4, b"lost")].concat()
    });
    let reading = read(&[section(order), interfaces.flatten().collect()].concat());
    assert_eq!(reading.records.len(), 100);
    let counts: BTreeMap<_, _> = reading.unread.into_iter().collect();
    assert_eq!((counts.len(), counts.values().sum::<u64>()), (65, 100), "{counts:?}");
    assert_eq!((counts["300"], counts["363"], counts["others"]), (1, 1, 36));
}

#[test]
fn interfaces_have_own_link_and_clock() {
    let (first, second) = (Order::Big, Order::Little);
    let offset = |order: Order| order.option(14, &order.u64(100));
    let file = [
        section(first),
        interface(first, 1, 0, &[]),
        interface(first, 101, 0, &[tsresol(first, 9)]),
        interface(first, 229, 0, &[tsresol(first, 0x80 | 10)]),
        interface(first, 228, 0, &[tsresol(first, 3), offset(first)]),
        interface(first, 105, 0, &[]),
        enhanced(first, 0, 1_500_000, 3, b"abc"),
        block(first, 0x0bad_cafe, &[0; 8]),
        enhanced(first, 1, 7, 4, b"abcd"),
        enhanced(first, 2, 1536, 5, b"abcde"),
        enhanced(first, 3, 2500, 6, b"abcdef"),
        enhanced(first, 4, 0, 1, b"x"),
        section(second),
        interface(second, 12, 7, &[tsresol(second, 0), offset(second)]),
        simple(second, 5, b"abcde"),
        simple(second, 20, b"abcdefg"),
        enhanced(second, 0, 3, 1500, b"abc"),
    ];
    let ms = SECOND_NS / 1000;
    let unread = Kept { link: None, ..kept(b"x", 1, 0, Link::Ip) };
    let expected = [
        kept(b"abc", 3, 1500 * ms, Link::Ethernet),
        kept(b"abcd", 4, 7, Link::Ip),
        kept(b"abcde", 5, 1500 * ms, Link::Ip),
        kept(b"abcdef", 6, 102_500 * ms, Link::Ip),
        unread,
        kept(b"abcde", 5, 0, Link::Ip),
        kept(b"abcdefg", 20, 0, Link::Ip),
        kept(b"abc", 1500, 103 * SECOND_NS, Link::Ip),
    ];
    assert_eq!(read_whole(&file.concat()), expected);
}

#[test]
fn captures_without_packets_are_whole() {
    assert_eq!(read_whole(&pcap(Order::Little, 1, &[])), []);
    assert_eq!(read_whole(&section(Order::Big)), []);
}

#[test]
fn wire_length_covers_captured_length() {
    let order = Order::Little;
    let file = pcap(order, 1, &record(order, 0, 2, b"abcd"));
    assert_eq!(read_whole(&file), [kept(b"abcd", 4, 0, Link::Ethernet)]);
}
