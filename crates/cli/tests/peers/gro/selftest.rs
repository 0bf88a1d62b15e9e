//! The cases of Linux's `tools/testing/selftests/net/gro.c`, under their names there, for both
//! families. Expected payload lengths are those of the self-test, without the final FIN.

use crate::gro::case::{Case, case};
use crate::gro::segment::{Extension, Family, Segment};

/// A timestamp option in the common layout, and the self-test's variants of it.
const TIMESTAMP: &[u8] = &[1, 1, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0];
const LATER: &[u8] = &[1, 1, 8, 10, 0, 0, 100, 0, 0, 0, 0, 0];
const NOP_BEHIND: &[u8] = &[1, 8, 10, 0, 0, 100, 0, 0, 0, 0, 0, 1];
const NOPS_BEHIND: &[u8] = &[8, 10, 0, 0, 100, 0, 0, 0, 0, 0, 1, 1];
/// An IPv4 timestamp option that fills all option space.
const IP_TIMESTAMP: &[u8] = &[
    0x44, 40, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

pub(crate) fn data(first: &Segment) -> Vec<Case> {
    let segment = |offset, len| first.at(offset).len(len);
    let burst = |offset| segment(offset, 100).at_ms(if offset < 200 { 0 } else { 100 });
    vec![
        case("data_same", [segment(0, 100), segment(100, 100)], [&[200]]),
        case("data_lrg_sml", [segment(0, 100), segment(100, 50)], [&[150]]),
        case("data_lrg_1byte", [segment(0, 100), segment(100, 1)], [&[101]]),
        case("data_sml_lrg", [segment(0, 50), segment(50, 100)], [&[50, 100]]),
        case("data_burst", [0, 100, 200, 300].map(burst), [&[200, 200]]),
    ]
}

pub(crate) fn ack(first: &Segment) -> Vec<Case> {
    let ack = |number| first.at(0).len(0).ack(number);
    vec![case("ack", [ack(100), ack(100), ack(101)], [&[0, 0, 0]])]
}

pub(crate) fn flags(first: &Segment) -> Vec<Case> {
    let flagged = |flags| first.at(0).len(0).flags(flags);
    let around = |middle| [first.at(0), first.at(100), middle, first.at(300), first.at(400)];
    let cwr = [
        first.at(0),
        first.at(100).flags("AC"),
        first.at(200).flags("AC"),
        first.at(300),
        first.at(400),
    ];
    vec![
        case("flags_psh", around(first.at(200).flags("PA")), [&[300, 200]]),
        case("flags_syn", around(flagged("SA")), [&[200, 0, 200]]),
        case("flags_rst", around(flagged("RA")), [&[200, 0, 200]]),
        case("flags_urg", around(flagged("AU")), [&[200, 0, 200]]),
        // Linux 6.18 never merges CWR. 7.x, with AccECN, merges two segments that both have CWR.
        case("flags_cwr", cwr, [&[100, 100, 100, 200], &[100, 200, 200]]),
    ]
}

pub(crate) fn tcp(first: &Segment) -> Vec<Case> {
    let options = |offset, options| first.at(offset).tcp_options(options);
    let timestamps = [
        options(0, TIMESTAMP),
        options(100, TIMESTAMP),
        options(200, LATER),
        options(300, NOP_BEHIND),
        options(400, NOPS_BEHIND),
    ];
    let absent = [options(0, TIMESTAMP), options(100, TIMESTAMP), options(200, &[0; 4])];
    vec![
        case("tcp_csum", [first.at(0), first.at(100).bad_transport_checksum()], [&[100, 100]])
            .alone(&[1]),
        case("tcp_seq", [first.at(0), first.at(101)], [&[100, 100]]),
        case("tcp_ts", timestamps, [&[200, 100, 100, 100]]),
        case("tcp_opt", absent, [&[200, 100]]),
    ]
}

pub(crate) fn ip(first: &Segment) -> Vec<Case> {
    // The TCP header of a first fragment may count as payload, and so may a fragment header.
    const FRAGMENT: [&[usize]; 4] = [&[100, 100], &[100, 120], &[120, 100], &[100, 128]];
    let class = |bits| [first.at(0).traffic_class(bits), first.at(100)];
    let mut cases = vec![
        case("ip_ecn", class(2), [&[100, 100]]),
        case("ip_tos", class(1), [&[100, 100]]),
        case("ip_ttl", [first.at(0), first.at(100).hop_limit(7)], [&[100, 100]]),
    ];
    let fragment = [first.at(0), first.at(100).fragment()];
    match first.family {
        Family::Ipv4 => {
            cases.push(case("ip_frag4", fragment, FRAGMENT).alone(&[1]));
            cases.extend(ipv4_only(first));
            cases.extend(ipv4_identification(first));
        }
        Family::Ipv6 => {
            cases.push(case("ip_frag6", fragment, FRAGMENT).alone(&[1]));
            cases.extend(ipv6_only(first));
        }
    }
    cases
}

fn ipv4_only(first: &Segment) -> Vec<Case> {
    let around = |middle| [first.at(0), middle, first.at(200)];
    let alone: [&[usize]; 1] = [&[100, 100, 100]];
    vec![
        case("ip_csum", around(first.at(100).bad_ip_checksum()), alone).alone(&[1]),
        case("ip_opt", around(first.at(100).ip_options(IP_TIMESTAMP)), alone).alone(&[1]),
    ]
}

fn ipv4_identification(first: &Segment) -> Vec<Case> {
    let numbered = |dont_fragment, numbers: &[u16]| -> Vec<_> {
        let offsets = (0..).step_by(100);
        let pairs = numbers.iter().zip(offsets);
        pairs.map(|(number, at)| first.at(at).identification(*number, dont_fragment)).collect()
    };
    vec![
        case("ip_id_df1_inc", numbered(true, &[8, 9]), [&[200]]),
        case("ip_id_df1_fixed", numbered(true, &[8, 8]), [&[200]]),
        case("ip_id_df0_inc", numbered(false, &[8, 9]), [&[200]]),
        // Merged from Linux 6.18 on, not before.
        case("ip_id_df0_fixed", numbered(false, &[8, 8]), [&[200], &[100, 100]]),
        case("ip_id_df1_inc_fixed", numbered(true, &[8, 9, 9]), [&[200, 100]]),
        case("ip_id_df1_fixed_inc", numbered(true, &[8, 8, 9]), [&[200, 100]]),
    ]
}

fn ipv6_only(first: &Segment) -> Vec<Case> {
    let extended = |offset, filling| first.at(offset).extension(Extension::Options(filling));
    vec![
        case("ip_v6ext_same", [extended(0, 0), extended(100, 0)], [&[200]]),
        case("ip_v6ext_diff", [extended(0, 0), extended(100, 0x11)], [&[100, 100]]),
        case("ip_flow_label", [first.at(0), first.at(100).flow_label(5)], [&[100, 100]]),
    ]
}

/// Segments of 4096 bytes fill a packet up to 65,535 bytes, and no further.
pub(crate) fn large(first: &Segment) -> Vec<Case> {
    let room = first.family.largest_payload();
    let segment_bytes = 4096 - (65_535 - room);
    let full = room / segment_bytes;
    let remainder = room % segment_bytes;
    let with_tail = |tail| -> Vec<_> {
        let segments = (0..full).map(|index| first.at(index * segment_bytes).len(segment_bytes));
        let tails = [full, full + 1].map(|index| first.at(index * segment_bytes).len(tail));
        segments.chain(tails).collect()
    };
    let over = remainder + 1;
    vec![
        case("large_max", with_tail(remainder), [&[room, remainder]]),
        case("large_rem", with_tail(over), [&[full * segment_bytes, over, over]]),
    ]
}

pub(crate) fn single(first: &Segment) -> Vec<Case> {
    vec![case("single", [first.at(0)], [&[100]])]
}

/// Flows A, B, C and D alternate, twice.
pub(crate) fn capacity(first: &Segment) -> Vec<Case> {
    let ports = 1500..1504;
    let round = |offset, flags| {
        ports.clone().map(move |port| first.at(offset).len(200).port(port).flags(flags))
    };
    let segments: Vec<_> = round(0, "A").chain(round(200, "PA")).collect();
    vec![case("capacity", segments, [&[400, 400, 400, 400]])]
}
