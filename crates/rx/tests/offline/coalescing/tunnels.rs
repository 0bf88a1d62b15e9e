//! Segments inside tunnels: merged as the kernel merges them, and given back byte for byte.

use forebay_rx::coalesce::{MergeRefusal, cut, innermost};
use forebay_rx::packet::Packet;
use forebay_rx::parse::{Link, Network, Transport, Verify, parse};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::coalescing::frames::{IP, Segment, Wire, folded, tcp, udp, words};
use crate::coalescing::refused::routed;
use crate::coalescing::rig::{Frame, Rig, taken_apart};
use crate::coalescing::tunnel_frames::{Kind, Outside, Tunnelled, outside, tunnelled};

pub(crate) const GRE: Kind = Kind::Gre { key: None, is_summed: false, is_bridged: false };

/// Every kind of tunnel, each around TCP over IPv4.
pub(crate) fn kinds() -> Vec<(&'static str, Tunnelled)> {
    let around = |outside: Outside| tunnelled(outside, tcp());
    let gre = |key, is_summed, is_bridged| outside(Kind::Gre { key, is_summed, is_bridged });
    let vxlan = || outside(Kind::Vxlan { network: 7 });
    let gpe = |is_bridged| outside(Kind::VxlanGpe { is_bridged });
    let geneve = |options: &[u8], is_bridged| {
        outside(Kind::Geneve { network: 9, options: options.to_vec(), is_bridged })
    };
    vec![
        ("IPIP", around(outside(Kind::Ip))),
        ("4in6", around(outside(Kind::Ip).v6())),
        ("4in6 with a route", around(outside(Kind::Ip).routed())),
        ("GRE", around(outside(GRE))),
        ("GRE with a key", around(gre(Some(5), false, false))),
        ("GRE with a checksum", around(gre(None, true, false))),
        ("GRE with both, over IPv6", around(gre(Some(5), true, false).v6())),
        ("GRE, bridged", around(gre(Some(5), true, true))),
        ("VXLAN", around(vxlan())),
        ("VXLAN with a checksum", around(vxlan().summed())),
        ("VXLAN over IPv6", around(vxlan().v6())),
        ("VXLAN over IPv6 with a checksum", around(vxlan().v6().summed())),
        ("VXLAN over IPv6 with a checksum and a route", around(vxlan().routed().summed())),
        ("VXLAN, tagged inside", around(vxlan()).with(|it| it.inner.vlans = vec![5, 6])),
        ("VXLAN-GPE", around(gpe(false).summed())),
        ("VXLAN-GPE, bridged", around(gpe(true))),
        ("GENEVE", around(geneve(&[], true))),
        ("GENEVE with options", around(geneve(&[1; 24], true).summed())),
        ("GENEVE, not bridged", around(geneve(&[2; 4], false))),
        ("PPPoE", around(outside(Kind::Ip)).with(|it| (it.outside, it.pppoe) = (vec![], Some(3)))),
        (
            "PPPoE, tagged",
            around(outside(Kind::Ip)).with(|it| {
                (it.outside, it.pppoe, it.vlans) = (vec![], Some(3), vec![8]);
            }),
        ),
        ("IPIP in PPPoE", around(outside(Kind::Ip)).with(|it| it.pppoe = Some(3))),
        (
            "PPPoE in VXLAN in PPPoE",
            around(vxlan().summed()).with(|it| {
                (it.pppoe, it.inner_pppoe) = (Some(3), Some(4));
            }),
        ),
        ("IPIP without a link header", around(outside(Kind::Ip)).with(|it| it.link = Link::Ip)),
    ]
}

