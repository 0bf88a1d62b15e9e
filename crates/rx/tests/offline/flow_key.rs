//! Flow keys: inner headers of tunnels, quoted packets of errors, numbers and connection IDs; and
//! hostile frames.
#![expect(
    clippy::unwrap_used,
    reason = "frames that the tests build are short, and their rules are right"
)]

mod frames; // frames with tunnels, and the key that is found in one

use std::net::Ipv4Addr;

use forebay_rx::flow_key::{FlowKey, FlowKeyRules, KeyRule, LAYERS_MAX};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::parse::{Headers, Link, Verify, View, parse};
use proptest::prelude::*;

use self::frames::{Told, ethernet, inner_packet, ipv4, ipv6, tcp, tunnels, udp};

const FROM: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const TO: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const PORTS: [u16; 2] = [40_000, 53];

#[test]
fn flk_2_inner_flow_tells_in_every_tunnel() {
    let inner = inner_packet(PORTS);
    for (name, frame, layers) in tunnels(&inner) {
        let told = Told::of(&frame, "inner");
        assert_eq!((told.layers.as_str(), told.rule), (&*layers, KeyRule::Inner), "{name}");
        assert_eq!(told.tuple.as_deref(), Some("10.1.0.1 40000 10.1.0.2 53"), "{name}");
        assert_eq!(told.hash, Told::of(&ethernet(0x0800, &inner), "outer").hash, "{name}");
    }
}

#[test]
fn flk_2_mac_address_is_no_ip_version() {
    let labels = [0, 2, 1, 64];
    for mac in [[0x64, 0xd1, 0x54, 0, 0, 1], [0x48, 0xa9, 0x8a, 0, 0, 1], [0, 0x50, 0x56, 0, 0, 1]]
    {
        let keys = [1, 2, 3].map(|id| {
            let mut inner = inner_packet(PORTS);
            inner[5] = id;
            let bridged = [&mac[..], &[2; 6], &[8, 0], &inner].concat();
            let len = u16::try_from(bridged.len()).unwrap().to_be_bytes();
            let gtpu = [&[0x30, 255][..], &len, &[0, 0, 0, 7], &bridged].concat();
            let gtpu = ipv4([1; 4], [2; 4], 17, &udp([2152, 2152], &gtpu));
            [ethernet(0x8847, &[&labels[..], &bridged].concat()), ethernet(0x0800, &gtpu)]
                .map(|frame| Told::of(&frame, "inner"))
                .map(|told| (told.rule, told.tuple, told.hash))
        });
        let plain = Told::of(&ethernet(0x0800, &inner_packet(PORTS)), "outer").hash;
        for (rule, tuple, hash) in keys.as_flattened() {
            assert_eq!((*rule, *hash), (KeyRule::Inner, plain), "{mac:02x?} {tuple:?}");
        }
    }
    // Nothing proves what is in these: the frame has no inner flow.
    let arp = [&[0x64, 0xd1, 0x54, 0, 0, 1][..], &[2; 6], &[8, 6], &[0; 46]].concat();
    for behind in [&arp[..], &[0x45; 60], &[0; 60]] {
        let told = Told::of(&ethernet(0x8847, &[&labels[..], behind].concat()), "inner");
        assert_eq!(told.rule, KeyRule::None, "{behind:02x?}");
    }
}

#[test]
fn flk_3_auto_looks_where_the_kernel_does() {
    let inner = inner_packet(PORTS);
    let entered: Vec<_> = tunnels(&inner)
        .into_iter()
        .filter(|(_, frame, _)| Told::of(frame, "auto").rule == KeyRule::Inner)
        .map(|(name, ..)| name)
        .collect();
    assert_eq!(entered, ["ipip", "gre", "gre all", "nvgre", "pptp", "pppoe", "nested"]);
    for (name, frame, _) in tunnels(&inner) {
        let [auto, outer] = ["auto", "outer"].map(|rules| Told::of(&frame, rules));
        assert_ne!(outer.rule, KeyRule::Inner, "{name}");
        assert!(entered.contains(&name) || auto.hash == outer.hash, "{name}");
    }
}

