//! Coalescing in its place: on arrival and on delivery, with a few virtual CPUs around one queue,
//! while masks and settings change.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_buf::{Pool, Position};
use forebay_rx::arrive::{Burst, PollStatus};
use forebay_rx::coalesce::{CoalesceConfig, FlushReason};
use forebay_rx::delivery::Batch;
use forebay_rx::hash::Hasher;
use forebay_rx::intake::IntakeConfig;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Verify, View, parse};
use forebay_rx::steer::{MoveAfter, SpreadPolicy, SteerConfig};
use forebay_rx::{CpuId, Delivery, Handler, Intake, Packet, RxQueue};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::coalescing::frames::{FIN, Segment, Wire, tcp};
use crate::coalescing::laws::{Fate, Traffic, config, run};
use crate::coalescing::rig::{Frame, pool, received, taken_apart};

const CPUS: u16 = 4;
const RING_CAPACITY: u32 = 2048;
const BATCH_MAX: u32 = 8;

/// Initial key.
const KEY: [u8; 16] = [7; 16];

/// Hash of a frame under the initial key, whatever the current key is.
fn flow_of(frame: &Frame) -> u32 {
    let headers = parse(&frame.bytes, frame.wire_len, frame.link, Verify::Nothing);
    Hasher::keyed(&KEY, false).hash(&View::new(&frame.bytes, &headers)).0
}

/// Packets handled by the CPUs, resegmented, by flow.
#[derive(Default)]
struct Journal {
    flows: BTreeMap<u32, Vec<Frame>>,
    packets: u64,
}

impl Handler for Journal {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.packets += batch.packets.len() as u64;
        for packet in &*batch.packets {
            assert!(batch.note_of(packet.arrival).is_some(), "it was on the backlog");
        }
        for frame in taken_apart(batch.packets.drain(..).collect()) {
            self.flows.entry(flow_of(&frame)).or_default().push(frame);
        }
    }
}

struct World {
    intake: Intake,
    deliveries: Vec<Delivery>,
    pool: Pool,
    journal: Journal,
    now_ns: u64,
    /// Bytes of all frames, in the order of arrival.
    sent: Vec<Vec<u8>>,
    /// Numbers of the frames that left coalescing before steering.
    shown: Vec<u32>,
}

impl World {
    fn new(coalesce: Option<CoalesceConfig>, move_after_packets: u32, backlog: u32) -> Self {
        let mut intake = Intake::new(IntakeConfig {
            queue: RxQueue(0),
            cpus: CPUS.into(),
            verify: Verify::Checksums,
            completes_checksums: false,
            hasher: Arc::new(Hasher::keyed(&KEY, false)),
            coalesce,
            steer: SteerConfig {
                polling_cpu: CpuId(0),
                rps_flow_cnt: 4,
                move_after: MoveAfter { packets: move_after_packets, time_ns: u64::MAX },
                hold_max: 64,
                spread: SpreadPolicy::Always,
                batch_max: BATCH_MAX,
            },
            netdev_max_backlog: backlog,
        });
        let deliveries = (0..CPUS).map(CpuId).map(|cpu| {
            let lane = intake.connect(cpu, RING_CAPACITY, Position(0), true);
            Delivery::new(cpu, vec![lane], BATCH_MAX as usize)
        });
        let deliveries = deliveries.collect();
        let journal = Journal::default();
        let mut world = Self {
            intake,
            deliveries,
            pool: pool(1100),
            journal,
            now_ns: 1,
            sent: vec![],
            shown: vec![],
        };
        world.set_mask(0b1111);
        world
    }

