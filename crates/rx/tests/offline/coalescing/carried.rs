//! `virtio_net_hdr` of the kernel or a device before a frame: completed checksums, and
//! contradictions.

use forebay_rx::coalesce::gso::{
    DATA_VALID, GSO_ECN, GSO_NONE, GSO_SEGMENTS_MAX, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4,
    InvalidVnetHeader, NEEDS_CSUM, VIRTIO_NET_HDR_BYTES, VirtioNetHdr,
};
use forebay_rx::coalesce::{cut, innermost};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{
    Checksum, DeviceSum, Headers, Network, Transport, Verify, complete_checksum, parse, parse_into,
    parse_packet,
};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::coalescing::device::shapes_and_more;
use crate::coalescing::frames::{AFTER_IPV4, IP, Segment, Wire, folded, tcp, udp, words};
use crate::coalescing::refused::routed;
use crate::coalescing::rig::{pool, received};
use crate::coalescing::tunnel_frames::{Kind, Tunnelled, outside, tunnelled};
use crate::coalescing::tunnels::everything;

const FIELD: usize = AFTER_IPV4 + 16;

/// All shapes that can be merged, and IPv4 with options.
pub(crate) fn all_shapes() -> Vec<Segment> {
    let mut optioned = vec![tcp(), udp()];
    for shape in &mut optioned {
        shape.ip_options = vec![7, 7, 4, 1, 2, 3, 4, 0];
    }
    [shapes_and_more(), optioned].concat()
}

/// Packet as a source fills it, summed while copied or not, without its `virtio_net_hdr`.
fn filled(wire: &Wire, verify: Verify) -> Packet {
    let bare = Wire { vnet: None, ..wire.clone() };
    let mut packet = received(&bare, Arrival(1), &mut pool(2));
    packet.fill(&wire.bytes, verify);
    packet
}

/// Verdict of parsing on the checksum without reading the payload.
fn judged(packet: &mut Packet) -> Checksum {
    let Packet { frame, headers, wire_len, device_sum, .. } = packet;
    parse_into(headers, frame.data(), *wire_len, *device_sum, Verify::Nothing);
    packet.headers.l4_checksum
}

#[test]
fn partial_checksum_verifies_without_payload() {
    for shape in all_shapes() {
        for len in [0, 1, 98, 99] {
            let good = shape.clone().sized(len).wire();
            for verify in [Verify::Nothing, Verify::Checksums] {
                let partial = good.clone().partial(0);
                let mut packet = filled(&partial, verify);
                partial.vnet.unwrap().carry_into(&mut packet).unwrap();
                assert_eq!(packet.frame.data(), good.bytes, "{shape:?} {len}");
                assert_eq!(packet.device_sum, DeviceSum::of_frame(&good.bytes, good.link));
                assert_eq!(judged(&mut packet), Checksum::Good, "{shape:?} {len}");
                assert_eq!((packet.gso_size(), packet.is_gso()), (0, false));
            }
        }
    }
}

#[test]
fn wrong_base_sum_is_found() {
    let partial = tcp().wire().partial(0).edit(FIELD, &[1, 2]);
    for verify in [Verify::Nothing, Verify::Checksums] {
        let mut packet = filled(&partial, verify);
        partial.vnet.unwrap().carry_into(&mut packet).unwrap();
        assert_eq!(judged(&mut packet), Checksum::Bad);
    }
}

#[test]
fn udp_zero_sum_becomes_ones() {
    for (shape, at, expected) in [(udp(), AFTER_IPV4 + 6, 0xff), (tcp(), FIELD, 0)] {
        // Last word that makes the sum all ones.
        let zeroed = shape.wire();
        let end = zeroed.bytes.len() - 2;
        let zeroed = zeroed.edit(end, &[0; 2]).resummed();
        let missing = [zeroed.bytes[at], zeroed.bytes[at + 1]];
        let partial = zeroed.edit(end, &missing).partial(0);
        let vnet = partial.vnet.unwrap();
        let mut packet = filled(&partial, Verify::Nothing);
        vnet.carry_into(&mut packet).unwrap();
        assert_eq!(packet.frame.data()[at..at + 2], [expected; 2]);
        assert_eq!(judged(&mut packet), Checksum::Good);
        let mut bytes = partial.bytes;
        complete_checksum(&mut bytes, vnet.csum_start, vnet.csum_offset).unwrap();
        assert_eq!(bytes[at..at + 2], [expected; 2]);
    }
}

