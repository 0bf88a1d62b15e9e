//! Neighbour messages: those answered, those learned from, and those ignored.

use etherparse::icmpv6::NeighborAdvertisementHeader;
use etherparse::{ArpOperation, Icmpv6Type};
use forebay_stack::network::neighbours::{NeighbourEvent, NeighbourObservation, Replaces};
use forebay_stack::network::{Identity, NetworkDrop, arp, ndisc};

use crate::neighbours::rig::{
    ALL, IP, Ndisc, OURS, THEIRS, advertisement, arp_message, arp_received, identity, ip, packet,
    pool, read_arp, read_ndisc, solicitation, v4, v6,
};

const REQUEST: ArpOperation = ArpOperation::REQUEST;
const REPLY: ArpOperation = ArpOperation::REPLY;

fn sighting(address: &str) -> NeighbourObservation {
    let (address, mac) = (ip(address), Some(THEIRS));
    let (is_welcome, is_confirmed) = (false, false);
    NeighbourObservation { address, mac, is_welcome, replaces: Replaces::WhenSettled, is_confirmed }
}

#[test]
fn arp_asker_answered_and_remembered() {
    let mut pool = pool(4);
    for to in [ALL, OURS] {
        let request = arp_message(to, REQUEST, "10.9.0.2", "10.9.0.1");
        let (heard, answer) = arp_received(&mut pool, &request, to == OURS);
        let expected = NeighbourObservation {
            is_welcome: true,
            replaces: Replaces::Now,
            ..sighting("10.9.0.2")
        };
        assert_eq!(heard, Ok(NeighbourEvent { sighting: Some(expected), is_answer: true }));
        let (link_addresses, message) = read_arp(&answer);
        assert_eq!((link_addresses, message.operation), ([THEIRS, OURS], REPLY));
        assert_eq!((message.sender_mac, message.target_mac), (OURS, THEIRS));
        assert_eq!((message.sender_ipv4, message.target_ipv4), ([10, 9, 0, 1], [10, 9, 0, 2]));
        assert_eq!((answer.frame.len_bytes(), answer.wire_len), (42, 42));
        pool.put(answer.frame);
    }
}

/// RFC 5227: a host about to take our address is told that it is ours, and is not added to the
/// table.
#[test]
fn arp_probe_is_answered() {
    let mut pool = pool(4);
    let (heard, answer) =
        arp_received(&mut pool, &arp_message(ALL, REQUEST, "0.0.0.0", "10.9.0.1"), false);
    assert_eq!(heard, Ok(NeighbourEvent { sighting: None, is_answer: true }));
    assert_eq!(read_arp(&answer).1.target_ipv4, [0; 4]);
    let probe = arp_message(ALL, REQUEST, "0.0.0.0", "10.9.0.7");
    assert_eq!(arp_received(&mut pool, &probe, false).0, Ok(NeighbourEvent::default()));
}

#[test]
fn foreign_arp_heard_not_answered() {
    let of = sighting("10.9.0.2");
    let announced = NeighbourObservation { replaces: Replaces::Now, ..of };
    let cases = [
        (arp_message(ALL, REQUEST, "10.9.0.2", "10.9.0.7"), false, of),
        (
            arp_message(OURS, REPLY, "10.9.0.2", "10.9.0.1"),
            true,
            NeighbourObservation { is_confirmed: true, ..of },
        ),
        (arp_message(ALL, REPLY, "10.9.0.2", "10.9.0.1"), false, of),
        (arp_message(ALL, REQUEST, "10.9.0.2", "10.9.0.2"), false, announced),
        (arp_message(THEIRS, REPLY, "10.9.0.2", "10.9.0.2"), false, announced),
        // An announcement by reply contains its link-layer address twice.
        (arp_message(ALL, REPLY, "10.9.0.2", "10.9.0.2"), false, of),
    ];
    let mut pool = pool(10);
    for (bytes, is_to_us, expected) in cases {
        let (heard, packet) = arp_received(&mut pool, &bytes, is_to_us);
        assert_eq!(heard, Ok(NeighbourEvent { sighting: Some(expected), is_answer: false }));
        assert_eq!(packet.frame.data(), bytes, "it is untouched");
    }
}

