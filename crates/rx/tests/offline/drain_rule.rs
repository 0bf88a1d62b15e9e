//! The drain rule in every interleaving of three CPUs: one polls, and two deliver the packets of a
//! flow whose desired CPU changes from one to the other (RFS-6). Runs the real spines over the real
//! rings under loom: `./ci.sh loom`.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_buf::{Position, Region};
use forebay_rx::arrive::Burst;
use forebay_rx::counters::{Counter, IntakeCounters};
use forebay_rx::delivery::Batch;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::intake::IntakeConfig;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Link, Verify};
use forebay_rx::steer::{MoveAfter, SpreadPolicy, SteerConfig};
use forebay_rx::{CpuId, Delivery, Handler, Intake, Packet, RxQueue};
use loom::cell::Cell;
use loom::sync::atomic::AtomicU32;
use loom::thread;

/// Polling CPU, which is not in the map and delivers nothing.
const POLLING: CpuId = CpuId(0);
const CPU_1: CpuId = CpuId(1);
const CPU_2: CpuId = CpuId(2);
const FLOW: FlowHash = FlowHash(0x1000_0005);
/// Hash of the same flow under another key, in another slot.
const FLOW_REHASHED: FlowHash = FlowHash(0xf000_0005);
/// Start of the ring counters, which wrap during the test.
const START: Position = Position(u32::MAX);
const RING_CAPACITY: u32 = 4;

/// Time at which a CPU advances its backlog's head past a packet.
#[derive(Clone, Copy)]
enum Release {
    /// After the application has handled the packet, as implemented.
    WhenHandled,
    /// After the thread of the CPU has read what the handler queued for it.
    WhenRead,
    /// On dequeue, as in the source text of RFS (ordering hazard H13).
    WhenTaken,
}

/// Last packet that the application has seen, shared by the CPUs without a lock of its own.
enum Seen {
    /// In plain memory, which two CPUs may access only if the path orders the accesses: loom
    /// detects accesses without such an order, even in runs in which they happen one after the
    /// other.
    InMemory(Cell<u32>),
    /// In a relaxed counter, which orders nothing and shows the order of handling.
    InCounter(AtomicU32),
}

impl Seen {
    fn in_memory() -> Self {
        Self::InMemory(Cell::new(0))
    }

    fn in_counter() -> Self {
        Self::InCounter(AtomicU32::new(0))
    }

    fn see(&self, packet: &Packet) {
        let Arrival(now) = packet.arrival;
        match self {
            Self::InMemory(last) => last.set(now),
            Self::InCounter(last) => {
                let last = last.swap(now, Ordering::Relaxed);
                assert_eq!(last + 1, now, "promise 1: packet {now} was handled behind {last}");
            }
        }
    }
}

/// Delivering CPU.
struct Deliverer {
    delivery: Delivery,
    inbox: Inbox,
    pool: Pool,
    seen: Arc<Seen>,
    release: Release,
}

/// Packets that a CPU has handled. Their frames are not returned: that path has loom models of its
/// own, in `forebay-buf`.
#[derive(Default)]
struct Inbox(Vec<Packet>);

impl Handler for Inbox {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.0.append(batch.packets);
    }
}

impl Deliverer {
    /// Does the work of [`Delivery::turn`] for one packet at most, with the release at the chosen
    /// time.
    fn turn(&mut self) {
        if self.delivery.take(1) == 0 {
            return;
        }
        let handled = self.inbox.0.len();
        self.delivery.handle(&mut self.pool, &mut self.inbox);
        let in_hand = &self.inbox.0[handled..];
        match self.release {
            Release::WhenHandled => {
                in_hand.iter().for_each(|packet| self.seen.see(packet));
                self.delivery.complete(&mut self.pool);
            }
            Release::WhenRead => {
                self.delivery.set_read_inline(true);
                self.delivery.complete(&mut self.pool);
                in_hand.iter().for_each(|packet| self.seen.see(packet));
                self.delivery.release();
            }
            Release::WhenTaken => {
                self.delivery.complete(&mut self.pool);
                in_hand.iter().for_each(|packet| self.seen.see(packet));
            }
        }
    }
}

/// Polling CPU.
struct Poller {
    intake: Intake,
    pool: Pool,
    arrived: u32,
    /// Hash of the flow.
    hash: FlowHash,
}

