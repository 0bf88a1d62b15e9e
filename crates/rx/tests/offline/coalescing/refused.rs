//! Every refusal, one field changed at a time: its counter, the packets that come out, and that
//! their bytes are those that came in.

use std::collections::BTreeSet;

use etherparse::{Ipv6Extensions, Ipv6RawExtHeader, Ipv6RoutingExtensions, ip_number};
use forebay_rx::coalesce::{CoalesceConfig, CoalesceMode, FlushReason, MergeRefusal};
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Packet;
use forebay_rx::parse::{Headers, Link, Verify, parse_into};

use crate::coalescing::frames::{
    AFTER_IPV4, CWR, ECE, FIN, IP, PSH, RST, SYN, Segment, URG, Wire, tcp, timestamps, udp,
};
use crate::coalescing::rig::{Rig, taken_apart};
use crate::coalescing::tunnel_refused;

/// Course of the second of two packets, which is refused.
#[derive(Clone, Copy, Debug)]
enum Goes {
    /// Behind the first, which is flushed; no further segment is added to the second.
    Alone,
    /// Behind the first, which is flushed; a further segment could be added to the second.
    Anew,
    /// At once, as a packet of another flow; the first stays held.
    Past,
}

struct Case {
    name: &'static str,
    refusal: MergeRefusal,
    goes: Goes,
    config: CoalesceConfig,
    verify: Verify,
    wires: [Wire; 2],
}

fn case(goes: Goes) -> impl Fn(&'static str, MergeRefusal, [Wire; 2]) -> Case {
    let (config, verify) = (CoalesceConfig::default(), Verify::Checksums);
    move |name, refusal, wires| Case { name, refusal, goes, config, verify, wires }
}

impl Case {
    fn lro(self) -> Self {
        Self { config: CoalesceConfig { mode: CoalesceMode::Lro, ..self.config }, ..self }
    }

    fn check(&self, is_summed: bool) {
        let mut rig = Rig::new(self.config);
        rig.verify = self.verify;
        let wires = self.wires.clone().map(|wire| if is_summed { wire.summed() } else { wire });
        let out = rig.poll(&wires);
        let at = format!("{}, summed by the device: {is_summed}", self.name);
        let let_go = if self.refusal == MergeRefusal::Size {
            FlushReason::Size
        } else {
            FlushReason::Mismatch
        };
        let flushes = match self.goes {
            Goes::Alone => vec![(let_go, 1)],
            Goes::Anew => vec![(FlushReason::PollEnd, 1), (let_go, 1)],
            Goes::Past => vec![(FlushReason::PollEnd, 1)],
        };
        assert_eq!(rig.verdicts(), (vec![(self.refusal, 1)], flushes), "{at}");
        let order = if let Goes::Past = self.goes { [1, 0] } else { [0, 1] };
        assert_eq!(out.len(), 2, "{at}");
        for (packet, index) in out.iter().zip(order) {
            let wire = &wires[index];
            assert_eq!(packet.headers, parsed(wire, self.verify), "{at}: what is known of it");
            assert_eq!((packet.gso_size(), packet.device_sum), (0, wire.device_sum), "{at}");
        }
        let expected = order.map(|index| rig.fed[index].clone());
        assert_eq!(taken_apart(out), expected, "{at}: as it came");
        assert_eq!(rig.pool.in_use(), 0);
    }
}

/// Headers of a frame, parsed by itself.
fn parsed(wire: &Wire, verify: Verify) -> Headers {
    let Wire { bytes, wire_len, link, device_sum, l4_checksum, .. } = wire;
    let mut headers = Headers { link: *link, l4_checksum: *l4_checksum, ..Headers::default() };
    parse_into(&mut headers, bytes, *wire_len, *device_sum, verify);
    headers
}

fn tcp6() -> Segment {
    tcp().with(|segment| segment.is_v6 = true)
}

/// Two segments that would merge without a change of the second.
fn changed(first: &Segment, change: impl FnOnce(&mut Segment)) -> [Wire; 2] {
    [first.wire(), first.nth(1).with(change).wire()]
}

/// Two segments that would merge without a change of the second on the wire.
fn edited(first: &Segment, change: impl FnOnce(Wire) -> Wire) -> [Wire; 2] {
    [first.wire(), change(first.nth(1).wire())]
}

fn extension(len: usize) -> Ipv6RawExtHeader {
    Ipv6RawExtHeader::new_raw(ip_number::TCP, &vec![0; len]).unwrap()
}