#[test]
fn summing_needs_no_device_trust() {
    let vnet = VirtioNetHdr { flags: DATA_VALID, ..VirtioNetHdr::default() };
    let good = tcp().wire();
    let bad = good.clone().edit(FIELD, &[1, 2]);
    for (wire, verify, expected) in [
        (&good, Verify::Nothing, Checksum::Good),
        (&bad, Verify::Nothing, Checksum::Good),
        (&good, Verify::Checksums, Checksum::Good),
        (&bad, Verify::Checksums, Checksum::Bad),
    ] {
        let mut packet = filled(wire, verify);
        vnet.carry_into(&mut packet).unwrap();
        assert_eq!(judged(&mut packet), expected, "{verify:?}");
        assert_eq!(packet.frame.data(), wire.bytes);
    }
}

#[test]
fn truncated_or_other_sums_left_alone() {
    let partial = tcp().wire().partial(0);
    let snapped = partial.clone().snapped(90);
    let mut sctp = partial.clone();
    sctp.vnet.as_mut().unwrap().csum_offset = 8;
    for wire in [snapped, sctp] {
        let mut packet = filled(&wire, Verify::Nothing);
        wire.vnet.unwrap().carry_into(&mut packet).unwrap();
        assert_eq!(packet.frame.data(), wire.bytes);
        assert_eq!(judged(&mut packet), Checksum::Unknown);
    }
}

/// VXLAN packet with an inner packet to be segmented, as Linux passes it to a packet socket.
fn tunnel(inner: &Wire) -> Wire {
    let payload = [&[8, 0, 0, 0, 0, 0, 7, 0], inner.bytes.as_slice()].concat();
    let outer = udp().with(|it| it.payload = payload).wire();
    let before = u16::try_from(outer.bytes.len() - inner.bytes.len()).unwrap();
    let vnet = inner.vnet.map(|vnet| VirtioNetHdr {
        hdr_len: vnet.hdr_len + before,
        csum_start: vnet.csum_start + before,
        ..vnet
    });
    Wire { vnet, ..outer }
}

/// Tunnels that are not merged here: one packet, with complete checksums.
#[test]
fn unknown_tunnels_gso_stays_whole() {
    let field = AFTER_IPV4 + 6;
    let good = tcp().sized(3000).wire();
    let inner = good.clone().partial(1000);
    // No header of VXLAN.
    let other = |wire: Wire| wire.edit(AFTER_IPV4 + 8, &[1]).resummed();
    let expected = other(tunnel(&good));
    let partial = Wire { vnet: tunnel(&inner).vnet, ..other(tunnel(&inner)) };
    let outer_partial = Wire { vnet: partial.vnet, ..partial.clone().partial(0) };
    let unsummed = partial.edit(field, &[0; 2]);
    for (wire, expected, verdict) in [
        (outer_partial, expected.clone(), Checksum::Good),
        (unsummed, expected.edit(field, &[0; 2]), Checksum::Unknown),
    ] {
        for verify in [Verify::Nothing, Verify::Checksums] {
            let mut packet = filled(&wire, verify);
            wire.vnet.unwrap().carry_into(&mut packet).unwrap();
            assert_eq!(packet.frame.data(), expected.bytes);
            assert_eq!((judged(&mut packet), packet.gso_size()), (verdict, 0));
        }
    }
}