#[test]
fn impossible_arp_addresses_are_refused() {
    let mut pool = pool(30);
    let cases = [
        ("10.9.0.1", "10.9.0.1", NetworkDrop::IpInvalidSource),
        ("10.9.0.255", "10.9.0.1", NetworkDrop::IpInvalidSource),
        ("255.255.255.255", "10.9.0.1", NetworkDrop::IpInvalidSource),
        ("127.0.0.1", "10.9.0.1", NetworkDrop::IpInvalidSource),
        ("224.0.0.1", "10.9.0.1", NetworkDrop::IpInvalidSource),
        ("0.0.0.7", "10.9.0.1", NetworkDrop::IpInvalidSource),
        ("10.9.0.2", "224.0.0.1", NetworkDrop::IpInvalidDest),
        ("10.9.0.2", "127.0.0.1", NetworkDrop::IpInvalidDest),
    ];
    for (sender, target, why) in cases {
        let bytes = arp_message(ALL, REQUEST, sender, target);
        assert_eq!(arp_received(&mut pool, &bytes, false).0, Err(why), "{sender} {target}");
    }
    let good = arp_message(ALL, REQUEST, "10.9.0.2", "10.9.0.1");
    // Changed fields: hardware, protocol, their lengths, operation; a multicast link-layer address.
    for (at, value, why) in [
        (1, 7, NetworkDrop::UnhandledProto),
        (2, 9, NetworkDrop::UnhandledProto),
        (4, 8, NetworkDrop::UnhandledProto),
        (5, 16, NetworkDrop::UnhandledProto),
        (7, 3, NetworkDrop::UnhandledProto),
        (8, 3, NetworkDrop::IpInvalidSource),
    ] {
        let mut bytes = good.clone();
        bytes[IP + at] = value;
        assert_eq!(arp_received(&mut pool, &bytes, false).0, Err(why), "{at}");
    }
    for len in [IP, IP + 27] {
        let cut = arp_received(&mut pool, &good[..len], false).0;
        assert_eq!(cut, Err(NetworkDrop::PktTooSmall));
    }
}

#[test]
fn kernel_answers_where_it_hosts() {
    let shared = Identity { is_whole_host: false, ..identity() };
    let mut pool = pool(4);
    let request = arp_message(ALL, REQUEST, "10.9.0.2", "10.9.0.1");
    let mut of_arp = packet(&mut pool, &request);
    assert_eq!(arp::receive(&mut of_arp, &shared, false), Ok(NeighbourEvent::default()));
    assert_eq!(of_arp.frame.data(), request);
    let mut of_ndisc = packet(&mut pool, &solicitation().bytes());
    assert_eq!(ndisc::receive(&mut of_ndisc, IP + 40, &shared), Ok(NeighbourEvent::default()));
    assert_eq!(of_ndisc.frame.data(), solicitation().bytes());
}

#[test]
fn promise_13_addresses_elsewhere_are_not_announced() {
    let mut on = identity();
    on.addresses.retain(|own| own.bits == 32 || own.address == ip("fe80::1"));
    on.elsewhere = [ip("10.9.0.1"), ip("fd00::1")].into();
    let mut pool = pool(4);
    let request = arp_message(ALL, REQUEST, "10.9.0.2", "10.9.0.1");
    let mut of_arp = packet(&mut pool, &request);
    assert!(!arp::receive(&mut of_arp, &on, false).unwrap().is_answer);
    assert_eq!(of_arp.frame.data(), request);
    let mut of_ndisc = packet(&mut pool, &solicitation().bytes());
    assert!(!ndisc::receive(&mut of_ndisc, IP + 40, &on).unwrap().is_answer);
    assert_eq!(of_ndisc.frame.data(), solicitation().bytes());
}

