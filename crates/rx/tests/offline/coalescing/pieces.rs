//! Nonlinear packets: their first bytes in a frame, the others in pieces. All decisions must equal
//! those for the same packets in one frame, which are the slow twin here.

use std::sync::Arc;

use etherparse::{Ipv6RawExtHeader, ip_number};
use forebay_buf::frags::FRAGS_MAX;
use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::page_frag::{FRAG_ALIGN_BYTES, PageFragCache};
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::arrive::{Burst, HEAD_BYTES, HEAD_CHUNK_BYTES, PollStatus};
use forebay_rx::coalesce::gso::{InvalidVnetHeader, VIRTIO_NET_HDR_BYTES, VirtioNetHdr, describe};
use forebay_rx::coalesce::{CoalesceConfig, CoalesceMode, MergeRefusal, cut};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{DeviceSum, Headers, NoMemory, Verify, parse, parse_packet};
use forebay_rx::{CpuId, DropReason};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::coalescing::carried::{all_shapes, merged_by_kernel};
use crate::coalescing::frames::{Segment, Wire, tcp, udp};
use crate::coalescing::laws::{Fate, Traffic, config, run};
use crate::coalescing::partial::intake;
use crate::coalescing::rig::{Frame, Rig, by_hash, pool, received, said_of, taken_apart};
use crate::coalescing::tunnels::everything;

const BLOCK_BYTES: u32 = 1 << 17;

/// Memory of a queue that gives nonlinear packets.
struct Queue {
    pool: Pool,
    shared: PageFragCache,
}

/// Split of a packet: number of bytes in its frame, and in each piece, repeatedly.
#[derive(Clone, Debug)]
struct Split {
    head_len: usize,
    piece_lens: Vec<usize>,
}

fn split() -> impl Strategy<Value = Split> {
    // Mostly all headers are in the frame; otherwise all of a small packet is pulled in.
    let head_len = prop_oneof![1 => 0usize..94, 9 => 94usize..130, 1 => 130usize..2000];
    let split = (head_len, vec(1usize..200, 1..4));
    split.prop_map(|(head_len, piece_lens)| Split { head_len, piece_lens })
}

/// Pool of frames for heads and for copies.
fn heads(count: u32) -> Pool {
    let class = |chunk_bytes, chunks| ChunkClass { chunk_bytes, chunks };
    let large = [class(2048, 200), class(1 << 14, 60)];
    let shares = [[class(HEAD_CHUNK_BYTES, count)].into_iter().chain(large).collect()];
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
}

impl Queue {
    fn new() -> Self {
        const BLOCKS: u32 = 8;
        let region = Arc::new(Region::allocate_shared((BLOCK_BYTES * BLOCKS) as usize));
        Self { pool: heads(1200), shared: PageFragCache::new(&region, 0, BLOCK_BYTES, BLOCKS) }
    }

    /// Frame of these bytes with this split. Bytes of the frame are in the first piece's room, too,
    /// because they were copied from there.
    fn frame(&mut self, bytes: &[u8], split: &Split) -> forebay_buf::Frame {
        let mut frame = self.pool.allocate(HEAD_CHUNK_BYTES - BEFORE_PACKET_BYTES).unwrap();
        let head_len = split.head_len.min(bytes.len()).min(HEAD_BYTES as usize);
        let (head, mut rest) = bytes.split_at(head_len);
        frame.copy_from(head);
        for &len in split.piece_lens.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let is_last = frame.frag_count() + 1 == FRAGS_MAX;
            let len = if is_last { rest.len() } else { len.min(rest.len()) };
            let (piece, behind) = rest.split_at(len);
            let copied = if frame.frag_count() == 0 { head } else { &[] };
            let received = [copied, piece].concat();
            let len = u32::try_from(received.len()).unwrap();
            let mut frag = self.shared.cut(len.next_multiple_of(FRAG_ALIGN_BYTES)).unwrap();
            frag.copy_out(0, &received);
            frag.set_len(len);
            frag.pull(u32::try_from(copied.len()).unwrap());
            frame.attach(frag).unwrap();
            rest = behind;
        }
        frame
    }

    fn received(&mut self, wire: &Wire, arrival: Arrival, split: &Split) -> Packet {
        said_of(self.frame(&wire.bytes, split), wire, arrival)
    }

    fn check_all_is_home(&mut self) {
        self.pool.flush();
        assert_eq!((self.pool.in_use(), self.shared.away_blocks()), (0, 0));
    }
}