/// Packet of `count` segments in a tunnel as the kernel's GRO makes it: without the inner checksum, and with the pseudo
/// header's sum or none in UDP outside.
pub(crate) fn merged_by_kernel(tunnel: &Tunnelled, count: usize) -> Wire {
    let len = tunnel.inner.payload.len();
    let whole = tunnel.clone().with(|it| it.inner = it.inner.clone().sized(len * count));
    let usual =
        whole.clone().with(|it| it.outside.iter_mut().for_each(|it| it.to_port = None)).wire();
    let inner = innermost(&usual.bytes, usual.wire_len, &usual.headers()).unwrap();
    let whole = whole.wire();
    let (csum_offset, gso_type) = match (inner.transport, inner.network) {
        (Transport::Udp, _) => (6, GSO_UDP_L4),
        (_, Network::Ipv4) => (16, GSO_TCPV4),
        _ => (16, GSO_TCPV6),
    };
    let csum_start = inner.transport_offset;
    let sum = pseudo_header_sum(&whole.bytes, &inner).to_be_bytes();
    let vnet = VirtioNetHdr {
        flags: NEEDS_CSUM,
        gso_type,
        hdr_len: inner.payload_offset,
        gso_size: u16::try_from(len).unwrap(),
        csum_start,
        csum_offset,
    };
    Wire { vnet: Some(vnet), ..whole.edit(usize::from(csum_start + csum_offset), &sum) }
}

/// Sum of the pseudo header, as the kernel leaves it in the checksum field.
fn pseudo_header_sum(bytes: &[u8], headers: &Headers) -> u16 {
    let (at, len) = match headers.network {
        Network::Ipv4 => (12, 8),
        _ => (8, 32),
    };
    let addresses = &bytes[usize::from(headers.network_offset) + at..][..len];
    let segment_len = headers.payload_offset - headers.transport_offset + headers.payload_len;
    folded(words(addresses) + u64::from(headers.protocol) + u64::from(segment_len))
}

#[test]
fn lro_t8_kernels_tunnels_are_cut_exactly() {
    // A tunnel device may have any port, also that of another kind.
    let elsewhere = [5000, 4789, 8472, 4790, 6081].into_iter().flat_map(|port| {
        everything().into_iter().map(move |(name, tunnel)| {
            let tunnel = tunnel.with(|it| {
                it.outside.iter_mut().for_each(|outside| outside.to_port = Some(port));
            });
            (format!("{name} at port {port}"), tunnel)
        })
    });
    for (name, tunnel) in everything().into_iter().chain(elsewhere) {
        check_cut(&name, &tunnel, &merged_by_kernel(&tunnel, 5));
    }
}

/// Not every sender writes the pseudo header's sum.
#[test]
fn lro_t8_inner_sum_field_is_ignored() {
    for (name, tunnel) in everything() {
        let merged = merged_by_kernel(&tunnel, 5);
        let vnet = merged.vnet.unwrap();
        let wrong = merged.edit(usize::from(vnet.csum_start + vnet.csum_offset), &[1, 2]);
        check_cut(&name, &tunnel, &wrong);
    }
}

/// A packet of five segments has complete checksums, and is cut into them.
fn check_cut(name: &str, tunnel: &Tunnelled, merged: &Wire) {
    for verify in [Verify::Nothing, Verify::Checksums] {
        let mut pool = pool(40);
        let mut packet = filled(merged, verify);
        merged.vnet.unwrap().carry_into(&mut packet).unwrap();
        parse_packet(&mut packet, verify, &mut pool).unwrap();
        assert!(packet.is_gso() && packet.is_merged_tunnel(), "{name}");
        assert_eq!(packet.wire_count(), 5, "{name}");
        let whole = tunnel.clone();
        let len = whole.inner.payload.len();
        let whole = whole.with(|it| it.inner = it.inner.clone().sized(5 * len)).wire();
        assert_eq!(packet.frame.data(), whole.bytes, "{name}");
        let mut segments = Vec::new();
        cut(packet, &mut pool, &mut segments).unwrap();
        let ours: Vec<_> = segments.iter().map(|it| it.frame.data().to_vec()).collect();
        let sent: Vec<_> = tunnel.run(5).into_iter().map(|wire| wire.bytes).collect();
        assert_eq!(ours, sent, "{name}");
    }
}