impl Poller {
    /// Makes `cpu` the desired CPU of the flow from the next packet on.
    fn set_desired(&mut self, cpu: CpuId) {
        self.intake.set_rps_cpus([cpu], 0);
    }

    /// Runs a turn in which `count` packets of the flow arrive; held ones may go on in any turn.
    fn arrive(&mut self, count: u32) {
        let packets = (0..count).map(|_| {
            self.arrived += 1;
            let frame = self.pool.allocate(0).unwrap();
            let mut packet = Packet::received(frame, Arrival(self.arrived), 0, Link::Ethernet);
            packet.hash = self.hash;
            packet
        });
        let mut burst = Burst { packets: packets.collect(), ..Burst::default() };
        self.intake.observe();
        assert!(self.intake.turn(0, &mut burst, &mut self.pool).count() <= 2);
        assert_eq!(self.intake.drain_dropped().count(), 0);
    }
}

/// Number of interleavings in which each event occurred: a model in which it never does proves
/// nothing.
#[derive(Debug, Default)]
struct Tally {
    moved_at_once: AtomicU64,
    moved_twice: AtomicU64,
    held: AtomicU64,
    stayed: AtomicU64,
    interleavings: AtomicU64,
}

impl Tally {
    fn add(&self, counters: &IntakeCounters) {
        let [moves, holds, stays] =
            [&counters.moves, &counters.holds, &counters.stays].map(Counter::get);
        for (tally, came_about) in [
            (&self.moved_at_once, moves > holds),
            (&self.moved_twice, moves > 1),
            (&self.held, holds > 0),
            (&self.stayed, stays > 0),
            (&self.interleavings, true),
        ] {
            tally.fetch_add(came_about.into(), Ordering::Relaxed);
        }
    }
}

/// Hasher that is not used, because packets come with their hash.
fn hasher() -> Arc<Hasher> {
    Arc::new(Hasher::keyed(&[7; 16], false))
}

fn wire(release: Release, seen: Seen) -> (Poller, [Deliverer; 2]) {
    let shares = [vec![ChunkClass { chunk_bytes: 512, chunks: 4 }], vec![], vec![]];
    let region = Region::allocate(region_bytes(&shares));
    let [pool, first, second] = <[Pool; 3]>::try_from(carve(region, &shares).unwrap()).unwrap();
    let mut intake = Intake::new(IntakeConfig {
        queue: RxQueue(0),
        cpus: 3,
        verify: Verify::Nothing,
        completes_checksums: false,
        hasher: hasher(),
        coalesce: None,
        steer: SteerConfig {
            polling_cpu: POLLING,
            rps_flow_cnt: 2,
            move_after: MoveAfter::default(),
            hold_max: 4,
            spread: SpreadPolicy::Always,
            batch_max: 1,
        },
        netdev_max_backlog: RING_CAPACITY - 1,
    });
    #[expect(clippy::arc_with_non_send_sync, reason = "loom's threads are all on one")]
    let seen = Arc::new(seen);
    let deliverers = [(CPU_1, first), (CPU_2, second)].map(|(cpu, pool)| {
        let lane = intake.connect(cpu, RING_CAPACITY, START, false);
        let (delivery, seen) = (Delivery::new(cpu, vec![lane], 1), Arc::clone(&seen));
        Deliverer { delivery, inbox: Inbox::default(), pool, seen, release }
    });
    (Poller { intake, pool, arrived: 0, hash: FLOW }, deliverers)
}

/// Runs every interleaving of `poll` with two CPUs of `turns` turns each, whether they find packets
/// or not; then handles the rest without concurrency. Only the number of turns bounds the search.
fn check(
    release: Release,
    seen: fn() -> Seen,
    turns: [usize; 2],
    poll: fn(&mut Poller),
) -> Arc<Tally> {
    let tally = Arc::new(Tally::default());
    let counted = Arc::clone(&tally);
    loom::model(move || {
        let (mut poller, deliverers) = wire(release, seen());
        let cpus = deliverers.into_iter().zip(turns).map(|(mut deliverer, turns)| {
            thread::spawn(move || {
                (0..turns).for_each(|_| deliverer.turn());
                deliverer
            })
        });
        let cpus: Vec<_> = cpus.collect();
        poll(&mut poller);
        let deliverers = cpus.into_iter().map(|cpu| cpu.join().unwrap());
        let mut deliverers: Vec<_> = deliverers.collect();
        for _ in 0..poller.arrived {
            poller.arrive(0);
            deliverers.iter_mut().for_each(Deliverer::turn);
        }
        let handled: usize = deliverers.iter().map(|deliverer| deliverer.inbox.0.len()).sum();
        assert_eq!(u32::try_from(handled), Ok(poller.arrived), "promise 2: all are handled");
        counted.add(poller.intake.counters());
    });
    tally
}