    fn arrive(&mut self, wires: &[Wire], poll_status: PollStatus) {
        let packets = wires.iter().map(|wire| {
            let arrival = Arrival::of_frame(self.sent.len() as u64);
            self.sent.push(wire.bytes.clone());
            received(wire, arrival, &mut self.pool)
        });
        let mut burst = Burst { packets: packets.collect(), poll_status, ..Burst::default() };
        self.now_ns += 1;
        self.intake.observe();
        let now_ns = self.now_ns;
        let show = |packets: &[Packet]| {
            let segments = packets.iter().flat_map(Packet::segments);
            self.shown.extend(segments.map(|segment| segment.arrival.0));
        };
        self.intake.turn_with_tap(now_ns, &mut burst, &mut self.pool, show).for_each(drop);
        assert!(burst.is_empty(), "a burst is taken whole");
        for dropped in self.intake.drain_dropped() {
            self.pool.put(dropped.packet.unwrap().frame);
        }
    }

    fn deliver(&mut self, cpu: u16, budget: usize) {
        let delivery = &mut self.deliveries[usize::from(cpu)];
        delivery.turn(budget, &mut self.pool, &mut self.journal);
    }

    fn set_mask(&mut self, mask: u8) {
        self.intake.set_rps_cpus((0..CPUS).filter(|cpu| mask >> cpu & 1 == 1).map(CpuId), 0);
    }

    fn rekey(&mut self, key: u8) {
        self.intake.set_hasher(Arc::new(Hasher::keyed(&[key; 16], false)), 0);
    }

    fn coalesce_on_delivery(&mut self, config: Option<CoalesceConfig>) {
        self.deliveries.iter_mut().for_each(|delivery| delivery.set_coalesce(config));
    }

    /// Number of delivered frames.
    fn delivered(&self) -> u64 {
        self.deliveries.iter().map(|delivery| delivery.counters().frames.get()).sum()
    }

    fn settle(&mut self) {
        for _ in 0..100 {
            self.arrive(&[], PollStatus::Last);
            (0..CPUS).for_each(|cpu| self.deliver(cpu, usize::MAX));
        }
        assert_eq!((self.intake.held(), self.intake.coalescing()), (0, 0));
        assert_eq!(self.intake.queued(), 0);
    }

    fn check(&mut self) {
        let counters = self.intake.counters();
        let (sent, dropped) = (self.sent.len() as u64, counters.dropped());
        assert_eq!(counters.frames.get(), sent);
        assert_eq!(self.delivered() + dropped, sent, "promise 2: conservation");
        self.shown.sort_unstable();
        assert!(self.shown.iter().copied().eq((0..).take(self.sent.len())), "each is shown once");
        let handed: usize = self.journal.flows.values().map(Vec::len).sum();
        assert_eq!(handed as u64, self.delivered(), "each in its packet, counted once");
        for frames in self.journal.flows.values() {
            let in_order = frames.is_sorted_by(|a, b| b.arrival.is_after(a.arrival));
            assert!(in_order, "promise 1: order of {frames:?}");
            for frame in frames {
                assert_eq!(frame.bytes, self.sent[frame.arrival.0 as usize], "promise 6");
            }
        }
        assert_eq!(self.pool.in_use(), 0, "promise 4: all frames are home");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Arrive(Vec<(usize, Vec<Fate>)>, PollStatus),
    Deliver(u16, usize),
    Mask(u8),
    Rekey(u8),
    OnArrival(Option<CoalesceConfig>),
    OnDelivery(Option<CoalesceConfig>),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let poll_status = prop_oneof![Just(PollStatus::MorePending), Just(PollStatus::Drained)];
    prop_oneof![
        8 => (vec(run(), 0..4), poll_status).prop_map(|(runs, poll_status)| Step::Arrive(runs, poll_status)),
        6 => (0..CPUS, 1usize..40).prop_map(|(cpu, budget)| Step::Deliver(cpu, budget)),
        2 => (0u8..16).prop_map(Step::Mask),
        1 => any::<u8>().prop_map(Step::Rekey),
        1 => option::of(config(false)).prop_map(Step::OnArrival),
        1 => option::of(config(false)).prop_map(Step::OnDelivery),
        1 => (0u64..2_000_000).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 700 }))]

    #[test]
    fn promises_1_2_and_6_hold_while_masks_keys_coalescing_change(
        first in option::of(config(false)),
        (move_after_packets, backlog) in (0u32..8, prop_oneof![2 => Just(2000u32), 1 => 1u32..60]),
        steps in vec(step(), 0..if cfg!(miri) { 8 } else { 60 }),
    ) {
        let mut world = World::new(first, move_after_packets, backlog);
        let mut traffic = Traffic::new();
        for step in &steps {
            match step {
                Step::Arrive(runs, poll_status) => {
                    let all = runs.iter().flat_map(|(flow, fates)| fates.iter().map(|fate| (*flow, fate)));
                    let wires: Vec<_> = all.map(|(flow, fate)| traffic.next(flow, fate)).collect();
                    world.arrive(&wires, *poll_status);
                }
                Step::Deliver(cpu, budget) => world.deliver(*cpu, *budget),
                Step::Mask(mask) => world.set_mask(*mask),
                Step::Rekey(key) => world.rekey(*key),
                Step::OnArrival(config) => world.intake.set_coalesce(*config, 0),
                Step::OnDelivery(config) => world.coalesce_on_delivery(*config),
                Step::Pass(ns) => world.now_ns += ns,
            }
        }
        world.settle();
        world.check();
    }
}