#[test]
fn solicitor_advertised_and_remembered() {
    let mut pool = pool(8);
    let ours = [&[2, 1], OURS.as_slice()].concat();
    for (destination, options, is_known) in [
        ("ff02::1:ff00:1", solicitation().options, true),
        ("fd00::1", solicitation().options, true),
        ("ff02::1:ff00:1", Vec::new(), false),
    ] {
        let asked = Ndisc { destination, options, ..solicitation() };
        let (heard, answer) = asked.received(&mut pool);
        let mac = is_known.then_some(THEIRS);
        let (is_welcome, replaces) = (true, Replaces::Now);
        let expected = NeighbourObservation { mac, is_welcome, replaces, ..sighting("fd00::2") };
        assert_eq!(heard, Ok(NeighbourEvent { sighting: Some(expected), is_answer: true }));
        let is_to_group = destination != "fd00::1";
        let read = read_ndisc(&answer);
        assert_eq!(read.link_addresses, [THEIRS, OURS]);
        assert_eq!((read.source, read.destination), (v6("fd00::1"), v6("fd00::2")));
        assert_eq!(read.target, v6("fd00::1"));
        let flags =
            NeighborAdvertisementHeader { router: false, solicited: true, r#override: is_to_group };
        assert_eq!(read.kind, Icmpv6Type::NeighborAdvertisement(flags));
        assert_eq!(read.options, if is_to_group { ours.clone() } else { Vec::new() });
    }
}

/// RFC 4862, section 5.4: a host about to take our address is told, by multicast, that it is ours.
#[test]
fn address_probe_answered_to_all() {
    let mut pool = pool(8);
    let probe = Ndisc { source: "::", options: Vec::new(), ..solicitation() };
    let (heard, answer) = probe.received(&mut pool);
    assert_eq!(heard, Ok(NeighbourEvent { sighting: None, is_answer: true }));
    let read = read_ndisc(&answer);
    assert_eq!(read.link_addresses, [[0x33, 0x33, 0, 0, 0, 1], OURS]);
    assert_eq!((read.source, read.destination), (v6("fd00::1"), v6("ff02::1")));
    let flags = NeighborAdvertisementHeader { router: false, solicited: false, r#override: true };
    assert_eq!(read.kind, Icmpv6Type::NeighborAdvertisement(flags));
    // A probe with a link-layer address, or not sent to the solicited-node group, is invalid.
    let with_lladdr = Ndisc { source: "::", ..solicitation() };
    let to_us = Ndisc { destination: "fd00::1", ..probe };
    for wrong in [with_lladdr, to_us] {
        assert_eq!(wrong.received(&mut pool).0, Err(NetworkDrop::IpInvalidSource));
    }
}

#[test]
fn advertisements_are_heard() {
    let mut pool = pool(8);
    let of = NeighbourObservation { replaces: Replaces::Never, ..sighting("fd00::2") };
    let to_all = Ndisc { destination: "ff02::1", ..advertisement(false, true) };
    let without = Ndisc { options: Vec::new(), ..advertisement(true, false) };
    for (message, expected) in [
        (advertisement(true, false), NeighbourObservation { is_confirmed: true, ..of }),
        (
            advertisement(true, true),
            NeighbourObservation { is_confirmed: true, replaces: Replaces::Now, ..of },
        ),
        (to_all, NeighbourObservation { replaces: Replaces::Now, ..of }),
        (without, NeighbourObservation { is_confirmed: true, mac: None, ..of }),
    ] {
        let (heard, packet) = message.received(&mut pool);
        assert_eq!(heard, Ok(NeighbourEvent { sighting: Some(expected), is_answer: false }));
        assert_eq!(packet.frame.data(), message.bytes());
    }
    // An advertisement of our own address, or an unsolicited one.
    let of_ours = Ndisc { target: "fd00::1", ..advertisement(false, true) };
    assert_eq!(of_ours.received(&mut pool).0, Ok(NeighbourEvent::default()));
    let to_all = Ndisc { destination: "ff02::1", ..advertisement(true, true) };
    assert_eq!(to_all.received(&mut pool).0, Err(NetworkDrop::IpInvalidDest));
}

#[test]
fn foreign_or_short_ndisc_is_refused() {
    let mut pool = pool(20);
    for message in [solicitation(), advertisement(true, true)] {
        let from_afar = Ndisc { hop_limit: 254, ..message.clone() };
        assert_eq!(from_afar.received(&mut pool).0, Err(NetworkDrop::IpInhdr));
        let of_group = Ndisc { target: "ff02::1:ff00:1", ..message.clone() };
        assert_eq!(of_group.received(&mut pool).0, Err(NetworkDrop::IpInvalidDest));
        for options in [vec![1], vec![9, 0, 0, 0, 0, 0, 0, 0], vec![9, 2, 0, 0, 0, 0, 0, 0]] {
            let wrong = Ndisc { options, ..message.clone() };
            assert_eq!(wrong.received(&mut pool).0, Err(NetworkDrop::PktTooSmall));
        }
    }
    let unknown = [vec![14, 1, 0, 0, 0, 0, 0, 0], solicitation().options].concat();
    let (heard, _) = Ndisc { options: unknown, ..solicitation() }.received(&mut pool);
    assert_eq!(heard.unwrap().sighting.unwrap().mac, Some(THEIRS));
    let mut short = packet(&mut pool, &solicitation().bytes()[..IP + 40 + 20]);
    assert_eq!(ndisc::receive(&mut short, IP + 40, &identity()), Err(NetworkDrop::PktTooSmall));
}

#[test]
fn solicitations_use_address_of_network() {
    let mut pool = pool(8);
    let asked = arp::request(v4("10.9.0.7"), None, &identity(), &mut pool).unwrap();
    let (link_addresses, message) = read_arp(&asked);
    assert_eq!((link_addresses, message.operation), ([ALL, OURS], REQUEST));
    assert_eq!((message.sender_ipv4, message.target_ipv4), ([10, 9, 0, 1], [10, 9, 0, 7]));
    assert_eq!((message.sender_mac, message.target_mac), (OURS, [0; 6]));
    let probe = arp::request(v4("10.9.0.7"), Some(THEIRS), &identity(), &mut pool).unwrap();
    assert_eq!(read_arp(&probe).0, [THEIRS, OURS]);

    let target = v6("fd00::aabb:ccdd");
    let asked = ndisc::solicitation(target, None, &identity(), &mut pool).unwrap();
    let read = read_ndisc(&asked);
    assert_eq!(read.link_addresses, [[0x33, 0x33, 0xff, 0xbb, 0xcc, 0xdd], OURS]);
    assert_eq!((read.source, read.destination), (v6("fd00::1"), v6("ff02::1:ffbb:ccdd")));
    assert_eq!((read.kind, read.target), (Icmpv6Type::NeighborSolicitation, target));
    assert_eq!(read.options, [&[1, 1], OURS.as_slice()].concat());
    let probe = ndisc::solicitation(target, Some(THEIRS), &identity(), &mut pool).unwrap();
    let read = read_ndisc(&probe);
    assert_eq!((read.link_addresses, read.destination), ([THEIRS, OURS], target));
    let near = ndisc::solicitation(v6("fe80::2"), None, &identity(), &mut pool).unwrap();
    assert_eq!(read_ndisc(&near).source, v6("fe80::1"));

    let nobody = Identity { addresses: Vec::new(), ..identity() };
    assert!(arp::request(v4("10.9.0.7"), None, &nobody, &mut pool).is_none());
    assert!(ndisc::solicitation(target, None, &nobody, &mut pool).is_none());
}