/// Tunnels of each kind around each packet that can be merged.
pub(crate) fn everything() -> Vec<(String, Tunnelled)> {
    let timed = tcp().with(|it| it.options = crate::coalescing::frames::timestamps(1, 2));
    let inner = [
        ("TCP", tcp()),
        ("TCP over IPv6", tcp().with(|it| it.is_v6 = true)),
        ("TCP with a route", tcp().with(|it| (it.is_v6, it.extensions) = (true, routed(0)))),
        ("TCP with timestamps and odd payloads", timed.sized(33)),
        ("UDP", udp()),
        ("UDP over IPv6", udp().with(|it| it.is_v6 = true).sized(77)),
    ];
    let with = |(kind, tunnel): (&str, Tunnelled)| {
        inner.clone().map(|(name, segment): (&str, Segment)| {
            let vlans = tunnel.inner.vlans.clone();
            let inner = Segment { vlans, ..segment };
            (format!("{name} in {kind}"), Tunnelled { inner, ..tunnel.clone() })
        })
    };
    kinds().into_iter().flat_map(with).collect()
}

/// Packets that come out of one poll, all of one hash.
pub(crate) fn poll(rig: &mut Rig, wires: &[Wire]) -> Vec<Packet> {
    let wires: Vec<_> = wires.iter().map(|wire| wire.clone().hashed(5)).collect();
    rig.poll(&wires)
}

#[test]
fn lro_t1_every_tunnel_merges_reversibly() {
    for (name, tunnel) in everything() {
        for is_summed in [false, true] {
            let mut rig = Rig::gro();
            let wires = tunnel.run(5);
            let wires: Vec<_> =
                wires.into_iter().map(|it| if is_summed { it.summed() } else { it }).collect();
            let out = poll(&mut rig, &wires);
            let counts: Vec<_> = out.iter().map(Packet::segment_count).collect();
            assert_eq!((counts, rig.verdicts().0), (vec![5], vec![]), "{name}");
            check_whole(&name, &out[0], &tunnel, 5);
            let mut segments = Vec::new();
            out.into_iter().for_each(|it| forebay_rx::coalesce::resegment(it, &mut segments));
            for (segment, wire) in segments.iter().zip(&wires) {
                let parsed = parse(&wire.bytes, wire.wire_len, wire.link, Verify::Checksums);
                assert_eq!(segment.headers, parsed, "{name}");
            }
            assert_eq!(segments.iter().map(Frame::of).collect::<Vec<_>>(), rig.fed, "{name}");
        }
    }
}

/// A whole is what one segment of all the payload would be.
fn check_whole(name: &str, packet: &Packet, tunnel: &Tunnelled, count: u32) {
    assert!(packet.is_merged_tunnel() && packet.is_merged(), "{name}");
    let len = tunnel.inner.payload.len();
    assert_eq!(usize::from(packet.gso_size()), len, "{name}");
    let whole = tunnel.clone().with(|it| it.inner = it.inner.clone().sized(len * count as usize));
    let whole = whole.wire();
    let bytes: Vec<u8> = packet.fragments().flatten().copied().collect();
    assert_eq!(bytes, whole.bytes, "{name}");
    assert_eq!(packet.wire_len, whole.wire_len, "{name}");
    let inner = innermost(packet.frame.data(), packet.wire_len, &packet.headers).unwrap();
    assert_eq!(usize::from(inner.payload_len), len * count as usize, "{name}");
    assert_eq!(inner.transport == Transport::Udp, tunnel.inner.is_udp, "{name}");
    assert_eq!(inner.network == Network::Ipv6, tunnel.inner.is_v6, "{name}");
    let offsets: Vec<_> = packet.segments().map(|it| it.offset as usize).collect();
    assert_eq!(offsets, (0..count as usize).map(|it| it * len).collect::<Vec<_>>(), "{name}");
    let payload: Vec<u8> = packet.segments().flat_map(|it| it.payload.to_vec()).collect();
    assert_eq!(payload, whole.bytes[whole.bytes.len() - payload.len()..], "{name}");
}