#[test]
fn flk_4_encapsulation_without_end_is_bounded() {
    let mut packet = inner_packet(PORTS);
    let mut hashes = Vec::new();
    for depth in 0..20 {
        let told = Told::of(&ethernet(0x0800, &packet), "inner");
        assert!(told.layers.split('.').count() <= LAYERS_MAX, "{depth}: {}", told.layers);
        // Eight IP headers, with "ipip" between them, are fifteen layers.
        assert_eq!(told.rule == KeyRule::Inner, (1..=7).contains(&depth), "{depth}: {told:?}");
        hashes.push(told.hash);
        packet = ipv4([192, 0, 2, 1], [192, 0, 2, 2], 4, &packet);
    }
    assert!(hashes[..8].iter().all(|hash| *hash == hashes[0]));
    assert!(hashes[8..].iter().all(|hash| *hash == hashes[8]), "the same depth is reached");
}

#[test]
fn flk_4_pseudowires_without_end_are_bounded() {
    let labels = [0, 2, 1, 64];
    for control_word in [&[0; 4][..], &[]] {
        let mut frame = ethernet(0x0800, &inner_packet(PORTS));
        for depth in 1..40 {
            frame = ethernet(0x8847, &[&labels[..], control_word, &frame].concat());
            let told = Told::of(&frame, "inner");
            assert!(told.layers.split('.').count() <= LAYERS_MAX, "{depth}: {}", told.layers);
            let expected = if depth <= 4 { KeyRule::Inner } else { KeyRule::None };
            assert_eq!(told.rule, expected, "{depth}: {told:?}");
        }
    }
}

#[test]
fn flk_4_ports_beyond_the_walk_count() {
    for (next, transport) in [(6, tcp([1000, 2000])), (17, udp([1000, 2000], b"x"))] {
        let options = [&[next, 62][..], &[1, 240], &[0; 500]].concat();
        let far = ethernet(0x86dd, &ipv6(60, &[&options[..], &transport].concat()));
        let near = ethernet(0x86dd, &ipv6(next, &transport));
        for rules in ["auto", "inner", "outer", "quic:1-65535:8"] {
            let [far, near] = [&far, &near].map(|frame| Told::of(frame, rules));
            assert_eq!((far.rule, far.hash), (KeyRule::Outer, near.hash), "{rules}");
        }
    }
}

#[test]
fn flk_5_error_meets_its_flow() {
    let [to_us, from_us] = [([9, 9, 9, 9], [8, 8, 8, 8]), ([8, 8, 8, 8], [9, 9, 9, 9])];
    for (protocol, transport) in [(17, udp([53, 40_000], b"x")), (6, tcp([443, 40_000]))] {
        let flow =
            Told::of(&ethernet(0x0800, &ipv4(to_us.0, to_us.1, protocol, &transport)), "auto");
        let mut sent = transport.clone();
        sent[..4].rotate_left(2);
        let sent = ipv4(from_us.0, from_us.1, protocol, &sent);
        for kind in [3, 4, 5, 11, 12] {
            // A router quotes the IP header and eight bytes at least.
            let icmp = [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &sent[..28]].concat();
            let error = ethernet(0x0800, &ipv4([7, 7, 7, 7], [8, 8, 8, 8], 1, &icmp));
            let told = Told::of(&error, "auto");
            assert_eq!((told.rule, told.hash), (KeyRule::Icmp, flow.hash), "{kind}");
            let outer = Told::of(&error, "outer");
            assert_eq!(outer.rule, KeyRule::Addresses);
            assert_ne!(outer.hash, flow.hash);
        }
        let echo = [&[8, 0, 0, 0, 0, 0, 0, 0][..], &sent].concat();
        let echo = Told::of(&ethernet(0x0800, &ipv4([7, 7, 7, 7], [8, 8, 8, 8], 1, &echo)), "auto");
        assert_eq!(echo.rule, KeyRule::Addresses);
    }
}

#[test]
fn flk_5_error_has_no_id_itself() {
    let icmp = |quoted: &[u8]| [&[3, 3, 0, 0, 0, 0, 0, 0][..], quoted].concat();
    let error = |protocol, quoted: &[u8]| {
        Told::of(&ethernet(0x0800, &ipv4([7; 4], [8; 4], protocol, &icmp(quoted))), "quic:443:8")
    };
    let esp = ipv4([8; 4], [9; 4], 50, &[1; 16]);
    let quic = ipv4([8; 4], [9; 4], 17, &udp([5000, 443], &[0x41; 20]));
    for quoted in [&esp, &quic, &ipv4([8; 4], [9; 4], 1, &icmp(&esp))] {
        let told = error(1, quoted);
        assert_eq!((told.rule, told.id.as_str()), (KeyRule::Icmp, ""));
        // ICMPv6 over IPv4 is none.
        assert_eq!(error(58, quoted).rule, KeyRule::Addresses);
    }
}

