//! Merged packets, checked by two dissectors, and their segments.

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use forebay_rx::packet::Packet;
use forebay_rx::parse::{Link, Network, Transport, Verify, parse};

use crate::coalescing::frames::{FIN, PSH, Segment, Wire, folded, tcp, timestamps};
use crate::coalescing::rig::{Frame, Rig, SMALL_CHUNK_BYTES, taken_apart};

/// All shapes that can be merged, by link header.
pub(crate) fn shapes() -> Vec<Segment> {
    let links = [(Link::Ip, vec![]), (Link::Ethernet, vec![])].into_iter();
    let links = links.chain([(Link::Ethernet, vec![7]), (Link::Ethernet, vec![7, 0xffe])]);
    let transports = [(true, vec![]), (false, vec![])].into_iter();
    let transports =
        transports.chain([(false, timestamps(7, 9)), (false, [2u8, 4, 5, 180].repeat(10))]);
    let mut shapes = Vec::new();
    for (link, vlans) in links {
        for (is_udp, options) in transports.clone() {
            for is_v6 in [false, true] {
                let (vlans, options) = (vlans.clone(), options.clone());
                shapes.push(Segment { link, vlans, is_v6, is_udp, options, ..tcp() });
            }
        }
    }
    shapes
}

/// Bytes of a packet as one.
pub(crate) fn whole(packet: &Packet) -> Vec<u8> {
    packet.fragments().collect::<Vec<_>>().concat()
}

/// Checks that a merged packet is one that a sender could have sent.
pub(crate) fn check_whole(packet: &Packet) {
    let bytes = whole(packet);
    let len = u32::try_from(bytes.len()).unwrap();
    assert_eq!(packet.wire_len, len);
    let link = packet.headers.link;
    assert_eq!(parse(&bytes, len, link, Verify::Checksums), packet.headers, "parsed afresh");
    let sliced = match link {
        Link::Ethernet => SlicedPacket::from_ethernet(&bytes).unwrap(),
        Link::Ip => SlicedPacket::from_ip(&bytes).unwrap(),
    };
    let payload_bytes: Vec<_> =
        packet.segments().flat_map(|segment| segment.payload.iter().copied()).collect();
    let (source, destination) = match sliced.net.unwrap() {
        NetSlice::Ipv4(ip) => {
            let header = ip.header();
            assert_eq!(header.header_checksum(), header.to_header().calc_header_checksum());
            (header.source().to_vec(), header.destination().to_vec())
        }
        NetSlice::Ipv6(ip) => (ip.header().source().to_vec(), ip.header().destination().to_vec()),
        NetSlice::Arp(_) => unreachable!("none is merged"),
    };
    match sliced.transport.unwrap() {
        TransportSlice::Tcp(tcp) => {
            assert_eq!(tcp.payload(), payload_bytes);
            let sum = match packet.headers.network {
                Network::Ipv4 => tcp.calc_checksum_ipv4(
                    source.try_into().unwrap(),
                    destination.try_into().unwrap(),
                ),
                _ => tcp.calc_checksum_ipv6(
                    source.try_into().unwrap(),
                    destination.try_into().unwrap(),
                ),
            };
            assert_eq!(tcp.checksum(), sum.unwrap());
        }
        TransportSlice::Udp(udp) => {
            assert_eq!(udp.payload(), payload_bytes);
            assert_eq!(usize::from(udp.length()), 8 + payload_bytes.len());
            let (header, payload) = (udp.to_header(), udp.payload());
            let sum = match packet.headers.network {
                Network::Ipv4 => header.calc_checksum_ipv4_raw(
                    source.try_into().unwrap(),
                    destination.try_into().unwrap(),
                    payload,
                ),
                _ => header.calc_checksum_ipv6_raw(
                    source.try_into().unwrap(),
                    destination.try_into().unwrap(),
                    payload,
                ),
            };
            assert_eq!(udp.checksum(), sum.unwrap());
        }
        other => unreachable!("{other:?} is never merged"),
    }
    check_sum(&bytes, packet);
}

/// Checks the transport checksum against the sum of all bytes.
fn check_sum(bytes: &[u8], packet: &Packet) {
    let wire = Wire::new(bytes.to_vec(), packet.headers.link);
    let is_tcp = packet.headers.transport == Transport::Tcp;
    let at = usize::from(packet.headers.transport_offset) + if is_tcp { 16 } else { 6 };
    assert!(is_tcp || bytes[at..at + 2] != [0; 2], "there is one");
    assert_eq!(folded(wire.transport_sum(&packet.headers)), u16::MAX);
}

/// Run of five segments, the last one shorter and with these flags.
fn five(shape: &Segment, flags: u8, padding: &[u8]) -> Vec<Wire> {
    let mut segments: Vec<_> = (0..5).map(|number| shape.nth(number)).collect();
    let len = shape.payload.len();
    segments[4].payload.truncate(len.div_ceil(2));
    segments[4].flags |= flags;
    let wires = segments.iter().zip(1..).map(|(segment, at)| {
        segment.wire().padded(if shape.is_udp { &[] } else { padding }).recorded(at)
    });
    wires.collect()
}

