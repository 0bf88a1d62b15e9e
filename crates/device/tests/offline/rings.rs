//! Violations in the rings, with the names of the requirements if they have one.

use crate::back_end::queues::{Header, Placed};
use crate::back_end::ring::{Layout, Used};
use crate::back_end::session::Closed;
use crate::back_end::split::Split;
use crate::hostile::{Comes, In, Lie, RING, Scene};

const DROPPED: Comes = Comes::Drops("length_error", 1);

/// Violations of lengths.
pub(crate) const LENGTHS: &[Lie] = &[
    ("len_0", In::Both, DROPPED, |scene| length(scene, |_| 0)),
    ("len_1", In::Both, DROPPED, |scene| length(scene, |_| 1)),
    ("len_11", In::Both, DROPPED, |scene| length(scene, |_| 11)),
    ("len_hdr", In::Both, DROPPED, |scene| behind_header(scene, 0)),
    ("len_hdr1", In::Both, DROPPED, |scene| behind_header(scene, 1)),
    ("len_hdr13", In::Both, DROPPED, |scene| behind_header(scene, 13)),
    // An Ethernet header, and nothing behind it.
    ("len_hdr14", In::Both, Comes::Anything, |scene| behind_header(scene, 14)),
    ("len_posted_plus_1", In::Both, DROPPED, |scene| length(scene, |posted| posted + 1)),
    ("len_64k", In::Both, DROPPED, |scene| length(scene, |_| 1 << 16)),
    ("len_max", In::Both, DROPPED, |scene| length(scene, |_| u32::MAX)),
];

/// Violations of the number of buffers of a packet.
pub(crate) const BUFFERS: &[Lie] = &[
    ("nb_0", In::Both, DROPPED, |scene| number(scene, 0)),
    ("nb_missing", In::Both, DROPPED, |scene| number(scene, 2)),
    ("nb_half_a_ring", In::Both, DROPPED, |scene| number(scene, RING / 2)),
    ("nb_ring_size", In::Both, DROPPED, |scene| number(scene, RING)),
    ("nb_more_than_posted", In::Both, DROPPED, |scene| number(scene, RING + 1)),
    ("nb_max", In::Both, DROPPED, |scene| number(scene, u16::MAX)),
    ("nb_missing_behind_full", In::Both, DROPPED, missing_behind_full),
    ("nb_missing_and_last_overlong", In::Both, DROPPED, last_too_long),
    ("nb_empty_continuations", In::Both, Comes::Nothing, continued_by_nothing),
    ("nb_beyond_64k", In::Both, DROPPED, beyond_64k),
    ("nb_too_many_pieces", In::Both, DROPPED, many_pieces),
    ("nb_byte_per_buffer", In::Both, Comes::Nothing, a_byte_each),
    ("nb_closed_midway", In::Both, Comes::Anything, closed_within),
];

/// Violations of buffer ids.
pub(crate) const IDS: &[Lie] = &[
    ("id_ring_size", In::Both, Comes::Counts("rx_bad_ids", 1), |scene| id(scene, RING.into())),
    ("id_65535", In::Both, Comes::Counts("rx_bad_ids", 1), |scene| id(scene, 0xffff)),
    ("id_max", In::Both, Comes::Counts("rx_bad_ids", 1), |scene| id(scene, u32::MAX)),
    ("id_not_posted", In::Both, Comes::Anything, given_before),
    ("id_twice_in_a_batch", In::Both, Comes::Counts("rx_bad_ids", 2), |scene| twice(scene, 100)),
    ("id_twice_large", In::Both, Comes::Counts("rx_bad_ids", 2), |scene| twice(scene, 1200)),
    ("id_all_again", In::Split, Comes::Anything, all_again),
    ("reverse_order", In::Split, Comes::Nothing, reverse),
];

