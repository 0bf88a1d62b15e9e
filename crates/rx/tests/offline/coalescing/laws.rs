//! Laws for any traffic under any settings, also while they change.

use std::collections::BTreeMap;

use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::{CoalesceConfig, CoalesceMode, MergeRefusal, innermost};
use forebay_rx::packet::Packet;
use forebay_rx::parse::{Headers, Link, Network, Verify, View, parse};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::coalescing::frames::{
    CWR, ECE, FIN, PSH, RST, SYN, Segment, Wire, tcp, timestamps, udp,
};
use crate::coalescing::merged;
use crate::coalescing::rig::{Rig, by_hash, taken_apart};
use crate::coalescing::tunnel_frames::{Kind, Tunnelled, outside, tunnelled};

/// Event on the way of a segment, or change of its flow from then on.
#[derive(Clone, Debug)]
pub(crate) enum Fate {
    Fine,
    Flags(u8),
    Acknowledged(u32),
    Window(u16),
    Dated(u32),
    /// Jump of the flow's sequence number, ahead or back.
    Skips(i32),
    Sized(usize),
    Ttl(u8),
    Id(u16),
    Unsummed,
    Padded(Vec<u8>),
    Fragmented(bool),
    /// Overwritten bytes, with recomputed checksums if true.
    Rewritten(Vec<(Index, u8)>, bool),
    Snapped(Index),
    Runt(Index),
    Late(u64),
    Outside(Outer),
}

/// A field of an IP header around others.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outer {
    Ttl(u8),
    Tos(u8),
    Id(u16),
    Host(u8),
    Port(u16),
}

fn outer() -> impl Strategy<Value = Outer> {
    prop_oneof![
        any::<u8>().prop_map(Outer::Ttl),
        any::<u8>().prop_map(Outer::Tos),
        any::<u16>().prop_map(Outer::Id),
        (0u8..3).prop_map(Outer::Host),
        (1u16..4).prop_map(Outer::Port),
    ]
}

fn fate() -> impl Strategy<Value = Fate> {
    let edits = vec((any::<Index>(), any::<u8>()), 1..3);
    let flag = prop_oneof![Just(PSH), Just(FIN), Just(SYN), Just(RST), Just(ECE), Just(CWR)];
    prop_oneof![
        60 => Just(Fate::Fine),
        3 => flag.prop_map(Fate::Flags),
        2 => (0u32..3).prop_map(Fate::Acknowledged),
        1 => any::<u16>().prop_map(Fate::Window),
        2 => (0u32..3).prop_map(Fate::Dated),
        3 => (-200i32..200).prop_map(Fate::Skips),
        3 => (0usize..250).prop_map(Fate::Sized),
        1 => any::<u8>().prop_map(Fate::Ttl),
        1 => any::<u16>().prop_map(Fate::Id),
        2 => Just(Fate::Unsummed),
        4 => vec(any::<u8>(), 1..10).prop_map(Fate::Padded),
        2 => any::<bool>().prop_map(Fate::Fragmented),
        6 => (edits, any::<bool>()).prop_map(|(edits, right)| Fate::Rewritten(edits, right)),
        2 => any::<Index>().prop_map(Fate::Snapped),
        1 => any::<Index>().prop_map(Fate::Runt),
        1 => (0u64..30_000_000).prop_map(Fate::Late),
        2 => outer().prop_map(Fate::Outside),
    ]
}

/// Flows of all kinds, each with its next segment.
pub(crate) struct Traffic {
    flows: Vec<Segment>,
    /// Tunnels around the last of them.
    tunnels: Vec<Tunnelled>,
    timestamp_ns: u64,
}

pub(crate) const FLOWS: usize = PLAIN_FLOWS + 6;

const PLAIN_FLOWS: usize = 8;

/// Flow whose IPv4 ids are constant.
const FIXED_ID: usize = 4;