/// Merged as a list, inside IP or GRE: no checksum is left to a device, and the inner one is that of the first segment.
#[test]
fn lro_t8_lists_in_tunnels_are_cut() {
    let mut lists = 0;
    for (name, tunnel) in everything() {
        let merged = merged_by_kernel(&tunnel, 5);
        let outer = parse(&merged.bytes, merged.wire_len, merged.link, Verify::Nothing);
        if outer.transport != Transport::Other {
            continue;
        }
        lists += 1;
        let vnet = merged.vnet.unwrap();
        let field = usize::from(vnet.csum_start + vnet.csum_offset);
        let listed = VirtioNetHdr { flags: 0, csum_start: 0, csum_offset: 0, ..vnet };
        let list = merged.edit(field, &tunnel.wire().bytes[field..][..2]);
        let mut pool = pool(40);
        let mut packet = filled(&list, Verify::Nothing);
        listed.carry_into(&mut packet).unwrap();
        parse_packet(&mut packet, Verify::Nothing, &mut pool).unwrap();
        assert!(packet.is_gso() && packet.is_merged_tunnel(), "{name}");
        let mut segments = Vec::new();
        cut(packet, &mut pool, &mut segments).unwrap();
        let ours: Vec<_> = segments.iter().map(|it| it.frame.data().to_vec()).collect();
        let sent: Vec<_> = tunnel.run(5).into_iter().map(|wire| wire.bytes).collect();
        assert_eq!(ours, sent, "{name}");
        let is_udp = tunnel.inner.is_udp;
        if is_udp {
            let lie = Wire { vnet: Some(listed), ..list.edit(field, &[1, 2]) };
            check_lie(&lie, InvalidVnetHeader::Headers, &name);
        }
    }
    assert!(lists > 30, "{lists}");
}

/// A field of the header that is not about the packet inside, or datagrams that could not be told apart.
#[test]
fn lro_t8_other_tunnels_stay_whole_or_drop() {
    let vxlan = |inner: Segment| tunnelled(outside(Kind::Vxlan { network: 7 }), inner);
    let twice =
        |inner| vxlan(inner).with(|it| it.outside = vec![outside(Kind::Ip), outside(Kind::Ip)]);
    let change = |wire: Wire, change: Change| {
        let mut vnet = wire.vnet.unwrap();
        change(&mut vnet);
        Wire { vnet: Some(vnet), ..wire }
    };
    let [tcp_in, udp_in] = [tcp(), udp()].map(|inner| merged_by_kernel(&vxlan(inner), 5));
    let [tcp_deep, udp_deep] = [tcp(), udp()].map(|inner| {
        let one = merged_by_kernel(&tunnelled(outside(Kind::Ip), inner.clone()), 5);
        let mut vnet = one.vnet.unwrap();
        vnet.csum_start += 20;
        let len = inner.payload.len() * 5;
        Wire { vnet: Some(vnet), ..twice(inner.sized(len)).wire() }
    });
    for (name, wire, expected) in [
        ("as it is", tcp_in.clone(), Ok(100)),
        ("of one segment", change(udp_in.clone(), |it| it.gso_size = 500), Ok(0)),
        ("of another version", change(tcp_in.clone(), |it| it.gso_type = GSO_TCPV6), Ok(0)),
        ("at another place", change(tcp_in, |it| it.csum_start -= 2), Ok(0)),
        ("in two tunnels", tcp_deep, Ok(0)),
        ("datagrams in two tunnels", udp_deep, Err(InvalidVnetHeader::Headers)),
        (
            "datagrams, as segments of another place",
            change(udp_in, |it| it.csum_start -= 2),
            Err(InvalidVnetHeader::Headers),
        ),
    ] {
        let mut packet = filled(&wire, Verify::Checksums);
        let carried = wire.vnet.unwrap().carry_into(&mut packet);
        assert_eq!(carried.map(|()| packet.gso_size()), expected, "{name}");
        assert_eq!(packet.is_merged_tunnel(), packet.gso_size() > 0, "{name}");
    }
}

/// Correct header for a packet of 30 segments over IPv4, without options or tags.
fn right(shape: &Segment) -> Wire {
    shape.clone().sized(3000).wire().partial(100)
}

type Change = fn(&mut VirtioNetHdr);