/// Extensions with a header of segment routing, whose last segment is the destination.
pub(crate) fn routed(segments_left: u8) -> Ipv6Extensions {
    let routing = [&[4, segments_left, 0, 0, 0, 0][..], &[0xfd; 16]].concat();
    let routing = Ipv6RawExtHeader::new_raw(ip_number::TCP, &routing).unwrap();
    let routing = Some(Ipv6RoutingExtensions { routing, final_destination_options: None });
    Ipv6Extensions { routing, ..Ipv6Extensions::default() }
}

fn flags(flags: u8) -> impl Fn(&mut Segment) {
    move |segment| segment.flags |= flags
}

/// Change of bytes of the transport header behind IPv4.
fn transport(at: usize, bytes: &[u8]) -> impl Fn(Wire) -> Wire {
    move |wire| wire.edit(AFTER_IPV4 + at, bytes)
}

/// Frame with a last word that makes the checksum 0, and with all ones in the field.
fn odd(wire: &Wire) -> Wire {
    let end = wire.bytes.len() - 2;
    let zeroed = wire.clone().edit(end, &[0; 2]).resummed();
    let missing = [zeroed.bytes[AFTER_IPV4 + 16], zeroed.bytes[AFTER_IPV4 + 17]];
    zeroed.edit(end, &missing).edit(AFTER_IPV4 + 16, &[0xff; 2])
}

/// Two segments, the second with an id that makes the IPv4 checksum 0, and all ones in the field.
fn odd_ip() -> [Wire; 2] {
    let zeroed = tcp().nth(1).with(|segment| segment.id = 0).wire();
    let missing = u16::from_be_bytes([zeroed.bytes[IP + 10], zeroed.bytes[IP + 11]]);
    edited(&tcp().with(|segment| segment.id = missing - 1), |wire| wire.edit(IP + 10, &[0xff; 2]))
}

/// Packets refused for their network header, or its absence.
fn by_network() -> Vec<Case> {
    use MergeRefusal as R;
    let (alone, past) = (case(Goes::Alone), case(Goes::Past));
    let protocol = |protocol| move |wire: Wire| wire.edit(IP + 9, &[protocol]).resummed();
    let fragment = |field: [u8; 2]| move |wire: Wire| wire.edit(IP + 6, &field).resummed();
    let sctp6 = |wire: Wire| wire.edit(IP + 6, &[132]);
    let longer = |wire: Wire| Wire { wire_len: wire.wire_len + 1, ..wire };
    let optional = |segment: &mut Segment| segment.ip_options = vec![1; 4];
    let routed = |segment: &mut Segment| segment.extensions = routed(1);
    let long = |segment: &mut Segment| {
        segment.extensions.hop_by_hop_options = Some(extension(8 * 12 + 6));
    };
    let hopping = tcp6().with(|segment| {
        segment.extensions.hop_by_hop_options = Some(extension(6));
    });
    vec![
        past("ARP", R::Protocol, edited(&tcp(), |wire| wire.edit(IP - 1, &[6]))),
        past("SCTP", R::Protocol, edited(&tcp(), protocol(132))),
        past("SCTP over IPv6", R::Protocol, edited(&tcp6(), sctp6)),
        past("ICMP", R::Protocol, edited(&tcp(), protocol(1))),
        past("snapped within IP", R::Snapped, edited(&tcp(), |wire| wire.snapped(IP + 12))),
        alone("snapped within TCP", R::Snapped, edited(&tcp(), |wire| wire.snapped(IP + 32))),
        alone("snapped", R::Snapped, edited(&tcp(), |wire| wire.snapped(100))),
        alone("longer on the wire", R::Snapped, edited(&tcp(), longer)),
        alone("first fragment", R::Fragment, edited(&tcp(), fragment([0x20, 0]))),
        alone("later fragment", R::Fragment, edited(&tcp(), fragment([0, 1]))),
        alone("IPv4 options", R::IpOptions, changed(&tcp(), optional)),
        alone("reserved bit", R::IpOptions, edited(&tcp(), fragment([0xc0, 0]))),
        alone("segments left", R::Extension, changed(&tcp6(), routed)),
        alone("headers beyond 128 bytes", R::Extension, changed(&tcp6(), long)),
        alone("jumbogram", R::Extension, edited(&hopping, |wire| wire.edit(IP + 4, &[0; 2]))),
        alone("IPv4 checksum", R::IpChecksum, edited(&tcp(), |wire| wire.edit(IP + 8, &[1]))),
        alone("IPv4's 0xffff for 0", R::OddChecksum, odd_ip()),
    ]
}