/// Violations of the rings themselves.
pub(crate) const RINGS: &[Lie] = &[
    ("used_jump_beyond", In::Split, Comes::Renews, |scene| jump(scene, RING + 1)),
    ("used_jump_32768", In::Split, Comes::Renews, |scene| jump(scene, 1 << 15)),
    ("used_backwards", In::Split, Comes::Renews, |scene| jump(scene, u16::MAX)),
    ("used_stale_entries", In::Split, Comes::Anything, |scene| stale(scene, RING / 4)),
    ("used_stale_round", In::Split, Comes::Anything, |scene| stale(scene, RING)),
    ("used_to_and_fro", In::Split, Comes::Anything, to_and_fro),
    ("used_in_another_round", In::Packed, Comes::Nothing, another_round),
    ("used_flags_garbage", In::Split, Comes::Nothing, |scene| flags(scene, 0xfffe)),
    ("event_garbage", In::Both, Comes::Nothing, events),
    ("descriptors_overwritten", In::Split, Comes::Nothing, descriptors_overwritten),
    ("avail_ring_overwritten", In::Split, Comes::Nothing, avail_overwritten),
    ("spurious_kicks", In::Both, Comes::Nothing, spurious),
    ("no_calls", In::Both, Comes::Nothing, uncalled),
    ("silence", In::Both, Comes::Anything, silence),
];

/// Violations of packet headers.
pub(crate) const HEADERS: &[Lie] = &[
    ("flags_unknown", In::Both, Comes::Nothing, |scene| {
        good_behind(scene, Header { flags: 0xf8, ..Header::default() })
    }),
    ("hdrlen_big", In::Both, Comes::Nothing, |scene| {
        good_behind(scene, Header { hdr_len: u16::MAX, flags: 2, ..Header::default() })
    }),
    ("csum_garbage_unasked", In::Both, Comes::Nothing, |scene| {
        let (csum_start, csum_offset) = (0xffff, 0xffff);
        good_behind(scene, Header { csum_start, csum_offset, ..Header::default() })
    }),
    ("csum_beyond", In::Both, VNET_HEADER, |scene| checksum(scene, 0xffff, 0)),
    ("csum_offset_beyond", In::Both, VNET_HEADER, |scene| checksum(scene, 34, 0xffff)),
    ("csum_at_the_end", In::Both, VNET_HEADER, |scene| checksum(scene, 499, 0)),
    ("csum_anywhere", In::Both, Comes::Anything, |scene| checksum(scene, 200, 101)),
    ("gso_unneg", In::Both, VNET_HEADER, |scene| gso(scene, 5, 1000)),
    ("gso_ecn_unneg", In::Both, VNET_HEADER, |scene| gso(scene, 0x81, 1000)),
    ("gso_type_2", In::Both, VNET_HEADER, |scene| gso(scene, 2, 1000)),
    ("gso_type_3", In::Both, VNET_HEADER, |scene| gso(scene, 3, 1000)),
    ("gso_type_6", In::Both, VNET_HEADER, |scene| gso(scene, 6, 1000)),
    ("gso_type_255", In::Both, VNET_HEADER, |scene| gso(scene, 255, 1000)),
    ("gso_of_another_transport", In::Both, VNET_HEADER, |scene| gso(scene, 1, 1000)),
    ("gso_of_another_network", In::Both, VNET_HEADER, |scene| gso(scene, 4, 1000)),
    ("gso_size_0", In::Both, VNET_HEADER, |scene| gso(scene, 1, 0)),
    ("gso_size_max", In::Both, VNET_HEADER, |scene| gso(scene, 1, u16::MAX)),
];

const VNET_HEADER: Comes = Comes::Drops("vnet_header", 1);

pub(crate) type Told = Result<(), Closed>;

/// Places a valid packet in buffers, without reporting it.
pub(crate) fn placed(scene: &mut Scene, header: Header, len: usize) -> Result<Placed, Closed> {
    let frame = scene.frame(len);
    scene.device.place(0, header, &frame)
}