/// A handler's edits of the outer UDP header reach every segment, whatever its ports are.
#[test]
fn lro_t7_edited_outer_ports_reach_segments() {
    for (name, tunnel) in kinds() {
        let Some(udp_at) = outer_udp_at(&tunnel) else { continue };
        for port in [4789u16, 6081, 5000] {
            for clears_checksum in [false, true] {
                let mut rig = Rig::gro();
                let mut out = poll(&mut rig, &tunnel.run(5));
                assert_eq!(out.len(), 1, "{name}");
                let edit = |udp: &mut [u8]| edit_port(udp, port, clears_checksum);
                edit(&mut out[0].frame.data_mut()[udp_at..]);
                let expected = tunnel.run(5).into_iter().map(|mut wire| {
                    edit(&mut wire.bytes[udp_at..]);
                    wire.bytes
                });
                let expected: Vec<_> = expected.collect();
                let mut segments = Vec::new();
                out.into_iter().for_each(|it| forebay_rx::coalesce::resegment(it, &mut segments));
                let found: Vec<_> = segments.iter().map(|it| it.frame.data().to_vec()).collect();
                assert_eq!(found, expected, "{name} to {port}");
            }
        }
    }
}

/// An IP ID that a handler writes is the first segment's. The others have it, too, if the IDs were constant, or go on from it.
#[test]
fn lro_t7_edited_ids_reach_segments() {
    const WRITTEN: u16 = 9;
    let set = |bytes: &mut [u8], id: u16| {
        bytes[IP + 4..IP + 6].copy_from_slice(&id.to_be_bytes());
        let sum = words(&[&bytes[IP..IP + 10], &bytes[IP + 12..IP + 20]].concat());
        bytes[IP + 10..IP + 12].copy_from_slice(&(!folded(sum)).to_be_bytes());
    };
    let plain = tunnelled(outside(Kind::Ip), tcp()).with(|it| it.outside.clear());
    for tunnel in [plain, tunnelled(outside(Kind::Ip), tcp())] {
        for (count, step) in [(2, 0), (3, 0), (5, 0), (3, 1), (5, 1)] {
            let mut wires = tunnel.run(count);
            if step == 0 {
                wires.iter_mut().for_each(|wire| set(&mut wire.bytes, 4_000));
            }
            let mut rig = Rig::gro();
            let hashed: Vec<_> = wires.iter().map(|wire| wire.clone().hashed(5)).collect();
            let mut out = rig.poll(&hashed);
            assert_eq!(out.len(), 1);
            set(out[0].frame.data_mut(), WRITTEN);
            let expected = (0..).zip(wires).map(|(number, mut wire)| {
                set(&mut wire.bytes, WRITTEN + number * step);
                wire.bytes
            });
            let expected: Vec<_> = expected.collect();
            let found: Vec<_> = taken_apart(out).into_iter().map(|frame| frame.bytes).collect();
            assert_eq!(found, expected, "{count} segments, ids rise by {step}");
        }
    }
}

/// A copy has no headers but its own: only what its port leads to is a guess, which its other headers confirm.
#[test]
fn lro_t7_copy_without_tunnel_is_refused() {
    for (name, tunnel) in kinds() {
        let Some(udp_at) = outer_udp_at(&tunnel) else { continue };
        let mut rig = Rig::gro();
        let out = poll(&mut rig, &tunnel.run(4));
        for is_tunnel in [true, false] {
            let mut copy = out[0].copied(&mut rig.pool).unwrap();
            edit_port(&mut copy.frame.data_mut()[udp_at..], 5000, false);
            if !is_tunnel {
                copy.frame.data_mut()[udp_at + 4..udp_at + 6].fill(0); // its length
            }
            let mut segments = Vec::new();
            let outcome = cut(copy, &mut rig.pool, &mut segments);
            assert_eq!(
                (outcome.is_ok(), segments.len()),
                (is_tunnel, 4 * usize::from(is_tunnel)),
                "{name}"
            );
            for (segment, fed) in segments.iter().zip(&rig.fed) {
                let mut bytes = fed.bytes.clone();
                edit_port(&mut bytes[udp_at..], 5000, false);
                assert_eq!(segment.frame.data(), bytes, "{name}");
            }
            let refused = outcome.err();
            segments.into_iter().chain(refused).for_each(|packet| rig.pool.put(packet.frame));
        }
        out.into_iter().for_each(|packet| rig.pool.put(packet.frame));
    }
}