/// Packets refused for their transport header or payload.
fn by_transport() -> Vec<Case> {
    use MergeRefusal as R;
    let (alone, past) = (case(Goes::Alone), case(Goes::Past));
    let pure = |segment: &mut Segment| segment.payload.clear();
    let shorter = |wire: Wire| transport(4, &[0, 99])(wire).resummed();
    let one = CoalesceConfig { descriptors: 1, ..CoalesceConfig::default() };
    let other = |segment: &mut Segment| segment.port += 1;
    vec![
        alone("a TCP header of 16 bytes", R::Flaw, edited(&tcp(), transport(12, &[0x40]))),
        alone("TCP checksum", R::L4Checksum, edited(&tcp(), transport(20, &[0xee]))),
        alone("UDP checksum", R::L4Checksum, edited(&udp(), transport(8, &[0xee]))),
        alone("UDP without", R::NoChecksum, edited(&udp(), transport(6, &[0, 0]))),
        alone("0xffff for 0", R::OddChecksum, edited(&tcp(), |wire| odd(&wire))),
        alone("SYN", R::TcpFlags, changed(&tcp(), flags(SYN))),
        alone("RST", R::TcpFlags, changed(&tcp(), flags(RST))),
        alone("URG", R::TcpFlags, changed(&tcp(), flags(URG))),
        alone("CWR", R::TcpFlags, changed(&tcp(), flags(CWR))),
        alone("pure ACK", R::NoPayload, changed(&tcp(), pure)),
        alone("empty datagram", R::NoPayload, changed(&udp(), pure)),
        alone("UDP shorter than IP", R::UdpLength, edited(&udp(), shorter)),
        alone("padded UDP", R::Padded, edited(&udp(), |wire| wire.padded(&[0]))),
        Case { config: one, ..past("a second flow", R::TableFull, changed(&tcp(), other)) },
    ]
}

/// Packets refused in `lro` mode.
fn by_lro() -> Vec<Case> {
    use MergeRefusal as R;
    let (alone, anew) = (case(Goes::Alone), case(Goes::Anew));
    let marked = |segment: &mut Segment| segment.tos = 3;
    let dated = tcp().with(|segment| segment.options = timestamps(5, 5));
    let with_options =
        |options: Vec<u8>| changed(&dated, move |segment: &mut Segment| segment.options = options);
    let older = |segment: &mut Segment| segment.acknowledgement -= 1;
    let sack = [[1, 1, 5, 10], [0; 4], [1; 4]].concat();
    let cases = vec![
        alone("ECE", R::TcpFlags, changed(&tcp(), flags(ECE))),
        alone("FIN", R::TcpFlags, changed(&tcp(), flags(FIN))),
        alone("no ACK", R::TcpFlags, changed(&tcp(), |segment| segment.flags = PSH)),
        alone("CE", R::CongestionMark, changed(&tcp(), marked)),
        alone("CE over IPv6", R::CongestionMark, changed(&tcp6(), marked)),
        alone("SACK", R::TcpOptions, with_options(sack)),
        alone("no echo", R::TcpOptions, with_options(timestamps(6, 0))),
        anew("older acknowledgement", R::Acknowledgement, changed(&tcp(), older)),
        anew("older timestamp", R::OtherOptions, with_options(timestamps(4, 5))),
        anew("no timestamp", R::OtherOptions, with_options(vec![])),
    ];
    cases.into_iter().map(Case::lro).collect()
}

