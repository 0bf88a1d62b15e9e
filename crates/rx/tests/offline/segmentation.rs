//! Packets as Linux segments them: each was written to a TAP device with `IFF_VNET_HDR`, bridged to
//! a TAP device without offloads, and its segments were read there.

#![allow(clippy::unwrap_used, reason = "the vectors stand beside the test")]

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_rx::coalesce::cut;
use forebay_rx::coalesce::gso::VirtioNetHdr;
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Link, Verify, parse_into};
use serde_json::Value;

fn pool() -> Pool {
    let shares = [vec![ChunkClass { chunk_bytes: 512, chunks: 8 }]];
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
}

fn bytes(value: &Value) -> Vec<u8> {
    hex::decode(value.as_str().unwrap()).unwrap()
}

/// Passes a packet through the intake.
fn received(case: &Value, pool: &mut Pool) -> Packet {
    let bytes_there = bytes(&case["packet"]);
    let len_bytes = u32::try_from(bytes_there.len()).unwrap();
    let mut frame = pool.allocate(len_bytes).unwrap();
    frame.copy_from(&bytes_there);
    let mut packet = Packet::received(frame, Arrival(1), len_bytes, Link::Ethernet);
    let vnet = VirtioNetHdr::from_bytes(bytes(&case["vnet"]).try_into().unwrap());
    vnet.carry_into(&mut packet).unwrap();
    let Packet { frame, headers, wire_len, device_sum, .. } = &mut packet;
    parse_into(headers, frame.data(), *wire_len, *device_sum, Verify::Checksums);
    packet
}

#[test]
fn promise_6_gso_cut_equals_kernel() {
    let vectors: Value = serde_json::from_str(include_str!("vectors/gso.json")).unwrap();
    let cases = vectors["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 26);
    for case in cases {
        let mut pool = pool();
        let packet = received(case, &mut pool);
        let name = &case["name"];
        assert!(packet.is_gso(), "{name}");
        let mut segments = Vec::new();
        cut(packet, &mut pool, &mut segments).unwrap();
        let ours: Vec<_> = segments.iter().map(|it| hex::encode(it.frame.data())).collect();
        assert_eq!(ours, case["frames"].as_array().unwrap().as_slice(), "{name}");
    }
}