/// Changes of one field of a correct header, and the contradiction found.
const LIES: [(InvalidVnetHeader, Change); 17] = [
    (InvalidVnetHeader::Type, |it| it.gso_type = 3), // fragments of UDP
    (InvalidVnetHeader::Type, |it| it.gso_type = 2),
    // Segments inside a tunnel, which are not asked for.
    (InvalidVnetHeader::Type, |it| it.gso_type |= 0x20),
    (InvalidVnetHeader::Type, |it| it.gso_type |= 0x40),
    (InvalidVnetHeader::Type, |it| it.gso_type |= 0x60),
    (InvalidVnetHeader::Type, |it| it.gso_type = GSO_NONE | GSO_ECN),
    (InvalidVnetHeader::Type, |it| it.gso_type = GSO_UDP_L4 | GSO_ECN),
    (InvalidVnetHeader::Size, |it| it.gso_size = 0),
    (InvalidVnetHeader::HeaderLen, |it| it.hdr_len = 3055),
    (InvalidVnetHeader::Headers, |it| it.gso_type = GSO_TCPV6),
    (InvalidVnetHeader::Headers, |it| it.gso_type = GSO_UDP_L4),
    (InvalidVnetHeader::Checksum, |it| it.csum_start += 2),
    (InvalidVnetHeader::Checksum, |it| it.csum_offset = 6),
    (InvalidVnetHeader::Checksum, |it| (it.gso_type, it.csum_start) = (GSO_NONE, 3038)),
    (InvalidVnetHeader::Checksum, |it| (it.gso_type, it.csum_start) = (GSO_NONE, 32)),
    (InvalidVnetHeader::Checksum, |it| (it.gso_type, it.csum_start) = (GSO_NONE, 35)),
    (InvalidVnetHeader::Checksum, |it| (it.gso_type, it.csum_offset) = (GSO_NONE, 15)),
];

#[test]
fn promise_5_invalid_header_reported_by_frame() {
    let wire = right(&tcp());
    for (index, (lie, change)) in LIES.iter().enumerate() {
        let mut vnet = wire.vnet.unwrap();
        change(&mut vnet);
        check_lie(&Wire { vnet: Some(vnet), ..wire.clone() }, *lie, &format!("lie {index}"));
    }
}

fn check_lie(wire: &Wire, lie: InvalidVnetHeader, name: &str) {
    for verify in [Verify::Nothing, Verify::Checksums] {
        let mut packet = filled(wire, verify);
        let device_sum = packet.device_sum;
        assert_eq!(wire.vnet.unwrap().carry_into(&mut packet), Err(lie), "{name}");
        assert_eq!(packet.frame.data(), wire.bytes, "{name}");
        assert_eq!((packet.gso_size(), packet.device_sum), (0, device_sum), "{name}");
        assert_eq!(packet.headers.l4_checksum, Checksum::Unknown, "{name}");
    }
}

#[test]
fn promise_5_impossible_gso_frame_is_refused() {
    let without = |wire: Wire| {
        let flags = wire.vnet.unwrap().flags & !NEEDS_CSUM;
        Wire { vnet: wire.vnet.map(|vnet| VirtioNetHdr { flags, ..vnet }), ..wire }
    };
    let datagrams_on_the_way = Segment { is_udp: true, ..on_the_way() };
    let three_tags = [[0x81, 0, 0, 5], [0x81, 0, 0, 6], [0x81, 0, 0, 7]].concat();
    let [datagrams_behind_tags, _] = behind_of(&udp(), &[&three_tags[..], &[8, 0]].concat());
    let arp = right(&tcp()).edit(IP - 2, &[8, 6]);
    let mut early = arp.clone();
    early.vnet.as_mut().unwrap().csum_start -= 2;
    let tiny = tcp().sized(usize::from(GSO_SEGMENTS_MAX) + 1).wire().partial(1);
    let wire = right(&tcp());
    for (lie, name, wire) in [
        (InvalidVnetHeader::Snapped, "cut short", wire.clone().snapped(2000)),
        (InvalidVnetHeader::Checksum, "UDP that is complete", without(right(&udp()))),
        (InvalidVnetHeader::Headers, "padded", wire.clone().padded(&[0; 4])),
        (InvalidVnetHeader::Headers, "a fragment", wire.clone().edit(IP + 6, &[0x20, 0])),
        (InvalidVnetHeader::Headers, "an IP length of 0", wire.clone().edit(IP + 2, &[0; 2])),
        (InvalidVnetHeader::Headers, "a wrong IP checksum", wire.clone().edit(IP + 10, &[1, 2])),
        (InvalidVnetHeader::Headers, "neither IP nor a checksum", without(arp)),
        (InvalidVnetHeader::Headers, "not IP, a checksum without room for IP", early),
        (InvalidVnetHeader::Headers, "no transport", wire.clone().edit(IP + 9, &[4])),
        (InvalidVnetHeader::Headers, "segments left, no checksum", without(right(&on_the_way()))),
        (InvalidVnetHeader::Headers, "segments left of datagrams", right(&datagrams_on_the_way)),
        (InvalidVnetHeader::Headers, "datagrams behind three tags", datagrams_behind_tags),
        (InvalidVnetHeader::Size, "too many segments", tiny),
    ] {
        check_lie(&wire, lie, name);
    }
}