#[test]
fn flk_6_numbers_tell_where_ports_do_not() {
    let of = |protocol, payload: &[u8], rules| {
        Told::of(&ethernet(0x0800, &ipv4([1; 4], [2; 4], protocol, payload)), rules)
    };
    let esp = |spi: u32| [&spi.to_be_bytes()[..], &[0; 20]].concat();
    for (protocol, rule) in [(50, KeyRule::Esp), (115, KeyRule::L2tpv3)] {
        let [one, other] = [0x0102_0304, 0x0102_0305].map(|spi| of(protocol, &esp(spi), "auto"));
        assert_eq!((one.rule, one.id.as_str()), (rule, "01020304"));
        assert_ne!(one.hash, other.hash);
        assert_eq!(of(protocol, &esp(0), "auto").rule, KeyRule::Addresses);
        assert_eq!(of(protocol, &esp(7), "outer").rule, KeyRule::Addresses);
    }
    let over_udp = |payload: &[u8]| of(17, &udp([4500, 4500], payload), "inner");
    let over_l2tp = |payload: Vec<u8>| of(17, &udp([1701, 1701], &payload), "inner");
    assert_eq!(over_udp(&esp(9)).rule, KeyRule::Esp);
    assert_eq!(over_udp(&esp(0)).rule, KeyRule::Outer, "IKE");
    let l2tp = |flags, version, session: u32| {
        over_l2tp([&[flags, version, 0, 0][..], &session.to_be_bytes(), &[0; 20]].concat())
    };
    assert_eq!((l2tp(0, 3, 9).rule, l2tp(0, 3, 9).id.as_str()), (KeyRule::L2tpv3, "00000009"));
    assert_ne!(l2tp(0, 3, 9).hash, l2tp(0, 3, 10).hash);
    for (flags, version, session) in [(0x80, 3, 9), (0, 2, 9), (0, 3, 0)] {
        assert_eq!(l2tp(flags, version, session).rule, KeyRule::Outer, "{flags} {version}");
    }
    let gtpu = |teid: u32| [&[0x30, 1, 0, 0][..], &teid.to_be_bytes()].concat();
    let told = |teid| of(17, &udp([2152, 2152], &gtpu(teid)), "inner");
    assert_eq!((told(5).rule, told(5).id.as_str()), (KeyRule::Gtpu, "00000005"));
    assert_eq!(told(0).rule, KeyRule::Outer);
}

#[test]
fn flk_7_connection_outlives_its_address() {
    let packet = |source: [u8; 4], ports, payload: &[u8]| {
        Told::of(&ethernet(0x0800, &ipv4(source, [2; 4], 17, &udp(ports, payload))), "quic:443:8")
    };
    let short = |id: u8| [&[0x41][..], &[id; 8], b"payload"].concat();
    let home = packet([1; 4], [50_000, 443], &short(7));
    let away = packet([3; 4], [61_000, 443], &short(7));
    assert_eq!((home.rule, home.id.as_str()), (KeyRule::Quic, "0707070707070707"));
    assert_eq!(home.layers, "ipv4.udp.quic");
    assert_eq!(home.hash, away.hash);
    assert_ne!(home.hash, packet([1; 4], [50_000, 443], &short(8)).hash);
    let long = [&[0xc1, 0, 0, 0, 1, 8][..], &[7; 8], &[0; 40]].concat();
    assert_eq!(packet([1; 4], [50_000, 443], &long).rule, KeyRule::Outer);
    assert_eq!(packet([1; 4], [50_000, 444], &short(7)).rule, KeyRule::Outer);
    assert_eq!(packet([1; 4], [50_000, 443], &[0x41, 1, 2]).rule, KeyRule::Outer, "cut short");
}

