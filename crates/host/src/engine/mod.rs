//! The engine: one pinned thread for each CPU, or one seeded scheduler in place of them all.
//!
//! A CPU turns the intakes of the queues it polls, then its delivery, sixty-four packets each,
//! and sleeps when there is nothing to do. [`live`] runs that on threads; [`stepped`] runs the
//! same turns on one thread, in an order that a seed determines.

mod bell;
mod changes;
mod idle;
mod live;
mod log;
mod queue;
mod shared;
mod stepped;
mod worker;

use std::sync::Arc;

use mem::pool::{ChunkClass, LOT_FRAMES, carve, region_bytes};
use mem::{Pool, Position};
use path::backlog::{Lane, NETDEV_MAX_BACKLOG};
use path::counters::{DeliveryCounters, IntakeCounters};
use path::hash::Hasher;
use path::intake::{DEV_WEIGHT, IntakeConfig};
use path::parse::Verify;
use path::steer::{HOLD_MAX, MoveAfter, RPS_FLOW_CNT, SpreadPolicy, SteerConfig};
use path::{CpuId, Delivery, Handler, Intake, RxQueue, Source};

use crate::clock::Clock;
use crate::control::{Change, Coalesce, CpuList, Script};
use crate::error::{Error, Result};
use crate::sys;
use crate::trace::{IntakeTrace, Trace};
use changes::Follower;
pub use idle::SPIN_MAX_NS;
use queue::Queue;
use shared::Shared;
pub use stepped::VirtualCosts;
use worker::Worker;

/// The most packets that a backlog ring can be made for.
pub const BACKLOG_CAPACITY_MAX: u32 = 1 << 20;

/// What an engine is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// The CPUs it runs on, one thread each. The first ones poll the queues.
    pub cpus: CpuList,
    /// The CPUs that packets go to: `rps_cpus` of every queue.
    pub rps_cpus: CpuList,
    /// How flows are hashed.
    pub hasher: Arc<Hasher>,
    /// Whether checksums are verified.
    pub verify: Verify,
    /// How packets are coalesced at first, if they are.
    pub coalesce: Coalesce,
    /// Slots of each queue's flow table.
    pub rps_flow_cnt: u32,
    /// When a held move begins.
    pub move_after: MoveAfter,
    /// Packets of a queue that may be held at once.
    pub hold_max: u32,
    /// When packets leave the polling CPU.
    pub spread: SpreadPolicy,
    /// Packets that a backlog takes.
    pub netdev_max_backlog: u32,
    /// Packets that a CPU takes in hand at once.
    pub batch_max: u32,
    /// Where all head and tail counters begin.
    pub start_counters: u32,
    /// What changes during the run.
    pub script: Script,
    /// What a full backlog does to the source.
    pub when_full: WhenFull,
    /// How long a CPU looks for work before it sleeps, at most.
    pub spin_max_ns: u64,
    /// Where the run is traced.
    pub trace: Option<Arc<Trace>>,
}

/// What a full backlog does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhenFull {
    /// The source waits: a capture has time. Not while a CPU is paused.
    #[default]
    Wait,
    /// Packets are dropped: a device does not wait.
    Drop,
}

impl Config {
    /// The defaults, on these CPUs.
    #[must_use]
    pub fn new(cpus: CpuList, hasher: Arc<Hasher>) -> Self {
        Self {
            rps_cpus: cpus.clone(),
            cpus,
            hasher,
            verify: Verify::Checksums,
            coalesce: Coalesce::default(),
            rps_flow_cnt: RPS_FLOW_CNT,
            move_after: MoveAfter::default(),
            hold_max: HOLD_MAX,
            spread: SpreadPolicy::default(),
            netdev_max_backlog: NETDEV_MAX_BACKLOG,
            batch_max: u32::try_from(DEV_WEIGHT).unwrap_or(u32::MAX),
            start_counters: 0,
            script: Script::default(),
            when_full: WhenFull::default(),
            spin_max_ns: SPIN_MAX_NS,
            trace: None,
        }
    }

