//! GSO packets from the kernel: one frame each, passed in order, and cut into the segments that
//! they represent.

use forebay_rx::coalesce::gso::{VirtioNetHdr, describe};
use forebay_rx::coalesce::{FlushReason, MergeRefusal, TCP_SEGMENTS_MAX, UDP_SEGMENTS_MAX, cut};
use forebay_rx::packet::Packet;
use forebay_rx::parse::{Checksum, Verify, parse};
use proptest::prelude::*;
use proptest::sample::select;

use crate::coalescing::carried::all_shapes;
use crate::coalescing::frames::{CWR, FIN, PSH, Segment, Wire, tcp, udp};
use crate::coalescing::gso;
use crate::coalescing::merged::whole as joined;
use crate::coalescing::rig::{Rig, pool, taken_apart};

/// GSO packet of `len` bytes of payload, `gso_size` per segment.
fn whole(shape: &Segment, len: usize, gso_size: u16) -> Wire {
    shape.clone().sized(len).wire().partial(gso_size)
}

/// Packet behind the intake.
fn passed(rig: &mut Rig, wire: Wire) -> Packet {
    let mut out = rig.poll(&[wire]);
    assert_eq!(out.len(), 1);
    out.remove(0)
}

#[test]
fn promise_2_gso_packet_counts_one_frame() {
    for shape in all_shapes() {
        let wire = whole(&shape, 5000, 1200);
        let mut rig = Rig::gro();
        let mut packet = passed(&mut rig, wire.clone());
        assert!(packet.is_gso() && !packet.is_merged());
        assert_eq!((packet.gso_size(), packet.segment_count()), (1200, 1));
        assert_eq!(packet.view().bytes(), wire.bytes);
        assert_eq!(packet.view().payload(), shape.clone().sized(5000).payload);
        assert_eq!(packet.fragments().collect::<Vec<_>>(), [wire.bytes.as_slice()]);
        let segments: Vec<_> = packet.segments().collect();
        let [segment] = segments[..] else { panic!("{segments:?}") };
        assert_eq!((segment.arrival, segment.offset), (rig.fed[0].arrival, 0));
        assert_eq!(segment.payload, packet.view().payload());
        assert_eq!(packet.last_arrival(), packet.arrival);
        assert_eq!(packet.headers.l4_checksum, Checksum::Good);
        assert_eq!(packet.wire_len as usize, wire.bytes.len());
        assert_eq!(Some(describe(&mut packet)), wire.vnet, "{shape:?}");
        assert_eq!(packet.frame.data(), wire.bytes, "the pseudo header's sum is in it still");
        assert_eq!(taken_apart(vec![packet]), rig.fed, "nothing was merged here");
    }
}

#[test]
fn largest_ip_packet_comes_whole() {
    for (shape, headers) in [(tcp(), 40), (udp(), 28)] {
        let len = 65_535 - headers;
        let mut rig = Rig::gro();
        let packet = passed(&mut rig, whole(&shape, len, 1448));
        assert!(packet.is_gso());
        assert_eq!((packet.wire_len, packet.view().payload().len()), (14 + 65_535, len));
        let mut frames = Vec::new();
        cut(packet, &mut rig.pool, &mut frames).unwrap();
        assert_eq!(frames.len(), len.div_ceil(1448));
        let payload: Vec<_> = frames.iter().flat_map(|it| it.view().payload().to_vec()).collect();
        assert_eq!(payload, shape.sized(len).payload);
    }
}

#[test]
fn single_segment_uncut_checksum_completed() {
    for shape in [tcp(), udp()] {
        for (len, gso_size) in [(0, 1), (100, 100), (99, 100)] {
            let packet = passed(&mut Rig::gro(), whole(&shape, len, gso_size));
            assert!(!packet.is_gso());
            assert_eq!(packet.frame.data(), shape.clone().sized(len).wire().bytes);
        }
    }
}

#[test]
fn verified_merged_tcp_has_pseudo_sum() {
    let wire = whole(&tcp(), 3000, 1000);
    let vnet = VirtioNetHdr { flags: 0, csum_start: 0, csum_offset: 0, ..wire.vnet.unwrap() };
    let by_device = Wire { vnet: Some(vnet), ..tcp().sized(3000).wire() };
    let packet = passed(&mut Rig::gro(), by_device);
    assert!(packet.is_gso());
    assert_eq!((packet.frame.data(), packet.headers.l4_checksum), (&*wire.bytes, Checksum::Good));
}