/// Segment behind a routing header that is not at its end.
fn on_the_way() -> Segment {
    tcp().with(|it| (it.is_v6, it.extensions) = (true, routed(1)))
}

#[test]
fn uncuttable_gso_packet_stays_whole() {
    let routed = [right(&on_the_way()), on_the_way().sized(3000).wire()];
    check_uncut("segments left", &routed);
    check_uncut("a tag that is none for all", &behind(&[0x91, 0, 0, 5, 8, 0]));
}

#[test]
fn gso_behind_other_links_stays_whole() {
    let len = u16::try_from(3000 + 40 + 2).unwrap().to_be_bytes();
    check_uncut("MPLS", &behind(&[0x88, 0x47, 0, 2, 1, 64]));
    let lcp_like = [[0x88, 0x64], [0x11, 0], [0, 9], len, [0, 0x23]].concat();
    check_uncut("PPPoE with another protocol", &behind(&lcp_like));
    let tags = [[0x81, 0, 0, 5], [0x81, 0, 0, 6], [0x81, 0, 0, 7]].concat();
    check_uncut("three tags", &behind(&[&tags[..], &[8, 0]].concat()));
}

/// Packet of 30 segments with `link` instead of its EtherType; its checksum is partial, then
/// complete.
fn behind(link: &[u8]) -> [Wire; 2] {
    behind_of(&tcp(), link)
}

fn behind_of(shape: &Segment, link: &[u8]) -> [Wire; 2] {
    [right(shape), shape.clone().sized(3000).wire()].map(|wire| {
        let bytes = [&wire.bytes[..IP - 2], link, &wire.bytes[IP..]].concat();
        let ahead = u16::try_from(link.len() - 2).unwrap();
        let vnet = wire.vnet.map(|vnet| VirtioNetHdr {
            hdr_len: vnet.hdr_len + ahead,
            csum_start: vnet.csum_start + ahead,
            ..vnet
        });
        Wire { vnet, ..Wire::new(bytes, wire.link) }
    })
}

/// One packet with a complete checksum.
fn check_uncut(name: &str, [partial, good]: &[Wire; 2]) {
    for verify in [Verify::Nothing, Verify::Checksums] {
        let mut packet = filled(partial, verify);
        assert_eq!(partial.vnet.unwrap().carry_into(&mut packet), Ok(()), "{name}");
        assert_eq!((packet.frame.data(), packet.gso_size()), (&*good.bytes, 0), "{name}");
        assert_eq!(packet.device_sum, DeviceSum::of_frame(&good.bytes, good.link), "{name}");
        let is_tcp = good.headers().transport == Transport::Tcp;
        let expected = if is_tcp { Checksum::Good } else { Checksum::Unknown };
        assert_eq!(judged(&mut packet), expected, "{name}");
    }
}