/// Changes the destination port, and the checksum with it (RFC 1624) unless it is cleared.
fn edit_port(udp: &mut [u8], port: u16, clears_checksum: bool) {
    let word = |at: usize| u16::from_be_bytes([udp[at], udp[at + 1]]);
    let (before, checksum) = (word(2), word(6));
    let sum = u32::from(!checksum) + u32::from(!before) + u32::from(port);
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap();
    let is_summed = checksum != 0 && !clears_checksum;
    udp[2..4].copy_from_slice(&port.to_be_bytes());
    udp[6..8].copy_from_slice(&if is_summed { !folded } else { 0 }.to_be_bytes());
}

/// Offset of the outer UDP header, if there is one.
fn outer_udp_at(tunnel: &Tunnelled) -> Option<usize> {
    let wire = tunnel.wire();
    let outer = parse(&wire.bytes, wire.wire_len, wire.link, Verify::Nothing);
    (outer.transport == Transport::Udp).then_some(outer.transport_offset.into())
}

#[test]
fn lro_t1_outer_ids_stay_or_rise() {
    for (step, inner_step) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let tunnel = tunnelled(outside(Kind::Ip), tcp());
        let wires = (0..4).map(|number| {
            let mut it = tunnel.nth(number);
            let ahead = u16::try_from(number).unwrap();
            it.outside[0].id = tunnel.outside[0].id.wrapping_add(ahead * step);
            it.inner.id = tunnel.inner.id.wrapping_add(ahead * inner_step);
            it.wire()
        });
        let wires: Vec<_> = wires.collect();
        let mut rig = Rig::gro();
        let out = poll(&mut rig, &wires);
        assert_eq!(out.len(), 1, "{step} {inner_step}");
        assert_eq!(taken_apart(out), rig.fed, "{step} {inner_step}");
    }
}

/// A field of the second packet, and what becomes of it: the kernel's rules, said once more.
#[derive(Clone, Debug)]
enum Change {
    OuterId(u16),
    InnerId(u16),
    OuterTtl(u8),
    OuterTos(u8),
    Host(u8),
    Port(u16),
    Network(u8),
    Session(u16),
    Ttl(u8),
    Window(u16),
    Skip(u32),
    Longer(usize),
}

impl Change {
    fn make(&self, tunnel: &mut Tunnelled) {
        let outside = tunnel.outside.first_mut();
        match *self {
            Self::OuterId(id) => outside.into_iter().for_each(|it| it.id = id),
            Self::InnerId(id) => tunnel.inner.id = id,
            Self::OuterTtl(ttl) => outside.into_iter().for_each(|it| it.ttl = ttl),
            Self::OuterTos(tos) => outside.into_iter().for_each(|it| it.tos = tos),
            Self::Host(host) => outside.into_iter().for_each(|it| it.host = host),
            Self::Port(port) => outside.into_iter().for_each(|it| it.port = port),
            Self::Network(to) => outside.into_iter().for_each(|it| match &mut it.kind {
                Kind::Vxlan { network } | Kind::Geneve { network, .. } => *network = to.into(),
                Kind::Gre { key: Some(key), .. } => *key = to.into(),
                _ => {}
            }),
            Self::Session(to) => {
                let sessions = [&mut tunnel.pppoe, &mut tunnel.inner_pppoe];
                sessions.into_iter().flatten().for_each(|session| *session = to);
            }
            Self::Ttl(ttl) => tunnel.inner.ttl = ttl,
            Self::Window(window) => tunnel.inner.window = window,
            Self::Skip(ahead) => tunnel.inner.sequence = tunnel.inner.sequence.wrapping_add(ahead),
            Self::Longer(len) => {
                let sized = tunnel.inner.payload.len() + len;
                tunnel.inner = tunnel.inner.clone().sized(sized);
            }
        }
    }
}

