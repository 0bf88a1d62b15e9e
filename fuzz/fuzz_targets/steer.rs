//! Schedule of bursts, deliveries and live changes over one intake and four CPUs: masks,
//! applications that move, tables and keys that are replaced, CPUs that stop or lose the batch
//! being processed, coalescing before steering, at delivery, or not at all. Every flow stays in
//! order (promise 1), every frame is accounted for after each step (2), and all waiting packets
//! leave in a bounded number of turns (3).
#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Position, Region};
use forebay_device::synthetic::stamped_udp;
use forebay_engine::knobs::{Coalesce, CoalesceAt};
use forebay_rx::arrive::{Burst, PollStatus, RefusedFrame};
use forebay_rx::backlog::FlowLimit;
use forebay_rx::coalesce::CoalesceConfig;
use forebay_rx::delivery::Batch;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::intake::IntakeConfig;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Checksum, Headers, Link, Verify};
use forebay_rx::steer::{
    BalanceBoard, BalanceConfig, BalancePolicy, CpuLoad, MoveAfter, SockFlowTable, SpreadPolicy,
    SteerConfig,
};
use forebay_rx::{CpuId, Delivery, DropReason, Handler, Intake, Packet, RxQueue};
use libfuzzer_sys::fuzz_target;

const CPUS: usize = 4;
const POLLING: usize = 0;
const BURST_MAX: u8 = 65;
const PAYLOAD_BYTES: usize = 18;

/// Fewer chunks than packets that can wait at once, so that some frames are refused.
const CHUNKS: ChunkClass = ChunkClass { chunk_bytes: 512, chunks: 160 };

/// Balance that moves flows after few packets.
const BALANCE: BalanceConfig = BalanceConfig {
    policy: BalancePolicy::Load,
    target_percent: 103,
    moves_per_second: 1_000_000,
    window_us: 1_000,
};