/// Everything observable of a packet.
type Seen = (Frame, Headers, u16, Option<DeviceSum>, Arrival, Vec<(Arrival, u64, u32, Vec<u8>)>);

fn seen(packet: &Packet) -> Seen {
    let Packet { headers, device_sum, .. } = *packet;
    let segments = packet.segments().map(|segment| {
        let payload: Vec<_> = segment.payload_fragments().flatten().copied().collect();
        assert!(payload.starts_with(segment.payload));
        (segment.arrival, segment.timestamp_ns, segment.offset, payload)
    });
    let segments = segments.collect();
    (Frame::of(packet), headers, packet.gso_size(), device_sum, packet.last_arrival(), segments)
}

fn refusals(rig: &Rig) -> Vec<u64> {
    rig.counters.refused.iter().map(forebay_rx::counters::Counter::get).collect()
}

/// Two coalescers with the same traffic: linear, and nonlinear.
struct Twins {
    flat: Rig,
    split: Rig,
    queue: Queue,
}

fn played(first: CoalesceConfig, is_summed: bool, runs: &[Run], splits: &[Split]) -> Twins {
    let mut queue = Queue::new();
    let (mut flat, mut split) = (Rig::new(first), Rig::new(first));
    std::mem::swap(&mut split.pool, &mut queue.pool);
    let mut traffic = Traffic::new();
    let mut splits = splits.iter().cycle();
    for (flow, fates, ends) in runs {
        let wires = fates.iter().map(|fate| traffic.next(*flow, fate));
        let wires = wires.map(|wire| if is_summed { wire.summed() } else { wire });
        let wires: Vec<_> = wires.collect();
        std::mem::swap(&mut split.pool, &mut queue.pool);
        let packets = (0..).zip(&wires).map(|(number, wire)| {
            queue.received(wire, split.arrival(number), splits.next().unwrap())
        });
        let packets = packets.collect();
        std::mem::swap(&mut split.pool, &mut queue.pool);
        flat.feed(&wires);
        split.take(packets);
        if *ends {
            flat.end_poll(PollStatus::Drained);
            split.end_poll(PollStatus::Drained);
        }
    }
    flat.end_poll(PollStatus::Last);
    split.end_poll(PollStatus::Last);
    Twins { flat, split, queue }
}

type Run = (usize, Vec<Fate>, bool);

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let run = (run(), any::<bool>()).prop_map(|((flow, fates), ends)| (flow, fates, ends));
    vec(run, 0..if cfg!(miri) { 3 } else { 16 })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 600 }))]

    /// Parsing, hashing, checksum verdict and coalescing are equal. Only behind a packet that came
    /// out linear, because its pieces fitted, may a nonlinear one be refused.
    #[test]
    fn promise_6_nonlinear_merge_equals_linear(
        first in config(true),
        is_summed: bool,
        runs in runs(),
        splits in vec(split(), 1..12),
        is_copied: bool,
    ) {
        let Twins { mut flat, mut split, mut queue } = played(first, is_summed, &runs, &splits);
        prop_assert_eq!(&flat.fed, &split.fed);
        if split.counters.refused[MergeRefusal::InPieces.index()].get() == 0 {
            prop_assert_eq!(refusals(&flat), refusals(&split));
            let (a, b): (Vec<_>, Vec<_>) =
                (flat.out.iter().map(seen).collect(), split.out.iter().map(seen).collect());
            prop_assert_eq!(a, b);
        }
        if is_copied {
            let before: Vec<_> = split.out.iter().map(seen).collect();
            let pool = &mut split.pool;
            let copied = split.out.drain(..).map(|packet| packet.linearized(pool).unwrap());
            split.out = copied.collect();
            split.pool.flush();
            prop_assert!(split.out.iter().all(|packet| !packet.is_nonlinear()));
            prop_assert_eq!(queue.shared.away_blocks(), 0, "pieces go home as they are copied");
            prop_assert_eq!(before, split.out.iter().map(seen).collect::<Vec<_>>());
        }
        let (a, b) = (std::mem::take(&mut flat.out), std::mem::take(&mut split.out));
        let (a, b) = (taken_apart(a), taken_apart(b));
        if first.mode == CoalesceMode::Gro {
            prop_assert_eq!(by_hash(&a), by_hash(&b));
            prop_assert_eq!(by_hash(&b), by_hash(&split.fed));
        }
        std::mem::swap(&mut split.pool, &mut queue.pool);
        queue.check_all_is_home();
    }
}

