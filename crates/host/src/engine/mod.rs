//! The engine: one pinned thread for each CPU, or one seeded scheduler in place of them all.
//!
//! A CPU turns the intakes of the queues it polls, then its delivery, sixty-four packets each,
//! and sleeps when there is nothing to do. [`live`] runs that on threads; [`stepped`] runs the
//! same turns on one thread, in an order that a seed determines.

mod bell;
mod changes;
mod config;
mod flows;
mod idle;
mod limits;
mod live;
pub mod log;
mod mailbox;
mod outcome;
mod question;
mod queue;
mod settings;
mod shared;
mod stepped;
mod worker;

use std::sync::Arc;

use mem::pool::{ChunkClass, LOT_FRAMES, carve, region_bytes};
use mem::{Pool, Position};
use path::backlog::Lane;
use path::intake::{DEV_WEIGHT, IntakeConfig};
use path::steer::{RPS_FLOW_CNT, SteerConfig};
use path::{CpuId, Delivery, Handler, Intake, RxQueue, Source};

use crate::clock::Clock;
use crate::control::Control;
use crate::control::cpus::MAX_CPUS;
use crate::error::{Error, Result};
use crate::sys;
pub use changes::CHANGES_MAX;
pub use config::{Config, WhenFull};
pub use flows::Flows;
pub use idle::SPIN_MAX_NS;
pub use limits::{BURST_MAX, DEFER_MAX, Limits};
pub use live::PANICS_IN_A_ROW;
pub use outcome::{CpuOutcome, Outcome};
pub use question::Explained;
pub(crate) use question::Question;
use queue::Queue;
pub use settings::{QueueSettings, Settings};
use shared::Counters;
pub(crate) use shared::Shared;
pub use stepped::VirtualCosts;
use worker::{Deaths, Life, Worker};

/// An engine, ready to run.
pub struct Engine<H> {
    workers: Vec<Worker<H>>,
    shared: Arc<Shared>,
}