#[derive(Arbitrary, Debug)]
struct Schedule {
    knobs: Knobs,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
struct Knobs {
    start: u32,
    capacity_log: u8,
    rps_flow_log: u8,
    batch_max: u8,
    hold_max: u8,
    move_after: u8,
    /// Bits of [`ALWAYS`], [`BALANCES`] and [`HAS_BOARD`].
    load: u8,
}

/// Bits: all CPUs of the mask get packets at any load; the load is balanced; with a board for
/// several queues.
const ALWAYS: u8 = 1;
const BALANCES: u8 = 2;
const HAS_BOARD: u8 = 4;

/// Work of a CPU for a packet, by its flow.
const PACKET_NS: [u64; 4] = [2_000, 500, 20_000, 1_000];

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Step {
    /// A turn of the intake, `wait_us` later, with packets of a few neighbouring flows.
    Receive {
        count: u8,
        flow: u8,
        flows: u8,
        wait_us: u16,
        busy: bool,
    },
    /// A CPU takes a batch from its backlog, unless it is processing one.
    Take {
        cpu: u8,
    },
    /// A CPU processes the batch that it has taken.
    Process {
        cpu: u8,
    },
    RpsCpus {
        mask: u8,
    },
    MaxBacklog {
        packets: u8,
    },
    FlowLimit {
        on: bool,
    },
    /// Segments are merged before steering, at delivery, or not at all.
    Coalesce {
        on: bool,
        deliver: bool,
        timeout_us: u8,
        descriptors: u8,
    },
    /// A flow's application runs on a CPU, and has received something.
    Application {
        flow: u8,
        cpu: u8,
    },
    /// Applications record in a new table from now on; steering uses that table or ignores it.
    SockFlows {
        entries_log: u8,
        followed: bool,
    },
    FlowCnt {
        rps_flow_cnt: u8,
    },
    /// The device changes its hash key.
    Rekey,
    Running {
        mask: u8,
    },
    Polling {
        cpu: u8,
    },
    /// A CPU's thread is lost, with the batch that it has taken.
    Lose {
        cpu: u8,
    },
}

fuzz_target!(|schedule: Schedule| {
    let mut rig = Rig::new(&schedule.knobs);
    for step in schedule.steps {
        rig.step(step);
        rig.account();
    }
    rig.drain(rig.hold_max);
});

struct Rig {
    intake: Intake,
    cpus: Vec<Cpu>,
    application: Application,
    burst: Burst,
    now_ns: u64,
    /// Busy time of the polling CPU.
    busy_ns: u64,
    sock_flows: Arc<SockFlowTable>,
    /// Number of changes of the device's hash key.
    keys: u32,
    /// Number of frames that left coalescing before steering, or would have if it is off.
    shown: u64,
    /// Number of the first frame; frame numbers wrap.
    first_frame: u64,
    arrived: u64,
    /// Number of frames dropped before they were on a backlog.
    dropped: u64,
    /// Number of these that were refused for want of memory.
    refused: u64,
    /// Number of frames lost with a CPU's batch.
    lost: u64,
    hold_max: usize,
    epoch: u32,
    coalesce: Coalesce,
}

struct Cpu {
    delivery: Delivery,
    pool: Pool,
    /// Number of packets taken from the backlog and not processed yet.
    in_hand: usize,
    /// Configuration of coalescing at delivery.
    coalesce: Option<CoalesceConfig>,
}

impl Rig {
    fn new(knobs: &Knobs) -> Self {
        let batch_max = 1 + u32::from(knobs.batch_max % 64);
        let mut intake = Intake::new(intake_config(knobs, batch_max));
        if knobs.load & HAS_BOARD > 0 {
            intake.set_board(Arc::new(BalanceBoard::new(2, CPUS)));
        }
        if knobs.load & BALANCES > 0 {
            intake.set_balance(BALANCE, 0);
        }
        let mut shares = vec![Vec::new(); CPUS];
        shares[POLLING].push(CHUNKS);
        let pools = carve(Region::allocate(region_bytes(&shares)), &shares).expect("large enough");
        let start = Position(knobs.start);
        let cpus = (0..).map(CpuId).zip(pools).map(|(cpu, pool)| {
            let lane = intake.connect(cpu, 1 << (knobs.capacity_log % 8), start, true);
            Cpu {
                delivery: Delivery::new(cpu, vec![lane], batch_max as usize),
                pool,
                in_hand: 0,
                coalesce: None,
            }
        });
        Self {
            cpus: cpus.collect(),
            intake,
            application: Application {
                last: [None; 256],
                handled: 0,
                positions: [start; CPUS],
                loads: [CpuLoad::default(); CPUS],
            },
            burst: Burst::default(),
            now_ns: 0,
            busy_ns: 0,
            sock_flows: Arc::new(SockFlowTable::new(0, CPUS)),
            keys: 0,
            shown: 0,
            first_frame: knobs.start.into(),
            arrived: 0,
            dropped: 0,
            refused: 0,
            lost: 0,
            hold_max: usize::from(knobs.hold_max).max(1), // one packet may always be held
            epoch: 0,
            coalesce: Coalesce::default(),
        }
    }