/// The laws would prove little without merged nonlinear packets.
#[test]
fn generated_traffic_merges_in_pieces() {
    let mut runner = TestRunner::deterministic();
    let (mut merged, mut in_pieces, mut refused) = (0, 0, 0);
    for _ in 0..100 {
        let runs = runs().new_tree(&mut runner).unwrap().current();
        let splits = vec(split(), 1..12).new_tree(&mut runner).unwrap().current();
        let twins = played(CoalesceConfig::default(), false, &runs, &splits);
        let of_several = twins.split.out.iter().filter(|packet| packet.is_merged());
        of_several.for_each(|packet| {
            merged += 1;
            in_pieces += u32::from(packet.is_nonlinear());
        });
        refused +=
            u32::from(twins.split.counters.refused[MergeRefusal::InPieces.index()].get() > 0);
    }
    // A tunnel's headers are pulled in, and short payloads with them.
    assert!(in_pieces > 200 && 3 * in_pieces > merged, "{in_pieces} of {merged} merged packets");
    assert!(refused < 70, "in {refused} of 100 runs the twins differ");
}

#[test]
fn linear_and_nonlinear_do_not_merge() {
    let mut queue = Queue::new();
    let mut rig = Rig::gro();
    let split = Split { head_len: 60, piece_lens: vec![200] };
    let [first, second, third] = [0, 1, 2].map(|number| tcp().nth(number).wire());
    let packets = vec![
        received(&first, rig.arrival(0), &mut rig.pool),
        queue.received(&second, rig.arrival(1), &split),
        received(&third, rig.arrival(2), &mut rig.pool),
    ];
    rig.take(packets);
    rig.end_poll(PollStatus::Last);
    assert_eq!(rig.verdicts().0, [(MergeRefusal::InPieces, 1)]);
    let counts: Vec<_> = rig.out.iter().map(Packet::segment_count).collect();
    assert_eq!(counts, [1, 2], "what is in one frame is added to what is in pieces");
    let out = std::mem::take(&mut rig.out);
    assert_eq!(taken_apart(out), rig.fed);
    queue.check_all_is_home();
}

#[test]
fn single_buffer_payload_is_one_stretch() {
    let mut queue = Queue::new();
    let mut rig = Rig::gro();
    let split = Split { head_len: 116, piece_lens: vec![2000] };
    let wires = tcp().sized(1448).run(20);
    let packets = (0..).zip(&wires);
    let packets =
        packets.map(|(number, wire)| queue.received(wire, rig.arrival(number), &split)).collect();
    rig.take(packets);
    rig.end_poll(PollStatus::Last);
    let merged = &rig.out[0];
    assert_eq!((merged.segment_count(), merged.is_nonlinear()), (20, true));
    assert_eq!(merged.fragments().count(), 21, "the first one's headers are in its frame");
    let bytes: Vec<_> = merged.fragments().flatten().copied().collect();
    assert_eq!(bytes.len(), merged.wire_len as usize);
    let out = std::mem::take(&mut rig.out);
    assert_eq!(taken_apart(out), rig.fed);
    queue.check_all_is_home();
}

