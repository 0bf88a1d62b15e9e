//! Virtual CPUs around one rx queue: the real intake and deliveries, stepped by hand.

use std::sync::Arc;

use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_buf::{Position, Region};
use forebay_rx::arrive::{Burst, RefusedFrame};
use forebay_rx::backlog::{Backlogs, Note};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::intake::IntakeConfig;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Link, Verify};
use forebay_rx::steer::{
    BalanceConfig, BalancePolicy, CpuLoad, MoveAfter, SockFlowTable, SpreadPolicy, SteerConfig,
};
use forebay_rx::{CpuId, Delivery, DropReason, Intake, Packet, RxQueue, SteerReason};

use crate::steering::changes::Epoch;
use crate::steering::journal::{Journal, Lost};

pub(crate) const CPUS: u16 = 8;
/// CPU that polls the queue initially.
pub(crate) const POLLING: CpuId = CpuId(0);
/// Key of the hasher.
pub(crate) const KEY: [u8; 16] = [7; 16];
/// Balance that acts at once.
const BALANCE: BalanceConfig = BalanceConfig {
    policy: BalancePolicy::Load,
    target_percent: 101,
    moves_per_second: 1_000_000_000,
    window_us: 0,
};
const RING_CAPACITY: u32 = 256;
const POOL_FRAMES: u32 = 2048;

/// Flow. Its packets carry its id, so that two flows may share a hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flow {
    pub(crate) id: u16,
    pub(crate) hash: u32,
}

/// CPUs of a mask, lowest bit first.
pub(crate) fn cpus_of(mask: u8) -> impl Iterator<Item = CpuId> {
    (0..8).filter(move |bit| mask >> bit & 1 == 1).map(CpuId)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) rps_cpus: u8,
    pub(crate) rps_flow_cnt: u32,
    pub(crate) move_after: MoveAfter,
    pub(crate) hold_max: u32,
    pub(crate) spread: SpreadPolicy,
    /// True if hash ranges are assigned by load in every turn; CPU 0 is always the busiest.
    pub(crate) balances: bool,
    pub(crate) batch_max: u32,
    pub(crate) netdev_max_backlog: u32,
    /// First position and arrival number.
    pub(crate) start: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rps_cpus: 0b1111,
            rps_flow_cnt: 4,
            move_after: MoveAfter { packets: 4, time_ns: u64::MAX },
            hold_max: 64,
            spread: SpreadPolicy::Always,
            balances: false,
            batch_max: 4,
            netdev_max_backlog: 100,
            start: u32::MAX - 5,
        }
    }
}

pub(crate) struct World {
    pub(crate) intake: Intake,
    pub(crate) deliveries: Vec<Delivery>,
    /// Table in which the applications record their CPUs.
    pub(crate) sock_flows: Arc<SockFlowTable>,
    /// Epochs, by number.
    pub(crate) epochs: Vec<Epoch>,
    /// Epoch in which each packet arrived.
    arrived: Vec<u32>,
    /// Number of changes of the device's key.
    pub(crate) key: u32,
    pub(crate) pool: Pool,
    pub(crate) journal: Journal,
    pub(crate) drops: Vec<(Arrival, DropReason)>,
    /// Flows of the drops that were packets.
    pub(crate) dropped_flows: Vec<u16>,
    pub(crate) now_ns: u64,
    pub(crate) busy_ns: u64,
    pub(crate) settings: Settings,
    /// Number of packets in each CPU's current batch.
    in_hand: [usize; CPUS as usize],
    frames: u64,
}

impl World {
    pub(crate) fn new(settings: Settings) -> Self {
        let mut intake = Intake::new(IntakeConfig {
            queue: RxQueue(0),
            cpus: CPUS.into(),
            verify: Verify::Checksums,
            completes_checksums: false,
            hasher: Arc::new(Hasher::keyed(&KEY, false)),
            coalesce: None,
            steer: SteerConfig {
                polling_cpu: POLLING,
                rps_flow_cnt: settings.rps_flow_cnt,
                move_after: settings.move_after,
                hold_max: settings.hold_max,
                spread: settings.spread,
                batch_max: settings.batch_max,
            },
            netdev_max_backlog: settings.netdev_max_backlog,
        });
        let start = Position(settings.start);
        let deliveries = (0..CPUS).map(CpuId).map(|cpu| {
            let lane = intake.connect(cpu, RING_CAPACITY, start, true);
            Delivery::new(cpu, vec![lane], settings.batch_max as usize)
        });
        let deliveries = deliveries.collect();
        let sock_flows = Arc::new(SockFlowTable::new(1 << 16, CPUS.into()));
        intake.set_rps_cpus(cpus_of(settings.rps_cpus), 0);
        intake.set_sock_flows(Some(Arc::clone(&sock_flows)), 0);
        if settings.balances {
            intake.set_balance(BALANCE, 0);
        }
        Self {
            intake,
            deliveries,
            sock_flows,
            epochs: vec![Epoch::first(&settings)],
            arrived: Vec::new(),
            key: 0,
            pool: pool(),
            journal: Journal::new(start),
            drops: Vec::new(),
            dropped_flows: Vec::new(),
            now_ns: 1,
            busy_ns: 0,
            settings,
            in_hand: [0; CPUS as usize],
            frames: 0,
        }
    }