fn on_cpu(mask: u8) -> World {
    let mut world = World::new(Some(CoalesceConfig::default()), 0, 1000);
    world.set_mask(mask);
    world
}

fn flow(port: u16) -> Segment {
    tcp().with(|segment| segment.port = port)
}

fn held_moves(world: &World) -> u64 {
    world.intake.counters().coalesce.flushes[FlushReason::HeldMove.index()].get()
}

/// Segments of a flow with this hash.
fn hashed(port: u16, hash: u32) -> impl Fn(u32) -> Wire {
    move |number| flow(port).nth(number).wire().hashed(hash)
}

/// Two flows of one slot, and one of another.
#[test]
fn waiting_slot_alone_holds_no_segments() {
    let mut world = on_cpu(0b0010);
    let (moving, neighbour) = (hashed(1, 0x1000_0001), hashed(2, 0x1000_0002));
    let other = hashed(3, 0xf000_0003);
    world.arrive(&[moving(0), moving(1)], PollStatus::Drained);
    world.arrive(&[neighbour(0), other(0)], PollStatus::MorePending);
    assert_eq!((world.intake.coalescing(), held_moves(&world)), (2, 0), "no flow waits yet");
    world.set_mask(0b0100);
    // The next segments of the first flow wait for CPU 1, which is stalled.
    world.arrive(&[moving(2)], PollStatus::Drained);
    assert_eq!((world.intake.coalescing(), held_moves(&world)), (0, 0));
    for number in 1..5 {
        let segments = [moving(number + 2), neighbour(number), other(number)];
        world.arrive(&segments, PollStatus::MorePending);
        let held = 2 + 2 * number as usize;
        assert_eq!(
            (world.intake.coalescing(), world.intake.held()),
            (1, held),
            "the other goes on"
        );
        assert_eq!(held_moves(&world), 2 * u64::from(number));
    }
    world.settle();
    world.check();
    // Four segments at first, of which two were merged, eight of the slot, and the other flow's four in one.
    assert_eq!(world.journal.packets, 4 + 8 + 1);
}

#[test]
fn fence_holds_no_segments() {
    let mut world = on_cpu(0b0010);
    world.arrive(&flow(1).run(2), PollStatus::Drained);
    world.rekey(8);
    world.arrive(&[flow(2).wire()], PollStatus::MorePending);
    assert_eq!((world.intake.coalescing(), held_moves(&world)), (1, 0), "the fence is raised");
    world.arrive(&flow(3).run(2), PollStatus::MorePending);
    assert_eq!((world.intake.coalescing(), held_moves(&world)), (0, 2));
    world.settle();
    world.check();
}