/// As much of a packet is in its frame as a device copies there.
#[test]
fn lro_t8_tunnels_in_pieces_are_cut() {
    for (name, tunnel) in everything() {
        let merged = merged_by_kernel(&tunnel, 3);
        for head_len in [64, 128] {
            let mut queue = Queue::new();
            let split = Split { head_len, piece_lens: vec![1000] };
            let mut packet = queue.received(&merged, Arrival(1), &split);
            merged.vnet.unwrap().carry_into(&mut packet).unwrap();
            parse_packet(&mut packet, Verify::Checksums, &mut queue.pool).unwrap();
            assert!(packet.is_gso() && packet.is_merged_tunnel(), "{name} {head_len}");
            let mut segments = Vec::new();
            cut(packet, &mut queue.pool, &mut segments).unwrap();
            let ours: Vec<_> = segments.iter().map(|it| it.frame.data().to_vec()).collect();
            let sent: Vec<_> = tunnel.run(3).into_iter().map(|wire| wire.bytes).collect();
            assert_eq!(ours, sent, "{name} {head_len}");
            segments.into_iter().for_each(|segment| queue.pool.put(segment.frame));
            queue.check_all_is_home();
        }
    }
}

/// Packet after its `virtio_net_hdr` was applied, parsed, described and cut.
#[derive(PartialEq, Eq, Debug)]
struct Carried {
    verdict: Result<(), InvalidVnetHeader>,
    /// As received if the header was refused, else as parsed.
    packet: Seen,
    described: VirtioNetHdr,
    cut: Vec<Seen>,
}

fn carried(mut packet: Packet, vnet: VirtioNetHdr, pool: &mut Pool) -> Carried {
    let verdict = vnet.carry_into(&mut packet);
    if verdict.is_err() {
        let packet = seen(&packet);
        return Carried { verdict, packet, described: VirtioNetHdr::default(), cut: vec![] };
    }
    parse_packet(&mut packet, Verify::Checksums, pool).unwrap();
    let parsed = seen(&packet);
    let described = describe(&mut packet);
    let mut segments = Vec::new();
    cut(packet, pool, &mut segments).unwrap();
    let cut = segments.iter().map(seen).collect();
    segments.into_iter().for_each(|segment| pool.put(segment.frame));
    Carried { verdict, packet: parsed, described, cut }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 3000 }))]

    /// Promise 5: the header of a nonlinear packet gets the same verdict as that of a linear one,
    /// unless a checksum field or headers are beyond the frame itself.
    #[test]
    fn promise_5_nonlinear_vnet_header_as_linear(
        shape in select(all_shapes()),
        len in 0usize..1200,
        gso_size in 0u16..400,
        edits in vec((any::<Index>(), any::<u8>()), 0..3),
        lies in vec((0..VIRTIO_NET_HDR_BYTES, any::<u8>()), 0..3),
        is_summed: bool,
        split in split(),
    ) {
        let mut wire = shape.sized(len).wire().partial(gso_size);
        let mut vnet = wire.vnet.take().unwrap().to_bytes();
        lies.into_iter().for_each(|(at, byte)| vnet[at] = byte);
        let vnet = VirtioNetHdr::from_bytes(vnet);
        for (at, byte) in edits {
            let at = at.index(wire.bytes.len());
            wire = wire.edit(at, &[byte]);
        }
        if is_summed {
            wire = wire.summed();
        }
        let (mut queue, mut pool) = (Queue::new(), pool(1200));
        let twin = carried(received(&wire, Arrival(1), &mut pool), vnet, &mut pool);
        let packet = queue.received(&wire, Arrival(1), &split);
        let ours = carried(packet, vnet, &mut queue.pool);
        let field_end = usize::from(vnet.csum_start) + usize::from(vnet.csum_offset) + 2;
        let held = HEAD_BYTES as usize;
        let is_far = field_end > held && ours.verdict == Err(InvalidVnetHeader::Checksum);
        // Bytes in the frame itself do not include all headers.
        let seen = |len: usize| {
            let bytes = &wire.bytes[..len.min(wire.bytes.len())];
            parse(bytes, wire.wire_len, wire.link, Verify::Nothing)
        };
        let is_long = seen(held) != seen(usize::MAX);
        if is_far || is_long && ours.verdict == Err(InvalidVnetHeader::Headers) {
            prop_assert_eq!(ours.packet.0.bytes, wire.bytes, "it is untouched");
        } else {
            prop_assert_eq!(ours, twin);
        }
        queue.check_all_is_home();
    }
}

