//! `virtio_net_hdr` of a merged packet, and a naive device that cuts by it.

use forebay_rx::coalesce::gso::{
    GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, VirtioNetHdr, describe,
};
use forebay_rx::parse::{Checksum, Headers, Link, Network, Transport};

use crate::coalescing::frames::{CWR, FIN, PSH, Wire, folded, tcp, words};
use crate::coalescing::merged::{shapes, whole};
use crate::coalescing::rig::Rig;

/// Completes a checksum as a device does that knows nothing of headers.
fn completed(mut bytes: Vec<u8>, hdr: VirtioNetHdr) -> Vec<u8> {
    let start = usize::from(hdr.csum_start);
    let field = start + usize::from(hdr.csum_offset);
    let sum = !folded(words(&bytes[start..]));
    bytes[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// Cuts a packet by its `virtio_net_hdr`.
pub(crate) fn cut(bytes: &[u8], hdr: VirtioNetHdr, link: Link, headers: &Headers) -> Vec<Vec<u8>> {
    let (head, payload) = bytes.split_at(hdr.hdr_len.into());
    let (ip, transport) = (usize::from(headers.network_offset), usize::from(hdr.csum_start));
    let parts: Vec<_> = payload.chunks(hdr.gso_size.into()).collect();
    let last = parts.len() - 1;
    let cut = (0u16..).zip(&parts).map(|(number, part)| {
        let mut segment = [head, part].concat();
        let mut add = |at: usize, ahead: u16| {
            let field = u16::from_be_bytes([segment[at], segment[at + 1]]).wrapping_add(ahead);
            segment[at..at + 2].copy_from_slice(&field.to_be_bytes());
        };
        let shorter = u16::try_from(payload.len() - part.len()).unwrap().wrapping_neg();
        match headers.network {
            Network::Ipv4 => {
                add(ip + 2, shorter);
                add(ip + 4, number);
            }
            _ => add(ip + 4, shorter),
        }
        if hdr.gso_type == GSO_UDP_L4 {
            add(transport + 4, shorter);
        } else {
            let field = transport + 4..transport + 8;
            let sequence = u32::from_be_bytes(segment[field.clone()].try_into().unwrap());
            let ahead = u32::from(number) * u32::from(hdr.gso_size);
            segment[field].copy_from_slice(&sequence.wrapping_add(ahead).to_be_bytes());
            if usize::from(number) < last {
                segment[transport + 13] &= !(PSH | FIN);
            }
            if number > 0 {
                segment[transport + 13] &= !CWR;
            }
        }
        Wire::new(segment, link).resummed().bytes
    });
    cut.collect()
}

#[test]
fn merged_packet_descriptor_yields_same_frames() {
    for shape in shapes() {
        for len in [99, 100] {
            let shape = shape.clone().sized(len);
            let mut wires = shape.run(3);
            wires.push(
                shape
                    .nth(3)
                    .with(|next| {
                        next.payload.truncate(33);
                        next.flags |= PSH;
                    })
                    .wire(),
            );
            let mut rig = Rig::gro();
            let mut packet = rig.poll(&wires).remove(0);
            let headers = packet.headers;
            let (gso_type, csum_offset) = match (headers.transport, headers.network) {
                (Transport::Udp, _) => (GSO_UDP_L4, 6),
                (_, Network::Ipv4) => (GSO_TCPV4, 16),
                _ => (GSO_TCPV6, 16),
            };
            let hdr = describe(&mut packet);
            let expected = VirtioNetHdr {
                flags: NEEDS_CSUM,
                gso_type,
                hdr_len: headers.payload_offset,
                gso_size: u16::try_from(len).unwrap(),
                csum_start: headers.transport_offset,
                csum_offset,
            };
            assert_eq!(hdr, expected);
            let bytes = completed(whole(&packet), hdr);
            let link = headers.link;
            let l4_checksum = Wire::new(bytes.clone(), link).headers().l4_checksum;
            assert_eq!(l4_checksum, Checksum::Good, "{shape:?}");
            let frames: Vec<_> = rig.fed.iter().map(|frame| frame.bytes.clone()).collect();
            assert_eq!(cut(&whole(&packet), hdr, link, &headers), frames, "{shape:?}");
        }
    }
}

#[test]
fn unmerged_packet_is_sent_unchanged() {
    let mut rig = Rig::gro();
    let mut packet = rig.poll(&tcp().run(1)).remove(0);
    assert_eq!(describe(&mut packet).to_bytes(), [0; 10]);
    assert_eq!(packet.frame.data(), rig.fed[0].bytes);
}

#[test]
fn a_description_lies_little_endian() {
    let hdr = VirtioNetHdr {
        flags: 1,
        gso_type: 2,
        hdr_len: 0x0403,
        gso_size: 0x0605,
        csum_start: 0x0807,
        csum_offset: 0x0a09,
    };
    assert_eq!(hdr.to_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
}
