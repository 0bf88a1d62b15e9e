//! Any bytes as a frame: parsed, read through the view, hashed (promise 5).
//!
//! Input: a byte whose lowest bit says if an Ethernet header comes first, the next one if the frame
//! is also parsed with its end in pieces, and the others how much is not (in units of 4 bytes); the
//! length on the wire (u32, little-endian), then the frame.
#![no_main]

mod pieces;

use std::ops::Range;
use std::sync::LazyLock;

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_rx::flow_key::{FlowKey, FlowKeyRules, KeyRule, LAYERS_MAX};
use forebay_rx::hash::toeplitz::{STANDARD_KEY, SYMMETRIC_KEY};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{
    Checksum, DeviceSum, Headers, Link, Network, Verify, View, link_layer, parse, parse_by_walk,
    parse_into, parse_packet,
};
use libfuzzer_sys::fuzz_target;

use self::pieces::{HEADS, Shared};

struct Hashers {
    plain: [Hasher; 2],
    symmetric: [Hasher; 2],
}

static HASHERS: LazyLock<Hashers> = LazyLock::new(|| {
    let toeplitz = |key| Hasher::toeplitz(key).expect("the key is long enough");
    Hashers {
        plain: [Hasher::keyed(&[7; 16], false), toeplitz(&STANDARD_KEY)],
        symmetric: [Hasher::keyed(&[7; 16], true), toeplitz(&SYMMETRIC_KEY)],
    }
});

static RULES: LazyLock<[FlowKeyRules; 3]> = LazyLock::new(|| {
    ["auto", "inner", "inner,quic:1-65535:8"]
        .map(|rules| rules.parse().expect("the rules are right"))
});

fuzz_target!(|input: &[u8]| {
    let Some((&[kind, ref wire_len @ ..], frame)) = input.split_first_chunk::<5>() else { return };
    let link = if kind & 1 == 0 { Link::Ip } else { Link::Ethernet };
    let wire_len = u32::from_le_bytes(*wire_len);

    let headers = parse(frame, wire_len, link, Verify::Checksums);
    assert_eq!(headers, parse(frame, wire_len, link, Verify::Checksums));
    let unsummed =
        Headers { ip_checksum: Checksum::Unknown, l4_checksum: Checksum::Unknown, ..headers };
    assert_eq!(unsummed, parse(frame, wire_len, link, Verify::Nothing));

    fast_path_agrees_with_walk(frame, wire_len, link);
    offsets_lie_within(frame, wire_len, &headers);
    fields_lie_within(frame, &headers);
    both_directions_hash_alike(frame, wire_len, &headers);
    walk_to_the_key_ends(frame, wire_len, &headers);
    if kind & 2 > 0 {
        pieces_parse_alike(frame, usize::from(kind >> 2) * 4, wire_len, &headers);
    }
});

/// A nonlinear packet has the headers and the hash of the same bytes in one frame, by the device's
/// sum or without.
fn pieces_parse_alike(frame: &[u8], head_len: usize, wire_len: u32, headers: &Headers) {
    let shares = [vec![HEADS, ChunkClass { chunk_bytes: 1 << 17, chunks: 1 }]];
    let pools = carve(Region::allocate(region_bytes(&shares)), &shares).expect("large enough");
    let mut pool = pools.into_iter().next().expect("one share");
    let mut shared = Shared::new();
    let len_bytes = u32::try_from(frame.len()).unwrap_or(u32::MAX);
    for device_sum in [None, DeviceSum::of_frame(frame, headers.link)] {
        let Some(split) = shared.split(frame, head_len, &mut pool) else { return };
        let received = Packet::received(split, Arrival(7), wire_len.max(len_bytes), headers.link);
        let mut packet = Packet { device_sum, ..received };
        let verify = if device_sum.is_some() { Verify::Nothing } else { Verify::Checksums };
        let mut expected = Headers { link: headers.link, ..Headers::default() };
        parse_into(&mut expected, frame, wire_len, device_sum, verify);
        parse_packet(&mut packet, verify, &mut pool).expect("there is memory");
        assert_eq!(packet.headers, expected);
        let bytes: Vec<u8> = packet.fragments().flatten().copied().collect();
        assert_eq!(bytes, frame);
        for hasher in &HASHERS.plain {
            assert_eq!(hasher.hash(&packet.view()), hasher.hash(&View::new(frame, headers)));
        }
        pool.put(packet.frame);
    }
    assert_eq!(pool.in_use(), 0, "all frames are home");
    shared.check_all_is_home(&mut pool);
}

