//! Checksums by the device: none, verified, or the sum of all received bytes (LRO-1, LRO-2).

use etherparse::{Ipv6RawExtHeader, ip_number};
use forebay_rx::coalesce::MergeRefusal;
use forebay_rx::packet::Packet;
use forebay_rx::parse::{Checksum, DeviceSum, Headers, Transport, Verify, parse_into};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::coalescing::frames::{Segment, Wire, tcp};
use crate::coalescing::merged::{check_whole, shapes};
use crate::coalescing::refused::routed;
use crate::coalescing::rig::Rig;

/// All shapes, and IPv6 with extension headers that the segments of a flow may share.
pub(crate) fn shapes_and_more() -> Vec<Segment> {
    let options = || Some(Ipv6RawExtHeader::new_raw(ip_number::TCP, &[0; 6]).unwrap());
    let mut extended: Vec<_> = shapes().into_iter().filter(|shape| shape.is_v6).collect();
    for shape in &mut extended {
        shape.extensions.hop_by_hop_options = options();
        shape.extensions.destination_options = options();
    }
    // Maximum length of merged headers: 22 + 40 + 24 + 32 bytes.
    extended.retain(|shape| shape.options.len() < 40);
    let mut with_route = extended.clone();
    with_route.iter_mut().for_each(|shape| shape.extensions = routed(0));
    [shapes(), extended, with_route].concat()
}

/// Verdict on a frame's checksum by the device's sum alone.
fn judged(wire: &Wire) -> Checksum {
    let mut headers = Headers { link: wire.link, ..Headers::default() };
    let Wire { bytes, wire_len, device_sum, .. } = wire;
    parse_into(&mut headers, bytes, *wire_len, *device_sum, Verify::Nothing);
    headers.l4_checksum
}

#[test]
fn lro_2_device_sum_judges_tagged_padded_frames() {
    for shape in shapes_and_more() {
        for len in [1, 98, 99] {
            for padding in [&[][..], &[0; 5], &[7; 6], &[9; 5]] {
                let good = shape.clone().sized(len).wire().padded(padding);
                let last = good.bytes.len() - padding.len() - 1;
                let bad = good.clone().edit(last, &[good.bytes[last] ^ 1]);
                assert_eq!(judged(&good), Checksum::Unknown, "no sum, nobody knows");
                assert_eq!(judged(&good.summed()), Checksum::Good, "{shape:?} {len} {padding:?}");
                assert_eq!(judged(&bad.summed()), Checksum::Bad, "{shape:?} {len} {padding:?}");
            }
        }
    }
}

/// Verification, the kernel's name for the device's work, and the frame after that work.
type State = (Verify, &'static str, fn(Wire) -> Wire);

const STATES: [State; 3] = [
    (Verify::Checksums, "none", |wire| wire),
    (Verify::Nothing, "unnecessary", |wire| Wire { l4_checksum: Checksum::Good, ..wire }),
    (Verify::Nothing, "complete", Wire::summed),
];

#[test]
fn lro_1_device_checksum_states_merge_or_not() {
    for shape in shapes_and_more() {
        for (verify, name, by_device) in STATES {
            let mut rig = Rig::gro();
            rig.verify = verify;
            let wires: Vec<_> = shape.run(3).into_iter().map(by_device).collect();
            let out = rig.poll(&wires);
            let counts: Vec<_> = out.iter().map(Packet::segment_count).collect();
            assert_eq!(counts, [3], "{name}, {shape:?}");
            check_whole(&out[0]);
            assert_eq!(out[0].device_sum, None, "the first segment's is stale");
        }
    }
}

#[test]
fn lro_1_device_bad_frame_keeps_its_sum() {
    let bad = tcp().nth(1).wire();
    let last = bad.bytes.len() - 1;
    let bad = bad.clone().edit(last, &[!bad.bytes[last]]).summed();
    let mut rig = Rig::gro();
    rig.verify = Verify::Nothing;
    let out = rig.poll(&[tcp().wire().summed(), bad.clone()]);
    assert_eq!(rig.verdicts().0, [(MergeRefusal::L4Checksum, 1)]);
    assert_eq!((out[1].headers.l4_checksum, out[1].device_sum), (Checksum::Bad, bad.device_sum));
    assert!(out[0].device_sum.is_some(), "it was not merged either");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 2000 }))]

    #[test]
    fn lro_2_device_sum_equals_own_sum(
        shape in select(shapes_and_more()),
        len in 0usize..200,
        padding in proptest::collection::vec(any::<u8>(), 0..9),
        edits in proptest::collection::vec((any::<Index>(), any::<u8>()), 0..3),
        is_resummed: bool,
    ) {
        let mut wire = shape.sized(len).wire().padded(&padding);
        for (at, byte) in edits {
            let at = at.index(wire.bytes.len());
            wire = wire.edit(at, &[byte]);
        }
        if is_resummed {
            wire = wire.resummed();
        }
        let summed_up = wire.headers();
        // UDP without a checksum cannot be judged, which only verification reports as a fault.
        let field = usize::from(summed_up.transport_offset) + 6;
        let is_udp = summed_up.transport == Transport::Udp;
        let has_none = is_udp && wire.bytes[field..field + 2] == [0; 2];
        let expected = if has_none { Checksum::Unknown } else { summed_up.l4_checksum };
        let by_path = DeviceSum::of_frame(&wire.bytes, wire.link);
        let wire = wire.summed();
        prop_assert_eq!(by_path, wire.device_sum, "what a device would sum up");
        prop_assert_eq!(judged(&wire), expected);
    }
}