#[test]
fn flk_7_id_collides_with_no_tuple() {
    for len in [8, 12] {
        let rules = format!("quic:443:{len}");
        let tuple = [&[203, 0, 113, 7][..], &[192, 0, 2, 2], &[1, 187, 195, 203]].concat();
        let victim = match len {
            8 => ipv4([203, 0, 113, 7], [192, 0, 2, 2], 1, &[8; 16]),
            _ => ipv4([203, 0, 113, 7], [192, 0, 2, 2], 6, &tcp([443, 50_123])),
        };
        let short = [&[0x41][..], &tuple[..len]].concat();
        let stranger = ipv4([100, 64, 0, 9], [2; 4], 17, &udp([5000, 443], &short));
        let [victim, stranger] =
            [victim, stranger].map(|packet| Told::of(&ethernet(0x0800, &packet), &rules));
        assert_eq!(stranger.rule, KeyRule::Quic);
        assert_ne!(victim.hash, stranger.hash, "{len}");
    }
}

#[test]
fn flk_8_inner_fragments_go_alike() {
    let mut first = ipv4([5; 4], [6; 4], 17, &udp(PORTS, &[0; 64]));
    first[6] = 0x20;
    let mut later = first.clone();
    (later[6], later[7]) = (0, 9);
    let [first, later] = [first, later]
        .map(|inner| Told::of(&ethernet(0x0800, &ipv4([1; 4], [2; 4], 4, &inner)), "auto"));
    assert_eq!((first.rule, later.rule), (KeyRule::Fragment, KeyRule::Fragment));
    assert_eq!(first.hash, later.hash);
    let mut outer = ipv4([1; 4], [2; 4], 4, &inner_packet(PORTS));
    outer[6] = 0x20;
    assert_eq!(Told::of(&ethernet(0x0800, &outer), "inner").rule, KeyRule::Fragment);
}

#[test]
fn flk_8_device_hash_counts_for_the_outermost() {
    let of_device = FlowHash(77);
    let inner = inner_packet(PORTS);
    let mut piece = inner.clone();
    piece[6] = 0x20;
    for (packet, rules, is_devices) in [
        (&inner, "inner", true),
        (&piece, "auto", true),
        (&ipv4([1; 4], [2; 4], 1, &[8; 16]), "auto", true),
        (&ipv4([1; 4], [2; 4], 4, &inner), "auto", false),
        (&ipv4([1; 4], [2; 4], 4, &inner), "outer", true),
    ] {
        let frame = ethernet(0x0800, packet);
        let wire_len = u32::try_from(frame.len()).unwrap();
        let headers = parse(&frame, wire_len, Link::Ethernet, Verify::Nothing);
        let hasher = Hasher::keyed(&[3; 16], false).with_rules(rules.parse().unwrap());
        let hash = hasher.hash_of(&View::new(&frame, &headers), wire_len, of_device);
        assert_eq!(hash == of_device, is_devices, "{rules} {packet:02x?}");
    }
}

#[test]
fn flk_8_padding_is_no_inner_header() {
    // An IP packet that ends behind its GRE header, with bytes behind its end that look like a
    // packet.
    let mut frame = ethernet(0x0800, &ipv4([1; 4], [2; 4], 47, &[0, 0, 8, 0]));
    frame.extend(inner_packet(PORTS));
    let told = Told::of(&frame, "inner");
    assert_eq!((told.rule, told.layers.as_str()), (KeyRule::Addresses, "ipv4.gre"));
}

#[test]
fn flk_8_surplus_bytes_are_no_payload() {
    // An IPv6 packet that says that it is empty, and is not a jumbogram.
    let mut empty = ethernet(0x86dd, &ipv6(4, &inner_packet(PORTS)));
    empty[14 + 4..14 + 6].fill(0);
    assert_eq!(Told::of(&empty, "inner").rule, KeyRule::Addresses);
    // A datagram that ends before the IP packet does.
    let vxlan = [&[8, 0, 0, 0, 0, 0, 7, 0][..], &ethernet(0x0800, &inner_packet(PORTS))].concat();
    for len in [0, 3, 8, 16] {
        let mut datagram = udp([30_000, 4789], &vxlan);
        datagram[4..6].copy_from_slice(&u16::to_be_bytes(len));
        let told = Told::of(&ethernet(0x0800, &ipv4([1; 4], [2; 4], 17, &datagram)), "inner");
        assert_eq!(told.rule, KeyRule::Outer, "{len}");
    }
}

