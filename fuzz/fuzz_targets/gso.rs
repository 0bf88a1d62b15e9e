//! Any bytes as `virtio_net_hdr` before any frame: a header is believed only as far as the frame
//! confirms it. A refused frame is untouched; an accepted one differs by checksums at most; cutting
//! yields every byte of the payload once, in valid segments (promises 5 and 6), and all frames are
//! returned (4). A frame whose end is in pieces fares as one that is whole.
#![no_main]

mod pieces;

use std::collections::BTreeSet;

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::arrive::HEAD_BYTES;
use forebay_rx::coalesce::gso::{
    GSO_SEGMENTS_MAX, InvalidVnetHeader, VIRTIO_NET_HDR_BYTES, VirtioNetHdr, describe,
};
use forebay_rx::coalesce::{cut, inner_headers};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Checksum, DeviceSum, Headers, Link, Verify, parse, parse_packet};
use libfuzzer_sys::fuzz_target;

use self::pieces::{HEADS, Shared};

/// Fewer chunks than some packets have segments, so that cutting can run out of memory.
const CHUNKS: [ChunkClass; 3] = [
    ChunkClass { chunk_bytes: 512, chunks: 300 },
    HEADS,
    ChunkClass { chunk_bytes: 1 << 17, chunks: 3 },
];

const IS_IP: u8 = 1;
const IS_SUMMED: u8 = 2;
const IS_CUT_SHORT: u8 = 4;
/// The bits above say how much is in the frame itself, in units of 16 bytes.
const IS_IN_PIECES: u8 = 8;

fuzz_target!(|input: &[u8]| {
    let Some((&[source], rest)) = input.split_first_chunk() else { return };
    let Some((vnet, bytes)) = rest.split_first_chunk::<VIRTIO_NET_HDR_BYTES>() else { return };
    let vnet = VirtioNetHdr::from_bytes(*vnet);
    assert_eq!(VirtioNetHdr::from_bytes(vnet.to_bytes()), vnet);
    let shares = [CHUNKS.to_vec()];
    let pools = carve(Region::allocate(region_bytes(&shares)), &shares).expect("large enough");
    let mut pool = pools.into_iter().next().expect("one share");
    let Some(mut packet) = received(source, bytes, &mut pool) else { return };
    if vnet.carry_into(&mut packet).is_err() {
        assert_eq!(packet.frame.data(), bytes, "what is refused is untouched");
        assert_eq!((packet.gso_size(), packet.headers.l4_checksum), (0, Checksum::Unknown));
        pool.put(packet.frame);
    } else {
        carried(&vnet, bytes, &packet);
        parse_packet(&mut packet, Verify::Checksums, &mut pool).expect("there is memory");
        if packet.is_merged_tunnel() {
            cut_in_tunnel_and_checked(packet, &mut pool);
        } else {
            cut_and_checked(packet, &mut pool);
        }
    }
    if source & IS_IN_PIECES > 0 {
        pieces_fare_alike(source, vnet, bytes, &mut pool);
    }
    assert_eq!(pool.in_use(), 0, "all frames are home");
});

/// Fate of a packet: the verdict, its bytes, headers and segment size, and what it is cut
/// into, unless there is no memory.
type Fate = (Result<(), InvalidVnetHeader>, Vec<u8>, Headers, u16, Option<Vec<Vec<u8>>>);

fn fate(mut packet: Packet, vnet: VirtioNetHdr, pool: &mut Pool) -> Fate {
    let verdict = vnet.carry_into(&mut packet);
    let bytes = |packet: &Packet| packet.fragments().flatten().copied().collect::<Vec<u8>>();
    if verdict.is_err() {
        let fate = (verdict, bytes(&packet), Headers::default(), packet.gso_size(), None);
        pool.put(packet.frame);
        return fate;
    }
    parse_packet(&mut packet, Verify::Checksums, pool).expect("there is memory");
    describe(&mut packet);
    let (before, headers, size) = (bytes(&packet), packet.headers, packet.gso_size());
    let mut segments = Vec::new();
    let cut = cut(packet, pool, &mut segments);
    let is_cut = cut.is_ok();
    let all: Vec<_> = segments.iter().map(bytes).collect();
    segments.drain(..).chain(cut.err()).for_each(|packet| pool.put(packet.frame));
    (verdict, before, headers, size, is_cut.then_some(all))
}

/// A checksum field, or headers, that do not fit in the frame itself may be refused.
fn pieces_fare_alike(source: u8, vnet: VirtioNetHdr, bytes: &[u8], pool: &mut Pool) {
    let Some(whole) = received(source, bytes, pool) else { return };
    let (link, wire_len, device_sum) = (whole.headers.link, whole.wire_len, whole.device_sum);
    let mut shared = Shared::new();
    let Some(frame) = shared.split(bytes, usize::from(source >> 4) * 16, pool) else {
        return pool.put(whole.frame);
    };
    let split = Packet { device_sum, ..Packet::received(frame, Arrival(7), wire_len, link) };
    let expected = fate(whole, vnet, pool);
    let fate = fate(split, vnet, pool);
    shared.check_all_is_home(pool);
    let held = HEAD_BYTES as usize;
    let field_end = usize::from(vnet.csum_start) + usize::from(vnet.csum_offset) + 2;
    let seen = |len: usize| parse(&bytes[..len.min(bytes.len())], wire_len, link, Verify::Nothing);
    let may_be_refused = match fate.0 {
        Err(InvalidVnetHeader::Checksum) => field_end > held,
        Err(InvalidVnetHeader::Headers) => seen(held) != seen(usize::MAX),
        _ => false,
    };
    if may_be_refused {
        assert_eq!(fate.1, bytes, "what is refused is untouched");
    } else {
        assert_eq!(fate, expected);
    }
}