    /// Whether packets are ever coalesced like that during the run.
    #[must_use]
    pub fn coalesces(&self, like: impl Fn(&Coalesce) -> bool) -> bool {
        let mut coalesce = self.coalesce;
        let changes = self.script.changes().iter();
        let after = changes.filter_map(|scripted| match scripted.change {
            Change::Coalesce(change) => Some(change),
            _ => None,
        });
        like(&coalesce)
            || after.into_iter().any(|change| {
                coalesce = coalesce.after(change);
                like(&coalesce)
            })
    }

    /// One more than the highest CPU.
    fn cpu_count(&self) -> usize {
        self.cpus.cpus().last().map_or(0, |cpu| cpu.index() + 1)
    }

    /// Slots of each backlog ring: room for the largest limit of the run.
    fn backlog_capacity(&self) -> u32 {
        let limits = self.script.changes().iter().map(|change| match change.change {
            Change::NetdevMaxBacklog(limit) => limit,
            _ => 0,
        });
        let limit = limits.fold(self.netdev_max_backlog, u32::max);
        limit.saturating_add(1).min(BACKLOG_CAPACITY_MAX).next_power_of_two()
    }
}

/// An engine, ready to run.
pub struct Engine<H> {
    workers: Vec<Worker<H>>,
    shared: Arc<Shared>,
}

/// What a run leaves behind.
#[derive(Debug)]
pub struct Outcome<H> {
    /// The handlers, with what they gathered, in the order of the CPUs.
    pub handlers: Vec<H>,
    /// What each queue's intake counted.
    pub queues: Vec<Arc<IntakeCounters>>,
    /// What each CPU did.
    pub cpus: Vec<CpuOutcome>,
    /// How long it took, in engine time.
    pub elapsed_ns: u64,
    /// Packets still queued or held: none after a run that ended.
    pub queued: u64,
    /// Frames that did not come home to their owners: none, or something leaks.
    pub frames_away: usize,
    /// What went wrong with sources, in the order of the queues.
    pub errors: Vec<Error>,
}

/// What one CPU did.
#[derive(Clone, Debug)]
pub struct CpuOutcome {
    /// The CPU.
    pub cpu: CpuId,
    /// What its delivery counted.
    pub delivery: Arc<DeliveryCounters>,
    /// How long it was at work rather than looking for some.
    pub busy_ns: u64,
    /// How often it was woken.
    pub wakeups: u64,
}

impl<H: Handler + 'static> Engine<H> {
    /// Builds an engine: one rx queue for each source, polled by the CPUs in turn, and one handler
    /// for each CPU.
    ///
    /// # Errors
    /// When there are no CPUs, or no memory for the packets.
    pub fn build(
        config: &Config,
        sources: Vec<Box<dyn Source>>,
        clock: Clock,
        mut handler: impl FnMut(CpuId) -> H,
    ) -> Result<Self> {
        let cpus = config.cpus.cpus();
        if cpus.is_empty() {
            return Err(Error::Setting {
                what: "cpus",
                value: String::new(),
                why: "an engine runs on at least one CPU".to_owned(),
            });
        }
        let shared = Arc::new(Shared::new(config, clock, sources.len()));
        let mut queues: Vec<Vec<Queue>> = cpus.iter().map(|_| Vec::new()).collect();
        let mut lanes: Vec<Vec<Lane>> = cpus.iter().map(|_| Vec::new()).collect();
        for (index, source) in sources.into_iter().enumerate() {
            let polling = index % cpus.len();
            let follower = shared.follower();
            let (queue, queue_lanes) = open_queue(config, index, cpus[polling], source, follower);
            queues[polling].push(queue);
            for (lane, lanes) in queue_lanes.into_iter().zip(&mut lanes) {
                lanes.push(lane);
            }
        }
        let pools = pools(config, &queues)?;
        let workers = cpus.iter().zip(queues).zip(lanes).zip(pools).enumerate().map(
            |(index, (((&cpu, queues), lanes), pool))| {
                let mut delivery = Delivery::new(cpu, lanes, config.batch_max as usize);
                delivery.set_coalesce(config.coalesce.on_delivery());
                let (handler, shared) = (handler(cpu), Arc::clone(&shared));
                let (changes, coalesce) = (shared.follower(), config.coalesce);
                Worker { cpu, index, pool, queues, delivery, handler, changes, coalesce, shared }
            },
        );
        Ok(Self { workers: workers.collect(), shared })
    }

    /// What asks a running engine to stop: it takes no more frames, delivers those it has, and
    /// ends.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    /// Runs on one thread for each CPU until every source is exhausted and every packet handled.
    ///
    /// # Errors
    /// When a thread cannot be started, or one panics. What goes wrong with a source is part of
    /// the outcome.
    pub fn run(self) -> Result<Outcome<H>> {
        live::run(self.workers, &self.shared)
    }

    /// Runs on the calling thread, in virtual time, in an order that `seed` determines.
    ///
    /// # Panics
    /// When the engine was built with the machine's clock.
    pub fn run_stepped(self, seed: u64, costs: VirtualCosts) -> Outcome<H> {
        stepped::run(self.workers, &self.shared, seed, costs)
    }
}