#[test]
fn flk_8_jumbograms_length_is_its_option() {
    let inner = inner_packet(PORTS);
    let [exact, short] = [8 + inner.len(), 8].map(|len| u32::try_from(len).unwrap().to_be_bytes());
    let of = |options: &[u8]| {
        let mut frame = ethernet(0x86dd, &ipv6(0, &[&[4, 0], options, &inner].concat()));
        frame[14 + 4..14 + 6].fill(0);
        Told::of(&frame, "inner").rule
    };
    for (options, rule) in [
        ([&[0xc2, 4][..], &exact].concat(), KeyRule::Inner),
        ([&[0xc2, 4][..], &short].concat(), KeyRule::Addresses),
        (vec![1, 4, 0, 0, 0, 0], KeyRule::Addresses),
        (vec![0; 6], KeyRule::Addresses),
        (vec![0xc2, 3, 0, 0, 1, 0], KeyRule::Addresses),
        (vec![0, 0, 0, 0, 0xc2, 4], KeyRule::Addresses),
    ] {
        assert_eq!(of(&options), rule, "{options:02x?}");
    }
    // A datagram with a length of 0, which is longer than its field can say.
    let vxlan = [&[8, 0, 0, 0, 0, 0, 7, 0][..], &ethernet(0x0800, &inner), &[0; 1 << 16]].concat();
    let datagram = [&[0, 9, 0x12, 0xb5, 0, 0, 0, 0][..], &vxlan].concat();
    let len = u32::try_from(8 + datagram.len()).unwrap().to_be_bytes();
    let mut jumbogram = ethernet(0x86dd, &ipv6(0, &[]));
    jumbogram.extend([&[17, 0, 0xc2, 4], &len[..], &datagram].concat());
    assert_eq!(Told::of(&jumbogram, "inner").rule, KeyRule::Inner);
}

/// Frame around a packet.
type Around<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;