impl Traffic {
    pub(crate) fn new() -> Self {
        let tcp = |port: u16| Segment { port, ..tcp() };
        let udp = |port: u16| Segment { port, ..udp() };
        let flows = vec![
            tcp(1),
            tcp(2).with(|flow| flow.is_v6 = true),
            udp(1),
            udp(2).with(|flow| flow.is_v6 = true),
            tcp(3).with(|flow| flow.vlans = vec![5]).sized(99),
            tcp(4).with(|flow| flow.options = timestamps(5, 5)).sized(33),
            udp(3).with(|flow| flow.vlans = vec![5, 6]).sized(1),
            tcp(5).with(|flow| flow.link = Link::Ip).sized(2),
        ];
        assert_eq!(flows.len(), PLAIN_FLOWS);
        let tunnels = tunnels_of_all_kinds();
        let inside = tunnels.iter().map(|tunnel| tunnel.inner.clone());
        let flows: Vec<_> = flows.into_iter().chain(inside).collect();
        assert_eq!(flows.len(), FLOWS);
        Self { flows, tunnels, timestamp_ns: 1_000_000_000 }
    }

    pub(crate) fn next(&mut self, flow: usize, fate: &Fate) -> Wire {
        let state = &mut self.flows[flow];
        let mut segment = state.clone();
        *state = state.nth(1);
        if flow == FIXED_ID {
            state.id = segment.id;
        }
        match *fate {
            Fate::Flags(flags) => segment.flags |= flags,
            Fate::Acknowledged(ahead) => state.acknowledgement += ahead,
            Fate::Window(window) => state.window = window,
            Fate::Dated(ahead) if !state.options.is_empty() => {
                state.options = timestamps(5 + ahead, 5);
            }
            Fate::Skips(ahead) => state.sequence = state.sequence.wrapping_add_signed(ahead),
            Fate::Sized(len) => segment = segment.sized(len),
            Fate::Ttl(ttl) => segment.ttl = ttl,
            Fate::Id(id) => segment.id = id,
            Fate::Unsummed => segment.is_unsummed = true,
            Fate::Late(ns) => self.timestamp_ns += ns,
            _ => {}
        }
        let wire = match flow.checked_sub(PLAIN_FLOWS) {
            None => segment.wire(),
            Some(index) => self.around(index, fate, segment.clone()),
        };
        let wire = wire.recorded(self.timestamp_ns);
        match fate {
            Fate::Padded(padding) => wire.padded(padding),
            Fate::Fragmented(is_first)
                if !segment.is_v6
                    && wire.link == Link::Ethernet
                    && wire.headers().network == Network::Ipv4 =>
            {
                let field = if *is_first { [0x20, 0] } else { [0, 3] };
                let at = usize::from(wire.headers().network_offset);
                wire.edit(at + 6, &field).resummed()
            }
            Fate::Rewritten(edits, is_resummed) => {
                let len = wire.bytes.len();
                let edit =
                    |wire: Wire, (at, byte): &(Index, u8)| wire.edit(at.index(len), &[*byte]);
                let wire = edits.iter().fold(wire, edit);
                if *is_resummed { wire.resummed() } else { wire }
            }
            Fate::Snapped(at) => {
                let at = at.index(wire.bytes.len());
                wire.snapped(at)
            }
            Fate::Runt(at) => {
                let at = at.index(wire.bytes.len());
                Wire::new(wire.bytes[..at].to_vec(), wire.link)
            }
            _ => wire,
        }
    }
}

impl Traffic {
    /// The segment in its tunnel, with ids outside that rise as those inside do.
    fn around(&mut self, index: usize, fate: &Fate, inner: Segment) -> Wire {
        let tunnel = &mut self.tunnels[index];
        let mut tunnelled = Tunnelled { inner, ..tunnel.clone() };
        *tunnel = tunnel.nth(1);
        for outside in &mut tunnelled.outside {
            match *fate {
                Fate::Outside(Outer::Ttl(ttl)) => outside.ttl = ttl,
                Fate::Outside(Outer::Tos(tos)) => outside.tos = tos,
                Fate::Outside(Outer::Id(id)) => outside.id = id,
                Fate::Outside(Outer::Host(host)) => outside.host = host,
                Fate::Outside(Outer::Port(port)) => outside.port = port,
                _ => {}
            }
        }
        tunnelled.wire()
    }
}