#[test]
fn nonlinear_gso_cut_equals_linear() {
    for shape in [tcp(), udp()] {
        let mut wire = shape.sized(3001).wire().partial(333);
        let vnet = wire.vnet.take().unwrap();
        let mut pool = pool(64);
        let twin = carried(received(&wire, Arrival(1), &mut pool), vnet, &mut pool);
        assert_eq!(twin.cut.len(), 10);
        for split in [
            Split { head_len: 256, piece_lens: vec![1517] },
            Split { head_len: 60, piece_lens: vec![1, 332, 3, 999] },
            Split { head_len: 0, piece_lens: vec![101] },
        ] {
            let mut queue = Queue::new();
            let packet = queue.received(&wire, Arrival(1), &split);
            assert_eq!(carried(packet, vnet, &mut queue.pool), twin, "{split:?}");
            queue.check_all_is_home();
        }
    }
}

/// IPv6 packet with options longer than the part in the frame itself.
fn long_headers() -> Segment {
    tcp().sized(700).with(|it| {
        it.is_v6 = true;
        let options = Ipv6RawExtHeader::new_raw(ip_number::TCP, &[0; 406]).unwrap();
        it.extensions.hop_by_hop_options = Some(options);
    })
}

/// Packet as parsed by the intake, and the drops.
fn taken_in(packet: Packet, pool: &mut Pool) -> (Option<Seen>, Vec<DropReason>) {
    let mut intake = intake(Verify::Checksums, true);
    let mut burst = Burst { packets: vec![packet], ..Burst::default() };
    let mut out = None;
    let show = |packets: &[Packet]| out = packets.first().map(seen);
    let woken = intake.turn_with_tap(1, &mut burst, pool, show);
    assert!(woken.collect::<Vec<CpuId>>().len() <= 1);
    let dropped = intake.drain_dropped().map(|dropped| dropped.reason);
    (out, dropped.collect())
}

#[test]
fn promise_2_long_headers_linearize_or_drop() {
    let wire = long_headers().wire();
    let twin = taken_in(received(&wire, Arrival(1), &mut pool(4)), &mut pool(4));
    let mut queue = Queue::new();
    for head_len in [20, 100, 256] {
        let split = Split { head_len, piece_lens: vec![99] };
        let packet = queue.received(&wire, Arrival(1), &split);
        let ours = taken_in(packet, &mut queue.pool);
        assert_eq!(ours, twin);
        assert!(ours.1.is_empty() && ours.0.unwrap().1.payload_offset > 256);
        let mut none = heads(1);
        while none.allocate(1000).map(std::mem::forget).is_some() {}
        let packet = queue.received(&wire, Arrival(1), &split);
        let mut kept = queue.received(&wire, Arrival(1), &split);
        assert_eq!(taken_in(packet, &mut none), (None, vec![DropReason::NoBuffer]));
        assert_eq!(parse_packet(&mut kept, Verify::Nothing, &mut none), Err(NoMemory));
        assert_eq!(Frame::of(&kept).bytes, wire.bytes);
    }
    queue.check_all_is_home();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 400 }))]

    /// A partial checksum without a mark is completed, wherever the payload is.
    #[test]
    fn partial_checksum_completed_across_pieces(
        shape in select(all_shapes()),
        len in 0usize..600,
        padding in vec(any::<u8>(), 0..9),
        split in split(),
    ) {
        let wire = Wire { vnet: None, ..shape.sized(len).wire().partial(0) }.padded(&padding);
        let mut pool = pool(4);
        let twin = taken_in(received(&wire, Arrival(1), &mut pool), &mut pool);
        let mut queue = Queue::new();
        let packet = queue.received(&wire, Arrival(1), &split);
        prop_assert_eq!(taken_in(packet, &mut queue.pool), twin);
        queue.check_all_is_home();
    }
}