/// Asks a running engine to stop.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// Asks it now.
    pub fn stop(&self) {
        self.0.stop();
    }
}

/// Makes a queue's intake, and the other ends of its backlogs in the order of the CPUs.
fn open_queue(
    config: &Config,
    index: usize,
    polling_cpu: CpuId,
    source: Box<dyn Source>,
    changes: Follower,
) -> (Queue, Vec<Lane>) {
    let queue = RxQueue(u16::try_from(index).unwrap_or(u16::MAX));
    let mut intake = Intake::new(IntakeConfig {
        queue,
        cpus: config.cpu_count(),
        verify: config.verify,
        hasher: Arc::clone(&config.hasher),
        coalesce: config.coalesce.on_arrival(),
        steer: SteerConfig {
            polling_cpu,
            rps_flow_cnt: config.rps_flow_cnt,
            move_after: config.move_after,
            hold_max: config.hold_max,
            spread: config.spread,
            batch_max: config.batch_max,
        },
        netdev_max_backlog: config.netdev_max_backlog,
    });
    let (capacity, start) = (config.backlog_capacity(), Position(config.start_counters));
    let noted = config.trace.is_some();
    let cpus = config.cpus.cpus().iter();
    let lanes = cpus.map(|&cpu| intake.connect(cpu, capacity, start, noted)).collect();
    intake.set_rps_cpus(config.rps_cpus.cpus().iter().copied(), 0);
    let trace = config.trace.as_ref().map(|trace| {
        IntakeTrace::new(Arc::clone(trace), Arc::clone(&config.hasher), config.verify)
    });
    (Queue::new(intake, source, polling_cpu, config, trace, changes), lanes)
}

/// Packet memory: for each CPU that polls, chunks enough for all that can be under way from its
/// queues, fewer of the large ones.
fn pools(config: &Config, queues: &[Vec<Queue>]) -> Result<Vec<Pool>> {
    let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let per_cpu = config.backlog_capacity() + config.batch_max + narrow(LOT_FRAMES);
    let cpus = narrow(config.cpus.cpus().len());
    let per_queue = cpus.saturating_mul(per_cpu).saturating_add(config.hold_max);
    let shares: Vec<_> = queues
        .iter()
        .map(|queues| match narrow(queues.len()) {
            0 => Vec::new(),
            count => chunk_classes(per_queue.saturating_mul(count)),
        })
        .collect();
    let region = sys::map_packet_memory(region_bytes(&shares))?;
    carve(region, &shares).map_err(|error| Error::Memory {
        bytes: error.need_bytes,
        source: std::io::Error::other(error),
    })
}

/// Two kilobytes hold a frame of an ordinary network, sixteen a jumbo frame, and the largest
/// chunks any record of a capture.
fn chunk_classes(packets: u32) -> Vec<ChunkClass> {
    const SMALL_BYTES: u32 = 2 << 10;
    const JUMBO_BYTES: u32 = 16 << 10;
    const LARGEST_BYTES: u32 = (crate::device::pcap::MAX_RECORD_BYTES
        + mem::frame::BEFORE_PACKET_BYTES)
        .next_multiple_of(64);
    let burst = 2 * u32::try_from(DEV_WEIGHT).unwrap_or(u32::MAX);
    vec![
        ChunkClass { chunk_bytes: SMALL_BYTES, chunks: packets + burst },
        ChunkClass { chunk_bytes: JUMBO_BYTES, chunks: packets / 2 + burst },
        ChunkClass { chunk_bytes: LARGEST_BYTES, chunks: packets / 16 + burst },
    ]
}