    /// Hash that the device computes for a flow, which depends on the key.
    pub(crate) fn hash_of(&self, flow: Flow) -> FlowHash {
        FlowHash(flow.hash.rotate_left(2 * self.key))
    }

    /// Runs a turn with a burst of one packet for each of these flows, with the device's hash.
    pub(crate) fn arrive(&mut self, flows: &[Flow]) -> Vec<CpuId> {
        let packets = flows.iter().map(|&flow| self.packet_of(flow)).collect();
        self.turn(Burst { packets, ..Burst::default() })
    }

    /// Creates a packet of a flow, with the device's hash, not yet in a burst.
    pub(crate) fn packet_of(&mut self, flow: Flow) -> Packet {
        let packet = self.packet(&flow.id.to_be_bytes());
        Packet { hash: self.hash_of(flow), ..packet }
    }

    /// Creates a packet of these bytes, not yet in a burst.
    pub(crate) fn packet(&mut self, bytes: &[u8]) -> Packet {
        let len_bytes = u32::try_from(bytes.len()).unwrap();
        let mut frame = self.pool.allocate(len_bytes).unwrap();
        frame.copy_from(bytes);
        let arrival = self.next_arrival();
        Packet::received(frame, arrival, len_bytes, Link::Ethernet)
    }

    pub(crate) fn refused(&mut self, reason: DropReason) -> RefusedFrame {
        RefusedFrame { arrival: self.next_arrival(), wire_len: 60, reason }
    }

    pub(crate) fn turn(&mut self, mut burst: Burst) -> Vec<CpuId> {
        self.now_ns += 1;
        self.intake.observe();
        self.follow_load();
        let woken = self.intake.turn(self.now_ns, &mut burst, &mut self.pool).collect();
        assert!(burst.is_empty(), "a burst is taken whole");
        for dropped in self.intake.drain_dropped() {
            self.drops.push((dropped.arrival, dropped.reason));
            if let Some(packet) = dropped.packet {
                let id = packet.frame.data().first_chunk();
                self.dropped_flows.extend(id.copied().map(u16::from_be_bytes));
                self.pool.put(packet.frame);
            }
        }
        woken
    }

    /// Has the path follow the load: what has been delivered, the more of everything on the lower CPUs, and the
    /// polling CPU's besides.
    fn follow_load(&mut self) {
        let loads = self.deliveries.iter().zip([9, 7, 5, 3, 2, 1, 1, 1]);
        let loads = loads.map(|(delivery, factor)| {
            let packets = delivery.counters().taken.get();
            let ns = packets * factor;
            CpuLoad { busy_ns: ns, delivering_ns: ns, packets, ..CpuLoad::default() }
        });
        let mut loads: Vec<_> = loads.collect();
        loads[POLLING.index()].busy_ns += self.busy_ns;
        loads[POLLING.index()].frames = self.intake.counters().frames.get();
        if self.intake.is_load_due(self.now_ns) {
            self.intake.follow_load(self.now_ns, &loads);
        }
    }

    /// Runs a turn without arrivals.
    pub(crate) fn idle_turn(&mut self) {
        self.arrive(&[]);
    }

    /// Makes `cpu` take a batch, unless it has one.
    pub(crate) fn take(&mut self, cpu: u16, max: usize) {
        let index = usize::from(cpu);
        if self.in_hand[index] == 0 {
            self.in_hand[index] = self.deliveries[index].take(max);
        }
    }

    /// Makes `cpu` handle and complete its batch, if it has one.
    pub(crate) fn finish(&mut self, cpu: u16) {
        let index = usize::from(cpu);
        if std::mem::take(&mut self.in_hand[index]) > 0 {
            self.now_ns += 1;
            self.journal.now_ns = self.now_ns;
            self.deliveries[index].handle(&mut self.pool, &mut self.journal);
            self.deliveries[index].complete(&mut self.pool);
        }
    }

    /// Makes the thread of `cpu` read what it delivers: it declares the packets processed itself.
    pub(crate) fn read_inline(&mut self, cpu: u16) {
        self.deliveries[usize::from(cpu)].set_read_inline(true);
    }

    /// Makes `cpu` declare all that it has delivered processed.
    pub(crate) fn release(&mut self, cpu: u16) {
        self.deliveries[usize::from(cpu)].release();
    }

    /// Makes `cpu` deliver up to `budget` packets.
    pub(crate) fn deliver(&mut self, cpu: u16, budget: usize) -> usize {
        self.finish(cpu);
        self.now_ns += 1;
        self.journal.now_ns = self.now_ns;
        let delivery = &mut self.deliveries[usize::from(cpu)];
        delivery.turn(budget, &mut self.pool, &mut self.journal)
    }