/// Datagrams that the kernel has merged as a list, whose checksum is that of the first one. No checksum is left to a device,
/// and only some devices' kernels say that they are verified.
#[test]
fn udp_list_is_cut_if_confirmed() {
    for shape in [udp(), udp().with(|it| it.is_v6 = true)] {
        let whole = right(&shape);
        let complete = shape.clone().sized(3000).wire();
        let first = shape.sized(100).wire();
        let field_at = usize::from(first.headers().transport_offset) + 6;
        let list = complete.clone().edit(field_at, &first.bytes[field_at..][..2]);
        for flags in [0, DATA_VALID] {
            let vnet = whole.vnet.unwrap();
            let listed = VirtioNetHdr { flags, csum_start: 0, csum_offset: 0, ..vnet };
            let mut packet = filled(&list, Verify::Checksums);
            listed.carry_into(&mut packet).unwrap();
            assert_eq!((packet.frame.data(), packet.gso_size()), (&*whole.bytes, 100));
            assert_eq!(judged(&mut packet), Checksum::Good);
            // As of a tunnel with a list in it: its length is the inner datagram's.
            for outer in [complete.clone(), complete.clone().edit(field_at, &[0; 2])] {
                let lie = Wire { vnet: Some(listed), ..outer };
                check_lie(&lie, InvalidVnetHeader::Checksum, "a tunnel's list");
            }
        }
    }
}

#[test]
fn gso_checksum_field_is_reset() {
    let wire = right(&tcp());
    let mut packet = filled(&wire.clone().edit(FIELD, &[1, 2]), Verify::Checksums);
    wire.vnet.unwrap().carry_into(&mut packet).unwrap();
    assert_eq!((packet.frame.data(), packet.gso_size()), (&*wire.bytes, 100));
}

#[test]
fn header_is_little_endian() {
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    let vnet = VirtioNetHdr::from_bytes(bytes);
    assert_eq!((vnet.flags, vnet.gso_type, vnet.hdr_len, vnet.csum_offset), (1, 2, 0x403, 0xa09));
    assert_eq!(vnet.to_bytes(), bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 4000 }))]

    /// For any header before any frame: either it is refused and the frame is unchanged, or at most
    /// the two bytes of a checksum have changed and the device's sum still matches the frame.
    #[test]
    fn promise_5_any_vnet_header_only_changes_checksum(
        shape in select(all_shapes()),
        len in 0usize..400,
        gso_size in 0u16..200,
        edits in proptest::collection::vec((any::<Index>(), any::<u8>()), 0..3),
        lies in proptest::collection::vec((0..VIRTIO_NET_HDR_BYTES, any::<u8>()), 0..3),
        is_summed: bool,
    ) {
        let mut wire = shape.sized(len).wire().partial(gso_size);
        let mut vnet = wire.vnet.unwrap().to_bytes();
        lies.into_iter().for_each(|(at, byte)| vnet[at] = byte);
        let vnet = VirtioNetHdr::from_bytes(vnet);
        for (at, byte) in edits {
            let at = at.index(wire.bytes.len());
            wire = wire.edit(at, &[byte]);
        }
        let verify = if is_summed { Verify::Checksums } else { Verify::Nothing };
        let mut packet = filled(&wire, verify);
        let verdict = vnet.carry_into(&mut packet);
        let changed = packet.frame.data().iter().zip(&wire.bytes).enumerate();
        let changed: Vec<_> = changed.filter(|(_, (a, b))| a != b).map(|(at, _)| at).collect();
        // A packet that counts as verified needs no place of its checksum.
        let (start, offset) = match (packet.is_gso(), wire.headers()) {
            (true, it) if it.transport == Transport::Udp => (it.transport_offset, 6),
            (true, it) => (it.transport_offset, 16),
            (false, _) => (vnet.csum_start, vnet.csum_offset),
        };
        let field = usize::from(start) + usize::from(offset);
        // A checksum behind the headers of a tunnel is completed, and so is the tunnel's.
        let outer = usize::from(wire.headers().transport_offset) + 6;
        let is_field = changed.iter().all(|at| [field, field + 1, outer, outer + 1].contains(at));
        prop_assert!(verdict.is_ok() && is_field || changed.is_empty(), "{changed:?}");
        if let Some(sum) = packet.device_sum {
            prop_assert_eq!(Some(sum), DeviceSum::of_frame(packet.frame.data(), wire.link));
        }
        if packet.is_gso() {
            prop_assert_eq!(packet.gso_size(), vnet.gso_size);
            prop_assert!([GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4].contains(&(vnet.gso_type & !GSO_ECN)));
        }
    }
}