/// The flow leaves CPU 1, comes back, and leaves again, a packet each time.
fn there_and_back(poller: &mut Poller) {
    for cpu in [CPU_1, CPU_2, CPU_1, CPU_2] {
        poller.set_desired(cpu);
        poller.arrive(1);
    }
}

/// The flow leaves CPU 1 while that CPU has more packets queued than a batch takes.
fn from_a_queue(poller: &mut Poller) {
    poller.set_desired(CPU_1);
    poller.arrive(2);
    poller.set_desired(CPU_2);
    poller.arrive(1);
    poller.arrive(1);
}

/// The flow leaves CPU 1 under another hash, so that only a fence keeps its order.
fn through_a_fence(poller: &mut Poller) {
    poller.set_desired(CPU_1);
    poller.arrive(1);
    poller.set_desired(CPU_2);
    poller.intake.set_hasher(hasher(), 0);
    poller.hash = FLOW_REHASHED;
    poller.arrive(1);
    poller.arrive(1);
}

/// The flow leaves CPU 1, whose backlog has just grown into a larger ring.
fn from_a_ring_that_grew(poller: &mut Poller) {
    poller.set_desired(CPU_1);
    poller.arrive(1);
    poller.intake.set_netdev_max_backlog(RING_CAPACITY, 0);
    poller.set_desired(CPU_2);
    poller.arrive(1);
}

#[test]
fn rfs_6_flow_moving_both_ways_in_order() {
    for seen in [Seen::in_memory, Seen::in_counter] {
        let tally = check(Release::WhenHandled, seen, [2, 2], there_and_back);
        let Tally { moved_at_once, moved_twice, held, .. } = &*tally;
        came_about(&tally, &[moved_at_once, moved_twice, held]);
    }
}

#[test]
fn rfs_6_flow_leaving_a_queue_in_order() {
    for seen in [Seen::in_memory, Seen::in_counter] {
        let tally = check(Release::WhenHandled, seen, [3, 2], from_a_queue);
        let Tally { moved_at_once, held, stayed, .. } = &*tally;
        came_about(&tally, &[moved_at_once, held, stayed]);
    }
}

#[test]
fn rfs_6_rehashed_flow_in_order() {
    for seen in [Seen::in_memory, Seen::in_counter] {
        let tally = check(Release::WhenHandled, seen, [2, 2], through_a_fence);
        came_about(&tally, &[&tally.held]);
    }
}

#[test]
fn rfs_6_answers_of_inline_readers_in_order() {
    for seen in [Seen::in_memory, Seen::in_counter] {
        let tally = check(Release::WhenRead, seen, [2, 2], there_and_back);
        let Tally { moved_at_once, held, .. } = &*tally;
        came_about(&tally, &[moved_at_once, held]);
    }
}

#[test]
fn rfs_6_flow_leaving_grown_ring_in_order() {
    for seen in [Seen::in_memory, Seen::in_counter] {
        let tally = check(Release::WhenHandled, seen, [1, 1], from_a_ring_that_grew);
        let Tally { moved_at_once, held, .. } = &*tally;
        came_about(&tally, &[moved_at_once, held]);
    }
}

/// Checks that all these events occurred.
fn came_about(tally: &Tally, needed: &[&AtomicU64]) {
    assert!(needed.iter().all(|count| count.load(Ordering::Relaxed) > 0), "{tally:?}");
    eprintln!("{tally:?}");
}

#[test]
#[should_panic(expected = "Causality violation: Concurrent write accesses")]
fn h13_early_head_swaps_no_handlers() {
    check(Release::WhenTaken, Seen::in_memory, [1, 1], there_and_back);
}

#[test]
#[should_panic(expected = "promise 1: packet")]
fn h13_early_head_breaks_order() {
    check(Release::WhenTaken, Seen::in_counter, [1, 1], there_and_back);
}