/// Packets refused for headers that differ from the held packet's.
fn by_difference() -> Vec<Case> {
    use MergeRefusal as R;
    let anew = case(Goes::Anew);
    let next = |change: fn(&mut Segment)| changed(&tcp(), change);
    let next6 = |change: fn(&mut Segment)| changed(&tcp6(), change);
    let bit = |wire: Wire| transport(12, &[0x51])(wire).resummed();
    let dated = tcp().with(|segment| segment.options = timestamps(5, 5));
    let newer = |segment: &mut Segment| segment.options = timestamps(6, 5);
    let undated = |segment: &mut Segment| segment.options.clear();
    let optional =
        |segment: &mut Segment| segment.extensions.hop_by_hop_options = Some(extension(6));
    let routed = |segment: &mut Segment| segment.extensions = routed(0);
    vec![
        anew("the hash of another", R::OtherFlow, {
            next(|segment| segment.port += 1).map(|wire| wire.hashed(5))
        }),
        anew("UDP's hash", R::OtherFlow, [tcp(), udp()].map(|flow| flow.wire().hashed(5))),
        anew("MAC address", R::LinkHeader, next(|segment| segment.mac = 6)),
        anew("VLAN", R::LinkHeader, next(|segment| segment.vlans = vec![5])),
        anew("bare IP", R::LinkHeader, next(|segment| segment.link = Link::Ip)),
        anew("TTL", R::Ttl, next(|segment| segment.ttl = 63)),
        anew("hop limit", R::Ttl, next6(|segment| segment.ttl = 63)),
        anew("ECN", R::Tos, next(|segment| segment.tos = 1)),
        anew("DSCP", R::Tos, next6(|segment| segment.tos = 4)),
        anew("fragmentable", R::IpHeader, next(|segment| segment.dont_fragment = false)),
        anew("flow label", R::IpHeader, next6(|segment| segment.flow_label += 1)),
        anew("hop-by-hop options", R::IpHeader, changed(&tcp6(), optional)),
        anew("routing header", R::IpHeader, changed(&tcp6(), routed)),
        anew("acknowledgement", R::Acknowledgement, next(|segment| segment.acknowledgement += 1)),
        anew("window", R::Window, next(|segment| segment.window += 1)),
        anew("ECE", R::OtherFlags, next(|segment| segment.flags |= ECE)),
        anew("accurate ECN's bit", R::OtherFlags, edited(&tcp(), bit)),
        anew("urgent pointer", R::OtherFlags, next(|segment| segment.urgent = 7)),
        anew("newer timestamp", R::OtherOptions, changed(&dated, newer)),
        anew("no timestamp", R::OtherOptions, changed(&dated, undated)),
    ]
}

/// Packets refused because they do not continue the held packet.
fn by_place() -> Vec<Case> {
    use MergeRefusal as R;
    let anew = case(Goes::Anew);
    let next = |change: fn(&mut Segment)| changed(&tcp(), change);
    let longer = |segment: &mut Segment| segment.payload.push(1);
    let large = tcp().sized(33_000);
    let recorded = |first: u64, second: u64| {
        [tcp().wire().recorded(first), tcp().nth(1).wire().recorded(second)]
    };
    vec![
        anew("id goes up by 2", R::IpId, next(|segment| segment.id += 1)),
        anew("a gap", R::Sequence, next(|segment| segment.sequence += 1)),
        anew("an overlap", R::Sequence, next(|segment| segment.sequence -= 1)),
        anew("a duplicate", R::Sequence, next(|segment| segment.sequence = tcp().sequence)),
        anew("one byte more", R::Larger, next(longer)),
        anew("one byte more of UDP", R::Larger, changed(&udp(), longer)),
        anew("beyond 64 KiB", R::Size, changed(&large, |_| {})),
        anew("long ago", R::Gap, recorded(1, 50_000_002)),
        anew("before", R::Gap, recorded(50_000_002, 1)),
    ]
}

fn cases() -> impl Iterator<Item = Case> {
    [by_network(), by_transport(), by_lro(), by_difference(), by_place()].into_iter().flatten()
}

#[test]
fn lro_1_refusals_counted_frames_unchanged() {
    for case in cases() {
        case.check(false);
        case.check(true);
    }
}

/// Refusals that a table of pairs cannot express.
const ELSEWHERE: [MergeRefusal; 6] = [
    MergeRefusal::Unverified,
    MergeRefusal::Push,
    MergeRefusal::Merged,
    MergeRefusal::WholeGso,
    MergeRefusal::NoHash,
    MergeRefusal::InPieces,
];

#[test]
fn lro_1_unverified_passes_unless_device_summed() {
    let wires = changed(&tcp(), |_| {});
    let [first, second] = wires.clone();
    let mut rig = Rig::gro();
    rig.verify = Verify::Nothing;
    let out = rig.poll(&wires);
    assert_eq!(rig.verdicts(), (vec![(MergeRefusal::Unverified, 2)], vec![]));
    assert_eq!(out.iter().map(Packet::segment_count).sum::<u32>(), 2);
    assert_eq!(rig.poll(&[first.summed(), second.summed()])[0].segment_count(), 2);
}

