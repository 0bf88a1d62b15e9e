//! Header of a packet merged inside a tunnel, and a naive kernel that cuts by it.

use forebay_rx::coalesce::gso::{
    GSO_UDP_TUNNEL_IPV4, GSO_UDP_TUNNEL_IPV6, NEEDS_CSUM, UDP_TUNNEL_CSUM, VirtioNetHdr,
    VirtioNetHdrTunnel, describe_tunnel,
};
use forebay_rx::coalesce::{innermost, resegment};
use forebay_rx::parse::{Headers, Link};

use crate::coalescing::frames::{folded, words};
use crate::coalescing::gso;
use crate::coalescing::merged::whole;
use crate::coalescing::rig::{Frame, Rig};
use crate::coalescing::tunnels::{everything, poll};

const TUNNEL: u8 = GSO_UDP_TUNNEL_IPV4 | GSO_UDP_TUNNEL_IPV6;

/// True as `virtio_net_hdr_tnl_to_skb` judges the offsets.
fn is_lawful(hdr: &VirtioNetHdrTunnel, is_inner_v6: bool) -> bool {
    let least = |is_v6: bool| if is_v6 { 40 } else { 20 };
    let is_v6 = match hdr.plain.gso_type & TUNNEL {
        GSO_UDP_TUNNEL_IPV4 => false,
        GSO_UDP_TUNNEL_IPV6 => true,
        _ => return false,
    };
    hdr.plain.flags & NEEDS_CSUM != 0
        && hdr.outer_th_offset >= 14 + least(is_v6)
        && hdr.inner_nh_offset >= hdr.outer_th_offset + 8
        && hdr.plain.csum_start >= hdr.inner_nh_offset + least(is_inner_v6)
}

/// Cuts a packet as `skb_udp_tunnel_segment` does: the inner packet, then the headers around.
fn cut(bytes: &[u8], hdr: &VirtioNetHdrTunnel, inner: &Headers) -> Vec<Vec<u8>> {
    let (inside, udp) = (usize::from(hdr.inner_nh_offset), usize::from(hdr.outer_th_offset));
    let back = hdr.inner_nh_offset;
    let plain = VirtioNetHdr {
        gso_type: hdr.plain.gso_type & !TUNNEL,
        hdr_len: hdr.plain.hdr_len - back,
        csum_start: hdr.plain.csum_start - back,
        ..hdr.plain
    };
    let packets =
        gso::cut(&bytes[inside..], plain, Link::Ip, &Headers { network_offset: 0, ..*inner });
    let around = |(number, packet): (u16, Vec<u8>)| {
        let mut frame = [&bytes[..inside], &packet].concat();
        let shorter = u16::try_from(bytes.len() - frame.len()).unwrap();
        let mut change = |at: usize, by: u16| {
            let field = u16::from_be_bytes([frame[at], frame[at + 1]]).wrapping_add(by);
            frame[at..at + 2].copy_from_slice(&field.to_be_bytes());
        };
        change(udp + 4, shorter.wrapping_neg());
        if hdr.plain.gso_type & GSO_UDP_TUNNEL_IPV4 != 0 {
            change(16, shorter.wrapping_neg());
            change(18, number);
            frame[24..26].fill(0);
            let sum = !folded(words(&frame[14..udp]));
            frame[24..26].copy_from_slice(&sum.to_be_bytes());
        } else {
            change(18, shorter.wrapping_neg());
        }
        if hdr.plain.flags & UDP_TUNNEL_CSUM != 0 {
            // The field holds the pseudo header's sum, with the length of the whole.
            let whole_len = u16::try_from(bytes.len() - udp).unwrap();
            let less = u64::from(!whole_len) + u64::from(whole_len - shorter);
            let sum = !folded(words(&frame[udp..]) + less);
            let sum = if sum == 0 { 0xffff } else { sum };
            frame[udp + 6..udp + 8].copy_from_slice(&sum.to_be_bytes());
        }
        frame
    };
    (0..).zip(packets).map(around).collect()
}

#[test]
fn lro_t6_described_tunnels_cut_into_originals() {
    let mut described = 0;
    for (name, tunnel) in everything() {
        let mut rig = Rig::gro();
        let mut packet = poll(&mut rig, &tunnel.run(5)).remove(0);
        let inner = innermost(packet.frame.data(), packet.wire_len, &packet.headers).unwrap();
        let before = whole(&packet);
        let frames: Vec<_> = rig.fed.iter().map(|frame| frame.bytes.clone()).collect();
        let is_udp = ["VXLAN", "GENEVE"].iter().any(|kind| name.contains(kind));
        match describe_tunnel(&mut packet) {
            Some(hdr) => {
                assert!(is_udp && tunnel.pppoe.is_none() && tunnel.vlans.is_empty(), "{name}");
                assert!(is_lawful(&hdr, tunnel.inner.is_v6), "{name}: {hdr:?}");
                assert_eq!(cut(&whole(&packet), &hdr, &inner), frames, "{name}");
                described += 1;
            }
            None => {
                assert!(!is_udp || tunnel.pppoe.is_some(), "{name}");
                assert_eq!(whole(&packet), before, "{name}");
            }
        }
        // A device that refuses gets the segments instead.
        let mut segments = Vec::new();
        resegment(packet, &mut segments);
        assert_eq!(segments.iter().map(Frame::of).collect::<Vec<_>>(), rig.fed, "{name}");
    }
    assert_eq!(described, 11 * 6);
}

#[test]
fn lro_t6_tunnel_offsets_lie_behind_hash() {
    let plain = VirtioNetHdr { gso_type: 0x21, gso_size: 700, ..VirtioNetHdr::default() };
    let hdr = VirtioNetHdrTunnel { plain, outer_th_offset: 34, inner_nh_offset: 0x140 };
    let mut bytes = [0; 24];
    bytes[..10].copy_from_slice(&plain.to_bytes());
    bytes[20..].copy_from_slice(&[34, 0, 0x40, 1]);
    assert_eq!(hdr.to_bytes(), bytes);
}