    fn step(&mut self, step: Step) {
        self.epoch += 1;
        match step {
            Step::Receive { count, flow, flows, wait_us, busy } => {
                let wait_ns = u64::from(wait_us) * 1000;
                self.now_ns += wait_ns;
                self.busy_ns += if busy { wait_ns } else { 0 };
                for packet in 0..count % BURST_MAX {
                    self.receive(flow.wrapping_add(packet % (flows % 16 + 1)));
                }
                self.turn(if busy { PollStatus::MorePending } else { PollStatus::Drained });
            }
            Step::Take { cpu } => self.take(usize::from(cpu) % CPUS),
            Step::Process { cpu } => self.process(usize::from(cpu) % CPUS),
            Step::RpsCpus { mask } => {
                // The upper half of the mask names CPUs that do not exist.
                let cpus = (0..8).filter(|cpu| mask >> cpu & 1 == 1).map(CpuId);
                self.intake.set_rps_cpus(cpus, self.epoch);
            }
            Step::MaxBacklog { packets } => {
                self.intake.set_netdev_max_backlog(packets.into(), self.epoch);
            }
            Step::FlowLimit { on } => {
                let limit = if on { FlowLimit::new(16) } else { None };
                self.intake.set_flow_limit(limit, self.epoch);
            }
            Step::Coalesce { on, deliver, timeout_us, descriptors } => {
                self.coalesce = Coalesce {
                    is_on: on,
                    at: if deliver { CoalesceAt::Deliver } else { CoalesceAt::Arrive },
                    config: CoalesceConfig {
                        descriptors: descriptors.into(),
                        gro_flush_timeout_ns: u64::from(timeout_us) * 1000,
                        ..CoalesceConfig::default()
                    },
                    napi_defer_hard_irqs: 0,
                };
                self.intake.set_coalesce(self.coalesce.on_arrival(), self.epoch);
            }
            Step::Application { flow, cpu } => {
                // One of the five CPUs does not exist.
                let cpu = CpuId(u16::from(cpu % 5));
                self.sock_flows.record(self.hash_of(flow), cpu);
            }
            Step::SockFlows { entries_log, followed } => {
                let table = SockFlowTable::new(1 << (entries_log % 10), CPUS);
                table.carry_over(&self.sock_flows);
                self.sock_flows = Arc::new(table);
                let followed = followed.then(|| Arc::clone(&self.sock_flows));
                self.intake.set_sock_flows(followed, self.epoch);
            }
            Step::FlowCnt { rps_flow_cnt } => {
                self.intake.set_rps_flow_cnt(rps_flow_cnt.into(), self.epoch);
            }
            Step::Rekey => {
                self.keys += 1;
                self.intake.set_hasher(Arc::new(Hasher::keyed(&[8; 16], false)), self.epoch);
            }
            Step::Running { mask } => {
                let cpus = (0..8).filter(|cpu| mask >> cpu & 1 == 1).map(CpuId);
                self.intake.set_running(cpus, self.epoch);
            }
            Step::Polling { cpu } => {
                self.intake.set_polling_cpu(CpuId(u16::from(cpu % 4)), self.epoch);
            }
            Step::Lose { cpu } => self.lose(usize::from(cpu) % CPUS),
        }
    }

    /// Hash of a flow, all over the range, so that neighbouring flows share slots or are separated
    /// by masks; a new key changes all hashes.
    fn hash_of(&self, flow: u8) -> FlowHash {
        FlowHash((u32::from(flow) * 0x0101_0101).rotate_left(3 * self.keys))
    }

    /// Receives one frame, with the device's hash and a checksum that it found correct; for flow 0
    /// an empty frame.
    fn receive(&mut self, flow: u8) {
        let bytes = match flow {
            0 => Vec::new(),
            _ => stamped_udp(flow.into(), self.arrived, PAYLOAD_BYTES, false),
        };
        let wire_len = u32::try_from(bytes.len()).expect("short");
        let arrival = Arrival::of_frame(self.first_frame + self.arrived);
        self.arrived += 1;
        let Some(mut frame) = self.cpus[POLLING].pool.allocate(wire_len) else {
            let refused = RefusedFrame { arrival, wire_len, reason: DropReason::NoBuffer };
            self.refused += 1;
            return self.burst.refused.push(refused);
        };
        frame.copy_from(&bytes);
        let packet = Packet::received(frame, arrival, wire_len, Link::Ethernet);
        let headers = Headers { l4_checksum: Checksum::Good, ..packet.headers };
        self.burst.packets.push(Packet { hash: self.hash_of(flow), headers, ..packet });
    }