#[test]
fn merged_packet_handed_once_segments_counted() {
    for on_arrival in [true, false] {
        let config = Some(CoalesceConfig::default());
        let mut world = World::new(config.filter(|_| on_arrival), 0, 1000);
        if !on_arrival {
            world.coalesce_on_delivery(config);
        }
        world.set_mask(0b0010);
        world.arrive(&flow(1).run(6), PollStatus::Drained);
        assert_eq!(world.intake.queued(), if on_arrival { 1 } else { 6 });
        assert_eq!(world.intake.counters().per_cpu[1].enqueued(), 6);
        world.settle();
        assert_eq!((world.journal.packets, world.delivered()), (1, 6), "on arrival: {on_arrival}");
        world.check();
    }
}

#[test]
fn promise_2_dropped_merged_packet_counts_frames() {
    let mut world = World::new(Some(CoalesceConfig::default()), 0, 1);
    world.set_mask(0b0010);
    for port in 1..6 {
        world.arrive(&flow(port).run(3), PollStatus::Drained);
    }
    let dropped = world.intake.counters().dropped();
    assert!(dropped > 0 && dropped.is_multiple_of(3), "{dropped} dropped");
    world.settle();
    world.check();
}

#[test]
fn promise_1_switched_off_merge_releases_in_order() {
    for next in [None, Some(CoalesceConfig { descriptors: 1, ..CoalesceConfig::default() })] {
        let mut world = on_cpu(0b0010);
        world.arrive(&flow(1).run(2), PollStatus::MorePending);
        world.intake.set_coalesce(next, 0);
        assert_eq!(world.intake.coalescing(), 1, "on its way, not lost");
        assert_eq!(world.intake.next_timeout_ns(), Some(0), "an empty turn takes it further");
        world.arrive(&[flow(1).nth(2).wire()], PollStatus::Drained);
        assert_eq!((world.intake.coalescing(), world.intake.queued()), (0, 2));
        world.settle();
        world.check();
    }
}

#[test]
fn promise_1_rekeying_releases_in_order() {
    let mut world = on_cpu(0b0010);
    world.arrive(&flow(1).run(2), PollStatus::MorePending);
    world.rekey(8);
    world.arrive(&[flow(1).nth(2).wire()], PollStatus::Drained);
    assert_eq!((world.intake.coalescing(), world.intake.queued()), (0, 1));
    assert_eq!(world.intake.held(), 1, "nobody knows what it follows");
    world.settle();
    world.check();
}

#[test]
fn promise_1_keys_do_not_coalesce_together() {
    for last in [FIN, 0] {
        let mut world = World::new(None, 0, 1000);
        world.coalesce_on_delivery(Some(CoalesceConfig::default()));
        world.set_mask(0b0010);
        let segments = flow(1);
        world.arrive(&[segments.wire()], PollStatus::Drained);
        world.set_mask(0b0100);
        world.arrive(&[segments.nth(1).wire()], PollStatus::Drained);
        world.rekey(8);
        world.arrive(&[segments.nth(2).wire()], PollStatus::Drained);
        world.rekey(9);
        world.arrive(&[segments.nth(3).with(|it| it.flags |= last).wire()], PollStatus::Drained);
        world.rekey(10);
        world.arrive(&[segments.nth(4).wire()], PollStatus::Drained);
        assert_eq!(world.intake.held(), 4, "two keys' in the second line, and one behind it");
        world.settle();
        world.check();
        assert_eq!(world.delivered(), 5);
    }
}

#[test]
fn promise_6_merged_packets_are_not_remerged() {
    let mut world = on_cpu(0b0010);
    let first = flow(1);
    // Three of these are together as long as the first one with its padding, and continue where a
    // larger segment would end.
    let tiny = first.nth(1).sized(2);
    let wires: Vec<_> = tiny.run(4).into_iter().map(|wire| wire.padded(&[0; 4])).collect();
    world.arrive(&[first.wire()], PollStatus::Drained);
    world.arrive(&wires[..3], PollStatus::Drained);
    world.intake.set_coalesce(None, 0);
    world.coalesce_on_delivery(Some(CoalesceConfig::default()));
    world.arrive(&wires[3..], PollStatus::Drained);
    world.settle();
    assert_eq!((world.journal.packets, world.delivered()), (3, 5));
    world.check();
}
