//! Violations in packets that are to be cut or summed.

use crate::back_end::frames::segment;
use crate::back_end::queues::Header;
use crate::back_end::session::Closed;
use crate::hostile::{Comes, In, Lie, Scene};

const REFUSED: Comes = Comes::Drops("vnet_header", 1);

/// Violations with TCP segments, which may be cut if they are valid.
pub(crate) const LIES: &[Lie] = &[
    ("gso_into_no_segments", In::Both, REFUSED, |scene| segments(scene, 0)),
    ("gso_into_60000_segments", In::Both, REFUSED, |scene| segments(scene, 1)),
    ("gso_into_one_segment", In::Both, Comes::Anything, |scene| segments(scene, u16::MAX)),
    ("gso_of_a_fragment", In::Both, REFUSED, |scene| damaged(scene, 20, 0x20)),
    ("gso_of_less_than_there_is", In::Both, REFUSED, |scene| damaged(scene, 16, 1)),
    ("gso_of_more_than_there_is", In::Both, REFUSED, |scene| damaged(scene, 16, 0xff)),
    ("gso_behind_empty_network_header", In::Both, REFUSED, |scene| damaged(scene, 14, 0x40)),
    ("gso_behind_empty_header", In::Both, REFUSED, |scene| damaged(scene, 46, 0)),
    ("gso_behind_options_that_are_payload", In::Both, Comes::Anything, |scene| {
        damaged(scene, 46, 0xf0)
    }),
    ("gso_behind_options_beyond_the_end", In::Both, REFUSED, |scene| {
        let mut frame = segment(1, 20);
        frame[46] = 0xf0;
        give(scene, tcp(1), &frame)
    }),
    ("gso_of_another_protocol", In::Both, REFUSED, |scene| damaged(scene, 23, 17)),
    ("gso_of_nothing_but_a_link", In::Both, REFUSED, |scene| cut(scene, 14)),
    ("gso_of_half_a_header", In::Both, REFUSED, |scene| cut(scene, 40)),
    ("gso_with_a_checksum_elsewhere", In::Both, REFUSED, |scene| {
        give(scene, Header { csum_start: 35, ..tcp(1448) }, &segment(1, 5000))
    }),
    ("gso_with_a_checksum_of_udp", In::Both, REFUSED, |scene| {
        give(scene, Header { csum_offset: 6, ..tcp(1448) }, &segment(1, 5000))
    }),
    ("csum_in_the_link_header", In::Both, Comes::Anything, |scene| sum(scene, 0, 0)),
    ("csum_in_the_network_header", In::Both, Comes::Anything, |scene| sum(scene, 14, 10)),
    ("csum_at_odd_places", In::Both, Comes::Anything, |scene| sum(scene, 35, 17)),
    ("csum_far_behind_the_headers", In::Both, Comes::Anything, |scene| sum(scene, 34, 4900)),
    ("csum_of_the_last_two_bytes", In::Both, Comes::Anything, |scene| sum(scene, 5052, 0)),
    ("csum_left_out_and_vouched_for", In::Both, Comes::Anything, |scene| {
        give(scene, Header { flags: 3, gso_type: 0, ..tcp(0) }, &segment(1, 5000))
    }),
];

type Told = Result<(), Closed>;

/// Header before a packet that is to be cut.
fn tcp(gso_size: u16) -> Header {
    let (csum_start, csum_offset) = (34, 16);
    Header { flags: 1, gso_type: 1, gso_size, csum_start, csum_offset, ..Header::default() }
}

fn give(scene: &mut Scene, header: Header, frame: &[u8]) -> Told {
    scene.device.deliver(0, header, frame)
}

fn segments(scene: &mut Scene, gso_size: u16) -> Told {
    give(scene, tcp(gso_size), &segment(1, 60_000))
}

/// Delivers a segment with one header byte changed.
fn damaged(scene: &mut Scene, at: usize, byte: u8) -> Told {
    let mut frame = segment(1, 5000);
    assert_ne!(std::mem::replace(&mut frame[at], byte), byte);
    give(scene, tcp(1448), &frame)
}

fn cut(scene: &mut Scene, len: usize) -> Told {
    give(scene, tcp(1448), &segment(1, 5000)[..len])
}

/// Delivers a segment whose checksum is to be completed at that position.
fn sum(scene: &mut Scene, csum_start: u16, csum_offset: u16) -> Told {
    let header = Header { flags: 1, csum_start, csum_offset, ..Header::default() };
    give(scene, header, &segment(1, 5000))
}