/// Slow twin of the fast path, with and without a device's sum.
fn fast_path_agrees_with_walk(frame: &[u8], wire_len: u32, link: Link) {
    let sums = [None, DeviceSum::of_frame(frame, link)];
    for (sum, verify) in sums.into_iter().zip([Verify::Checksums, Verify::Nothing]) {
        let mut fast = Headers { link, ..Headers::default() };
        let mut walked = fast;
        parse_into(&mut fast, frame, wire_len, sum, verify);
        parse_by_walk(&mut walked, frame, wire_len, sum, verify);
        assert_eq!(fast, walked);
    }
}

/// The walk through nested tunnels ends, however hostile, and the key hashes like the packet.
fn walk_to_the_key_ends(frame: &[u8], wire_len: u32, headers: &Headers) {
    for rules in &*RULES {
        let view = View::new(frame, headers);
        let key = FlowKey::of(&view, wire_len, rules);
        assert!(key.layers.as_slice().len() <= LAYERS_MAX);
        let hasher = Hasher::keyed(&[7; 16], false).with_rules(*rules);
        let hash = hasher.hash_of(&view, wire_len, FlowHash::NONE);
        assert_eq!(hash, hasher.hash_key(&key));
        assert_eq!(hash.is_some(), key.rule != KeyRule::None);
        if key.is_outermost() {
            assert_eq!(hash, HASHERS.plain[0].hash_of(&view, wire_len, FlowHash::NONE));
        }
    }
}

fn offsets_lie_within(frame: &[u8], wire_len: u32, headers: &Headers) {
    let [network, transport, payload] =
        [headers.network_offset.into(), headers.transport_offset, headers.payload_offset]
            .map(usize::from);
    assert!(network <= frame.len() && transport <= frame.len());
    // A snapped frame may end inside the transport header.
    assert!(payload <= frame.len().max(wire_len as usize));
    assert!(transport == 0 || network < transport);
    assert!(payload == 0 || (0 < transport && transport < payload));
    let layer = link_layer(frame, headers.link);
    assert!(usize::from(layer.network_offset) <= frame.len());
    if headers.network != Network::Other {
        assert_eq!(layer.network_offset, headers.network_offset);
    }
}

fn fields_lie_within(frame: &[u8], headers: &Headers) {
    let view = View::new(frame, headers);
    let place = frame.as_ptr_range();
    let ports = view.port_bytes().map(|ports| ports.as_slice());
    for field in [view.address_bytes(), ports, Some(view.payload())].into_iter().flatten() {
        let field = field.as_ptr_range();
        assert!(field.is_empty() || (place.start <= field.start && field.end <= place.end));
    }
    assert_eq!(view.address_bytes().is_some(), view.destination().is_some());
    assert_eq!(view.ports().is_some(), ports.is_some());
    let fields = (
        (view.source(), view.protocol(), view.ttl(), view.network_header_len()),
        (view.network_len_field(), view.tcp_sequence(), view.tcp_flags(), view.payload_len()),
    );
    std::hint::black_box(fields);
    for hasher in HASHERS.plain.iter().chain(&HASHERS.symmetric) {
        assert_eq!(hasher.hash(&view).is_some(), view.address_bytes().is_some());
    }
}

/// Swaps the ends of the flow in the frame: symmetric hashes do not change.
fn both_directions_hash_alike(frame: &[u8], wire_len: u32, headers: &Headers) {
    let view = View::new(frame, headers);
    let Some(addresses) = view.address_bytes() else { return };
    let mut back = frame.to_vec();
    swap_halves(&mut back, range_in(frame, addresses));
    if let Some(ports) = view.port_bytes() {
        swap_halves(&mut back, range_in(frame, ports));
    }
    let back_headers = parse(&back, wire_len, headers.link, Verify::Nothing);
    for hasher in &HASHERS.symmetric {
        assert_eq!(hasher.hash(&view), hasher.hash(&View::new(&back, &back_headers)));
    }
}

fn range_in(frame: &[u8], field: &[u8]) -> Range<usize> {
    let start = field.as_ptr().addr() - frame.as_ptr().addr();
    start..start + field.len()
}

fn swap_halves(frame: &mut [u8], range: Range<usize>) {
    let half = range.len() / 2;
    frame[range].rotate_left(half);
}
