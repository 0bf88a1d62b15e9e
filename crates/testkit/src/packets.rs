//! Packets for tests.

use std::sync::Arc;

use etherparse::{IpHeaders, Ipv4Extensions, Ipv4Header, ip_number};
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{PageFragCache, Region};
use forebay_rx::Packet;
use forebay_rx::arrive::{HEAD_CHUNK_BYTES, PollStatus};
use forebay_rx::coalesce::{CoalesceConfig, Coalescer};
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Link, Verify, parse_packet};

/// A datagram with this payload in one frame, and the same with all but its first `head_len` bytes
/// in pieces, as from a device that shares its memory. Both are parsed.
pub fn datagrams(payload: &[u8], head_len: usize) -> [Packet; 2] {
    let mut bytes = Vec::new();
    let builder = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
    let builder = builder.ipv4([10, 9, 0, 2], [10, 9, 0, 1], 64).udp(1000, 9);
    builder.write(&mut bytes, payload).unwrap();
    let class = |chunk_bytes| ChunkClass { chunk_bytes, chunks: 2 };
    let share = vec![class(HEAD_CHUNK_BYTES), class(4096)];
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    let mut pool = carve(region, &[share]).unwrap().remove(0);
    let shared = Arc::new(Region::allocate_shared(1 << 16));
    let mut cache = PageFragCache::new(&shared, 0, 1 << 16, 1);
    [bytes.len(), head_len].map(|head_len| {
        let mut frame = pool.allocate(if head_len == bytes.len() { 3000 } else { 832 }).unwrap();
        let (head, rest) = bytes.split_at(head_len);
        frame.copy_from(head);
        for piece in rest.chunks(101) {
            let mut frag = cache.cut(128).unwrap();
            frag.copy_out(0, piece);
            frag.set_len(u32::try_from(piece.len()).unwrap());
            frame.attach(frag).unwrap();
        }
        let wire_len = u32::try_from(bytes.len()).unwrap();
        let mut packet = Packet::received(frame, Arrival(7), wire_len, Link::Ethernet);
        packet.timestamp_ns = 5;
        parse_packet(&mut packet, Verify::Checksums, &mut pool).unwrap();
        assert_eq!(packet.is_nonlinear(), head_len < bytes.len());
        packet
    })
}

/// Payloads of datagrams of VXLAN: segments of one flow of TCP, each in an Ethernet frame. Their ids rise.
pub fn vxlan_payloads(count: u16) -> Vec<Vec<u8>> {
    const LEN: u16 = 700;
    let payload = |number: u16| {
        let mut bytes = vec![8, 0, 0, 0, 0, 0, 7, 0];
        let builder = etherparse::PacketBuilder::ethernet2([6; 6], [8; 6]);
        let mut header =
            Ipv4Header::new(0, 64, ip_number::TCP, [10, 1, 0, 1], [10, 1, 0, 2]).unwrap();
        header.identification = number;
        let builder = builder.ip(IpHeaders::Ipv4(header, Ipv4Extensions::default()));
        let builder = builder.tcp(1000, 80, u32::from(number * LEN), 512).ack(1);
        builder.write(&mut bytes, &vec![number.to_le_bytes()[0]; LEN.into()]).unwrap();
        bytes
    };
    (0..count).map(payload).collect()
}

/// Frames with those payloads to 10.9.0.2, and what they are merged into on arrival.
pub fn merged_vxlan(payloads: &[Vec<u8>], link: Link) -> (Vec<Vec<u8>>, Packet) {
    let frames = payloads.iter().map(|payload| {
        let mut bytes = Vec::new();
        let to = [2, 0, 0, 0, 0, 2];
        let builder = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], to);
        let builder = builder.ipv4([10, 9, 0, 1], [10, 9, 0, 2], 64).udp(50_000, 4789);
        builder.write(&mut bytes, payload).unwrap();
        bytes.split_off(if link == Link::Ip { 14 } else { 0 })
    });
    let frames: Vec<Vec<u8>> = frames.collect();
    let merged = merge(&frames, link);
    (frames, merged)
}

/// Copy of a merged packet in one frame, as a packet that the kernel has merged arrives.
pub fn in_one_frame(merged: &Packet) -> Packet {
    let share = vec![ChunkClass { chunk_bytes: 1 << 17, chunks: 1 }];
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    let mut pool = carve(region, &[share]).unwrap().remove(0);
    let copy = merged.copied(&mut pool).unwrap();
    assert!(copy.is_gso());
    copy
}

/// Packet that frames of one flow are merged into on arrival.
pub fn merge(frames: &[Vec<u8>], link: Link) -> Packet {
    let share = vec![ChunkClass { chunk_bytes: 2048, chunks: 128 }];
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    let mut pool = carve(region, &[share]).unwrap().remove(0);
    let packets = (0..).zip(frames).map(|(number, bytes)| {
        let wire_len = u32::try_from(bytes.len()).unwrap();
        let mut frame = pool.allocate(wire_len).unwrap();
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(number), wire_len, link);
        parse_packet(&mut packet, Verify::Checksums, &mut pool).unwrap();
        Packet { hash: FlowHash(7), ..packet }
    });
    let (mut packets, mut out) = (packets.collect(), Vec::new());
    let mut coalescer = Coalescer::new(CoalesceConfig::default(), Arc::default());
    coalescer.coalesce(&mut packets, 0, &mut out);
    coalescer.end_poll(PollStatus::Last, 0, &mut out);
    assert_eq!(out.len(), 1, "they are merged");
    out.remove(0)
}

#[cfg(test)]
mod tests {
    use super::datagrams;

    #[test]
    fn both_layouts_hold_the_same_bytes() {
        let payload: Vec<u8> = (0..=255).cycle().take(300).collect();
        for head_len in [42, 43, 100] {
            let [whole, split] = datagrams(&payload, head_len);
            assert!(!whole.is_nonlinear() && split.is_nonlinear(), "{head_len}");
            assert_eq!(whole.frame.data()[42..], payload[..], "{head_len}");
            assert_eq!(split.frame.data(), &whole.frame.data()[..head_len], "{head_len}");
            assert_eq!(whole.headers, split.headers, "{head_len}");
        }
    }
}
