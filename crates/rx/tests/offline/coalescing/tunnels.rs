//! Segments inside tunnels: merged as the kernel merges them, and given back byte for byte.

use forebay_rx::coalesce::{MergeRefusal, innermost};
use forebay_rx::packet::Packet;
use forebay_rx::parse::{Link, Network, Transport, Verify, parse};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::coalescing::frames::{IP, Segment, Wire, tcp, udp};
use crate::coalescing::rig::{Frame, Rig, taken_apart};
use crate::coalescing::tunnel_frames::{Kind, Outside, Tunnelled, outside, tunnelled};

const GRE: Kind = Kind::Gre { key: None, is_summed: false, is_bridged: false };

/// Every kind of tunnel, each around TCP over IPv4.
fn kinds() -> Vec<(&'static str, Tunnelled)> {
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
        ("GRE", around(outside(GRE))),
        ("GRE with a key", around(gre(Some(5), false, false))),
        ("GRE with a checksum", around(gre(None, true, false))),
        ("GRE with both, over IPv6", around(gre(Some(5), true, false).v6())),
        ("GRE, bridged", around(gre(Some(5), true, true))),
        ("VXLAN", around(vxlan())),
        ("VXLAN with a checksum", around(vxlan().summed())),
        ("VXLAN over IPv6", around(vxlan().v6())),
        ("VXLAN over IPv6 with a checksum", around(vxlan().v6().summed())),
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

/// The same around all that can be merged.
fn everything() -> Vec<(String, Tunnelled)> {
    let timed = tcp().with(|it| it.options = crate::coalescing::frames::timestamps(1, 2));
    let inner = [
        ("TCP", tcp()),
        ("TCP over IPv6", tcp().with(|it| it.is_v6 = true)),
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
fn poll(rig: &mut Rig, wires: &[Wire]) -> Vec<Packet> {
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

/// A second packet that is refused, or the first one.
struct Case {
    name: &'static str,
    refusal: MergeRefusal,
    wires: [Wire; 2],
}

/// Parts that both packets share.
fn both(name: &'static str, refusal: MergeRefusal, tunnel: &Tunnelled) -> Case {
    Case { name, refusal, wires: [tunnel.wire(), tunnel.nth(1).wire()] }
}

/// Part of the second packet that is changed.
fn changed(
    name: &'static str,
    refusal: MergeRefusal,
    tunnel: &Tunnelled,
    change: impl FnOnce(&mut Tunnelled),
) -> Case {
    Case { name, refusal, wires: [tunnel.wire(), tunnel.nth(1).with(change).wire()] }
}

/// The same, on the wire.
fn edited(
    name: &'static str,
    refusal: MergeRefusal,
    tunnel: &Tunnelled,
    change: impl Fn(Wire) -> Wire,
) -> Case {
    Case { name, refusal, wires: [tunnel.wire(), change(tunnel.nth(1).wire())] }
}

/// Differences outside.
fn by_outside() -> Vec<Case> {
    use MergeRefusal as R;
    let ipip = tunnelled(outside(Kind::Ip), tcp());
    let ip6 = tunnelled(outside(Kind::Ip).v6(), tcp());
    let gre =
        tunnelled(outside(Kind::Gre { key: Some(1), is_summed: false, is_bridged: false }), tcp());
    let vxlan = tunnelled(outside(Kind::Vxlan { network: 7 }), tcp());
    let geneve = tunnelled(
        outside(Kind::Geneve { network: 7, options: vec![1; 8], is_bridged: true }),
        tcp(),
    );
    let pppoe = ipip.clone().with(|it| (it.outside, it.pppoe) = (vec![], Some(3)));
    let kind = |kind: Kind| move |it: &mut Tunnelled| it.outside[0].kind = kind;
    vec![
        changed("TTL", R::OuterTtl, &ipip, |it| it.outside[0].ttl = 7),
        changed("hop limit", R::OuterTtl, &ip6, |it| it.outside[0].ttl = 7),
        changed("TOS", R::OuterTos, &ipip, |it| it.outside[0].tos = 3),
        changed("traffic class", R::OuterTos, &ip6, |it| it.outside[0].tos = 0x30),
        changed("upper traffic class", R::OuterTos, &ip6, |it| it.outside[0].tos = 3),
        changed("DF", R::OuterIpHeader, &ipip, |it| it.outside[0].dont_fragment = true),
        changed("flow label", R::OuterIpHeader, &ip6, |it| it.outside[0].flow_label = 7),
        changed("id", R::OuterIpId, &ipip, |it| it.outside[0].id = 7),
        changed("id inside", R::IpId, &ipip, |it| it.inner.id = 7),
        changed("host", R::OtherTunnel, &ipip, |it| it.outside[0].host = 7),
        changed("IPv6 host", R::OtherTunnel, &ip6, |it| it.outside[0].host = 7),
        changed("UDP port", R::OtherTunnel, &vxlan, |it| it.outside[0].port = 7),
        changed("a checksum", R::OtherTunnel, &vxlan, |it| it.outside[0].is_summed = true),
        changed("VNI", R::OtherTunnel, &vxlan, kind(Kind::Vxlan { network: 8 })),
        changed("GRE key", R::OtherTunnel, &gre, |it| {
            it.outside[0].kind = Kind::Gre { key: Some(2), is_summed: false, is_bridged: false };
        }),
        changed("no GRE key", R::OtherTunnel, &gre, kind(GRE)),
        changed("GENEVE options", R::OtherTunnel, &geneve, |it| {
            it.outside[0].kind = Kind::Geneve { network: 7, options: vec![2; 8], is_bridged: true };
        }),
        changed("fewer options", R::OtherTunnel, &geneve, |it| {
            it.outside[0].kind = Kind::Geneve { network: 7, options: vec![1; 4], is_bridged: true };
        }),
        changed("session", R::OtherTunnel, &pppoe, |it| it.pppoe = Some(4)),
        changed("MAC address inside", R::OtherTunnel, &vxlan, |it| it.inner.mac = 9),
        changed("tag inside", R::OtherTunnel, &vxlan, |it| it.inner.vlans = vec![9]),
        changed("no tunnel", R::OtherTunnel, &ipip, |it| it.outside.clear()),
        changed("tag", R::LinkHeader, &vxlan.clone().with(|it| it.vlans = vec![1]), |it| {
            it.vlans = vec![2];
        }),
        changed("flow inside", R::OtherFlow, &vxlan, |it| it.inner.port = 9),
        changed("TTL inside", R::Ttl, &vxlan, |it| it.inner.ttl = 9),
        changed("sequence inside", R::Sequence, &vxlan, |it| it.inner.sequence += 1),
        changed("pure acknowledgement inside", R::NoPayload, &vxlan, |it| it.inner.payload.clear()),
    ]
}

/// Tunnels that are not merged, whatever came before.
fn by_itself() -> Vec<Case> {
    use MergeRefusal as R;
    let at = IP;
    let ipip = tunnelled(outside(Kind::Ip), tcp());
    let ip6 = tunnelled(outside(Kind::Ip).v6(), tcp());
    let gre = tunnelled(outside(GRE), tcp());
    let summed =
        tunnelled(outside(Kind::Gre { key: None, is_summed: true, is_bridged: false }), tcp());
    let vxlan = tunnelled(outside(Kind::Vxlan { network: 7 }), tcp());
    let geneve =
        tunnelled(outside(Kind::Geneve { network: 7, options: vec![], is_bridged: true }), tcp());
    let pppoe = ipip.clone().with(|it| (it.outside, it.pppoe) = (vec![], Some(3)));
    let deeper = |kind: Kind| ipip.clone().with(|it| it.outside.push(outside(kind)));
    let write = |at: usize, bytes: &'static [u8]| move |wire: Wire| wire.edit(at, bytes);
    let ip_len = |ahead: i16| {
        move |wire: Wire| {
            let len = u16::from_be_bytes([wire.bytes[IP + 2], wire.bytes[IP + 3]]);
            let len = len.wrapping_add_signed(ahead).to_be_bytes();
            wire.edit(IP + 2, &len).resummed()
        }
    };
    vec![
        both("IPIP in IPIP", R::TunnelDepth, &deeper(Kind::Ip)),
        both("GRE in IPIP", R::TunnelDepth, &deeper(GRE)),
        both("VXLAN in IPIP", R::TunnelDepth, &deeper(Kind::Vxlan { network: 1 })),
        edited("GRE with a sequence number", R::TunnelKind, &gre, write(at + 20, &[0x10])),
        edited("GRE with routing", R::TunnelKind, &gre, write(at + 20, &[0x40])),
        edited("GRE of version 1", R::TunnelKind, &gre, write(at + 21, &[1])),
        edited("GRE's recursion", R::TunnelKind, &gre, write(at + 20, &[1])),
        edited("GRE around ARP", R::Protocol, &gre, write(at + 22, &[8, 6])),
        edited("GRE checksum", R::TunnelChecksum, &summed, write(at + 24, &[1, 2])),
        edited("GRE's 0xffff for 0", R::OddChecksum, &summed, write(at + 24, &[0xff; 2])),
        edited("no VNI", R::TunnelKind, &vxlan, write(at + 28, &[0])),
        edited("ARP in VXLAN", R::Protocol, &vxlan, write(at + 36 + 12, &[8, 6])),
        edited("GENEVE's version", R::TunnelKind, &geneve, write(at + 28, &[0x40])),
        edited("GENEVE's control", R::TunnelKind, &geneve, write(at + 29, &[0x80])),
        edited("PPPoE discovery", R::TunnelKind, &pppoe, write(at + 1, &[9])),
        edited("PPP's control", R::Protocol, &pppoe, write(at + 6, &[0xc0, 0x21])),
        edited("PPPoE length", R::Padded, &pppoe, write(at + 4, &[0, 100])),
        edited(
            "UDP checksum",
            R::TunnelChecksum,
            &vxlan.clone().with(|it| {
                it.outside[0].is_summed = true;
            }),
            write(at + 26, &[1, 2]),
        ),
        edited("IPv4 checksum", R::IpChecksum, &ipip, write(at + 10, &[1, 2])),
        edited("IPv4 checksum inside", R::IpChecksum, &ipip, write(at + 30, &[1, 2])),
        edited("TCP checksum inside", R::L4Checksum, &ipip, write(at + 56, &[1, 2])),
        edited("fragment", R::Fragment, &ipip, |it| it.edit(IP + 6, &[0x20, 0]).resummed()),
        edited("padded", R::Padded, &ipip, |it| it.padded(&[0; 3])),
        edited("padded over IPv6", R::Padded, &ip6, |it| it.padded(&[0; 3])),
        edited("trailer inside", R::TunnelLength, &ipip, |it| ip_len(3)(it.padded(&[0; 3]))),
        edited("shorter UDP", R::TunnelLength, &vxlan, |it| {
            let len = u16::from_be_bytes([it.bytes[at + 24], it.bytes[at + 25]]) - 1;
            it.edit(at + 24, &len.to_be_bytes())
        }),
        edited(
            "UDP without a checksum inside",
            R::NoChecksum,
            &tunnelled(outside(Kind::Ip), udp()),
            write(at + 46, &[0; 2]),
        ),
        edited("snapped", R::Snapped, &vxlan, |it| it.snapped(70)),
    ]
}

/// Refusals that are tried here.
pub(crate) fn refusals() -> impl Iterator<Item = MergeRefusal> {
    by_outside().into_iter().chain(by_itself()).map(|case| case.refusal)
}

#[test]
fn lro_t2_tunnel_refusals_have_names() {
    for case in by_outside().into_iter().chain(by_itself()) {
        for is_summed in [false, true] {
            let wires = case.wires.clone().map(|it| it.hashed(5));
            let wires = wires.map(|it| if is_summed { it.summed() } else { it });
            let mut rig = Rig::gro();
            let out = rig.poll(&wires);
            let (refused, _) = rig.verdicts();
            let name = case.name;
            assert!(refused.iter().any(|(it, _)| *it == case.refusal), "{name}: {refused:?}");
            assert_eq!(refused.len(), 1, "{name}: {refused:?}");
            for (packet, wire) in out.iter().zip(&wires) {
                let Wire { bytes, wire_len, link, device_sum, .. } = wire;
                let mut headers = forebay_rx::parse::Headers { link: *link, ..Default::default() };
                let verify = Verify::Checksums;
                forebay_rx::parse::parse_into(&mut headers, bytes, *wire_len, *device_sum, verify);
                assert_eq!(packet.headers, headers, "{name}: what is known of it");
            }
            assert_eq!(taken_apart(out), rig.fed, "{name}");
        }
    }
}

#[test]
fn lro_t2_lro_mode_merges_no_tunnel() {
    for (name, tunnel) in kinds() {
        let mut rig = Rig::lro(1500);
        let out = poll(&mut rig, &tunnel.run(3));
        assert_eq!(rig.verdicts(), (vec![(MergeRefusal::Protocol, 3)], vec![]), "{name}");
        assert_eq!(taken_apart(out), rig.fed, "{name}");
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
