//! Every refusal of a tunnel, one field changed at a time.

use forebay_rx::coalesce::MergeRefusal;
use forebay_rx::parse::{Headers, Verify, parse_into};

use crate::coalescing::frames::{IP, Wire, tcp, udp};
use crate::coalescing::rig::{Rig, taken_apart};
use crate::coalescing::tunnel_frames::{Kind, Tunnelled, outside, tunnelled};
use crate::coalescing::tunnels::{GRE, kinds, poll};

/// A second packet that is refused, or the first one.
struct Case {
    name: &'static str,
    refusal: MergeRefusal,
    wires: [Wire; 2],
}

/// Two that are built alike.
fn both(name: &'static str, refusal: MergeRefusal, tunnel: &Tunnelled) -> Case {
    Case { name, refusal, wires: [tunnel.wire(), tunnel.nth(1).wire()] }
}

/// Two of which the second one is changed.
fn changed(
    name: &'static str,
    refusal: MergeRefusal,
    tunnel: &Tunnelled,
    change: impl FnOnce(&mut Tunnelled),
) -> Case {
    Case { name, refusal, wires: [tunnel.wire(), tunnel.nth(1).with(change).wire()] }
}

/// Two of which the second one is changed on the wire.
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
        changed(
            "UDP without a checksum inside, though all words add up",
            R::NoChecksum,
            &tunnelled(outside(Kind::Ip), udp()),
            |it| it.inner.is_unsummed = true,
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
                let mut headers = Headers { link: *link, ..Default::default() };
                let verify = Verify::Checksums;
                parse_into(&mut headers, bytes, *wire_len, *device_sum, verify);
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