#[test]
fn promise_1_gso_packet_follows_held_segments() {
    for shape in [tcp(), udp()] {
        let large = whole(&shape.nth(2), 1000, 100);
        let behind = shape.nth(12);
        let wires = [shape.wire(), shape.nth(1).wire(), large, behind.wire(), behind.nth(1).wire()];
        let mut rig = Rig::gro();
        let out = rig.poll(&wires);
        assert_eq!(out.iter().map(Packet::segment_count).collect::<Vec<_>>(), [2, 1, 2]);
        assert_eq!(out.iter().map(Packet::is_gso).collect::<Vec<_>>(), [false, true, false]);
        let flushes = vec![(FlushReason::PollEnd, 1), (FlushReason::Mismatch, 1)];
        assert_eq!(rig.verdicts(), (vec![(MergeRefusal::WholeGso, 1)], flushes));
        assert_eq!(rig.counters.segments_in.get(), 5, "frames of the device");
        assert_eq!(rig.counters.packets_out.get(), 3);
        assert_eq!(taken_apart(out), rig.fed);
        assert_eq!(rig.pool.in_use(), 0);
    }
}

#[test]
fn promise_4_segments_without_frames_return_packet() {
    let mut rig = Rig::gro();
    let packet = passed(&mut rig, whole(&tcp(), 5000, 1000));
    let before = packet.frame.data().to_vec();
    let mut small = pool(0);
    let mut taken: Vec<_> = std::iter::from_fn(|| small.allocate(1000)).collect();
    small.put(taken.pop().unwrap());
    let mut out = vec![passed(&mut rig, tcp().wire())];
    let away = small.in_use();
    let packet = cut(packet, &mut small, &mut out).unwrap_err();
    assert_eq!((out.len(), small.in_use()), (1, away), "what was cut off is taken back");
    assert!(packet.is_gso());
    assert_eq!(packet.frame.data(), before);
    for _ in 0..4 {
        small.put(taken.pop().unwrap());
    }
    cut(packet, &mut small, &mut out).unwrap();
    assert_eq!((out.len(), small.in_use()), (6, away + 1));
}

#[test]
fn cut_splits_merged_leaves_single() {
    let mut rig = Rig::gro();
    let wires = [tcp().run(3), vec![udp().wire()]].concat();
    let mut frames = Vec::new();
    for packet in rig.poll(&wires) {
        cut(packet, &mut rig.pool, &mut frames).unwrap();
    }
    assert_eq!(taken_apart(frames), rig.fed);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 1000 }))]

    /// Cutting equals the work of a device that reads the header, and merging is its inverse.
    #[test]
    fn promise_6_cut_equals_others_and_merges_again(
        shape in select(all_shapes()),
        payload_len in 1usize..6000,
        gso_size in 1u16..1500,
        flags in select(vec![0, PSH, FIN, FIN | PSH, CWR, CWR | PSH]),
        port: u16,
    ) {
        let mut shape = shape;
        let segments = u32::try_from(payload_len).unwrap().div_ceil(gso_size.into());
        let most = if shape.is_udp { UDP_SEGMENTS_MAX } else { TCP_SEGMENTS_MAX };
        prop_assume!((2..=most).contains(&segments));
        shape.port = port;
        if !shape.is_udp {
            shape.flags |= flags;
        }
        let wire = whole(&shape, payload_len, gso_size);
        let mut rig = Rig::gro();
        let packet = passed(&mut rig, wire.clone());
        let (arrival, hash) = (packet.arrival, packet.hash);
        let expected = gso::cut(&wire.bytes, wire.vnet.unwrap(), wire.link, &packet.headers);
        let mut frames = Vec::new();
        cut(packet, &mut rig.pool, &mut frames).unwrap();
        let bytes: Vec<_> = frames.iter().map(|frame| frame.frame.data().to_vec()).collect();
        prop_assert_eq!(bytes, expected);
        for frame in &frames {
            let afresh = parse(frame.frame.data(), frame.wire_len, wire.link, Verify::Checksums);
            prop_assert_eq!(frame.headers, afresh);
            prop_assert_eq!((frame.arrival, frame.hash, frame.gso_size()), (arrival, hash, 0));
        }
        let is_merged_again = shape.ip_options.is_empty() && shape.flags & CWR == 0;
        if is_merged_again {
            rig.coalescer.coalesce(&mut frames, 1, &mut rig.out);
            rig.end_poll(forebay_rx::arrive::PollStatus::Last);
            prop_assert_eq!(rig.out.len(), 1);
            let mut again = rig.out.remove(0);
            prop_assert_eq!(Some(describe(&mut again)), wire.vnet);
            prop_assert_eq!(joined(&again), wire.bytes);
            prop_assert_eq!(again.headers.payload_len as usize, payload_len);
        }
        frames.clear();
        prop_assert_eq!(rig.pool.in_use(), 0);
    }
}
