//! Cases that the Linux self-test lacks: padding, wraps, many flows, sizes, UDP, damage.

use crate::gro::case::{Case, Expected, case};
use crate::gro::damage::Damage;
use crate::gro::segment::{Family, Segment, Tags, Transport};

/// Minimum length of an Ethernet frame, without its checksum.
const LEAST_FRAME_BYTES: usize = 60;

/// Number of flows that Linux's LRO had descriptors for (LRO-9).
const DESCRIPTORS: usize = 8;

/// Payload bytes after headers with a timestamp option, at MTUs of 1500 and 9000.
const MTU_1500_BYTES: usize = 1448;
const MTU_9000_BYTES: usize = 8948;

/// Linux's `UDP_GRO_CNT_MAX`.
pub(crate) const UDP_SEGMENTS_MAX: usize = 64;

pub(crate) fn padding(first: &Segment) -> Vec<Case> {
    // With more headers, frames exceed the minimum length, so the padding must be longer.
    let is_small = (first.family, first.tags) == (Family::Ipv4, Tags::None);
    let least = if is_small { LEAST_FRAME_BYTES } else { 90 };
    let filled = |with| [first.at(0), first.at(100).len(1).padded_to(least, with)];
    let bare_ack = first.at(100).len(0).padded_to(least, 0);
    vec![
        case("padding_zero", filled(0), [&[101]]),
        case("padding_not_zero", filled(0xee), [&[101]]),
        case("padding_only", [first.at(0), bare_ack, first.at(100)], [&[100, 0, 100]]),
        case("padding_before", [first.at(0).padded_to(300, 0xee), first.at(100)], [&[200]]),
    ]
}

pub(crate) fn sequence(first: &Segment) -> Vec<Case> {
    let near_wrap = first.at(0).starting_at(u32::MAX - 149);
    let wrap = [0, 100, 200, 300].map(|offset| near_wrap.at(offset));
    vec![
        case("sequence_wraps", wrap, [&[400]]),
        case("sequence_is_double", [first.at(0), first.at(0)], [&[100, 100]]),
        case("sequence_overlaps", [first.at(0), first.at(99)], [&[100, 100]]),
        case("sequence_goes_back", [first.at(100), first.at(0)], [&[100, 100]]),
        case("fin_ends", [first.at(0), first.at(100).flags("FA"), first.at(200)], [&[200, 100]]),
        case("acks_differ", [first.at(0), first.at(100).ack(101)], [&[100, 100]]),
    ]
}

/// A pure acknowledgement between data segments: nothing may overtake it.
pub(crate) fn overtaking(first: &Segment) -> Vec<Case> {
    let ack = first.at(200).len(0).ack(101);
    let segments =
        [first.at(0), first.at(100), ack, first.at(200).ack(101), first.at(300).ack(101)];
    vec![case("ack_between", segments, [&[200, 0, 200]])]
}

pub(crate) fn flows(first: &Segment) -> Vec<Case> {
    let round = |offset| (1500..1516).map(move |port| first.at(offset).port(port));
    let segments: Vec<_> = [0, 100, 200].into_iter().flat_map(round).collect();
    vec![case("sixteen_flows", segments, [&[]]).expecting(Expected::Merged(DESCRIPTORS))]
}

/// Segments of all sizes fill a packet: a rule that counts segments would fail (LRO-6).
pub(crate) fn sizes(first: &Segment) -> Vec<Case> {
    let room = first.family.largest_payload();
    let row = |port: u16, len: usize, count: usize| -> Vec<Segment> {
        (0..count).map(|index| first.at(index * len).len(len).port(port)).collect()
    };
    let full = |len: usize| room / len * len;
    let small = row(1500, MTU_1500_BYTES, 50);
    let jumbo = row(1501, MTU_9000_BYTES, 8);
    // One large segment after each seventh small one, then the remaining small ones.
    let (behind, rest) = small.split_at(jumbo.len() * 6);
    let mut mixed = Vec::new();
    for (six, one) in behind.chunks(6).zip(&jumbo) {
        mixed.extend(six.iter().cloned().chain([one.clone()]));
    }
    mixed.extend(rest.iter().cloned());
    let jumbo_left = 8 * MTU_9000_BYTES - full(MTU_9000_BYTES);
    let small_left = 50 * MTU_1500_BYTES - full(MTU_1500_BYTES);
    let by_port = vec![
        (1500, vec![full(MTU_1500_BYTES), small_left]),
        (1501, vec![full(MTU_9000_BYTES), jumbo_left]),
    ];
    vec![
        case("jumbo", row(1500, MTU_9000_BYTES, 8), [&[full(MTU_9000_BYTES), jumbo_left]]),
        case("mixed_mtu", mixed, [&[]]).expecting(Expected::ByPort(by_port)),
    ]
}

pub(crate) fn udp(first: &Segment) -> Vec<Case> {
    let udp = first.at(0).transport(Transport::Udp);
    let row = |lens: &[usize]| -> Vec<Segment> {
        let mut offset = 0;
        let mut next = |len| {
            let segment = udp.at(offset).len(len);
            offset += len;
            segment
        };
        lens.iter().map(|len| next(*len)).collect()
    };
    let unsummed = [0, 100].map(|at| udp.at(at).transport(Transport::UdpUnsummed));
    let padded = [0, 10, 20].map(|at| udp.at(at).len(10).padded_to(90, 0));
    let bad = [udp.at(0), udp.at(100).bad_transport_checksum()];
    let most = [100; UDP_SEGMENTS_MAX + 2];
    vec![
        case("udp_equal", row(&[100; 3]), [&[300]]),
        case("udp_shorter_ends", row(&[100, 100, 50, 50]), [&[250, 50]]),
        case("udp_longer_begins", row(&[100, 200, 200]), [&[100, 400]]),
        case("udp_at_most_64", row(&most), [&[100 * UDP_SEGMENTS_MAX, 200]]),
        case("udp_unsummed", unsummed, [&[100, 100]]).alone(&[0, 1]),
        case("udp_padded", padded, [&[10, 10, 10]]).alone(&[0, 1, 2]),
        case("udp_csum", bad, [&[100, 100]]).alone(&[1]),
        case("udp_empty", row(&[0, 0]), [&[0, 0]]),
    ]
}

pub(crate) fn malformed(first: &Segment) -> Vec<Case> {
    let mut cases = vec![
        ("ip_length_beyond_frame", Transport::Tcp, Damage::IpLength),
        ("tcp_header_length_4", Transport::Tcp, Damage::TcpHeaderLength),
        ("frame_cut_short", Transport::Tcp, Damage::Cut),
        ("frame_cut_in_tcp_header", Transport::Tcp, Damage::CutInHeader),
        ("udp_length_beyond_packet", Transport::Udp, Damage::UdpLengthLong),
        ("udp_length_too_short", Transport::Udp, Damage::UdpLengthShort),
    ];
    if first.family == Family::Ipv4 {
        cases.push(("ihl_4", Transport::Tcp, Damage::HeaderLength));
    }
    let build = |(name, transport, damage)| {
        let segment = |offset| first.at(offset).transport(transport);
        let segments = [segment(0), segment(100).damaged(damage), segment(200)];
        case(name, segments, [&[]]).alone(&[1]).expecting(Expected::Lawful)
    };
    cases.into_iter().map(build).collect()
}