/// One inner flow has one key, whatever the packet's size, what is behind it in the frame, and how much was captured.
#[test]
fn flk_2_inner_flow_tells_at_any_size() {
    let labels = [0, 2, 1, 64];
    let bridged =
        |packet: &[u8]| ethernet(if packet[0] >> 4 == 4 { 0x0800 } else { 0x86dd }, packet);
    let over_gtpu = |packet: &[u8]| {
        let len = u16::try_from(packet.len()).unwrap().to_be_bytes();
        let gtpu = [&[0x30, 255][..], &len, &[0, 0, 0, 7], packet].concat();
        ethernet(0x0800, &ipv4([1; 4], [2; 4], 17, &udp([2152, 2152], &gtpu)))
    };
    let pppoe = |packet: &[u8]| {
        let len = u16::try_from(packet.len() + 2).unwrap().to_be_bytes();
        let protocol = if packet[0] >> 4 == 4 { 0x21 } else { 0x57 };
        ethernet(0x8864, &[&[0x11, 0, 0, 9][..], &len, &[0, protocol], packet].concat())
    };
    let tunnels: [(&str, Around<'_>); 8] = [
        ("mpls", &|packet| ethernet(0x8847, &[&labels[..], packet].concat())),
        ("mpls over ip", &|packet| {
            ethernet(0x0800, &ipv4([1; 4], [2; 4], 137, &[&labels[..], packet].concat()))
        }),
        ("pseudowire", &|packet| {
            ethernet(0x8847, &[&labels[..], &[0; 4], &bridged(packet)].concat())
        }),
        ("bridged", &|packet| ethernet(0x8847, &[&labels[..], &bridged(packet)].concat())),
        ("bridged pppoe", &|packet| ethernet(0x8847, &[&labels[..], &pppoe(packet)].concat())),
        ("labels in a pseudowire", &|packet| {
            let inner = ethernet(0x8847, &[&labels[..], packet].concat());
            ethernet(0x8847, &[&labels[..], &[0; 4], &inner].concat())
        }),
        ("gtpu", &over_gtpu),
        ("bridged gtpu", &|packet| over_gtpu(&bridged(packet))),
    ];
    let inner: [fn(usize) -> Vec<u8>; 2] = [
        |len| ipv4(FROM.octets(), TO.octets(), 17, &udp(PORTS, &vec![7; len])),
        |len| ipv6(17, &udp(PORTS, &vec![7; len])),
    ];
    for (name, tunnel) in tunnels {
        for inner in inner {
            let expected = Told::of(&bridged(&inner(0)), "outer").hash;
            for len in [0, 1, 4, 10, 18, 40, 400, 430, 470, 490, 1_400, 8_000] {
                let mut frame = tunnel(&inner(len));
                frame.resize(frame.len().max(60), 0);
                for trailer in [0, 4] {
                    let wire_len = frame.len() + trailer;
                    frame.resize(wire_len, 0xfc);
                    for captured in [128, 500, 600, wire_len].map(|captured| captured.min(wire_len))
                    {
                        let told = Told::of_captured(&frame[..captured], wire_len, "inner");
                        let what = format!("{name}, {len} bytes, {captured} of {wire_len}");
                        assert_eq!((told.rule, told.hash), (KeyRule::Inner, expected), "{what}");
                    }
                    frame.truncate(wire_len - trailer);
                }
            }
        }
    }
}

#[test]
fn flk_4_extensions_of_gtpu_are_counted() {
    let inner = inner_packet(PORTS);
    for count in 0..=9 {
        let mut extensions = vec![0, 0, 0, if count == 0 { 0 } else { 0x85 }];
        for left in (0..count).rev() {
            extensions.extend([1, 0, 0, if left == 0 { 0 } else { 0x85 }]);
        }
        let len = u16::try_from(extensions.len() + inner.len()).unwrap().to_be_bytes();
        let gtpu = [&[0x34, 255][..], &len, &[0, 0, 0, 7], &extensions, &inner].concat();
        let frame = ethernet(0x0800, &ipv4([1; 4], [2; 4], 17, &udp([2152, 2152], &gtpu)));
        let expected = if count <= 8 { KeyRule::Inner } else { KeyRule::Gtpu };
        assert_eq!(Told::of(&frame, "inner").rule, expected, "{count}");
    }
}

proptest! {
    #[test]
    fn flk_9_truncated_frame_has_a_key(at in 0usize..400, which in 0usize..32) {
        let all = tunnels(&inner_packet(PORTS));
        let (name, frame, layers) = &all[which % all.len()];
        let cut = &frame[..at.min(frame.len())];
        for rules in ["auto", "inner", "outer", "inner,quic:1-65535:8"] {
            let told = Told::of(cut, rules);
            let is_walked = layers.starts_with(&told.layers) || told.layers.ends_with("quic");
            prop_assert!(is_walked, "{name} {at} {rules}: {}", told.layers);
            prop_assert_eq!(told.hash != 0, told.rule != KeyRule::None);
        }
    }

    #[test]
    fn flk_9_hostile_bytes_are_walked_in_bounds(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        which in 0usize..32,
        at in 0usize..200,
    ) {
        let all = tunnels(&inner_packet(PORTS));
        let mut frame = all[which % all.len()].1.clone();
        let at = at.min(frame.len());
        frame.splice(at..(at + bytes.len() / 2).min(frame.len()), bytes.iter().copied());
        for bytes in [&frame, &bytes] {
            for rules in ["auto", "inner", "inner,quic:1-65535:20"] {
                let told = Told::of(bytes, rules);
                prop_assert!(told.layers.split('.').count() <= LAYERS_MAX);
                prop_assert_eq!(told.hash != 0, told.rule != KeyRule::None);
            }
        }
    }

    #[test]
    fn flk_1_plain_packets_hash_as_ever(source in any::<[u8; 4]>(), ports in any::<[u16; 2]>()) {
        prop_assume!(![1701, 2152, 4500, 4789, 4790, 6081, 6635, 8472].contains(&ports[1]));
        for (protocol, transport) in [(17, udp(ports, b"0123456789")), (6, tcp(ports))] {
            let frame = ethernet(0x0800, &ipv4(source, [2; 4], protocol, &transport));
            let outer = Told::of(&frame, "outer");
            for rules in ["auto", "inner"] {
                let told = Told::of(&frame, rules);
                prop_assert_eq!((told.rule, told.hash), (KeyRule::Outer, outer.hash));
            }
        }
    }
}
