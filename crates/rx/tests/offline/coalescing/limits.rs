//! Limits of merging: bytes, counts, and the fields that may advance in `lro` mode.

use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::{CoalesceConfig, FlushReason, MergeRefusal};
use forebay_rx::packet::Packet;

use crate::coalescing::frames::{Segment, Wire, tcp, timestamps, udp};
use crate::coalescing::merged::{check_whole, whole};
use crate::coalescing::rig::Rig;

const IP_PACKET_BYTES_MAX: u32 = 65_535;

fn ip_len(packet: &Packet) -> u32 {
    packet.wire_len - u32::from(packet.headers.network_offset)
}

/// Number of segments of each packet that comes out.
fn counts_of(mut rig: Rig, wires: &[Wire]) -> Vec<u32> {
    let out = rig.poll(wires);
    assert!(out.iter().all(|packet| ip_len(packet) <= IP_PACKET_BYTES_MAX));
    out.iter().map(Packet::segment_count).collect()
}

/// Cases of the kernel with these names (`tools/testing/selftests/net/gro.c`).
#[test]
fn large_max_and_large_rem() {
    for (is_v6, ip_header_len) in [(false, 20), (true, 40)] {
        let payload_max = IP_PACKET_BYTES_MAX as usize - ip_header_len - 20;
        let full = tcp().sized(1000).with(|segment| segment.is_v6 = is_v6);
        let rest = payload_max - 65 * 1000;
        for (extra, expected) in [(0, vec![66]), (1, vec![65, 1])] {
            let mut wires = full.run(65);
            wires.push(full.nth(65).with(|last| last.payload.truncate(rest + extra)).wire());
            let mut rig = Rig::gro();
            let out = rig.poll(&wires);
            let counts: Vec<_> = out.iter().map(Packet::segment_count).collect();
            assert_eq!(counts, expected);
            out.iter().filter(|packet| packet.segment_count() > 1).for_each(check_whole);
            let largest = out.iter().map(ip_len).max().unwrap();
            assert_eq!(largest == IP_PACKET_BYTES_MAX, extra == 0);
            assert_eq!(
                rig.verdicts().0,
                if extra == 0 { vec![] } else { vec![(MergeRefusal::Size, 1)] }
            );
        }
    }
}

#[test]
fn promise_3_segments_are_counted() {
    assert_eq!(counts_of(Rig::gro(), &tcp().sized(1).run(1025)), [512, 512, 1]);
    assert_eq!(counts_of(Rig::lro(1500), &tcp().sized(1).run(1025)), [512, 512, 1]);
    assert_eq!(counts_of(Rig::gro(), &udp().sized(1).run(129)), [64, 64, 1]);
    assert_eq!(counts_of(Rig::gro(), &udp().sized(1400).run(47)), [46, 1]);
    assert_eq!(counts_of(Rig::gro(), &tcp().sized(65_495).run(2)), [1, 1]);
}

/// Number of segments of each packet, for IP packets of `sender` bytes.
fn filled(mtu: u32, sender: usize) -> Vec<u32> {
    let full = tcp().sized(sender - 40);
    counts_of(Rig::lro(mtu), &full.run(90))
}

#[test]
fn lro_6_small_segments_fill_large_packets() {
    let (same, mixed) = (filled(1500, 1500), filled(9000, 1500));
    assert!(same[0] >= 43, "{same:?}");
    assert!(100 * mixed[0] >= 99 * same[0], "{mixed:?} against {same:?}");
    assert!(filled(1500, 576)[0] >= 43);
}

#[test]
fn lro_7_room_left_follows_mtu() {
    let jumbo = tcp().sized(9000 - 40).run(7);
    // Segments of 9000 bytes cannot arrive at an MTU of 1500: a packet that is still held shows the
    // MTU for which room was left.
    for (before, after) in [(1500, 9000), (9000, 1500)] {
        let mut rig = Rig::lro(before);
        for mtu in [before, after] {
            let config = CoalesceConfig { mtu, ..*rig.coalescer.config() };
            rig.coalescer.set_config(config, &mut rig.out);
            rig.feed(&jumbo);
            let expected: &[u32] = if mtu == 9000 { &[7] } else { &[] };
            assert_eq!(rig.counts(), expected, "an MTU of {mtu}");
            rig.end_poll(PollStatus::Drained);
            rig.out.clear();
        }
        assert_eq!(rig.verdicts().0, [], "nothing was too long");
        assert!(rig.verdicts().1.contains(&(FlushReason::Size, 1)));
    }
}

/// Segments on which acknowledgement, window and timestamps advance; the acknowledgement wraps.
fn advancing() -> Vec<Segment> {
    let next = |number: u32| Segment {
        acknowledgement: u32::MAX.wrapping_add(number),
        window: if number == 1 { 7 } else { 600 },
        options: timestamps(0x7fff_ffff + number, 3 + number),
        id: 9,
        ..tcp().nth(number)
    };
    (0..3).map(next).collect()
}

#[test]
fn lro_8_newest_ack_window_timestamps_are_kept() {
    let segments = advancing();
    let wires: Vec<_> = segments.iter().map(Segment::wire).collect();
    let mut rig = Rig::lro(1500);
    let out = rig.poll(&wires);
    let [packet] = &out[..] else { panic!("{out:?}") };
    check_whole(packet);
    let newest = Segment {
        payload: segments.iter().flat_map(|segment| segment.payload.clone()).collect(),
        id: segments[0].id,
        sequence: segments[0].sequence,
        ..segments[2].clone()
    };
    assert_eq!(whole(packet), newest.wire().bytes, "one segment of all");
    // In `gro` mode none of these fields may advance.
    assert_eq!(counts_of(Rig::gro(), &wires), [1, 1, 1]);
    // In `lro` mode none of them may go back.
    let wires: Vec<_> = wires.into_iter().rev().collect();
    assert_eq!(counts_of(Rig::lro(1500), &wires), [1, 1, 1]);
}

#[test]
fn lro_8_lro_mode_merges_only_tcp() {
    let mut rig = Rig::lro(1500);
    rig.poll(&[udp().wire(), udp().wire()]);
    assert_eq!(rig.verdicts(), (vec![(MergeRefusal::Protocol, 2)], vec![]));
}

#[test]
fn lro_8_congestion_mark_keeps_segment_alone() {
    let marked = tcp().nth(1).with(|segment| segment.tos = 3);
    let wires = [tcp().wire(), marked.wire(), tcp().nth(2).wire(), tcp().nth(3).wire()];
    assert_eq!(counts_of(Rig::lro(1500), &wires), [1, 1, 2]);
}