impl<H: Handler + 'static> Engine<H> {
    /// Builds an engine: one rx queue for each source, polled by the CPUs in turn, and one handler
    /// for each CPU. A handler outlives the threads of its CPU: if it panics, the batch that it had is
    /// lost, and the next thread hands it the next one.
    ///
    /// # Errors
    /// When there are no CPUs, no memory for the packets, or the script says what cannot be.
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
        for scripted in config.script.changes() {
            shared.check(&scripted.change).map_err(|refused| {
                let (what, why) = (scripted.change.knob(), refused.to_string());
                Error::Setting { what, value: scripted.change.value(MAX_CPUS), why }
            })?;
        }
        let (mut frames, returns) = pools(config, sources.len())?;
        let mut queues: Vec<Vec<Queue>> = cpus.iter().map(|_| Vec::new()).collect();
        let mut lanes: Vec<Vec<Lane>> = cpus.iter().map(|_| Vec::new()).collect();
        for (index, (source, pool)) in sources.into_iter().zip(frames.drain(..)).enumerate() {
            let polling = index % cpus.len();
            let (queue, queue_lanes) = open_queue(config, index, (source, pool), &shared);
            queues[polling].push(queue);
            for (lane, lanes) in queue_lanes.into_iter().zip(&mut lanes) {
                lanes.push(lane);
            }
        }
        let mut counters: Vec<_> = queues.iter().flatten().map(Queue::counted).collect();
        counters.sort_by_key(|(queue, _)| *queue);
        let workers = cpus.iter().zip(queues).zip(lanes).zip(returns).enumerate().map(
            |(index, (((&cpu, queues), lanes), returns))| {
                let own = (queues, lanes, returns);
                open_worker(config, (cpu, index), own, handler(cpu), &shared)
            },
        );
        let workers: Vec<_> = workers.collect();
        shared.set_counters(Counters {
            queues: counters.into_iter().map(|(_, counters)| counters).collect(),
            cpus: workers.iter().map(|worker| Arc::clone(worker.delivery.counters())).collect(),
        });
        Ok(Self { workers, shared })
    }

    /// What changes the engine while it runs, and tells how it stands.
    #[must_use]
    pub fn control(&self) -> Control {
        Control::new(Arc::clone(&self.shared))
    }

    /// What applications record in where they run, for RFS.
    #[must_use]
    pub fn flows(&self) -> Flows {
        self.shared.flows()
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
    /// When a thread cannot be started, one panics outside of its handler, or a handler panics
    /// [`PANICS_IN_A_ROW`] times without handling a batch between. What goes wrong with a source, and
    /// which threads were replaced, is part of the outcome.
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

/// Makes a queue, and the other ends of its backlogs in the order of the CPUs. CPUs poll the queues
/// in turn.
fn open_queue(
    config: &Config,
    index: usize,
    source: (Box<dyn Source>, Pool),
    shared: &Shared,
) -> (Queue, Vec<Lane>) {
    let queue = RxQueue(u16::try_from(index).unwrap_or(u16::MAX));
    let cpus = config.cpus.cpus();
    let polling_cpu = config.polls(index);
    let has_rfs = config.rps_flow_cnt > 0;
    let mut intake = Intake::new(IntakeConfig {
        queue,
        cpus: config.cpu_count(),
        verify: config.verify,
        hasher: Arc::clone(&config.hasher),
        coalesce: config.coalesce.on_arrival(),
        steer: SteerConfig {
            polling_cpu,
            rps_flow_cnt: if has_rfs { config.rps_flow_cnt } else { RPS_FLOW_CNT },
            move_after: config.move_after,
            hold_max: config.hold_max,
            spread: config.spread,
            batch_max: config.batch_max,
        },
        netdev_max_backlog: config.netdev_max_backlog,
    });
    let (capacity, start) = (config.backlog_capacity(), Position(config.start_counters));
    let noted = config.trace.is_some();
    let lanes = cpus.iter().map(|&cpu| intake.connect(cpu, capacity, start, noted)).collect();
    intake.set_rps_cpus(config.rps_cpus.cpus().iter().copied(), 0);
    intake.set_sock_flows(shared.flows().table(), 0);
    if !has_rfs {
        intake.set_rps_flow_cnt(0, 0);
    }
    let mut queue = Queue::new(intake, source, polling_cpu, config, shared.follower());
    config.explain.iter().for_each(|&flow| queue.watch(flow));
    (queue, lanes)
}

/// Makes what belongs to one CPU, from its queues, its ends of all backlogs, and its way to send
/// frames home.
fn open_worker<H: Handler>(
    config: &Config,
    (cpu, index): (CpuId, usize),
    (queues, lanes, returns): (Vec<Queue>, Vec<Lane>, Pool),
    handler: H,
    shared: &Arc<Shared>,
) -> Worker<H> {
    let mut delivery = Delivery::new(cpu, lanes, config.batch_max as usize);
    delivery.set_coalesce(config.coalesce.on_delivery());
    Worker {
        cpu,
        index,
        queues,
        returns,
        delivery,
        handler,
        changes: shared.follower(),
        coalesce: config.coalesce,
        limits: config.limits,
        heir: None,
        budget: config.limits.budget(0),
        now_ns: 0,
        first_queue: 0,
        backlogs_first: false,
        life: Life::default(),
        deaths: Deaths::default(),
        trace: config.intake_trace(),
        shared: Arc::clone(shared),
    }
}

/// Packet memory: for each queue, chunks enough for all that can be under way from it, fewer of the
/// large ones. The CPUs own none, and send home what they deliver.
fn pools(config: &Config, queues: usize) -> Result<(Vec<Pool>, Vec<Pool>)> {
    let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let per_cpu = config.backlog_capacity() + config.batch_max + narrow(LOT_FRAMES);
    let cpus = config.cpus.cpus().len();
    let per_queue = narrow(cpus).saturating_mul(per_cpu).saturating_add(config.hold_max);
    let mut shares = vec![chunk_classes(per_queue); queues];
    shares.resize(queues + cpus, Vec::new());
    let region = sys::map_packet_memory(region_bytes(&shares))?;
    let mut frames = carve(region, &shares).map_err(|error| Error::Memory {
        bytes: error.need_bytes,
        source: std::io::Error::other(error),
    })?;
    let returns = frames.split_off(queues);
    Ok((frames, returns))
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