fn split(scene: &mut Scene) -> &mut Split {
    match &mut scene.device.ring(0).layout {
        Layout::Split(ring) => ring,
        Layout::Packed(_) => panic!("a packed ring"),
    }
}

fn length(scene: &mut Scene, of_posted: fn(u32) -> u32) -> Told {
    let mut packet = placed(scene, Header::default(), 300)?;
    packet.used[0].len_bytes = of_posted(packet.chains[0].len_bytes());
    scene.device.give(0, &packet);
    Ok(())
}

/// Reports a packet with that many bytes behind the header.
fn behind_header(scene: &mut Scene, bytes: u32) -> Told {
    let mut packet = placed(scene, Header::default(), 300)?;
    packet.used[0].len_bytes = u32::try_from(scene.device.header_bytes()).unwrap() + bytes;
    scene.device.give(0, &packet);
    Ok(())
}

/// Reports a packet in one buffer that is not full, with a wrong number of buffers.
fn number(scene: &mut Scene, buffers: u16) -> Told {
    let header = Header { num_buffers: Some(buffers), ..Header::default() };
    let packet = placed(scene, header, 100)?;
    scene.device.give(0, &packet);
    scene.await_count("rx_length_errors", 1)
}

/// Places a packet in that many full buffers, with one more buffer announced.
fn full(scene: &mut Scene, buffers: usize) -> Result<Placed, Closed> {
    scene.device.stocked(0, buffers)?;
    let bytes: u32 = scene.device.stock[0].iter().take(buffers).map(|it| it.len_bytes()).sum();
    let header =
        Header { num_buffers: Some(u16::try_from(buffers).unwrap() + 1), ..Header::default() };
    // The payload has no number: this packet is never counted as valid.
    let bytes = usize::try_from(bytes).unwrap() - scene.device.header_bytes();
    scene.device.place(0, header, &vec![0x5a; bytes])
}

fn missing_behind_full(scene: &mut Scene) -> Told {
    let packet = full(scene, 1)?;
    scene.device.give(0, &packet);
    scene.await_count("rx_length_errors", 1)
}

fn last_too_long(scene: &mut Scene) -> Told {
    let mut packet = full(scene, 1)?;
    let last = scene.device.buffer(0)?;
    packet.used.push(last.used(u32::MAX));
    scene.device.give(0, &packet);
    Ok(())
}

fn continued_by_nothing(scene: &mut Scene) -> Told {
    let header = Header { num_buffers: Some(4), ..Header::default() };
    let mut packet = placed(scene, header, 200)?;
    for _ in 0..3 {
        packet.used.push(scene.device.buffer(0)?.used(0));
    }
    scene.device.give(0, &packet);
    Ok(())
}

fn beyond_64k(scene: &mut Scene) -> Told {
    let mut packet = full(scene, 50)?;
    packet.rewrite(Header { num_buffers: Some(50), ..Header::default() });
    packet.used.truncate(50);
    scene.device.give(0, &packet);
    Ok(())
}

/// More buffers, with a few bytes each, than a packet can have pieces.
fn many_pieces(scene: &mut Scene) -> Told {
    scene.device.stocked(0, 60)?;
    let header = Header { num_buffers: Some(60), ..Header::default() };
    let mut packet = placed(scene, header, 1000)?;
    for _ in 1..60 {
        packet.used.push(scene.device.buffer(0)?.used(20));
    }
    scene.device.give(0, &packet);
    Ok(())
}

/// Valid packet with only the link header in its first buffer, and a byte in each further one.
fn a_byte_each(scene: &mut Scene) -> Told {
    let frame = scene.frame(46);
    let (first, rest) = frame.split_at(14);
    scene.device.stocked(0, 1 + rest.len())?;
    let num_buffers = Some(u16::try_from(1 + rest.len()).unwrap());
    let header = Header { num_buffers, ..Header::default() };
    let mut packet = scene.device.place(0, header, first)?;
    let memory = scene.device.memory.clone().unwrap();
    for byte in rest {
        let buffer = scene.device.buffer(0)?;
        memory.write(buffer.parts[0].address, &[*byte]);
        packet.used.push(buffer.used(1));
    }
    scene.device.give(0, &packet);
    Ok(())
}