    fn turn(&mut self, status: PollStatus) {
        self.burst.poll_status = status;
        self.intake.observe();
        let segments = |packet: &Packet| u64::from(packet.segment_count());
        let show = |packets: &[Packet]| self.shown += packets.iter().map(segments).sum::<u64>();
        let pool = &mut self.cpus[POLLING].pool;
        if self.intake.is_load_due(self.now_ns) {
            let mut loads = self.application.loads;
            loads[POLLING].busy_ns += self.busy_ns;
            loads[POLLING].frames = self.arrived;
            self.intake.follow_load(self.now_ns, &loads);
        }
        let woken = self.intake.turn_with_tap(self.now_ns, &mut self.burst, pool, show);
        let mut woken: Vec<_> = woken.collect();
        let wake_ups = woken.len();
        woken.sort_unstable();
        woken.dedup();
        assert_eq!(woken.len(), wake_ups, "a CPU is woken once a burst");
        assert!(self.burst.is_empty());
        for dropped in self.intake.drain_dropped() {
            self.dropped +=
                dropped.packet.as_ref().map_or(1, |packet| packet.segment_count().into());
            if let Some(packet) = dropped.packet {
                self.cpus[POLLING].pool.put(packet.frame);
            }
        }
    }

    fn take(&mut self, cpu: usize) {
        let cpu = &mut self.cpus[cpu];
        if cpu.in_hand == 0 {
            cpu.follow(&self.coalesce);
            cpu.in_hand = cpu.delivery.take(usize::MAX);
            cpu.delivery.coalesce();
        }
    }

    fn process(&mut self, cpu: usize) {
        let cpu = &mut self.cpus[cpu];
        if std::mem::take(&mut cpu.in_hand) > 0 {
            cpu.delivery.handle(&mut cpu.pool, &mut self.application);
            cpu.delivery.complete(&mut cpu.pool);
            cpu.pool.flush();
        }
    }

    fn lose(&mut self, at: usize) {
        let cpu = &mut self.cpus[at];
        let in_hand = std::mem::take(&mut cpu.in_hand);
        let (_, lost) = cpu.delivery.abandon_batch().expect("it has a lane");
        for dropped in lost {
            let packet = dropped.packet.expect("no handler has taken it out");
            self.lost += u64::from(packet.segment_count());
            cpu.pool.put(packet.frame);
        }
        cpu.pool.flush();
        let position = &mut self.application.positions[at];
        *position = position.plus(u32::try_from(in_hand).expect("a batch"));
    }

    /// Checks conservation of frames, and the limits on waiting packets.
    fn account(&mut self) {
        let (queued, held) = (u64::from(self.intake.queued()), self.intake.held());
        assert!(held <= self.hold_max);
        let waiting = self.arrived - self.application.handled - self.lost - self.dropped;
        assert_eq!(self.cpus[POLLING].pool.in_use() as u64, waiting, "what waits is in memory");
        let counters = self.intake.counters();
        assert_eq!(counters.frames.get(), self.arrived);
        assert_eq!(counters.dropped(), self.dropped);
        // Backlogs and holds count packets, which have one frame each or more.
        let on_backlogs = counters.enqueued() - self.application.handled - self.lost;
        assert!(queued <= on_backlogs && (queued > 0) == (on_backlogs > 0));
        let not_yet = (held + self.intake.coalescing()) as u64;
        let before_backlogs = waiting - on_backlogs;
        assert!(not_yet <= before_backlogs && (not_yet > 0) == (before_backlogs > 0));
    }