fn check_five(packet: Packet, shape: &Segment, flags: u8, fed: &[Frame]) {
    assert_eq!(packet.segment_count(), 5);
    assert_eq!(packet.frame.truesize(), 5 * SMALL_CHUNK_BYTES, "what the buffers hold");
    assert_eq!((packet.arrival, packet.last_arrival()), (fed[0].arrival, fed[4].arrival));
    let len = shape.payload.len();
    assert_eq!(usize::from(packet.gso_size()), len);
    for ((number, segment), frame) in (0u32..).zip(packet.segments()).zip(fed) {
        assert_eq!((segment.arrival, segment.timestamp_ns), (frame.arrival, frame.timestamp_ns));
        assert_eq!(segment.offset as usize, number as usize * len);
        let sent = shape.nth(number).payload;
        let expected = if number == 4 { &sent[..len.div_ceil(2)] } else { &sent };
        assert_eq!(segment.payload, expected);
    }
    check_whole(&packet);
    if packet.headers.transport == Transport::Tcp {
        let view = packet.view();
        assert_eq!(view.tcp_sequence(), Some(shape.sequence));
        assert_eq!(view.tcp_flags(), Some(u16::from(shape.flags | flags)), "the last one's");
    }
    assert_eq!(taken_apart(vec![packet]), fed);
}

#[test]
fn promise_6_merged_packet_valid_and_separable() {
    for shape in shapes() {
        for len in [1, 2, 99, 100] {
            for flags in [0, PSH, FIN | PSH] {
                for padding in [&[][..], &[0; 6], &[0xa5; 7]] {
                    let shape = shape.clone().sized(len);
                    let mut rig = Rig::gro();
                    let mut out = rig.poll(&five(&shape, flags, padding));
                    assert_eq!(out.len(), 1, "{shape:?}, flags {flags}, {padding:?}");
                    check_five(out.remove(0), &shape, flags, &rig.fed);
                    assert_eq!(rig.pool.in_use(), 0);
                }
            }
        }
    }
}

/// Packet merged from two segments, the second of which ends with this word.
fn ending_with(shape: &Segment, word: u16, mut rig: Rig) -> Packet {
    let mut last = shape.nth(1);
    let len = last.payload.len();
    last.payload[len - 2..].copy_from_slice(&word.to_be_bytes());
    let mut out = rig.poll(&[shape.wire(), last.wire()]);
    assert_eq!(out.len(), 1, "{shape:?}");
    out.remove(0)
}

#[test]
fn promise_6_merged_zero_checksum_is_udps() {
    let field = |packet: &Packet, at: u16| {
        let at = usize::from(packet.headers.transport_offset + at);
        u16::from_be_bytes(packet.frame.data()[at..at + 2].try_into().unwrap())
    };
    for shape in shapes() {
        let shape = shape.sized(100);
        let (at, zero) = if shape.is_udp { (6, u16::MAX) } else { (16, 0) };
        // The payload can supply the word that makes the checksum zero.
        let lacks = field(&ending_with(&shape, 0, Rig::gro()), at);
        let packet = ending_with(&shape, lacks, Rig::gro());
        assert_eq!(field(&packet, at), zero, "{shape:?}");
        check_whole(&packet);
        // `lro` mode merges no options but timestamps.
        if !shape.is_udp && shape.options.len() <= 12 {
            let packet = ending_with(&shape, lacks, Rig::lro(1500));
            assert_eq!(field(&packet, at), zero, "{shape:?}");
            check_whole(&packet);
        }
    }
}

#[test]
fn promise_6_ipv4_ids_across_wrap() {
    for (ids, expected) in [
        ([0xfffe, 0xffff, 0, 1], vec![4]),
        ([7; 4], vec![4]),
        ([0; 4], vec![4]),
        ([7, 8, 8, 9], vec![2, 2]),
        ([7, 7, 8, 9], vec![2, 2]),
        ([7, 8, 7, 8], vec![2, 2]),
        ([7, 6, 5, 4], vec![1; 4]),
    ] {
        let mut rig = Rig::gro();
        let wires = (0..).zip(ids).map(|(number, id)| Segment { id, ..tcp().nth(number) }.wire());
        rig.feed(&wires.collect::<Vec<_>>());
        rig.end_poll(forebay_rx::arrive::PollStatus::Drained);
        let counts: Vec<_> = rig.out.iter().map(Packet::segment_count).collect();
        assert_eq!(counts, expected, "{ids:?}");
        assert_eq!(taken_apart(rig.out), rig.fed);
    }
}

#[test]
fn single_packet_is_own_segment() {
    let mut rig = Rig::gro();
    let out = rig.poll(&[tcp().wire().padded(&[1; 9]).recorded(5)]);
    let segments: Vec<_> = out[0].segments().collect();
    let [segment] = segments[..] else { panic!("{segments:?}") };
    assert_eq!((segment.arrival, segment.timestamp_ns, segment.offset), (rig.fed[0].arrival, 5, 0));
    assert_eq!(segment.payload, tcp().payload);
    assert_eq!(out[0].last_arrival(), segment.arrival);
    assert_eq!(whole(&out[0]), rig.fed[0].bytes);
}