/// Naive verdict: two packets merge if, but for lengths, ids, the sequence number and checksums, they were
/// built alike, and those few follow.
fn merges(first: &Tunnelled, second: &Tunnelled) -> bool {
    let is_ip4 = |outside: &Outside| !outside.is_v6;
    let id_follows = |first: u16, second: u16| second.wrapping_sub(first) <= 1;
    let outer_follow = first
        .outside
        .iter()
        .zip(&second.outside)
        .all(|(first, second)| !is_ip4(first) || id_follows(first.id, second.id));
    let inner_follow = first.inner.is_v6 || id_follows(first.inner.id, second.inner.id);
    let mut alike = second.clone();
    for (outside, second) in alike.outside.iter_mut().zip(&first.outside) {
        outside.id = second.id;
        let is_udp = !matches!(outside.kind, Kind::Ip | Kind::Gre { .. });
        outside.port = if is_udp { outside.port } else { second.port };
    }
    let (len, next_len) = (first.inner.payload.len(), second.inner.payload.len());
    let next = if first.inner.is_udp {
        second.inner.sequence
    } else {
        first.inner.sequence.wrapping_add(u32::try_from(len).unwrap())
    };
    let is_next = second.inner.sequence == next;
    alike.inner.id = first.inner.id;
    alike.inner.sequence = first.inner.sequence;
    if first.inner.is_udp {
        (alike.inner.window, alike.inner.acknowledgement) = (first.inner.window, 9);
    }
    alike.inner.payload.clone_from(&first.inner.payload);
    let is_alike = format!("{alike:?}") == format!("{first:?}");
    outer_follow && inner_follow && is_alike && is_next && next_len <= len
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        any::<u16>().prop_map(Change::OuterId),
        any::<u16>().prop_map(Change::InnerId),
        (59u8..62).prop_map(Change::OuterTtl),
        (0u8..3).prop_map(Change::OuterTos),
        (1u8..3).prop_map(Change::Host),
        (49_999u16..50_002).prop_map(Change::Port),
        (5u8..10).prop_map(Change::Network),
        (3u16..5).prop_map(Change::Session),
        (63u8..66).prop_map(Change::Ttl),
        (511u16..514).prop_map(Change::Window),
        (0u32..2).prop_map(Change::Skip),
        (0usize..2).prop_map(Change::Longer),
    ]
}

fn any_tunnel() -> impl Strategy<Value = Tunnelled> {
    let all: Vec<_> = everything().into_iter().map(|(_, tunnel)| tunnel).collect();
    let ids = (any::<u16>(), any::<u16>(), any::<bool>());
    let tags = proptest::collection::vec(1u16..9, 0..3);
    (proptest::sample::select(all), ids, tags, 1usize..600).prop_map(
        |(mut tunnel, (outer, inner, dont_fragment), vlans, len)| {
            for outside in &mut tunnel.outside {
                (outside.id, outside.dont_fragment) = (outer, dont_fragment);
            }
            tunnel.inner.id = inner;
            tunnel.inner = tunnel.inner.sized(len);
            tunnel.vlans = vlans;
            tunnel
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 1000 }))]

    /// Against the naive verdict; merged or not, what went in comes out.
    #[test]
    fn lro_t3_random_tunnels_match_naive_verdict(
        first in any_tunnel(),
        changes in proptest::collection::vec(change(), 0..3),
        is_summed: bool,
    ) {
        let mut second = first.nth(1);
        changes.iter().for_each(|change| change.make(&mut second));
        let wires = [first.wire(), second.wire()];
        let wires = wires.map(|it| if is_summed { it.summed() } else { it });
        let mut rig = Rig::gro();
        let out = poll(&mut rig, &wires);
        prop_assert_eq!(out.len() == 1, merges(&first, &second), "{:?}", rig.verdicts());
        prop_assert_eq!(taken_apart(out), rig.fed);
    }

    /// Cut off anywhere, or overwritten: nothing is lost, and what is merged comes apart again.
    #[test]
    fn lro_t3_damaged_tunnels_come_apart(
        tunnel in any_tunnel(),
        deeper in any_tunnel(),
        is_nested: bool,
        edits in proptest::collection::vec((any::<Index>(), any::<u8>(), any::<Index>()), 0..4),
        cut in proptest::option::of(any::<Index>()),
    ) {
        let tunnel = if is_nested {
            tunnel.with(|it| it.outside.extend(deeper.outside))
        } else {
            tunnel
        };
        let mut wires = tunnel.run(4);
        for (at, byte, which) in &edits {
            let wire = which.get(&wires).clone();
            let at = at.index(wire.bytes.len().min(160));
            wires[which.index(4)] = wire.edit(at, &[*byte]);
        }
        if let Some(cut) = cut {
            let len = cut.index(wires[2].bytes.len());
            wires[2] = wires[2].clone().snapped(len);
        }
        let mut rig = Rig::gro();
        let out = poll(&mut rig, &wires);
        prop_assert_eq!(taken_apart(out), rig.fed);
    }
}