    /// Runs every CPU without new packets until nothing waits. A turn that begins with empty
    /// backlogs releases at least one held packet; two more turns may pass until the intake sees
    /// that they are empty, and two more for a fence.
    fn drain(&mut self, held_max: usize) {
        let mut turns = 0;
        while self.waits() {
            assert!(turns <= held_max + 4, "packets wait for ever");
            turns += 1;
            for cpu in 0..CPUS {
                self.process(cpu);
                self.cpus[cpu].follow(&self.coalesce);
                let Cpu { delivery, pool, .. } = &mut self.cpus[cpu];
                delivery.turn(usize::MAX, pool, &mut self.application);
                pool.flush();
            }
            self.turn(PollStatus::Last);
            self.account();
        }
        assert!(self.cpus.iter_mut().all(|cpu| cpu.pool.in_use() == 0), "all frames are home");
        assert_eq!(self.shown, self.arrived - self.refused, "each has left coalescing once");
        let lost = self.cpus.iter().map(|cpu| cpu.delivery.counters().lost.get());
        assert_eq!(lost.sum::<u64>(), self.lost);
        // A fence that no packet waits for is still checked.
        (0..2).for_each(|_| self.turn(PollStatus::Last));
        for flow in 0..=u8::MAX {
            let state = self.intake.state_of(self.hash_of(flow));
            assert!(!state.is_fenced && state.held.is_none() && state.ahead == 0, "{state:?}");
        }
    }

    fn waits(&mut self) -> bool {
        self.intake.queued() > 0 || self.intake.held() > 0 || self.intake.coalescing() > 0
    }
}

impl Cpu {
    fn follow(&mut self, coalesce: &Coalesce) {
        if self.coalesce != coalesce.on_delivery() {
            self.coalesce = coalesce.on_delivery();
            self.delivery.set_coalesce(self.coalesce);
        }
    }
}

fn intake_config(knobs: &Knobs, batch_max: u32) -> IntakeConfig {
    IntakeConfig {
        queue: RxQueue(0),
        cpus: CPUS,
        verify: Verify::Nothing,
        completes_checksums: false,
        hasher: Arc::new(Hasher::keyed(&[7; 16], false)),
        coalesce: None,
        steer: SteerConfig {
            polling_cpu: CpuId(0),
            rps_flow_cnt: 1 << (knobs.rps_flow_log % 8),
            move_after: MoveAfter { packets: knobs.move_after.into(), time_ns: 1_000_000 },
            hold_max: knobs.hold_max.into(),
            spread: match knobs.load & ALWAYS {
                0 => SpreadPolicy::WhenBusy,
                _ => SpreadPolicy::Always,
            },
            batch_max,
        },
        netdev_max_backlog: 50,
    }
}

/// Flow that a frame is stamped with, the first one of a merged packet; 0 for an empty frame.
fn flow_of(packet: &Packet) -> usize {
    const FLOW_LAST_BYTE: usize = 14 + 20 + 8 + 7;
    packet.frame.data().get(FLOW_LAST_BYTE).copied().unwrap_or(0).into()
}

/// Checks everything that is delivered.
struct Application {
    /// Last packet of each flow.
    last: [Option<Arrival>; 256],
    handled: u64,
    /// Position up to which each backlog has been handled: the tail after its last handled packet.
    positions: [Position; CPUS],
    /// Work of each CPU by its packets.
    loads: [CpuLoad; CPUS],
}

impl Handler for Application {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        // Each packet that was on the backlog has its note, even if it was then merged behind
        // another.
        let position = &mut self.positions[batch.cpu.index()];
        for note in batch.notes {
            *position = position.plus(1);
            assert_eq!(note.position, *position);
        }
        for packet in batch.packets.iter() {
            assert!(batch.note_of(packet.arrival).is_some());
            let flow = flow_of(packet);
            let (load, work_ns) = (&mut self.loads[batch.cpu.index()], PACKET_NS[flow % 4]);
            load.busy_ns += work_ns;
            load.delivering_ns += work_ns;
            load.packets += 1;
            for segment in packet.segments() {
                let last = self.last[flow].replace(segment.arrival);
                assert!(
                    last.is_none_or(|last| segment.arrival.is_after(last)),
                    "{segment:?} of {packet:?} overtaken by {last:?}"
                );
                self.handled += 1;
            }
        }
    }
}
