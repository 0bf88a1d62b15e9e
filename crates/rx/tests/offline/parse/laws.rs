//! Laws for any frame.

use etherparse::{
    IpHeaders, Ipv4Extensions, Ipv4Header, Ipv4Options, Ipv6Extensions, Ipv6Header,
    Ipv6RawExtHeader, Ipv6RoutingExtensions, NetSlice, PacketBuilder, SlicedPacket, TransportSlice,
    VlanId, ip_number,
};
use forebay_rx::parse::{
    Checksum, DeviceSum, Headers, Link, Network, Verify, View, link_layer, parse, parse_by_walk,
    parse_into,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::parse::frames::{ADDRESSES_V4, ADDRESSES_V6, IP, MACS};

#[derive(Clone, Debug)]
struct Spec {
    vlans: Vec<u16>,
    ip: Ip,
    transport: Transport,
    ports: (u16, u16),
    payload: Vec<u8>,
}

#[derive(Clone, Debug)]
enum Ip {
    V4 { option_words: usize },
    V6 { hop_by_hop: bool, routing: bool, destination: bool },
}

#[derive(Clone, Copy, Debug)]
enum Transport {
    Tcp { option_words: usize },
    Udp,
    Icmp,
}

fn spec() -> impl Strategy<Value = Spec> {
    let ip = prop_oneof![
        (0usize..=10).prop_map(|option_words| Ip::V4 { option_words }),
        any::<[bool; 3]>().prop_map(|[hop_by_hop, routing, destination]| Ip::V6 {
            hop_by_hop,
            routing,
            destination
        }),
    ];
    (vec(0u16..4096, 0..=2), ip, transport(), any::<(u16, u16)>(), vec(any::<u8>(), 0..80))
        .prop_map(|(vlans, ip, transport, ports, payload)| Spec {
            vlans,
            ip,
            transport,
            ports,
            payload,
        })
}

fn transport() -> impl Strategy<Value = Transport> {
    prop_oneof![
        (0usize..=10).prop_map(|option_words| Transport::Tcp { option_words }),
        Just(Transport::Udp),
        Just(Transport::Icmp),
    ]
}

impl Spec {
    fn build(&self) -> Vec<u8> {
        let ethernet = PacketBuilder::ethernet2(MACS[0], MACS[1]);
        let vlan = |id: u16| VlanId::try_new(id).unwrap();
        let step = match *self.vlans {
            [] => ethernet.ip(self.ip_headers()),
            [id] => ethernet.single_vlan(vlan(id)).ip(self.ip_headers()),
            [outer, inner, ..] => {
                ethernet.double_vlan(vlan(outer), vlan(inner)).ip(self.ip_headers())
            }
        };
        let (from, to) = self.ports;
        let mut bytes = Vec::new();
        let written = match (self.transport, &self.ip) {
            (Transport::Tcp { option_words }, _) => {
                let step = step.tcp(from, to, 7, 512).ack(9);
                let step = step.options_raw(&vec![1; 4 * option_words]).unwrap();
                step.write(&mut bytes, &self.payload)
            }
            (Transport::Udp, _) => step.udp(from, to).write(&mut bytes, &self.payload),
            (Transport::Icmp, Ip::V4 { .. }) => {
                step.icmpv4_echo_request(from, to).write(&mut bytes, &self.payload)
            }
            (Transport::Icmp, Ip::V6 { .. }) => {
                step.icmpv6_echo_request(from, to).write(&mut bytes, &self.payload)
            }
        };
        written.unwrap();
        bytes
    }

    /// IP headers, whose lengths and protocol numbers the builder fills in.
    fn ip_headers(&self) -> IpHeaders {
        match self.ip {
            Ip::V4 { option_words } => {
                let [from, to] = ADDRESSES_V4;
                let options = vec![1; 4 * option_words];
                let mut header = Ipv4Header::new(0, 64, ip_number::UDP, from, to).unwrap();
                header.options = Ipv4Options::try_from(options.as_slice()).unwrap();
                IpHeaders::Ipv4(header, Ipv4Extensions::default())
            }
            Ip::V6 { hop_by_hop, routing, destination } => {
                let [source, destination_address] = ADDRESSES_V6;
                let header = Ipv6Header {
                    source,
                    destination: destination_address,
                    hop_limit: 64,
                    ..Ipv6Header::default()
                };
                let zeros = |len| Ipv6RawExtHeader::new_raw(ip_number::UDP, &vec![0; len]).unwrap();
                let extensions = Ipv6Extensions {
                    hop_by_hop_options: hop_by_hop.then(|| zeros(6)),
                    routing: routing.then(|| Ipv6RoutingExtensions {
                        routing: zeros(22),
                        final_destination_options: destination.then(|| zeros(14)),
                    }),
                    destination_options: destination.then(|| zeros(30)),
                    ..Ipv6Extensions::default()
                };
                IpHeaders::Ipv6(header, extensions)
            }
        }
    }
}

fn parse_whole(bytes: &[u8]) -> Headers {
    parse(bytes, u32::try_from(bytes.len()).unwrap(), Link::Ethernet, Verify::Checksums)
}

/// Checks that all recorded offsets are within the frame.
fn check_bounds(bytes: &[u8], wire_len: usize, headers: &Headers) {
    let seen = bytes.len();
    assert!(usize::from(headers.network_offset) <= seen);
    assert!(headers.transport_offset == 0 || usize::from(headers.transport_offset) < seen);
    let view = View::new(bytes, headers);
    assert!(view.payload().len() <= headers.payload_len.into());
    let payload_end = usize::from(headers.payload_offset) + usize::from(headers.payload_len);
    // A UDP header has the length of the whole datagram even in a fragment, and may be wrong.
    let may_exceed = headers.protocol == ip_number::UDP.0;
    assert!(payload_end <= wire_len.max(seen) || may_exceed, "{headers:?}");
    let link = link_layer(bytes, headers.link);
    assert!(usize::from(link.network_offset) <= seen && link.vlans().len() <= 2);
    // The other accessors must not panic.
    let _ = (view.source(), view.destination(), view.protocol(), view.ttl(), view.ports());
    let _ = (view.tcp_sequence(), view.tcp_flags(), view.payload_len());
    let _ = (view.network_header_len(), view.network_len_field());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 1000 }))]

    #[test]
    fn promise_5_any_bytes_parse_within_bounds(
        bytes in vec(any::<u8>(), 0..200),
        spec in spec(),
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        wire_len in prop_oneof![0u32..300, any::<u32>()],
        is_bare: bool,
    ) {
        let mut frame = spec.build();
        for (at, byte) in edits {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        let link = if is_bare { Link::Ip } else { Link::Ethernet };
        let start = if is_bare { IP } else { 0 };
        let frame = &frame[start..];
        for bytes in [&bytes, frame, &frame[..cut.index(frame.len())]] {
            for verify in [Verify::Checksums, Verify::Nothing] {
                check_bounds(bytes, wire_len as usize, &parse(bytes, wire_len, link, verify));
            }
        }
    }

    #[test]
    fn parsing_agrees_with_an_independent_dissector(spec in spec(), padding in 0usize..20) {
        let mut bytes = spec.build();
        bytes.extend(vec![0; padding]);
        let headers = parse_whole(&bytes);
        let view = View::new(&bytes, &headers);
        let sliced = SlicedPacket::from_ethernet(&bytes).unwrap();

        let vlans: Vec<_> = sliced.vlan_ids().iter().map(|id| id.value()).collect();
        let link = link_layer(&bytes, Link::Ethernet);
        prop_assert_eq!(link.vlans(), vlans);
        prop_assert_eq!(link.network_offset, headers.network_offset);
        let (source, destination) = match sliced.net.as_ref().unwrap() {
            NetSlice::Ipv4(ip) => {
                let header = ip.header();
                (header.source_addr().into(), header.destination_addr().into())
            }
            NetSlice::Ipv6(ip) => {
                let header = ip.header();
                (header.source_addr().into(), header.destination_addr().into())
            }
            NetSlice::Arp(_) => unreachable!("none is built"),
        };
        prop_assert_eq!((view.source(), view.destination()), (Some(source), Some(destination)));
        let ip_payload = sliced.ip_payload().unwrap();
        prop_assert_eq!(view.protocol(), Some(ip_payload.ip_number.0));
        let (ports, payload) = match sliced.transport.as_ref().unwrap() {
            TransportSlice::Tcp(tcp) => {
                prop_assert_eq!(view.tcp_sequence(), Some(tcp.sequence_number()));
                (Some((tcp.source_port(), tcp.destination_port())), tcp.payload())
            }
            TransportSlice::Udp(udp) => {
                (Some((udp.source_port(), udp.destination_port())), udp.payload())
            }
            // The path reads only four bytes of ICMP; the rest depends on the type.
            _ => (None, &ip_payload.payload[4..]),
        };
        prop_assert_eq!(view.ports(), ports);
        prop_assert_eq!(view.payload(), payload);
        prop_assert_eq!(usize::from(headers.payload_len), payload.len());
        let l4 = if ports.is_some() { Checksum::Good } else { Checksum::Unknown };
        let is_v4 = headers.network == Network::Ipv4;
        let ip = if is_v4 { Checksum::Good } else { Checksum::Unknown };
        prop_assert_eq!((headers.flaw, headers.ip_checksum, headers.l4_checksum), (None, ip, l4));
    }

    #[test]
    fn truncated_frame_reveals_same_or_nothing(spec in spec()) {
        let bytes = spec.build();
        let wire_len = u32::try_from(bytes.len()).unwrap();
        let whole = parse_whole(&bytes);
        let whole_view = View::new(&bytes, &whole);
        for captured in 0..bytes.len() {
            let seen = &bytes[..captured];
            let headers = parse(seen, wire_len, Link::Ethernet, Verify::Checksums);
            check_bounds(seen, bytes.len(), &headers);
            prop_assert_eq!(headers.flaw, None, "of {} bytes", captured);
            let view = View::new(seen, &headers);
            prop_assert!(view.ports().is_none_or(|ports| Some(ports) == whole_view.ports()));
            prop_assert!(view.source().is_none_or(|source| Some(source) == whole_view.source()));
            prop_assert!(whole_view.payload().starts_with(view.payload()));
            for (part, whole) in [
                (headers.transport_offset, whole.transport_offset),
                (headers.payload_offset, whole.payload_offset),
                (headers.payload_len, whole.payload_len),
            ] {
                prop_assert!(part == 0 || part == whole);
            }
            prop_assert_eq!(headers.l4_checksum, Checksum::Unknown);
            prop_assert!([Checksum::Unknown, whole.ip_checksum].contains(&headers.ip_checksum));
        }
    }
}