#[test]
fn merged_or_unhashed_passes_through() {
    let mut rig = Rig::gro();
    let mut merged = rig.poll(&changed(&tcp(), |_| {}));
    assert_eq!(merged[0].segment_count(), 2);
    rig.coalescer.coalesce(&mut merged, 1, &mut rig.out);
    assert_eq!(rig.counts(), [2]);
    assert_eq!(rig.verdicts().0, [(MergeRefusal::Merged, 1)]);
    let mut rig = Rig::gro();
    let mut packets = rig.poll(&[tcp().wire()]);
    packets[0].hash = FlowHash::NONE;
    rig.coalescer.coalesce(&mut packets, 1, &mut rig.out);
    assert_eq!(rig.verdicts().0, [(MergeRefusal::NoHash, 1)]);
    assert_eq!((rig.counts(), rig.coalescer.held()), (vec![1], 0));
}

#[test]
fn pushing_first_segment_ends_packet() {
    for flag in [PSH, FIN] {
        let first = tcp().with(|segment| segment.flags |= flag).wire();
        let mut rig = Rig::gro();
        let out = rig.poll(&[first, tcp().nth(1).wire()]);
        let verdicts = (vec![(MergeRefusal::Push, 1)], vec![(FlushReason::PollEnd, 1)]);
        assert_eq!(rig.verdicts(), verdicts);
        assert_eq!(taken_apart(out), rig.fed);
    }
}

#[test]
fn promise_2_pushing_overflow_is_refused_once() {
    for flag in [PSH, FIN] {
        let gap = tcp().nth(2).with(|segment| segment.flags |= flag).wire();
        let mut rig = Rig::gro();
        let out = rig.poll(&[tcp().wire(), gap, tcp().nth(3).wire()]);
        let flushes = vec![(FlushReason::PollEnd, 1), (FlushReason::Mismatch, 1)];
        assert_eq!(rig.verdicts(), (vec![(MergeRefusal::Sequence, 1)], flushes));
        assert_eq!(taken_apart(out), rig.fed, "nor is anything added to it");
    }
}

#[test]
fn length_field_frames_pass_alone() {
    let snap = |Wire { bytes, link, .. }: Wire| {
        let (addresses, rest) = bytes.split_at(IP - 2);
        let length = u16::try_from(rest.len() + 6).unwrap().to_be_bytes();
        Wire::new([addresses, &length, &[0xaa, 0xaa, 3, 0, 0, 0], rest].concat(), link)
    };
    let wires: Vec<_> = tcp().run(2).into_iter().map(snap).collect();
    let mut rig = Rig::gro();
    let out = rig.poll(&wires);
    assert_eq!(rig.verdicts(), (vec![(MergeRefusal::Protocol, 2)], vec![]));
    assert_eq!(taken_apart(out), rig.fed);
}

#[test]
fn no_refusal_is_left_out_here() {
    let covered: BTreeSet<_> = cases().map(|case| case.refusal.name()).collect();
    let in_tunnels = tunnel_refused::refusals().map(MergeRefusal::name);
    let covered: BTreeSet<_> =
        ELSEWHERE.iter().map(|refusal| refusal.name()).chain(covered).chain(in_tunnels).collect();
    assert_eq!(covered, BTreeSet::from(MergeRefusal::ALL.map(MergeRefusal::name)));
}

#[test]
fn promise_1_fragment_releases_flows_between_addresses() {
    let flows = [tcp(), tcp().with(|segment| segment.port = 7), udp()];
    let elsewhere = tcp6();
    let later = udp().wire().edit(IP + 6, &[0, 9]).resummed();
    // The first 8 bytes of TCP: ports and sequence number.
    let tiny = tcp().wire().snapped(IP + 28).edit(IP + 2, &[0, 28]).edit(IP + 6, &[0x20, 0]);
    for fragment in [later, tiny.resummed()] {
        let wires: Vec<_> =
            flows.iter().chain([&elsewhere]).map(Segment::wire).chain([fragment]).collect();
        let mut rig = Rig::gro();
        rig.feed(&wires);
        let out = std::mem::take(&mut rig.out);
        assert_eq!(taken_apart(out), [0, 1, 2, 4].map(|index| rig.fed[index].clone()));
        assert_eq!(rig.coalescer.held(), 1, "the other flow is held on");
    }
}