/// One of each, around flows of their own.
fn tunnels_of_all_kinds() -> Vec<Tunnelled> {
    let inner = |port: u16| Segment { port, ..tcp() };
    let gre = Kind::Gre { key: Some(5), is_summed: true, is_bridged: false };
    let geneve = Kind::Geneve { network: 9, options: vec![1; 8], is_bridged: true };
    let vxlan = || outside(Kind::Vxlan { network: 7 });
    vec![
        tunnelled(outside(Kind::Ip), inner(11)),
        tunnelled(outside(gre).v6(), inner(12).sized(33)),
        tunnelled(vxlan().summed(), udp().with(|it| (it.port, it.vlans) = (13, vec![5]))),
        tunnelled(vxlan().v6(), inner(14).with(|it| it.is_v6 = true)),
        tunnelled(outside(geneve), inner(15).sized(2)),
        tunnelled(vxlan(), inner(16)).with(|it| (it.outside, it.pppoe) = (vec![], Some(3))),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    /// Segments of one flow, one after another.
    Run(usize, Vec<Fate>),
    Junk(Vec<u8>),
    EndPoll(PollStatus, u64),
    Change(CoalesceConfig),
}

fn status() -> impl Strategy<Value = PollStatus> {
    prop_oneof![6 => Just(PollStatus::MorePending), 3 => Just(PollStatus::Drained), 1 => Just(PollStatus::Last)]
}

/// Any settings; in `gro` mode unless `modes` change.
pub(crate) fn config(modes: bool) -> impl Strategy<Value = CoalesceConfig> {
    let timeout = prop_oneof![Just(0), 1u64..3_000_000];
    (1u32..20, timeout, any::<bool>()).prop_map(
        move |(descriptors, gro_flush_timeout_ns, is_lro)| CoalesceConfig {
            mode: if modes && is_lro { CoalesceMode::Lro } else { CoalesceMode::Gro },
            descriptors,
            gro_flush_timeout_ns,
            ..CoalesceConfig::default()
        },
    )
}

/// Segments of one flow, one after another.
pub(crate) fn run() -> impl Strategy<Value = (usize, Vec<Fate>)> {
    (0..FLOWS, vec(fate(), 1..8))
}

fn steps(modes: bool) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        20 => run().prop_map(|(flow, fates)| Step::Run(flow, fates)),
        1 => vec(any::<u8>(), 0..100).prop_map(Step::Junk),
        4 => (status(), 0u64..1_500_000).prop_map(|(status, ns)| Step::EndPoll(status, ns)),
        1 => config(modes).prop_map(Step::Change),
    ];
    vec(step, 0..if cfg!(miri) { 8 } else { 80 })
}

fn played(first: CoalesceConfig, is_summed: bool, steps: &[Step]) -> Rig {
    let mut rig = Rig::new(first);
    let mut traffic = Traffic::new();
    let by_device = |wire: Wire| if is_summed { wire.summed() } else { wire };
    for step in steps {
        match step {
            Step::Run(flow, fates) => {
                let wires = fates.iter().map(|fate| by_device(traffic.next(*flow, fate)));
                rig.feed(&wires.collect::<Vec<_>>());
            }
            Step::Junk(bytes) => rig.feed(&[by_device(Wire::new(bytes.clone(), Link::Ethernet))]),
            Step::EndPoll(status, ns) => {
                rig.now_ns += ns;
                rig.end_poll(*status);
            }
            Step::Change(config) => rig.coalescer.set_config(*config, &mut rig.out),
        }
    }
    rig.end_poll(PollStatus::Last);
    assert_eq!(rig.coalescer.held(), 0);
    rig
}