fn received(source: u8, bytes: &[u8], pool: &mut Pool) -> Option<Packet> {
    let len_bytes = u32::try_from(bytes.len()).ok()?;
    let frame = pool.allocate(len_bytes)?;
    let link = if source & IS_IP > 0 { Link::Ip } else { Link::Ethernet };
    let wire_len = len_bytes + u32::from(source & IS_CUT_SHORT);
    let verify = if source & IS_SUMMED > 0 { Verify::Checksums } else { Verify::Nothing };
    let mut packet = Packet::received(frame, Arrival(7), wire_len, link);
    packet.fill(bytes, verify);
    Some(packet)
}

/// Nothing has changed but one checksum, or one of a tunnel and one inside it, and the device's sum
/// is that of the frame.
fn carried(vnet: &VirtioNetHdr, bytes: &[u8], packet: &Packet) {
    let (now, link) = (packet.frame.data(), packet.headers.link);
    assert_eq!(now.len(), bytes.len());
    let changed = (0..).zip(now.iter().zip(bytes)).filter(|(_, (now, before))| now != before);
    let changed: Vec<usize> = changed.map(|(at, _)| at & !1).collect();
    let fields: BTreeSet<_> = changed.iter().collect();
    assert!(fields.len() <= 2 && (fields.len() < 2 || vnet.gso_type > 0), "{fields:?}");
    assert!(changed.iter().all(|&at| at >= 20), "nothing before a transport header");
    if let Some(sum) = packet.device_sum {
        assert_eq!(Some(sum), DeviceSum::of_frame(now, link));
    }
    if packet.is_gso() {
        assert_eq!((packet.gso_size(), packet.segment_count()), (vnet.gso_size, 1));
        assert_eq!(packet.view().bytes(), now);
    }
}

fn cut_and_checked(mut packet: Packet, pool: &mut Pool) {
    let is_whole = packet.is_gso();
    let before = packet.frame.data().to_vec();
    if is_whole {
        describe(&mut packet);
        assert_eq!(packet.frame.data(), before, "it held the pseudo header's sum already");
    }
    let payload = packet.view().payload().to_vec();
    let (gso_size, headers, hash) = (usize::from(packet.gso_size()), packet.headers, packet.hash);
    let mut segments = Vec::new();
    if let Err(packet) = cut(packet, pool, &mut segments) {
        assert!(is_whole && segments.is_empty());
        assert_eq!(packet.frame.data(), before);
        return;
    }
    if !is_whole {
        assert_eq!(segments[0].frame.data(), before);
        return;
    }
    assert_eq!(segments.len(), payload.len().div_ceil(gso_size));
    assert!(segments.len() >= 2 && segments.len() <= GSO_SEGMENTS_MAX.into());
    for (segment, expected) in segments.iter().zip(payload.chunks(gso_size)) {
        assert_eq!((segment.view().payload(), segment.hash), (expected, hash));
        let bytes = segment.frame.data();
        assert_eq!(bytes.len(), segment.wire_len as usize);
        let afresh = parse(bytes, segment.wire_len, headers.link, Verify::Checksums);
        assert_eq!((afresh.l4_checksum, afresh.flaw), (Checksum::Good, None));
        assert_eq!(segment.headers, afresh);
        assert_eq!(Headers { payload_len: headers.payload_len, ..afresh }, headers);
    }
}

/// As [`cut_and_checked`], inside a tunnel: each segment has the headers' length, its part of the payload, and valid checksums.
fn cut_in_tunnel_and_checked(packet: Packet, pool: &mut Pool) {
    let inner = inner_headers(&packet).expect("it is merged in a tunnel");
    let (before, gso_size) = (packet.frame.data().to_vec(), usize::from(packet.gso_size()));
    let (network, payload) = (usize::from(inner.network_offset), usize::from(inner.payload_offset));
    let end = payload + usize::from(inner.payload_len);
    let mut segments = Vec::new();
    if let Err(packet) = cut(packet, pool, &mut segments) {
        assert!(segments.is_empty());
        assert_eq!(packet.frame.data(), before);
        return;
    }
    let parts = before[payload..end].chunks(gso_size);
    assert_eq!(segments.len(), parts.len());
    assert!(segments.len() >= 2 && segments.len() <= GSO_SEGMENTS_MAX.into());
    for (segment, part) in segments.iter().zip(parts) {
        let bytes = segment.frame.data();
        assert_eq!((&bytes[payload..], bytes.len()), (part, segment.wire_len as usize));
        let outer = parse(bytes, segment.wire_len, inner.link, Verify::Checksums);
        assert!(outer.flaw.is_none() && outer.l4_checksum != Checksum::Bad, "{outer:?}");
        let inside = &bytes[network..];
        let inside_len = u32::try_from(inside.len()).expect("a frame's length");
        let afresh = parse(inside, inside_len, Link::Ip, Verify::Checksums);
        assert_eq!((afresh.l4_checksum, afresh.flaw), (Checksum::Good, None));
    }
}