    /// Kills the thread of `cpu`, whose batch is lost; another thread takes its place. Returns the
    /// number of lost packets.
    pub(crate) fn lose(&mut self, cpu: u16) -> usize {
        self.now_ns += 1;
        let index = usize::from(cpu);
        self.in_hand[index] = 0;
        let (_, lost) = self.deliveries[index].abandon_batch().unwrap();
        let count = lost.len();
        for dropped in lost {
            self.drops.push((dropped.arrival, dropped.reason));
            let (cpu, packet) = (CpuId(cpu), dropped.packet.unwrap());
            let (arrival, hash, lost_ns) = (packet.arrival, packet.hash, self.now_ns);
            self.journal.lost.push(Lost { cpu, arrival, hash, lost_ns });
            self.pool.put(packet.frame);
        }
        count
    }

    /// Runs turns and deliveries until nothing is under way. A round moves as many held packets as
    /// there is room for, at least one. A fence takes two more rounds: one for the packets in front
    /// of its line, and one for the last packet of the line.
    pub(crate) fn settle(&mut self) {
        for _ in 0..self.settings.hold_max + 4 {
            self.idle_turn();
            (0..CPUS).for_each(|cpu| {
                self.deliver(cpu, usize::MAX);
            });
        }
        assert_eq!((self.intake.held(), self.intake.queued()), (0, 0), "all has been delivered");
        assert_eq!(self.pool.in_use(), 0, "promise 4: all frames are home");
    }

    /// Number of packets on the backlog of `cpu` or in its batch. Computed from counters, because a
    /// query of the intake would refresh its view of the CPUs' progress.
    pub(crate) fn queued_on(&self, cpu: u16) -> u64 {
        let enqueued = self.intake.counters().per_cpu[usize::from(cpu)].enqueued();
        let counters = self.deliveries[usize::from(cpu)].counters();
        enqueued - counters.frames.get() - counters.lost.get()
    }

    /// Checks the laws that hold at any time.
    pub(crate) fn check(&mut self) {
        assert_eq!(self.journal.order.breaks, [], "promise 1: order");
        let counters = self.intake.counters();
        assert_eq!(counters.frames.get(), self.frames);
        for reason in DropReason::ALL {
            let dropped = self.drops.iter().filter(|drop| drop.1 == reason).count();
            let lost = |delivery: &Delivery| delivery.counters().lost.get();
            let counted = match reason {
                DropReason::CpuLost => self.deliveries.iter().map(lost).sum(),
                _ => counters.drops[reason.index()].get(),
            };
            assert_eq!(counted, dropped as u64, "{reason:?}");
        }
        let delivered = self.journal.seen.len() as u64;
        let queued: u64 = (0..CPUS).map(|cpu| self.queued_on(cpu)).sum();
        let held = self.intake.held() as u64;
        let accounted = delivered + self.drops.len() as u64 + queued + held;
        assert_eq!(self.frames, accounted, "promise 2: conservation");
        assert_eq!(self.pool.in_use() as u64, queued + held, "promise 2: every frame is somewhere");
        assert!(held <= self.settings.hold_max.max(1).into(), "promise 3: {held} held");
    }

    pub(crate) fn last_arrival(&self) -> Arrival {
        Arrival::of_frame(u64::from(self.settings.start) + self.frames)
    }

    /// The epoch in which a packet arrived.
    pub(crate) fn arrived_in(&self, arrival: Arrival) -> Epoch {
        let frame = arrival.0.wrapping_sub(self.settings.start) - 1;
        self.epochs[self.arrived[frame as usize] as usize]
    }

    fn next_arrival(&mut self) -> Arrival {
        self.frames += 1;
        self.arrived.push(u32::try_from(self.epochs.len() - 1).unwrap());
        self.last_arrival()
    }
}

/// Puts a packet on a backlog that has room, without steering.
pub(crate) fn put(backlogs: &mut Backlogs, cpu: CpuId, packet: Packet) {
    assert!(offer(backlogs, cpu, packet).is_ok());
    assert!(backlogs.publish(0).eq([cpu]));
}

/// Offers a packet to a backlog, which may refuse it.
pub(crate) fn offer(
    backlogs: &mut Backlogs,
    cpu: CpuId,
    packet: Packet,
) -> Result<(), (Packet, DropReason)> {
    let (arrival, steer_reason) = (packet.arrival, SteerReason::Rps);
    let note = |position| Note {
        arrival,
        enqueued_ns: 0,
        epoch: 0,
        steer_reason,
        position,
        head_old: None,
        previous_flow: FlowHash::NONE,
    };
    backlogs.enqueue(cpu, packet, note).map(|_| ())
}

/// Pool with frames for all packets that can be under way.
fn pool() -> Pool {
    let shares = [vec![ChunkClass { chunk_bytes: 512, chunks: POOL_FRAMES }]];
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
}