#[test]
fn lro_t1_tunnels_fill_up_their_length() {
    for (name, tunnel) in kinds() {
        let tunnel = tunnel.with(|it| it.inner = it.inner.clone().sized(1400));
        let mut rig = Rig::gro();
        let out = poll(&mut rig, &tunnel.run(60));
        let (first, link_bytes) = (&out[0], if tunnel.link == Link::Ip { 0 } else { IP });
        let tags_bytes = tunnel.vlans.len() * 4;
        let pppoe_bytes = if tunnel.pppoe.is_some() { 6 } else { 0 };
        let counted = first.wire_len as usize - link_bytes - tags_bytes - pppoe_bytes;
        assert!((65_535 - 1400..=65_535).contains(&counted), "{name}: {counted}");
        assert_eq!(taken_apart(out), rig.fed, "{name}");
    }
}

/// A copy in one frame, which is cut where ids rise as they did.
#[test]
fn lro_t1_copied_tunnel_is_cut_alike() {
    for (name, tunnel) in kinds() {
        let mut rig = Rig::gro();
        let out = poll(&mut rig, &tunnel.run(4));
        let copy = out[0].copied(&mut rig.pool).unwrap();
        assert!(copy.is_gso() && copy.is_merged_tunnel(), "{name}");
        let mut segments = Vec::new();
        cut(copy, &mut rig.pool, &mut segments).unwrap();
        let bytes: Vec<_> = segments.iter().map(|it| it.frame.data().to_vec()).collect();
        let fed: Vec<_> = rig.fed.iter().map(|it| it.bytes.clone()).collect();
        assert_eq!(bytes, fed, "{name}");
    }
}

/// Fragments have no ports, so this may be of any flow inside.
#[test]
fn lro_t3_inner_fragment_lets_tunnels_go() {
    let pppoe = tunnelled(outside(Kind::Ip), tcp());
    let pppoe = pppoe.with(|it| (it.outside, it.pppoe) = (vec![], Some(3)));
    for (tunnel, at) in [(tunnelled(outside(Kind::Ip), tcp()), IP + 20), (pppoe, IP + 8)] {
        let fragment = tunnel.nth(1).wire().edit(at + 6, &[0, 3]).hashed(6);
        let mut rig = Rig::gro();
        rig.feed(&[tunnel.wire().hashed(5), tunnel.nth(2).wire().hashed(9), fragment]);
        assert_eq!(rig.verdicts().0, [(MergeRefusal::Fragment, 1)]);
        assert_eq!(rig.coalescer.held(), 0);
        assert_eq!(taken_apart(std::mem::take(&mut rig.out)), rig.fed);
    }
}