/// Checks the laws of either mode: every segment comes out once, with its payload and in the order
/// of its flow, and is counted.
fn check_segments(rig: &Rig) {
    let counters = &rig.counters;
    assert_eq!(counters.segments_in.get(), rig.fed.len() as u64);
    assert_eq!(counters.packets_out.get(), rig.out.len() as u64);
    let bytes_out: u64 = rig.out.iter().map(|packet| u64::from(packet.wire_len)).sum();
    assert_eq!(counters.bytes_out.get(), bytes_out);
    let mut seen = BTreeMap::<_, Vec<_>>::new();
    for packet in &rig.out {
        assert_eq!(packet.segments().count(), packet.segment_count() as usize);
        assert_eq!(packet.segments().last().unwrap().arrival, packet.last_arrival());
        let flow = seen.entry(packet.hash.0).or_default();
        let segments = packet.segments();
        if packet.segment_count() > 1 {
            flow.extend(segments.map(|segment| (segment.arrival, segment.payload.to_vec())));
        } else {
            let bytes = packet.frame.data();
            flow.push((packet.arrival, payload(bytes, packet.wire_len, &packet.headers)));
        }
    }
    assert_eq!(seen.len(), by_hash(&rig.fed).len());
    for (hash, frames) in by_hash(&rig.fed) {
        let expected = frames.iter().map(|frame| {
            let headers = parse(&frame.bytes, frame.wire_len, frame.link, Verify::Nothing);
            (frame.arrival, payload(&frame.bytes, frame.wire_len, &headers))
        });
        assert_eq!(seen[&hash], expected.collect::<Vec<_>>(), "the flow of hash {hash:x}");
    }
}

/// Payload of TCP or UDP, inside a tunnel if it is in one.
fn payload(bytes: &[u8], wire_len: u32, headers: &Headers) -> Vec<u8> {
    let headers = innermost(bytes, wire_len, headers).unwrap_or(*headers);
    View::new(bytes, &headers).payload().to_vec()
}

fn check_merged(rig: &Rig) {
    let merged = rig.out.iter().filter(|packet| packet.gso_size() > 0);
    merged.filter(|packet| !packet.is_merged_tunnel()).for_each(merged::check_whole);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 1500 }))]

    #[test]
    fn promise_6_merged_packet_separates_into_input(
        first in config(false),
        is_summed: bool,
        steps in steps(false),
    ) {
        let mut rig = played(first, is_summed, &steps);
        check_segments(&rig);
        check_merged(&rig);
        let out = taken_apart(std::mem::take(&mut rig.out));
        prop_assert_eq!(by_hash(&out), by_hash(&rig.fed));
        prop_assert_eq!(rig.pool.in_use(), 0);
    }

    #[test]
    fn promises_1_and_2_hold_while_modes_change(
        first in config(true),
        is_summed: bool,
        steps in steps(true),
    ) {
        let mut rig = played(first, is_summed, &steps);
        check_segments(&rig);
        check_merged(&rig);
        let segments: usize = rig.out.iter().map(|packet| packet.segment_count() as usize).sum();
        prop_assert_eq!(segments, rig.fed.len());
        prop_assert_eq!(taken_apart(std::mem::take(&mut rig.out)).len(), rig.fed.len());
        prop_assert_eq!(rig.pool.in_use(), 0);
    }
}

/// The laws would prove little for traffic without merges or refusals.
#[test]
fn generated_traffic_merges_and_refuses() {
    let mut runner = TestRunner::deterministic();
    let (mut frames, mut packets, mut refused) = (0, 0, [0; MergeRefusal::ALL.len()]);
    for _ in 0..200 {
        let steps = steps(true).new_tree(&mut runner).unwrap().current();
        let first = config(true).new_tree(&mut runner).unwrap().current();
        let rig = played(first, false, &steps);
        frames += rig.fed.len();
        packets += rig.out.iter().filter(|packet: &&Packet| packet.segment_count() > 1).count();
        for (sum, counter) in refused.iter_mut().zip(&rig.counters.refused) {
            *sum += counter.get();
        }
    }
    assert!(10 * packets > frames, "{packets} merged packets of {frames} frames");
    let missing: Vec<_> = MergeRefusal::ALL
        .into_iter()
        // Frames of a source are not merged, have a hash if they are TCP or UDP, and are linear
        // here.
        .filter(|refusal| {
            !matches!(refusal, MergeRefusal::Merged | MergeRefusal::NoHash | MergeRefusal::InPieces)
        })
        .filter(|refusal| refused[refusal.index()] == 0)
        .collect();
    assert!(missing.len() < MergeRefusal::ALL.len() / 4, "{missing:?}");
}