/// Headers of a frame, without the verdicts on checksums.
fn kind(headers: &Headers) -> Headers {
    let (ip_checksum, l4_checksum) = (Checksum::Unknown, Checksum::Unknown);
    Headers { ip_checksum, l4_checksum, ..*headers }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 100 }))]

    #[test]
    fn single_bit_error_is_detected(
        mut spec in spec(),
        transport in prop_oneof![Just(Transport::Udp), Just(Transport::Tcp { option_words: 3 })],
    ) {
        spec.vlans.clear();
        spec.transport = transport;
        let mut bytes = spec.build();
        let right = parse_whole(&bytes);
        let transport_offset = usize::from(right.transport_offset);
        let is_v4 = right.network == Network::Ipv4;
        for bit in IP * 8..bytes.len() * 8 {
            let (at, mask) = (bit / 8, 1 << (bit % 8));
            bytes[at] ^= mask;
            let headers = parse_whole(&bytes);
            let is_other = kind(&headers) != kind(&right);
            if at < transport_offset && is_v4 {
                prop_assert!(headers.ip_checksum == Checksum::Bad || is_other, "bit {}", bit);
            }
            let is_address = if is_v4 {
                (IP + 12..IP + 20).contains(&at)
            } else {
                (IP + 8..IP + 40).contains(&at)
            };
            if at >= transport_offset || is_address {
                // Over IPv4 a flipped UDP checksum can only go undetected by becoming 0, which
                // means none.
                let is_gone = is_v4
                    && matches!(transport, Transport::Udp)
                    && bytes[transport_offset + 6..][..2] == [0, 0];
                let judged = headers.l4_checksum == Checksum::Bad;
                prop_assert!(judged || is_other || is_gone, "bit {}", bit);
            }
            bytes[at] ^= mask;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    /// Slow twin: the general walk. Frames are as built, or with some bytes of the headers changed,
    /// cut on the wire or in the capture, with and without a device's sum and verdict.
    #[test]
    fn promise_5_fast_path_agrees_with_walk(
        spec in spec(),
        damage in vec((0usize..80, any::<u8>()), 0..3),
        (cut, snap) in (0usize..30, 0u32..30),
        (is_bare, is_verified, has_sum) in any::<(bool, bool, bool)>(),
        told in prop_oneof![Just(Checksum::Unknown), Just(Checksum::Good)],
    ) {
        let mut bytes = spec.build();
        for (at, value) in damage {
            let at = at.min(bytes.len() - 1);
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - cut.saturating_sub(15));
        let (link, from) = if is_bare { (Link::Ip, IP) } else { (Link::Ethernet, 0) };
        let bytes = &bytes[from..];
        let wire_len = u32::try_from(bytes.len()).unwrap() + snap.saturating_sub(20);
        let sum = DeviceSum::of_frame(bytes, link).filter(|_| has_sum);
        let verify = if is_verified { Verify::Checksums } else { Verify::Nothing };
        let told = Headers { link, l4_checksum: told, ..Headers::default() };
        let (mut fast, mut walked) = (told, told);
        parse_into(&mut fast, bytes, wire_len, sum, verify);
        parse_by_walk(&mut walked, bytes, wire_len, sum, verify);
        prop_assert_eq!(fast, walked);
    }
}
