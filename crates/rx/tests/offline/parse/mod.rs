//! Parsing, one field of a frame changed at a time.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

mod frames; // the frames
mod laws; //   laws for any frame

use forebay_rx::parse::{
    Checksum, Flaw, Fragment, Headers, Link, MAX_EXTENSION_HEADERS, Network, Transport, View,
    link_layer,
};
use frames::{
    ADDRESSES_V6, AFTER_IPV4, AFTER_IPV6, Extension, Frame, IP, TCP4, UDP4, UDP6, extended, icmp4,
    later_by, tcp4, udp4, udp6,
};

type Case = (&'static str, Frame, Headers);

fn check(cases: impl IntoIterator<Item = Case>) {
    for (name, frame, expected) in cases {
        assert_eq!(frame.parse(), expected, "{name}");
    }
}

/// Headers like `headers`, with nothing known behind the network header.
fn network_only(headers: Headers) -> Headers {
    Headers {
        transport: Transport::Other,
        l4_checksum: Checksum::Unknown,
        transport_offset: 0,
        payload_offset: 0,
        payload_len: 0,
        ..headers
    }
}

/// Headers without a known network header, with this `network_offset`.
fn other_at(network_offset: u8) -> Headers {
    Headers { network_offset, ..Headers::default() }
}

fn flawed(flaw: Flaw, headers: Headers) -> Headers {
    Headers { flaw: Some(flaw), ..headers }
}

#[test]
fn link_headers() {
    let tagged = |tags: &[u8]| udp4().insert(12, tags);
    let after = |bytes: u8, headers: Headers| Headers {
        network_offset: headers.network_offset + bytes,
        ..later_by(bytes.into(), headers)
    };
    let runt = flawed(Flaw::Runt, Headers::default());
    let bare = Headers {
        link: Link::Ip,
        network_offset: 0,
        transport_offset: 20,
        payload_offset: 28,
        ..UDP4
    };
    let snap = [0xaa, 0xaa, 3, 0, 0, 0];
    check([
        ("Ethernet II", udp4(), UDP4),
        ("802.1Q", tagged(&[0x81, 0, 0x20, 7]), after(4, UDP4)),
        ("802.1ad", tagged(&[0x88, 0xa8, 0, 5, 0x81, 0, 0, 7]), after(8, UDP4)),
        ("old QinQ", tagged(&[0x91, 0, 0, 5, 0x81, 0, 0, 7]), after(8, UDP4)),
        ("three tags", tagged(&[0x81, 0, 0, 1].repeat(3)), other_at(22)),
        ("a tag and no more", tagged(&[0x81, 0, 0, 1]).cut(16), runt),
        ("SNAP", udp4().insert(12, &[0, 41]).insert(14, &snap), after(8, UDP4)),
        ("SNAP of a vendor", udp4().insert(12, &[0, 41]).insert(14, &[0xaa; 6]), other_at(0)),
        ("802.3", udp4().edit(12, &[0x05, 0xff]), other_at(0)),
        ("the first EtherType", udp4().edit(12, &[0x06, 0]), other_at(14)),
        ("ARP", udp4().edit(12, &[0x08, 0x06]), other_at(14)),
        ("runt", udp4().cut(13), runt),
        ("nothing", udp4().cut(0), runt),
        ("snapped", udp4().snapped(13), Headers::default()),
        ("bare IPv4", udp4().bare(), bare),
        ("bare and neither", udp4().bare().edit(0, &[0x55]), {
            Headers { link: Link::Ip, ..flawed(Flaw::IpHeader, Headers::default()) }
        }),
    ]);
}

#[test]
fn vlan_ids_outermost_without_priority() {
    let tags = [0x88, 0xa8, 0xef, 0xff, 0x81, 0, 0x20, 7];
    let frame = udp4().insert(12, &tags);
    let vlans = |len| link_layer(&frame.bytes[..len], Link::Ethernet).vlans().to_vec();
    assert_eq!([17, 18, 22].map(vlans), [vec![], vec![0xfff], vec![0xfff, 7]]);
}

#[test]
fn ipv4_headers() {
    let fragment = |field: [u8; 2]| udp4().edit(IP + 6, &field).resummed();
    let first = Headers { fragment: Fragment::First, l4_checksum: Checksum::Unknown, ..UDP4 };
    let later = network_only(Headers { fragment: Fragment::Later, ..UDP4 });
    let total_len = |len: u8| udp4().edit(IP + 2, &[0, len]).resummed();
    let stopped = network_only(Headers { ip_checksum: Checksum::Unknown, ..UDP4 });
    let no_network = other_at(14);
    let options = udp4().insert(AFTER_IPV4, &[1; 4]).edit(IP, &[0x46]).edit(IP + 3, &[37]);
    let authenticated =
        udp4().insert(AFTER_IPV4, &[17, 1, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1]).edit(IP + 9, &[51]);
    let authenticated = authenticated.edit(IP + 3, &[45]);
    check([
        ("options", options.resummed(), later_by(4, UDP4)),
        ("wrong sum", udp4().edit(IP + 8, &[1]), Headers { ip_checksum: Checksum::Bad, ..UDP4 }),
        ("do not fragment", fragment([0x40, 0]), UDP4),
        ("first fragment", fragment([0x20, 0]), first),
        ("an atomic one within it", extended(&[fragment_header(0, 1), fragment_header(0, 0)]), {
            Headers {
                fragment: Fragment::First,
                l4_checksum: Checksum::Unknown,
                ..later_by(16, UDP6)
            }
        }),
        ("a fragment between", fragment([0x20, 1]), later),
        ("the last fragment", fragment([0, 1]), later),
        ("padding", udp4().padded(13), UDP4),
        ("one byte more than there is", total_len(34), flawed(Flaw::IpLength, UDP4)),
        ("no length", total_len(0), flawed(Flaw::IpLength, UDP4)),
        ("no room for the header", total_len(19), flawed(Flaw::IpLength, stopped)),
        ("IHL of 4", udp4().edit(IP, &[0x44]), flawed(Flaw::IpHeader, no_network)),
        ("IHL of 15", udp4().edit(IP, &[0x4f]), flawed(Flaw::IpLength, stopped)),
        ("not version 4", udp4().edit(IP, &[0x65]), flawed(Flaw::IpHeader, no_network)),
        ("no header", udp4().cut(IP), flawed(Flaw::IpHeader, no_network)),
        ("cut header", udp4().cut(IP + 19), {
            flawed(Flaw::IpHeader, Headers { protocol: 0, ..stopped })
        }),
        ("snapped header", udp4().snapped(IP + 19), Headers { protocol: 0, ..stopped }),
        ("authentication", authenticated.clone().resummed(), later_by(12, UDP4)),
        // Padding is not an authentication header, either.
        (
            "authentication beyond the packet",
            {
                let ends = udp4().edit(IP + 9, &[51]).edit(IP + 2, &[0, 20]);
                ends.resummed()
            },
            flawed(Flaw::Extension, network_only(Headers { protocol: 51, ..UDP4 })),
        ),
        // Bytes behind the IP header of a later fragment are not an authentication header.
        ("the last fragment of it", authenticated.edit(IP + 6, &[0, 1]).resummed(), {
            Headers { protocol: 51, ..later }
        }),
    ]);
}

#[test]
fn transport_headers() {
    let udp_len = |len: u8| udp4().edit(AFTER_IPV4 + 4, &[0, len]);
    let udp_sum = |frame: Frame, ip: usize| frame.edit(ip + 6, &[0, 0]);
    let stopped = Headers { transport_offset: 34, ..network_only(UDP4) };
    let tcp_stopped = Headers { protocol: 6, ..stopped };
    let tcp_words = |words: u8| tcp4().edit(AFTER_IPV4 + 12, &[words << 4]);
    let tcp_flaw = flawed(Flaw::TransportHeader, tcp_stopped);
    let unknown = |headers| Headers { l4_checksum: Checksum::Unknown, ..headers };
    let bad = |headers| Headers { l4_checksum: Checksum::Bad, ..headers };
    let protocol = |number: u8| udp4().edit(IP + 9, &[number]).resummed();
    let icmp = Headers {
        transport: Transport::Icmp,
        protocol: 1,
        payload_offset: 38,
        payload_len: 9,
        ..unknown(UDP4)
    };
    let first_of_many = udp_len(200).edit(IP + 6, &[0x20, 0]).resummed();
    check([
        ("TCP", tcp4(), TCP4),
        ("TCP, wrong sum", tcp4().edit(58, b"x"), bad(TCP4)),
        ("TCP of 4 words", tcp_words(4), tcp_flaw),
        ("TCP of 6 words", tcp_words(6), {
            Headers { payload_offset: 58, payload_len: 1, ..bad(TCP4) }
        }),
        ("TCP of more than there is", tcp_words(7), tcp_flaw),
        ("TCP without room", tcp4().edit(IP + 3, &[39]).resummed(), {
            flawed(Flaw::TransportHeader, tcp_stopped)
        }),
        ("TCP, payload snapped", tcp4().snapped(58), unknown(TCP4)),
        ("TCP, urgent pointer snapped", tcp4().snapped(53), {
            Headers { transport: Transport::Other, ..unknown(TCP4) }
        }),
        ("TCP, ports snapped", tcp4().snapped(37), tcp_stopped),
        ("TCP snapped", tcp4().snapped(34), Headers { protocol: 6, ..network_only(UDP4) }),
        ("UDP, wrong sum", udp4().edit(44, b"x"), bad(UDP4)),
        ("UDP, no sum", udp_sum(udp4(), AFTER_IPV4), unknown(UDP4)),
        ("UDP over IPv6, no sum", udp_sum(udp6(), AFTER_IPV6), bad(UDP6)),
        ("UDP of 7 bytes", udp_len(7), flawed(Flaw::UdpLength, stopped)),
        ("UDP of less than there is", udp_len(12), Headers { payload_len: 4, ..bad(UDP4) }),
        ("UDP of more than there is", udp_len(14), {
            flawed(Flaw::UdpLength, Headers { payload_len: 6, ..unknown(UDP4) })
        }),
        ("UDP of more fragments", first_of_many, {
            Headers { fragment: Fragment::First, payload_len: 192, ..unknown(UDP4) }
        }),
        ("ICMP", icmp4(), icmp),
        ("IPv6's ICMP over IPv4", protocol(58), Headers { protocol: 58, ..stopped }),
        ("GRE", protocol(47), Headers { protocol: 47, ..network_only(UDP4) }),
        ("nothing of UDP", udp4().cut(34).edit(IP + 3, &[20]).resummed(), {
            flawed(Flaw::TransportHeader, network_only(UDP4))
        }),
    ]);
}

/// Extension header of eight bytes, zero except for the fields of the chain.
fn eight(kind: u8) -> Extension {
    (kind, vec![0; 7])
}

fn fragment_header(offset: u8, flags: u8) -> Extension {
    (44, vec![0, 0, offset << 3 | flags, 0, 0, 0, 1])
}

#[test]
fn ipv6_headers() {
    let of = |extension| extended(&[extension]);
    let options = [eight(0), eight(60), eight(43), eight(60), eight(135), eight(139), eight(140)];
    let fragment = |fragment| Headers { fragment, ..later_by(8, UDP6) };
    let first = Headers { l4_checksum: Checksum::Unknown, ..fragment(Fragment::First) };
    let later = |protocol| network_only(Headers { protocol, fragment: Fragment::Later, ..UDP6 });
    let longest = vec![eight(60); MAX_EXTENSION_HEADERS];
    let too_long = vec![eight(60); MAX_EXTENSION_HEADERS + 1];
    let beyond = |protocol| flawed(Flaw::Extension, Headers { protocol, ..network_only(UDP6) });
    let longer = udp6().edit(IP + 4, &[0, 14]);
    check([
        ("IPv6", udp6(), UDP6),
        ("padding", udp6().padded(3), UDP6),
        ("one byte more than there is", longer, flawed(Flaw::IpLength, UDP6)),
        ("options of all kinds", extended(&options), later_by(56, UDP6)),
        ("authentication", of((51, [&[2], [0; 14].as_slice()].concat())), later_by(16, UDP6)),
        ("atomic fragment", of(fragment_header(0, 0)), fragment(Fragment::Atomic)),
        ("first fragment", of(fragment_header(0, 1)), first),
        ("a fragment between", of(fragment_header(1, 1)), later(17)),
        ("the last fragment", of(fragment_header(1, 0)), later(17)),
        // A later fragment has no further headers, whatever its next-header field.
        ("a fragment of options", extended(&[fragment_header(1, 0), eight(60)]), later(60)),
        ("as many headers as may be", extended(&longest), later_by(128, UDP6)),
        ("one header more", extended(&too_long), beyond(60)),
        ("a header that ends outside", of((60, [&[9], [0; 6].as_slice()].concat())), beyond(17)),
        ("a header that begins outside", udp6().edit(IP + 6, &[0, 60]).cut(AFTER_IPV6), {
            flawed(Flaw::IpLength, Headers { protocol: 0, ..network_only(UDP6) })
        }),
        ("a jumbogram", of(eight(0)).edit(IP + 4, &[0, 0]), later_by(8, UDP6)),
        ("snapped in the chain", of(eight(60)).snapped(AFTER_IPV6 + 1), {
            Headers { protocol: 60, ..network_only(UDP6) }
        }),
    ]);
}

/// RFC 8200, section 8.1: the checksum includes the final destination address.
#[test]
fn routing_header_names_summed_address() {
    let via = [9; 16];
    let [_, to] = ADDRESSES_V6;
    let routed = |kind, left, addresses: [[u8; 16]; 2]| {
        let body = [&[4, kind, left, 0, 0, 0, 0], addresses.as_flattened()].concat();
        extended(&[(43, body)]).edit(IP + 24, &via)
    };
    let cases = [
        ("type 0: the last address", routed(0, 1, [via, to]), Checksum::Good),
        ("type 0: not the first", routed(0, 1, [to, via]), Checksum::Bad),
        ("type 2: the last address", routed(2, 1, [via, to]), Checksum::Good),
        ("type 4: the first address", routed(4, 1, [to, via]), Checksum::Good),
        ("another type", routed(3, 1, [to, to]), Checksum::Unknown),
        ("at its end", routed(0, 0, [to, to]), Checksum::Bad),
        ("at its end", routed(0, 0, [via, via]).edit(IP + 24, &to), Checksum::Good),
    ];
    for (name, frame, l4_checksum) in cases {
        assert_eq!(frame.parse(), Headers { l4_checksum, ..later_by(40, UDP6) }, "{name}");
    }
}

#[test]
fn truncated_header_shows_present_fields() {
    for (captured, ports, sequence) in
        [(37, None, None), (38, Some((1000, 80)), None), (50, Some((1000, 80)), Some(7))]
    {
        let frame = tcp4().snapped(captured);
        let headers = frame.parse();
        let view = View::new(frame.seen(), &headers);
        assert_eq!((view.ports(), view.tcp_sequence()), (ports, sequence), "of {captured} bytes");
        assert_eq!(view.protocol(), Some(6));
        assert!(view.payload().is_empty());
    }
}

#[test]
fn network_kind_from_first_byte() {
    for (frame, network) in [(udp4(), Network::Ipv4), (udp6(), Network::Ipv6)] {
        let [before, at] = [IP, IP + 1].map(|captured| frame.clone().snapped(captured).parse());
        assert_eq!([before, at].map(|headers| headers.network), [Network::Other, network]);
        assert_eq!([before, at].map(|headers| headers.flaw), [None; 2]);
    }
}