fn closed_within(scene: &mut Scene) -> Told {
    let packet = full(scene, 2)?;
    scene.device.give(0, &packet);
    scene.restart();
    Ok(())
}

/// Returns a buffer with a wrong id.
fn id(scene: &mut Scene, id: u32) -> Told {
    let buffer = scene.device.buffer(0)?;
    scene.device.ring(0).give(&[Used { id, ..buffer.used(100) }]);
    scene.await_count("rx_bad_ids", 1)
}

fn given_before(scene: &mut Scene) -> Told {
    let packet = placed(scene, Header::default(), 100)?;
    scene.device.give(0, &packet);
    for _ in 0..10 {
        scene.device.give(0, &packet);
    }
    scene.restart();
    Ok(())
}

/// Returns a buffer three times at once: the driver may have posted it again after the first one,
/// without publishing it.
fn twice(scene: &mut Scene, len: usize) -> Told {
    let packet = placed(scene, Header::default(), len)?;
    scene.device.ring(0).give(&[packet.used[0]; 3]);
    scene.await_count("rx_bad_ids", 2)
}

/// Returns the whole ring twice.
fn all_again(scene: &mut Scene) -> Told {
    scene.device.stocked(0, 48)?;
    let stock: Vec<_> = scene.device.stock[0].drain(..).collect();
    let used: Vec<_> = stock.iter().map(|chain| chain.used(chain.len_bytes())).collect();
    scene.device.ring(0).give(&used);
    scene.device.ring(0).give(&used);
    scene.restart();
    Ok(())
}

fn reverse(scene: &mut Scene) -> Told {
    let packets = (0..20).map(|_| placed(scene, Header::default(), 1000));
    let packets = packets.collect::<Result<Vec<_>, _>>()?;
    let used: Vec<_> = packets.iter().rev().flat_map(|packet| packet.used.clone()).collect();
    scene.device.ring(0).give(&used);
    Ok(())
}

fn jump(scene: &mut Scene, by: u16) -> Told {
    scene.device.stocked(0, usize::from(RING) / 2)?;
    let ring = split(scene);
    ring.store_index(ring.given.wrapping_add(by));
    scene.device.ring(0).call();
    scene.device.wait("the end of the session", |_| false)
}

/// Advances the index over stale entries.
fn stale(scene: &mut Scene, by: u16) -> Told {
    scene.device.stocked(0, by.into())?;
    let ring = split(scene);
    ring.store_index(ring.given.wrapping_add(by));
    scene.device.ring(0).call();
    scene.restart();
    Ok(())
}

/// Moves the index forwards and backwards while the driver reads it.
fn to_and_fro(scene: &mut Scene) -> Told {
    scene.device.stocked(0, usize::from(RING) / 2)?;
    for by in (0..RING / 2).cycle().take(5000) {
        let ring = split(scene);
        ring.store_index(ring.given.wrapping_add(by));
        if by == 1 {
            scene.device.ring(0).call();
        }
    }
    scene.restart();
    Ok(())
}

/// Marks entries as used in another round.
fn another_round(scene: &mut Scene) -> Told {
    scene.device.stocked(0, 48)?;
    let Layout::Packed(ring) = &scene.device.ring(0).layout else { panic!("a split ring") };
    ring.give_in_another_round(40);
    scene.device.ring(0).call();
    Ok(())
}

fn flags(scene: &mut Scene, flags: u16) -> Told {
    let ring = split(scene);
    ring.place.memory.store(ring.device(), flags);
    Ok(())
}

