//! Any bytes as `virtio_net_hdr` before any frame: a header is believed only as far as the frame
//! confirms it. A refused frame is untouched; an accepted one differs by checksums at most; cutting
//! yields every byte of the payload once, in valid segments (promises 5 and 6), and all frames are
//! returned (4).
#![no_main]

use std::collections::BTreeSet;

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::coalesce::cut;
use forebay_rx::coalesce::gso::{GSO_SEGMENTS_MAX, VIRTIO_NET_HDR_BYTES, VirtioNetHdr, describe};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Checksum, DeviceSum, Headers, Link, Verify, parse, parse_into};
use libfuzzer_sys::fuzz_target;

/// Fewer chunks than some packets have segments, so that cutting can run out of memory.
const CHUNKS: [ChunkClass; 2] =
    [ChunkClass { chunk_bytes: 512, chunks: 300 }, ChunkClass { chunk_bytes: 1 << 17, chunks: 2 }];

const IS_IP: u8 = 1;
const IS_SUMMED: u8 = 2;
const IS_CUT_SHORT: u8 = 4;

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
        let Packet { frame, headers, wire_len, device_sum, .. } = &mut packet;
        parse_into(headers, frame.data(), *wire_len, *device_sum, Verify::Checksums);
        cut_and_checked(packet, &mut pool);
    }
    assert_eq!(pool.in_use(), 0, "all frames are home");
});

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