/// Writes invalid kick events.
fn events(scene: &mut Scene) -> Told {
    for garbage in [0, 1, 0x7fff, 0x8000, 0xffff] {
        let ring = scene.device.ring(0);
        let place = ring.place().clone();
        let events = match &ring.layout {
            Layout::Split(ring) => vec![ring.used_entry(0) + 8 * u64::from(RING)],
            Layout::Packed(_) => vec![place.areas[2], place.areas[2] + 2],
        };
        events.into_iter().for_each(|at| place.memory.store(at, garbage));
        for _ in 0..10 {
            let packet = placed(scene, Header::default(), 100)?;
            scene.device.give(0, &packet);
        }
    }
    Ok(())
}

/// Overwrites descriptors, which only the driver writes. Buffers used meanwhile were taken before.
/// The descriptors are restored, since the test's device needs them.
fn descriptors_overwritten(scene: &mut Scene) -> Told {
    scene.device.stocked(0, 48)?;
    let place = scene.device.ring(0).place().clone();
    let before = place.memory.read_vec(place.areas[0], 16 * u32::from(RING));
    for garbage in [0xff, 0, 0x80] {
        place.memory.write(place.areas[0], &vec![garbage; before.len()]);
        let buffer = scene.device.stock[0].pop_front().unwrap();
        let (frame, count) = (scene.frame(100), scene.rig.delivered() + 1);
        let memory = scene.device.memory.clone().unwrap();
        memory.write(buffer.parts[0].address, &[&[0; 10], &[1, 0][..], &frame].concat());
        scene.device.ring(0).give(&[buffer.used(112)]);
        let Scene { rig, device, .. } = scene;
        rig.await_delivered(device, count)?;
    }
    place.memory.write(place.areas[0], &before);
    Ok(())
}

fn avail_overwritten(scene: &mut Scene) -> Told {
    scene.device.stocked(0, 48)?;
    let place = scene.device.ring(0).place().clone();
    let before = place.memory.read_vec(place.areas[1] + 4, 2 * u32::from(RING));
    place.memory.write(place.areas[1] + 4, &vec![0xff; before.len()]);
    place.memory.write(place.areas[1] + 4, &before);
    Ok(())
}

fn spurious(scene: &mut Scene) -> Told {
    for at in 0..2000 {
        scene.device.ring(at % 2).call();
    }
    for _ in 0..20 {
        let packet = placed(scene, Header::default(), 100)?;
        scene.device.ring(0).call();
        scene.device.give(0, &packet);
        (0..100).for_each(|_| scene.device.ring(0).call());
    }
    Ok(())
}

/// Returns buffers without a call, except for a last one.
fn uncalled(scene: &mut Scene) -> Told {
    for _ in 0..20 {
        let packet = placed(scene, Header::default(), 100)?;
        let _ = match &mut scene.device.ring(0).layout {
            Layout::Split(ring) => ring.give(&packet.used),
            Layout::Packed(ring) => ring.give(&packet.used),
        };
    }
    scene.device.ring(0).call();
    Ok(())
}

/// Keeps all buffers, and reports none of them.
fn silence(scene: &mut Scene) -> Told {
    scene.device.stocked(0, 48)?;
    scene.device.stock[0].clear();
    scene.restart();
    Ok(())
}

fn good_behind(scene: &mut Scene, header: Header) -> Told {
    for len in [60, 300, 1500, 5000] {
        let packet = placed(scene, header, len)?;
        scene.device.give(0, &packet);
    }
    Ok(())
}

fn checksum(scene: &mut Scene, csum_start: u16, csum_offset: u16) -> Told {
    let header = Header { flags: 1, csum_start, csum_offset, ..Header::default() };
    let packet = placed(scene, header, 500)?;
    scene.device.give(0, &packet);
    Ok(())
}

fn gso(scene: &mut Scene, gso_type: u8, gso_size: u16) -> Told {
    let (csum_start, csum_offset) = (34, if gso_type == 5 { 6 } else { 16 });
    let header =
        Header { flags: 1, gso_type, gso_size, csum_start, csum_offset, ..Header::default() };
    let packet = placed(scene, header, 5000)?;
    scene.device.give(0, &packet);
    Ok(())
}
